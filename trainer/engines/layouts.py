"""Deals out coordinates to ranks as each engine does, from shapes alone.

Every engine takes its layout from here, and at its start compares it with the pieces of the library
underneath. So the planner can use the same functions for machines that were never started. No
engine is imported.
"""

from collections.abc import Mapping, Sequence

import torch

from privacy.ranks.engine import Piece, ShardLayout, even_layout, runs
from privacy.ranks.row_shards import row_layout
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName
from trainer.config.sections import OptimizerSection
from trainer.optimizers import group_names

ZERO_ALIGNMENT = 2
"""DeepSpeed pads the flat groups of stages 1 and 2 to multiples of it times the number of ranks."""


def layout_of(
    engine: EngineName,
    shapes: Mapping[str, torch.Size],
    optimizer: OptimizerSection,
    machine: MachineSettings,
    world_size: int,
) -> ShardLayout:
    """Returns the owner of each coordinate under an engine.

    Args:
        shapes: full shapes of the trainable parameters, in the model's order.
        optimizer: decides about the groups of parameters, which some engines cut one by one.
    """
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    match engine:
        case "local":
            return even_layout(shapes, world_size)
        case "fairscale":
            # OSS gives each parameter, group by group, to the rank with the fewest coordinates.
            counts = [0] * world_size
            for names in group_names(shapes, shapes, optimizer).values():
                for name in names:
                    rank = counts.index(min(counts))
                    pieces[rank].append(Piece(name, 0, shapes[name].numel()))
                    counts[rank] += shapes[name].numel()
        case "fsdp":
            # Each parameter is cut along its first dimension; replicas of a shard divide its
            # coordinates.
            num_shards = machine.shard_group_size or world_size
            return row_layout(shapes, num_shards, world_size // num_shards)
        case "deepspeed" if machine.stage == 3:
            # Each parameter is cut into equal parts, padded at the end: rank r owns the r-th.
            for name, shape in shapes.items():
                size = -(-shape.numel() // world_size)
                for rank, owned in enumerate(pieces):
                    length = min(size, shape.numel() - rank * size)
                    if length > 0:
                        owned.append(Piece(name, rank * size, length))
        case "deepspeed":
            # Each group is one flat tensor, cut into equal parts; a rank's pieces are in the
            # model's order.
            for names in group_names(shapes, shapes, optimizer).values():
                group = [Piece(name, 0, shapes[name].numel()) for name in names]
                size = flat_partition(sum(piece.length for piece in group), world_size)
                borders = [size * rank for rank in range(world_size + 1)]
                for owned, run in zip(pieces, runs(group, borders), strict=True):
                    owned += run
            order = {name: number for number, name in enumerate(shapes)}
            pieces = [sorted(owned, key=lambda piece: order[piece.name]) for owned in pieces]
    return ShardLayout(tuple(map(tuple, pieces)))


def require_dealt(layout: ShardLayout, rank: int, dealt: Sequence[Piece], library: str) -> None:
    """Refuses pieces of the library that differ from the layout of a rank.

    Raises:
        RuntimeError: they differ, so that sums would go to a rank that does not own them.
    """
    planned = layout.owned_by(rank)
    for planned_piece, piece in zip(planned, dealt, strict=False):
        if planned_piece != piece:
            raise RuntimeError(
                f"{library} gave {piece} to rank {rank}, where {planned_piece} was expected"
            )
    if len(dealt) != len(planned):
        raise RuntimeError(
            f"{library} gave {len(dealt)} pieces to rank {rank}, where {len(planned)} were expected"
        )


def flat_partition(num_coordinates: int, world_size: int) -> int:
    """Returns the coordinates of a flat group of ZeRO-1 or 2 on each rank, padding included."""
    aligned = ZERO_ALIGNMENT * world_size
    return -(-num_coordinates // aligned) * ZERO_ALIGNMENT
