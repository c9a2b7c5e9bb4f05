"""What a privacy plan means, in numbers: epsilon by every accountant, groups, and attacks."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

from privacy.accounting import accountants as accounting
from privacy.accounting import attack_risk
from privacy.accounting.group_privacy import epsilon_of_several
from privacy.correlated.workload import MOST_STEPS, Workload, optimised, running_sums_error
from privacy.plan import PrivacyPlan
from privacy.plan_request import PlanRequest
from trainer.config.recipe import RunConfig
from trainer.loop.schedule import learning_rate

# Group epsilons are guidance and no claim; a coarse grid is still an upper bound (0.1 % here), 25 times faster.
_GROUP_INTERVAL = 5e-3
SMALLEST_SIGMA = 2.0
"""Sander et al. 2023, figure 1: below, epsilon leaves the formula."""
SIGMAS = (8.0, 4.0, 2.0, 1.0, 0.7, 0.5)


def with_coefficients(request: PlanRequest, config: RunConfig) -> PlanRequest:
    """The request with the coefficients of correlated noise that its strategy asks for.

    "optimised" coefficients fit the recipe's schedule, weight decay and momentum (Adam's beta_1); finding them takes seconds.

    Raises:
        PrivacyConfigError: more steps than a workload may have.
    """
    if request.strategy != "optimised":
        return request
    steps, optimizer = config.train.num_steps, config.optimizer
    rates = [learning_rate(step, steps, optimizer.peak_lr, config.schedule) for step in range(1, steps + 1)]
    momentum = optimizer.betas[0] if optimizer.name == "adamw" else optimizer.momentum
    workload = Workload(rates, optimizer.weight_decay, momentum)
    return replace(request, coefficients=optimised(workload, request.bands).coefficients)


def summarise(
    plan: PrivacyPlan, warn: Callable[[str], None], *, extras: bool = True, max_examples_per_owner: int | None = None
) -> dict[str, Any]:
    """All numbers of the plan. An epsilon that does not exist (no noise, delta too small for PLD) is None.

    Args:
        warn: called with one line about a cross-check that cannot be done.
        extras: also what the guarantee means to other neighbours and to an attacker (slower).
        max_examples_per_owner: adds the epsilon of an owner of this many examples.
    """
    result: dict[str, Any] = {
        "num_examples": plan.num_examples,
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "reserved_attempts": plan.reserved_attempts,
        "bands": plan.bands,
        "cap": plan.cap,
        "sample_rate": plan.sample_rate,
        "noise_multiplier": plan.noise_multiplier,
        "delta": plan.target_delta,
        "arithmetic": plan.arithmetic,
        "options": [list(row) for option in plan.options.values() for row in option.rows(plan)],
        "lattice_exponent": None if plan.lattice is None else plan.lattice.exponent,
        "noise_tail_delta": plan.noise_tail_delta,
        "target_epsilon": plan.target_epsilon,
        "formal_guarantee": plan.formal_guarantee,
        "reasons": list(plan.reasons),
        "warnings": list(plan.warnings),
        "accountant": accounting.accountant_version(),
        "epochs": plan.num_steps * plan.sample_rate / plan.bands,
        "examples_processed": plan.num_steps * plan.expected_batch_size,
    }
    if plan.bands > 1 and plan.num_steps <= MOST_STEPS:
        result["running_sums_noise"] = plan.noise_multiplier * running_sums_error(plan.noise_strategy, plan.num_steps)
    names = ("epsilon_pld", "epsilon_rdp", "epsilon_prv_lower", "epsilon_prv", "epsilon_prv_upper", "replace_one")
    epsilons: dict[str, float | None] = dict.fromkeys((*names, "epsilon_with_reserve", "group_2", "group_5", "tan"))
    groups, delta = [plan.release_group(plan.num_steps)], plan.accounted_delta
    has_pld = plan.formal_guarantee and delta >= accounting.PLD_SMALLEST_DELTA
    if plan.formal_guarantee:
        epsilons |= {"epsilon_rdp": accounting.epsilon_rdp(groups, delta), "tan": accounting.tan(groups)}
        epsilons["epsilon_with_reserve"] = plan.epsilon_with_reserve
    if has_pld:
        epsilons["epsilon_pld"] = plan.epsilon_planned
        try:
            lower, estimate, upper = accounting.epsilon_prv(groups, delta)
            epsilons |= {"epsilon_prv_lower": lower, "epsilon_prv": estimate, "epsilon_prv_upper": upper}
        except accounting.CrossCheckUnavailable as error:
            warn(str(error))
    if has_pld and extras:
        epsilons["replace_one"] = accounting.epsilon_replace_one(groups, delta, accounting.COARSE_INTERVAL)
        for count in (2, 5):
            epsilons[f"group_{count}"] = epsilon_of_several(plan, groups, count, _GROUP_INTERVAL)
    if max_examples_per_owner is not None:
        result["max_examples_per_owner"], epsilons["epsilon_owner"] = max_examples_per_owner, None
        if has_pld:
            epsilons["epsilon_owner"] = epsilon_of_several(plan, groups, max_examples_per_owner, _GROUP_INTERVAL)
    result |= {name: value if value is None or value < math.inf else None for name, value in epsilons.items()}
    if extras:
        result["attack_risk"] = None
        if has_pld and result["epsilon_pld"] is not None:
            whole = accounting.loss_distribution([groups[0].without_cap()], accounting.COARSE_INTERVAL)
            result["attack_risk"] = attack_risk.risk_of(whole)
    return result | {"scaling_rule": scaling_rule(plan)}


def epsilon_formula(eta: float, delta: float) -> float:
    """Epsilon of the rule: that of T Gaussian mechanisms with multiplier sigma / q."""
    return eta**2 + 2 * eta * math.sqrt(math.log(1 / delta))


def scaling_rule(plan: PrivacyPlan) -> dict[str, Any] | None:
    """The scaling rule of Sander et al. 2023 (TAN without a burn, arXiv:2210.03403) at a planned run, and where it breaks.

        eta = q / sigma * sqrt(T / 2),   TAN = 1 / eta,   epsilon ~ eta^2 + 2 eta sqrt(log(1 / delta))

    Two runs with equal sigma / B and equal steps add equal noise to the average gradient, so small batches predict the training
    curve of large ones, and eta and the formula's epsilon are equal too. The real epsilon is so only while sigma is above about
    2: below, it explodes. A simulation at a smaller batch therefore has no privacy to speak of: what it trains is not private.

    None for a run without a guarantee, one that is not Poisson sampled, and one whose noise is correlated.

    `smallest_batch_size` is the batch at which sigma is 2 at the run's own sigma / B: simulate this run's quality at any batch,
    but expect its epsilon from batches of at least that size only. `by_sigma` has, at equal sigma / B, (sigma, batch, epsilon
    by RDP), where the batch is no larger than the data.
    """
    if not plan.formal_guarantee or plan.sampling != "poisson" or plan.bands > 1:
        return None
    group = plan.release_group(plan.num_steps).without_cap()
    tan = accounting.tan([group])
    smallest = SMALLEST_SIGMA * plan.expected_batch_size / plan.noise_multiplier
    by_sigma = []
    for sigma in SIGMAS:
        scale = sigma / plan.noise_multiplier
        if group.sample_rate * scale <= 1:
            moved = accounting.ReleaseGroup(group.sample_rate * scale, group.noise_multiplier * scale, group.count)
            by_sigma.append(
                {
                    "noise_multiplier": sigma,
                    "expected_batch_size": round(plan.expected_batch_size * scale),
                    "epsilon_rdp": accounting.epsilon_rdp([moved], plan.target_delta),
                }
            )
    return {
        "tan": tan,
        "epsilon_formula": epsilon_formula(1 / tan, plan.target_delta),
        "noise_per_example": plan.noise_multiplier / plan.expected_batch_size,
        "holds": plan.noise_multiplier >= SMALLEST_SIGMA,
        "smallest_sigma": SMALLEST_SIGMA,
        "smallest_batch_size": math.ceil(smallest) if smallest <= plan.num_examples else None,
        "by_sigma": by_sigma,
    }
