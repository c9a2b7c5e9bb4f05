"""Epsilon of several examples of one owner, or copies of one, that are zeroed out together: what the cards and plans state.

Also what the bounded support of noise of version 0.1 costs one of them in delta. Planning needs no torch.
"""

import math
from dataclasses import replace
from typing import Protocol

from scipy import stats

from . import accountants

EDGE = math.sqrt(2 * 64 * math.log(2))
"""Box-Muller from a 63-bit uniform (k + 1/2) 2^-63 ends there, in standard deviations."""
# The bound below grows with the square root of the number of parameters; no model comes near this one.
MOST_PARAMETERS = 1 << 36


class ClaimedDelta(Protocol):
    """The numbers of a plan that a claim for several examples rests on."""

    @property
    def accounted_delta(self) -> float: ...

    @property
    def had_doubles(self) -> bool: ...


def tail_of_doubles(charged: accountants.ReleaseGroup, num_examples: int) -> float:
    """Returns what the bounded support of noise made of doubles, as version 0.1 drew it, costs in delta over all releases."""
    sigma, rate, cuts = charged.noise_multiplier, charged.sample_rate, 0.0
    if charged.cap is not None:
        # An example that pushes another one out of a batch above the cap moves the sum by up to 2. The noise without it may then
        # be centred at the sum with the other one or without: in between, where only one of these two can be, the privacy loss is
        # not that of the sampled Gaussian.
        cut = float(
            stats.binom.sf(charged.cap - 1, num_examples - 1, rate)
        )  # the others fill the batch
        cuts = _passes_the_edge(sigma / 2, rate * charged.count * cut)
    return cuts + _passes_the_edge(sigma, rate * charged.count)


def _passes_the_edge(noise_multiplier: float, num_inclusions: float) -> float:
    """P(some output that is impossible without the example).

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


def overflow_of_several(groups: accountants.Groups, copies: int) -> float:
    """What `copies` examples cost in delta because batches above the cap are cut, where epsilon leaves the cap out.

    Coins of the others are alike in both worlds. Unless in some release more than cap - k of them came up, nobody is cut,
    whatever the coins of the k, which are independent of that event: given it, each release is that of an uncapped batch. By
    joint convexity delta grows by at most the event's probability, which k-fold covers.
    """
    tails = [
        group.count
        * float(
            stats.binom.sf(
                group.cap - copies, max(group.num_examples - copies, 0), group.sample_rate
            )
        )
        for group in groups
        if group.cap is not None and group.num_examples is not None
    ]
    return copies * math.fsum(tails)


def epsilon_of_several(
    plan: ClaimedDelta, groups: accountants.Groups, copies: int, interval: float
) -> float:
    """Epsilon at the plan's delta, less what the cap costs that many examples.

    inf where what is left of delta is below PLD_SMALLEST_DELTA, and where noise was made of doubles: several may pass its edge
    together.

    Args:
        groups: what is charged.
        interval: grid of the privacy loss distribution, where there is one.
    """
    delta = plan.accounted_delta - overflow_of_several(groups, copies)
    if delta < accountants.PLD_SMALLEST_DELTA or (plan.had_doubles and copies > 1):
        return math.inf
    if all(group.sample_rate == 1 and group.cap is None for group in groups):
        # Every release holds all of them: one Gaussian with `copies` times the sensitivity.
        together = [
            replace(group, noise_multiplier=group.noise_multiplier / copies) for group in groups
        ]
        return accountants.epsilon(together, delta)
    return accountants.epsilon_group(groups, delta, copies, interval)
