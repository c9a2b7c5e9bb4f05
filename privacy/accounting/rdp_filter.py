"""How several runs on the same data compose: PLD when all were fixed in advance, an RDP filter when one was not.

A run whose parameters were chosen after outputs of another were seen is adaptive: PLD and the usual choice of the best
order afterwards no longer hold. An RDP filter of one order, fixed before the first run, does (Feldman and Zrnic 2021, arXiv
2008.11193, theorem 4.3): runs may be added as long as the sum of their RDP at that order stays within the budget.
"""

import math
from collections.abc import Sequence

from dp_accounting import NeighboringRelation
from dp_accounting.rdp import RdpAccountant

from .accountants import ReleaseGroup, epsilon, overflow_probability

_ORDERS = [1.1, 1.25, 1.5, 1.75, *(2 + step / 4 for step in range(25)), *range(9, 65), 80, 96, 128, 192, 256, 512]


def filter_order(first: ReleaseGroup, epsilon_total: float, delta: float) -> float:
    """The order at which most runs like the first one fit: a function of what was fixed before any output was seen.

    At one order epsilon is linear in the number of runs, rho per run plus the conversion; of sampled Gaussians rho
    explodes above some order, so the budget alone (as for plain Gaussians) would choose badly.
    """

    def capacity(order: float) -> float:
        one, two = (filtered_epsilon([first.times(k * first.count)], delta, order, epsilon_total) for k in (1, 2))
        if not 0 < one < two < math.inf:
            return -math.inf
        return (epsilon_total - (2 * one - two)) / (two - one)

    best: float = max(_ORDERS, key=capacity)
    return best


def filtered_epsilon(groups: Sequence[ReleaseGroup], delta: float, order: float, ceiling: float) -> float:
    """Epsilon at `delta` from the RDP of all groups at this one order; inf when the caps' overflow leaves no delta.

    Args:
        ceiling: the total budget, at which the overflow is charged in delta (privacy.accounting.accountants.with_overflow).
    """
    left = delta - overflow_probability(groups) * (1 + math.exp(min(ceiling, 700.0)))
    if left <= 0 or any(group.noise_multiplier == 0 for group in groups):
        return math.inf
    accountant = RdpAccountant([order], NeighboringRelation.REPLACE_SPECIAL)
    for group in groups:
        accountant.compose(group.without_cap().event())
    return float(accountant.get_epsilon(left))


def total_epsilon(
    groups: Sequence[ReleaseGroup], delta: float, *, adaptive: bool, order: float, ceiling: float
) -> float:
    """Epsilon of all runs together. Once one run is adaptive the filter covers all of them, earlier ones included."""
    if not groups:
        return 0.0
    if adaptive:
        return filtered_epsilon(groups, delta, order, ceiling)
    return epsilon(groups, delta)
