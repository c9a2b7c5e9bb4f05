"""Correlated noise at the epsilon of independent noise: how many bands, how much noise, and what of it training feels.

The measure is `error_ratio`: the root mean square of the noise in running sums of gradients, over that of independent noise
calibrated for the same epsilon, delta, steps and reserve (docs/correlated_noise.md).
"""

import math
from dataclasses import replace
from typing import Any

from privacy.accounting.calibration import Progress
from privacy.correlated.strategy import Strategy
from privacy.correlated.workload import MOST_STEPS_OF_WORKLOAD, Workload, optimised, running_sums_error
from privacy.errors import PrivacyConfigError
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from trainer.config.recipe import RunConfig
from trainer.loop.schedule import learning_rate

MOST_SEARCHED = 1024
"""The search for the best number of bands goes no further: past noise takes 8 bytes a band and coordinate."""
HISTORY_BYTES = 8
"""Bytes of one past noise value: rounded noise would break the guarantee (docs/correlated_noise.md)."""


def with_bands(request: PlanRequest, bands: int) -> PlanRequest:
    """The request with this number of bands and square-root coefficients, whatever it had."""
    return replace(request, bands=bands, strategy="square_root", coefficients=())


def with_coefficients(request: PlanRequest, config: RunConfig) -> PlanRequest:
    """The request with the coefficients that its strategy asks for, optimised for the recipe's workload (seconds).

    Raises:
        PrivacyConfigError: more steps than a workload may have.
    """
    if request.strategy != "optimised":
        return request
    return replace(request, coefficients=optimised(workload_of(config), request.bands).coefficients)


def at_equal_epsilon(request: PlanRequest) -> PlanRequest:
    """The request with the epsilon that its noise has (reserve included) as its target.

    Raises:
        PrivacyConfigError: there is none, since the run makes no formal claim.
    """
    if request.target_epsilon is not None:
        return request
    return replace(request, noise_multiplier=None, target_epsilon=_epsilon_of(make_plan(request)))


def _epsilon_of(plan: PrivacyPlan) -> float:
    if plan.epsilon_with_reserve is None:
        raise PrivacyConfigError("--bands compares at equal epsilon, and this run has none: it makes no formal claim")
    return plan.epsilon_with_reserve


def by_bands(request: PlanRequest, progress: Progress | None = None) -> list[dict[str, Any]]:
    """Noise and error for 1, 2, 4, ... bands at the request's target epsilon, until the error grows twice; without the cap.

    The cap changes the last digits and takes ten times as long.
    """
    rows: list[dict[str, Any]] = []
    bands, independent = 1, math.nan
    while bands * request.expected_batch_size <= request.num_examples and bands <= min(
        request.num_steps, MOST_SEARCHED
    ):
        plan = make_plan(replace(with_bands(request, bands), cap=None), progress=progress)
        error = plan.noise_multiplier * running_sums_error(Strategy.square_root(bands), plan.num_steps)
        independent = error if bands == 1 else independent
        rows.append({"bands": bands, "noise_multiplier": plan.noise_multiplier, "error_ratio": error / independent})
        ratios = [row["error_ratio"] for row in rows[-3:]]
        if len(ratios) > 2 and ratios[0] < ratios[1] < ratios[2]:
            break
        bands *= 2
    return rows


def best_bands(rows: list[dict[str, Any]]) -> int:
    """The number of bands with the least error."""
    best: int = min(rows, key=lambda row: float(row["error_ratio"]))["bands"]
    return best


def compare(plan: PrivacyPlan, request: PlanRequest, config: RunConfig | None) -> dict[str, Any]:
    """What correlated noise of this plan is worth against independent noise of the same epsilon.

    `error_ratio` is for running sums and square-root coefficients. The others are for the recipe's workload, with square-root and
    with optimised coefficients, and None without a recipe or where it has more steps than a workload may have.

    Args:
        request: what the plan was made from.

    Raises:
        PrivacyConfigError: bands above 1 in a run without a formal claim.
    """
    result: dict[str, Any] = {
        "bands": plan.bands,
        "independent_noise_multiplier": plan.noise_multiplier,
        "error_ratio": 1.0,
        "workload_error_ratio": None,
        "optimised_error_ratio": None,
        "optimised_coefficients": None,
        "history_bytes_per_coordinate": HISTORY_BYTES * (plan.bands - 1),
    }
    if plan.bands > 1:
        target = _epsilon_of(plan) if request.target_epsilon is None else request.target_epsilon
        same = make_plan(replace(with_bands(request, 1), noise_multiplier=None, target_epsilon=target))
        ratio = plan.noise_multiplier / same.noise_multiplier
        independent, root = Strategy.independent(), Strategy.square_root(plan.bands)
        result["independent_noise_multiplier"] = same.noise_multiplier
        steps = plan.num_steps
        result["error_ratio"] = ratio * running_sums_error(root, steps) / running_sums_error(independent, steps)
        if config is not None and steps <= MOST_STEPS_OF_WORKLOAD:
            workload = workload_of(config)
            error, best = workload.error(independent), optimised(workload, plan.bands)
            result["workload_error_ratio"] = ratio * workload.error(root) / error
            result["optimised_error_ratio"] = ratio * workload.error(best) / error
            result["optimised_coefficients"] = list(best.coefficients)
    return result


def workload_of(config: RunConfig) -> Workload:
    """The recipe's schedule, weight decay and momentum (Adam's beta_1)."""
    steps, optimizer = config.train.num_steps, config.optimizer
    rates = [learning_rate(step, steps, optimizer.peak_lr, config.schedule) for step in range(1, steps + 1)]
    momentum = optimizer.betas[0] if optimizer.name == "adamw" else optimizer.momentum
    return Workload(rates, optimizer.weight_decay, momentum)
