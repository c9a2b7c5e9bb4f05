"""What the bounded support of a finite noise source costs in delta. Without torch: planning does not need it."""

import math

from scipy import stats

EDGE = math.sqrt(2 * 64 * math.log(2))
"""Box-Muller from a 63-bit uniform (k + 1/2) 2^-63 ends there, in standard deviations."""
# The bound below grows with the square root of the number of parameters; no model comes near this one.
MOST_PARAMETERS = 1 << 36


def noise_tail_delta(noise_multiplier: float, num_inclusions: float) -> float:
    """Delta that the bounded support of the noise costs: P(some output that is impossible without the example).

    With the example, coordinate i of the release is moved by a_i / sigma, where the a_i have norm at most 1; without it
    no output lies beyond the edge e. Both densities are cut Gaussians, so inside of the edge the privacy loss is that
    of the Gaussian; an outside output costs its probability, sum_i g(a_i) with g(a) = Q(e - a / sigma) - Q(e) and
    Q the upper tail. For e - 1 / sigma > 1, g(a) <= g'(0) a + (g(1) - g'(0)) a^2 (the remainder over a^2 grows), and
    |a|_1 <= sqrt(d), so the sum is at most g'(0) sqrt(d) + g(1). Each such step needs the example to be in it.

    Args:
        noise_multiplier: sigma as accounted.
        num_inclusions: expected number of steps with the example, q times the number of releases.
    """
    if EDGE - 1 / noise_multiplier <= 1:
        return min(1.0, num_inclusions)
    slope = float(stats.norm.pdf(EDGE)) / noise_multiplier
    single = float(stats.norm.sf(EDGE - 1 / noise_multiplier))
    return num_inclusions * (slope * math.sqrt(MOST_PARAMETERS) + single)


def noise_tail_of_cuts(noise_multiplier: float, sample_rate: float, count: int, num_examples: int, cap: int) -> float:
    """What an example costs in addition where it pushes another one out of a batch above the cap: the sum moves by up to 2.

    The noise without it may then be centred at the sum with the other one or without: in between, where only one of these two
    can be, the privacy loss is not that of the sampled Gaussian.

    Args:
        num_examples, cap: of the plan.
    """
    cut = float(stats.binom.sf(cap - 1, num_examples - 1, sample_rate))  # the others fill the batch
    return noise_tail_delta(noise_multiplier / 2, sample_rate * count * cut)


def noise_tail_of_several(noise_multiplier: float, sample_rate: float, count: int, copies: int) -> float:
    """The same for `copies` examples that are zeroed out together: P(some output that is impossible without them).

    Where j of them are drawn, the release moves by a vector of norm at most j, so that a coordinate costs g(a_i) with
    a_i <= j. As for one example, g(a) <= g'(0) a + (g(j) - g'(0) j) (a / j)^2 while e - j / sigma > 1, |a|_1 <= j sqrt(d)
    and |a|_2 <= j: that is what one example costs whose noise is sigma / j. j is binomial.

    Args:
        count: releases that one example can be in.
        copies: k, at least 1.
    """
    if copies == 1:
        return noise_tail_delta(noise_multiplier, sample_rate * count)
    # Beyond this many the edge is passed for certain, as far as the bound knows.
    certain = min(copies, max(0, math.ceil((EDGE - 1) * noise_multiplier) - 1))
    parts = [
        noise_tail_delta(noise_multiplier / drawn, count * float(stats.binom.pmf(drawn, copies, sample_rate)))
        for drawn in range(1, certain + 1)
    ]
    return min(1.0, math.fsum(parts) + count * float(stats.binom.sf(certain, copies, sample_rate)))
