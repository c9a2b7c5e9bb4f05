"""Brings the clipped sums of all ranks to the owner of each coordinate, and back.

With local accumulation (the default) this is one reduction per logical batch: each rank packs its
sums in the order of the owners' buffers, and a reduce-scatter gives every owner the total of its
coordinates. It goes chunk by chunk, in whole numbers, and a sum is freed once all of it is packed:
so a rank that owns everything never holds sums and gradient both. With sharded accumulation the
sums are complete already and only move to the owners (`sharded.py`).
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
from .totals import ParameterSum

PACKED_COORDINATES = 1 << 24
"""Size of the packing buffer over all ranks: 128 MiB."""


def reduce_to_owners(
    sums: Accumulator, exponent: int | None, layout: ShardLayout
) -> list[GradShard]:
    """Returns this rank's shards of the sums over all ranks, in its layout's order. Collective.

    Shards are int64 in units of 2^-exponent, or fp64 without noise, which has no step. The sums are
    gone afterwards.
    """
    number = float(exponent or 0)
    powers = torch.tensor([number, number**2], dtype=torch.float64)
    total, total_of_squares = collectives.all_reduce_sum(powers).tolist()
    # Equal if and only if all exponents are (Cauchy and Schwarz); every rank sees the answer.
    if total**2 != total_of_squares * collectives.world_size():
        raise PrivacyStateRefused(
            "ranks add clipped sums in different units: their bounds C differ; start again from a "
            "checkpoint"
        )
    if sums.device.type == "cpu":
        give_back_freed_memory()
    if isinstance(sums, ShardedSums):
        return sums.to_owners(layout)
    assert isinstance(sums, LocalSums)
    world_size = collectives.world_size()
    rank = collectives.rank()
    counts = [layout.count(r) for r in range(world_size)]
    num_unpacked = dict.fromkeys(sums.names, 0)
    for piece in itertools.chain.from_iterable(layout.pieces):
        num_unpacked[piece.name] += piece.length
    unpacked: dict[str, ParameterSum] = {}
    shards = [
        GradShard(p.name, p.offset, torch.empty(0, device=sums.device))
        for p in layout.owned_by(rank)
    ]
    chunk = max(1, PACKED_COORDINATES // max(world_size, 4))
    for start in range(0, max(counts), chunk):
        size = min(start + chunk, max(counts)) - start
        stop = start + size
        rows = torch.zeros(world_size, size, dtype=sums.sum_dtype, device=sums.device)
        for r in range(world_size):
            for _, piece, entries, place in parts_within(layout.owned_by(r), start, stop):
                if piece.name not in unpacked:
                    unpacked[piece.name] = sums.take(piece.name)
                rows[r, place] = unpacked[piece.name].read(entries)
                num_unpacked[piece.name] -= entries.stop - entries.start
                if num_unpacked[piece.name] == 0:
                    del unpacked[piece.name]
        owned = rows.new_empty(size)
        collectives.reduce_scatter_sum(owned, rows)
        del rows
        for number, piece, entries, place in parts_within(layout.owned_by(rank), start, stop):
            # One tensor a piece, made when its turn comes.
            if entries.start == piece.offset:
                shards[number] = shards[number]._replace(values=owned.new_empty(piece.length))
            first = entries.start - piece.offset
            last = entries.stop - piece.offset
            shards[number].values[first:last] = owned[place]
    return shards


def gather_from_owners(
    shards: list[GradShard],
    layout: ShardLayout,
    shapes: Mapping[str, torch.Size],
    dtype: torch.dtype,
    device: torch.device,
) -> dict[str, Tensor]:
    """Returns all noised gradients by name, for engines whose ranks hold everything. Collective.

    Every rank gets the same bits.

    Args:
        shards: of this rank, in its layout's order; each is freed once it is sent, so its values
            are gone afterwards.
    """
    world_size = collectives.world_size()
    rank = collectives.rank()
    longest = max(layout.count(r) for r in range(world_size))
    chunk = max(1, PACKED_COORDINATES // max(world_size, 4))
    gradients: dict[str, Tensor] = {}
    for start in range(0, longest, chunk):
        stop = min(start + chunk, longest)
        row = torch.zeros(stop - start, dtype=dtype, device=device)
        for number, piece, entries, place in parts_within(layout.owned_by(rank), start, stop):
            first = entries.start - piece.offset
            last = entries.stop - piece.offset
            row[place] = shards[number].values[first:last]
            if last == piece.length:
                shards[number] = shards[number]._replace(values=row.new_empty(0))
        rows = torch.empty(world_size, stop - start, dtype=dtype, device=device)
        collectives.all_gather_rows(rows, row)
        for r in range(world_size):
            for _, piece, entries, place in parts_within(layout.owned_by(r), start, stop):
                if piece.name not in gradients:
                    numel = shapes[piece.name].numel()
                    gradients[piece.name] = torch.empty(numel, dtype=dtype, device=device)
                gradients[piece.name][entries] = rows[r, place]
    return {name: gradients[name].view(shape) for name, shape in shapes.items()}
