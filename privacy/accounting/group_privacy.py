"""Epsilon of several examples of one owner, or copies of one, that are zeroed out together: what the cards and plans state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import TYPE_CHECKING

from scipy import stats

from . import accountants
from .noise_tail import noise_tail_of_cuts, noise_tail_of_several

if TYPE_CHECKING:
    from ..plan import PrivacyPlan


def noise_tail_of_plan(plan: PrivacyPlan, copies: int) -> float:
    """What the bounded support of a plan's noise costs `copies` examples in delta, over all `max_intents`."""
    # Nothing is paid where nothing is claimed, nor in certified arithmetic, whose sampler is exact.
    if not plan.formal_guarantee or not plan.arithmetic_option.has_an_edge:
        return 0.0
    one = plan.release_group(plan.max_intents)
    cuts = 0.0
    if one.cap is not None and copies == 1:  # several pay for each batch that may be cut: `overflow_of_several`
        cuts = noise_tail_of_cuts(
            one.noise_multiplier,
            one.sample_rate,
            one.count,
            plan.num_examples,
            one.cap,
        )
    return cuts + noise_tail_of_several(one.noise_multiplier, one.sample_rate, one.count, copies)


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
