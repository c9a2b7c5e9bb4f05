"""The second release of a step under adaptive clipping: how many examples stayed below C, noised; then C moves.

The clipper counts, privacy/adaptive_clipping.py says what the release costs and how C follows it, and here the count leaves
its process: it goes to rank 0, which alone adds noise, once, and from there, noised, to all ranks. The caller has made the
step's intent durable.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ..adaptive_clipping import RANGE
from ..boundary import Public, Reason
from ..clipping import ClippedSum, MicroBatchStats
from ..clipping.accumulators import real
from ..errors import ConfigError
from ..noise import NoiseSource, add_noise
from ..plan import PrivacyPlan
from ..releases import UNCLIPPED, Release
from ..rounded_normal import deviation_in_units
from . import collectives

MANIFEST_KEY = "clipping_bound"
FRACTION = "privacy/noised_unclipped_fraction"


def adapt_bound(
    clipped: ClippedSum,
    plan: PrivacyPlan,
    noise: NoiseSource,
    stats: Sequence[MicroBatchStats],
    releases: Sequence[Release],
) -> dict[str, Public[float]]:
    """Moves C for the next step; returns what may be published about this one, nothing where C is constant. Collective."""
    adaptive, unit = clipped.adaptive, clipped.count_unit
    if adaptive is None or unit is None:
        return {}
    used, batch_size = clipped.max_grad_norm, plan.expected_batch_size
    std = next(release["std"] for release in releases if release["name"] == UNCLIPPED)
    count = torch.stack([s.centred_unclipped for s in stats]).sum().double().cpu().view(1)
    collectives.reduce_to_main(count)

    def noised() -> float:
        whole = unit.whole(count, plan.max_batch_size)
        add_noise(whole, deviation_in_units(std, unit.exponent), noise)
        return float(real(whole, unit.exponent))

    fraction = adaptive.noised_fraction(collectives.on_main(noised), batch_size)
    clipped.max_grad_norm = adaptive.next_bound(used, fraction, plan.max_grad_norm)
    published = {"privacy/clipping_bound": used, FRACTION: fraction}
    return {name: Public(value, Reason.NOISED) for name, value in published.items()}


def resumed_bound(manifest: Mapping[str, Any], initial_bound: float) -> float:
    """C of the step after a checkpoint, bit by bit.

    Raises:
        ConfigError: the manifest does not state one.
    """
    bound = manifest.get(MANIFEST_KEY)
    if not isinstance(bound, float) or not initial_bound / RANGE <= bound <= initial_bound * RANGE:
        raise ConfigError(
            f"the checkpoint of step {manifest.get('step')} states no {MANIFEST_KEY} that adaptive clipping could go on from "
            f"({bound!r}); resume from another checkpoint, or start a new run folder"
        )
    return bound
