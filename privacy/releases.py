"""What one step releases, as the ledger's intent lists it: the noised sum, and under adaptive clipping a noised count."""

from typing import TypedDict

from .adaptive_clipping import COUNT_SENSITIVITY, AdaptiveClipping

SENSITIVITY_SLACK = 1e-3
"""r of contract 4: a clipped example may exceed C by this factor through rounding; the accountant is charged for it."""

GRADIENT, UNCLIPPED = "gradient", "unclipped_count"


class Release(TypedDict):
    """One noised release of a step: `sensitivity` is the clipper's own statement, before the plan's slack."""

    name: str
    std: float
    sensitivity: float


def step_releases(
    noise_multiplier: float, sensitivity: float, adaptive: AdaptiveClipping | None
) -> list[Release]:
    """All releases of a step, worth `noise_multiplier` together; the first is the gradient.

    Args:
        sensitivity: of the clipped sum.
        adaptive: None where C is constant.
    """
    if adaptive is None:
        return [Release(name=GRADIENT, std=noise_multiplier * sensitivity, sensitivity=sensitivity)]
    sigma = adaptive.gradient_noise_multiplier(noise_multiplier)
    return [
        Release(name=GRADIENT, std=sigma * sensitivity, sensitivity=sensitivity),
        Release(name=UNCLIPPED, std=adaptive.unclipped_num_std, sensitivity=COUNT_SENSITIVITY),
    ]
