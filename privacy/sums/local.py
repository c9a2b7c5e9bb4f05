"""Accumulators: where the sums of a logical batch gather, micro-batch after micro-batch.

`LocalSums` keeps them in this process, without communication; `sharded.py` deals them to ranks.
"""

import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
from torch import Tensor

from ..errors import PrivacyConfigError
from .grid import SHORT, Grid, Unit
from .totals import ParameterSum, SumTarget, add_together, blocks, real_numbers

BLOCK_COORDINATES = 1 << 23
"""Coordinates of sums that are allocated together: 48 MiB, above the 32 that any malloc keeps in
its heap (privacy/ranks/allocator.py)."""


class Accumulator:
    """Takes the micro-batches one after the other.

    For each: `start`, then `slot` and `complete` for each parameter, then `finish`.

    Attributes:
        leaves_process: whether values that depend on gradients leave the process before the logical
            batch is complete: then its intent comes first (contract 9).
        shapes: of the parameters whose sums gather here.
        unit: that of the sums; None for fp64.
    """

    leaves_process = False
    unit: Unit | None

    def __init__(self, shapes: Mapping[str, torch.Size], grid: Grid, device: torch.device) -> None:
        self.shapes = dict(shapes)
        self._grid = grid
        self.device = device
        self.sum_dtype = torch.float64 if grid.layout == "float64" else torch.int64
        self.zero_(None)

    def zero_(self, unit: Unit | None) -> None:
        """Starts a new logical batch."""
        self.unit = unit
        self._num_rows = 0

    def start(self, num_rows: int) -> None:
        """Begins a micro-batch of `num_rows` examples, padding included.

        Raises:
            PrivacyConfigError: more rows than there is room for.
        """
        self._num_rows += num_rows
        if self._grid.rows is not None and self._num_rows > self._grid.rows:
            raise PrivacyConfigError(
                f"a logical batch of {self._num_rows:,} rows passes the {self._grid.rows:,} for "
                "which its sums have room: say how many there may be (cap, rows)"
            )

    def slot(self, name: str) -> SumTarget:
        """Returns where this micro-batch's contribution to a parameter is to be added."""
        raise NotImplementedError

    def complete(self, name: str) -> None:
        """Takes note that a contribution is complete; parameters without one are never filled."""

    def add_short(self, sums: dict[str, Tensor], num_examples: int) -> dict[str, Tensor]:
        """Adds contributions of parameters of few numbers.

        Args:
            sums: parameter name -> (n,) fp64.

        Returns:
            Those contributions that have to wait for their turn.
        """
        return sums

    def finish(self) -> None:
        """Ends the micro-batch."""

    def twin(self) -> Self:
        """Returns a copy with sums of its own; call it between two micro-batches."""
        raise NotImplementedError

    def squared_distance(self, sums: Self) -> float:
        """Returns the squared L2 distance, in units, to other sums of the same grid.

        Collective where sums of all ranks gather.
        """
        raise NotImplementedError


MakeAccumulator = Callable[[Mapping[str, torch.Size], Grid, torch.device], Accumulator]


class LocalSums(Accumulator):
    """Sums of all coordinates in this process: made when needed, and freed as `take` reads them."""

    def zero_(self, unit: Unit | None) -> None:
        """Starts a new logical batch."""
        super().zero_(unit)
        self._is_taken = False
        self._totals: dict[str, ParameterSum] = {}

    def start(self, num_rows: int) -> None:
        """Begins a micro-batch, and makes the sums for the first one."""
        super().start(num_rows)
        self._make()

    def _make(self) -> None:
        """Makes the sums that do not exist yet, in blocks.

        malloc takes such blocks from the system, and gives them back one by one as sums are taken.
        (Blocks of its heap would stay in pieces: a sum of 6 bytes leaves no room for a gradient of
        8.)
        """
        names = [name for name in self.shapes if name not in self._totals]
        # In one allocation, as `add_together` needs it.
        short_names = [name for name in names if self.shapes[name].numel() <= SHORT]
        blocks = [short_names]
        count = BLOCK_COORDINATES
        for name in names:
            if name in short_names:
                continue
            if count >= BLOCK_COORDINATES:
                blocks.append([])
                count = 0
            blocks[-1].append(name)
            count += self.shapes[name].numel()
        for block in blocks:
            counts = [self.shapes[name].numel() for name in block]
            layout = self._grid.layout_of(max(counts, default=0))
            totals = ParameterSum.zeros(counts, layout, self.unit, self.device)
            self._totals |= zip(block, totals, strict=True)

    def slot(self, name: str) -> SumTarget:
        """Returns where this micro-batch's contribution to a parameter is to be added."""
        self._totals[name].make_room()
        return SumTarget(self._totals[name])

    def add_short(self, sums: dict[str, Tensor], num_examples: int) -> dict[str, Tensor]:
        """Adds all contributions by few operations; none has to wait."""
        if sums:
            totals = [self.slot(name).total for name in sums]
            add_together(totals, list(sums.values()), num_examples)
        return {}

    def twin(self) -> Self:
        """Returns a copy with sums of its own."""
        twin = copy.copy(self)
        twin._totals = {}
        if self._totals:
            twin._make()
        for name, total in self._totals.items():
            twin._totals[name].set_to(total)
        return twin

    def squared_distance(self, sums: Self) -> float:
        """Returns the squared L2 distance, in units, to other sums of the same grid."""
        squared = 0.0
        for name, shape in self.shapes.items():
            for block in blocks(shape.numel(), BLOCK_COORDINATES):
                difference = self._totals[name].read(block) - sums._totals[name].read(block)
                squared += float(difference.double().square_().sum())
        return squared

    @property
    def names(self) -> list[str]:
        """Returns the names of the parameters whose sums gather here."""
        return list(self.shapes)

    def take(self, name: str) -> ParameterSum:
        """Hands over the sum of a parameter; KeyError the second time, not zeros for a sum."""
        # No micro-batch was added.
        if not self._totals and not self._is_taken:
            self._make()
        self._is_taken = True
        return self._totals.pop(name)

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """Yields (parameter name, sum): fp64, or int64 for certified arithmetic.

        The sums stay here, too.
        """
        self._make()
        for name in self.shapes:
            total = self._totals[name]
            numbers = total.read(slice(None)).view(self.shapes[name])
            yield name, numbers if self.unit is None else real_numbers(numbers, self.unit.exponent)
