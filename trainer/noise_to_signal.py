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
from dataclasses import asdict, dataclass
from typing import Any

from privacy.plan.numbers import PrivacyPlan

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
