"""`train.accumulation = "sharded"`: no rank ever holds the sums of all coordinates.

Parameters are dealt, from the last to the first as a backward pass reaches them, into buckets. As
soon as a micro-batch's contribution to every parameter of a bucket is known, a reduce-scatter sums
the bucket over ranks; each rank keeps an equal part of every bucket and adds up the micro-batches
there. After the last micro-batch the parts go to the owners of the coordinates, who may be other
ranks: an optimizer's shards follow their own rules.

Memory: 8 bytes for each of a rank's 1/world_size of the coordinates, and 8 bytes per coordinate of
one bucket (of the largest parameter, if that is larger), in place of 6 or 8 bytes for every
coordinate of the model. Traffic: one reduce-scatter of the model, 8 bytes a coordinate, for every
micro-batch, and one exchange of a rank's part for every logical batch.

Each rank rounds before anything leaves it, and whole numbers travel and are added (contracts 4 and
6); without a grid they are fp64. Every rank issues the same collectives in the same order, whatever
its examples are. Sums leave the process with every micro-batch, so the ledger's intent comes before
the first (contract 9).
"""

import copy
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Self

import torch
from torch import Tensor

from ..ranks import collectives
from ..ranks.engine import GradShard, Piece, ShardLayout, runs, split
from .grid import Grid, Unit
from .local import Accumulator
from .totals import ParameterSum, SumTarget

BUCKET_COORDINATES = 1 << 24
"""Coordinates of a bucket, at least one parameter: 128 MiB of fp64."""


class _Bucket:
    """Consecutive parameters, flattened one after the other and padded to equal parts per rank.

    Attributes:
        part: coordinates that each rank keeps.
        waiting: names of parameters whose contribution is not complete yet.
        sums: of the current micro-batch on this rank; None before its first contribution.
    """

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
        """Returns the coordinates that `rank` keeps."""
        parameters = [Piece(name, 0, shape.numel()) for name, shape in self.shapes.items()]
        return runs(parameters, [rank * self.part, (rank + 1) * self.part])[0]


class ShardedSums(Accumulator):
    """Sums whose parts the ranks keep; `privacy.sums.local.Accumulator` explains the methods."""

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
        """Starts a new logical batch."""
        super().zero_(unit)
        self._parts = [
            torch.zeros(b.part, dtype=self.sum_dtype, device=self.device) for b in self._buckets
        ]

    def start(self, num_rows: int) -> None:
        """Begins a micro-batch, for which all buckets are empty."""
        super().start(num_rows)
        self._next = 0
        for bucket in self._buckets:
            bucket.waiting = set(bucket.shapes)
            bucket.sums = None

    def slot(self, name: str) -> SumTarget:
        """Returns where this micro-batch's contribution to a parameter is to be added."""
        bucket = self._bucket_of[name]
        if bucket.sums is None:
            bucket.sums = torch.zeros(
                bucket.part * self._world_size, dtype=self.sum_dtype, device=self.device
            )
        start = bucket.starts[name]
        stop = start + bucket.shapes[name].numel()
        return SumTarget(ParameterSum(bucket.sums[start:stop], unit=self.unit))

    def complete(self, name: str) -> None:
        """Reduces every bucket whose turn has come and whose contributions are complete."""
        self._bucket_of[name].waiting.discard(name)
        # Strictly one after the other, so that all ranks issue the same collectives in one order.
        while self._next < len(self._buckets) and not self._buckets[self._next].waiting:
            self._reduce_next()

    def finish(self) -> None:
        """Reduces the buckets that parameters without a gradient leave incomplete."""
        while self._next < len(self._buckets):
            self._reduce_next()

    def twin(self) -> Self:
        """Returns a copy with parts of its own; buckets are empty between two micro-batches."""
        twin = copy.copy(self)
        twin._parts = [part.clone() for part in self._parts]
        return twin

    def squared_distance(self, sums: Self) -> float:
        """Returns the squared L2 distance, in units, to other sums of the same grid. Collective."""
        squared = torch.zeros(1, dtype=torch.float64)
        for part, other_part in zip(self._parts, sums._parts, strict=True):
            squared += (part - other_part).double().square_().sum().cpu()
        return float(collectives.all_reduce_sum(squared))

    def _reduce_next(self) -> None:
        bucket = self._buckets[self._next]
        total = self._parts[self._next]
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
        """Moves the complete sums to the ranks that own the coordinates, and frees them here.

        Collective.
        """
        rank = collectives.rank()
        owned = torch.empty(layout.count(rank), dtype=self.sum_dtype, device=self.device)
        owners = [_placed(layout.owned_by(r)) for r in range(self._world_size)]
        for i, bucket in enumerate(self._buckets):
            # Spans of this rank's part, in the order of the ranks that own them.
            outgoing: list[slice] = []
            send_counts: list[int] = []
            for owner in owners:
                spans = [span for span, _ in _shared(bucket.pieces(rank), owner)]
                send_counts.append(sum(span.stop - span.start for span in spans))
                outgoing += spans
            # Spans of `owned`, in the order of the ranks that keep them.
            incoming: list[slice] = []
            receive_counts: list[int] = []
            for r in range(self._world_size):
                spans = [span for _, span in _shared(bucket.pieces(r), owners[rank])]
                receive_counts.append(sum(span.stop - span.start for span in spans))
                incoming += spans
            part = self._parts[i]
            # The empty slice gives its dtype to a rank that sends nothing.
            sent = torch.cat([part[:0], *(part[span] for span in outgoing)])
            received = collectives.exchange(
                sent, send_counts=send_counts, receive_counts=receive_counts
            )
            del part, sent
            # An empty tensor of its own: a view would keep all of the part in memory.
            self._parts[i] = received.new_empty(0)
            position = 0
            for span in incoming:
                length = span.stop - span.start
                owned[span] = received[position : position + length]
                position += length
        return split(owned, layout.owned_by(rank))


def bucket_names(
    shapes: Mapping[str, torch.Size], size: int = BUCKET_COORDINATES
) -> list[list[str]]:
    """Returns the parameters of each bucket, from the last to the first.

    A bucket has at least one parameter, and otherwise at most `size` coordinates.
    """
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
    """Returns a rank's pieces by name, each with its place in the rank's buffer."""
    pieces_by_name: dict[str, list[tuple[Piece, int]]] = {}
    place = 0
    for piece in pieces:
        pieces_by_name.setdefault(piece.name, []).append((piece, place))
        place += piece.length
    return pieces_by_name


def _shared(
    pieces: Sequence[Piece], owned_pieces: Mapping[str, Sequence[tuple[Piece, int]]]
) -> Iterator[tuple[slice, slice]]:
    """Yields spans of the coordinates that one rank keeps and another owns, in the order kept.

    The two slices are those of the keeper's buffer and of the owner's.
    """
    position = 0
    for piece in pieces:
        for owned_piece, place in owned_pieces.get(piece.name, []):
            start = max(piece.offset, owned_piece.offset)
            stop = min(piece.offset + piece.length, owned_piece.offset + owned_piece.length)
            if start < stop:
                first = position + start - piece.offset
                first_owned = place + start - owned_piece.offset
                length = stop - start
                yield slice(first, first + length), slice(first_owned, first_owned + length)
        position += piece.length
