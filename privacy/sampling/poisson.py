"""True Poisson sampling by keyed coins: the key recomputes any part of any step's membership.

Example i is in step t iff u64(AES-256-CTR(K, t, i)) < Q, with Q = floor(q 2^64) and K derived from
the sampling key, the session nonce and the attempt (keys.py); `coins` has the layout. A
pseudo-random function makes the coins independent, as the accountant assumes, and random access
makes the members equal for every world size, worker count and order of access.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from fractions import Fraction
from typing import NamedTuple, Self

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

from ..errors import PrivacyConfigError
from .keys import SamplingKey

Ids = NDArray[np.int64]
Values = NDArray[np.uint64]

CHUNK = 1 << 17
"""Examples decided at once: 1 MiB of key stream stays in the cache, and malloc reuses its pages."""


class Decisions(NamedTuple):
    """Included examples in rising order of id, with their random values, which the cap needs."""

    ids: Ids
    values: Values


class Sampler(ABC):
    """Decides which examples are in a step: Poisson's sampler below, or that of shuffle.py."""

    num_examples: int

    @property
    @abstractmethod
    def cap(self) -> int | None:
        """Returns the size of the largest batch, or None if there is no limit."""

    @abstractmethod
    def coin_key(self, key: SamplingKey, session_nonce: bytes, attempt: int) -> bytes:
        """Returns the key that `decide` and `members` need for one attempt."""

    @abstractmethod
    def decide(
        self, coin_key: bytes, step: int, start: int = 0, stop: int | None = None
    ) -> Decisions:
        """Decides the examples of [start, stop) for `step`."""

    def members(self, coin_key: bytes, step: int) -> Ids:
        """Returns all members of `step` in rising order, cap applied; auditors recompute them."""
        return self.merge([self.decide(coin_key, step)])

    def merge(self, slices: Sequence[Decisions]) -> Ids:
        """Joins decisions of disjoint slices, in any order; applies the cap and sorts the ids."""
        ids = np.concatenate([part.ids for part in slices])
        values = np.concatenate([part.values for part in slices])
        return truncate(ids, values, self.cap)


@dataclass(frozen=True)
class PoissonSampler(Sampler):
    """Draws each of `num_examples` examples with probability `threshold` / 2^64.

    A batch of more than `cap` examples is cut to `cap`.
    """

    num_examples: int
    threshold: int
    cap: int | None = None

    @classmethod
    def with_expected_batch(
        cls, num_examples: int, expected_batch_size: int, cap: int | None
    ) -> Self:
        """Returns the sampler with rate B / n, computed in integers: Q = floor(B 2^64 / n)."""
        if not 1 <= expected_batch_size <= num_examples:
            raise PrivacyConfigError(
                "expected_batch_size must be between 1 and the number of examples "
                f"({num_examples}), not {expected_batch_size}"
            )
        return cls(num_examples, (expected_batch_size << 64) // num_examples, cap)

    @property
    def sample_rate(self) -> float:
        """Returns Q / 2^64 as a float, rounded up: the accountant's rate."""
        exact_rate = Fraction(self.threshold, 2**64)
        nearest_rate = float(exact_rate)
        is_upper_bound = Fraction(nearest_rate) >= exact_rate
        return nearest_rate if is_upper_bound else math.nextafter(nearest_rate, 1.0)

    def coin_key(self, key: SamplingKey, session_nonce: bytes, attempt: int) -> bytes:
        """Returns a fresh key for every start of the program and every attempt."""
        return key.coin_key(session_nonce, attempt)

    def decide(
        self, coin_key: bytes, step: int, start: int = 0, stop: int | None = None
    ) -> Decisions:
        """Decides the examples of [start, stop) for `step`, one chunk in memory at a time."""
        stop = self.num_examples if stop is None else stop
        # Q itself may be 2^64, which no uint64 holds.
        largest_hit = np.uint64(self.threshold - 1)
        # Empty arrays set the dtype of a result without chunks.
        ids = [np.empty(0, np.int64)]
        values = [np.empty(0, np.uint64)]
        for first_id, chunk in coins(coin_key, step, start, stop):
            hits = np.flatnonzero(chunk <= largest_hit)
            ids.append(hits + first_id)
            values.append(chunk[hits])
        return Decisions(np.concatenate(ids), np.concatenate(values))


def truncate(ids: Ids, values: Values, cap: int | None) -> Ids:
    """Keeps the `cap` smallest values (ties: the smaller id) and returns the ids in rising order.

    Given inclusion the values are uniform and independent, so this is the uniform down-sampling
    that `TruncatedSubsampledGaussianDpEvent` charges.
    """
    if cap is not None and len(ids) > cap:
        ids = ids[np.lexsort((ids, values))[:cap]]
    return np.sort(ids)


def slice_bounds(num_examples: int, world_size: int, rank: int) -> tuple[int, int]:
    """Returns the (start, stop) of the examples whose coins this rank decides."""
    start = num_examples * rank // world_size
    stop = num_examples * (rank + 1) // world_size
    return start, stop


def example_keys(example_key: bytes, step: int, ids: Ids) -> Values:
    """Returns one secret 64-bit key per (step, example), for augmentation, dropout and masking.

    AES-256 of the block (8 bytes big-endian step, 8 bytes big-endian id), first 8 bytes read as
    little-endian: a function of that example alone, under a key that shares nothing with the coins.
    """
    blocks = np.empty((len(ids), 2), dtype=">u8")
    blocks[:, 0] = step
    blocks[:, 1] = ids
    # ECB on distinct blocks is the block cipher itself, used as a pseudo-random function.
    encryptor = Cipher(algorithms.AES256(example_key), modes.ECB()).encryptor()
    stream = encryptor.update(blocks.tobytes())
    return np.frombuffer(stream, dtype="<u8")[::2].astype(np.uint64)


def coins(coin_key: bytes, step: int, start: int, stop: int) -> Iterator[tuple[int, Values]]:
    """Yields (id of the first example, values) over [start, stop), at most CHUNK values at a time.

    The counter block is 8 bytes big-endian step, then 8 bytes big-endian j; its 16 bytes of key
    stream are the two little-endian u64 of examples 2j and 2j + 1. One CTR stream computes no block
    twice. Each array has memory of its own, so callers may keep them all.
    """
    position = start - start % 2
    counter = step.to_bytes(8, "big") + (position // 2).to_bytes(8, "big")
    encryptor = Cipher(algorithms.AES256(coin_key), modes.CTR(counter)).encryptor()
    zeros = memoryview(bytes(8 * min(CHUNK, stop - start + 2)))
    while position < stop:
        count = min(CHUNK, stop - position)
        stream = encryptor.update(zeros[: 8 * (count + count % 2)])
        skip = max(0, start - position)
        yield position + skip, np.frombuffer(stream, dtype="<u8")[skip:count]
        position += count
