"""The noise of an unbroken run of steps: independent with one band, else correlated (docs/correlated_noise.md).

A segment lives in the memory of one process and belongs to the coordinates that the process owns. It ends with the process, and
with any step that does not follow: nothing here can be written to a file, so no noise is ever carried over a break or used by two
copies of a run folder.
"""

import math
from collections import deque
from collections.abc import Sequence

import torch
from torch import Tensor

from ..noise import MOST_DRAWN, NoiseSource, add_noise
from .strategy import Strategy


class Segment:
    """Adds w_t = (z_t - sum_{k=1}^{b-1} c_k w_{t-k}) / c_0 in rows t = 0, 1, ...; z_t is fresh. Before row 0 all w are zero.

    Past noise is kept in the units of the gradient, the very doubles that were added: rounded ones would break the guarantee.
    """

    def __init__(self, strategy: Strategy, keep_on: torch.device | None = None) -> None:
        """
        Args:
            keep_on: where past noise lies, such as the main memory; None keeps it with the values. It takes
                8 (b - 1) bytes a coordinate.
        """
        self._strategy, self._keep_on = strategy, keep_on
        self._past: list[Tensor] = []
        self._std: float | None = None
        self._rows = 0
        self._is_whole = True
        # The first column of the inverse of C, its newest b - 1 entries, and the sum of all their squares.
        self._inverse = deque([1 / strategy.coefficients[0]], maxlen=max(1, strategy.bands - 1))
        self._spread = 0.0

    def __reduce__(self) -> str:
        raise TypeError("past noise is not pickled: it must not reach a checkpoint or another machine's memory")

    @property
    def spread(self) -> float:
        """Standard deviation of the newest row's noise over that of fresh noise, sqrt(sum_{k<=t} a_k^2); 1 with one band."""
        return math.sqrt(self._spread) if self._strategy.bands > 1 else 1.0

    def add_row(self, owned: Sequence[Tensor], std: float, source: NoiseSource) -> None:
        """owned += w_t, on each coordinate, once; the next call is the next row.

        Args:
            owned: float64, the shards of the reduced clipped sum that this process alone owns, the same in every row.
            std: noise_multiplier times the clipper's sensitivity, the same in every row; 0 draws nothing, with one band only.

        Raises:
            TypeError, ValueError: see `add_noise`; with several bands also if shards or `std` are not those of the row before.
            RuntimeError: a row before did not end, so that nobody knows which of its noise was used.
        """
        c = self._strategy.coefficients
        if len(c) == 1:
            for values in owned:
                add_noise(values, std, source)
            return
        self._require_next(owned, std)
        self._is_whole = False
        newest = self._rows % (len(c) - 1)
        # What w_{t-k} is multiplied by, in the order in which rows are kept: row r is in place r modulo b - 1.
        weights = torch.tensor(
            [c[(newest - place - 1) % (len(c) - 1) + 1] for place in range(len(c) - 1)], dtype=torch.float64
        )
        for values, past in zip(owned, self._past, strict=True):
            for start in range(0, values.numel(), MOST_DRAWN):
                some, kept = values[start : start + MOST_DRAWN], past[:, start : start + MOST_DRAWN]
                noise = torch.zeros_like(some)
                add_noise(noise, std, source)
                noise -= (weights.to(kept.device) @ kept).to(noise.device)
                noise /= c[0]
                kept[newest] = noise  # before any byte of the sum with it can leave
                some += noise
        if self._rows > 0:
            self._inverse.appendleft(-sum(x * a for x, a in zip(c[1:], self._inverse, strict=False)) / c[0])
        self._spread += self._inverse[0] ** 2
        self._rows += 1
        self._is_whole = True

    def _require_next(self, owned: Sequence[Tensor], std: float) -> None:
        if not self._is_whole:
            raise RuntimeError(
                "correlated noise: the row before did not end, so this segment has ended; start the program again"
            )
        if not 0 < std < math.inf:
            raise ValueError(f"correlated noise needs a positive, finite standard deviation, not {std}")
        if self._std is None:
            self._std = std
            self._past = [
                torch.zeros(
                    self._strategy.bands - 1, values.numel(), dtype=torch.float64, device=self._keep_on or values.device
                )
                for values in owned
            ]
        if std != self._std:
            raise ValueError(f"correlated noise: the standard deviation was {self._std} and is {std}; it must stay")
        if [values.numel() for values in owned] != [past.shape[1] for past in self._past]:
            raise ValueError("correlated noise: these are not the shards of the row before")
