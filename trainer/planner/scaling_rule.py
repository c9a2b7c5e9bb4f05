"""The scaling rule of Sander et al. 2023 (TAN without a burn, arXiv:2210.03403) at a planned run, and where it breaks.

    eta = q / sigma * sqrt(T / 2),   TAN = 1 / eta,   epsilon ~ eta^2 + 2 eta sqrt(log(1 / delta))

Two runs with equal sigma / B and equal steps add equal noise to the average gradient, so small batches predict the training
curve of large ones, and eta and the formula's epsilon are equal too. The real epsilon is so only while sigma is above about
2: below, it explodes. A simulation at a smaller batch therefore has no privacy to speak of: what it trains is not private.
"""

import math
from typing import Any

from privacy.accounting import accountants as accounting
from privacy.accounting.accountants import ReleaseGroup
from privacy.plan import PrivacyPlan

SMALLEST_SIGMA = 2.0
"""Sander et al. 2023, figure 1: below, epsilon leaves the formula."""
SIGMAS = (8.0, 4.0, 2.0, 1.0, 0.7, 0.5)


def epsilon_formula(eta: float, delta: float) -> float:
    """Epsilon of the rule: that of T Gaussian mechanisms with multiplier sigma / q."""
    return eta**2 + 2 * eta * math.sqrt(math.log(1 / delta))


def scaling_rule(plan: PrivacyPlan) -> dict[str, Any] | None:
    """None for a run without a guarantee, or one that is not Poisson sampled.

    `smallest_batch_size` is the batch at which sigma is 2 at the run's own sigma / B: simulate this run's quality at any batch,
    but expect its epsilon from batches of at least that size only. `by_sigma` has, at equal sigma / B, (sigma, batch, epsilon
    by RDP), where the batch is no larger than the data.
    """
    if not plan.formal_guarantee or plan.sampling != "poisson":
        return None
    group = plan.release_group(plan.num_steps).without_cap()
    tan = accounting.tan([group])
    smallest = SMALLEST_SIGMA * plan.expected_batch_size / plan.noise_multiplier
    return {
        "tan": tan,
        "epsilon_formula": epsilon_formula(1 / tan, plan.target_delta),
        "noise_per_example": plan.noise_multiplier / plan.expected_batch_size,
        "holds": plan.noise_multiplier >= SMALLEST_SIGMA,
        "smallest_sigma": SMALLEST_SIGMA,
        "smallest_batch_size": math.ceil(smallest) if smallest <= plan.num_examples else None,
        "by_sigma": [row for sigma in SIGMAS if (row := _row(plan, group, sigma)) is not None],
    }


def _row(plan: PrivacyPlan, group: ReleaseGroup, sigma: float) -> dict[str, float] | None:
    scale = sigma / plan.noise_multiplier
    if group.sample_rate * scale > 1:
        return None
    moved = ReleaseGroup(group.sample_rate * scale, group.noise_multiplier * scale, group.count)
    return {
        "noise_multiplier": sigma,
        "expected_batch_size": round(plan.expected_batch_size * scale),
        "epsilon_rdp": accounting.epsilon_rdp([moved], plan.target_delta),
    }
