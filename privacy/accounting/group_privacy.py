"""Epsilon of several examples of one owner, or copies of one, that are zeroed out together.

Also the cost in delta of the bounded support of noise of version 0.1. Planning needs no torch.
"""

import math
from dataclasses import replace
from typing import Protocol

from scipy import stats

from . import accountants

EDGE = math.sqrt(2 * 64 * math.log(2))
"""The largest normal, in standard deviations, that Box-Muller makes of 63-bit uniforms
(k + 1/2) 2^-63."""
# The bound below grows with the square root of the number of parameters; no model comes near this
# one.
MOST_PARAMETERS = 1 << 36


class ClaimedDelta(Protocol):
    """The numbers of a plan behind a claim for several examples."""

    @property
    def accounted_delta(self) -> float: ...

    @property
    def had_doubles(self) -> bool: ...


def tail_of_doubles(releases: accountants.ReleaseGroup, num_examples: int) -> float:
    """Returns the cost in delta of the bounded support of version 0.1's noise, over all releases.

    That noise was made of doubles.
    """
    sigma = releases.noise_multiplier
    num_inclusions = releases.sample_rate * releases.count
    delta = 0.0
    if releases.cap is not None:
        # An example that pushes another one out of a batch above the cap moves the sum by up to 2.
        # The noise without it may then be centred at the sum with the other one or without: in
        # between, where only one of these two can be, the privacy loss is not that of the sampled
        # Gaussian. The tail is the probability that the other examples fill the batch.
        tail = stats.binom.sf(releases.cap - 1, num_examples - 1, releases.sample_rate)
        delta = _passes_the_edge(sigma / 2, num_inclusions * float(tail))
    return delta + _passes_the_edge(sigma, num_inclusions)


def _passes_the_edge(noise_multiplier: float, num_inclusions: float) -> float:
    """Returns P(some output that is impossible without the example).

    With the example, coordinate i of the release is moved by a_i / sigma, where the a_i have norm
    at most 1; without it no output is beyond the edge e. Both densities are cut Gaussians, so
    inside of the edge the privacy loss is that of the Gaussian; an outside output costs its
    probability, sum_i g(a_i) with g(a) = Q(e - a / sigma) - Q(e) and Q the upper tail. For
    e - 1 / sigma > 1, g(a) <= g'(0) a + (g(1) - g'(0)) a^2 (the remainder over a^2 grows), and
    |a|_1 <= sqrt(d), so the sum is at most g'(0) sqrt(d) + g(1). Each such step needs the example
    to be in it.

    Args:
        noise_multiplier: sigma as accounted.
        num_inclusions: expected number of steps with the example, q times the number of releases.
    """
    if EDGE - 1 / noise_multiplier <= 1:
        return min(1.0, num_inclusions)
    slope = float(stats.norm.pdf(EDGE)) / noise_multiplier
    single = float(stats.norm.sf(EDGE - 1 / noise_multiplier))
    return num_inclusions * (slope * math.sqrt(MOST_PARAMETERS) + single)


def overflow_of_several(groups: accountants.Groups, copies: int) -> float:
    """Returns the cost in delta for `copies` examples of the cap, where epsilon leaves it out.

    Coins of the other examples are alike in both worlds. Unless in some release more than cap - k
    of them came up, no example is cut, whatever the coins of the k, which are independent of that
    event: given it, each release is that of an uncapped batch. By joint convexity delta grows by at
    most the event's probability, which k-fold covers.
    """
    tails = []
    for group in groups:
        if group.cap is None or group.num_examples is None:
            continue
        num_others = max(group.num_examples - copies, 0)
        tail = stats.binom.sf(group.cap - copies, num_others, group.sample_rate)
        tails.append(group.count * float(tail))
    return copies * math.fsum(tails)


def epsilon_of_several(
    plan: ClaimedDelta, groups: accountants.Groups, copies: int, interval: float
) -> float:
    """Returns epsilon at the plan's delta, less the cost of the cap for that many examples.

    inf where what is left of delta is below PLD_SMALLEST_DELTA, and where noise was made of
    doubles: several examples may pass its edge together.

    Args:
        groups: the charges.
        interval: grid of the privacy loss distribution, where there is one.
    """
    delta = plan.accounted_delta - overflow_of_several(groups, copies)
    if delta < accountants.PLD_SMALLEST_DELTA or (plan.had_doubles and copies > 1):
        return math.inf
    if all(group.sample_rate == 1 and group.cap is None for group in groups):
        # Every release holds all of them: one Gaussian with `copies` times the sensitivity.
        gaussians = []
        for group in groups:
            sigma = group.noise_multiplier / copies
            gaussians.append(replace(group, noise_multiplier=sigma))
        return accountants.epsilon(gaussians, delta)
    return accountants.epsilon_group(groups, delta, copies, interval)
