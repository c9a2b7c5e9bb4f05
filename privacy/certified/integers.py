"""Clipping in whole numbers: a bound on one example's contribution that no rounding can break.

For any vector k of int32 numbers the squared norm |k|^2 is computed exactly, and decides whether
the contribution is 2 k, k or zero, so that |contribution|^2 <= floor(C^2 4^f). docs/certified.md
has the proof, of the absence of overflow too; privacy/plan/lattice.py chooses f so that sums do not
overflow.
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
"""Numbers that are widened to fp64 or int64 at a time: 2 MiB, which stay in the caches of a CPU."""


def round_to_even(gradient_Bn: Tensor, scale_B: Tensor, excluded_B: Tensor) -> Tensor:
    """Returns k, (B, n) int32: half of the even number that is nearest to the scaled gradient.

    It is zero in excluded rows.

    Args:
        gradient_Bn: fp32, with anything in the excluded rows.
        scale_B: fp64, finite: clip factor times 2^(f - 1).
        excluded_B: bool; rows that contribute zero.
    """
    k_Bn = torch.empty_like(gradient_Bn, dtype=torch.int32)
    for columns in _blocks(gradient_Bn):
        x = gradient_Bn[:, columns].double().mul_(scale_B[:, None])
        # Not by a factor of zero: 0 * NaN is NaN.
        x.masked_fill_(excluded_B[:, None], 0)
        k_Bn[:, columns] = x.round_().clamp_(-LARGEST_ENTRY, LARGEST_ENTRY)
    return k_Bn


class SquaredNorms:
    """Counts q_B = |k|^2 of each example over all parameters, exactly.

    It is high_B 2^32 + low_B, with low_B in [0, 2^32).
    """

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
            self.low_B = low_B & MASK
            self.high_B = high_B.clamp_(max=SATURATED)

    def is_within(self, limit: int) -> Tensor:
        """Returns (B,) whether q <= limit, for 0 <= limit < 2^64."""
        high = limit >> 32
        low = limit & MASK
        return (self.high_B < high) | ((self.high_B == high) & (self.low_B <= low))

    def multipliers(self, limit: int) -> Tensor:
        """Returns (B,) int64: m = 2, 1 or 0, for the contribution m k."""
        return self.is_within(limit // 4).long() + self.is_within(limit).long()


def add_contributions(total_n: Tensor, k_Bn: Tensor, multiplier_B: Tensor) -> None:
    """Adds sum_b m_b k_b to the total, (n,) int64."""
    for columns in _blocks(k_Bn):
        total_n[columns] += (k_Bn[:, columns] * multiplier_B[:, None]).sum(0)


def _blocks(x_Bn: Tensor) -> list[slice]:
    """Returns ranges of at most COLUMNS columns, of about BLOCK_NUMBERS numbers.

    On CUDA, where launches cost, they have 64 times as many.
    """
    numbers = BLOCK_NUMBERS * (1 if x_Bn.device.type == "cpu" else 64)
    num_rows = max(1, len(x_Bn))
    size = min(COLUMNS, max(1, numbers // num_rows))
    return [slice(start, start + size) for start in range(0, x_Bn.shape[1], size)]
