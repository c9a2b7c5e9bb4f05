"""Shuffled epochs, behind the sampler's interface.

Every example is in exactly one step of each epoch of S = ceil(n / B) steps, so batches have at most
about B examples. The schedule comes from the run's key alone, without session and attempt: a retry
must repeat its batch, or an example could come twice in one epoch. Shuffling is for public data and
makes no claim: at DP-Cap's point Poisson's epsilon would say 7.4 where the worst case is above 51
(Chua et al. 2024, arXiv 2403.17673).
"""

import functools
import math
from dataclasses import dataclass

import numpy as np

from .keys import SamplingKey
from .poisson import Decisions, Ids, Sampler


@dataclass(frozen=True)
class ShuffleSampler(Sampler):
    """Cuts a fresh keyed permutation of all examples in each epoch into S batches.

    Their sizes differ by at most one.
    """

    num_examples: int
    expected_batch_size: int

    @property
    def steps_per_epoch(self) -> int:
        """Returns S = ceil(n / B)."""
        return -(-self.num_examples // self.expected_batch_size)

    def coin_key(self, key: SamplingKey, session_nonce: bytes, attempt: int) -> bytes:
        """Returns the key of the run's schedule, the same for all sessions and attempts."""
        return key.schedule_key()

    @property
    def cap(self) -> int:
        """Returns the size of the largest batch; no example is ever cut."""
        return math.ceil(self.num_examples / self.steps_per_epoch)

    def decide(
        self, coin_key: bytes, step: int, start: int = 0, stop: int | None = None
    ) -> Decisions:
        """Returns the members of `step` within [start, stop).

        The first call of an epoch costs one shuffle of the examples' numbers.
        """
        stop = self.num_examples if stop is None else stop
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        first = self.num_examples * index // self.steps_per_epoch
        last = self.num_examples * (index + 1) // self.steps_per_epoch
        ids = np.sort(_order(coin_key, epoch, self.num_examples)[first:last])
        ids = ids[(ids >= start) & (ids < stop)]
        return Decisions(ids, np.zeros(len(ids), np.uint64))


# One epoch alone: an order takes 8 bytes an example, and steps come in order.
@functools.lru_cache(maxsize=1)
def _order(coin_key: bytes, epoch: int, num_examples: int) -> Ids:
    """Returns all examples in the random order of an epoch.

    Philox is counter-based, so each epoch has a stream of its own.
    """
    stream = np.random.Philox(key=int.from_bytes(coin_key[:16], "big"), counter=epoch << 128)
    return np.random.Generator(stream).permutation(num_examples)
