"""The mechanism of a plan: its sampler, its clipped sum and its noise, in one place."""

import math
from collections.abc import Mapping, Sequence

import torch
from torch import nn

from ..certified.certified_sum import CertifiedSum
from ..clipping import SUMS, ClippedSum
from ..clipping.clip_factors import FUNCTIONS
from ..clipping.clipped_sum import Mode
from ..gradients.recorder import Task
from ..noise.source import NoiseSource, SystemNoise
from ..plan.numbers import PrivacyPlan
from ..ranks.engine import Engine
from ..sampling.sampler import sampler_of
from ..step.batches import max_rows
from ..step.step import Mechanism
from ..sums.local import LocalSums, MakeAccumulator


def mechanism_of(
    plan: PrivacyPlan,
    engine: Engine,
    task: Task,
    micro_batch_size: int,
    *,
    mode: Mode = "bookkeeping",
    accumulator: MakeAccumulator = LocalSums,
    nodes: Sequence[int] = (),
    noise: NoiseSource | None = None,
) -> Mechanism:
    """Returns what a run does to its data, for which the plan is accounted. Collective.

    Args:
        task: maps the inputs of a micro-batch to one loss per example.
        mode: of clipping; certified arithmetic has its own.
        accumulator: where sums gather.
        nodes: the node of each rank, where each node reads its share of the examples.
        noise: in place of the operating system's, in tests and audits.

    Raises:
        PrivacyConfigError: a parameter or layer cannot be clipped.
    """
    sampler = sampler_of(plan)
    rows = max_rows(sampler, micro_batch_size, nodes, plan.expected_batch_size)
    clipped = clipper_of(
        plan,
        engine.module,
        shapes=engine.shapes,
        mode=mode,
        accumulator=accumulator,
        rows=rows,
        device=engine.device,
    )
    return Mechanism(
        plan=plan,
        sampler=sampler,
        clipped=clipped,
        noise=noise or SystemNoise(),
        engine=engine,
        task=task,
    )


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
    """Returns the clipped sum of a plan, by whose sensitivity its noise is scaled.

    See `ClippedSum` for arguments and errors.
    """
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
    kind = SUMS[mode]
    return kind(
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
