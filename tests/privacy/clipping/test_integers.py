"""Certified clipping in whole numbers: no vector of int32 numbers contributes more than C, whatever it is."""

import itertools
import math
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from privacy.certified import integers
from privacy.certified.integers import SquaredNorms, add_contributions, round_to_even
from privacy.errors import PrivacyConfigError
from privacy.noise.rounded_normal import deviation_in_units
from privacy.plan.lattice import LARGEST_SUM, NOISE_ROOM, Lattice

CPU = torch.device("cpu")
INT32 = st.integers(-(2**31), 2**31 - 1)
MANY = 4 * settings.default.max_examples


def contribution(k_Bn: torch.Tensor, limit: int) -> list[list[int]]:
    """z of each row."""
    norms = SquaredNorms(len(k_Bn), CPU)
    norms.add(k_Bn)
    multiplier_B = norms.multipliers(limit)
    rows = []
    for row, multiplier in zip(k_Bn, multiplier_B, strict=True):
        total = torch.zeros(k_Bn.shape[1], dtype=torch.int64)
        add_contributions(total, row[None], multiplier[None])
        rows.append(total.tolist())
    return rows


def is_within(z: list[int], grid: Lattice) -> bool:
    """|z 2^-f| <= C, in rational numbers."""
    return sum(x * x for x in z) <= Fraction(grid.bound) ** 2 * Fraction(4) ** grid.exponent


@pytest.mark.parametrize(
    ("bound", "exponent"), [(1.0, 0), (1.0, 1), (0.7, 2), (1.3, 2), (3.0, 0), (5.5, -1)]
)
def test_every_vector_of_a_small_lattice(bound: float, exponent: int) -> None:
    """All vectors of three entries from -6 to 6: within C, and those that fit in the even lattice pass unchanged."""
    grid = Lattice(bound, exponent)
    every = torch.tensor(list(itertools.product(range(-6, 7), repeat=3)), dtype=torch.int32)
    for k, z in zip(every.tolist(), contribution(every, grid.limit), strict=True):
        assert is_within(z, grid)
        if is_within([2 * x for x in k], grid):
            assert z == [2 * x for x in k]
        elif is_within(k, grid):
            assert z == k
        else:
            assert z == [0, 0, 0]


@given(
    bound=st.floats(1e-12, 1e12),
    cap=st.integers(1, 10**12),
    sigma=st.floats(1e-9, 1e6),
    k=st.lists(INT32, min_size=1, max_size=40),
    scale=st.integers(0, 31),
)
@settings(max_examples=MANY)
def test_no_vector_contributes_more_than_its_bound(
    bound: float, cap: int, sigma: float, k: list[int], scale: int
) -> None:
    grid = Lattice.of(bound, cap, sigma)
    k = [x >> scale for x in k]
    (z,) = contribution(torch.tensor([k], dtype=torch.int32), grid.limit)
    assert is_within(z, grid)
    largest = math.isqrt(grid.limit)  # of an entry
    assert (
        cap * largest
        + NOISE_ROOM * Fraction(sigma) * Fraction(bound) * Fraction(2) ** grid.exponent
        <= LARGEST_SUM
    )
    assert 0 < grid.limit < 2**64
    deviation = deviation_in_units(sigma * bound, grid.exponent)
    assert Fraction(deviation) >= Fraction(sigma) * Fraction(bound) * Fraction(2) ** grid.exponent


@given(k=st.lists(INT32, min_size=1, max_size=60), repeats=st.integers(1, 50))
@settings(max_examples=MANY)
def test_limbs_are_the_integers_that_python_has(k: list[int], repeats: int) -> None:
    norms = SquaredNorms(2, CPU)
    for _ in range(repeats):
        norms.add(torch.tensor([k, [-x if x > -(2**31) else x for x in k]], dtype=torch.int32))
    expected = repeats * sum(x * x for x in k)
    for high, low in zip(norms.high_B.tolist(), norms.low_B.tolist(), strict=True):
        assert 0 <= low < 2**32
        assert high * 2**32 + low == expected
    for limit in (expected, expected + 1, expected - 1):
        if 0 <= limit < 2**64:
            assert norms.is_within(limit).tolist() == [expected <= limit] * 2


def test_limbs_do_not_overflow_however_many_coordinates() -> None:
    """The largest squares of all, again and again: 2^40 coordinates of 2^62 would take 102 bits."""
    norms = SquaredNorms(1, CPU)
    block = torch.full((1, integers.COLUMNS), -(2**31), dtype=torch.int32)
    for _ in range(3):
        norms.add(block)
        assert not norms.is_within(2**64 - 1).any()
    norms.high_B.fill_(integers.SATURATED)
    norms.low_B.fill_(2**32 - 1)
    norms.add(block)
    assert norms.high_B.item() == integers.SATURATED
    assert norms.multipliers(2**64 - 1).item() == 0


def test_the_norm_goes_over_blocks_of_any_size(monkeypatch: pytest.MonkeyPatch) -> None:
    k_Bn = torch.randint(-(2**31), 2**31 - 1, (3, 1001), dtype=torch.int64).int()
    expected = [sum(x * x for x in row) for row in k_Bn.tolist()]
    for size in (1, 7, 3000, 10**6):
        monkeypatch.setattr(integers, "BLOCK_NUMBERS", size)
        norms = SquaredNorms(3, CPU)
        norms.add(k_Bn)
        assert [
            h * 2**32 + low
            for h, low in zip(norms.high_B.tolist(), norms.low_B.tolist(), strict=True)
        ] == expected


HOSTILE = [
    float("nan"),
    float("inf"),
    -float("inf"),
    3.4e38,
    -3.4e38,
    1e-38,
    1e-45,
    0.0,
    -0.0,
    0.5,
    1.5,
    -2.5,
    1.0,
]


@given(
    rows=st.lists(
        st.lists(st.one_of(st.sampled_from(HOSTILE), st.floats(width=32)), min_size=4, max_size=4),
        min_size=1,
        max_size=6,
    ),
    scale=st.one_of(st.floats(0, 1e300), st.sampled_from([1.0, 2.0**30, 2.0**70, 1e-300])),
    exclude=st.booleans(),
)
@settings(max_examples=MANY)
def test_any_gradient_becomes_a_vector_within_the_bound(
    rows: list[list[float]], scale: float, exclude: bool
) -> None:
    """Also with a factor that is wrong by any amount, and where a row that is not finite was not excluded."""
    grid = Lattice.of(1.0, 4096, 1.0)
    x_Bn = torch.tensor(rows, dtype=torch.float32)
    excluded_B = torch.full((len(rows),), exclude)
    k_Bn = round_to_even(x_Bn, torch.full((len(rows),), scale, dtype=torch.float64), excluded_B)
    if exclude:
        assert not k_Bn.any()
    assert all(is_within(z, grid) for z in contribution(k_Bn, grid.limit))


@pytest.mark.parametrize("size", [1, 2, 1000, 1_000_000])
def test_halves_that_all_round_up(size: int) -> None:
    """Every entry is half way between two even multiples, at the norm that clipping aims at: the bound holds, nothing is lost."""
    grid = Lattice.of(1.0, 4096, 1.0)
    step = 2.0 ** (1 - grid.exponent)
    entry = math.floor(grid.target(size) / math.sqrt(size) / step) + 0.5
    x_Bn = torch.full((1, size), entry, dtype=torch.float64)
    one_B = torch.ones(1, dtype=torch.float64)
    k_Bn = round_to_even(x_Bn, one_B, torch.zeros(1, dtype=torch.bool))
    for k in (k_Bn, k_Bn + 1):  # as if all had rounded up
        norms = SquaredNorms(1, CPU)
        norms.add(k)
        q, multiplier = (
            norms.high_B.item() * 2**32 + norms.low_B.item(),
            norms.multipliers(grid.limit).item(),
        )
        assert multiplier**2 * q <= grid.limit
    (total,) = contribution(k_Bn[:, :10], grid.limit)
    assert total == (2 * k_Bn[0, :10].long()).tolist()


@pytest.mark.parametrize(
    ("bound", "cap", "exponent"),
    [(1.0, 4096, 31), (0.75, 4096, 32), (2.0, 10**6, 30), (1.0, 2**31, 30)],
)
def test_the_exponent_follows_from_bound_cap_and_noise(
    bound: float, cap: int, exponent: int
) -> None:
    assert Lattice.of(bound, cap, 1.0).exponent == exponent
    assert Lattice.of(bound, cap, 1.0).bound == bound


def test_a_lattice_that_is_too_coarse_is_refused() -> None:
    with pytest.raises(PrivacyConfigError, match="smaller batch"):
        Lattice(1.0, 8).target(10**6)
    assert 0.999 < Lattice.of(1.0, 10**6, 1.0).target(10**9) < 1
