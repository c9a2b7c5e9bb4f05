"""Shuffled epochs, behind the sampler's interface.

Every example is in exactly one step of each epoch of S = ceil(n / B) steps, so batches hold at most about B examples. The
schedule comes from the run's key alone, without session and attempt: a retry must repeat its batch, or an example could
come twice in one epoch. This is for public data, and makes no claim. Poisson's epsilon for it would be false: at DP-Cap's point
it says 7.4 where the worst case is above 51 (Chua et al. 2024, arXiv 2403.17673).
"""

import math
from dataclasses import dataclass
from functools import cached_property

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes

from ..errors import PrivacyConfigError
from .keys import SamplingKey
from .poisson import CHUNK, Decided, Sampler, Values

_ROUNDS = 10  # of the Feistel network; balance needs four (Luby and Rackoff 1988), small domains profit from more


@dataclass(frozen=True)
class ShuffleSampler(Sampler):
    """A fresh keyed permutation of all examples each epoch, cut into S batches whose sizes differ by at most one."""

    num_examples: int
    expected_batch_size: int

    def __post_init__(self) -> None:
        if not 1 <= self.expected_batch_size <= self.num_examples:
            raise PrivacyConfigError(
                f"expected_batch_size must be between 1 and the number of examples ({self.num_examples}), "
                f"not {self.expected_batch_size}"
            )

    @property
    def steps_per_epoch(self) -> int:
        """S = ceil(n / B)."""
        return -(-self.num_examples // self.expected_batch_size)

    def coin_key(self, key: SamplingKey, session_nonce: bytes, attempt: int) -> bytes:
        """The key of the whole run's schedule; session and attempt do not enter (a retry repeats its batch)."""
        return key.schedule_key()

    @property
    def cap(self) -> int:
        """The largest batch; nothing is ever cut."""
        return math.ceil(self.num_examples / self.steps_per_epoch)

    def decide(self, coin_key: bytes, step: int, start: int = 0, stop: int | None = None) -> Decided:
        """The members of `step` within [start, stop); costs one batch, not one pass over the data."""
        stop = self.num_examples if stop is None else stop
        if not 0 <= start <= stop <= self.num_examples:
            raise PrivacyConfigError(f"slice [{start}, {stop}) lies outside of [0, {self.num_examples})")
        if step < 1:
            raise PrivacyConfigError(f"steps count from 1, not {step}")
        epoch, index = divmod(step - 1, self.steps_per_epoch)
        first, last = (self.num_examples * (index + part) // self.steps_per_epoch for part in (0, 1))
        batch = []
        for at in range(first, last, CHUNK):
            places = np.arange(at, min(at + CHUNK, last), dtype=np.uint64)
            outside = np.ones(len(places), dtype=bool)
            # Cycle walking: the network permutes a power of two below 2 n; what leaves [0, n) goes on until it returns.
            while outside.any():
                places[outside] = self._network(coin_key, epoch, places[outside])
                outside = places >= self.num_examples
            batch.append(places.astype(np.int64))
        ids = np.sort(np.concatenate(batch))
        ids = ids[(ids >= start) & (ids < stop)]
        return Decided(ids, np.zeros(len(ids), np.uint64))

    def _network(self, coin_key: bytes, epoch: int, values: Values) -> Values:
        """An alternating Feistel network with AES-256 as its round function."""
        right_bits = np.uint64(self._bits // 2)
        masks = [np.uint64((1 << (self._bits - int(right_bits))) - 1), np.uint64((1 << int(right_bits)) - 1)]
        halves = [values >> right_bits, values & masks[1]]
        encryptor = Cipher(algorithms.AES(coin_key), modes.ECB()).encryptor()
        blocks = np.empty((len(values), 2), dtype=">u8")
        for turn in range(_ROUNDS):
            blocks[:, 0] = (epoch << 8) + turn
            blocks[:, 1] = halves[1 - turn % 2]
            stream = np.frombuffer(encryptor.update(blocks.tobytes()), dtype="<u8")[::2]
            halves[turn % 2] = halves[turn % 2] ^ (stream & masks[turn % 2])
        return (halves[0] << right_bits) | halves[1]

    @cached_property
    def _bits(self) -> int:
        return max(2, (self.num_examples - 1).bit_length())
