"""Shuffled epochs, behind the sampler's interface.

Every example is in exactly one step of each epoch of S = ceil(n / B) steps, so batches hold at most about B examples. The
schedule comes from the run's key alone, without session and attempt: a retry must repeat its batch, or an example could
come twice in one epoch. Shuffling is formal only as a plain Gaussian mechanism: one example takes part in at most k_max =
ceil(epochs) + replays steps, whoever knows which, so the run is Gaussian-DP with mu = sqrt(k_max) / sigma (Dong et al.
2022, corollary 3.3). Poisson's epsilon for it would be false: at DP-Cap's point it says 7.4 where the worst case is above
51 (`shuffle_lower_bound`).
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
        return steps_per_epoch(self.num_examples, self.expected_batch_size)

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


def steps_per_epoch(num_examples: int, expected_batch_size: int) -> int:
    """S = ceil(n / B)."""
    return -(-num_examples // expected_batch_size)


def shuffle_participations(num_examples: int, expected_batch_size: int, last_step: int, replays: int) -> int:
    """k_max: the most releases that one example can be in after steps 1..last_step and `replays` repeated ones."""
    return math.ceil(last_step / steps_per_epoch(num_examples, expected_batch_size)) + replays


def shuffle_lower_bound(
    noise_multiplier: float, steps: int, epochs: int, delta: float, interval: float = 1e-2
) -> float:
    """An epsilon that shuffled data are *not* better than, for `epochs` fresh shuffles of `steps` batches each.

    The adversary of Chua et al. 2024 (arXiv 2403.17673, section 4): one example against all others at the opposite end of the
    clipping ball, so that its batch stands out by 2 C where the zeroed-out one's stands out by C; the attack sees
    the largest coordinate of each epoch only. Everything is post-processing and rounded down, so this is a bound.
    """
    from dp_accounting.pld import privacy_loss_distribution
    from scipy import stats

    edges = np.linspace(-12.0, 14.0 + 2 / noise_multiplier, 4001)  # in units of sigma
    with np.errstate(divide="ignore"):
        logs = [
            stats.norm.logcdf(edges - shift / noise_multiplier) + (steps - 1) * stats.norm.logcdf(edges)
            for shift in (1.0, 2.0)
        ]
        masses = [np.log(np.diff(np.exp(log), prepend=0.0, append=1.0)) for log in logs]
        tails = [np.log(-np.expm1(log)) for log in logs]
    zeroed, present = (_fine_upper_tail(mass, tail) for mass, tail in zip(masses, tails, strict=True))
    kept = [bin_ for bin_ in range(len(zeroed)) if np.isfinite(zeroed[bin_]) and np.isfinite(present[bin_])]
    one_epoch = privacy_loss_distribution.from_two_probability_mass_functions(
        {bin_: float(zeroed[bin_]) for bin_ in kept},
        {bin_: float(present[bin_]) for bin_ in kept},
        pessimistic_estimate=False,
        value_discretization_interval=interval,
        symmetric=False,
    )
    return float(one_epoch.self_compose(epochs, 0.0).get_epsilon_for_delta(delta))


def _fine_upper_tail(mass: np.ndarray, tail: np.ndarray) -> np.ndarray:
    """Bin masses as logs; above the middle from differences of upper tails, where 1 - cdf would cancel."""
    with np.errstate(divide="ignore", invalid="ignore"):
        upper = tail[:-1] + np.log1p(-np.exp(tail[1:] - tail[:-1]))
    fine = np.concatenate([mass[:1], upper, tail[-1:]])
    return np.where(np.concatenate([[-np.inf], tail]) < math.log(0.5), fine, mass)
