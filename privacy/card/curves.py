"""Curves of the privacy card: delta by epsilon, and what they allow an attacker (trade-off curve).

The trade-off function bounds every membership inference attack, whatever it knows: at false-positive rate alpha its
true-positive rate is at most 1 - beta(alpha) (Dong, Roth and Su 2022). (epsilon, delta(epsilon)) for all epsilon give
it exactly (proposition 2.13 there); finitely many of them, each an upper bound, give an upper bound.
privacy/accounting/attack_risk.py bounds single points in the same way; a whole curve needs the other half of the proposition too.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from privacy.accounting import accountants as accounting
from privacy.accounting.accountants import COARSE_INTERVAL, ReleaseGroup
from privacy.accounting.attack_risk import FALSE_POSITIVE_RATES

SMALLEST_FALSE_POSITIVE = 1e-5
_SMALLEST_DELTA = 1e-11
_PROFILE_POINTS = 96
_TRADE_OFF_POINTS = 101

Floats = NDArray[np.float64]


def curves(groups: Sequence[ReleaseGroup], claim: float, tail: float) -> dict[str, Any]:
    """`delta_by_epsilon` and `attack` for everything charged.

    Args:
        claim: epsilon of the claim, where the grid ends if delta never falls to 1e-11.
        tail: delta that the bounded support of the noise costs, added to every delta.
    """
    epsilons, deltas = _profile(groups, claim, tail)
    return {
        "delta_by_epsilon": [[float(eps), float(delta)] for eps, delta in zip(epsilons, deltas, strict=True)],
        "attack": {
            "advantage": float(deltas[0]),
            "true_positive": {
                f"{rate:g}": true_positive_bound(rate, epsilons, deltas) for rate in FALSE_POSITIVE_RATES
            },
            "curve": _trade_off(epsilons, deltas),
        },
    }


def true_positive_bound(rate: float, epsilons: Floats, deltas: Floats) -> float:
    """Largest true-positive rate of any attack at false-positive rate `rate`, from points (epsilon, delta)."""
    growth = np.exp(epsilons)
    steep, flat = deltas + growth * rate, 1 - (1 - deltas - rate) / growth
    # An attack may always guess, so that less than `rate` is no bound.
    return float(min(max(rate, np.minimum(steep, flat).min()), 1.0))


def _trade_off(epsilons: Floats, deltas: Floats) -> list[list[float]]:
    """[false-positive rate, largest true-positive rate], the stated rates among them."""
    steps = np.geomspace(SMALLEST_FALSE_POSITIVE, 1, _TRADE_OFF_POINTS)
    rates = np.unique(np.concatenate([steps, FALSE_POSITIVE_RATES]))
    return [[float(rate), true_positive_bound(float(rate), epsilons, deltas)] for rate in rates]


def _profile(groups: Sequence[ReleaseGroup], claim: float, tail: float) -> tuple[Floats, Floats]:
    """(epsilon, delta(epsilon)) from epsilon 0 to where delta is 1e-11, the larger delta of both directions."""
    if not any(group.count and group.sample_rate for group in groups):
        return np.zeros(1), np.full(1, tail)
    distribution = accounting.loss_distribution(groups, COARSE_INTERVAL)
    last = distribution.get_epsilon_for_delta(_SMALLEST_DELTA)
    last = last if math.isfinite(last) else 2 * claim
    # Denser near 0, where the trade-off curve bends.
    epsilons = last * np.linspace(0, 1, _PROFILE_POINTS) ** 1.5
    deltas = np.asarray(distribution.get_delta_for_epsilon(epsilons), dtype=np.float64)
    # Below 1e-12 only rounding is left; delta falls with epsilon, so a running minimum is a bound as well.
    deltas = np.minimum.accumulate(np.clip(deltas, 1e-12, 1) + tail)
    return epsilons, np.minimum(deltas, 1.0)
