"""The tests behind the audits. Every function returns a p-value that is right or too large under the null hypothesis.

All p-values are two-sided unless the name says otherwise, and `bonferroni` is the only correction for multiplicity: it needs
no independence, and the effects that an audit looks for are so large that a sharper correction buys nothing.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft, special, stats

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


def normal_p(z: ArrayLike) -> Floats:
    """P(|N(0, 1)| >= |z|)."""
    p: Floats = special.erfc(np.abs(np.asarray(z, dtype=float)) / math.sqrt(2))
    return p


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


def overlap_p(overlap: ArrayLike, size: int, first: ArrayLike, second: ArrayLike) -> Floats:
    """Exact test that two subsets of `size` examples, of the given counts, are independent (hypergeometric).

    Given the two counts, the overlap of two independent Poisson samples is hypergeometric whatever the sample rates
    were (Fisher 1935's exact test for a two by two table).
    """
    lower = stats.hypergeom.cdf(overlap, size, first, second)
    upper = stats.hypergeom.sf(np.asarray(overlap) - 1, size, first, second)
    return two_sided(lower, upper)


def binomial_counts_p(counts: ArrayLike, trials: int, probability: float) -> float:
    """Are many counts spread as independent Binomial(trials, probability) ones are?

    The number of counts that are at least j is itself Binomial(N, P(count >= j)): one exact test for each j, corrected
    for their number. Sees a wrong rate, examples that are chosen too often or never, and coins that depend on each
    other from attempt to attempt.
    """
    k = np.asarray(counts)
    edges = np.arange(1, trials + 2)
    reach = stats.binom.sf(edges - 1, trials, probability)  # P(count >= j)
    # Edges fixed by the distribution alone; the last one catches everything beyond.
    edges = edges[(reach * k.size > 1e-9) & ((1 - reach) * k.size > 1e-9) | (edges == 1)]
    edges = np.unique([*edges, int(edges.max()) + 1])
    histogram = np.bincount(k, minlength=int(edges.max()) + 1)
    at_least = histogram[::-1].cumsum()[::-1][edges]
    return bonferroni(binomial_p(at_least, k.size, stats.binom.sf(edges - 1, trials, probability)))


def kolmogorov_p(z: ArrayLike) -> float:
    """Kolmogorov-Smirnov test of standard normals (asymptotic above some thousands of values)."""
    return float(stats.kstest(np.asarray(z, dtype=float).ravel(), "norm", mode="asymp").pvalue)


def tail_p(z: ArrayLike, edge: float = 4.0) -> float:
    """Exact test of the number of values beyond `edge` standard deviations, on either side together."""
    values = np.abs(np.asarray(z, dtype=float)).ravel()
    return float(binomial_p(int((values > edge).sum()), values.size, 2 * stats.norm.sf(edge)))


def pairwise_correlation_p(rows_TD: Floats) -> tuple[float, float]:
    """(largest absolute correlation of two rows, its Bonferroni-corrected p-value) for rows of independent normals.

    Uses the exact null distribution: r^2 of D independent pairs of known mean 0 is Beta(1/2, (D-1)/2).
    """
    norms_T = np.linalg.norm(rows_TD, axis=1, keepdims=True)
    unit = rows_TD / np.where(norms_T > 0, norms_T, 1)
    gram = unit @ unit.T
    pairs = gram[np.triu_indices(len(gram), 1)]
    if not pairs.size:
        return 0.0, 1.0
    largest = min(1.0, float(np.abs(pairs).max()))
    p = stats.beta.sf(largest**2, 0.5, (rows_TD.shape[1] - 1) / 2)
    return largest, bonferroni(np.full(pairs.size, p))


def lagged_correlation_p(first_TD: Floats, second_TD: Floats, *, skip_zero: bool = False) -> tuple[float, float]:
    """(largest |correlation| over all shifts, corrected p) of rows with their partners, averaged over rows.

    For each circular shift s, sum over t, i of a_ti b_t(i+s), a sum of T D products of independent standard normals: its
    distribution is normal to well within the thresholds used here (excess kurtosis 6 / (T D)). By FFT. With
    `skip_zero` (a = b), shift 0 is left out and of the others each counts once.
    """
    count, length = first_TD.shape
    spectrum = np.conj(fft.rfft(first_TD, axis=1)) * fft.rfft(second_TD, axis=1)
    sums = fft.irfft(spectrum.sum(axis=0), n=length)
    scale = math.sqrt(float((first_TD**2).sum()) * float((second_TD**2).sum()))
    correlations = sums / (scale or 1.0)
    if skip_zero:  # shifts s and D - s give the same sum; D/2 pairs it with itself, which doubles its variance
        correlations = correlations[1 : (length + 1) // 2]
    if not correlations.size:
        return 0.0, 1.0
    largest = float(np.abs(correlations).max())
    return largest, bonferroni(np.full(correlations.size, normal_p(largest * math.sqrt(count * length))))


def scale_trend_p(sum_of_squares_T: Floats, degrees: int, regressor_T: Floats) -> tuple[float, float]:
    """(slope, p) of log standard deviation against `regressor`: 0 when the noise does not follow it.

    The log of a chi-square mean of D squares has variance 2/D (delta method), hence log std has 1/(2D).
    """
    centred = regressor_T - regressor_T.mean()
    weight = float((centred**2).sum())
    if weight == 0:
        return 0.0, 1.0
    log_std = 0.5 * np.log(np.maximum(sum_of_squares_T / degrees, 1e-300))
    slope = float((centred * log_std).sum() / weight)
    return slope, float(normal_p(slope * math.sqrt(2 * degrees * weight)))


def clopper_pearson(successes: int, trials: int, alpha: float) -> tuple[float, float]:
    """Two one-sided bounds on a probability, each wrong with probability at most alpha (Clopper and Pearson 1934)."""
    low = 0.0 if successes == 0 else float(stats.beta.ppf(alpha, successes, trials - successes + 1))
    high = 1.0 if successes == trials else float(stats.beta.isf(alpha, successes + 1, trials - successes))
    return low, high


def count_duplicates(values: ArrayLike) -> int:
    """How many values equal an earlier one, bit by bit."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return int(flat.size - np.unique(flat.view(np.uint64)).size)


def single_precision_fraction(values: ArrayLike) -> float:
    """Fraction of doubles that are floats in disguise: about 2^-29 for doubles, 1 for noise drawn in fp32."""
    flat = np.asarray(values, dtype=np.float64).ravel()
    return float((flat.astype(np.float32) == flat).mean()) if flat.size else 0.0


def holds_nan(arrays: Sequence[Floats]) -> bool:
    return any(bool(np.isnan(array).any()) for array in arrays)
