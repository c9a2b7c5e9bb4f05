"""Integers distributed exactly as round(N(0, deviation^2)), from uniform bits, by comparisons of integers alone.

Statement. Let U, T, V be independent and uniform in [0, 1), s a fair sign, m = 64, w_j = exp(-(j / m)^2 / 2) and
F_j = (w_0 + ... + w_(j - 1)) / (w_0 + w_1 + ...). Take the cell j with F_j <= U < F_(j + 1), let g = T (2 j + T) / (2 m^2), and
begin anew with fresh numbers if V < 1 - exp(-g). Otherwise Y = (j + T) / m has the density sqrt(2 / pi) exp(-y^2 / 2) on y >= 0,
so s Y is a standard normal, and s round(deviation Y) has exactly the distribution of round(N(0, deviation^2)).

Proof. The pair (j, T) is proposed with density w_j / (w_0 + w_1 + ...) and kept with probability exp(-g), and
w_j exp(-g) = exp(-(j^2 + 2 j T + T^2) / (2 m^2)) = exp(-Y^2 / 2). Rounding to the nearest integer commutes with the sign except
at ties, which have probability zero: round(y) is floor(y + 1/2) for y >= 0, a tie goes away from zero.

Lazy bits. U, T and V are real numbers of which only the first bits are drawn. What is decided (the cell, kept or not, the
integer) is decided only where it is the same for every continuation of these bits, by integer bounds that are proven where they
stand; where they do not tell, 64 more bits of each number are drawn. The integer is therefore a function of (U, T, V, s),
whichever bounds found it and however many bits they saw: its distribution is exact if the bits of the source are uniform and
independent. No floating-point number takes part.

Cost. A proposal takes 128 bits, and 1 in 160 is rejected. The quick bounds read them for a whole piece of proposals at a time.
They do not tell for 1 proposal in 10^6, and 3 in 10^5 at a deviation of 2^50; only these are decided one by one, with more bits.

Source: the rejection is step N4 of algorithm N in Karney 2016, "Sampling exactly from the normal distribution" (arXiv 1303.6257),
with his u-rands, numbers whose bits are drawn when a comparison needs them. His integer part k, found by trials of probability
exp(-1/2), is here the cell of a grid that is 64 times finer and is found by inversion.
"""

import bisect
import functools
import math
from typing import NamedTuple, Protocol

import numpy as np

from ..plan.limits import MOST_DEVIATION

REJECTED, UNDECIDED = -1, -2
"""What `decide` says when there is no integer (yet)."""
_PIECE = 1 << 14
"""Proposals that are decided quickly at a time: their arrays stay in the cache."""
_BLOCK = 1 << 19
"""Proposals of which those that are not told quickly are looked at together."""
_M_BITS = 6
_M = 1 << _M_BITS
"""Cells per standard deviation."""
_U_BITS, _T_BITS, _V_BITS = 32, 64, 31
"""First bits of the three numbers; with the sign they fill two words."""
_V_MASK = (1 << _V_BITS) - 1
_PREFIX_BITS = 16
"""First bits of U that mostly tell the cell."""
_MOST_LOOKS = 16
"""More than 15 times 64 further bits are needed with a probability below 2^-900 for uniform bits."""


def deviation_in_units(std: float, exponent: int) -> float:
    """Returns `std` in units of 2^-exponent, a little more than it is.

    `std` is a rounded product sigma C; the next larger double is at least the product itself. Powers of two are exact.
    """
    return math.ldexp(math.nextafter(std, math.inf), exponent)


class WordSource(Protocol):
    """Draws uniform bits; tests inject their own."""

    def uniform_words(self, count: int) -> np.ndarray:
        """(count,) uint64, uniform, independent of every other draw in any process."""
        ...


def draw_rounded_normal(deviation: float, count: int, source: WordSource) -> np.ndarray:
    """Independent integers, each distributed exactly as round(N(0, deviation^2)); ties have probability zero.

    Takes 8 bytes a value, and a few MiB while it works. No value can leave int64: at most 992 bits of U are drawn, and these
    tell no cell beyond 38 standard deviations, where 1 - F_j is below 2^-1040, so |value| < 38 2^50 + 1 < 2^56.

    Args:
        deviation: standard deviation in units of what is drawn, taken as the rational number that the double is; 0 draws
            nothing and gives zeros.
        count: how many integers.
        source: uniform bits.

    Returns:
        (count,) int64.

    Raises:
        ValueError: the deviation is negative, not a number or above 2^50, or the count is negative.
        RuntimeError: the source's bits decide nothing, which has a probability below 2^-900 a draw for uniform bits; or they
            reject more than half of the proposals of a block of n draws and 128 besides. Uniform bits reject less than 1 in 100,
            and more than n + 128 of 2 n + 128 with a probability below 2^(2 n + 128) 100^-(n + 128) < 2^-600.
    """
    if not 0 <= deviation <= MOST_DEVIATION:
        raise ValueError(
            f"the standard deviation of rounded noise is {deviation} units; it must be a number from 0 to 2^50"
        )
    if count < 0:
        raise ValueError(f"{count} values of noise are asked for; the number must be 0 or larger")
    out = np.zeros(count, dtype=np.int64)
    if deviation > 0:
        for start in range(0, count, _BLOCK):
            _fill(out[start : start + _BLOCK], deviation, source)
    return out


def _fill(out: np.ndarray, deviation: float, source: WordSource) -> None:
    """Proposes an integer for each place of `out`, and another one where it is rejected, until all are kept."""
    vacant = _propose(out, deviation, source)
    proposed = len(out)
    while len(vacant) > 0:
        if proposed > 2 * len(out) + 128:
            raise RuntimeError(
                f"the source of entropy is broken: of {proposed:,} proposals {len(out) - len(vacant):,} were kept, where "
                "99 in 100 are"
            )
        replacements = np.empty(len(vacant), np.int64)
        rejected = _propose(replacements, deviation, source)
        out[vacant] = replacements
        proposed += len(vacant)
        vacant = vacant[rejected]


def _propose(out: np.ndarray, deviation: float, source: WordSource) -> np.ndarray:
    """Fills `out` with one signed proposal a place, and returns the places whose proposal is rejected.

    Args:
        out: (n,) int64.
        source: for each piece of n first n words, of which each holds 32 bits of U, the sign and 31 bits of V, then n words of
            64 bits of T; more where these do not tell.

    Returns:
        Ascending int64; `out` holds no draw there.
    """
    untold = []
    for start in range(0, len(out), _PIECE):
        piece = out[start : start + _PIECE]
        first, t = source.uniform_words(2 * len(piece)).reshape(2, -1)
        sizes, is_told = _decide_quickly(deviation, first, t)
        piece[:] = _signed(sizes, first)
        places = np.flatnonzero(~is_told)
        untold.append((start + places, first[places], t[places]))
    places, first, t = map(np.concatenate, zip(*untold, strict=True))
    sizes = _look_closer(deviation, first >> 64 - _U_BITS, t, first & _V_MASK, source)
    out[places] = _signed(sizes, first)
    rejected: np.ndarray = places[sizes == REJECTED]
    return rejected


def _decide_quickly(
    deviation: float, first: np.ndarray, t: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """(round(deviation Y) as int64, whether these bits tell that it is this integer and kept). Few bits tell most of them."""
    cells = _cells()
    prefix = (first >> 64 - _PREFIX_BITS).view(
        np.int64
    )  # signed, as indices are: others are converted one by one
    cell = cells.of_prefix[prefix].astype(np.int64)
    sizes, is_told = _round(_lattice(deviation), cell, t)
    # 1 - exp(-g) <= g < (2 j + 1) T' / (2 m^2) with T' = the first 16 bits of T, and one more, over 2^16.
    is_told &= first & _V_MASK >= cells.slope[cell] * ((t >> 48) + 1)
    return sizes, is_told


def _signed(sizes: np.ndarray, first: np.ndarray) -> np.ndarray:
    """The integers, negative where the sign's bit is set."""
    mask = -(first >> _V_BITS & 1).view(np.int64)
    negated: np.ndarray = (sizes ^ mask) - mask
    return negated


def _look_closer(
    deviation: float, u: np.ndarray, t: np.ndarray, v: np.ndarray, source: WordSource
) -> np.ndarray:
    """(n,) int64: round(deviation Y) or REJECTED, by all the bits that were drawn, and by more where these do not tell."""
    cells = _cells()
    cell = np.searchsorted(cells.above, u, side="right") - 1
    in_cell = u < cells.below[cell + 1]
    values, rounded = _round(_lattice(deviation), cell, t)
    # 2^31 g for both ends of the first 26 bits of T, rounded downward and upward. Cells are below 2^9: products are below 2^63.
    t_26, two_cells = t >> 38, cell.astype(np.uint64) << 27
    shift = 2 * 26 + 2 * _M_BITS + 1 - _V_BITS
    least, most = (
        (two_cells + t_26) * t_26 >> shift,
        ((two_cells + t_26 + 1) * (t_26 + 1) >> shift) + 1,
    )
    # g - g^2 / 2 <= 1 - exp(-g) <= g - g^2 / 2 + g^3 / 6; both bounds grow with g below 1, and g is below 1/8. Each quotient is
    # rounded to the side of its bound.
    square = most * most >> _V_BITS
    kept = v >= most - (square >> 1) + ((square + 1) * most >> _V_BITS) // 6 + 1
    rejected = v + 1 <= least - np.minimum(least, (least * least >> _V_BITS + 1) + 1)
    values[rejected] = REJECTED
    told = in_cell & (rejected | kept & rounded)
    for i in np.flatnonzero(
        ~told
    ):  # the numbers begin with these 32, 64 and 31 bits and go on with the source's
        known = [(int(u[i]), _U_BITS), (int(t[i]), _T_BITS), (int(v[i]), _V_BITS)]
        for _ in range(_MOST_LOOKS):
            if (value := decide(deviation, *known)) != UNDECIDED:
                break
            more = source.uniform_words(3)
            known = [
                ((bits << 64) + int(word), size + 64)
                for (bits, size), word in zip(known, more, strict=True)
            ]
        else:
            raise RuntimeError(
                "the source of entropy is broken: a thousand of its bits decide nothing"
            )
        values[i] = value
    return values


def decide(deviation: float, u: tuple[int, int], t: tuple[int, int], v: tuple[int, int]) -> int:
    """round(deviation Y) >= 0, or REJECTED, or UNDECIDED if both or several integers are still possible.

    Args:
        u, t, v: what is known of U, T and V: (bits, how many), for a number in [bits, bits + 1) / 2^(how many).
    """
    (u_bits, u_size), (t_bits, t_size), (v_bits, v_size) = u, t, v
    below, above = cell_bounds(u_size)
    cell = bisect.bisect_right(above, u_bits) - 1
    if cell + 1 == len(below) or u_bits >= below[cell + 1]:
        return UNDECIDED
    # g at both ends of T: it is a whole number over 2^shift.
    ends = [(t_bits + i) * ((2 * cell << t_size) + t_bits + i) for i in (0, 1)]
    shift, precision = 2 * t_size + 2 * _M_BITS + 1, v_size + 32
    one = 1 << precision
    if v_bits + 1 << 32 <= one - exp_minus(ends[0], shift, precision)[1]:
        return REJECTED
    if v_bits << 32 < one - exp_minus(ends[1], shift, precision)[0]:
        return UNDECIDED
    # deviation Y + 1/2 at both ends of T, over `unit`; the upper end is not reached.
    numerator, denominator = deviation.as_integer_ratio()
    unit = denominator * _M << t_size + 1
    start, end = (2 * numerator * ((cell << t_size) + t_bits + i) + unit // 2 for i in (0, 1))
    value = start // unit
    return value if end <= (value + 1) * unit else UNDECIDED


class _Lattice(NamedTuple):
    """deviation Y + 1/2 = deviation j / m + 1/2 + deviation T / m, in integers: the first part by cell j, and the slope of T."""

    whole: np.ndarray
    """(cells + 1,) int64: floor(deviation j / m + 1/2)."""
    fraction: np.ndarray
    """(cells + 1,) uint64: the first `bits` bits of what that leaves."""
    slope: tuple[np.uint64, np.uint64]
    """Upper and lower 32 bits of floor(2^bits deviation / m), which is below 2^63."""
    bits: int


@functools.lru_cache(maxsize=8)
def _lattice(deviation: float) -> _Lattice:
    numerator, denominator = deviation.as_integer_ratio()
    bits = min(62, 63 - math.frexp(deviation / _M)[1])
    halves = [
        (2 * numerator * cell + denominator * _M << bits) // (2 * denominator * _M)
        for cell in range(len(_cells().slope))
    ]
    slope = (numerator << bits) // (denominator * _M)
    return _Lattice(
        np.array([half >> bits for half in halves], np.int64),
        np.array([half & (1 << bits) - 1 for half in halves], np.uint64),
        (np.uint64(slope >> 32), np.uint64(slope & 0xFFFF_FFFF)),
        bits,
    )


def _round(lattice: _Lattice, cell: np.ndarray, t: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """floor(deviation Y + 1/2) as int64, and whether it is that for every number T that begins with the 64 bits t."""
    slope_high, slope_low = lattice.slope
    high, low = t >> 32, t & 0xFFFF_FFFF
    # The sum is too small by less than 6 units of 2^-bits: two floors, the product of the lower halves and the cut fraction take
    # away less than 1 each, the bits of T after t and of the slope after `bits` less than 3/2 together.
    moved = (
        high * slope_high
        + (high * slope_low >> 32)
        + (low * slope_high >> 32)
        + lattice.fraction[cell]
    )
    carried = moved >> lattice.bits
    return lattice.whole[cell] + carried.view(np.int64), carried == moved + 6 >> lattice.bits


class _Cells(NamedTuple):
    """The cells that 32 bits of U can tell. One more stands for "not known"."""

    below: np.ndarray
    """(cells + 1,) uint64: 2^32 F_j or a little less; the last is 0, so that U is never known to lie in the last cell."""
    above: np.ndarray
    """(cells,) uint64: 2^32 F_j or a little more."""
    of_prefix: np.ndarray
    """(2^16,) int16: the cell of every U that begins with these 16 bits, or `cells` where there are several."""
    slope: np.ndarray
    """(cells + 1,) uint64: 4 (2 j + 1); the last is above every V."""


@functools.cache
def _cells() -> _Cells:
    bounds = cell_bounds(_U_BITS)
    below, above = np.array([*bounds[0], 0], np.uint64), np.array(bounds[1], np.uint64)
    assert len(above) < 1 << 9, "products of cells fit in 64 bits"
    prefixes = np.arange(1 << _PREFIX_BITS, dtype=np.uint64)
    cell = np.searchsorted(above, prefixes << _U_BITS - _PREFIX_BITS, side="right") - 1
    known = prefixes + 1 << _U_BITS - _PREFIX_BITS <= below[cell + 1]
    slope = np.append(8 * np.arange(len(above)) + 4, 1 << _V_BITS).astype(np.uint64)
    of_prefix = np.where(known, cell, len(above)).astype(
        np.int16
    )  # a table that stays in the cache
    return _Cells(below, above, of_prefix, slope)


@functools.lru_cache(maxsize=32)
def cell_bounds(size: int) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Integers (below_j), (above_j) with below_j <= 2^size F_j <= above_j, for j = 0, 1, ... to a rest below 2^-size.

    Every step rounds the lower of two numbers downward and the upper one upward.
    """
    precision = size + 64
    one = 1 << precision
    weight = (one, one)
    # The ratio w_(j + 1) / w_j is exp(-1 / (2 m^2)) for j = 0 and falls by the same factor from each j to the next.
    ratio = exp_minus(1, 2 * _M_BITS + 1, precision)
    factor = exp_minus(1, 2 * _M_BITS, precision)
    sums = [(0, 0)]
    while weight[1] >> 63:
        sums.append((sums[-1][0] + weight[0], sums[-1][1] + weight[1]))
        weight = _product(weight, ratio, precision)
        ratio = _product(ratio, factor, precision)
    # The rest of the sum is at most a geometric series.
    whole = sums[-1][0], sums[-1][1] + weight[1] * one // (one - ratio[1]) + 1
    below = tuple((least << size) // whole[1] for least, _ in sums)
    above = tuple(min(1 << size, -((-most << size) // whole[0])) for _, most in sums)
    return below, above


def _product(a: tuple[int, int], b: tuple[int, int], precision: int) -> tuple[int, int]:
    return a[0] * b[0] >> precision, -(-a[1] * b[1] >> precision)


def exp_minus(numerator: int, shift: int, precision: int) -> tuple[int, int]:
    """Integers below and above 2^precision exp(-x), for x = numerator / 2^shift in [0, 1].

    The terms x^k / k! are rounded downward, each from the one before, so that term k is at most k too small. Once a term is 0,
    the alternating rest of the series is at most its true first term, which is at most k. All errors together are at most k^2.
    """
    term, k, total = 1 << precision, 0, 0
    while term:
        total += -term if k & 1 else term
        k += 1
        term = term * numerator // (k << shift)
    return total - k * k, total + k * k
