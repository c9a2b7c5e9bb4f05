"""Integers distributed exactly as round(N(0, deviation^2)), from uniform bits and integers alone.

With U, T, V uniform in [0, 1), a fair sign, m = 64 and w_j = exp(-(j / m)^2 / 2): U tells a cell j
with probability w_j / (w_0 + w_1 + ...), V rejects it with probability 1 - exp(-g) for
g = T (2 j + T) / (2 m^2), and Y = (j + T) / m is then half-normal. docs/sums.md has the statement
and its proof. Bounds decide only where all continuations of the drawn bits agree; else more are
drawn.
"""

import bisect
import functools
import math
from typing import NamedTuple, Protocol

import numpy as np

from ..plan.limits import MOST_DEVIATION

REJECTED = -1
"""Returned by `decide` for a proposal that is rejected."""
UNDECIDED = -2
"""Returned by `decide` where more bits are needed."""
_PIECE = 1 << 14
"""Proposals that are decided quickly at a time: their arrays stay in the cache."""
_BLOCK = 1 << 19
"""Proposals whose undecided ones are looked at together."""
_M_BITS = 6
_M = 1 << _M_BITS
"""Cells per standard deviation."""
_U_BITS = 32
_T_BITS = 64
_V_BITS = 31
"""First bits of the three numbers; with the sign they fill two words."""
_V_MASK = (1 << _V_BITS) - 1
_PREFIX_BITS = 16
"""First bits of U that mostly tell the cell."""
_MOST_LOOKS = 16
"""More than 15 times 64 further bits are needed with a probability below 2^-900, if bits are
uniform."""


def deviation_in_units(std: float, exponent: int) -> float:
    """Returns `std` in units of 2^-exponent, a little more than it is.

    `std` is a rounded product sigma C; the next larger double is at least the product itself.
    Powers of two are exact.
    """
    return math.ldexp(math.nextafter(std, math.inf), exponent)


class WordSource(Protocol):
    """Draws uniform bits; tests inject their own."""

    def uniform_words(self, count: int) -> np.ndarray:
        """Returns (count,) uint64, uniform, independent of every other draw in any process."""
        ...


def draw_rounded_normal(deviation: float, count: int, source: WordSource) -> np.ndarray:
    """Returns independent integers, each distributed exactly as round(N(0, deviation^2)).

    Ties have probability zero. It takes 8 bytes an integer, and a few MiB while it works. No
    integer can leave int64: at most 992 bits of U are drawn, and these tell no cell beyond 38
    standard deviations, where 1 - F_j is below 2^-1040, so |integer| < 38 2^50 + 1 < 2^56.

    Args:
        deviation: standard deviation in units of the integers, taken as the rational number that
            the double is; 0 draws nothing and gives zeros.
        count: how many integers.
        source: uniform bits.

    Returns:
        (count,) int64.

    Raises:
        ValueError: the deviation is negative, not a number or above 2^50, or the count is negative.
        RuntimeError: the source's bits decide nothing, which has a probability below 2^-900 a draw
            for uniform bits; or they reject more than half of the proposals of a block of n draws
            and 128 besides. Uniform bits reject less than 1 in 100, and more than n + 128 of
            2 n + 128 with a probability below 2^(2 n + 128) 100^-(n + 128) < 2^-600.
    """
    if not 0 <= deviation <= MOST_DEVIATION:
        raise ValueError(
            f"the standard deviation of rounded noise is {deviation} units; it must be a number "
            "from 0 to 2^50"
        )
    if count < 0:
        raise ValueError(f"{count} values of noise are asked for; the number must be 0 or larger")
    out = np.zeros(count, dtype=np.int64)
    if deviation > 0:
        for start in range(0, count, _BLOCK):
            _fill(out[start : start + _BLOCK], deviation, source)
    return out


def _fill(out: np.ndarray, deviation: float, source: WordSource) -> None:
    """Proposes an integer for each place of `out`, and another while it is rejected."""
    vacant = _propose(out, deviation, source)
    num_proposed = len(out)
    while len(vacant) > 0:
        if num_proposed > 2 * len(out) + 128:
            num_accepted = len(out) - len(vacant)
            raise RuntimeError(
                f"the source of entropy is broken: of {num_proposed:,} proposals "
                f"{num_accepted:,} were kept, where 99 in 100 are"
            )
        replacements = np.empty(len(vacant), np.int64)
        rejected = _propose(replacements, deviation, source)
        out[vacant] = replacements
        num_proposed += len(vacant)
        vacant = vacant[rejected]


def _propose(out: np.ndarray, deviation: float, source: WordSource) -> np.ndarray:
    """Fills `out` with one signed proposal a place, and returns the places of rejected ones.

    Args:
        out: (n,) int64.
        source: for each piece of n first n words, of which each holds 32 bits of U, the sign and 31
            bits of V, then n words of 64 bits of T; more where these do not tell.

    Returns:
        Ascending int64; `out` holds no draw there.
    """
    undecided = []
    for start in range(0, len(out), _PIECE):
        piece = out[start : start + _PIECE]
        words, t = source.uniform_words(2 * len(piece)).reshape(2, -1)
        sizes, is_decided = _decide_quickly(deviation, words, t)
        piece[:] = _signed(sizes, words)
        places = np.flatnonzero(~is_decided)
        undecided.append((start + places, words[places], t[places]))
    places, words, t = map(np.concatenate, zip(*undecided, strict=True))
    u = words >> 64 - _U_BITS
    v = words & _V_MASK
    sizes = _look_closer(deviation, u, t, v, source)
    out[places] = _signed(sizes, words)
    rejected: np.ndarray = places[sizes == REJECTED]
    return rejected


def _decide_quickly(
    deviation: float, words: np.ndarray, t: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Returns round(deviation Y) as int64, and whether these bits decide it and accept it.

    Few bits decide most of them.
    """
    cells = _cells()
    # Signed, as indices are: others are converted one by one.
    prefix = (words >> 64 - _PREFIX_BITS).view(np.int64)
    cell = cells.of_prefix[prefix].astype(np.int64)
    sizes, is_decided = _round(_lattice(deviation), cell, t)
    # 1 - exp(-g) <= g < (2 j + 1) T' / (2 m^2) with T' = the first 16 bits of T, and one more, over
    # 2^16.
    is_decided &= words & _V_MASK >= cells.slope[cell] * ((t >> 48) + 1)
    return sizes, is_decided


def _signed(sizes: np.ndarray, words: np.ndarray) -> np.ndarray:
    """Returns the integers, negative where the sign's bit is set."""
    mask = -(words >> _V_BITS & 1).view(np.int64)
    negated: np.ndarray = (sizes ^ mask) - mask
    return negated


def _look_closer(
    deviation: float, u: np.ndarray, t: np.ndarray, v: np.ndarray, source: WordSource
) -> np.ndarray:
    """Returns (n,) int64: round(deviation Y) or REJECTED, by all the bits that were drawn.

    Where these do not decide, more are drawn.
    """
    cells = _cells()
    cell = np.searchsorted(cells.above, u, side="right") - 1
    is_in_cell = u < cells.below[cell + 1]
    sizes, is_rounded = _round(_lattice(deviation), cell, t)
    # 2^31 g for both ends of the first 26 bits of T, rounded downward and upward. Cells are below
    # 2^9: products are below 2^63.
    t_26 = t >> 38
    two_cells = cell.astype(np.uint64) << 27
    shift = 2 * 26 + 2 * _M_BITS + 1 - _V_BITS
    lower_g = (two_cells + t_26) * t_26 >> shift
    upper_g = ((two_cells + t_26 + 1) * (t_26 + 1) >> shift) + 1
    # g - g^2 / 2 <= 1 - exp(-g) <= g - g^2 / 2 + g^3 / 6; both bounds grow with g below 1, and g is
    # below 1/8. Each quotient is rounded to the side of its bound.
    upper_square = upper_g * upper_g >> _V_BITS
    upper_cube = (upper_square + 1) * upper_g >> _V_BITS
    is_accepted = v >= upper_g - (upper_square >> 1) + upper_cube // 6 + 1
    half_square = (lower_g * lower_g >> _V_BITS + 1) + 1
    is_rejected = v + 1 <= lower_g - np.minimum(lower_g, half_square)
    sizes[is_rejected] = REJECTED
    is_decided = is_in_cell & (is_rejected | is_accepted & is_rounded)
    for i in np.flatnonzero(~is_decided):
        # U, T and V begin with these 32, 64 and 31 bits and go on with the source's.
        prefixes = [(int(u[i]), _U_BITS), (int(t[i]), _T_BITS), (int(v[i]), _V_BITS)]
        for _ in range(_MOST_LOOKS):
            decision = decide(deviation, *prefixes)
            if decision != UNDECIDED:
                break
            words = source.uniform_words(3)
            for number, word in enumerate(words):
                bits, num_bits = prefixes[number]
                prefixes[number] = ((bits << 64) + int(word), num_bits + 64)
        else:
            raise RuntimeError(
                "the source of entropy is broken: a thousand of its bits decide nothing"
            )
        sizes[i] = decision
    return sizes


def decide(deviation: float, u: tuple[int, int], t: tuple[int, int], v: tuple[int, int]) -> int:
    """Returns round(deviation Y) >= 0, or REJECTED, or UNDECIDED where these bits do not tell.

    Args:
        u, t, v: the known bits of U, T and V: (bits, how many), for a number in
            [bits, bits + 1) / 2^(how many).
    """
    u_bits, u_size = u
    t_bits, t_size = t
    v_bits, v_size = v
    below, above = cell_bounds(u_size)
    cell = bisect.bisect_right(above, u_bits) - 1
    if cell + 1 == len(below) or u_bits >= below[cell + 1]:
        return UNDECIDED
    # g at both ends of T: it is a whole number over 2^shift.
    lower_g = t_bits * ((2 * cell << t_size) + t_bits)
    upper_g = (t_bits + 1) * ((2 * cell << t_size) + t_bits + 1)
    shift = 2 * t_size + 2 * _M_BITS + 1
    precision = v_size + 32
    unity = 1 << precision
    if v_bits + 1 << 32 <= unity - exp_minus(lower_g, shift, precision)[1]:
        return REJECTED
    if v_bits << 32 < unity - exp_minus(upper_g, shift, precision)[0]:
        return UNDECIDED
    # deviation Y + 1/2 at both ends of T, over `unit`; the upper end is not reached.
    numerator, denominator = deviation.as_integer_ratio()
    unit = denominator * _M << t_size + 1
    start = 2 * numerator * ((cell << t_size) + t_bits) + unit // 2
    end = 2 * numerator * ((cell << t_size) + t_bits + 1) + unit // 2
    integer = start // unit
    return integer if end <= (integer + 1) * unit else UNDECIDED


class _Lattice(NamedTuple):
    """Holds deviation Y + 1/2 = (deviation j / m + 1/2) + deviation T / m in integers.

    The first part goes by cell j; the second has the slope of T.
    """

    floors: np.ndarray
    """(cells + 1,) int64: floor(deviation j / m + 1/2)."""
    fraction: np.ndarray
    """(cells + 1,) uint64: the first `bits` bits of the fraction that the floor leaves."""
    slope: tuple[np.uint64, np.uint64]
    """Upper and lower 32 bits of floor(2^bits deviation / m), which is below 2^63."""
    bits: int


@functools.lru_cache(maxsize=8)
def _lattice(deviation: float) -> _Lattice:
    numerator, denominator = deviation.as_integer_ratio()
    bits = min(62, 63 - math.frexp(deviation / _M)[1])
    floors = []
    fractions = []
    for cell in range(len(_cells().slope)):
        middle = 2 * numerator * cell + denominator * _M
        scaled = (middle << bits) // (2 * denominator * _M)
        floors.append(scaled >> bits)
        fractions.append(scaled & (1 << bits) - 1)
    slope = (numerator << bits) // (denominator * _M)
    slope_high = np.uint64(slope >> 32)
    slope_low = np.uint64(slope & 0xFFFF_FFFF)
    return _Lattice(
        np.array(floors, np.int64), np.array(fractions, np.uint64), (slope_high, slope_low), bits
    )


def _round(lattice: _Lattice, cell: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Returns floor(deviation Y + 1/2) as int64, and whether 64 bits of T decide it.

    They do where it is the same for every number T that begins with the bits t.
    """
    slope_high, slope_low = lattice.slope
    high = t >> 32
    low = t & 0xFFFF_FFFF
    # The sum is too small by less than 6 units of 2^-bits: two floors, the product of the lower
    # halves and the cut fraction take away less than 1 each, the bits of T after t and of the slope
    # after `bits` less than 3/2 together.
    product = high * slope_high + (high * slope_low >> 32) + (low * slope_high >> 32)
    moved = product + lattice.fraction[cell]
    carried = moved >> lattice.bits
    is_decided = carried == moved + 6 >> lattice.bits
    return lattice.floors[cell] + carried.view(np.int64), is_decided


class _Cells(NamedTuple):
    """The cells that 32 bits of U can tell. One more stands for "not known"."""

    below: np.ndarray
    """(cells + 1,) uint64: 2^32 F_j or a little less; the last is 0, so that U is never known to be
    in the last cell."""
    above: np.ndarray
    """(cells,) uint64: 2^32 F_j or a little more."""
    of_prefix: np.ndarray
    """(2^16,) int16: the cell of every U that begins with these 16 bits, or `cells` where there are
    several."""
    slope: np.ndarray
    """(cells + 1,) uint64: 4 (2 j + 1); the last is above every V."""


@functools.cache
def _cells() -> _Cells:
    bounds_below, bounds_above = cell_bounds(_U_BITS)
    below = np.array([*bounds_below, 0], np.uint64)
    above = np.array(bounds_above, np.uint64)
    num_cells = len(above)
    assert num_cells < 1 << 9, "products of cells fit in 64 bits"
    prefixes = np.arange(1 << _PREFIX_BITS, dtype=np.uint64)
    rest_bits = _U_BITS - _PREFIX_BITS
    cell = np.searchsorted(above, prefixes << rest_bits, side="right") - 1
    is_one_cell = prefixes + 1 << rest_bits <= below[cell + 1]
    slopes = 8 * np.arange(num_cells) + 4
    slope = np.append(slopes, 1 << _V_BITS).astype(np.uint64)
    # Two bytes an entry, so that the table stays in the cache.
    of_prefix = np.where(is_one_cell, cell, num_cells).astype(np.int16)
    return _Cells(below, above, of_prefix, slope)


@functools.lru_cache(maxsize=32)
def cell_bounds(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Returns integers (below_j), (above_j) with below_j <= 2^size F_j <= above_j.

    j goes from 0 until the rest is below 2^-size. Every step rounds the lower of two numbers
    downward and the upper one upward.
    """
    precision = size + 64
    unity = 1 << precision
    weight = (unity, unity)
    # The ratio w_(j + 1) / w_j is exp(-1 / (2 m^2)) for j = 0 and falls by the same factor from
    # each j to the next.
    ratio = exp_minus(1, 2 * _M_BITS + 1, precision)
    factor = exp_minus(1, 2 * _M_BITS, precision)
    sums = [(0, 0)]
    while weight[1] >> 63:
        lower, upper = sums[-1]
        sums.append((lower + weight[0], upper + weight[1]))
        weight = _product(weight, ratio, precision)
        ratio = _product(ratio, factor, precision)
    # The rest of the sum is at most a geometric series.
    lower_total, upper_sum = sums[-1]
    rest = weight[1] * unity // (unity - ratio[1])
    upper_total = upper_sum + rest + 1
    below = []
    above = []
    for lower, upper in sums:
        below.append((lower << size) // upper_total)
        above.append(min(1 << size, -((-upper << size) // lower_total)))
    return tuple(below), tuple(above)


def _product(a: tuple[int, int], b: tuple[int, int], precision: int) -> tuple[int, int]:
    lower = a[0] * b[0] >> precision
    upper = -(-a[1] * b[1] >> precision)
    return lower, upper


def exp_minus(numerator: int, shift: int, precision: int) -> tuple[int, int]:
    """Returns integers below and above 2^precision exp(-x), for x = numerator / 2^shift in [0, 1].

    The terms x^k / k! are rounded downward, each from the one before, so that term k is at most k
    too small. Once a term is 0, the alternating rest of the series is at most its true first term,
    which is at most k. All errors together are at most k^2.
    """
    term = 1 << precision
    k = 0
    total = 0
    while term:
        total += -term if k & 1 else term
        k += 1
        term = term * numerator // (k << shift)
    return total - k * k, total + k * k
