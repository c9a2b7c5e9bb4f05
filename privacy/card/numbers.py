"""The numbers of the privacy card: every epsilon, bound and curve, from what the ledger charged.

The trade-off function bounds every membership inference attack, whatever it knows: at false-positive rate alpha its
true-positive rate is at most 1 - beta(alpha) (Dong, Roth and Su 2022). (epsilon, delta(epsilon)) for all epsilon give
it exactly (proposition 2.13 there); finitely many of them, each an upper bound, give an upper bound.
"""

from __future__ import annotations

import contextlib
import functools
import math
import platform
from collections.abc import Sequence
from importlib.metadata import version

import numpy as np

from ..accounting import accountants as accounting
from ..accounting.accountants import COARSE_INTERVAL, FINE_INTERVAL, PLD_SMALLEST_DELTA, ReleaseGroup
from ..accounting.attack_risk import FALSE_POSITIVE_RATES, true_positive_bound
from ..accounting.epsilon_table import EpsilonTable
from ..accounting.group_privacy import epsilon_of_several
from ..ledger.records import LedgerState
from .model import STATEMENTS, Accounting, Attack, Attempts

GROUP_SIZES = (2, 5)
SMALLEST_FALSE_POSITIVE = 1e-5
# Beyond this nothing is protected: the claim is given on a coarser grid, and what surrounds it is left out, because the
# grids would grow into minutes and gigabytes.
LARGEST_DETAILED_EPSILON = 50.0


def accounting_numbers(state: LedgerState, num_torn: int, num_done: int) -> Accounting:
    """Epsilons of everything charged; all of them None without a formal guarantee.

    Args:
        num_torn: torn lines in the ledger.
        num_done: attempts whose update was applied.
    """
    plan = state.plan
    delta, tail = plan.accounted_delta, plan.noise_tail_delta
    used = "by_rdp" if delta < PLD_SMALLEST_DELTA else "by_pld"
    attempts = Attempts(
        charged=state.num_charged, allowed=plan.max_intents, done=num_done, torn_lines=num_torn,
        repeats=sum(intent.attempt > 0 for intent in state.intents), torn_lines_charged=state.charged_torn,
    )  # fmt: skip
    numbers = Accounting(
        delta=plan.target_delta, attempts=attempts,
        accountant_at_opening=state.opened.get("accountant"), accountant=accounting.accountant_version(),
        accountant_python=platform.python_version(), epsilon_group=dict.fromkeys(map(str, GROUP_SIZES)),
        statement=STATEMENTS[used if plan.formal_guarantee else "no_account"],
        max_examples_per_owner=state.opened.get("max_examples_per_owner"),
    )  # fmt: skip
    if not plan.formal_guarantee:
        return numbers
    groups = state.charged_groups()
    claim, interval = claimed_epsilon(groups, delta)
    planned, _ = claimed_epsilon([plan.release_group(plan.num_steps)], delta)
    reserve, _ = claimed_epsilon([plan.release_group(plan.max_intents)], delta)
    numbers = numbers.updated(
        epsilon=claim, value_interval=interval, noise_tail_delta=tail, epsilon_target=plan.target_epsilon,
        epsilon_planned=planned, epsilon_with_reserve=reserve, epsilon_rdp=_rdp(tuple(groups), delta),
    )  # fmt: skip
    if claim > LARGEST_DETAILED_EPSILON:
        return numbers
    if planned <= LARGEST_DETAILED_EPSILON:
        numbers = numbers.updated(epsilon_by_attempts=_epsilon_by_attempts(state, claim))
    numbers = numbers.updated(attack=attack_bounds(groups, claim, tail))
    # Below that delta the claim is by RDP, and the others are not trusted.
    if delta < PLD_SMALLEST_DELTA:
        return numbers
    owner, bracket = numbers.max_examples_per_owner, None
    with contextlib.suppress(accounting.CrossCheckUnavailable):
        lower, _, upper = accounting.epsilon_prv(groups, delta)
        bracket = (lower, upper)
    # The grid of the guidance that surrounds the claim: still an upper bound, within 0.1 %, at a tenth of the time.
    guide = min(max(claim / 400, COARSE_INTERVAL), 2e-2)
    return numbers.updated(
        epsilon_owner=None if owner is None else epsilon_of_several(plan, groups, owner, guide),
        epsilon_replace_one=accounting.epsilon_replace_one(groups, delta, guide),
        epsilon_group={str(size): epsilon_of_several(plan, groups, size, guide) for size in GROUP_SIZES},
        epsilon_prv=bracket,
        prv_accountant=f"prv-accountant {version('prv-accountant')}",
    )


def claimed_epsilon(groups: Sequence[ReleaseGroup], delta: float) -> tuple[float, float | None]:
    """(epsilon, value interval of the grid): `accounting.epsilon`, in bounded time however hopeless it is.

    The grid has about epsilon / interval points (minutes at sigma 0.1), so that above LARGEST_DETAILED_EPSILON the
    interval grows with epsilon. A coarser grid still gives an upper bound. The interval is None for the accountants
    that have none.
    """
    unsampled = all(group.sample_rate == 1 and group.cap is None for group in groups)
    if unsampled or delta < PLD_SMALLEST_DELTA:
        return accounting.epsilon(groups, delta), None
    upper = _rdp(tuple(groups), delta)
    if upper <= LARGEST_DETAILED_EPSILON:
        return accounting.epsilon(groups, delta), FINE_INTERVAL
    if not math.isfinite(upper):
        return upper, None
    interval = FINE_INTERVAL * 10 ** math.ceil(math.log10(upper / LARGEST_DETAILED_EPSILON))
    claim = accounting.epsilon_pld(groups, delta, interval)
    if claim <= LARGEST_DETAILED_EPSILON:
        return accounting.epsilon(groups, delta), FINE_INTERVAL
    return claim, interval


@functools.lru_cache(maxsize=8)
def _rdp(groups: tuple[ReleaseGroup, ...], delta: float) -> float:
    return accounting.epsilon_rdp(groups, delta)


def _epsilon_by_attempts(state: LedgerState, claim: float) -> list[tuple[int, float]]:
    """(attempts, upper bound of epsilon) from 0 to everything charged, for a plot: within 1 % above."""
    plan, charged = state.plan, state.num_charged
    if charged == 0:
        return [(0, 0.0)]
    step = min(max(claim / 2000, FINE_INTERVAL), 4e-3)
    table = EpsilonTable(plan.release_group(1), plan.accounted_delta, charged, bands=plan.bands, interval=step)
    counts = (min(count, charged) for count in table.counts)
    return [(0, 0.0), *((count, claim if count == charged else min(table.epsilon(count), claim)) for count in counts)]


def attack_bounds(groups: Sequence[ReleaseGroup], claim: float, tail: float) -> Attack:
    """What the points (epsilon, delta) bound from epsilon 0 to where delta is 1e-11, the larger delta of both directions.

    Args:
        claim: epsilon of the claim; the grid ends at twice that if delta never falls to 1e-11.
        tail: delta that the bounded support of the noise costs, added to every delta.
    """
    epsilons, deltas = np.zeros(1), np.full(1, tail)
    if any(group.count and group.sample_rate for group in groups):
        distribution = accounting.loss_distribution(groups, COARSE_INTERVAL)
        last = distribution.get_epsilon_for_delta(1e-11)
        # Denser near 0, where the trade-off curve bends.
        epsilons = (last if math.isfinite(last) else 2 * claim) * np.linspace(0, 1, 96) ** 1.5
        deltas = np.asarray(distribution.get_delta_for_epsilon(epsilons), dtype=np.float64)
        # Below 1e-12 only rounding is left; delta falls with epsilon, so a running minimum is a bound as well.
        deltas = np.minimum(np.minimum.accumulate(np.clip(deltas, 1e-12, 1) + tail), 1.0)
    rates = np.unique(np.concatenate([np.geomspace(SMALLEST_FALSE_POSITIVE, 1, 101), FALSE_POSITIVE_RATES]))
    return Attack(
        advantage=float(deltas[0]),
        true_positive={f"{rate:g}": true_positive_bound(rate, epsilons, deltas) for rate in FALSE_POSITIVE_RATES},
        curve=tuple((float(rate), true_positive_bound(float(rate), epsilons, deltas)) for rate in rates),
    )
