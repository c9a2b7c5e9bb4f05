"""Bytes that one rank holds, by what they are for, and the largest micro-batch for which memory remains.

Two moments decide. While a micro-batch runs, its activations come on top of everything that stays. At the end of a logical
batch the activations are gone, and the reduction, the noise and the optimizer need room. The peak is the larger of the two.
Who owns which coordinate is the engines' own answer (trainer/engines/layouts.py).
"""

import bisect
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from privacy.noise.source import MOST_DRAWN
from privacy.ranks.engine import repeated_blocks
from privacy.sums.grid import EXAMPLES_PER_PART, Grid, num_bytes
from privacy.sums.reduction import PACKED_COORDINATES
from privacy.sums.sharded import bucket_names
from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines.layouts import flat_partition, layout_of
from trainer.memory import USABLE
from trainer.optimizers import group_names, moments

FP32, FP64 = 4, 8
PERSISTENT = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: smaller parameters stay gathered."""
LIVE = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: gathered parameters are given up above this number only."""


def trained_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Full shapes of the trainable parameters of an unsharded model, on any device, in its order."""
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def trained_count(model: nn.Module) -> int:
    """P: trainable coordinates."""
    return sum(shape.numel() for shape in trained_shapes(model).values())


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of the busiest rank, but for `host` and `owned`.

    Attributes:
        owned: coordinates whose sums it reduces and noises.
        weights: in the compute dtype, kept between uses; buffers included. Without them the master weights are that copy.
        masters: fp32 master weights.
        gradient_buffer: what the engine keeps for gradients.
        moments: optimizer states.
        average: the moving average of the weights.
        sums: clipped gradients: whole sums, or this rank's part of them (sharded accumulation).
        bucket: what sharded accumulation takes during a micro-batch.
        gathered: further weights that exist while a micro-batch runs.
        activations: highest point of a micro-batch, inputs included; the caller fills it in.
        step: what reduction, noise and optimizer need at the end of a logical batch beyond what stays; sums go meanwhile.
        host: main memory for what is offloaded.
    """

    owned: int
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
    def on_top(self) -> int:
        """What is allocated after the first micro-batch has begun, but for its activations."""
        return self.moments + self.gathered + self.bucket

    @property
    def peak(self) -> int:
        return self.lasting + max(self.bucket + self.gathered + self.activations, self.step)

    def room(self, total: int) -> int:
        """What activations may take of the device's `total`.

        Of the memory that is free when the first micro-batch starts, all that comes on top, activations and what is allocated
        later, may take the share `USABLE`. The rest is for scratch memory inside of operations, the device's context,
        communication buffers and fragmentation.
        """
        there = self.lasting - self.moments  # which are made at the end of the first step
        return int(USABLE * (total - there)) - self.on_top


def rank_memory(
    model: nn.Module,
    engine: EngineName,
    machine: MachineSettings,
    optimizer: OptimizerSection,
    *,
    accumulation: str,
    world_size: int,
    grid: Grid,
    average: bool = False,
    on_cpu: bool = False,
) -> RankMemory:
    """Everything but the activations, on the rank that has the most.

    Args:
        model: whole, on any device.
        grid: of the clipper.
        on_cpu: ranks reduce over gloo, by an exchange into a second buffer (`privacy.ranks.collectives.reduce_scatter_sum`).
    """
    shapes, whole = trained_shapes(model), sum(p.numel() for p in model.parameters())
    sizes = [shape.numel() for shape in shapes.values()]
    total, frozen = sum(sizes), whole - sum(sizes)
    buffers = sum(b.numel() for b in model.buffers() if b.is_floating_point())
    layout = layout_of(engine, shapes, optimizer, machine, world_size)
    owned = max(layout.count(rank) for rank in range(world_size))

    def coordinates(groups: Iterable[Sequence[str]]) -> list[int]:
        return [sum(shapes[name].numel() for name in names) for names in groups]

    # Coordinates: whose optimizer states it holds, padding included; the copy in the compute dtype; fp32 masters; gathered.
    match engine:
        case "local":
            stepped, weights, masters, gathered = total, whole, total, 0
        case "fairscale":  # OSS steps fp32 parameters in place, and master weights otherwise
            masters = total if machine.compute_dtype != torch.float32 else 0
            stepped, weights, gathered = owned, whole, 0
        case "fsdp":  # the replicas of a shard own it together, and each steps all of it
            ranks = machine.shard_group_size or world_size
            stepped = sum(layout.count(rank) for rank in range(0, world_size, ranks))
            weights, masters = 0, stepped + -(-frozen // ranks)
            blocks = [sum(p.numel() for p in unit.parameters()) for unit in repeated_blocks(model)]
            # At stage 3 one block computes while another one is fetched ahead.
            gathered = (
                whole
                - sum(blocks)
                + (2 * max(blocks, default=0) if machine.stage == 3 else sum(blocks))
            )
        case "deepspeed" if (
            machine.stage == 3
        ):  # small parameters stay gathered, and large ones are given up late
            zero = machine.raw["zero_optimization"]
            persistent = zero.get("stage3_param_persistence_threshold", PERSISTENT)
            live = zero.get("stage3_max_live_parameters", LIVE)
            gathered = min(total, live + sum(size for size in sizes if size <= persistent))
            stepped, weights, masters = owned, owned + -(-frozen // world_size), owned
        case "deepspeed":
            groups = coordinates(group_names(shapes, shapes, optimizer).values())
            stepped = masters = sum(flat_partition(size, world_size) for size in groups)
            weights, gathered = whole, 0
    compute = machine.compute_dtype.itemsize
    if accumulation == "local":
        sums, bucket = sum(num_bytes(size, grid.layout_of(size)) for size in sizes), 0
    else:  # a bucket, and this rank's part of what it is reduced to
        parts = [-(-size // world_size) for size in coordinates(bucket_names(shapes))]
        sums, bucket = FP64 * sum(parts), max(part * (world_size + 1) * FP64 for part in parts)
    keeps_gradients = engine == "deepspeed" and (machine.stage == 3 or machine.offload_optimizer)
    states = {
        "masters": FP32 * masters,
        "gradient_buffer": FP32 * stepped if keeps_gradients else 0,
        "moments": FP32 * len(moments(optimizer)) * stepped,
        "average": FP32 * owned if average else 0,
    }
    kept = compute * weights
    # At the end of a logical batch: the reduction with its packing buffer, which frees sums as it makes the gradient; then, with
    # the gradient alone, a draw of noise, or the optimizer with an fp32 gradient and as much scratch memory.
    copies = 2 if on_cpu and world_size > 1 else 1
    packed = (
        FP64 * copies * min(PACKED_COORDINATES, world_size * owned)
        if accumulation == "local"
        else 0
    )
    # The draw, and its copy or what a thread works on; then chunks become fp64 where they lie.
    noised = (
        2
        * FP64
        * min(MOST_DRAWN, max(piece.length for pieces in layout.pieces for piece in pieces))
    )
    stepping = FP64 * owned + FP32 * (3 if engine == "deepspeed" else 2) * stepped
    if engine == "local":  # whole gradients come in chunks, and what was sent is freed meanwhile
        chunk = min(owned, PACKED_COORDINATES // max(world_size, 4))
        stepping = max(
            max(FP64 * owned, FP32 * total) + FP32 * (world_size + 1) * chunk, 2 * FP32 * total
        )
    on_host = 0
    if machine.offload_optimizer or (engine == "fsdp" and machine.offload_param):
        on_host += sum(states.values())
        states = dict.fromkeys(states, 0)
    if machine.offload_param:
        on_host += kept
        kept = 0
    if on_host > 0 and engine != "local":
        stepping = FP64 * owned
    return RankMemory(
        owned=owned,
        weights=kept + compute * buffers,
        **states,
        sums=sums,
        bucket=copies * bucket,
        gathered=compute * gathered,
        step=max(max(sums, FP64 * owned) + packed, FP64 * owned + noised, stepping) - sums,
        host=on_host,
    )


def largest_that_fits(
    peak: Callable[[int], int], available: int, *, limit: int = EXAMPLES_PER_PART
) -> int:
    """The largest micro-batch with peak(size) <= available: a multiple of 8 from 8 on; 0 if not even one example fits.

    Args:
        peak: grows with the size. It is asked eight times, since heads that work by chunks bend the line.
        limit: larger ones are not looked for: clipping would go through them in parts.
    """
    sizes: list[int] = [0, *range(1, 8), *range(8, limit + 1, 8)]
    too_large = bisect.bisect_right(sizes, available, lo=1, key=peak)
    return sizes[too_large - 1]
