"""Clip factors: how per-example norms become factors, and over which parameters a norm is taken.

Each clipping function reports its own sensitivity, by which the noise is scaled. It must be C: the
ledger and verify.py accept no other.
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
"""gamma of automatic clipping, which divides by |g| + gamma: tiny gradients stay tiny."""


@dataclass(frozen=True)
class ClippingFunction:
    """Holds how norms of groups of parameters become clip factors.

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
        """Returns the L2 bound of one example's contribution over all groups."""
        return math.hypot(*self.bounds)

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        """Returns the (B,) factor of each example; factor times norm is at most `bound`."""
        if self.kind == "normalise":
            return bound / (norm_B + STABILITY)
        return (bound / norm_B).clamp(max=1)


# Cached, so that one option always has the same function object, by which callers recognise it.
@functools.cache
def function_of(option: Clipping) -> Callable[[list[str], float], ClippingFunction]:
    """Returns the function (names, C) -> ClippingFunction of an option.

    Each group has a norm of its own and the bound C / sqrt(number of groups), so that the bound of
    all groups together is C.
    """

    def make(names: list[str], max_grad_norm: float) -> ClippingFunction:
        groups = [option.group_of(name) for name in names]
        index = {group: number for number, group in enumerate(dict.fromkeys(groups))}
        bound = max_grad_norm / math.sqrt(len(index))
        index_of_name = {name: index[group] for name, group in zip(names, groups, strict=True)}
        kind: Normaliser = "normalise" if option.normalises else "clip"
        return ClippingFunction(index_of_name, (bound,) * len(index), kind)

    return make


FUNCTIONS = {
    name: function_of(option)
    for name, option in OPTIONS["clipping_function"].items()
    if isinstance(option, Clipping)
}
"""The functions by the names that plans use."""
flat = FUNCTIONS["flat"]


class MicroBatchStats(NamedTuple):
    """Scalars on the device, computed from private data without noise: only for `private/`."""

    loss_sum: Tensor
    num_examples: Tensor
    num_clipped: Tensor
    num_nonfinite: Tensor
    norm_sum: Tensor
    num_cancelled: Tensor
    """Examples that contribute less than the clipping function says, because their own tokens
    cancel (docs/sums.md)."""


class Factors(NamedTuple):
    """Holds the clip factors of one micro-batch, by group of parameters.

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
        """Returns the statistics of the micro-batch; padding counts in none of them."""
        is_counted_B = ~is_padding_B & self.is_finite_B
        norm_B = torch.linalg.vector_norm(torch.stack(self.norms), dim=0)
        is_clipped_B = (torch.stack(self.weights) < 1).any(0)
        loss_sum = loss_B.float().masked_fill(~is_counted_B, 0).sum()
        num_examples = (~is_padding_B).sum()
        num_clipped = (is_counted_B & is_clipped_B).sum()
        num_nonfinite = (~is_padding_B & ~self.is_finite_B).sum()
        norm_sum = norm_B.masked_fill(~is_counted_B, 0).sum()
        num_cancelled = (is_counted_B & self.is_cancelled_B).sum()
        return MicroBatchStats(
            loss_sum=loss_sum,
            num_examples=num_examples,
            num_clipped=num_clipped,
            num_nonfinite=num_nonfinite,
            norm_sum=norm_sum,
            num_cancelled=num_cancelled,
        )


def factors_of(
    function: ClippingFunction, norms: Sequence[Tensor], loss_B: Tensor, is_padding_B: Tensor
) -> Factors:
    """Returns the factors of a micro-batch: zero for padding and non-finite norms or losses.

    Args:
        norms: (B,) of each group of parameters, safe to divide by.
    """
    is_finite_B = torch.stack(list(norms)).isfinite().all(0) & loss_B.isfinite()
    excluded_B = is_padding_B | ~is_finite_B
    weights = []
    for norm_B, bound in zip(norms, function.bounds, strict=True):
        weight_B = function.weight(norm_B, bound)
        weights.append(weight_B.masked_fill(excluded_B, 0))
    return Factors([*norms], weights, is_finite_B, None, torch.zeros_like(excluded_B))
