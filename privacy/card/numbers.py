"""The numbers of the privacy card: every epsilon, bound and curve, from what the ledger charged."""

from __future__ import annotations

import functools
import math
import platform
from collections.abc import Callable, Sequence
from dataclasses import replace
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from privacy.accounting import accountants as accounting
from privacy.accounting.accountants import COARSE_INTERVAL, FINE_INTERVAL, PLD_SMALLEST_DELTA, ReleaseGroup
from privacy.card.curves import curves
from privacy.ledger.records import LedgerState
from privacy.plan import PrivacyPlan

OTHER_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
GROUP_SIZES = (2, 5)
_CURVE_POINTS = 40
# Beyond this nothing is protected: the claim is given on a coarser grid, and what surrounds it is left out, because the
# grids would grow into minutes and gigabytes.
LARGEST_DETAILED_EPSILON = 50.0


def accounting_numbers(state: LedgerState, plan: PrivacyPlan) -> dict[str, Any]:
    """Epsilons of everything charged; all of them None without a formal guarantee."""
    delta = plan.accounted_delta
    numbers: dict[str, Any] = {
        "epsilon": None,
        "delta": plan.target_delta,
        "delta_times_n": plan.target_delta * plan.num_examples,
        "accountant_at_opening": state.opened.get("accountant"),
        "accountant": accounting.accountant_version(),
        "accountant_python": platform.python_version(),
        "statement": _statement(plan),
        "value_interval": None,
        "noise_tail_delta": None,
        "epsilon_target": None,
        "epsilon_planned": None,
        "epsilon_with_reserve": None,
        "epsilon_rdp": None,
        "epsilon_prv": None,
        "prv_accountant": None,
        "epsilon_replace_one": None,
        "epsilon_group": {str(size): None for size in GROUP_SIZES},
        "max_examples_per_owner": state.opened.get("max_examples_per_owner"),
        "epsilon_owner": None,
        "epsilon_by_delta": [],
        "epsilon_by_attempts": [],
        "delta_by_epsilon": [],
        "attack": None,
        "tan": None,
    }
    if not plan.formal_guarantee:
        return numbers
    groups = state.charged_groups()
    claim, interval = claimed_epsilon(groups, delta)
    planned, _ = claimed_epsilon([plan.release_group(plan.num_steps)], delta)
    reserve, _ = claimed_epsilon([plan.release_group(plan.max_intents)], delta)
    numbers |= {
        "epsilon": _finite(claim),
        "value_interval": interval,
        "noise_tail_delta": plan.noise_tail_delta,
        "epsilon_target": plan.target_epsilon,
        "epsilon_planned": _finite(planned),
        "epsilon_with_reserve": _finite(reserve),
        "epsilon_rdp": _finite(_rdp(tuple(groups), delta)),
        "tan": _finite(accounting.tan(groups)),
    }
    if claim > LARGEST_DETAILED_EPSILON:
        return numbers
    if planned <= LARGEST_DETAILED_EPSILON:
        numbers["epsilon_by_attempts"] = _epsilon_by_attempts(state, plan, claim)
    numbers |= curves(groups, claim, plan.noise_tail_delta)
    # Below that delta the claim is by RDP, and the others are not trusted.
    if delta < PLD_SMALLEST_DELTA:
        return numbers
    owner = numbers["max_examples_per_owner"]
    if owner is not None:
        numbers["epsilon_owner"] = _finite(_epsilon_group(groups, delta, owner, claim))
    return numbers | _pld_numbers(groups, plan, claim)


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


def _pld_numbers(groups: Sequence[ReleaseGroup], plan: PrivacyPlan, claim: float) -> dict[str, Any]:
    delta, tail = plan.accounted_delta, plan.noise_tail_delta
    others = [other for other in OTHER_DELTAS if other > 2 * tail]
    by_delta = dict(zip(others, _epsilons(groups, [other - tail for other in others]), strict=True))
    by_delta[plan.target_delta] = claim
    lower, _, upper = accounting.epsilon_prv(groups, delta)
    return {
        "epsilon_replace_one": _finite(accounting.epsilon_replace_one(groups, delta, _guide_interval(claim))),
        "epsilon_group": {str(size): _finite(_epsilon_group(groups, delta, size, claim)) for size in GROUP_SIZES},
        "epsilon_by_delta": [[other, _finite(by_delta[other])] for other in sorted(by_delta, reverse=True)],
        "epsilon_prv": [lower, upper],
        "prv_accountant": _version("prv-accountant"),
    }


def _epsilons(groups: Sequence[ReleaseGroup], deltas: Sequence[float]) -> list[float]:
    """One composition for all of them."""
    if not groups:
        return [0.0] * len(deltas)
    whole = accounting.loss_distribution(groups, COARSE_INTERVAL)
    return [float(whole.get_epsilon_for_delta(delta)) for delta in deltas]


def _guide_interval(claim: float) -> float:
    """The grid of guidance beside the claim: still an upper bound, within 0.1 %, at a tenth of the time."""
    return min(max(claim / 400, COARSE_INTERVAL), 2e-2)


def _epsilon_group(groups: Sequence[ReleaseGroup], delta: float, size: int, claim: float) -> float:
    if all(group.sample_rate == 1 and group.cap is None for group in groups):
        # Every release holds all records of the group: one Gaussian with `size` times the sensitivity.
        return accounting.epsilon(
            [replace(group, noise_multiplier=group.noise_multiplier / size) for group in groups], delta
        )
    return accounting.epsilon_group(groups, delta, size, _guide_interval(claim))


def _epsilon_by_attempts(state: LedgerState, plan: PrivacyPlan, claim: float) -> list[list[float | None]]:
    """[attempts, epsilon] at up to 41 points from 0 to everything charged; upper bounds at the planned noise."""
    num_charged = state.num_charged
    if num_charged == 0:
        return [[0, 0.0]]
    counts = sorted({math.ceil(num_charged * point / _CURVE_POINTS) for point in range(_CURVE_POINTS)})
    evaluate = _shuffled_epsilon(state, plan) if plan.sampling == "shuffle" else _poisson_epsilon(plan, claim)
    values = [min(evaluate(count), claim) for count in counts]
    return [[count, _finite(value)] for count, value in zip(counts, values, strict=True)] + [
        [num_charged, _finite(claim)]
    ]


def _poisson_epsilon(plan: PrivacyPlan, claim: float) -> Callable[[int], float]:
    """count -> epsilon on a grid that is coarse for a plot: within 1 % above, in a tenth of a second each."""
    delta = plan.accounted_delta
    if delta < PLD_SMALLEST_DELTA:
        return lambda count: accounting.epsilon([plan.release_group(count)], delta)
    one = accounting.one_step_distribution(plan.release_group(1), min(max(claim / 2000, FINE_INTERVAL), 4e-3))
    return lambda count: float(one.self_compose(count).get_epsilon_for_delta(delta)) if count else 0.0


def _shuffled_epsilon(state: LedgerState, plan: PrivacyPlan) -> Callable[[int], float]:
    """Shuffled data: what one example can be in after the first intents; torn lines count from the start."""

    def evaluate(count: int) -> float:
        steps = [intent.step for intent in state.intents[:count]]
        replays = len(steps) - len(set(steps)) + state.charged_torn
        return accounting.epsilon([plan.shuffled_group(max(steps, default=0), replays)], plan.accounted_delta)

    return evaluate


def _statement(plan: PrivacyPlan) -> str:
    if not plan.formal_guarantee:
        return _NO_ACCOUNT
    if plan.sampling == "shuffle":
        return _SHUFFLED
    return _accountant_statement(plan.accounted_delta)


def _accountant_statement(delta: float) -> str:
    if delta < PLD_SMALLEST_DELTA:
        return (
            "The claim is by Renyi DP (Mironov et al. 2019), the only accountant trusted at so small a delta, with the "
            "overflow of the cap charged in delta. Every attempt in the ledger is charged, whether it ended or not."
        )
    return (
        "The claim is an upper bound by privacy loss distributions (Koskela et al. 2020; Doroshenko et al. 2022; value "
        "interval 1e-4, pessimistic; coarser where epsilon is above 50), with the cap of the batches charged. Every "
        "attempt in the ledger is charged, "
        "whether it ended or not: a crash costs budget. No central-limit approximation is used."
    )


_SHUFFLED = (
    "The claim is exact for shuffled data without any amplification: one Gaussian mechanism with mu = sqrt(k) / sigma, "
    "where k is the most releases that one example can be in, epochs rounded up plus repeats (Dong et al. 2022; Balle "
    "and Wang 2018)."
)
_NO_ACCOUNT = "Nothing is accounted for and no epsilon is stated, because the run makes no formal claim."


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return None
