"""Bytes that one rank holds, by what they are for, and the largest micro-batch that fits beside them.

Two moments decide. While a micro-batch runs, its activations come on top of everything that stays. At the end of a logical
batch the activations are gone, and the reduction, the noise and the optimizer need room. The peak is the larger of the two.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

from privacy.clipping.accumulators import EXAMPLES_PER_PART
from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines.reduction import PACKED_COORDINATES
from trainer.engines.sharded_sums import bucket_names
from trainer.optimizers import moments
from trainer.planner.sharding import Shares, Trainable
from trainer.run.clipping_mode import USABLE

FP32, FP64 = 4, 8


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank's device, but for `host`.

    Attributes:
        weights: in the compute dtype, kept between uses; buffers included.
        masters: fp32 master weights.
        gradient_buffer: what the engine keeps for gradients.
        moments: optimizer states.
        average: the moving average of the weights.
        sums: of clipped gradients, in fp64: whole ones, or this rank's part of them (sharded accumulation).
        bucket: of sharded accumulation, during a micro-batch.
        gathered: weights that exist while a micro-batch runs.
        activations: highest point of a micro-batch, inputs included; filled in by `with_activations`.
        step: what reduction, noise and optimizer need at the end of a logical batch.
        host: main memory for what is offloaded.
    """

    weights: int
    masters: int
    gradient_buffer: int
    moments: int
    average: int
    sums: int
    bucket: int
    gathered: int
    step: int
    host: int
    activations: int = 0

    @property
    def lasting(self) -> int:
        """What is there all the time."""
        states = self.masters + self.gradient_buffer + self.moments + self.average
        return self.weights + states + self.sums

    @property
    def before_activations(self) -> int:
        """What a micro-batch finds taken."""
        return self.lasting + self.bucket + self.gathered

    @property
    def on_top(self) -> int:
        """What is allocated after the first micro-batch has begun, but for its activations."""
        return self.moments + self.gathered + self.bucket

    @property
    def peak(self) -> int:
        return max(self.before_activations + self.activations, self.lasting + self.step)


class AccumulatorBytes(NamedTuple):
    """See `RankMemory`."""

    sums: int
    bucket: int


def accumulator_bytes(trainable: Trainable, accumulation: str, world_size: int) -> AccumulatorBytes:
    """Exact: what `LocalSums` and `ShardedSums` hold. The fp32 windows of small micro-batches count as activations."""
    if accumulation == "local":
        return AccumulatorBytes(FP64 * trainable.count, 0)
    parts = bucket_parts(trainable, world_size)
    # A bucket, and this rank's part of what it is reduced to.
    bucket = max(part * (world_size + 1) * FP64 for part in parts)
    return AccumulatorBytes(FP64 * sum(parts), bucket)


def bucket_parts(trainable: Trainable, world_size: int) -> list[int]:
    """Coordinates that a rank keeps of each bucket of sharded accumulation."""
    sizes = [sum(trainable.shapes[name].numel() for name in names) for names in bucket_names(trainable.shapes)]
    return [-(-size // world_size) for size in sizes]


def rank_memory(
    trainable: Trainable,
    shares: Shares,
    engine: EngineName,
    machine: MachineSettings,
    optimizer: OptimizerSection,
    *,
    accumulation: str,
    world_size: int,
    average: bool,
) -> RankMemory:
    """Everything but the activations."""
    compute = machine.compute_dtype.itemsize
    accumulator = accumulator_bytes(trainable, accumulation, world_size)
    keeps_gradients = engine == "deepspeed" and (machine.stage == 3 or machine.offload_optimizer)
    states = {
        "masters": FP32 * shares.masters,
        "gradient_buffer": FP32 * shares.stepped if keeps_gradients else 0,
        "moments": FP32 * len(moments(optimizer)) * shares.stepped,
        "average": FP32 * shares.owned if average else 0,
    }
    weights = compute * shares.weights
    on_host = 0
    if machine.offload_optimizer or (engine == "fsdp" and machine.offload_param):
        on_host += sum(states.values())
        states = dict.fromkeys(states, 0)
    if machine.offload_param:
        on_host += weights
        weights = 0
    return RankMemory(
        weights=weights + compute * trainable.buffers,
        **states,
        **accumulator._asdict(),
        gathered=compute * shares.gathered,
        step=_step_bytes(trainable, shares, engine, machine, accumulation, world_size, offloaded=on_host > 0),
        host=on_host,
    )


def _step_bytes(
    trainable: Trainable,
    shares: Shares,
    engine: EngineName,
    machine: MachineSettings,
    accumulation: str,
    world_size: int,
    *,
    offloaded: bool,
) -> int:
    """Reduction with its packing buffer, then noise, then the optimizer with an fp32 gradient and as much scratch memory."""
    owned = FP64 * shares.owned
    packed = FP64 * min(PACKED_COORDINATES, world_size * shares.owned) if accumulation == "local" else 0
    noise = 3 * FP64 * shares.largest_piece
    if engine == "local":  # whole gradients are gathered and copied
        optimizer = FP32 * (trainable.count + max(trainable.count, world_size * shares.owned))
    else:
        copies = 2 if engine == "deepspeed" else 1
        optimizer = 0 if offloaded else FP32 * (copies + 1) * shares.stepped
    return owned + max(packed, noise, optimizer)


def room(memory: RankMemory, total: int) -> int:
    """What activations may take, by the rule of `trainer.run.clipping_mode`: of the memory that is free when the first
    micro-batch starts, all that comes on top, activations and what is allocated later, may take the share `USABLE`.

    The rest is for scratch memory inside of operations, the device's context, communication buffers and fragmentation.
    """
    there = memory.weights + memory.masters + memory.gradient_buffer + memory.average + memory.sums
    return int(USABLE * (total - there)) - memory.on_top


def largest_that_fits(
    peak: Callable[[int], int], available: int, start: int, *, limit: int = EXAMPLES_PER_PART, most_questions: int = 6
) -> int:
    """The largest micro-batch with peak(size) <= available: a multiple of 8 from 8 on; 0 if not even one example fits.

    The peak is nearly affine in the size, so the line through the last two answers finds it in three or four questions. Every
    answer that is returned was asked for; where the line bends, the next larger multiple may fit as well.

    Args:
        limit: larger ones are not looked for: clipping would go through them in parts.
    """
    fits, fails = 0, limit + 1
    points: list[tuple[int, int]] = []
    guess = start
    for _ in range(most_questions):
        guess = _rounded(min(max(guess, fits + 1), fails - 1))
        if not fits < guess < fails:
            break
        points.append((guess, peak(guess)))
        if points[-1][1] <= available:
            fits = guess
        else:
            fails = guess
        guess = _on_the_line(points, available)
    return fits


def _on_the_line(points: list[tuple[int, int]], available: int) -> int:
    """The size at which the line through the last two points (or through the last and zero) takes what is available."""
    (size, taken), (other, other_taken) = points[-1], points[-2] if len(points) > 1 else (0, 0)
    slope = (taken - other_taken) / (size - other)
    return size + math.floor((available - taken) / slope) if slope > 0 else size + size


def _rounded(size: int) -> int:
    return size if size < 8 else size // 8 * 8
