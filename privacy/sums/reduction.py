"""Clipped sums of all ranks -> the owner of each coordinate.

With local accumulation (the default) this is one reduction per logical batch: each rank packs its sums in the order of the
owners' buffers, and a reduce-scatter gives every owner the total of just its coordinates. All of it goes chunk by chunk, in
whole numbers, and a sum is freed once all of it is packed: so a rank that owns everything never holds sums and gradient both.
With sharded accumulation the sums are complete already and only move to the owners (`sharded.py`).
"""

import itertools
from collections.abc import Mapping

import torch
from torch import Tensor

from ..errors import PrivacyStateRefused
from ..ranks import collectives
from ..ranks.allocator import give_back_freed_memory
from ..ranks.engine import GradShard, ShardLayout, parts_within
from .local import Accumulator, LocalSums
from .sharded import ShardedSums
from .totals import Total

PACKED_COORDINATES = 1 << 24
"""Size of the packing buffer over all ranks: 128 MiB."""


def reduce_to_owners(
    sums: Accumulator, exponent: int | None, layout: ShardLayout
) -> list[GradShard]:
    """Returns this rank's shards of the sums over all ranks, in its layout's order: int64 in units of 2^-exponent.

    Where there is no noise, and so no step, they are fp64. The sums are gone afterwards. Collective.
    """
    stated = float(exponent or 0)
    first, second = collectives.all_reduce_sum(
        torch.tensor([stated, stated**2], dtype=torch.float64)
    ).tolist()
    if (
        first**2 != second * collectives.world_size()
    ):  # equal if and only if all exponents are, and known to all ranks
        raise PrivacyStateRefused(
            "ranks add clipped sums in different units: their bounds C differ; start again from a checkpoint"
        )
    if sums.device.type == "cpu":
        give_back_freed_memory()
    if isinstance(sums, ShardedSums):
        return sums.to_owners(layout)
    assert isinstance(sums, LocalSums)
    world_size, rank = collectives.world_size(), collectives.rank()
    counts = [layout.count(r) for r in range(world_size)]
    left = dict.fromkeys(sums.names, 0)
    for piece in itertools.chain.from_iterable(layout.pieces):
        left[piece.name] += piece.length
    waiting: dict[str, Total] = {}
    shards = [
        GradShard(p.name, p.offset, torch.empty(0, device=sums.device))
        for p in layout.owned_by(rank)
    ]
    chunk = max(1, PACKED_COORDINATES // max(world_size, 4))
    for start in range(0, max(counts), chunk):
        size = min(start + chunk, max(counts)) - start
        rows = torch.zeros(world_size, size, dtype=sums.sum_dtype, device=sums.device)
        for r in range(world_size):
            for _, piece, some, place in parts_within(layout.owned_by(r), start, start + size):
                if piece.name not in waiting:
                    waiting[piece.name] = sums.take(piece.name)
                rows[r, place] = waiting[piece.name].read(some)
                left[piece.name] -= some.stop - some.start
                if left[piece.name] == 0:
                    del waiting[piece.name]
        mine = rows.new_empty(size)
        collectives.reduce_scatter_sum(mine, rows)
        del rows
        for number, piece, some, place in parts_within(layout.owned_by(rank), start, start + size):
            if some.start == piece.offset:  # one tensor a piece, made when its turn comes
                shards[number] = shards[number]._replace(values=mine.new_empty(piece.length))
            shards[number].values[some.start - piece.offset : some.stop - piece.offset] = mine[
                place
            ]
    return shards


def gather_from_owners(
    shards: list[GradShard],
    layout: ShardLayout,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Whole noised gradients by name, the same bits on every rank, for engines whose ranks hold everything. Collective.

    Args:
        shards: what this rank owns, in its layout's order; each is freed once it is sent, so its values are gone afterwards.
    """
    world_size, rank = collectives.world_size(), collectives.rank()
    longest = max(layout.count(r) for r in range(world_size))
    chunk = max(1, PACKED_COORDINATES // max(world_size, 4))
    gradients: dict[str, Tensor] = {}
    for start in range(0, longest, chunk):
        stop = min(start + chunk, longest)
        row = torch.zeros(stop - start, dtype=dtype, device=device)
        for number, piece, some, place in parts_within(layout.owned_by(rank), start, stop):
            row[place] = shards[number].values[some.start - piece.offset : some.stop - piece.offset]
            if some.stop == piece.offset + piece.length:
                shards[number] = shards[number]._replace(values=row.new_empty(0))
        rows = torch.empty(world_size, stop - start, dtype=dtype, device=device)
        collectives.all_gather_rows(rows, row)
        for r in range(world_size):
            for _, piece, some, place in parts_within(layout.owned_by(r), start, stop):
                if piece.name not in gradients:
                    gradients[piece.name] = torch.empty(
                        shapes[piece.name].numel(), dtype=dtype, device=device
                    )
                gradients[piece.name][some] = rows[r, place]
    return {name: gradients[name].view(shape) for name, shape in shapes.items()}
