"""What one step releases, as the ledger's intent lists it."""

from typing import TypedDict

SENSITIVITY_SLACK = 1e-3
"""r of contract 4: a clipped example may exceed C by this factor through rounding; the accountant is charged for it."""

GRADIENT = "gradient"


class Release(TypedDict):
    """One noised release of a step: `sensitivity` is the clipper's own statement, before the plan's slack."""

    name: str
    std: float
    sensitivity: float


def release_of_step(noise_multiplier: float, sensitivity: float) -> Release:
    """Returns the release of a training step: the clipped sum of this sensitivity, with its noise."""
    return Release(name=GRADIENT, std=noise_multiplier * sensitivity, sensitivity=sensitivity)
