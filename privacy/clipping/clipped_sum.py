"""The sum of clipped per-example gradients of a logical batch, accumulated micro-batch by micro-batch.

    sum_i  c_i g_i,     c_i = min(1, C / |g_i|),     |g_i| over all trainable parameters together (flat clipping)

after Abadi et al. 2016 (arXiv 1607.00133), computed by book-keeping (Bu et al. 2022, arXiv 2210.00038) without any weight
gradient that is thrown away: one forward, one backward for activation gradients, then norms and weighted sums from what the
layers recorded. Nothing is communicated; the accumulators are fp32 (fp64 for an fp64 model) and belong to this process.
"""

from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch
from torch import Tensor, nn

from privacy.clipping.contributions import Contribution
from privacy.clipping.coverage import claims
from privacy.clipping.norms import NormTally
from privacy.clipping.recorder import Recorder

Task = Callable[..., Tensor]


class MicroBatchStats(NamedTuple):
    """Scalars on the device, computed from private data without noise: they may only go to `private/`."""

    loss_sum: Tensor
    num_examples: Tensor
    num_clipped: Tensor
    num_nonfinite: Tensor
    norm_sum: Tensor


class ClippedSum:
    """Accumulates the clipped sum for the trainable parameters of a model.

    Guarantee: adding or removing one example changes the sum, as an L2 norm over all parameters, by at most
    `sensitivity * (1 + SENSITIVITY_SLACK)`, whatever the example is: NaN and Inf contribute zero.

    Args:
        model: every trainable parameter must be covered by a clipping rule.
        max_grad_norm: C, the L2 bound of one example's contribution; `inf` switches clipping off (tests, non-private runs).
        shapes: full parameter shapes by name, where the model holds them in shards.

    Raises:
        PrivacyConfigError: a parameter or layer cannot be clipped; the message names it.
    """

    def __init__(self, model: nn.Module, max_grad_norm: float, *, shapes: Mapping[str, torch.Size] | None = None):
        if not max_grad_norm > 0:
            raise ValueError(f"max_grad_norm must be positive, not {max_grad_norm}")
        shapes = shapes or {name: p.shape for name, p in model.named_parameters()}
        self._max_grad_norm = max_grad_norm
        self._recorder = Recorder(claims(model, shapes))
        self._sums = {
            name: torch.zeros(shapes[name], device=p.device, dtype=_sum_dtype(p.dtype))
            for name, p in model.named_parameters()
            if p.requires_grad
        }

    @property
    def sensitivity(self) -> float:
        """L2 change of the sum when one example is added or removed, before the slack for rounding."""
        return self._max_grad_norm

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, this process's part of the clipped sum)."""
        yield from self._sums.items()

    def zero_(self) -> None:
        for total in self._sums.values():
            total.zero_()

    def detach(self) -> None:
        """Removes the hooks from the model."""
        self._recorder.remove()

    def add_micro_batch(self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> MicroBatchStats:
        """Adds the clipped gradients of one micro-batch.

        Args:
            task: `task(**inputs)` returns loss_B, where loss i depends on example i alone.
            inputs: tensors with B rows.
            is_padding_B: bool; True rows contribute exactly zero.
        """
        with torch.enable_grad(), self._recorder.recording(len(is_padding_B)) as root:
            loss_B = task(**inputs)
            if loss_B.shape != is_padding_B.shape:
                raise RuntimeError(f"the task must return one loss per example, not {tuple(loss_B.shape)}")
            torch.autograd.grad(loss_B.sum(), [root], allow_unused=True)
        with torch.no_grad():
            return self._add(self._recorder.contributions(), loss_B.detach(), is_padding_B)

    def _add(
        self, contributions: dict[str, list[Contribution]], loss_B: Tensor, is_padding_B: Tensor
    ) -> MicroBatchStats:
        dtype = next(iter(self._sums.values())).dtype
        tally = NormTally.zeros(len(loss_B), loss_B.device, dtype)
        for parts in contributions.values():
            tally.add(parts)
        norm_B = tally.safe_norm()
        is_finite_B = norm_B.isfinite() & loss_B.isfinite()
        excluded_B = is_padding_B | ~is_finite_B
        weight_B = (self._max_grad_norm / norm_B).clamp(max=1).masked_fill(excluded_B, 0)
        self._accumulate(contributions, weight_B, ~is_finite_B)
        return _stats(loss_B, norm_B, weight_B, is_padding_B, is_finite_B)

    def _accumulate(
        self, contributions: dict[str, list[Contribution]], weight_B: Tensor, is_nonfinite_B: Tensor
    ) -> None:
        # A zero weight does not silence a NaN (0 * NaN is NaN), so the rare bad rows are blanked first.
        blank = bool(is_nonfinite_B.any())
        for name, parts in contributions.items():
            for part in parts:
                total = self._sums[name]
                matrix = total.view(total.shape[0], -1) if total.dim() > 1 else total
                (part.without(is_nonfinite_B) if blank else part).add_weighted(weight_B, matrix)


def _sum_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype == torch.float64 else torch.float32


def _stats(
    loss_B: Tensor, norm_B: Tensor, weight_B: Tensor, is_padding_B: Tensor, is_finite_B: Tensor
) -> MicroBatchStats:
    counted_B = ~is_padding_B & is_finite_B
    return MicroBatchStats(
        loss_sum=loss_B.float().masked_fill(~counted_B, 0).sum(),
        num_examples=(~is_padding_B).sum(),
        num_clipped=(counted_B & (weight_B < 1)).sum(),
        num_nonfinite=(~is_padding_B & ~is_finite_B).sum(),
        norm_sum=norm_B.masked_fill(~counted_B, 0).sum(),
    )
