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


NULLS = {
    "variance": lambda rng: float(st.variance_p((rng.standard_normal(300) ** 2).sum(), 300)),
    "tails": lambda rng: st.tail_p(rng.standard_normal(100_000)),
    "kolmogorov": lambda rng: st.kolmogorov_p(rng.standard_normal(5000)),
}


@pytest.mark.parametrize("name", NULLS)
def test_p_values_are_not_too_small(name: str) -> None:
    rng = np.random.default_rng(11)
    low = sum(NULLS[name](rng) < 0.05 for _ in range(150))
    assert stats.binom.sf(low - 1, 150, 0.05) > 1e-4, f"{low} of 150 below 0.05"
