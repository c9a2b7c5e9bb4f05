"""Accumulators: where the sums of a logical batch gather, micro-batch after micro-batch; here whole, in this process."""

from collections.abc import Callable, Iterator, Mapping
from typing import Self

import torch
from torch import Tensor

from ..errors import PrivacyConfigError
from .grid import SHORT, Grid, Unit
from .totals import Slot, Total, add_together, blocks, real

BLOCK_COORDINATES = 1 << 23
"""Sums that are allocated together: 48 MiB, above the 32 that any malloc keeps in its heap (privacy/ranks/allocator.py)."""


class Accumulator:
    """Takes one micro-batch after the other: `start`, then `slot` and `filled` for each parameter, then `finish`.

    Attributes:
        leaves_process: whether values that depend on gradients leave the process before the logical batch is complete: then
            its intent comes first (contract 9).
        shapes: of the parameters whose sums gather here.
        unit: that of the sums; None for fp64.
    """

    leaves_process = False
    unit: Unit | None

    def __init__(self, shapes: Mapping[str, torch.Size], grid: Grid, device: torch.device) -> None:
        self.shapes, self._grid, self.device = dict(shapes), grid, device
        self.sum_dtype = torch.float64 if grid.layout == "float64" else torch.int64
        self.zero_(None)

    def zero_(self, unit: Unit | None) -> None:
        """Starts a new logical batch."""
        self.unit, self._num_rows = unit, 0

    def start(self, num_rows: int) -> None:
        """A micro-batch of `num_rows` examples begins, padding included.

        Raises:
            PrivacyConfigError: more rows than there is room for.
        """
        self._num_rows += num_rows
        if self._grid.rows is not None and self._num_rows > self._grid.rows:
            raise PrivacyConfigError(
                f"a logical batch of {self._num_rows:,} rows passes the {self._grid.rows:,} for which its sums have room: say "
                "how many there may be (cap, rows)"
            )

    def slot(self, name: str) -> Slot:
        """Where this micro-batch's contribution is to be added."""
        raise NotImplementedError

    def filled(self, name: str) -> None:
        """The contribution is complete. Not called for a parameter that has none."""

    def add_short(self, sums: dict[str, Tensor], num_examples: int) -> dict[str, Tensor]:
        """Adds contributions of parameters of few numbers; returns those that have to wait for their turn.

        Args:
            sums: parameter name -> (n,) fp64.
        """
        return sums

    def finish(self) -> None:
        """The micro-batch is complete."""

    def squared_distance(self, other: Self) -> float:
        """Returns the squared L2 distance, in units, of the sums in `other`, which has the same grid.

        Collective where sums of all ranks gather.
        """
        raise NotImplementedError


MakeAccumulator = Callable[[Mapping[str, torch.Size], Grid, torch.device], Accumulator]


class LocalSums(Accumulator):
    """Whole sums in this process. They are made when they are needed, and go as they are read (`take`)."""

    def zero_(self, unit: Unit | None) -> None:
        super().zero_(unit)
        self._is_taken = False
        self._totals: dict[str, Total] = {}

    def start(self, num_rows: int) -> None:
        super().start(num_rows)
        self._make()

    def _make(self) -> None:
        """All that is not there, in blocks that malloc takes from the system and gives back one by one as sums are taken.

        (What it takes from its heap stays in pieces: a sum of 6 bytes leaves no room for a gradient of 8.)
        """
        names = [name for name in self.shapes if name not in self._totals]
        short = [
            name for name in names if self.shapes[name].numel() <= SHORT
        ]  # together, for `add_together`
        blocks, count = [short], BLOCK_COORDINATES
        for name in names:
            if name not in short:
                if count >= BLOCK_COORDINATES:
                    blocks.append([])
                    count = 0
                blocks[-1].append(name)
                count += self.shapes[name].numel()
        for block in blocks:
            counts = [self.shapes[name].numel() for name in block]
            layout = self._grid.layout_of(max(counts, default=0))
            self._totals |= zip(
                block, Total.zeros(counts, layout, self.unit, self.device), strict=True
            )

    def slot(self, name: str) -> Slot:
        self._totals[name].make_room()
        return Slot(self._totals[name])

    def add_short(self, sums: dict[str, Tensor], num_examples: int) -> dict[str, Tensor]:
        """Adds all of them by few operations."""
        if sums:
            totals = [self.slot(name).total for name in sums]
            add_together(totals, list(sums.values()), num_examples)
        return {}

    def squared_distance(self, other: Self) -> float:
        """See `Accumulator.squared_distance`."""
        squared = 0.0
        for name, shape in self.shapes.items():
            for block in blocks(shape.numel(), BLOCK_COORDINATES):
                difference = self._totals[name].read(block) - other._totals[name].read(block)
                squared += float(difference.double().square_().sum())
        return squared

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    def take(self, name: str) -> Total:
        """Hands over the sum of a parameter; KeyError the second time, since zeros would pass for a sum."""
        if not self._totals and not self._is_taken:  # nothing was added
            self._make()
        self._is_taken = True
        return self._totals.pop(name)

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, sum in fp64; in int64 for certified arithmetic); this keeps its own."""
        self._make()
        for name in self.shapes:
            total = self._totals[name]
            values = total.read(slice(None)).view(self.shapes[name])
            yield name, values if self.unit is None else real(values, self.unit.exponent)
