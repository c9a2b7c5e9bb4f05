"""What else a planned run could cost: replays, choosing among candidates, shuffled data; and a third opinion on epsilon.

These numbers are guidance and no claim: on the coarse grid, which is still an upper bound, and without the cap.
"""

import contextlib
import math
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from dp_accounting import NeighboringRelation, dp_event
from dp_accounting.rdp import RdpAccountant

from ..sampling.shuffle import shuffle_lower_bound
from .accountants import COARSE_INTERVAL, ReleaseGroup, epsilon, epsilon_pld, quiet_absl

REPLAYS = (1, 10, 100)
CANDIDATES = (3, 10, 30)
# Beyond this the lower bound's grids grow without telling more.
_LARGEST_SHUFFLED_EPSILON = 500.0


def replay_costs(group: ReleaseGroup, delta: float, counts: Sequence[int] = REPLAYS) -> list[dict[str, Any]]:
    """Epsilon after each number of steps was released once more: with fresh coins (as here), and on the same batch.

    Two releases on one batch are one with half the variance, so only a fresh sample keeps its amplification.
    """
    one, costs = group.without_cap(), []
    for count in (count for count in counts if count <= one.count):
        halved = replace(one, count=count, noise_multiplier=one.noise_multiplier / math.sqrt(2))
        fresh = epsilon_pld([one.times(one.count + count)], delta, COARSE_INTERVAL)
        same = epsilon_pld([one.times(one.count - count), halved], delta, COARSE_INTERVAL)
        costs.append({"replays": count, "fresh_coins": fresh, "same_batch": same})
    return costs


def selection_costs(group: ReleaseGroup, delta: float, means: Sequence[int] = CANDIDATES) -> list[dict[str, Any]]:
    """Epsilon of publishing the best of K whole runs, K random with this mean (Papernot and Steinke 2022).

    The best of the geometric, logarithmic and Poisson distributions of K (arXiv 2110.03620, theorems 2 and 6), by RDP;
    K must really be drawn so, and its value kept secret. A fixed number of candidates has no such bound.
    """
    costs: list[dict[str, Any]] = []
    for mean in means:
        by_shape: dict[str, float] = {}
        for name, shape in (("geometric", 1.0), ("logarithmic", 0.0), ("poisson", math.inf)):
            accountant = RdpAccountant(neighboring_relation=NeighboringRelation.REPLACE_SPECIAL)
            with quiet_absl(), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                accountant.compose(dp_event.RepeatAndSelectDpEvent(group.without_cap().event(), mean, shape))
                by_shape[name] = float(accountant.get_epsilon(delta))
        best = min(by_shape, key=lambda name: by_shape[name])
        costs.append({"candidates": mean, "epsilon": by_shape[best], "distribution": best})
    return costs


def shuffled_instead(group: ReleaseGroup, delta: float, steps_per_epoch: int) -> dict[str, Any]:
    """What the same run would really give on data that are shuffled each epoch instead of sampled.

    {"poisson_would_say", "lower", "upper"}: worst case between the lower bound of an explicit attack and the Gaussian
    without amplification; `lower` is None where that is beyond use.
    """
    epochs = math.ceil(group.count / steps_per_epoch)
    upper = epsilon([ReleaseGroup(1.0, group.noise_multiplier, epochs)], delta)
    useful = upper <= _LARGEST_SHUFFLED_EPSILON and group.count >= steps_per_epoch
    whole_epochs = group.count // steps_per_epoch
    lower = shuffle_lower_bound(group.noise_multiplier, steps_per_epoch, whole_epochs, delta) if useful else None
    return {
        "epochs": epochs,
        "poisson_would_say": epsilon_pld([group.without_cap()], delta, COARSE_INTERVAL),
        "lower": lower,
        "upper": upper,
    }


def opacus_opinion(group: ReleaseGroup, delta: float, eps_error: float = 0.01) -> dict[str, float | None]:
    """Epsilon by opacus' own RDP and PRV accountants; never its central-limit one, which is too low.

    None for PRV where it fails or is known to report too little (delta below 1e-11).
    """
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        from opacus.accountants import PRVAccountant, RDPAccountant

        history = [(group.noise_multiplier, group.sample_rate, group.count)]
        rdp, prv = RDPAccountant(), PRVAccountant()
        rdp.history, prv.history = list(history), list(history)
        opinion: dict[str, float | None] = {"opacus_rdp": float(rdp.get_epsilon(delta)), "opacus_prv": None}
        if delta >= 1e-11:
            with contextlib.suppress(ValueError, RuntimeError, ArithmeticError):
                opinion["opacus_prv"] = float(prv.get_epsilon(delta, eps_error=eps_error))
    return opinion
