"""Clip factors: how per-example norms become factors, and over which parameters a norm is taken.

Each clipping function reports its own sensitivity, by which the noise is scaled. It must be C: ledger and verify.py accept
no other.
"""

import functools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ..plan.options import OPTIONS, Clipping

Normaliser = Literal["clip", "normalise"]

STABILITY = 0.01
"""gamma of automatic clipping: the norm is divided by |g| + gamma, so that tiny gradients keep tiny contributions."""


@dataclass(frozen=True)
class ClippingFunction:
    """Factors for groups of parameters.

    Attributes:
        group_of: parameter name -> index of its group.
        bounds: L2 bound of each group's part of one example's contribution.
        kind: "clip" gives min(1, C / |g|); "normalise" gives C / (|g| + gamma).
    """

    group_of: Mapping[str, int]
    bounds: tuple[float, ...]
    kind: Normaliser = "clip"

    @property
    def sensitivity(self) -> float:
        """L2 bound of one example's whole contribution."""
        return math.hypot(*self.bounds)

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        """(B,) factor for each example; the norm times it is at most `bound`."""
        if self.kind == "normalise":
            return bound / (norm_B + STABILITY)
        return (bound / norm_B).clamp(max=1)


@functools.cache  # the function of an option is one object, so that it can be recognised
def function_of(option: Clipping) -> Callable[[list[str], float], ClippingFunction]:
    """(names, C) -> the function of an option: one norm per group, bound C / sqrt(number of groups) each, so C for the whole."""

    def make(names: list[str], max_grad_norm: float) -> ClippingFunction:
        groups = [option.group_of(name) for name in names]
        index = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        bound = max_grad_norm / math.sqrt(len(index))
        of_name = {name: index[group] for name, group in zip(names, groups, strict=True)}
        return ClippingFunction(
            of_name, (bound,) * len(index), "normalise" if option.normalises else "clip"
        )

    return make


FUNCTIONS = {
    name: function_of(option)
    for name, option in OPTIONS["clipping_function"].items()
    if isinstance(option, Clipping)
}
"""The functions by the names that plans use."""
flat = FUNCTIONS["flat"]


class MicroBatchStats(NamedTuple):
    """Scalars on the device, computed from private data without noise: they may only go to `private/`."""

    loss_sum: Tensor
    num_examples: Tensor
    num_clipped: Tensor
    num_nonfinite: Tensor
    norm_sum: Tensor
    num_cancelled: Tensor
    """Examples whose own tokens cancel, so that they contribute less than the clipping function says (norms.py)."""


class Factors(NamedTuple):
    """Clip factors of one micro-batch, by group of parameters.

    Attributes:
        blank_B: rows to be zeroed before they are summed.
        is_cancelled_B: rows with smaller factors than their norms ask for.
    """

    norms: list[Tensor]
    weights: list[Tensor]
    is_finite_B: Tensor
    blank_B: Tensor | None
    is_cancelled_B: Tensor

    def stats(self, loss_B: Tensor, is_padding_B: Tensor) -> MicroBatchStats:
        counted_B = ~is_padding_B & self.is_finite_B
        norm_B = torch.linalg.vector_norm(torch.stack(self.norms), dim=0)
        is_clipped_B = (torch.stack(self.weights) < 1).any(0)
        return MicroBatchStats(
            loss_sum=loss_B.float().masked_fill(~counted_B, 0).sum(),
            num_examples=(~is_padding_B).sum(),
            num_clipped=(counted_B & is_clipped_B).sum(),
            num_nonfinite=(~is_padding_B & ~self.is_finite_B).sum(),
            norm_sum=norm_B.masked_fill(~counted_B, 0).sum(),
            num_cancelled=(counted_B & self.is_cancelled_B).sum(),
        )


def factors_of(
    function: ClippingFunction, norms: Sequence[Tensor], loss_B: Tensor, is_padding_B: Tensor
) -> Factors:
    """Returns the factors of a micro-batch: zero for padding, and where a norm or a loss is not finite.

    Args:
        norms: (B,) of each group of parameters, safe to divide by.
    """
    is_finite_B = torch.stack(list(norms)).isfinite().all(0) & loss_B.isfinite()
    excluded_B = is_padding_B | ~is_finite_B
    weights = [
        function.weight(norm_B, bound).masked_fill(excluded_B, 0)
        for norm_B, bound in zip(norms, function.bounds, strict=True)
    ]
    return Factors([*norms], weights, is_finite_B, None, torch.zeros_like(excluded_B))
