"""Integers distributed exactly as round(N(0, deviation^2)), from uniform bits, by comparisons of integers alone.

Statement. Let U, T, V be independent and uniform in [0, 1), s a fair sign, m = 64, w_j = exp(-(j / m)^2 / 2) and
F_j = (w_0 + ... + w_(j - 1)) / (w_0 + w_1 + ...). Take the cell j with F_j <= U < F_(j + 1), let g = T (2 j + T) / (2 m^2), and
begin anew if V < 1 - exp(-g). Otherwise Y = (j + T) / m has the density sqrt(2 / pi) exp(-y^2 / 2) on y >= 0, so s Y is a
standard normal, and s round(deviation Y) has exactly the distribution of round(N(0, deviation^2)). Ties have probability zero.

Proof. The pair (j, T) is proposed with density proportional to w_j and kept with probability exp(-g), and
w_j exp(-g) = exp(-(j^2 + 2 j T + T^2) / (2 m^2)) = exp(-Y^2 / 2). Rounding to nearest commutes with the sign outside ties.

Bits. U, T and V are real numbers of which only the first bits are drawn. A decision is taken when it is the same for every
continuation of these bits, by integer bounds that are proven where they stand; otherwise 64 more bits of each number are drawn.
The result is a function of the three real numbers and the sign, whichever bounds decided it, so it is exact if the bits of the
source are uniform and independent.

Source: the rejection is step N4 of algorithm N in Karney 2016, "Sampling exactly from the normal distribution"
(arXiv 1303.6257), whose numbers of lazily drawn bits (von Neumann 1951) these are. His integer part k, found by trials of
probability exp(-1/2), is here the cell of a grid that is 64 times finer, found by inversion: 1 in 160 proposals
is rejected.
"""

import bisect
import functools
from typing import Protocol

import numpy as np

MOST_DEVIATION = 2.0**50
_M = 64
"""Cells per standard deviation."""
_MOST_WORDS = 16
"""More words of each number are needed with a probability below 2^-1000 for uniform bits."""


class WordSource(Protocol):
    """Draws uniform bits; tests inject their own."""

    def uniform_words(self, count: int) -> np.ndarray:
        """(count,) uint64, uniform, independent of every other draw in any process."""
        ...


def draw_rounded_normal(deviation: float, count: int, source: WordSource) -> np.ndarray:
    """Independent integers, each distributed exactly as round(N(0, deviation^2)); nearest integer, ties have probability zero.

    Args:
        deviation: standard deviation in units of the lattice, taken as the rational number that the double is; 0 draws nothing
            and gives zeros.
        count: how many integers.
        source: uniform bits.

    Returns:
        (count,) int64.

    Raises:
        ValueError: the deviation is negative, not finite or above 2^50, or the count is negative.
        OverflowError: a value left int64, which has a probability below exp(-2^24) a draw.
        RuntimeError: the source's bits decide nothing, which has a probability below 2^-1000 a draw for uniform bits.
    """
    if not 0 <= deviation <= MOST_DEVIATION:
        raise ValueError(
            f"the standard deviation of rounded noise is {deviation}; it must be a number of lattice units from 0 to 2^50"
        )
    if count < 0:
        raise ValueError(f"{count} values of noise are asked for; the number must be 0 or larger")
    out = np.zeros(count, dtype=np.int64)
    if deviation == 0:
        return out
    done = 0
    while done < count:
        u, t, v, sign = (int(word) for word in source.uniform_words(4))
        value = _decide_with_more_bits(deviation, (u, 64), (t, 64), (v, 64), source)
        if value is not None:
            value = -value if sign & 1 else value
            if not -(2**63) <= value < 2**63:
                raise OverflowError(f"a value of noise with a standard deviation of {deviation} left 64 bits")
            out[done] = value
            done += 1
    return out


def _decide_with_more_bits(
    deviation: float, u: tuple[int, int], t: tuple[int, int], v: tuple[int, int], source: WordSource
) -> int | None:
    """What the numbers that begin with these bits (value, number of bits) give: round(deviation Y), or None if rejected."""
    for _ in range(_MOST_WORDS):
        decision = decide(deviation, u, t, v)
        if decision is not UNDECIDED:
            return decision
        more = [int(word) for word in source.uniform_words(3)]
        u, t, v = (((bits << 64) | word, size + 64) for (bits, size), word in zip((u, t, v), more, strict=True))
    raise RuntimeError("the entropy source is broken: a thousand of its bits decide nothing")


UNDECIDED = -1


def decide(deviation: float, u: tuple[int, int], t: tuple[int, int], v: tuple[int, int]) -> int | None:
    """round(deviation Y) >= 0, None for a rejected proposal, or UNDECIDED if the bits do not tell.

    Args:
        u, t, v: (first bits, how many): the number lies in [bits, bits + 1) / 2^how many.
    """
    (u_bits, u_size), (t_bits, t_size), (v_bits, v_size) = u, t, v
    below, above = cell_bounds(u_size)
    cell = bisect.bisect_right(above, u_bits) - 1
    if cell + 1 >= len(below) or u_bits + 1 > below[cell + 1]:
        return UNDECIDED
    precision = v_size + 32
    # 2 m^2 g = T (2 j + T), at both ends of T, with 2 m^2 = 2^13 and 2 t_size further bits.
    ends = [(t_bits + i) * ((2 * cell << t_size) + t_bits + i) for i in (0, 1)]
    shift = 2 * t_size + 2 * _M.bit_length() - 1
    least = (1 << precision) - exp_minus(ends[0], shift, precision)[1]
    most = (1 << precision) - exp_minus(ends[1], shift, precision)[0]
    if (v_bits + 1) << 32 <= least:
        return None
    if v_bits << 32 < most:
        return UNDECIDED
    numerator, denominator = deviation.as_integer_ratio()
    # floor(deviation Y + 1/2) for the least Y, and the same for the limit of the largest ones, which is not reached.
    least_value, most_value = (
        2 * numerator * ((cell << t_size) + t_bits + i) + (denominator * _M << t_size) for i in (0, 1)
    )
    unit = 2 * denominator * _M << t_size
    value = least_value // unit
    return value if most_value <= (value + 1) * unit else UNDECIDED


@functools.lru_cache(maxsize=32)
def cell_bounds(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Integers (below_j) and (above_j) with below_j <= 2^size F_j <= above_j, for j = 0, 1, ... to a rest below 2^-size."""
    precision = size + 64
    one = 1 << precision
    ratio = exp_minus(1, 2 * _M.bit_length() - 1, precision)  # w_1 / w_0
    step = exp_minus(1, 2 * _M.bit_length() - 2, precision)  # the quotient of two successive ratios
    weight = (one, one)
    sums = [(0, 0)]
    while weight[1] >> 63:
        sums.append((sums[-1][0] + weight[0], sums[-1][1] + weight[1]))
        weight = _product(weight, ratio, precision)
        ratio = _product(ratio, step, precision)
    # The ratios fall, so what is left is at most weight / (1 - ratio).
    total_least = sums[-1][0]
    total_most = sums[-1][1] + weight[1] * one // (one - ratio[1]) + 1
    below = tuple((least << size) // total_most for least, _ in sums)
    above = tuple(min(1 << size, -((-most << size) // total_least)) for _, most in sums)
    return below, above


def _product(a: tuple[int, int], b: tuple[int, int], precision: int) -> tuple[int, int]:
    return a[0] * b[0] >> precision, -(-a[1] * b[1] >> precision)


def exp_minus(numerator: int, shift: int, precision: int) -> tuple[int, int]:
    """Integers that bracket 2^precision exp(-x) for x = numerator / 2^shift in [0, 1].

    The terms x^k / k! are rounded downward, each from the one before, so that term k is at most k too small. Once a term is 0,
    the alternating rest of the series is smaller than its true first term, which is at most k. All errors together are below k^2.
    """
    term, k, total = 1 << precision, 0, 0
    while term:
        total += -term if k & 1 else term
        k += 1
        term = term * numerator // (k << shift)
    return total - k * k, total + k * k
