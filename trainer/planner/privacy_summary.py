"""What a privacy plan means, in numbers: epsilon by every accountant, groups, attacks, and what else the run could cost."""

from collections.abc import Callable
from typing import Any

from privacy.accounting import accountants as accounting
from privacy.accounting import attack_risk, what_if
from privacy.errors import PrivacyConfigError
from privacy.plan import PrivacyPlan
from privacy.sampling.shuffle import steps_per_epoch
from trainer.planner.scaling_rule import scaling_rule

# Group epsilons are guidance beside the claim; a coarse grid is still an upper bound (0.1 % here), 25 times faster.
_GROUP_INTERVAL = 5e-3


def summarise(
    plan: PrivacyPlan, warn: Callable[[str], None], *, extras: bool = True, max_examples_per_owner: int | None = None
) -> dict[str, Any]:
    """All numbers of the plan. An epsilon that does not exist (no noise, delta too small for PLD) is None.

    Args:
        warn: is told in one line of a cross-check that cannot be done.
        extras: also what the guarantee means and what else the run could cost (slower).
        max_examples_per_owner: also the epsilon of an owner of so many examples.

    Raises:
        PrivacyConfigError: `max_examples_per_owner` below 1.
    """
    result: dict[str, Any] = {
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "reserved_attempts": plan.reserved_attempts,
        "cap": plan.cap,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "delta": plan.target_delta,
        "noise_source": plan.noise_source,
        "noise_tail_delta": plan.noise_tail_delta,
        "target_epsilon": plan.target_epsilon,
        "formal_guarantee": plan.formal_guarantee,
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "accountant": accounting.accountant_version(),
        "epochs": plan.num_steps * plan.sample_rate,
        "examples_processed": plan.num_steps * plan.expected_batch_size,
    }
    result |= _epsilons(plan, warn, extras) | (_extras(plan) if extras else {})
    return result | {"scaling_rule": scaling_rule(plan)} | _owner(plan, max_examples_per_owner)


def _owner(plan: PrivacyPlan, limit: int | None) -> dict[str, Any]:
    """Epsilon of all examples of one owner together, where each owner has at most `limit`."""
    if limit is None:
        return {}
    if limit < 1:
        raise PrivacyConfigError(f"--max_examples_per_owner is {limit}; it must be at least 1")
    epsilon = None
    if plan.formal_guarantee and plan.accounted_delta >= accounting.PLD_SMALLEST_DELTA:
        groups = [plan.release_group(plan.num_steps)]
        epsilon = accounting.epsilon_group(groups, plan.accounted_delta, limit, _GROUP_INTERVAL)
    return {"max_examples_per_owner": limit, **_finite({"epsilon_owner": epsilon})}


def _extras(plan: PrivacyPlan) -> dict[str, Any]:
    """What the guarantee means, and what else the run could cost; None where it cannot be said."""
    names = ("epsilon_by_delta", "attack_risk", "replays", "private_selection", "shuffled_instead")
    values: dict[str, Any] = dict.fromkeys((*names, "opacus_rdp", "opacus_prv"))
    group, delta = plan.release_group(plan.num_steps), plan.accounted_delta
    if not plan.formal_guarantee or delta < accounting.PLD_SMALLEST_DELTA or plan.epsilon_planned == float("inf"):
        return values
    whole = accounting.loss_distribution([group.without_cap()], accounting.COARSE_INTERVAL)
    values["epsilon_by_delta"] = attack_risk.epsilon_curve(whole)
    values["attack_risk"] = attack_risk.risk_of(whole, attack_risk.FALSE_POSITIVE_RATES)
    values["replays"] = what_if.replay_costs(group, delta)
    values["private_selection"] = what_if.selection_costs(group, delta)
    steps = steps_per_epoch(plan.num_examples, plan.expected_batch_size)
    values["shuffled_instead"] = what_if.shuffled_instead(group, delta, steps)
    return values | what_if.opacus_opinion(group, delta)


def _epsilons(plan: PrivacyPlan, warn: Callable[[str], None], extras: bool) -> dict[str, float | None]:
    groups = [plan.release_group(plan.num_steps)]
    delta = plan.accounted_delta
    names = ("epsilon_pld", "epsilon_rdp", "epsilon_prv_lower", "epsilon_prv", "epsilon_prv_upper")
    values: dict[str, float | None] = dict.fromkeys((*names, "epsilon_with_reserve", "replace_one"))
    values |= {"group_2": None, "group_5": None, "tan": None}
    if not plan.formal_guarantee:
        return values
    values["epsilon_rdp"] = accounting.epsilon_rdp(groups, delta)
    values["tan"] = accounting.tan(groups)
    values["epsilon_with_reserve"] = plan.epsilon_with_reserve
    if delta >= accounting.PLD_SMALLEST_DELTA:
        values["epsilon_pld"] = plan.epsilon_planned
        values |= _prv(groups, delta, warn)
        if not extras:
            return _finite(values)
        values["replace_one"] = accounting.epsilon_replace_one(groups, delta, accounting.COARSE_INTERVAL)
        for count in (2, 5):
            values[f"group_{count}"] = accounting.epsilon_group(groups, delta, count, _GROUP_INTERVAL)
    return _finite(values)


def _finite(values: dict[str, float | None]) -> dict[str, float | None]:
    return {name: value if value is None or value < float("inf") else None for name, value in values.items()}


def _prv(groups: list[accounting.ReleaseGroup], delta: float, warn: Callable[[str], None]) -> dict[str, float | None]:
    try:
        lower, estimate, upper = accounting.epsilon_prv(groups, delta)
    except accounting.CrossCheckUnavailable as error:
        warn(str(error))
        return {}
    return {"epsilon_prv_lower": lower, "epsilon_prv": estimate, "epsilon_prv_upper": upper}
