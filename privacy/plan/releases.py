"""The releases of a step, as the ledger's intent lists them."""

from typing import TypedDict

SENSITIVITY_SLACK = 1e-3
"""r of contract 4: rounding may lift an example to C (1 + r), which the accountant charges."""

GRADIENT = "gradient"


class Release(TypedDict):
    """A noised release of a step.

    Attributes:
        sensitivity: as the clipper states it, before the plan's slack.
    """

    name: str
    std: float
    sensitivity: float


def release_of_step(noise_multiplier: float, sensitivity: float) -> Release:
    """Returns the release of a training step: a clipped sum of this sensitivity and its noise."""
    return Release(name=GRADIENT, std=noise_multiplier * sensitivity, sensitivity=sensitivity)
