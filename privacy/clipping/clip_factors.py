"""Clipping functions: how a per-example norm becomes a factor, and over which parameters the norm is taken.

Each reports its own sensitivity, by which the noise is scaled. It must be C: ledger and verify.py accept no other.
"""

import functools
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

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
flat, automatic, per_layer, grouped = (
    FUNCTIONS[name] for name in ("flat", "automatic", "per_layer", "grouped")
)
