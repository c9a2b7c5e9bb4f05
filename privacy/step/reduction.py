"""Clipped sums of all ranks -> the owner of each coordinate, in fp64.

With local accumulation (the default) this is one reduction per logical batch: each rank packs its sums in the order of the
owners' buffers, and a reduce-scatter gives every owner the total of just its coordinates, in chunks that bound the memory.
With sharded accumulation the sums are complete already and only move to the owners (`sharded_sums.py`).
"""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from ..clipping import ClippedSum
from . import collectives
from .engine import GradShard, Piece, ShardLayout, split
from .sharded_sums import ShardedSums

PACKED_COORDINATES = 1 << 25
"""Size of the packing buffer over all ranks: 256 MiB of fp64."""


def reduce_to_owners(clipped: ClippedSum, layout: ShardLayout) -> list[GradShard]:
    """This rank's shards of the sums over all ranks, in its layout's order, as views of one buffer.

    fp64, and int64 for certified arithmetic.
    """
    if isinstance(clipped.accumulator, ShardedSums):
        return clipped.accumulator.to_owners(layout)
    sums = {name: total.view(-1) for name, total in clipped.sums()}
    world_size, rank = collectives.world_size(), collectives.rank()
    counts = [layout.count(r) for r in range(world_size)]
    first = next(iter(sums.values()))
    owned = torch.empty(max(counts), dtype=first.dtype, device=first.device)
    chunk = max(1, PACKED_COORDINATES // world_size)
    for start in range(0, max(counts), chunk):
        stop = min(start + chunk, max(counts))
        rows = torch.zeros(world_size, stop - start, dtype=first.dtype, device=first.device)
        for r in range(world_size):
            _pack(rows[r], sums, layout.owned_by(r), start, stop)
        collectives.reduce_scatter_sum(owned[start:stop], rows)
    return split(owned, layout.owned_by(rank))


def _pack(row: Tensor, sums: Mapping[str, Tensor], pieces: tuple[Piece, ...], start: int, stop: int) -> None:
    """row = coordinates start..stop of the owner's buffer."""
    position = 0
    for piece in pieces:
        a, b = max(position, start), min(position + piece.length, stop)
        if a < b:
            source = piece.offset + a - position
            row[a - start : b - start] = sums[piece.name][source : source + b - a]
        position += piece.length


def gather_from_owners(
    shards: Sequence[GradShard],
    layout: ShardLayout,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Whole noised gradients by name, the same bits on every rank, for engines whose ranks hold everything. Collective.

    Args:
        shards: what this rank owns, in its layout's order.
    """
    world_size = collectives.world_size()
    longest = max(layout.count(r) for r in range(world_size))
    row = torch.zeros(longest, dtype=dtype, device=device)
    position = 0
    for shard in shards:
        row[position : position + shard.values.numel()] = shard.values
        position += shard.values.numel()
    rows = torch.empty(world_size, longest, dtype=dtype, device=device)
    collectives.all_gather_rows(rows, row)
    gradients = {name: torch.empty(shape.numel(), dtype=dtype, device=device) for name, shape in shapes.items()}
    for r in range(world_size):
        position = 0
        for piece in layout.owned_by(r):
            gradients[piece.name][piece.offset : piece.offset + piece.length] = rows[r, position:][: piece.length]
            position += piece.length
    return {name: gradient.view(shapes[name]) for name, gradient in gradients.items()}
