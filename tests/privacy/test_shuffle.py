import hashlib

import numpy as np
import pytest
from scipy import stats

from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import slice_bounds
from privacy.sampling.shuffle import ShuffleSampler

KEY = hashlib.sha256(b"fixed key of the tests").digest()
SAMPLER = ShuffleSampler(1001, 90)


def _epoch(sampler, epoch):
    steps = sampler.steps_per_epoch
    return [sampler.members(KEY, 1 + epoch * steps + index) for index in range(steps)]


def test_each_example_comes_exactly_once_an_epoch():
    for epoch in (0, 1, 7):
        assert sorted(np.concatenate(_epoch(SAMPLER, epoch)).tolist()) == list(range(1001))
    assert not np.array_equal(_epoch(SAMPLER, 0)[0], _epoch(SAMPLER, 1)[0])


def test_members_do_not_depend_on_world_size_or_order():
    for step in (1, 13, 12):
        whole = SAMPLER.members(KEY, step)
        for world_size in (1, 2, 4, 7):
            parts = [SAMPLER.decide(KEY, step, *slice_bounds(1001, world_size, rank)) for rank in range(world_size)]
            assert np.array_equal(SAMPLER.merge(parts[::-1]), whole)


def test_a_retry_repeats_its_batch_and_another_key_does_not():
    key, other = SamplingKey(bytes(32)), SamplingKey(bytes(31) + b"\1")
    first = SAMPLER.coin_key(key, bytes(16), 0)
    assert first == SAMPLER.coin_key(key, bytes(15) + b"\1", 3) != SAMPLER.coin_key(other, bytes(16), 0)
    assert first != key.coin_key(bytes(16), 0) and first != key.example_key(bytes(16), 0)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1023, 1024, 1025, 300_000])
def test_shuffled_batches_differ_in_size_by_at_most_one(size):
    sampler = ShuffleSampler(size, max(1, size // 7))
    sizes = [len(members) for members in _epoch(sampler, 2)]
    assert sum(sizes) == size and max(sizes) - min(sizes) <= 1 and max(sizes) == sampler.cap <= max(1, size // 7)


def test_every_place_in_the_epoch_is_equally_likely():
    sampler = ShuffleSampler(60, 6)
    table = np.zeros((60, 10))
    for epoch in range(600):
        for index, members in enumerate(_epoch(sampler, epoch)):
            table[members, index] += 1
    statistic = ((table - 60) ** 2 / 60).sum()
    assert 1e-4 < stats.chi2.sf(statistic, 60 * 9) < 1 - 1e-4
