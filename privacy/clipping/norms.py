"""Per-example norms that are safe to divide by, and the clip factors of a micro-batch that follow from them.

The norm of example b is computed in floating point, and so is its clipped contribution. Contract 4 wants
|contribution_b| <= C (1 + r) in spite of that. Write n for the exact norm of the gradient that the stored tensors define,
N^2 for the computed squared norm, S for the gross norm (what the norm would be if no tokens cancelled) and u for the unit
roundoff. Then

    |N^2 - n^2|                      <= E   = sum over parameters of  k_p u S_p^2 + h_p^2       (Gram matrices)
    |summation error of the example| <= e(BT) S                                                 (the weighted sum)
    |folding error of the example|   <= F   = sqrt(sum over parameters of  (f_p S_p)^2)         (bf16 on CUDA only)

so that dividing by  safe = max(N, (sqrt(N^2 + E) + e(BT) S + F) / (1 + r / 2))  gives

    |contribution| <= C (n + e(BT) S + F) / safe <= C (1 + r / 2).

safe is also at least S / MOST_CANCELLED: tokens that cancel carry the partial sums of a matrix product away and back again, and
how all others round there depends on their size. Ordinary examples have S of 1 to 6 N. One with S > 32 N contributes less than
the clipping function says, and statistics count it (`MicroBatchStats.num_cancelled`). Gradients of small parameters are written
out (`ClippedSum`), and then S is N.

h is what underflow may hide (precision.py); overflow makes safe infinite or NaN, and the example is left out. e(BT) belongs to
fp32 sums, of at most EXAMPLES_PER_SUM examples. The other half of r is for the rounding of all additions against the
contributions of others (sums/grid.py: 3 r / 8 and r / 8).

F: the weighted sum of bf16 tensors on CUDA multiplies one operand, say g, by the factor c and rounds to bf16. Entry by entry
the rounding moves c g_t by at most u' = 2^-8 of itself, hence the token's vector by at most u' c |g_t|, and the example's sum
of outer products by at most u' c sum_t |g_t| |a_t| = u' c S_p. That is a worst case, not a statistical one: who chooses an
example chooses how it rounds. `fold_error` is f_p. Parameters are different coordinates, so their errors add in squares.
ViT-S, whose S is 1.4 N, is clipped 0.5 % below C by it, and DP-Cap's captioner, whose S is 5.4 N, 2.1 %, as if sigma were so
much larger; without its vocabulary head it would be 0.8 %. (The rounding itself, measured, would be no bound: it depends on c,
and c would depend on it.)

For ordinary examples E is below r N^2, safe equals N to the last bit, and nothing is lost. Where tokens cancel
(activations with a common mean), N^2 can be wrong by several per cent; there the second term takes over and the example is
clipped a little more than needed, which costs no privacy.

**Norms are a worst case** (Higham 2002, section 3.1), whatever the order in which a kernel adds up: a term of the squared norm
passes through at most k roundings (`norm_terms`), each of at most u. No sum of a kernel is longer than TERMS_PER_SUM terms, and
what such sums give is added one after the other, or in fp64. So k = k(d) + k(p) + 2 T + 3 for a Gram matrix over d inputs, one
over p outputs and their products over T tokens, with k(d) = d, or TERMS_PER_SUM + d / TERMS_PER_SUM where that is less; second
orders are below 1e-6. Matrix units, which multiply bf16 on CUDA, cut addends off where they align them, by up to 17 units in
the last place of the largest for 16 products, as measured on some of them; no vendor documents it. There each product counts
as four roundings, which is an assumption and no theorem; `make gpu` looks for counterexamples. On ViT-S this clips nothing more
than a bound in sqrt(k) would, and on DP-Cap's captioner 0.06 % more on CPU, and 0.3 % on matrix units.

Norms of parameters are added up when all of them are there, in fp64, in whatever order: a thousand additions are off by 1e-13,
where E allows for 1e-5 and more. Gradients of few numbers (`is_short`) are laid one behind the other first and count as one
parameter. Nothing above is about parameters as such: a vector of n numbers has no tokens that could cancel, so its S is its
norm, and its k is that of n terms.

**The weighted sum is a product over examples and tokens together**, whose order of additions is the one assumption that
sums/grid.py makes anyway. There e(k) = (8 + 4 sqrt(k)) u, or k u where that is less: the usual statistical bound on the
rounding error of a dot product (Higham and Mary 2019) with a constant that covers blocked and fused-multiply-add kernels. The
worst case k u would clip 0.4 % more on DP-Cap's captioner, and prove nothing without that assumption.

r = SENSITIVITY_SLACK is charged by the accountant (sigma / (1 + r)), so it costs epsilon, not truth.
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
    """e(k): relative rounding error of a weighted sum of `terms` terms."""
    return min(terms, 8 + 4 * math.sqrt(terms)) * unit_roundoff(dtype)


def unit_roundoff(dtype: torch.dtype) -> float:
    """u."""
    return torch.finfo(dtype).eps / 2


_Entry = tuple[Norm, float, float]
"""The norm of one parameter, or of several together; k_p u and f_p of the module docstring."""


class Totals(NamedTuple):
    """Sums over parameters, all (B,) and fp64: squared norm N^2, its error bound E, squared gross norm S^2, F^2."""

    squared_B: Tensor
    error_B: Tensor
    gross_squared_B: Tensor
    fold_squared_B: Tensor


@dataclass
class NormTally:
    """The norms of a micro-batch by parameter, which are added up when all are there: by a few operations, not a few each.

    Sums over parameters are in fp64, because no bound counts how many there are, or how often a layer is called.

    Attributes:
        dtype: of the norms and sums that are computed, whose rounding the bounds allow for.
        sum_terms: the length of the longest fp32 sum over tokens and examples.
        short: the gradients that are kept, in the order of `add`.
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
        squared_B, gross_B, hidden_B = contributions[0].norm()
        if (
            len(contributions) > 1
        ):  # of the sum: gross norms and what underflow hides add up to bounds
            squared_B, gross_B = squared_B.double(), gross_B.double()
        for i, x in enumerate(contributions[1:], 1):
            norm = x.norm()
            squared_B, gross_B, hidden_B = (
                squared_B + norm.squared_B,
                gross_B + norm.gross_B,
                hidden_B + norm.hidden_B,
            )
            for y in contributions[:i]:
                squared_B = squared_B + 2 * inner(x, y)
        rounding = max(c.norm_terms for c in contributions) * unit_roundoff(self.dtype)
        return (
            Norm(squared_B, gross_B, hidden_B),
            rounding,
            max(fold_error(c) for c in contributions),
        )

    @functools.cached_property
    def joined(self) -> Dense:
        """All of `short`, one behind the other; call it when all are there."""
        return Dense(torch.cat([x.grad_B.flatten(1) for x in self.short], 1))

    @functools.cached_property
    def totals(self) -> Totals:
        """Call it when all parameters are there."""
        entries = [*self._entries, *([self._entry([self.joined])] if self.short else [])]
        if not entries:
            return Totals(*torch.zeros(4, self.batch_size, device=self.device, dtype=torch.float64))
        norms, roundings, folds = zip(*entries, strict=True)
        squared, gross, hidden = zip(*norms, strict=True)
        squared_B = torch.stack(squared, 1).sum(1, dtype=torch.float64)
        gross_squared_BP = torch.stack(gross, 1).double().square()
        error_B = (gross_squared_BP * _row(roundings, self.device)).sum(1)
        error_B += sum(h**2 for h in hidden if not isinstance(h, Tensor))
        if by_example := [h for h in hidden if isinstance(h, Tensor)]:
            error_B += torch.stack(by_example, 1).double().square().sum(1)
        fold_squared_B = torch.zeros_like(error_B)
        if any(folds):
            fold_squared_B = (
                gross_squared_BP * _row(tuple(fold**2 for fold in folds), self.device)
            ).sum(1)
        return Totals(squared_B, error_B, gross_squared_BP.sum(1), fold_squared_B)

    def is_lengthened(self, safe_norm_B: Tensor) -> Tensor:
        """(B,) whether the safe norm is longer than the computed one by more than the slack."""
        return safe_norm_B > (1 + SENSITIVITY_SLACK) * self.totals.squared_B.clamp_min(0).sqrt()

    def safe_norm(self) -> Tensor:
        """(B,) upper bound on norm / (1 + r / 2); infinite or NaN where something overflowed."""
        totals = self.totals
        squared_B = torch.where(
            totals.squared_B.isfinite(), totals.squared_B.clamp_min(0), torch.inf
        )
        gross_B = totals.gross_squared_B.sqrt()
        bound_B = (squared_B + totals.error_B).sqrt() + rounding(
            self.sum_terms, self.dtype
        ) * gross_B
        bound_B = torch.maximum(bound_B + totals.fold_squared_B.sqrt(), gross_B / MOST_CANCELLED)
        return torch.maximum(squared_B.sqrt(), bound_B / (1 + SENSITIVITY_SLACK / 2)).to(self.dtype)


@functools.lru_cache(maxsize=64)
def _row(values: tuple[float, ...], device: torch.device) -> Tensor:
    """fp64, copied to the device once: the same model in micro-batches of the same shapes asks for the same numbers."""
    return torch.tensor(values, dtype=torch.float64, device=device)
