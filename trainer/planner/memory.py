"""Bytes that one rank holds, by what they are for, and the largest micro-batch for which memory remains.

Two moments decide. While a micro-batch runs, its activations come on top of everything that stays. At the end of a logical
batch the activations are gone, and the reduction, the noise and the optimizer need room. The peak is the larger of the two.
Who owns which coordinate is the engines' own answer (trainer/engines/layouts.py).
"""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from privacy.clipping.accumulators import EXAMPLES_PER_PART
from privacy.step.engine import repeated_blocks
from privacy.step.reduction import PACKED_COORDINATES
from privacy.step.sharded_sums import bucket_names
from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines.layouts import flat_partition, layout_of
from trainer.optimizers import group_names, moments
from trainer.run.clipping_mode import USABLE

FP32, FP64 = 4, 8
PERSISTENT = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: smaller parameters stay gathered."""
LIVE = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: gathered parameters are given up above this number only."""


@dataclass(frozen=True)
class Trainable:
    """The trainable parameters of a model.

    Attributes:
        shapes: full shapes by name, in the model's order.
        blocks: parameters of each repeated unit, as numbers of coordinates.
        frozen: coordinates of parameters that are not trained.
        buffers: coordinates of floating-point buffers.
    """

    shapes: Mapping[str, torch.Size]
    blocks: Sequence[int]
    frozen: int
    buffers: int

    @classmethod
    def of(cls, model: nn.Module) -> "Trainable":
        """The trainable parameters of an unsharded model on any device."""
        return cls(
            {name: p.shape for name, p in model.named_parameters() if p.requires_grad},
            [sum(p.numel() for p in unit.parameters()) for unit in repeated_blocks(model)],
            sum(p.numel() for p in model.parameters() if not p.requires_grad),
            sum(b.numel() for b in model.buffers() if b.is_floating_point()),
        )

    @property
    def count(self) -> int:
        """P: trainable coordinates."""
        return sum(self.sizes)

    @property
    def sizes(self) -> list[int]:
        return [shape.numel() for shape in self.shapes.values()]


@dataclass(frozen=True)
class Shares:
    """Coordinates on the rank that has the most.

    Attributes:
        owned: whose sums it reduces and noises.
        stepped: whose optimizer states it holds, padding included.
        weights: the copy in the compute dtype that it keeps between uses; 0 where the master weights are that copy.
        masters: fp32 master weights.
        gathered: further weights that exist while a micro-batch runs.
        largest_piece: the longest run that is noised at once.
    """

    owned: int
    stepped: int
    weights: int
    masters: int
    gathered: int
    largest_piece: int


def shares(
    trainable: Trainable, engine: EngineName, machine: MachineSettings, optimizer: OptimizerSection, world_size: int
) -> Shares:
    """What the busiest rank has: coordinates that it owns by the engine's own layout, and the memory that goes with them."""
    layout = layout_of(engine, trainable.shapes, optimizer, machine, world_size)
    owned = max(layout.count(rank) for rank in range(world_size))
    largest_piece = max(piece.length for pieces in layout.pieces for piece in pieces)
    total, whole = trainable.count, trainable.count + trainable.frozen
    match engine:
        case "local":
            return Shares(owned, total, whole, total, 0, largest_piece)
        case "fairscale":  # OSS steps fp32 parameters in place, and master weights otherwise
            masters = total if machine.compute_dtype != torch.float32 else 0
            return Shares(owned, owned, whole, masters, 0, largest_piece)
        case "fsdp":  # the replicas of a shard own it together, and each steps all of it
            ranks = machine.shard_group_size or world_size
            stepped = sum(layout.count(rank) for rank in range(0, world_size, ranks))
            rest, blocks = whole - sum(trainable.blocks), trainable.blocks
            # At stage 3 one block computes while another one is fetched ahead.
            gathered = rest + (2 * max(blocks, default=0) if machine.stage == 3 else sum(blocks))
            return Shares(owned, stepped, 0, stepped + -(-trainable.frozen // ranks), gathered, largest_piece)
        case "deepspeed" if machine.stage == 3:  # small parameters stay gathered, and large ones are given up late
            zero = machine.raw["zero_optimization"]
            persistent = zero.get("stage3_param_persistence_threshold", PERSISTENT)
            live = zero.get("stage3_max_live_parameters", LIVE)
            gathered = min(total, live + sum(size for size in trainable.sizes if size <= persistent))
            return Shares(owned, owned, owned + -(-trainable.frozen // world_size), owned, gathered, largest_piece)
        case "deepspeed":
            groups = group_names(trainable.shapes, trainable.shapes, optimizer).values()
            sizes = [sum(trainable.shapes[name].numel() for name in names) for names in groups]
            padded = sum(flat_partition(size, world_size) for size in sizes)
            return Shares(owned, padded, whole, padded, 0, largest_piece)


@dataclass(frozen=True)
class RankMemory:
    """Bytes on one rank's device, but for `host`.

    Attributes:
        weights: in the compute dtype, kept between uses; buffers included.
        masters: fp32 master weights.
        gradient_buffer: what the engine keeps for gradients.
        moments: optimizer states.
        average: the moving average of the weights.
        noise_history: the past noise of correlated noise.
        sums: clipped gradients, in fp64: whole sums, or this rank's part of them (sharded accumulation).
        bucket: what sharded accumulation takes during a micro-batch.
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
    noise_history: int
    sums: int
    bucket: int
    gathered: int
    step: int
    host: int
    activations: int = 0

    @property
    def lasting(self) -> int:
        """What is there all the time."""
        states = self.masters + self.gradient_buffer + self.moments + self.average + self.noise_history
        return self.weights + states + self.sums

    @property
    def on_top(self) -> int:
        """What is allocated after the first micro-batch has begun, but for its activations."""
        return self.moments + self.gathered + self.bucket

    @property
    def peak(self) -> int:
        return self.lasting + max(self.bucket + self.gathered + self.activations, self.step)


def accumulator_bytes(trainable: Trainable, accumulation: str, world_size: int) -> tuple[int, int]:
    """(sums, bucket), see `RankMemory`: exactly what `LocalSums` and `ShardedSums` keep.

    The fp32 windows of small micro-batches count as activations.
    """
    if accumulation == "local":
        return FP64 * trainable.count, 0
    parts = bucket_parts(trainable, world_size)
    # A bucket, and this rank's part of what it is reduced to.
    return FP64 * sum(parts), max(part * (world_size + 1) * FP64 for part in parts)


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
    on_cpu: bool = False,
    bands: int = 1,
) -> RankMemory:
    """Everything but the activations.

    Args:
        on_cpu: ranks reduce over gloo, by an exchange into a second buffer (`trainer.ranks.distributed.reduce_scatter_sum`).
        bands: of correlated noise; the owner of a coordinate keeps its noise of the last `bands` - 1 steps.
    """
    compute = machine.compute_dtype.itemsize
    sums, bucket = accumulator_bytes(trainable, accumulation, world_size)
    keeps_gradients = engine == "deepspeed" and (machine.stage == 3 or machine.offload_optimizer)
    states = {
        "masters": FP32 * shares.masters,
        "gradient_buffer": FP32 * shares.stepped if keeps_gradients else 0,
        "moments": FP32 * len(moments(optimizer)) * shares.stepped,
        "average": FP32 * shares.owned if average else 0,
        "noise_history": FP64 * (bands - 1) * shares.owned,
    }
    weights = compute * shares.weights
    # At the end of a logical batch: the reduction with its packing buffer, the noise, or the optimizer with an fp32 gradient and
    # as much scratch memory.
    copies = 2 if on_cpu and world_size > 1 else 1
    packed = FP64 * copies * min(PACKED_COORDINATES, world_size * shares.owned) if accumulation == "local" else 0
    stepping = FP32 * (3 if engine == "deepspeed" else 2) * shares.stepped
    if engine == "local":  # whole gradients are gathered and copied
        stepping = FP32 * (trainable.count + max(trainable.count, world_size * shares.owned))
    on_host = 0
    if machine.offload_optimizer or (engine == "fsdp" and machine.offload_param):
        on_host += sum(states.values())
        states = dict.fromkeys(states, 0)
    if machine.offload_param:
        on_host += weights
        weights = 0
    if on_host > 0 and engine != "local":
        stepping = 0
    return RankMemory(
        weights=weights + compute * trainable.buffers,
        **states,
        sums=sums,
        bucket=copies * bucket,
        gathered=compute * shares.gathered,
        step=FP64 * shares.owned + max(packed, 3 * FP64 * shares.largest_piece, stepping),
        host=on_host,
    )


def room(memory: RankMemory, total: int) -> int:
    """What activations may take, by the rule of `trainer.run.clipping_mode`: of the memory that is free when the first
    micro-batch starts, all that comes on top, activations and what is allocated later, may take the share `USABLE`.

    The rest is for scratch memory inside of operations, the device's context, communication buffers and fragmentation.
    """
    there = memory.lasting - memory.moments  # which are made at the end of the first step
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
        guess = min(max(guess, fits + 1), fails - 1)
        guess = guess if guess < 8 else guess // 8 * 8
        if not fits < guess < fails:
            break
        points.append((guess, peak(guess)))
        if points[-1][1] <= available:
            fits = guess
        else:
            fails = guess
        # The size at which the line through the last two points (or through the last and zero) takes what is available.
        (size, taken), (other, other_taken) = points[-1], points[-2] if len(points) > 1 else (0, 0)
        slope = (taken - other_taken) / (size - other)
        guess = size + math.floor((available - taken) / slope) if slope > 0 else 2 * size
    return fits
