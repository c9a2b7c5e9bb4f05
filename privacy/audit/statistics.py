"""The tests behind the audits. Every function returns a p-value that is right or too large under the null hypothesis.

All p-values are two-sided unless the name says otherwise, and `bonferroni` is the only correction for multiplicity: it needs
no independence, and the effects that an audit looks for are so large that a sharper correction buys nothing.
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import stats

Floats = NDArray[np.float64]


def bonferroni(p_values: ArrayLike) -> float:
    """P(any p-value is as small as the smallest) <= count * min; 1 for no p-values. NaN stays NaN."""
    p = np.atleast_1d(np.asarray(p_values, dtype=float))
    smallest = float(p.min()) * p.size if p.size else 1.0
    return 1.0 if smallest > 1 else smallest  # not min(): it would turn NaN into 1


def two_sided(lower: ArrayLike, upper: ArrayLike) -> Floats:
    """Doubles the smaller tail, which for a discrete statistic overstates the p-value."""
    doubled: Floats = np.minimum(1.0, 2 * np.minimum(lower, upper))
    return doubled


def variance_p(sum_of_squares: ArrayLike, degrees: ArrayLike) -> Floats:
    """Chi-square test of unit variance and zero mean: sum of `degrees` squared standard normals, exact.

    Source: Lehmann and Romano 2005, Testing Statistical Hypotheses, section 3.4.
    """
    return two_sided(stats.chi2.cdf(sum_of_squares, degrees), stats.chi2.sf(sum_of_squares, degrees))


def binomial_p(count: ArrayLike, trials: ArrayLike, probability: ArrayLike) -> Floats:
    """Exact binomial test (Clopper and Pearson 1934), with doubled tails."""
    lower = stats.binom.cdf(count, trials, probability)
    upper = stats.binom.sf(np.asarray(count) - 1, trials, probability)
    return two_sided(lower, upper)


def kolmogorov_p(z: ArrayLike) -> float:
    """Kolmogorov-Smirnov test of standard normals (asymptotic above some thousands of values)."""
    return float(stats.kstest(np.asarray(z, dtype=float).ravel(), "norm", mode="asymp").pvalue)


def tail_p(z: ArrayLike, edges: Sequence[float] = (2.5, 3.0, 3.5, 4.0, 4.5, 5.0)) -> float:
    """Exact tests of the numbers of values beyond some standard deviations, on either side together."""
    values = np.abs(np.asarray(z, dtype=float)).ravel()
    return bonferroni([binomial_p(int((values > edge).sum()), values.size, 2 * stats.norm.sf(edge)) for edge in edges])


def count_duplicates(values: ArrayLike) -> int:
    """How many values equal an earlier one, bit by bit."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return int(flat.size - np.unique(flat.view(np.uint64)).size)


def single_precision_fraction(values: ArrayLike) -> float:
    """Fraction of doubles that are floats in disguise: about 2^-29 for doubles, 1 for noise drawn in fp32."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return float((flat.astype(np.float32) == flat).mean()) if flat.size else 0.0
