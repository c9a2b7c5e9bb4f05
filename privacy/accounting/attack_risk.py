"""What the guarantee means for an attacker who wants to know whether an example was in the data.

For any test, with D the data with the example and D' without: P(alarm | D) <= e^eps P(alarm | D') + delta(eps) for every eps,
so the true-positive rate at false-positive rate a is at most min over eps of e^eps a + delta(eps), and the advantage
(true minus false positives) at most delta(0), the total variation. delta(eps) is our own PLD profile, an upper bound, so these
are upper bounds too (Kaissis et al. 2024 and Kulynych et al. 2024, arXiv 2407.02191, use the same duality). For the other half,
the same inequality holds for no alarm and with D and D' exchanged; all eps together give the trade-off function exactly (Dong,
Roth and Su 2022, proposition 2.13).
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
from dp_accounting.pld.privacy_loss_distribution import PrivacyLossDistribution

FALSE_POSITIVE_RATES = (1e-3, 1e-2)
_EPSILONS = np.concatenate([np.linspace(0, 10, 1001), np.linspace(10.1, 60, 500)])


def risk_of(
    whole: PrivacyLossDistribution, tail: float = 0.0, rates: Sequence[float] = FALSE_POSITIVE_RATES
) -> dict[str, Any]:
    """{"advantage", "true_positive_rates": [[false-positive rate, bound], ...]} of everything released.

    Args:
        tail: delta that the bounded support of the noise costs, added to every delta.
        rates: the false-positive rates.
    """
    deltas = np.minimum(np.asarray(whole.get_delta_for_epsilon(_EPSILONS)) + tail, 1.0)
    growth, bounds = np.exp(_EPSILONS), []
    for rate in rates:
        steep, flat = deltas + growth * rate, 1 - (1 - deltas - rate) / growth
        # An attack may always guess, so that less than `rate` is no bound.
        bounds.append([rate, float(min(max(rate, np.minimum(steep, flat).min()), 1.0))])
    return {"advantage": float(deltas[0]), "true_positive_rates": bounds}
