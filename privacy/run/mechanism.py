"""The clipper of a plan."""

import math
from collections.abc import Mapping

import torch
from torch import nn

from ..certified.certified_sum import CertifiedSum
from ..clipping import SUMS, ClippedSum
from ..clipping.clip_factors import FUNCTIONS
from ..clipping.clipped_sum import Mode
from ..plan.numbers import PrivacyPlan
from ..sums.local import LocalSums, MakeAccumulator


def clipper_of(
    plan: PrivacyPlan,
    model: nn.Module,
    *,
    shapes: Mapping[str, torch.Size] | None = None,
    mode: Mode = "bookkeeping",
    accumulator: MakeAccumulator = LocalSums,
    rows: int | None = None,
    device: torch.device | None = None,
) -> ClippedSum:
    """Returns the clipper whose sensitivity the plan's noise is scaled by; see `ClippedSum` for arguments and errors."""
    # Without privacy the bound is infinite, and any function would do.
    function = FUNCTIONS[plan.clipping_function if plan.enabled else "flat"]
    if plan.lattice is not None:
        return CertifiedSum(
            model,
            plan.lattice,
            shapes=shapes,
            function=function,
            accumulator=accumulator,
            device=device,
        )
    return SUMS[mode](
        model,
        plan.max_grad_norm if plan.enabled else math.inf,
        shapes=shapes,
        function=function,
        accumulator=accumulator,
        cap=plan.max_batch_size,
        rows=rows,
        noise_multiplier=plan.noise_multiplier,
        device=device,
    )
