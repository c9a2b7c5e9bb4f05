"""What a privacy plan means, in numbers: epsilon by every accountant, groups, and attacks."""

import math
from collections.abc import Callable
from typing import Any

from privacy.accounting import accountants as accounting
from privacy.accounting.group_privacy import epsilon_of_several
from privacy.plan.numbers import PrivacyPlan

# Group epsilons are guidance and no claim; a coarse grid is still an upper bound (0.1 % here), 25 times faster.
_GROUP_INTERVAL = 5e-3


def summarise(
    plan: PrivacyPlan,
    warn: Callable[[str], None],
    *,
    extras: bool = True,
    max_examples_per_owner: int | None = None,
) -> dict[str, Any]:
    """All numbers of the plan. An epsilon that does not exist (no noise, delta too small for PLD) is None.

    Args:
        warn: called with one line about a cross-check that cannot be done.
        extras: also what the guarantee means to other neighbours and to an attacker (slower).
        max_examples_per_owner: adds the epsilon of an owner of this many examples.
    """
    own = (
        *(
            "num_examples",
            "expected_batch_size",
            "num_steps",
            "reserved_attempts",
            "cap",
            "sample_rate",
            "noise_multiplier",
        ),
        *("arithmetic", "target_epsilon", "formal_guarantee"),
    )
    result: dict[str, Any] = {name: getattr(plan, name) for name in own} | {
        "delta": plan.target_delta,
        "options": [list(row) for option in plan.options.values() for row in option.rows(plan)],
        "lattice_exponent": None if plan.lattice is None else plan.lattice.exponent,
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "accountant": accounting.accountant_version(),
        "epochs": plan.num_steps * plan.sample_rate,
        "examples_processed": plan.num_steps * plan.expected_batch_size,
    }
    names = (
        "epsilon_pld",
        "epsilon_rdp",
        "epsilon_prv_lower",
        "epsilon_prv",
        "epsilon_prv_upper",
        "replace_one",
    )
    epsilons: dict[str, float | None] = dict.fromkeys(
        (*names, "epsilon_with_reserve", "group_2", "group_5", "tan")
    )
    groups, delta = [plan.release_group(plan.num_steps)], plan.accounted_delta
    has_pld = plan.formal_guarantee and delta >= accounting.PLD_SMALLEST_DELTA
    if plan.formal_guarantee:
        epsilons |= {
            "epsilon_rdp": accounting.epsilon_rdp(groups, delta),
            "tan": accounting.total_amount_of_noise(groups),
        }
        epsilons["epsilon_with_reserve"] = plan.epsilon_with_reserve
    if has_pld:
        epsilons["epsilon_pld"] = plan.epsilon_planned
        try:
            lower, estimate, upper = accounting.epsilon_prv(groups, delta)
            epsilons |= {
                "epsilon_prv_lower": lower,
                "epsilon_prv": estimate,
                "epsilon_prv_upper": upper,
            }
        except accounting.CrossCheckUnavailable as error:
            warn(str(error))
    if has_pld and extras:
        epsilons["replace_one"] = accounting.epsilon_replace_one(
            groups, delta, accounting.COARSE_INTERVAL
        )
        for count in (2, 5):
            epsilons[f"group_{count}"] = epsilon_of_several(plan, groups, count, _GROUP_INTERVAL)
    if max_examples_per_owner is not None:
        result["max_examples_per_owner"], epsilons["epsilon_owner"] = max_examples_per_owner, None
        if has_pld:
            epsilons["epsilon_owner"] = epsilon_of_several(
                plan, groups, max_examples_per_owner, _GROUP_INTERVAL
            )
    result |= {
        name: value if value is None or value < math.inf else None
        for name, value in epsilons.items()
    }
    if extras:
        result["attack_risk"] = None
        if has_pld and result["epsilon_pld"] is not None:
            whole = accounting.loss_distribution(
                [groups[0].without_cap()], accounting.COARSE_INTERVAL
            )
            result["attack_risk"] = accounting.risk_of(whole)
    return result
