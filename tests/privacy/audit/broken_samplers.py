"""Deliberate mistakes in who is in a batch, as patches of the product's sampler: both audits must find them."""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from privacy.sampling import poisson
from privacy.sampling.poisson import Decided, Ids, PoissonSampler, truncate

Patches = list[tuple[Any, str, Any]]


def _merging(change: Any) -> Patches:
    """`change` (sampler, ids, values, B) says who is in the batch instead of the sampler."""

    def merge(self: PoissonSampler, slices: Sequence[Decided]) -> Ids:
        ids = np.concatenate([part.ids for part in slices])
        values = np.concatenate([part.values for part in slices])
        order = np.argsort(ids)
        members: Ids = change(self, ids[order], values[order], round(self.threshold * self.num_examples / 2**64))
        return members

    return [(PoissonSampler, "merge", merge)]


def batch_of_exactly_b() -> Patches:
    """Sampling without replacement: as many as expected, always."""

    def exactly(sampler: PoissonSampler, ids: Ids, values: Any, size: int) -> Ids:
        rng = np.random.default_rng(int(values[0]))
        others = rng.permutation(np.setdiff1d(np.arange(sampler.num_examples), ids))
        return np.sort(np.concatenate([truncate(ids, values, size), others[: max(0, size - len(ids))]]))

    return _merging(exactly)


def batch_cut_at_b() -> Patches:
    """The cap is the expected batch size."""
    return _merging(lambda sampler, ids, values, size: truncate(ids, values, size))


def lowest_ids_kept_above_b() -> Patches:
    return _merging(lambda sampler, ids, values, size: ids[:size])


def whole_micro_batches_only() -> Patches:
    """What does not fill a micro-batch of 16 is left out."""
    return _merging(lambda sampler, ids, values, size: ids[: len(ids) // 16 * 16])


def members_dealt_twice() -> Patches:
    return _merging(lambda sampler, ids, values, size: np.sort(np.concatenate([ids, ids[:5]])))


def _coins(change: Any) -> Patches:
    """`change` (original coins, key, step, start, stop) gives the values instead of the cipher."""
    original = poisson.coins

    def coins(key: bytes, step: int, start: int, stop: int) -> Iterator[tuple[int, Any]]:
        values = np.concatenate([part for _, part in original(key, step, start // 128 * 128, stop)])
        yield start, change(original, values, key, step, start // 128 * 128)[start % 128 :]

    return [(poisson, "coins", coins)]


def neighbours_share_a_coin() -> Patches:
    def shared(original: Any, values: Any, key: bytes, step: int, start: int) -> Any:
        return np.repeat(values[::2], 2)[: len(values)]

    return _coins(shared)


def two_steps_share_coins_of_the_first_64() -> Patches:
    def shared(original: Any, values: Any, key: bytes, step: int, start: int) -> Any:
        if start < 64:
            values = values.copy()
            stop = min(64, len(values))
            values[:stop] = np.concatenate([part for _, part in original(key, step // 2, 0, stop)])
        return values

    return _coins(shared)


SAMPLERS = {
    function.__name__: function
    for function in (
        batch_of_exactly_b,
        batch_cut_at_b,
        lowest_ids_kept_above_b,
        whole_micro_batches_only,
        members_dealt_twice,
        neighbours_share_a_coin,
        two_steps_share_coins_of_the_first_64,
    )
}
