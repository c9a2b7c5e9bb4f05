"""The rounded Gaussian against a normal distribution of 400 bits: exact decisions, exact probabilities, and many draws."""

import bisect
import itertools
import math
from collections import Counter, deque
from fractions import Fraction

import mpmath
import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from scipy import stats

from privacy.noise import rounded_normal
from privacy.noise import source as noise
from privacy.noise.rounded_normal import REJECTED, UNDECIDED, decide, draw_rounded_normal
from privacy.noise.source import SystemNoise

MP = mpmath.MPContext()
MP.prec = 400
M = 64
"""Cells per standard deviation."""
_WEIGHTS = [MP.exp(-((MP.mpf(j) / M) ** 2) / 2) for j in range(1600)]
_TOTAL = MP.fsum(_WEIGHTS) + MP.mpf(2) ** -450  # what follows is below exp(-312)
FIRST_OF_CELL = [MP.fsum(_WEIGHTS[:j]) / _TOTAL for j in range(700)]
"""F_j of the module's docstring."""
DEVIATIONS = (
    1e-3,
    0.3,
    1.0,
    3.0,
    1000.7,
    2.0**30 / 3,
    2.0**44,
    math.nextafter(2.0**50, 0),
    2.0**50,
)
MASK_64 = (1 << 64) - 1


class Words:
    """The bits of a fixed Philox stream."""

    def __init__(self, seed):
        self._philox, self.asked = np.random.Philox(seed), []

    def uniform_words(self, count):
        self.asked.append(count)
        return self._philox.random_raw(count)


class Repeated:
    """The same word again and again, but not forever."""

    def __init__(self, word):
        self._word, self._calls = word, 0

    def uniform_words(self, count):
        self._calls += 1
        assert self._calls < 10_000
        return np.full(count, self._word, np.uint64)


class Given:
    """Two words for each proposal, in the order of the proposals, and then those of another source."""

    def __init__(self, words, then):
        self._left, self._then = words.reshape(2, -1), then

    def uniform_words(self, count):
        if self._left.size == 0:
            return self._then.uniform_words(count)
        piece, self._left = np.split(self._left, [count // 2], axis=1)
        return piece.reshape(-1)


def proposals_of(deviation, words, then):
    """The integers that words for proposals give, in their order, without those that are rejected."""
    proposals = np.empty(len(words) // 2, np.int64)
    rejected = rounded_normal._propose(proposals, deviation, Given(words, then))
    return np.delete(proposals, rejected)


def true_cell(u):
    return bisect.bisect_right(FIRST_OF_CELL, u) - 1


def true_threshold(cell, t):
    """A proposal is rejected if V is below this."""
    return -MP.expm1(-(t * (2 * cell + t)) / (2 * M * M))


def truth(deviation, u, t, v):
    """The integer that these real numbers give, or REJECTED, in 400 bits."""
    cell = true_cell(u)
    if v < true_threshold(cell, t):
        return REJECTED
    return int(MP.floor(MP.mpf(deviation) * (cell + t) / M + 0.5))


def inside(bits, size):
    """Real numbers just inside both ends of what is known."""
    tiny = MP.mpf(2) ** -380
    return MP.ldexp(bits, -size) + tiny, MP.ldexp(bits + 1, -size) - tiny


def near(value, size, rng):
    """`size` bits that begin close to a real number in [0, 1)."""
    bits = int(MP.floor(MP.ldexp(value, size))) + int(rng.integers(-2, 3))
    return min(max(bits, 0), (1 << size) - 1)


def hard_numbers(deviation, sizes, rng):
    """First bits of U, T and V; each lies near a place where the decision changes, or anywhere."""
    u_size, t_size, v_size = sizes
    cell = int(rng.integers(0, 420)) if rng.random() < 0.5 else int(abs(rng.standard_normal()) * M)
    place = int(rng.integers(3))
    if place == 0:
        u = near(FIRST_OF_CELL[cell], u_size, rng)
    else:  # the middle of a cell
        u = int(MP.floor(MP.ldexp((FIRST_OF_CELL[cell] + FIRST_OF_CELL[cell + 1]) / 2, u_size)))
    t = [0, (1 << t_size) - 1, int(rng.integers(2**62)) * ((1 << t_size) - 1) // 2**62][
        int(rng.integers(3))
    ]
    integer = MP.floor(MP.mpf(deviation) * (cell + MP.mpf(rng.random())) / M)
    tie = (integer + 0.5) * M / MP.mpf(deviation) - cell
    if place == 1 and 0 <= tie < 1:
        t = near(tie, t_size, rng)
    v = [0, (1 << v_size) - 1, int(rng.integers(2**62)) * ((1 << v_size) - 1) // 2**62][
        int(rng.integers(3))
    ]
    if place == 2 or rng.random() < 0.3:
        v = near(true_threshold(cell, inside(t, t_size)[0]), v_size, rng)
    return u, t, v


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_a_decision_holds_for_every_continuation_of_the_bits(deviation):
    """Against 400 bits, next to every boundary; and bits that continue at random do decide."""
    rng = np.random.default_rng(0)
    said = Counter()
    for case in range(150):
        sizes = [(32, 64, 31), (12, 9, 7), (96, 128, 95), (40, 70, 64)][case % 4]
        numbers = hard_numbers(deviation, sizes, rng)
        decision = decide(deviation, *zip(numbers, sizes, strict=True))
        said[min(decision, 0)] += 1
        if decision != UNDECIDED:
            ends = [inside(bits, size) for bits, size in zip(numbers, sizes, strict=True)]
            assert {truth(deviation, *corner) for corner in itertools.product(*ends)} == {decision}
        more = [(bits << 192) + int.from_bytes(rng.bytes(24), "big") for bits in numbers]
        decision = decide(deviation, *zip(more, (size + 192 for size in sizes), strict=True))
        assert decision == truth(
            deviation, *(inside(b, s + 192)[0] for b, s in zip(more, sizes, strict=True))
        )
    assert all(said[kind] >= 5 for kind in (0, REJECTED, UNDECIDED))


@pytest.mark.parametrize("deviation", DEVIATIONS)
def test_pieces_are_decided_as_one_proposal_is(deviation):
    """The quick bounds never differ from the decision by 128 more bits, wherever the first bits lie."""
    rng, continued = np.random.default_rng(1), 0x9E3779B97F4A7C15
    words, expected = [], []
    for case in range(600):
        u, t, v = hard_numbers(deviation, (32, 64, 31), rng)
        words.append((u << 32 | (case & 1) << 31 | v, t))
        known = zip((u, t, v), (32, 64, 31), strict=True)
        decision = decide(
            deviation, *((bits << 128 | continued << 64 | continued, n + 128) for bits, n in known)
        )
        assert decision != UNDECIDED
        if decision != REJECTED:
            expected.append(-decision if case & 1 else decision)
    kept = proposals_of(deviation, np.array(words, np.uint64).T.reshape(-1), Repeated(continued))
    assert kept.dtype == np.int64 and kept.tolist() == expected


def test_cells_have_exactly_their_probabilities():
    """The tree of all first bits of U: what is decided, as a fraction, brackets the probability of each cell to 2^-45."""
    decided, open_, nodes = Counter(), deque([(0, 0)]), 0
    while open_:
        bits, size = open_.popleft()  # shortest first: the bounds of a size are computed once
        nodes += 1
        # A deviation of 64 and T near 1/4 tell the cell, and V near 1 keeps the proposal.
        cell = decide(64.0, (bits, size), (1 << 62, 64), (MASK_64, 64))
        if cell != UNDECIDED:
            decided[cell] += Fraction(1, 2**size)
        elif size < 56:
            open_ += [(2 * bits, size + 1), (2 * bits + 1, size + 1)]
    missing = 1 - sum(decided.values())
    assert 0 < missing < Fraction(1, 2**45) and nodes < 60_000
    for cell in range(500):
        share = _WEIGHTS[cell] / _TOTAL
        least = MP.mpf(decided[cell].numerator) / decided[cell].denominator
        assert least <= share <= least + MP.mpf(2) ** -45
        if cell < 6 * M:
            assert least > 0.9999 * share  # the tail is no zero


def probabilities(deviation, edges):
    """Of the integers in [edges[i], edges[i + 1]), with everything below and above added to the ends."""
    middle = [(MP.mpf(int(edge)) - 0.5) / MP.mpf(deviation) for edge in edges]
    cdf = [MP.mpf(0), *(MP.ncdf(x) for x in middle), MP.mpf(1)]
    return np.array([float(b - a) for a, b in itertools.pairwise(cdf)])


def buckets(deviation, count):
    """Edges of buckets that hold at least 20 of `count` draws each."""
    most = int(deviation * stats.norm.isf(20 / count)) + 1
    if most < 60:
        edges = np.arange(-most, most + 2)
    else:
        edges = np.unique(
            np.round(deviation * stats.norm.ppf(np.linspace(0, 1, 258)[1:-1]))
        ).astype(np.int64)
    while min(probabilities(deviation, edges)[[0, -1]]) * count < 20 and len(edges) > 2:
        edges = edges[1:-1]
    return edges


def chi_square(draws_of, deviation, count):
    """p of `count` draws, taken 5 million at a time."""
    edges = buckets(deviation, count)
    seen = np.zeros(len(edges) + 1, np.int64)
    for start in range(0, count, 5_000_000):
        values = draws_of(min(5_000_000, count - start))
        seen += np.bincount(np.searchsorted(edges, values, side="right"), minlength=len(seen))
    return float(stats.chisquare(seen, probabilities(deviation, edges) * count).pvalue)


@pytest.mark.parametrize("deviation", [0.3, 1.0, 3.0, 17.3, 2.0**30, 2.0**50])
def test_draws_follow_the_exact_probabilities(deviation):
    words = Words(2)
    assert (
        1e-4
        < chi_square(lambda n: draw_rounded_normal(deviation, n, words), deviation, 1_000_000)
        < 1 - 1e-4
    )


@pytest.mark.parametrize(
    "deviation", [-1.0, -5e-324, math.nan, math.inf, -math.inf, math.nextafter(2.0**50, math.inf)]
)
def test_what_is_no_standard_deviation_is_refused(deviation):
    words = Words(9)
    with pytest.raises(ValueError, match=r"standard deviation .* from 0 to 2\^50"):
        draw_rounded_normal(deviation, 3, words)
    with pytest.raises(ValueError, match="-1 values"):
        draw_rounded_normal(1.0, -1, words)
    assert words.asked == []


@pytest.mark.parametrize("word", [0, MASK_64])
def test_a_source_that_is_stuck_is_found(word):
    """U = T = V = 0 and U = T = V = 1 are boundaries of the first and of the last cell: no number of bits decides."""
    with pytest.raises(RuntimeError, match="source of entropy is broken"):
        draw_rounded_normal(3.0, 1, Repeated(word))


def test_words_of_the_aes_source_are_aes_256_ctr_under_a_fresh_key(monkeypatch):
    keys = iter([bytes(range(32)), bytes(range(1, 33))])
    monkeypatch.setattr(noise.os, "urandom", lambda size: next(keys))
    for first in range(2):
        stream = Cipher(
            algorithms.AES(bytes(range(first, first + 32))), modes.CTR(bytes(16))
        ).encryptor()
        expected = np.frombuffer(stream.update(bytes(24)), "<u8")
        assert SystemNoise().uniform_words(3).tolist() == expected.tolist()


def test_the_last_of_all_first_bits_give_the_tail():
    """Every one of the 2^15 largest first 32 bits of U, from 4.5 standard deviations on, through the code that draws."""
    source, size = Words(10), 1 << 15
    u = np.arange(2**32 - size, 2**32, dtype=np.uint64) << np.uint64(32)
    # V near 1 keeps every proposal, T near 1/4 and a deviation of 64 tell its cell.
    words = np.concatenate([u | np.uint64((1 << 31) - 1), np.full(size, 1 << 62, np.uint64)])
    cells = np.concatenate([proposals_of(64.0, words, source) for _ in range(4)])
    assert len(cells) == 4 * size
    for far in (300, 320, 340, 352, 384):
        expected = 2**32 * float(1 - FIRST_OF_CELL[far])
        assert (
            abs((cells >= far).sum() / 4 - expected) <= 2
        )  # first bits that lie across a boundary
    beyond, rounds = Counter(), 60
    for _ in range(rounds):
        words = source.uniform_words(2 * size)
        words[:size] = u | words[:size] & np.uint64(2**32 - 1)
        sizes = np.abs(proposals_of(2.0**40, words, source))
        beyond.update({far: int((sizes > far * 2**40).sum()) for far in (5.0, 5.5, 6.0)})
    for far, seen in beyond.items():
        mean = rounds * 2**32 * 2 * stats.norm.sf(far) * math.sqrt(math.pi / 2) * M / float(_TOTAL)
        assert abs(seen - mean) < 5 * math.sqrt(mean)
