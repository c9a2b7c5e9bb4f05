"""What one rank of the sandbox does, attempt by attempt, written down where it happens.

The tape stands in for the noise source, and functions of the process are called through it: the reduction over ranks, the
engine's step, fsync and the system's entropy. So nothing that is audited has to report about itself.
"""

import os
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from privacy.noise import NoiseSource
from trainer.ranks import distributed


class Tape:
    """See the module docstring. What it noted is in `attempts` and `fsyncs`.

    Times are of the machine's monotonic clock, so that those of all ranks, which run on one machine, can be compared.
    """

    def __init__(self, source: NoiseSource) -> None:
        self.silent = True
        self.attempts: list[dict[str, Any]] = []
        self.fsyncs: list[tuple[int, int, int, int]] = []
        self._source, self._entropy_bytes = source, 0
        self._begin()

    def _begin(self) -> None:
        """Empties what belongs to a single attempt."""
        self._drawn: list[Tensor] = []
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._handed = np.zeros(0)
        self._released_at, self._least_entropy = 0, sys.maxsize

    # The two methods of a noise source.

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return self._kept(lambda: self._source.standard_normal(count, device), 1.0)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return self._kept(lambda: self._source.rounded_normal(deviation, count, device), deviation)

    def _kept(self, draw: Callable[[], Tensor], deviation: float) -> Tensor:
        """Keeps what was drawn in units of its standard deviation; in silent steps it does not reach the weights."""
        self._release()
        before = self._entropy_bytes
        drawn = draw()
        self._least_entropy = min(self._least_entropy, self._entropy_bytes - before)
        self._drawn.append(drawn.detach().cpu().double() / deviation)
        return torch.zeros_like(drawn) if self.silent else drawn

    def _release(self) -> None:
        """Noise is about to be drawn, or a value that depends on a gradient is about to leave the process."""
        self._released_at = self._released_at or time.monotonic_ns()

    # What stands around functions of the process while it is watched.

    def reduce(self, original: Callable[..., None], *arguments: Any) -> None:
        # One rank alone reduces as well; the order is judged alike, whatever the number of ranks.
        self._release()
        original(*arguments)

    def fsync(self, original: Callable[[Any], None], file: Any) -> None:
        # What is written while fsync runs may not be durable, so the size is taken before and the time afterwards.
        status = os.fstat(file)
        original(file)
        self.fsyncs.append((status.st_dev, status.st_ino, time.monotonic_ns(), status.st_size))

    # The noise source may ask for entropy through this function alone, which `privacy/noise.py` does; a source that is seeded
    # otherwise takes none, and is found by that.
    def urandom(self, original: Callable[[int], bytes], size: int, /) -> bytes:
        self._entropy_bytes += size
        return original(size)

    def step(self, original: Callable[..., None], shards: Sequence[Any], **rates: Any) -> None:
        """Notes, in fp64, what the optimizer gets."""
        self._handed = flat([shard.values for shard in shards])
        original(shards, **rates)

    def batches(self, batches: Iterator[Batch], present_N: np.ndarray) -> Iterator[Batch]:
        """Notes who reaches the model, under which key; zeroes out, as the adjacency does, canaries that are not in the data."""
        for batch in batches:
            inputs = dict(batch.inputs)
            canaries_B, keys_B = inputs.pop("canaries_B"), inputs.pop("keys_B")
            self._seen.append((canaries_B[~batch.is_padding_B], keys_B[~batch.is_padding_B]))
            is_absent_B = ~torch.from_numpy(present_N)[canaries_B]
            yield batch._replace(inputs=inputs, is_padding_B=batch.is_padding_B | is_absent_B)

    def end(self, step: int, session: int, weights: np.ndarray, count: float | None) -> None:
        """After an attempt; `count` is the noised centred count of adaptive clipping, which rank 0 noises after all else."""
        drawn = torch.cat(self._drawn).numpy() if self._drawn else np.zeros(0)
        count_draws = np.zeros(0)
        # A source that was asked for another number leaves no numbers that could be laid beside the coordinates: NaN says so.
        if count is not None and distributed.rank() == 0:
            drawn, count_draws = drawn[: len(weights)], drawn[len(weights) :]
        ids, keys = (torch.cat(column).numpy() for column in zip(*self._seen, strict=True))
        self.attempts.append(
            {
                "step": step,
                "session": session,
                "weights": weights,
                "draws": drawn if len(drawn) == len(weights) else np.full(len(weights), np.nan),
                "num_draws": len(drawn),
                "handed": self._handed,
                "ids": ids,
                "keys": keys.view(np.uint64),
                "count": (count, float(count_draws[0]) if len(count_draws) == 1 else np.nan),
                "released_at": self._released_at,
                "least_entropy": self._least_entropy,
            }
        )
        self._begin()


def flat(tensors: Sequence[Tensor]) -> np.ndarray:
    """What this rank owns, side by side, in fp64, in which sums and noise are added."""
    return beside([tensor.detach().cpu().double().numpy().ravel() for tensor in tensors])


def beside(parts: Sequence[np.ndarray]) -> np.ndarray:
    """The parts of one rank, or of all ranks, in order."""
    return np.concatenate(parts) if parts else np.zeros(0)  # a rank may own nothing
