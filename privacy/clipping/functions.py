"""Clipping functions: how a per-example norm becomes a factor, and over which parameters the norm is taken.

Each reports its own sensitivity, which is what the noise is scaled by; nobody retypes a constant.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Literal

from torch import Tensor

Normaliser = Literal["clip", "normalise"]

STABILITY = 0.01
"""gamma of automatic clipping: the norm is divided by |g| + gamma, so that tiny gradients keep tiny contributions."""

RAMP = 0.01
"""Width, relative to C, of the step from unclipped to clipped; see `unclipped`."""


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


def flat(names: list[str], max_grad_norm: float) -> ClippingFunction:
    """One norm over all parameters, constant bound C (Abadi et al. 2016): the default."""
    return ClippingFunction(dict.fromkeys(names, 0), (max_grad_norm,))


def automatic(names: list[str], max_grad_norm: float) -> ClippingFunction:
    """One norm over all parameters, every gradient normalised to length below C (Bu et al. 2023, arXiv 2206.07136)."""
    return ClippingFunction(dict.fromkeys(names, 0), (max_grad_norm,), "normalise")


def per_layer(names: list[str], max_grad_norm: float) -> ClippingFunction:
    """One norm per layer, bound C / sqrt(number of layers) each, so that the whole is bounded by C again."""
    return grouped(names, max_grad_norm, depth=None)


def grouped(names: list[str], max_grad_norm: float, *, depth: int | None = 1) -> ClippingFunction:
    """One norm per group of equal name prefix, e.g. depth 1: "encoder", "decoder"; None: one per layer."""
    prefixes = [name.rpartition(".")[0] if depth is None else ".".join(name.split(".")[:depth]) for name in names]
    index = {prefix: i for i, prefix in enumerate(dict.fromkeys(prefixes))}
    bound = max_grad_norm / math.sqrt(len(index))
    return ClippingFunction({n: index[p] for n, p in zip(names, prefixes, strict=True)}, (bound,) * len(index))


def unclipped(norm_B: Tensor, bound: float) -> Tensor:
    """(B,) float64, b_i of adaptive clipping: 1 for norms below the bound, 0 above, linear within half a RAMP around it.

    The paper's b_i is the step itself. But the last bit of a norm may depend on an example's place in the micro-batch, and
    so on which others are there: for examples right at C, a step would let one example flip the count of many others.
    """
    return ((1 - norm_B.double() / bound) / RAMP + 0.5).clamp(0, 1)


FUNCTIONS: Mapping[str, Callable[[list[str], float], ClippingFunction]] = {
    "flat": flat,
    "automatic": automatic,
    "per_layer": per_layer,
    "grouped": grouped,
}
"""The functions by the names that plans use. Adaptive clipping is flat at every step; privacy/adaptive_clipping.py moves C."""
