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

That sums do not overflow follows from the choice of f: privacy/plan/lattice.py.
"""

import torch
from torch import Tensor

LARGEST_ENTRY = (1 << 31) - 1
"""Entries k are int32."""
COLUMNS = 1 << 20
"""The most coordinates of a block whose squares are summed at once."""
SATURATED = 1 << 40
MASK = (1 << 32) - 1
BLOCK_NUMBERS = 1 << 18
"""Numbers that are widened to fp64 or int64 at a time: 2 MiB, which stay in a processor's caches."""


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


def _blocks(x_Bn: Tensor) -> list[slice]:
    """Ranges of columns: at most COLUMNS, of about BLOCK_NUMBERS numbers; 64 times as many on CUDA, where launches cost."""
    numbers = BLOCK_NUMBERS * (1 if x_Bn.device.type == "cpu" else 64)
    size = min(COLUMNS, max(1, numbers // max(1, len(x_Bn))))
    return [slice(start, start + size) for start in range(0, x_Bn.shape[1], size)]
