"""The audits' statistics against scipy's own, closed forms and simulation."""

import math

import numpy as np
import pytest
from scipy import stats

from privacy.audit import statistics as st

RNG = np.random.default_rng(7)


def test_binomial_p_is_the_doubled_tail_and_never_below_scipys() -> None:
    for count, trials, q in [(0, 10, 0.3), (7, 10, 0.3), (48, 100, 0.5), (20, 3000, 0.008)]:
        one_sided = [stats.binomtest(count, trials, q, alternative=side).pvalue for side in ("less", "greater")]
        assert st.binomial_p(count, trials, q) == pytest.approx(min(1, 2 * min(one_sided)))
        assert st.binomial_p(count, trials, q) >= stats.binomtest(count, trials, q).pvalue - 1e-12


def test_variance_p() -> None:
    # 99 % quantiles of chi-square with 10 degrees (tables): 23.2093 above, 2.5582 below.
    assert st.variance_p([23.2093, 2.5582], 10) == pytest.approx([0.02, 0.02], rel=1e-3)


def test_duplicates_and_single_precision() -> None:
    values = RNG.standard_normal(1000)
    assert st.count_duplicates(values) == 0 and st.count_duplicates(np.tile(values, 3)) == 2000
    assert st.single_precision_fraction(values) < 0.01
    assert st.single_precision_fraction(values.astype(np.float32)) == 1


def test_bonferroni_keeps_a_nan_alarming() -> None:
    assert st.bonferroni([0.01, 0.5]) == pytest.approx(0.02)
    assert st.bonferroni([]) == 1
    assert math.isnan(st.bonferroni([math.nan, 0.5]))


def test_binomial_counts_find_favourites_and_a_wrong_rate() -> None:
    counts = RNG.binomial(100, 0.1, 2000)
    assert st.binomial_counts_p(counts, 100, 0.1) > 1e-4
    assert st.binomial_counts_p(RNG.binomial(100, 0.12, 2000), 100, 0.1) < 1e-10
    mixed = np.concatenate([RNG.binomial(100, 0.05, 1000), RNG.binomial(100, 0.15, 1000)])
    assert st.binomial_counts_p(mixed, 100, 0.1) < 1e-10
    favourite = counts.copy()
    favourite[3] = 100
    assert st.binomial_counts_p(favourite, 100, 0.1) < 1e-7


def test_spread_is_the_exact_law() -> None:
    """Two batches of Binomial(4, 1/2), all 25 outcomes: their distance from the mean in squares is 0, 1 or 4."""
    law = {0: 6 / 16, 1: 8 / 16, 4: 2 / 16}
    for sizes in ([2, 2], [1, 2], [3, 1], [4, 2], [4, 0]):
        observed = sum((size - 2) ** 2 for size in sizes)
        sums = [(a + b, p * q) for a, p in law.items() for b, q in law.items()]
        tails = [sum(p for s, p in sums if s <= observed), sum(p for s, p in sums if s >= observed)]
        above, below = (
            float(st.binomial_p(sum(side * size > 2 * side for size in sizes), 2, 5 / 16)) for side in (1, -1)
        )
        expected = min(1.0, 3 * min(2 * min(tails), above, below))
        assert st.size_spread_p(sizes, 4, 0.5)[1] == pytest.approx(expected, rel=1e-6), sizes


@pytest.mark.parametrize("sizes", [[300] * 12, [min(300, s) for s in range(250, 350, 3)], [200, 400] * 4])
def test_sizes_that_vary_too_little_or_too_much_are_found(sizes: list[int]) -> None:
    assert st.size_spread_p(sizes, 3000, 0.1)[1] < 1e-5


NULLS = {
    "binomial_counts_rare": lambda rng: st.binomial_counts_p(rng.binomial(4, 0.008, 3000), 4, 0.008),
    "binomial_counts": lambda rng: st.binomial_counts_p(rng.binomial(60, 0.25, 1000), 60, 0.25),
    "variance": lambda rng: float(st.variance_p((rng.standard_normal(300) ** 2).sum(), 300)),
    "tails": lambda rng: st.tail_p(rng.standard_normal(100_000)),
    "kolmogorov": lambda rng: st.kolmogorov_p(rng.standard_normal(5000)),
    "spread": lambda rng: st.size_spread_p(rng.binomial(3000, 0.1, 30), 3000, 0.1)[1],
    "spread_capped": lambda rng: st.size_spread_p(np.minimum(rng.binomial(900, 0.1, 40), 92), 900, 0.1, 92)[1],
}


def false_alarms(name: str, runs: int, level: float) -> tuple[int, float]:
    rng = np.random.default_rng(11)
    p_values = np.array([NULLS[name](rng) for _ in range(runs)])
    count = int((p_values < level).sum())
    return count, float(stats.binom.sf(count - 1, runs, level))


@pytest.mark.parametrize("name", NULLS)
def test_p_values_are_not_too_small(name: str) -> None:
    count, p = false_alarms(name, 150, 0.05)
    assert p > 1e-4, f"{count} of 150 below 0.05"


@pytest.mark.full
@pytest.mark.parametrize("name", NULLS)
def test_p_values_are_not_too_small_far_out(name: str) -> None:
    count, p = false_alarms(name, 5000 if name != "tails" else 1000, 0.002)
    assert p > 1e-4, f"{count} below 0.002"
