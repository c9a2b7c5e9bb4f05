import hashlib
import itertools

import numpy as np
import pytest
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from privacy.errors import PrivacyConfigError
from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import PoissonSampler, example_keys, slice_bounds, truncate
from privacy.sampling.shuffle import ShuffleSampler

KEY = hashlib.sha256(b"fixed key of the tests").digest()


def _definition(key, step, index):
    """Contract 4.1 read literally: one block of AES-256 (CTR is ECB of the counter), one of its two u64."""
    block = step.to_bytes(8, "big") + (index // 2).to_bytes(8, "big")
    stream = Cipher(algorithms.AES(key), modes.ECB()).encryptor().update(block)
    return int.from_bytes(stream[8 * (index % 2) : 8 * (index % 2) + 8], "little")


def test_contract_1_coins_follow_their_definition():
    sampler = PoissonSampler.with_expected_batch(1001, 300, None)
    decided = sampler.decide(KEY, 7)
    expected = {i: v for i in range(1001) if (v := _definition(KEY, 7, i)) < sampler.threshold}
    assert dict(zip(decided.ids.tolist(), decided.values.tolist(), strict=True)) == expected


@given(st.data())
def test_contract_1_random_access_equals_sequential(data):
    n = data.draw(st.integers(1, 3000))
    cuts = sorted(data.draw(st.lists(st.integers(0, n), max_size=8)))
    sampler = PoissonSampler.with_expected_batch(n, max(1, n // 3), None)
    whole = sampler.decide(KEY, 5)
    bounds = [0, *cuts, n]
    parts = [sampler.decide(KEY, 5, a, b) for a, b in itertools.pairwise(bounds)]
    assert np.array_equal(np.concatenate([part.ids for part in parts]), whole.ids)
    assert np.array_equal(np.concatenate([part.values for part in parts]), whole.values)


def test_contract_1_random_access_across_chunks():
    sampler = PoissonSampler.with_expected_batch(1_000_003, 5000, None)
    whole = sampler.decide(KEY, 2**40)
    for start, stop in (
        (262_143, 524_291),
        (1, 1_000_003),
        (999_999, 1_000_003),
        (524_288, 524_288),
    ):
        part = sampler.decide(KEY, 2**40, start, stop)
        assert np.array_equal(part.ids, whole.ids[(whole.ids >= start) & (whole.ids < stop)])


@pytest.mark.parametrize("cap", [None, 290])
def test_contract_1_members_do_not_depend_on_world_size(cap):
    sampler = PoissonSampler.with_expected_batch(3001, 300, cap)
    whole = sampler.members(KEY, 11)
    for world_size in (1, 2, 3, 4, 7):
        parts = [
            sampler.decide(KEY, 11, *slice_bounds(3001, world_size, rank))
            for rank in range(world_size)
        ]
        members = sampler.merge(parts[::-1])
        assert np.array_equal(members, whole)


def test_contract_1_inclusion_counts():
    """Per example over many steps they are Binomial(steps, q)."""
    n, steps = 400, 1000
    sampler = PoissonSampler.with_expected_batch(n, 60, None)
    counts = np.zeros(n)
    for step in range(steps):
        counts[sampler.decide(KEY, step).ids] += 1
    q = sampler.sample_rate
    p_value = stats.chi2.sf((((counts - steps * q) ** 2) / (steps * q * (1 - q))).sum(), n)
    assert 1e-4 < p_value < 1 - 1e-4


def test_contract_1_pairwise_independence():
    """Over steps, no pair of examples is correlated; neighbours that share an AES block included."""
    n, steps = 60, 4000
    sampler = PoissonSampler.with_expected_batch(n, 20, None)
    table = np.zeros((steps, n))
    for step in range(steps):
        table[step, sampler.decide(KEY, step).ids] = 1
    correlation = np.corrcoef(table.T)
    pairs = correlation[np.triu_indices(n, 1)] * np.sqrt(steps)
    assert np.abs(pairs).max() < 5.0
    assert 1e-4 < stats.chi2.sf((pairs**2).sum(), len(pairs)) < 1 - 1e-4
    assert np.abs(correlation[np.arange(0, n, 2), np.arange(1, n, 2)]).max() * np.sqrt(steps) < 5.0
    shifted = [
        np.corrcoef(table[:-1, i], table[1:, i])[0, 1] for i in range(n)
    ]  # consecutive steps
    assert np.abs(shifted).max() * np.sqrt(steps) < 5.0


def test_contract_1_other_attempt_session_or_key_gives_independent_members():
    key, other = SamplingKey(bytes(32)), SamplingKey(bytes(31) + b"\1")
    nonces = bytes(16), bytes(15) + b"\1"
    sampler = PoissonSampler.with_expected_batch(20_000, 2000, None)
    keys = [
        key.coin_key(nonces[0], 0),
        key.coin_key(nonces[0], 1),
        key.coin_key(nonces[1], 0),
        other.coin_key(nonces[0], 0),
    ]
    sets = [set(sampler.members(item, 3).tolist()) for item in keys] + [
        set(sampler.members(keys[0], 4).tolist())
    ]
    for index, first in enumerate(sets):
        for second in sets[index + 1 :]:
            # Binomial(20000, 0.01): 200 +- 14
            assert abs(len(first & second) - 200) < 6 * 14.1


def test_contract_2_cap_keeps_the_smallest_values():
    rng = np.random.default_rng(0)
    ids = np.flatnonzero(rng.random(1000) < 0.3)
    values = rng.integers(0, 40, len(ids)).astype(np.uint64)  # many ties
    for cap in (1, 7, len(ids) - 1, len(ids), len(ids) + 5):
        kept = truncate(ids, values, cap)
        expected = sorted(sorted(zip(values, ids, strict=True))[:cap], key=lambda pair: pair[1])
        assert kept.tolist() == [index for _, index in expected]
    shuffled = rng.permutation(len(ids))
    assert np.array_equal(truncate(ids[shuffled], values[shuffled], 20), truncate(ids, values, 20))
    assert np.array_equal(truncate(ids, values, None), ids)


def test_rate_is_rounded_up_and_threshold_down():
    for n, batch in ((3, 1), (233_000_000, 1_310_720), (3000, 256), (7, 7), (10**9 + 7, 1)):
        sampler = PoissonSampler.with_expected_batch(n, batch, None)
        assert sampler.threshold == batch * 2**64 // n
        assert sampler.sample_rate * 2**64 >= sampler.threshold
        assert sampler.sample_rate == pytest.approx(batch / n, rel=1e-15)
    assert PoissonSampler.with_expected_batch(7, 7, None).members(KEY, 0).tolist() == list(range(7))


def test_contract_13_example_keys_depend_on_step_and_example_only():
    ids = np.array([5, 0, 233_000_000, 77])
    keys = example_keys(KEY, 3, ids)
    assert keys.dtype == np.uint64 and len(set(keys.tolist())) == 4
    assert [example_keys(KEY, 3, ids[i : i + 1])[0] for i in range(4)] == keys.tolist()
    assert not set(example_keys(KEY, 4, ids).tolist()) & set(keys.tolist())
    assert len(example_keys(KEY, 3, ids[:0])) == 0
    block = (3).to_bytes(8, "big") + (5).to_bytes(8, "big")
    stream = Cipher(algorithms.AES(KEY), modes.ECB()).encryptor().update(block)
    assert int(keys[0]) == int.from_bytes(stream[:8], "little")


def test_a_batch_larger_than_the_data_is_refused():
    for size in (0, 11):
        with pytest.raises(PrivacyConfigError):
            PoissonSampler.with_expected_batch(10, size, None)


# Shuffled epochs

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
            parts = [
                SAMPLER.decide(KEY, step, *slice_bounds(1001, world_size, rank))
                for rank in range(world_size)
            ]
            assert np.array_equal(SAMPLER.merge(parts[::-1]), whole)


def test_a_retry_repeats_its_batch_and_another_key_does_not():
    key, other = SamplingKey(bytes(32)), SamplingKey(bytes(31) + b"\1")
    first = SAMPLER.coin_key(key, bytes(16), 0)
    assert (
        first
        == SAMPLER.coin_key(key, bytes(15) + b"\1", 3)
        != SAMPLER.coin_key(other, bytes(16), 0)
    )
    assert first != key.coin_key(bytes(16), 0) and first != key.example_key(bytes(16), 0)


@pytest.mark.parametrize("size", [1, 2, 3, 100, 1023, 1024, 1025, 300_000])
def test_shuffled_batches_differ_in_size_by_at_most_one(size):
    sampler = ShuffleSampler(size, max(1, size // 7))
    sizes = [len(members) for members in _epoch(sampler, 2)]
    assert (
        sum(sizes) == size
        and max(sizes) - min(sizes) <= 1
        and max(sizes) == sampler.cap <= max(1, size // 7)
    )


def test_every_place_in_the_epoch_is_equally_likely():
    sampler = ShuffleSampler(60, 6)
    table = np.zeros((60, 10))
    for epoch in range(600):
        for index, members in enumerate(_epoch(sampler, epoch)):
            table[members, index] += 1
    statistic = ((table - 60) ** 2 / 60).sum()
    assert 1e-4 < stats.chi2.sf(statistic, 60 * 9) < 1 - 1e-4
