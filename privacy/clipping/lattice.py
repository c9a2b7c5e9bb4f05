"""Clipping in whole numbers: a bound on one example's contribution that no rounding can break.

A contribution is a vector of integers z, which stands for the gradient z 2^-f. Write L = floor(C^2 4^f), with C the exact
rational number that a double is. If |z|^2 <= L then |z 2^-f| <= C, and both sides are numbers that integers compare exactly.
The sum of a logical batch is a sum of integers, so it has no rounding and no order, and zeroing out one example or leaving it
out changes it by that example's z: by at most C. docs/certified.md has the whole chain, from the gradient to epsilon.

**How z is found.** Floating-point clipping scales the written-out gradient, and each entry is rounded to an even number 2 k,
where k is kept as int32. What the floating-point arithmetic gave, right or wrong, NaN or infinite, does not matter from here
on: for *every* vector k of int32 numbers the squared norm q = |k|^2 is computed exactly, and

    z = 2 k  if 4 q <= L,      z = k  (half of it)  if q <= L < 4 q,      z = 0  otherwise,

so |z|^2 <= L in each case. The rule looks at k alone. The second and third cases are nets that ordinary numbers do not fall
into: clipping aims at `Lattice.target`, which is below C by more than what rounding can add.

**No overflow in the norm.** |k_j| <= 2^31, so k_j^2 <= 2^62 fits int64. A block has at most 2^20 coordinates; the low halves of
its squares (below 2^32) sum to less than 2^52, the high halves (at most 2^30) to at most 2^50. After every block the low limb
hands its carry to the high limb, and a high limb above 2^40 becomes 2^40: it stays there, since squares are not negative, and L
is below 2^64, so its own high limb is below 2^32 and such a norm counts as too long. So no intermediate value reaches 2^63, for
any number of coordinates.

**No overflow in the sum.** f is chosen so that (cap + NOISE_ROOM sigma + 1) C 2^f <= 2^62. An entry of z is at most C 2^f,
hence an entry of the sum of `cap` examples, or of any part of it on any rank, at most cap C 2^f. What the noise adds passes
NOISE_ROOM standard deviations with a probability below 10^-880. (An overflow would wrap around, which is a function of the
exact result: it would spoil the update and cost no privacy.) f depends on C, cap and sigma, and on nothing else: neither on the
world nor on the data.

**Accuracy.** Rounding to even numbers moves a gradient of d coordinates by at most sqrt(d) 2^-f, and C 2^f is at least 2^31
wherever the cap is below 2^29, so the loss is below 2^-16 C for a model of a billion parameters. A lattice that is too coarse
is refused.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

import torch
from torch import Tensor

from privacy.errors import PrivacyConfigError

NOISE_ROOM = 64
"""Standard deviations of noise for which the sum has room."""
LARGEST_SUM = 1 << 62
LARGEST_ENTRY = (1 << 31) - 1
"""Entries k are int32."""
COLUMNS = 1 << 20
"""The most coordinates of a block whose squares are summed at once."""
SATURATED = 1 << 40
MASK = (1 << 32) - 1
BLOCK_NUMBERS = 1 << 18
"""Numbers that are widened to fp64 or int64 at a time: 2 MiB, which stay in a processor's caches."""
MARGIN = 2.0**-20
"""Relative distance of `Lattice.target` from C, on top of the rounding of entries: far above what fp64 norms may be wrong by."""
COARSEST = 2.0**-10
"""The most that rounding to the lattice may move a gradient, in units of C."""


@dataclass(frozen=True)
class Lattice:
    """Multiples of 2^-exponent, for contributions of norm at most `bound`.

    Attributes:
        bound: C.
        exponent: f; negative where C is large.
    """

    bound: float
    exponent: int

    @classmethod
    def of(cls, bound: float, cap: int, noise_multiplier: float) -> "Lattice":
        """The finest lattice on which entries and sums fit; see the module docstring.

        Args:
            bound: C, positive and finite.
            cap: the most examples of a logical batch, on all ranks together.
            noise_multiplier: sigma.
        """
        # C = m 2^e with m in [1/2, 1): an entry k of at most C 2^(f - 1) is below 2^31.
        exponent = 32 - math.frexp(bound)[1]
        most = (cap + NOISE_ROOM * Fraction(noise_multiplier) + 1) * Fraction(bound)
        while most * Fraction(2) ** exponent > LARGEST_SUM:
            exponent -= 1
        return cls(bound, exponent)

    @property
    def limit(self) -> int:
        """L = floor(C^2 4^f), below 2^64."""
        return math.floor(Fraction(self.bound) ** 2 * Fraction(4) ** self.exponent)

    def target(self, num_coordinates: int) -> float:
        """The norm to which floating-point clipping scales, so that rounding to the lattice does not pass C.

        Raises:
            PrivacyConfigError: rounding would move a gradient of so many coordinates by more than COARSEST C.
        """
        moved = math.sqrt(num_coordinates) * 2.0**-self.exponent
        if moved > COARSEST * self.bound:
            raise PrivacyConfigError(
                f"privacy.arithmetic = 'certified' would round gradients of {num_coordinates:,} coordinates to a lattice that "
                f"moves them by {moved / self.bound:.2g} C; use a smaller batch (the lattice has to hold the sum of a capped "
                "one), or privacy.arithmetic = 'floating'"
            )
        return (self.bound - moved) * (1 - MARGIN)

    def noise_deviation(self, noise_multiplier: float) -> float:
        """At least sigma C 2^f: the standard deviation of the noise in units of the lattice, rounded up."""
        return math.nextafter(noise_multiplier * self.bound, math.inf) * 2.0**self.exponent  # powers of two are exact


def round_to_even(gradient_Bn: Tensor, scale_B: Tensor, excluded_B: Tensor) -> Tensor:
    """(B, n) int32: k, half of the even number that is nearest to the scaled gradient; zero in excluded rows.

    Args:
        gradient_Bn: fp32, with anything in the excluded rows.
        scale_B: fp64, finite: clip factor times 2^(f - 1).
        excluded_B: bool; rows that contribute zero.
    """
    k_Bn = torch.empty_like(gradient_Bn, dtype=torch.int32)
    for columns in _blocks(gradient_Bn):
        x = gradient_Bn[:, columns].double().mul_(scale_B[:, None])
        x.masked_fill_(excluded_B[:, None], 0)  # not by a factor of zero: 0 * NaN is NaN
        k_Bn[:, columns] = x.round_().clamp_(-LARGEST_ENTRY, LARGEST_ENTRY)
    return k_Bn


class SquaredNorms:
    """q_B = |k|^2 of each example over all parameters, exactly: high_B 2^32 + low_B, low_B in [0, 2^32)."""

    def __init__(self, num_examples: int, device: torch.device) -> None:
        self.high_B = torch.zeros(num_examples, dtype=torch.int64, device=device)
        self.low_B = torch.zeros(num_examples, dtype=torch.int64, device=device)

    def add(self, k_Bn: Tensor) -> None:
        """Adds the squares of one parameter's entries, int32."""
        for columns in _blocks(k_Bn):
            square = k_Bn[:, columns].long()
            square = square.mul_(square)
            low_B = self.low_B + square.bitwise_and(MASK).sum(1)
            high_B = self.high_B + square.bitwise_right_shift_(32).sum(1) + (low_B >> 32)
            self.low_B, self.high_B = low_B & MASK, high_B.clamp_(max=SATURATED)

    def at_most(self, limit: int) -> Tensor:
        """(B,) bool: q <= limit, for 0 <= limit < 2^64."""
        high, low = limit >> 32, limit & MASK
        return (self.high_B < high) | ((self.high_B == high) & (self.low_B <= low))

    def multipliers(self, limit: int) -> Tensor:
        """(B,) int64: m of z = m k, which is 2, 1 or 0."""
        return self.at_most(limit // 4).long() + self.at_most(limit).long()


def add_contributions(total_n: Tensor, k_Bn: Tensor, multiplier_B: Tensor) -> None:
    """total (n,) int64 += sum_b m_b k_b."""
    for columns in _blocks(k_Bn):
        total_n[columns] += (k_Bn[:, columns] * multiplier_B[:, None]).sum(0)


def to_real(values: Tensor, exponent: int) -> Tensor:
    """fp64 numbers that int64 multiples of 2^-exponent stand for; rounded where they have more than 53 bits."""
    return values.double().mul_(2.0**-exponent)


def _blocks(x_Bn: Tensor) -> list[slice]:
    """Ranges of columns: at most COLUMNS, of about BLOCK_NUMBERS numbers; 64 times as many on CUDA, where launches cost."""
    numbers = BLOCK_NUMBERS * (1 if x_Bn.device.type == "cpu" else 64)
    size = min(COLUMNS, max(1, numbers // max(1, len(x_Bn))))
    return [slice(start, start + size) for start in range(0, x_Bn.shape[1], size)]
