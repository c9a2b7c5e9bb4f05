"""Where the clipped sum of a logical batch gathers, parameter by parameter."""

from collections.abc import Iterator, Mapping
from typing import Protocol

import torch
from torch import Tensor

EXAMPLES_PER_FLUSH = 1024
"""An fp32 sum over this many examples moves one example's contribution, in the worst case (all others chosen to push every
rounding the same way), by this many times the unit roundoff: 6e-5 of C, well within the slack for rounding."""


class Accumulator(Protocol):
    """Takes one micro-batch after the other: `start`, then `slot` and `filled` for each parameter, then `finish`."""

    leaves_process: bool
    """Whether values that depend on gradients leave the process before the logical batch is complete (contract 9)."""

    def zero_(self) -> None:
        """Starts a new logical batch."""
        ...

    def start(self, num_rows: int) -> None:
        """A micro-batch of so many examples begins, padding included."""
        ...

    def slot(self, name: str) -> Tensor:
        """The tensor, of the parameter's shape, to which this micro-batch's contribution is to be added."""
        ...

    def filled(self, name: str) -> None:
        """The contribution is complete. Not called for a parameter that has none."""
        ...

    def finish(self) -> None:
        """The micro-batch is complete."""
        ...


class LocalSums:
    """Whole sums in this process: fp32 (fp64 for an fp64 model), emptied into fp64 totals after EXAMPLES_PER_FLUSH examples.

    An fp32 sum over the 100,000 examples that a rank may hold of a logical batch would let one example move it by 1.008 C.
    The totals are made at the first flush: small batches never need them.
    """

    leaves_process = False

    def __init__(self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device) -> None:
        self._sums = {name: torch.zeros(shape, dtype=dtype, device=device) for name, shape in shapes.items()}
        self._totals: dict[str, Tensor] = {}
        self._rows = 0

    def zero_(self) -> None:
        self._rows = 0
        for total in (*self._sums.values(), *self._totals.values()):
            total.zero_()

    def start(self, num_rows: int) -> None:
        self._rows += num_rows  # padding counts: when the sums are emptied must not depend on the data
        if self._rows > EXAMPLES_PER_FLUSH:
            self._flush()
            self._rows = num_rows

    def slot(self, name: str) -> Tensor:
        return self._sums[name]

    def filled(self, name: str) -> None:
        pass

    def finish(self) -> None:
        pass

    def _flush(self) -> None:
        for name, part in self._sums.items():
            if name not in self._totals:
                self._totals[name] = torch.zeros_like(part, dtype=torch.float64)
            self._totals[name] += part
            part.zero_()
        self._rows = 0

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, sum); fp64 once a batch was too large for fp32."""
        if self._totals:
            self._flush()
        yield from (self._totals or self._sums).items()
