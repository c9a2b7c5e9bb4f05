"""What the guarantee means for an attacker who wants to know whether an example was in the data.

For any test, with D the data with the example and D' without: P(alarm | D) <= e^eps P(alarm | D') + delta(eps) for every eps,
so the true-positive rate at false-positive rate a is at most min over eps of e^eps a + delta(eps), and the advantage
(true minus false positives) at most delta(0), the total variation. delta(eps) is our own PLD profile, an upper bound, so these
are upper bounds too (Kaissis et al. 2024 and Kulynych et al. 2024, arXiv 2407.02191, use the same duality).
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

from .accountants import FINE_INTERVAL, PLD_SMALLEST_DELTA, ReleaseGroup, loss_distribution

FALSE_POSITIVE_RATES = (1e-3, 1e-2)
CURVE_DELTAS = (1e-4, 1e-5, 1e-6, 1e-7, 1e-8, 1e-9, 1e-10, 1e-11, 1e-12)
_EPSILONS = np.concatenate([np.linspace(0, 10, 1001), np.linspace(10.1, 60, 500)])


def attack_risk(
    groups: Sequence[ReleaseGroup],
    false_positive_rates: Sequence[float] = FALSE_POSITIVE_RATES,
    interval: float = FINE_INTERVAL,
) -> dict[str, Any]:
    """{"advantage", "true_positive_rates": [[false-positive rate, bound], ...]} of everything released."""
    return risk_of(loss_distribution(groups, interval), false_positive_rates)


def risk_of(whole: PrivacyLossDistribution, false_positive_rates: Sequence[float]) -> dict[str, Any]:
    """What `attack_risk` gives, from a composed distribution."""
    deltas = np.asarray(whole.get_delta_for_epsilon(_EPSILONS))
    rates = []
    for rate in false_positive_rates:
        if not 0 <= rate <= 1:
            raise ValueError(f"a false-positive rate is between 0 and 1, not {rate}")
        rates.append([rate, min(1.0, float(np.min(np.exp(_EPSILONS) * rate + deltas)))])
    return {"advantage": min(1.0, float(deltas[0])), "true_positive_rates": rates}


def epsilon_curve(whole: PrivacyLossDistribution, deltas: Sequence[float] = CURVE_DELTAS) -> list[list[float | None]]:
    """[[delta, epsilon], ...]; None where it is infinite or PLD is not reported."""
    curve: list[list[float | None]] = []
    for delta in deltas:
        value = float(whole.get_epsilon_for_delta(delta)) if delta >= PLD_SMALLEST_DELTA else math.inf
        curve.append([delta, value if math.isfinite(value) else None])
    return curve
