"""Computes the numbers of a privacy plan: epsilon by every accountant, groups, and attacks."""

import math
from collections.abc import Callable
from typing import Any

from privacy.accounting import accountants as accounting
from privacy.accounting.group_privacy import epsilon_of_several
from privacy.plan.numbers import PrivacyPlan

# Group epsilons are guidance and no claim; a coarse grid is still an upper bound (0.1 % here), and
# 25 times faster.
_GROUP_INTERVAL = 5e-3


def summarise(
    plan: PrivacyPlan,
    warn: Callable[[str], None],
    *,
    extras: bool = True,
    max_examples_per_owner: int | None = None,
) -> dict[str, Any]:
    """Returns all numbers of the plan.

    An epsilon that does not exist (no noise, delta too small for PLD) is None.

    Args:
        warn: called with one line about a cross-check that cannot be done.
        extras: adds the guarantee for other neighbours and against an attacker (slower).
        max_examples_per_owner: adds the epsilon of an owner of this many examples.
    """
    option_rows = []
    for option in plan.options.values():
        option_rows += [list(row) for row in option.rows(plan)]
    result: dict[str, Any] = {
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "reserved_attempts": plan.reserved_attempts,
        "cap": plan.cap,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "arithmetic": plan.arithmetic,
        "target_epsilon": plan.target_epsilon,
        "formal_guarantee": plan.formal_guarantee,
        "delta": plan.target_delta,
        "options": option_rows,
        "lattice_exponent": None if plan.lattice is None else plan.lattice.exponent,
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "accountant": accounting.accountant_version(),
        "epochs": plan.num_steps * plan.sample_rate,
        "examples_processed": plan.num_steps * plan.expected_batch_size,
    }
    epsilons: dict[str, float | None] = {
        "epsilon_pld": None,
        "epsilon_rdp": None,
        "epsilon_prv_lower": None,
        "epsilon_prv": None,
        "epsilon_prv_upper": None,
        "replace_one": None,
        "epsilon_with_reserve": None,
        "group_2": None,
        "group_5": None,
        "tan": None,
    }
    groups = [plan.release_group(plan.num_steps)]
    delta = plan.accounted_delta
    has_pld = plan.formal_guarantee and delta >= accounting.PLD_SMALLEST_DELTA
    if plan.formal_guarantee:
        epsilons["epsilon_rdp"] = accounting.epsilon_rdp(groups, delta)
        epsilons["tan"] = accounting.total_amount_of_noise(groups)
        epsilons["epsilon_with_reserve"] = plan.epsilon_with_reserve
    if has_pld:
        epsilons["epsilon_pld"] = plan.epsilon_planned
        try:
            lower, estimate, upper = accounting.epsilon_prv(groups, delta)
        except accounting.CrossCheckUnavailable as error:
            warn(str(error))
        else:
            epsilons["epsilon_prv_lower"] = lower
            epsilons["epsilon_prv"] = estimate
            epsilons["epsilon_prv_upper"] = upper
    if has_pld and extras:
        epsilons["replace_one"] = accounting.epsilon_replace_one(
            groups, delta, accounting.COARSE_INTERVAL
        )
        for count in (2, 5):
            epsilons[f"group_{count}"] = epsilon_of_several(plan, groups, count, _GROUP_INTERVAL)
    if max_examples_per_owner is not None:
        result["max_examples_per_owner"] = max_examples_per_owner
        epsilons["epsilon_owner"] = None
        if has_pld:
            epsilons["epsilon_owner"] = epsilon_of_several(
                plan, groups, max_examples_per_owner, _GROUP_INTERVAL
            )
    for name, epsilon in epsilons.items():
        is_finite = epsilon is None or epsilon < math.inf
        result[name] = epsilon if is_finite else None
    if extras:
        result["attack_risk"] = None
        if has_pld and result["epsilon_pld"] is not None:
            losses = accounting.loss_distribution(
                [groups[0].without_cap()], accounting.COARSE_INTERVAL
            )
            result["attack_risk"] = accounting.risk_of(losses)
    return result
