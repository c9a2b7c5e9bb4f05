"""`train.accumulation = "sharded"`: no rank ever holds the whole clipped sum, for models whose sum does not fit with them.

Parameters are dealt, from the last to the first as a backward pass finds them, into buckets. As soon as a micro-batch's
contribution to every parameter of a bucket is known, the bucket is summed over ranks by a reduce-scatter; each rank keeps an
equal part of every bucket and adds up the micro-batches there. After the last micro-batch the parts go to the owners of the
coordinates, who may be others: an optimizer's shards follow their own rules.

Memory: 8 bytes for each of a rank's 1/world_size of the coordinates, and 8 bytes per coordinate of one bucket (of the largest
parameter, if that is larger), in place of 6 or 8 bytes for every coordinate of the model. Traffic: one reduce-scatter of the
model, 8 bytes a coordinate, for every micro-batch, and one exchange of a rank's part for every logical batch.

Each rank rounds before anything leaves it, and whole numbers travel and are added (contracts 4 and 6); without a grid all of it
is fp64.

Every rank issues the same collectives in the same order, whatever its examples are: buckets are reduced strictly one after the
other, and those that a micro-batch leaves incomplete (parameters without a gradient) when it ends. Nothing depends on data.

Sums leave the process with every micro-batch, so the ledger's intent comes before the first (contract 9,
`privacy/step/step.py`)."""

import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from ..ranks import collectives
from ..ranks.engine import GradShard, Piece, ShardLayout, runs, split
from .grid import Grid, Unit
from .local import Accumulator
from .totals import Slot, Total

BUCKET_COORDINATES = 1 << 24
"""Coordinates of a bucket, at least one parameter: 128 MiB of fp64."""


class _Bucket:
    """Consecutive parameters, flattened one after the other and padded to equal parts per rank."""

    def __init__(self, shapes: Mapping[str, torch.Size], world_size: int) -> None:
        ends = itertools.accumulate(shape.numel() for shape in shapes.values())
        self.shapes = shapes
        self.starts = {
            name: end - shapes[name].numel() for name, end in zip(shapes, ends, strict=True)
        }
        self.numel = sum(shape.numel() for shape in shapes.values())
        self.part = -(-self.numel // world_size)
        self.waiting = set(shapes)
        self.sums: Tensor | None = None

    def pieces(self, rank: int) -> list[Piece]:
        """The coordinates that `rank` keeps."""
        whole = [Piece(name, 0, shape.numel()) for name, shape in self.shapes.items()]
        return runs(whole, [rank * self.part, (rank + 1) * self.part])[0]


class ShardedSums(Accumulator):
    """See the module docstring, and `privacy.sums.local.Accumulator` for the methods."""

    leaves_process = True

    def __init__(
        self,
        shapes: Mapping[str, torch.Size],
        grid: Grid,
        device: torch.device,
        bucket_coordinates: int = BUCKET_COORDINATES,
    ) -> None:
        self._world_size = collectives.world_size()
        self._buckets = [
            _Bucket({name: shapes[name] for name in names}, self._world_size)
            for names in bucket_names(shapes, bucket_coordinates)
        ]
        self._bucket_of = {name: bucket for bucket in self._buckets for name in bucket.shapes}
        self._next = 0
        super().__init__(shapes, grid, device)

    def zero_(self, unit: Unit | None) -> None:
        super().zero_(unit)
        self._kept = [
            torch.zeros(b.part, dtype=self.sum_dtype, device=self.device) for b in self._buckets
        ]

    def start(self, num_rows: int) -> None:
        super().start(num_rows)
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting, bucket.sums = set(bucket.shapes), None

    def slot(self, name: str) -> Slot:
        bucket = self._bucket_of[name]
        if bucket.sums is None:
            bucket.sums = torch.zeros(
                bucket.part * self._world_size, dtype=self.sum_dtype, device=self.device
            )
        start, shape = bucket.starts[name], bucket.shapes[name]
        return Slot(Total(bucket.sums[start : start + shape.numel()], unit=self.unit))

    def filled(self, name: str) -> None:
        self._bucket_of[name].waiting.discard(name)
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._reduce_next()

    def finish(self) -> None:
        while self._next < len(self._buckets):
            self._reduce_next()

    def squared_distance(self, other: Self) -> float:
        """See `Accumulator.squared_distance`. Collective."""
        squared = torch.zeros(1, dtype=torch.float64)
        for part, other_part in zip(self._kept, other._kept, strict=True):
            squared += (part - other_part).double().square_().sum().cpu()
        return float(collectives.all_reduce_sum(squared))

    def _reduce_next(self) -> None:
        bucket, total = self._buckets[self._next], self._kept[self._next]
        if bucket.sums is None:
            bucket.sums = torch.zeros(
                bucket.part * self._world_size, dtype=self.sum_dtype, device=self.device
            )
        part = torch.empty_like(total)
        collectives.reduce_scatter_sum(part, bucket.sums.view(self._world_size, bucket.part))
        bucket.sums = None
        total += part
        self._next += 1

    def to_owners(self, layout: ShardLayout) -> list[GradShard]:
        """The complete sums, moved to the ranks that own the coordinates; what was kept of them here is freed."""
        rank = collectives.rank()
        owned = torch.empty(layout.count(rank), dtype=self.sum_dtype, device=self.device)
        owners = [_placed(layout.owned_by(r)) for r in range(self._world_size)]
        for i, bucket in enumerate(self._buckets):
            outgoing = [
                [here for here, _ in _shared(bucket.pieces(rank), owner)] for owner in owners
            ]
            incoming = [
                [there for _, there in _shared(bucket.pieces(r), owners[rank])]
                for r in range(self._world_size)
            ]
            received = collectives.exchange(
                torch.cat(
                    [self._kept[i][:0], *(self._kept[i][s] for spans in outgoing for s in spans)]
                ),
                send_counts=[sum(s.stop - s.start for s in spans) for spans in outgoing],
                receive_counts=[sum(s.stop - s.start for s in spans) for spans in incoming],
            )
            self._kept[i] = received.new_empty(0)  # no view, which would keep all of it
            position = 0
            for span in itertools.chain.from_iterable(incoming):
                length = span.stop - span.start
                owned[span] = received[position : position + length]
                position += length
        return split(owned, layout.owned_by(rank))


def bucket_names(
    shapes: Mapping[str, torch.Size], size: int = BUCKET_COORDINATES
) -> list[list[str]]:
    """The parameters of each bucket, from the last to the first; at least one, and otherwise at most `size` coordinates."""
    buckets: list[list[str]] = [[]]
    count = 0
    for name in reversed(list(shapes)):
        if buckets[-1] and count + shapes[name].numel() > size:
            buckets.append([])
            count = 0
        buckets[-1].append(name)
        count += shapes[name].numel()
    return buckets


def _placed(pieces: Sequence[Piece]) -> dict[str, list[tuple[Piece, int]]]:
    """A rank's pieces by name, each with its place in the rank's buffer."""
    placed: dict[str, list[tuple[Piece, int]]] = {}
    for piece, place in zip(
        pieces, itertools.accumulate((piece.length for piece in pieces), initial=0), strict=False
    ):
        placed.setdefault(piece.name, []).append((piece, place))
    return placed


def _shared(
    kept: Sequence[Piece], owned: Mapping[str, Sequence[tuple[Piece, int]]]
) -> Iterator[tuple[slice, slice]]:
    """Where the coordinates that one rank keeps and another owns lie in the buffers of the two, in the order of `kept`."""
    position = 0
    for piece in kept:
        for other, place in owned.get(piece.name, []):
            a = max(piece.offset, other.offset)
            b = min(piece.offset + piece.length, other.offset + other.length)
            if a < b:
                here, there = position + a - piece.offset, place + a - other.offset
                yield slice(here, here + b - a), slice(there, there + b - a)
        position += piece.length
