"""Epsilon of several examples of one owner, or copies of one, that are zeroed out together: what the cards and plans state.

Also what the bounded support of a finite noise source costs one of them, or several, in delta. Planning needs no torch.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from scipy import stats

from . import accountants

if TYPE_CHECKING:
    from ..plan import PrivacyPlan


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


def noise_tail_of_plan(plan: PrivacyPlan, copies: int) -> float:
    """What the bounded support of a plan's noise costs `copies` examples in delta, over all `max_intents`."""
    # Nothing is paid where nothing is claimed, nor in certified arithmetic, whose sampler is exact.
    if not plan.formal_guarantee or not plan.arithmetic_option.has_an_edge:
        return 0.0
    one, cuts = plan.release_group(plan.max_intents), 0.0
    sigma, rate = one.noise_multiplier, one.sample_rate
    if one.cap is not None and copies == 1:  # several pay for each batch that may be cut: `overflow_of_several`
        # An example that pushes another one out of a batch above the cap moves the sum by up to 2. The noise without it may then
        # be centred at the sum with the other one or without: in between, where only one of these two can be, the privacy loss is
        # not that of the sampled Gaussian.
        cut = float(stats.binom.sf(one.cap - 1, plan.num_examples - 1, rate))  # the others fill the batch
        cuts = noise_tail_delta(sigma / 2, rate * one.count * cut)
    return cuts + noise_tail_of_several(sigma, rate, one.count, copies)


def overflow_of_several(groups: accountants.Groups, copies: int) -> float:
    """What `copies` examples cost in delta because batches above the cap are cut, where epsilon leaves the cap out.

    Coins of the others are alike in both worlds. Unless in some release more than cap - k of them came up, nobody is cut,
    whatever the coins of the k, which are independent of that event: given it, each release is that of an uncapped batch. By
    joint convexity delta grows by at most the event's probability, which k-fold covers.
    """
    tails = [
        group.count * float(stats.binom.sf(group.cap - copies, max(group.num_examples - copies, 0), group.sample_rate))
        for group in groups
        if group.cap is not None and group.num_examples is not None
    ]
    return copies * math.fsum(tails)


def epsilon_of_several(plan: PrivacyPlan, groups: accountants.Groups, copies: int, interval: float) -> float:
    """Epsilon at the plan's delta, less what the noise's edge and the cap cost that many examples.

    inf where what is left of delta is below PLD_SMALLEST_DELTA: together they may pass the edge, and then no epsilon holds.

    Args:
        groups: what is charged.
        interval: grid of the privacy loss distribution, where there is one.
    """
    delta = plan.target_delta - noise_tail_of_plan(plan, copies) - overflow_of_several(groups, copies)
    if delta < accountants.PLD_SMALLEST_DELTA:
        return math.inf
    if all(group.sample_rate == 1 and group.cap is None for group in groups):
        # Every release holds all of them: one Gaussian with `copies` times the sensitivity.
        together = [replace(group, noise_multiplier=group.noise_multiplier / copies) for group in groups]
        return accountants.epsilon(together, delta)
    return accountants.epsilon_group(groups, delta, copies, interval)
