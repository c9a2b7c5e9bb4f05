"""The numbers of the privacy card: every epsilon, bound and curve, from what the ledger charged."""

from __future__ import annotations

import math
import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

from privacy import accounting
from privacy.accounting import COARSE_INTERVAL, PLD_SMALLEST_DELTA, ReleaseGroup
from privacy.epsilon_table import EpsilonTable
from privacy.ledger_format import LedgerState
from privacy.plan import PrivacyPlan

OTHER_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10)
GROUP_SIZES = (2, 5)
# Guidance beside the claim: on coarser grids these are still upper bounds (within 0.1 %) at a tenth of the time.
_GROUP_INTERVAL = 5e-3
_CURVE_POINTS = 64
# Beyond this nothing is protected, and the grids of curves, groups and PRV would grow into minutes and gigabytes.
LARGEST_DETAILED_EPSILON = 50.0


def accounting_numbers(state: LedgerState, plan: PrivacyPlan) -> dict[str, Any]:
    """Epsilons of everything charged; all of them None without a formal guarantee."""
    delta = plan.target_delta
    numbers: dict[str, Any] = {
        "epsilon": None,
        "delta": delta,
        "delta_times_n": delta * plan.num_examples,
        "accountant_at_opening": state.opened.get("accountant"),
        "accountant": accounting.accountant_version(),
        "accountant_python": platform.python_version(),
        "statement": _accountant_statement(delta) if plan.formal_guarantee else _NO_ACCOUNT,
        "epsilon_target": None,
        "epsilon_planned": None,
        "epsilon_with_reserve": None,
        "epsilon_rdp": None,
        "epsilon_prv": None,
        "prv_accountant": None,
        "epsilon_replace_one": None,
        "epsilon_group": {str(size): None for size in GROUP_SIZES},
        "epsilon_by_delta": [],
        "epsilon_by_attempts": [],
        "tan": None,
    }
    if not plan.formal_guarantee:
        return numbers
    groups = state.charged_groups()
    claim = state.epsilon()
    assert claim is not None  # formal_guarantee
    numbers |= {
        "epsilon": _finite(claim),
        "epsilon_target": plan.target_epsilon,
        "epsilon_planned": _finite(plan.epsilon_planned),
        "epsilon_with_reserve": _finite(plan.epsilon_with_reserve),
        "epsilon_rdp": _finite(accounting.epsilon_rdp(groups, delta)),
        "tan": _finite(accounting.tan(groups)),
    }
    if claim > LARGEST_DETAILED_EPSILON:
        return numbers
    numbers["epsilon_by_attempts"] = _epsilon_by_attempts(plan, state.num_charged, claim)
    # Below that delta the claim is by RDP, and the others are not trusted.
    return numbers | _pld_numbers(groups, delta, claim) if delta >= PLD_SMALLEST_DELTA else numbers


def _pld_numbers(groups: Sequence[ReleaseGroup], delta: float, claim: float) -> dict[str, Any]:
    by_delta = {other: accounting.epsilon_pld(groups, other, COARSE_INTERVAL) for other in OTHER_DELTAS}
    by_delta[delta] = claim
    lower, _, upper = accounting.epsilon_prv(groups, delta)
    return {
        "epsilon_replace_one": _finite(accounting.epsilon_replace_one(groups, delta, COARSE_INTERVAL)),
        "epsilon_group": {
            str(size): _finite(accounting.epsilon_group(groups, delta, size, _GROUP_INTERVAL)) for size in GROUP_SIZES
        },
        "epsilon_by_delta": [[other, _finite(by_delta[other])] for other in sorted(by_delta, reverse=True)],
        "epsilon_prv": [lower, upper],
        "prv_accountant": _version("prv-accountant"),
    }


def _epsilon_by_attempts(plan: PrivacyPlan, num_charged: int, claim: float) -> list[list[float | None]]:
    """[attempts, epsilon] at up to 64 points from 0 to everything charged; upper bounds at the planned noise."""
    if num_charged == 0:
        return [[0, 0.0]]
    table = EpsilonTable(plan.release_group(1), plan.target_delta, num_charged)
    counts = sorted({math.ceil(num_charged * point / _CURVE_POINTS) for point in range(_CURVE_POINTS)})
    values = [min(table.epsilon(count), claim) for count in counts]
    return [[count, _finite(value)] for count, value in zip(counts, values, strict=True)] + [
        [num_charged, _finite(claim)]
    ]


def _accountant_statement(delta: float) -> str:
    if delta < PLD_SMALLEST_DELTA:
        return (
            "The claim is by Renyi DP (Mironov et al. 2019), the only accountant trusted at so small a delta, with the "
            "overflow of the cap charged in delta. Every attempt in the ledger is charged, whether it ended or not."
        )
    return (
        "The claim is an upper bound by privacy loss distributions (Koskela et al. 2020; Doroshenko et al. 2022; value "
        "interval 1e-4, pessimistic), with the cap of the batches charged. Every attempt in the ledger is charged, "
        "whether it ended or not: a crash costs budget. No central-limit approximation is used."
    )


_NO_ACCOUNT = "Nothing is accounted for and no epsilon is stated, because the run makes no formal claim."


def _finite(value: float | None) -> float | None:
    return value if value is not None and math.isfinite(value) else None


def _version(distribution: str) -> str | None:
    try:
        return f"{distribution} {version(distribution)}"
    except PackageNotFoundError:
        return None
