"""Which rank owns which coordinates under each engine, from shapes alone.

Every engine takes its layout from here, and compares it at its start with what the library underneath has done. So the planner
can ask the same functions about machines that nobody has started. No engine is imported.
"""

from collections.abc import Mapping, Sequence

import torch

from privacy.ranks.engine import Piece, ShardLayout, even_layout, runs
from privacy.ranks.row_shards import row_layout
from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
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
    """Deals out the coordinates as the engine does.

    Args:
        shapes: full shapes of the trainable parameters, in the model's order.
        optimizer: it decides about the groups of parameters, which some engines cut one by one.
    """
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    match engine:
        case "local":
            return even_layout(shapes, world_size)
        case (
            "fairscale"
        ):  # OSS: group by group, each parameter goes to the rank that has least so far
            counts = [0] * world_size
            for names in group_names(shapes, shapes, optimizer).values():
                for name in names:
                    rank = counts.index(min(counts))
                    pieces[rank].append(Piece(name, 0, shapes[name].numel()))
                    counts[rank] += shapes[name].numel()
        case "fsdp":  # each parameter is cut along its first dimension; replicas of a shard divide its coordinates
            num_shards = machine.shard_group_size or world_size
            return row_layout(shapes, num_shards, world_size // num_shards)
        case "deepspeed" if (
            machine.stage == 3
        ):  # equal parts of each parameter, padded at the end: rank r owns the r-th
            for name, shape in shapes.items():
                part = -(-shape.numel() // world_size)
                for rank, owned in enumerate(pieces):
                    length = min(part, shape.numel() - rank * part)
                    if length > 0:
                        owned.append(Piece(name, rank * part, length))
        case "deepspeed":  # each group is one flat tensor, cut into equal parts; a rank's pieces are in the model's order
            for names in group_names(shapes, shapes, optimizer).values():
                group = [Piece(name, 0, shapes[name].numel()) for name in names]
                part = flat_partition(sum(piece.length for piece in group), world_size)
                for owned, run in zip(
                    pieces, runs(group, [part * r for r in range(world_size + 1)]), strict=True
                ):
                    owned += run
            order = {name: number for number, name in enumerate(shapes)}
            pieces = [sorted(owned, key=lambda piece: order[piece.name]) for owned in pieces]
    return ShardLayout(tuple(map(tuple, pieces)))


def require_dealt(layout: ShardLayout, rank: int, dealt: Sequence[Piece], library: str) -> None:
    """Compares the layout with what the library has given to this rank.

    Raises:
        RuntimeError: they differ, so that sums would go to a rank that does not own them.
    """
    for planned, real in zip(layout.owned_by(rank), dealt, strict=False):
        if planned != real:
            raise RuntimeError(
                f"{library} gave {real} to rank {rank}, where {planned} was expected"
            )
    if len(dealt) != len(layout.owned_by(rank)):
        raise RuntimeError(
            f"{library} gave {len(dealt)} pieces to rank {rank}, where {len(layout.owned_by(rank))} were expected"
        )


def flat_partition(num_coordinates: int, world_size: int) -> int:
    """Coordinates of a flat group of ZeRO-1 or 2 on each rank, padding included."""
    aligned = ZERO_ALIGNMENT * world_size
    return -(-num_coordinates // aligned) * ZERO_ALIGNMENT
