"""Counts the bytes of one rank by purpose, and finds the largest micro-batch that fits.

The peak is the larger of two moments. While a micro-batch runs, its activations come on top of the
lasting bytes. At the end of a logical batch the activations are gone, and the reduction, the noise
and the optimizer need memory. trainer/engines/layouts.py says which rank owns which coordinates.
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
from trainer.config.recipe import EngineName
from trainer.config.sections import OptimizerSection
from trainer.engines.layouts import flat_partition, layout_of
from trainer.memory import USABLE
from trainer.optimizers import group_names, moments

FP32 = 4
FP64 = 8
PERSISTENT = 100_000
"""DeepSpeed's default of stage3_param_persistence_threshold: smaller parameters stay gathered."""
LIVE = 1_000_000_000
"""DeepSpeed's default of stage3_max_live_parameters: only above it parameters are given up."""


def trained_shapes(model: nn.Module) -> dict[str, torch.Size]:
    """Returns the full shapes of an unsharded model's trainable parameters, in its order."""
    return {name: p.shape for name, p in model.named_parameters() if p.requires_grad}


def trained_count(model: nn.Module) -> int:
    """Returns P, the number of trainable coordinates."""
    return sum(shape.numel() for shape in trained_shapes(model).values())


@dataclass(frozen=True)
class RankMemory:
    """Bytes on the device of the busiest rank, but for `host` and `owned`.

    Attributes:
        owned: coordinates whose sums the rank reduces and noises.
        weights: in the compute dtype, kept between uses; buffers included. Without them the master
            weights are that copy.
        masters: fp32 master weights.
        gradient_buffer: the engine's memory for gradients.
        moments: optimizer states.
        average: the moving average of the weights.
        sums: clipped gradients: whole sums, or this rank's part of them (sharded accumulation).
        bucket: memory of sharded accumulation during a micro-batch.
        gathered: further weights that exist while a micro-batch runs.
        activations: highest point of a micro-batch, inputs included; the caller fills it in.
        step: memory of reduction, noise and optimizer at the end of a logical batch, beyond the
            lasting bytes; sums are freed meanwhile.
        host: main memory for offloaded weights and states.
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
    def lasting_bytes(self) -> int:
        """Returns the bytes that last from step to step."""
        states = self.masters + self.gradient_buffer + self.moments + self.average
        return self.weights + states + self.sums

    @property
    def later_bytes(self) -> int:
        """Returns the bytes that come after the first micro-batch has begun, but no activations."""
        return self.moments + self.gathered + self.bucket

    @property
    def peak(self) -> int:
        """Returns the highest number of bytes at any moment."""
        micro_batch = self.bucket + self.gathered + self.activations
        return self.lasting_bytes + max(micro_batch, self.step)

    def room(self, total: int) -> int:
        """Returns the bytes of the device's `total` that activations may take.

        Of the memory that is free when the first micro-batch starts, activations and later
        allocations may take the share `USABLE`. The rest is for scratch memory inside of
        operations, the device's context, communication buffers and fragmentation.
        """
        # The moments are made at the end of the first step.
        allocated = self.lasting_bytes - self.moments
        return int(USABLE * (total - allocated)) - self.later_bytes


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
    """Returns the bytes of the busiest rank, without activations.

    Args:
        model: unsharded, on any device.
        grid: of the clipper.
        on_cpu: ranks reduce over gloo, by an exchange into a second buffer
            (`privacy.ranks.collectives.reduce_scatter_sum`).
    """
    shapes = trained_shapes(model)
    sizes = [shape.numel() for shape in shapes.values()]
    trained = sum(sizes)
    all_weights = sum(p.numel() for p in model.parameters())
    frozen = all_weights - trained
    buffers = sum(b.numel() for b in model.buffers() if b.is_floating_point())
    layout = layout_of(engine, shapes, optimizer, machine, world_size)
    owned = max(layout.count(rank) for rank in range(world_size))

    def coordinates(groups: Iterable[Sequence[str]]) -> list[int]:
        return [sum(shapes[name].numel() for name in names) for names in groups]

    # Coordinates, padding included: `stepped` have optimizer states here, `weights` a copy in the
    # compute dtype, `masters` an fp32 master weight; `gathered` exist during a micro-batch.
    match engine:
        case "local":
            stepped = trained
            weights = all_weights
            masters = trained
            gathered = 0
        case "fairscale":
            # OSS steps fp32 parameters in place, and master weights otherwise.
            stepped = owned
            weights = all_weights
            masters = trained if machine.compute_dtype != torch.float32 else 0
            gathered = 0
        case "fsdp":
            # The replicas of a shard own it together, and each steps all of it.
            group_size = machine.shard_group_size or world_size
            stepped = sum(layout.count(rank) for rank in range(0, world_size, group_size))
            weights = 0
            masters = stepped + -(-frozen // group_size)
            blocks = [sum(p.numel() for p in unit.parameters()) for unit in repeated_blocks(model)]
            # At stage 3 one block computes while another one is fetched ahead.
            gathered_blocks = 2 * max(blocks, default=0) if machine.stage == 3 else sum(blocks)
            gathered = all_weights - sum(blocks) + gathered_blocks
        case "deepspeed" if machine.stage == 3:
            # Small parameters stay gathered, and large ones are given up late.
            zero = machine.raw["zero_optimization"]
            persistent = zero.get("stage3_param_persistence_threshold", PERSISTENT)
            live = zero.get("stage3_max_live_parameters", LIVE)
            stepped = owned
            weights = owned + -(-frozen // world_size)
            masters = owned
            gathered = min(trained, live + sum(size for size in sizes if size <= persistent))
        case "deepspeed":
            groups = coordinates(group_names(shapes, shapes, optimizer).values())
            stepped = sum(flat_partition(size, world_size) for size in groups)
            weights = all_weights
            masters = stepped
            gathered = 0
    itemsize = machine.compute_dtype.itemsize
    if accumulation == "local":
        sums = sum(num_bytes(size, grid.layout_of(size)) for size in sizes)
        bucket = 0
    else:
        # A bucket, and this rank's part of its reduced sums.
        parts = [-(-size // world_size) for size in coordinates(bucket_names(shapes))]
        sums = FP64 * sum(parts)
        bucket = max(part * (world_size + 1) * FP64 for part in parts)
    keeps_gradients = engine == "deepspeed" and (machine.stage == 3 or machine.offload_optimizer)
    states = {
        "masters": FP32 * masters,
        "gradient_buffer": FP32 * stepped if keeps_gradients else 0,
        "moments": FP32 * len(moments(optimizer)) * stepped,
        "average": FP32 * owned if average else 0,
    }
    weight_bytes = itemsize * weights
    # At the end of a logical batch: the reduction with its packing buffer, which frees sums as it
    # makes the gradient; then, with the gradient alone, a draw of noise, or the optimizer with an
    # fp32 gradient and as much scratch memory.
    copies = 2 if on_cpu and world_size > 1 else 1
    packing = 0
    if accumulation == "local":
        packing = FP64 * copies * min(PACKED_COORDINATES, world_size * owned)
    # The draw, and its copy or a thread's part; then chunks become fp64 in place.
    longest = max(piece.length for pieces in layout.pieces for piece in pieces)
    noise = 2 * FP64 * min(MOST_DRAWN, longest)
    stepping = FP64 * owned + FP32 * (3 if engine == "deepspeed" else 2) * stepped
    if engine == "local":
        # Full gradients come in chunks, and the chunks that were sent are freed meanwhile.
        chunk = min(owned, PACKED_COORDINATES // max(world_size, 4))
        gathering = max(FP64 * owned, FP32 * trained) + FP32 * (world_size + 1) * chunk
        stepping = max(gathering, 2 * FP32 * trained)
    on_host = 0
    if machine.offload_optimizer or (engine == "fsdp" and machine.offload_param):
        on_host += sum(states.values())
        states = dict.fromkeys(states, 0)
    if machine.offload_param:
        on_host += weight_bytes
        weight_bytes = 0
    if on_host > 0 and engine != "local":
        stepping = FP64 * owned
    reduction = max(sums, FP64 * owned) + packing
    return RankMemory(
        owned=owned,
        weights=weight_bytes + itemsize * buffers,
        **states,
        sums=sums,
        bucket=copies * bucket,
        gathered=itemsize * gathered,
        step=max(reduction, FP64 * owned + noise, stepping) - sums,
        host=on_host,
    )


def largest_that_fits(
    peak: Callable[[int], int], available: int, *, limit: int = EXAMPLES_PER_PART
) -> int:
    """Returns the largest micro-batch with peak(size) <= available, or 0 if no example fits.

    From 8 on it is a multiple of 8.

    Args:
        peak: grows with the size. It is called eight times: a head that works by chunks makes it
            nonlinear, so it is not interpolated.
        limit: the largest size tried: clipping would take a larger micro-batch in parts.
    """
    sizes: list[int] = [0, *range(1, 8), *range(8, limit + 1, 8)]
    too_large = bisect.bisect_right(sizes, available, lo=1, key=peak)
    return sizes[too_large - 1]
