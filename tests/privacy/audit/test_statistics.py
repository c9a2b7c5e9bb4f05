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


def test_overlap_p_is_fishers_exact_test() -> None:
    size, first, second, common = 60, 20, 25, 14
    table = [[common, first - common], [second - common, size - first - second + common]]
    expected = min(stats.fisher_exact(table, alternative=side)[1] for side in ("less", "greater"))
    assert st.overlap_p(common, size, first, second) == pytest.approx(2 * expected)


def test_clopper_pearson_is_scipys_exact_interval() -> None:
    for successes, trials in [(0, 20), (3, 20), (20, 20)]:
        low, high = st.clopper_pearson(successes, trials, 0.025)
        exact = stats.binomtest(successes, trials).proportion_ci(0.95, "exact")
        assert (low, high) == pytest.approx((exact.low, exact.high))


def test_normal_p_and_variance_p() -> None:
    assert st.normal_p(1.959964) == pytest.approx(0.05, rel=1e-5)
    assert st.normal_p(40) == 0 or st.normal_p(40) < 1e-300
    # 99 % quantiles of chi-square with 10 degrees (tables): 23.2093 above, 2.5582 below.
    assert st.variance_p([23.2093, 2.5582], 10) == pytest.approx([0.02, 0.02], rel=1e-3)


def test_pairwise_correlation_p_is_that_of_one_pair() -> None:
    rows = RNG.standard_normal((2, 500))
    r, p = st.pairwise_correlation_p(rows)
    # With known mean the statistic is that of pearsonr on one more degree of freedom.
    expected = 2 * stats.t.sf(abs(r) * math.sqrt(499 / (1 - r**2)), 499)
    assert p == pytest.approx(expected, rel=1e-6)


@pytest.mark.parametrize("shift", [0, 17])
def test_lagged_correlation_finds_a_copy_at_any_shift(shift: int) -> None:
    first = RNG.standard_normal((4, 1000))
    noise = RNG.standard_normal((4, 1000))
    copy = np.roll(first, shift, axis=1)
    assert st.lagged_correlation_p(first, 0.2 * copy + noise)[1] < 1e-12
    assert st.lagged_correlation_p(first, noise)[1] > 1e-4


def test_lagged_correlation_finds_a_block_that_comes_twice_in_a_row() -> None:
    row = RNG.standard_normal((1, 4000))
    row[:, 2000:2800] = row[:, 100:900]
    assert st.lagged_correlation_p(row, row, skip_zero=True)[1] < 1e-12


def test_scale_trend_finds_the_divisor() -> None:
    batch = np.log(RNG.integers(200, 300, 50))
    squares = RNG.chisquare(5000, 50)
    slope, p = st.scale_trend_p(squares, 5000, batch)
    assert abs(slope) < 0.1 and p > 1e-4
    slope, p = st.scale_trend_p(squares * np.exp(-2 * batch), 5000, batch)
    assert slope == pytest.approx(-1, abs=0.1) and p < 1e-100


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


NULLS = {
    "binomial_counts_rare": lambda rng: st.binomial_counts_p(rng.binomial(4, 0.008, 3000), 4, 0.008),
    "binomial_counts": lambda rng: st.binomial_counts_p(rng.binomial(60, 0.25, 1000), 60, 0.25),
    "variance": lambda rng: float(st.variance_p((rng.standard_normal(300) ** 2).sum(), 300)),
    "tails": lambda rng: st.tail_p(rng.standard_normal(100_000)),
    "kolmogorov": lambda rng: st.kolmogorov_p(rng.standard_normal(5000)),
    "pairs": lambda rng: st.pairwise_correlation_p(rng.standard_normal((10, 200)))[1],
    "lagged": lambda rng: st.lagged_correlation_p(rng.standard_normal((3, 500)), rng.standard_normal((3, 500)))[1],
    "within": lambda rng: (lambda z: st.lagged_correlation_p(z, z, skip_zero=True)[1])(rng.standard_normal((3, 501))),
    "trend": lambda rng: st.scale_trend_p(rng.chisquare(1000, 30), 1000, rng.standard_normal(30))[1],
    "overlap": lambda rng: float(
        st.overlap_p(((a := rng.random(2000) < 0.1) & (b := rng.random(2000) < 0.1)).sum(), 2000, a.sum(), b.sum())
    ),
}


def false_alarms(name: str, runs: int, level: float) -> tuple[int, float]:
    rng = np.random.default_rng(11)
    p_values = np.array([NULLS[name](rng) for _ in range(runs)])
    count = int((p_values < level).sum())
    return count, float(stats.binom.sf(count - 1, runs, level))


@pytest.mark.parametrize("name", NULLS)
def test_p_values_are_not_too_small(name: str) -> None:
    count, p = false_alarms(name, 300, 0.05)
    assert p > 1e-4, f"{count} of 300 below 0.05"


@pytest.mark.full
@pytest.mark.parametrize("name", NULLS)
def test_p_values_are_not_too_small_far_out(name: str) -> None:
    count, p = false_alarms(name, 5000 if name != "tails" else 1000, 0.002)
    assert p > 1e-4, f"{count} below 0.002"
