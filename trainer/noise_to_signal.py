"""Compares the noise of a private run with its signal, from public numbers, before it uses data.

The noise of a step is about sigma C sqrt(P) / B long in P trainable coordinates; its signal, a mean
of gradients that are at most C long, at most about C. C cancels in their ratio. docs/planning.md
derives the ratios, and measures which of them let a model learn.
"""

import math
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from privacy.plan.numbers import PrivacyPlan

LARGEST_THAT_LEARNS: Mapping[str, float] = {
    "captioner": 0.25,
    "masked_autoencoder": 0.1,
    "classifier": 0.8,
}
"""Kind of model -> accumulated ratio that best separates small runs that learned from the others.

Calibrated on the grid of benchmarks/results/2026-11-22-noise-to-signal."""
PUBLISHED: Mapping[str, tuple[str, float, float]] = {
    "captioner": ("DP-Cap Base", 0.0077, 0.0001),
    "masked_autoencoder": ("ViP Base", 0.049, 0.00063),
    "classifier": ("TAN on ImageNet", 0.39, 0.0029),
}
"""Kind of model -> name of the published run with the least noise, its ratio per step, accumulated.

See docs/planning.md."""
MOST_PER_STEP = 2.0
"""Small captioners at half of their threshold or less were tried up to 1.3 per step.

Published runs have up to 1.2."""


@dataclass(frozen=True)
class NoiseToSignal:
    """The noise of a run against its signal, from public numbers.

    Attributes:
        parameters: P, the trainable coordinates, without frozen weights.
        noise_multiplier: sigma of the gradient's sum.
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
        """Returns the noise of a plan against its signal; None for a plan without noise."""
        sigma = plan.noise_multiplier
        if not plan.enabled or sigma == 0:
            return None
        return cls(parameters, sigma, plan.expected_batch_size, plan.num_steps, kind)

    @property
    def per_step(self) -> float:
        """Returns sigma sqrt(P) / B."""
        return self.noise_multiplier * math.sqrt(self.parameters) / self.expected_batch_size

    @property
    def accumulated(self) -> float:
        """Returns sigma sqrt(P) / (B sqrt(T)).

        Over T steps independent noises add up to sqrt(T) times one of them, and signals of one
        direction to T times.
        """
        return self.per_step / math.sqrt(self.num_steps)

    @property
    def learns(self) -> bool | None:
        """Returns whether runs with as much noise learned; None where runs do not tell."""
        threshold = LARGEST_THAT_LEARNS[self.kind]
        if self.accumulated <= threshold / 2 and self.per_step <= MOST_PER_STEP:
            return True
        return None if self.accumulated <= 2 * threshold else False

    @property
    def sentence(self) -> str:
        """Returns an expectation and its evidence; more noise never has a better one."""
        name, per_step, accumulated = PUBLISHED[self.kind]
        threshold = LARGEST_THAT_LEARNS[self.kind]
        if self.per_step <= 2 * per_step and self.accumulated <= 2 * accumulated:
            return (
                f"as published runs, within a factor of two ({name}: {per_step} per step, "
                f"{accumulated} accumulated)"
            )
        if self.learns:
            return f"as small runs that learned (threshold {threshold})"
        if self.learns is None:
            if self.accumulated <= threshold / 2:
                return (
                    f"open: more than {MOST_PER_STEP:g} per step was not tried with so little "
                    "accumulated"
                )
            return (
                "open: small runs at this noise sometimes learned, sometimes not (threshold "
                f"{threshold})"
            )
        return (
            f"as runs that learned nothing (threshold {threshold}): take more examples, or train "
            "few parameters on an encoder (docs/own_pictures.md)"
        )

    @property
    def line(self) -> str:
        """Returns both ratios and the expectation, for the console."""
        return (
            f"noise-to-signal {self.per_step:.2g} per step, {self.accumulated:.2g} accumulated "
            f"over {self.num_steps:,} steps: {self.sentence}"
        )

    def as_json(self) -> dict[str, Any]:
        """Returns the entry `noise_to_signal` of `plan.py --json`."""
        return {
            **asdict(self),
            "per_step": self.per_step,
            "accumulated": self.accumulated,
            "learns": self.learns,
            "sentence": self.sentence,
            "threshold": LARGEST_THAT_LEARNS[self.kind],
        }
