"""Groups take turns: who can be in which attempt, against Poisson sampling as a whole."""

import hashlib

import numpy as np
import pytest
from scipy import stats

from privacy.errors import PrivacyConfigError
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from privacy.sampling.poisson import CyclicPoissonSampler, PoissonSampler, slice_bounds

KEY = hashlib.sha256(b"fixed key of the tests").digest()
N, BATCH, BANDS = 1003, 40, 7


def cyclic(cap: int | None = None, n: int = N) -> CyclicPoissonSampler:
    plan = make_plan(
        PlanRequest(num_examples=n, expected_batch_size=BATCH, num_steps=50, noise_multiplier=3.0, bands=BANDS, cap=cap)
    )
    assert isinstance(plan.sampler, CyclicPoissonSampler)
    return plan.sampler


def test_members_are_those_of_the_group_with_the_coins_of_poisson_sampling() -> None:
    """Example i can be in an attempt after j intents only if i = j modulo b; its coin is its own."""
    sampler = cyclic()
    coins = PoissonSampler(N, (BANDS * BATCH << 64) // N)
    for intents in range(40):
        everyone = coins.members(KEY, intents)
        expected = [i for i in everyone.tolist() if i % BANDS == intents % BANDS]
        assert sampler.of_attempt(intents).members(KEY, intents).tolist() == expected


@pytest.mark.parametrize("cap", [None, 30])
def test_contract_1_parts_are_the_whole_on_any_number_of_ranks(cap: int | None) -> None:
    n = N if cap is None else N - N % BANDS  # groups of unequal size take no cap that cuts
    unasked = cyclic(cap, n)
    for intents in range(20):
        sampler = unasked.of_attempt(intents)
        whole = sampler.members(KEY, 3)
        assert cap is None or len(whole) <= cap
        for world_size in (1, 2, 3, 5):
            parts = [sampler.decide(KEY, 3, *slice_bounds(n, world_size, rank)) for rank in range(world_size)]
            assert np.array_equal(sampler.merge(parts[::-1]), whole)


def test_every_example_has_its_rate_and_its_turn() -> None:
    """Over 2,100 attempts each example is drawn Binomial(300, b B / n) times, and in its turns only."""
    counts, sampler = np.zeros(N, dtype=int), cyclic()
    for intents in range(2100):
        members = sampler.of_attempt(intents).members(KEY, intents)
        assert (members % BANDS == intents % BANDS).all()
        counts[members] += 1
    rate = BANDS * BATCH / N
    assert counts.mean() == pytest.approx(300 * rate, abs=5 * np.sqrt(300 * rate / N))
    lowest, highest = stats.binom.ppf([1e-6 / N, 1 - 1e-6 / N], 300, rate)
    assert lowest <= counts.min() and counts.max() <= highest


def test_nobody_is_drawn_before_it_is_known_whose_turn_it_is() -> None:
    with pytest.raises(PrivacyConfigError, match="of_attempt"):
        cyclic().members(KEY, 1)
