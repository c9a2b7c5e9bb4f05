"""Will a private run learn? Its noise against its signal, from public numbers, before any data are touched.

One step releases (sum of clipped gradients + sigma C z) / B, where z is standard normal in each of the P trainable coordinates.
Its noise is about sigma C sqrt(P) / B long; its signal, a mean of gradients that are at most C long, at most about C. C cancels:

    per step       sigma sqrt(P) / B
    accumulated    sigma sqrt(P) / (B sqrt(T)) = TAN sqrt(P / 2) / n

Over T steps independent noises add up to sqrt(T) times one of them, and signals that all point one way to T times. TAN = sigma /
(q sqrt(T / 2)) is the total amount of noise of Sander et al. 2023 (https://arxiv.org/abs/2210.03403). Where sigma is above
about 2, epsilon and delta alone decide TAN, and only fewer parameters or more examples lower the accumulated ratio; below, a
larger batch lowers it too.

Both ratios are lower bounds, as the real signal is shorter than C. The length of the noise is no bound on its harm: De et al.
2022 (https://arxiv.org/abs/2204.13650) and others train large models well, and where gradients keep to few directions most of
the noise points elsewhere. So what a ratio means was measured: docs/planning.md.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import Any

from privacy.errors import PrivacyConfigError
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.request import PlanRequest

LARGEST_THAT_LEARNS: Mapping[str, float] = {
    "captioner": 0.25,
    "masked_autoencoder": 0.1,
    "classifier": 0.8,
}
"""Accumulated, by kind of model: what separates small runs that learned from the others best; calibrated on the grid of
benchmarks/results/2026-11-22-noise-to-signal."""
PUBLISHED: Mapping[str, tuple[str, float, float]] = {
    "captioner": ("DP-Cap Base", 0.0077, 0.0001),
    "masked_autoencoder": ("ViP Base", 0.049, 0.00063),
    "classifier": ("TAN on ImageNet", 0.39, 0.0029),
}
"""The published run of each kind with the least noise: its name, ratio per step and accumulated (docs/planning.md)."""
MOST_PER_STEP = 2.0
"""Small captioners at half of their threshold or less were tried up to 1.3 per step, and published runs have up to 1.2."""
FEWEST_STEPS = 120
"""No choice has fewer: small runs of 60 steps learned much less than those of 120 at an equal ratio (same record)."""
WORTH_DOUBLING = 0.05
"""A larger batch is chosen while doubling it lowers the accumulated ratio by at least this share."""


@dataclass(frozen=True)
class NoiseToSignal:
    """The noise of a run against its signal; all of it is public.

    Attributes:
        parameters: P, the trainable coordinates: of frozen weights and adapted layers only what is trained.
        noise_multiplier: that of the gradient's sum.
        expected_batch_size, num_steps: B and T.
        kind: of the model, as in a recipe.
    """

    parameters: int
    noise_multiplier: float
    expected_batch_size: int
    num_steps: int
    kind: str = "captioner"

    @classmethod
    def of(
        cls, plan: PrivacyPlan, parameters: int, kind: str = "captioner"
    ) -> "NoiseToSignal | None":
        """That of a plan; None where there is no noise."""
        sigma = plan.noise_multiplier
        if not plan.enabled or sigma == 0:
            return None
        return cls(parameters, sigma, plan.expected_batch_size, plan.num_steps, kind)

    @property
    def per_step(self) -> float:
        """sigma sqrt(P) / B."""
        return self.noise_multiplier * math.sqrt(self.parameters) / self.expected_batch_size

    @property
    def accumulated(self) -> float:
        """sigma sqrt(P) / (B sqrt(T))."""
        return self.per_step / math.sqrt(self.num_steps)

    @property
    def learns(self) -> bool | None:
        """Whether runs with as much noise learned, given enough steps; None where runs do not tell."""
        threshold = LARGEST_THAT_LEARNS[self.kind]
        if self.accumulated <= threshold / 2 and self.per_step <= MOST_PER_STEP:
            return True
        return None if self.accumulated <= 2 * threshold else False

    @property
    def sentence(self) -> str:
        """What to expect, and from what evidence; more noise never has a better one."""
        (name, per_step, accumulated), threshold = (
            PUBLISHED[self.kind],
            LARGEST_THAT_LEARNS[self.kind],
        )
        if self.per_step <= 2 * per_step and self.accumulated <= 2 * accumulated:
            return f"as published runs, within a factor of two ({name}: {per_step} per step, {accumulated} accumulated)"
        if self.learns:
            return f"as small runs that learned (threshold {threshold})"
        if self.learns is None:
            if self.accumulated <= threshold / 2:
                return f"open: more than {MOST_PER_STEP:g} per step was not tried with so little accumulated"
            return f"open: small runs at this noise sometimes learned, sometimes not (threshold {threshold})"
        return (
            f"as runs that learned nothing (threshold {threshold}): take more examples, or train few parameters on an "
            "encoder (docs/own_pictures.md)"
        )

    @property
    def line(self) -> str:
        """Both ratios and what they mean, for the console."""
        return (
            f"noise-to-signal {self.per_step:.2g} per step, {self.accumulated:.2g} accumulated over {self.num_steps:,} steps: "
            f"{self.sentence}"
        )

    def as_json(self) -> dict[str, Any]:
        """What `plan.py --json` has under `noise_to_signal`."""
        found = {
            name: getattr(self, name) for name in ("per_step", "accumulated", "learns", "sentence")
        }
        return {**asdict(self), **found, "threshold": LARGEST_THAT_LEARNS[self.kind]}


def choose(request: PlanRequest, parameters: int, *, kind: str = "captioner") -> dict[str, Any]:
    """The batch and steps with the least accumulated noise-to-signal for the request's epsilon and examples to compute (B T).

    Doubling the batch halves the steps. It lowers the ratio while sigma is small, and then hardly any more; so the answer is the
    smallest batch, in powers of two from the request's, whose doubling is worth less than `WORTH_DOUBLING`: of two runs with as
    much noise the one with more steps learns more. Sigma of each batch is calibrated, for the search without the cap.

    Args:
        request: with a target epsilon; its batch and steps are what the answer is compared with.

    Returns:
        What `plan.py --json` has under `choice`: the plan with cap and reserve, as a run would have it, its noise-to-signal, and
        why in one sentence.

    Raises:
        PrivacyConfigError: the request has no target epsilon, makes no claim, is not Poisson sampled, or
            cannot be met.
    """
    is_formal = request.enabled and request.sampling == "poisson" and not request.informal_reasons
    if not is_formal or request.target_epsilon is None:
        raise PrivacyConfigError(
            "a choice of batch and steps needs a private run, Poisson sampling and a target epsilon"
        )
    own, computed = request.expected_batch_size, request.expected_batch_size * request.num_steps
    largest = max(1, min(request.num_examples, computed // FEWEST_STEPS))

    def resized(size: int) -> PlanRequest:
        steps = max(1, round(computed / size))
        return replace(request, expected_batch_size=size, num_steps=steps)

    @cache
    def ratio(size: int) -> float:
        found = NoiseToSignal.of(make_plan(replace(resized(size), cap=None)), parameters)
        assert found is not None
        return found.accumulated

    def doubling_is_worth_it(size: int) -> bool:
        return 2 * size <= largest and ratio(2 * size) <= (1 - WORTH_DOUBLING) * ratio(size)

    size = min(own, largest)
    while doubling_is_worth_it(size):
        size *= 2
    while size > 1 and not doubling_is_worth_it(size // 2):
        size //= 2
    plan = None
    while plan is None:
        try:
            plan = make_plan(resized(size))
        except PrivacyConfigError:  # the cap of a small batch alone can spend a small delta
            if 2 * size > largest:
                raise
            size *= 2
    signal = NoiseToSignal.of(plan, parameters, kind)
    assert signal is not None
    reason = f"a batch of {size:,} accumulates {ratio(size):.2g}, the recipe's of {own:,} {ratio(own):.2g}: "
    if 2 * size <= largest:
        gain = max(0.0, 1 - ratio(2 * size) / ratio(size))
        reason += f"doubling it, with half the steps, lowers the noise by {gain:.1%} only"
    else:
        reason += (
            f"twice as many are more than the examples, or leave fewer than {FEWEST_STEPS} steps"
        )
    names = (
        *("expected_batch_size", "num_steps", "noise_multiplier", "target_epsilon", "target_delta"),
        *("num_examples", "epsilon_with_reserve"),
    )
    chosen = {name: getattr(plan, name) for name in names}
    return {**chosen, "noise_to_signal": signal.as_json(), "reason": reason}
