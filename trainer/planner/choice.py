"""Chooses the batch and the steps with the least noise for an epsilon."""

from dataclasses import replace
from functools import cache
from typing import Any

from privacy.errors import PrivacyConfigError
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from trainer.noise_to_signal import NoiseToSignal

FEWEST_STEPS = 120
"""No choice has fewer: small runs of 60 steps learned much less than runs of 120 at an equal ratio
(benchmarks/results/2026-11-22-noise-to-signal)."""
WORTH_DOUBLING = 0.05
"""A batch is doubled while that lowers the accumulated ratio by at least this share."""


def choose(request: PlanRequest, parameters: int, *, kind: str = "captioner") -> dict[str, Any]:
    """Returns the batch and steps with the least accumulated noise-to-signal for an epsilon.

    The examples to compute, B T, are those of the request. Doubling the batch halves the steps. It
    lowers the ratio while sigma is small, and then hardly any more; so the answer is the smallest
    batch, in powers of two from the request's, whose doubling is worth less than `WORTH_DOUBLING`:
    of two runs with as much noise the one with more steps learns more. Sigma of each batch is
    calibrated, for the search without the cap.

    Args:
        request: has a target epsilon; the answer is compared with its batch and steps.

    Returns:
        The entry `choice` of `plan.py --json`: the plan with cap and reserve, as a run would have
        it, its noise-to-signal, and the reason in one sentence.

    Raises:
        PrivacyConfigError: the request has no target epsilon, makes no claim, is not Poisson
            sampled, or cannot be met.
    """
    is_formal = request.enabled and request.sampling == "poisson" and not request.informal_reasons
    if not is_formal or request.target_epsilon is None:
        raise PrivacyConfigError(
            "a choice of batch and steps needs a private run, Poisson sampling and a target epsilon"
        )
    recipe_size = request.expected_batch_size
    examples_to_compute = recipe_size * request.num_steps
    largest = max(1, min(request.num_examples, examples_to_compute // FEWEST_STEPS))

    def resized(size: int) -> PlanRequest:
        num_steps = max(1, round(examples_to_compute / size))
        return replace(request, expected_batch_size=size, num_steps=num_steps)

    @cache
    def ratio(size: int) -> float:
        plan = make_plan(replace(resized(size), cap=None))
        signal = NoiseToSignal.of(plan, parameters)
        assert signal is not None
        return signal.accumulated

    def doubling_is_worth_it(size: int) -> bool:
        return 2 * size <= largest and ratio(2 * size) <= (1 - WORTH_DOUBLING) * ratio(size)

    size = min(recipe_size, largest)
    while doubling_is_worth_it(size):
        size *= 2
    while size > 1 and not doubling_is_worth_it(size // 2):
        size //= 2
    plan = None
    while plan is None:
        try:
            plan = make_plan(resized(size))
        except PrivacyConfigError:
            # The cap of a small batch alone can spend a small delta.
            if 2 * size > largest:
                raise
            size *= 2
    signal = NoiseToSignal.of(plan, parameters, kind)
    assert signal is not None
    reason = (
        f"a batch of {size:,} accumulates {ratio(size):.2g}, the recipe's of {recipe_size:,} "
        f"{ratio(recipe_size):.2g}: "
    )
    if 2 * size <= largest:
        gain = max(0.0, 1 - ratio(2 * size) / ratio(size))
        reason += f"doubling it, with half the steps, lowers the noise by {gain:.1%} only"
    else:
        reason += (
            f"twice as many are more than the examples, or leave fewer than {FEWEST_STEPS} steps"
        )
    return {
        "expected_batch_size": plan.expected_batch_size,
        "num_steps": plan.num_steps,
        "noise_multiplier": plan.noise_multiplier,
        "target_epsilon": plan.target_epsilon,
        "target_delta": plan.target_delta,
        "num_examples": plan.num_examples,
        "epsilon_with_reserve": plan.epsilon_with_reserve,
        "noise_to_signal": signal.as_json(),
        "reason": reason,
    }
