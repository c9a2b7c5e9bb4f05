"""The tests behind the audits. Every function returns a p-value that is right or too large under the null hypothesis.

All p-values are two-sided unless the name says otherwise, and `bonferroni` is the only correction for multiplicity: it needs
no independence, and the effects that an audit looks for are so large that a sharper correction buys nothing.
"""

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import ArrayLike, NDArray
from scipy import fft, stats

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


def size_spread_p(sizes: ArrayLike, trials: int, probability: float, cap: int | None = None) -> tuple[float, float]:
    """(variance over that of Binomial(trials, probability), p): do sizes vary as much as they must, and no more?

    The statistic is the sum of squared distances from the mean, in steps of a grid, and its law under the null hypothesis is
    computed exactly, as the power of the law of a single size (a convolution, by FFT, whose error is below 1e-10). Sizes that
    never vary are as far out as those that vary too much. Exact counts of sizes above and below the mean find those that are
    cut there.

    Args:
        sizes: of independent batches, after the cap.
    """
    counts = np.asarray(sizes, dtype=np.int64)
    mean, variance = trials * probability, trials * probability * (1 - probability)
    if variance == 0 or not counts.size:
        return 1.0, 1.0 if (counts == trials).all() else 0.0
    top = int(np.clip((1 << 16) // counts.size, 64, 1 << 12))  # the grid ends at 8 standard deviations

    def level(size: NDArray[np.int64]) -> NDArray[np.int64]:
        capped = size if cap is None else np.minimum(size, cap)
        steps: NDArray[np.int64] = np.minimum(top - 1, (capped - mean) ** 2 / variance * (top / 64)).astype(np.int64)
        return steps

    reach = 40 * (1 + math.sqrt(variance))
    support = np.arange(max(0, math.floor(mean - reach)), min(trials, math.ceil(mean + reach)) + 1)
    law = np.bincount(level(support), stats.binom.pmf(support, trials, probability), minlength=top)
    length = fft.next_fast_len(counts.size * (top - 1) + 1, real=True)
    total = np.maximum(fft.irfft(fft.rfft(law, length) ** counts.size, length), 0)
    observed = int(level(counts).sum())
    p_values = [float(two_sided(total[: observed + 1].sum(), total[observed:].sum()))]
    single = stats.binom.pmf(support, trials, probability)
    for side in (1, -1):
        beyond = side * ((support if cap is None else np.minimum(support, cap)) - mean) > 0.5
        p_values.append(float(binomial_p((side * (counts - mean) > 0.5).sum(), counts.size, single[beyond].sum())))
    return float(((counts - mean) ** 2).mean() / variance), max(bonferroni(p_values), 1e-10)
