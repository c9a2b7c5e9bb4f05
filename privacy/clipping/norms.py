"""Per-example norms that are safe to divide by.

A norm is computed in floating point, and so is the contribution that is clipped by it. The safe
norm adds bounds for the rounding of both, for underflow and for cancelling tokens, so that
|contribution| <= C (1 + r / 2). docs/sums.md has the proof and defines N, S, E, F, h, k_p and f_p.
"""

import functools
import math
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from ..gradients.per_example_gradients import Contribution, Dense, fold_error, inner, is_short
from ..numerics.precision import Norm
from ..plan.releases import SENSITIVITY_SLACK
from ..sums.grid import MOST_CANCELLED


def rounding(terms: int, dtype: torch.dtype) -> float:
    """Returns e(k), the relative rounding error of a weighted sum of k = `terms` terms."""
    return min(terms, 8 + 4 * math.sqrt(terms)) * unit_roundoff(dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """Returns u."""
    return torch.finfo(dtype).eps / 2


_Entry = tuple[Norm, float, float]
"""The norm of one parameter, or of several together; k_p u; f_p."""


class Totals(NamedTuple):
    """Sums over parameters, all (B,) fp64: N^2, its error bound E, S^2 (gross norm), F^2."""

    squared_B: Tensor
    error_B: Tensor
    gross_squared_B: Tensor
    fold_squared_B: Tensor


@dataclass
class NormTally:
    """Collects the norms of a micro-batch by parameter, and adds them up when all are there.

    Adding up at the end takes a few operations for all parameters, in place of a few for each.
    Sums over parameters are in fp64, because no bound counts how many parameters there are, or how
    often a layer is called.

    Attributes:
        dtype: of the norms and sums that are computed, whose rounding the bounds allow for.
        sum_terms: the length of the longest fp32 sum over tokens and examples.
        short: the gradients of few numbers, in the order of `add`.
    """

    batch_size: int
    device: torch.device
    dtype: torch.dtype
    sum_terms: int = 1
    _entries: list[_Entry] = field(default_factory=list)
    short: list[Dense] = field(default_factory=list)

    def add(self, contributions: list[Contribution]) -> None:
        """Adds one parameter: the norm of the sum of its contributions."""
        self.sum_terms = max(self.sum_terms, max(c.sum_terms for c in contributions))
        if is_short(contributions):
            assert isinstance(contributions[0], Dense)
            self.short.append(contributions[0])
        else:
            self._entries.append(self._entry(contributions))

    def _entry(self, contributions: list[Contribution]) -> _Entry:
        squared_B, gross_B, underflow_B = contributions[0].norm()
        # Gross norms and underflow of a sum are bounded by the sums of those of its contributions.
        if len(contributions) > 1:
            squared_B = squared_B.double()
            gross_B = gross_B.double()
        for i, x in enumerate(contributions[1:], 1):
            norm = x.norm()
            squared_B = squared_B + norm.squared_B
            gross_B = gross_B + norm.gross_B
            underflow_B = underflow_B + norm.underflow_B
            for y in contributions[:i]:
                squared_B = squared_B + 2 * inner(x, y)
        error = max(c.norm_terms for c in contributions) * unit_roundoff(self.dtype)
        largest_fold_error = max(fold_error(c) for c in contributions)
        return Norm(squared_B, gross_B, underflow_B), error, largest_fold_error

    @functools.cached_property
    def joined(self) -> Dense:
        """Returns all of `short`, one behind the other; call it when all are there."""
        return Dense(torch.cat([x.grad_B.flatten(1) for x in self.short], 1))

    @functools.cached_property
    def totals(self) -> Totals:
        """Returns the sums over parameters; call it when all parameters are there."""
        entries = [*self._entries]
        if self.short:
            entries.append(self._entry([self.joined]))
        if not entries:
            zeros = torch.zeros(4, self.batch_size, device=self.device, dtype=torch.float64)
            return Totals(*zeros)
        norms, errors, fold_errors = zip(*entries, strict=True)
        squared, gross, underflow = zip(*norms, strict=True)
        squared_B = torch.stack(squared, 1).sum(1, dtype=torch.float64)
        gross_squared_BP = torch.stack(gross, 1).double().square()
        error_B = (gross_squared_BP * _row(errors, self.device)).sum(1)
        error_B += sum(h**2 for h in underflow if not isinstance(h, Tensor))
        underflow_by_example = [h for h in underflow if isinstance(h, Tensor)]
        if underflow_by_example:
            error_B += torch.stack(underflow_by_example, 1).double().square().sum(1)
        fold_squared_B = torch.zeros_like(error_B)
        if any(fold_errors):
            squares = tuple(fold**2 for fold in fold_errors)
            fold_squared_B = (gross_squared_BP * _row(squares, self.device)).sum(1)
        return Totals(squared_B, error_B, gross_squared_BP.sum(1), fold_squared_B)

    def is_lengthened(self, safe_norm_B: Tensor) -> Tensor:
        """Returns (B,) whether the safe norm passes the computed norm by more than the slack."""
        return safe_norm_B > (1 + SENSITIVITY_SLACK) * self.totals.squared_B.clamp_min(0).sqrt()

    def safe_norm(self) -> Tensor:
        """Returns a (B,) upper bound on norm / (1 + r / 2); infinite or NaN after an overflow."""
        totals = self.totals
        is_finite_B = totals.squared_B.isfinite()
        squared_B = torch.where(is_finite_B, totals.squared_B.clamp_min(0), torch.inf)
        gross_B = totals.gross_squared_B.sqrt()
        sum_error_B = rounding(self.sum_terms, self.dtype) * gross_B
        bound_B = (squared_B + totals.error_B).sqrt() + sum_error_B
        bound_B = torch.maximum(bound_B + totals.fold_squared_B.sqrt(), gross_B / MOST_CANCELLED)
        return torch.maximum(squared_B.sqrt(), bound_B / (1 + SENSITIVITY_SLACK / 2)).to(self.dtype)


@functools.lru_cache(maxsize=64)
def _row(numbers: tuple[float, ...], device: torch.device) -> Tensor:
    """Returns the numbers in fp64 on the device.

    Cached, so that they are copied once: every micro-batch of the same shapes asks for them again.
    """
    return torch.tensor(numbers, dtype=torch.float64, device=device)
