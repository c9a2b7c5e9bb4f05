"""Which rank owns which coordinates under each engine, from shapes alone.

Every engine takes its layout from here, and compares it at its start with what the library underneath has done. So the planner
can ask the same functions about machines that nobody has started. No engine is imported.
"""

from collections.abc import Mapping, Sequence

import torch

from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines.base import Piece, ShardLayout, even_layout, runs
from trainer.optimizers import group_names

ZERO_ALIGNMENT = 2
"""DeepSpeed pads the flat groups of stages 1 and 2 to multiples of this times the number of ranks."""


def layout_of(
    engine: EngineName,
    shapes: Mapping[str, torch.Size],
    optimizer: OptimizerSection,
    machine: MachineSettings,
    world_size: int,
) -> ShardLayout:
    """
    Args:
        shapes: full shapes of the trainable parameters, in the model's order.
        optimizer: it decides about the groups of parameters, which some engines cut one by one.
    """
    match engine:
        case "local":
            return even_layout(shapes, world_size)
        case "fairscale":
            return _whole_parameters(shapes, optimizer, world_size)
        case "fsdp":
            return _rows(shapes, machine.shard_group_size or world_size, world_size)
        case "deepspeed" if machine.stage == 3:
            return _equal_parts(shapes, world_size)
        case "deepspeed":
            return _flat_groups(shapes, optimizer, world_size)


def require_dealt(layout: ShardLayout, rank: int, dealt: Sequence[Piece], library: str) -> None:
    """Compares the layout with what the library has given to this rank.

    Raises:
        RuntimeError: they differ, so that sums would go to a rank that does not own them.
    """
    for planned, real in zip(layout.owned_by(rank), dealt, strict=False):
        if planned != real:
            raise RuntimeError(f"{library} gave {real} to rank {rank}, where {planned} was expected")
    if len(dealt) != len(layout.owned_by(rank)):
        raise RuntimeError(
            f"{library} gave {len(dealt)} pieces to rank {rank}, where {len(layout.owned_by(rank))} were expected"
        )


def flat_partition(num_coordinates: int, world_size: int) -> int:
    """Coordinates of a flat group of ZeRO-1 or 2 on each rank, padding included."""
    aligned = ZERO_ALIGNMENT * world_size
    return -(-num_coordinates // aligned) * ZERO_ALIGNMENT


def row_shard(shape: torch.Size, index: int, num_shards: int) -> tuple[int, int]:
    """(offset, length) of a shard of FSDP2: a run of rows, as `torch.chunk` cuts them."""
    rows, row = (shape[0], shape[1:].numel()) if len(shape) > 0 else (1, 1)
    offset = min(index * -(-rows // num_shards), rows)
    return offset * row, min(-(-rows // num_shards), rows - offset) * row


def replica_cut(num_coordinates: int, num_replicas: int) -> int:
    """Coordinates of a shard that each of its replicas owns; the last replica owns fewer."""
    return -(-num_coordinates // num_replicas)


def _whole_parameters(shapes: Mapping[str, torch.Size], optimizer: OptimizerSection, world_size: int) -> ShardLayout:
    """fairscale's OSS: group by group, each parameter goes to the rank that has least so far."""
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    owned = [0] * world_size
    for names in group_names(shapes, shapes, optimizer).values():
        for name in names:
            rank = owned.index(min(owned))
            pieces[rank].append(Piece(name, 0, shapes[name].numel()))
            owned[rank] += shapes[name].numel()
    return ShardLayout(tuple(map(tuple, pieces)))


def _rows(shapes: Mapping[str, torch.Size], num_shards: int, world_size: int) -> ShardLayout:
    """FSDP2 cuts each parameter along its first dimension; replicas of a shard divide its coordinates among themselves."""
    num_replicas = world_size // num_shards
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for index in range(num_shards):
        shard = [Piece(name, *row_shard(shape, index, num_shards)) for name, shape in shapes.items()]
        cut = replica_cut(sum(piece.length for piece in shard), num_replicas)
        for replica, run in enumerate(runs(shard, [cut * r for r in range(num_replicas + 1)])):
            pieces[replica * num_shards + index] = run
    return ShardLayout(tuple(map(tuple, pieces)))


def _equal_parts(shapes: Mapping[str, torch.Size], world_size: int) -> ShardLayout:
    """ZeRO-3 cuts each parameter into equal parts, padded at the end: rank r owns the r-th."""
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for name, shape in shapes.items():
        part = -(-shape.numel() // world_size)
        for rank, owned in enumerate(pieces):
            length = min(part, shape.numel() - rank * part)
            if length > 0:
                owned.append(Piece(name, rank * part, length))
    return ShardLayout(tuple(map(tuple, pieces)))


def _flat_groups(shapes: Mapping[str, torch.Size], optimizer: OptimizerSection, world_size: int) -> ShardLayout:
    """ZeRO-1 and 2 make each group one flat tensor and cut that into equal parts; a rank's pieces are in the model's order."""
    pieces: list[dict[str, Piece]] = [{} for _ in range(world_size)]
    for names in group_names(shapes, shapes, optimizer).values():
        group = [Piece(name, 0, shapes[name].numel()) for name in names]
        part = flat_partition(sum(piece.length for piece in group), world_size)
        for owned, run in zip(pieces, runs(group, [part * r for r in range(world_size + 1)]), strict=True):
            owned.update({piece.name: piece for piece in run})
    return ShardLayout(tuple(tuple(owned[name] for name in shapes if name in owned) for owned in pieces))
