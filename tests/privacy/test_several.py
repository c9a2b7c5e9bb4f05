"""What several examples together pay for, and what an example of version 0.1 paid for the edge of its noise.

It is derived here once more: by enumeration of coins and of ways to spread a contribution, with mpmath.
"""

import itertools
import math
from collections import Counter
from dataclasses import replace

import mpmath
import numpy as np
import pytest
from scipy import stats

from privacy import verify
from privacy.accounting import accountants, group_privacy
from privacy.accounting.group_privacy import epsilon_of_several, overflow_of_several
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.request import PlanRequest

mpmath.mp.dps = 40


def plan_of(n: int, batch: int, steps: int, sigma: float, **more: object) -> PrivacyPlan:
    return make_plan(
        PlanRequest(
            num_examples=n,
            expected_batch_size=batch,
            num_steps=steps,
            noise_multiplier=sigma,
            **more,
        )
    )  # type: ignore[arg-type]


def upper(x: mpmath.mpf) -> mpmath.mpf:
    """P(a standard normal is above x)."""
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize(("sigma", "rate"), [(0.45, 4e-4), (0.71, 5.6e-3), (2.0, 0.2), (1.0, 1.0)])
def test_an_example_of_version_0_1_never_passes_the_edge_more_often(
    sigma: float, rate: float
) -> None:
    """Its contribution is spread over any number of coordinates: the worst of them."""
    edge = mpmath.mpf(group_privacy.EDGE)
    spread = [
        count * (upper(edge - 1 / (mpmath.sqrt(count) * sigma)) - upper(edge))
        for count in (1, 2, 3, 4, 10, 1000, 10**6, 1 << 36)
    ]
    plan = replace(plan_of(10**6, round(rate * 10**6), 50, sigma, cap=None), noise_kind=None)
    worst = plan.sample_rate * plan.max_intents * max(spread)
    assert worst <= plan.noise_tail_delta * (1 + 1e-12) and plan.noise_tail_delta < 4 * worst


def test_rounded_noise_has_no_edge_and_costs_nothing() -> None:
    plan = plan_of(2000, 100, 50, 0.5)
    assert plan.noise_tail_delta == 0 and plan.accounted_delta == plan.target_delta
    old = replace(plan, noise_kind=None)
    assert (
        old.noise_tail_delta > 0 and old.accounted_delta == plan.target_delta - old.noise_tail_delta
    )
    assert (
        replace(
            plan_of(2000, 100, 50, 1.0, arithmetic="certified"), noise_kind=None
        ).noise_tail_delta
        == 0
    )


@pytest.mark.parametrize(
    "plan",
    [
        plan_of(2000, 100, 50, 0.7, cap=100, sensitivity_slack=1e-3),
        plan_of(2000, 100, 50, 1.0, sensitivity_slack=1e-3),
        plan_of(233_000_000, 98_304, 6000, 0.451, cap=None, sensitivity_slack=1e-3),
        plan_of(2000, 100, 50, 1.0, arithmetic="certified"),
    ],
)
def test_the_verifier_counts_the_same(plan: PrivacyPlan) -> None:
    for one in (plan, replace(plan, noise_kind=None)):
        theirs = verify.read_plan(one.frozen_fields(), head=False)
        assert theirs.noise_tail() == pytest.approx(one.noise_tail_delta, rel=1e-9)


def test_contract_2_a_batch_that_is_cut_moves_by_two_and_its_tail_is_charged() -> None:
    """Half of the batches are cut here: whoever is drawn pushes another one out, and noise is passed at twice the distance."""
    cut, whole = (
        replace(plan_of(2000, 100, 5, 0.7, cap=cap, target_delta=1e-5), noise_kind=None)
        for cap in (100, None)
    )
    edge = group_privacy.EDGE
    random = np.random.default_rng(1)
    full = np.mean(random.binomial(1999, cut.sample_rate, 200_000) >= 100)  # of the others
    drawn = cut.sample_rate * cut.max_intents
    moved_by_two = float(
        drawn * full * (upper(mpmath.mpf(edge) - 2 / mpmath.mpf(0.7)) - upper(mpmath.mpf(edge)))
    )
    added = cut.noise_tail_delta - whole.noise_tail_delta
    assert 0.97 * moved_by_two < added < 1.1 * moved_by_two and added > 100 * whole.noise_tail_delta


@pytest.mark.parametrize("copies", [1, 2, 3])
def test_contract_2_several_pay_for_every_batch_that_they_may_cut(copies: int) -> None:
    """All coins and all cuts of one step, for somebody who knows the coins of the others; densities are integrated.

    Without the charge the uncapped epsilon would be too small: that is seen, too.
    """
    rate, cap, others = 0.5, 3, [1.0, 1.0, 1.0, 1.0]
    grid = np.linspace(-14, 14, 4001)

    def density(means: Counter[float]) -> np.ndarray:
        found = sum(p * np.exp(-((grid - m) ** 2) / 2) for m, p in means.items())
        return found * (grid[1] - grid[0]) / math.sqrt(2 * math.pi)

    def release(gradient: float, theirs: tuple[int, ...]) -> np.ndarray:
        """The density of the noised sum given the coins of the others, with a uniform subset of a batch above the cap."""
        means = Counter[float]()
        for drawn in range(copies + 1):
            chance = math.comb(copies, drawn) * rate**drawn * (1 - rate) ** (copies - drawn)
            batch = [gradient] * drawn + list(itertools.compress(others, theirs))
            kept = list(itertools.combinations(batch, min(cap, len(batch))))
            for one in kept:
                means[sum(one)] += chance / len(kept)
        return density(means)

    def excess(pairs: list[tuple[np.ndarray, np.ndarray]], epsilon: float) -> float:
        return max(
            float(np.mean([np.maximum(a - math.exp(epsilon) * b, 0).sum() for a, b in ordered]))
            for ordered in (pairs, [(b, a) for a, b in pairs])
        )

    coins = list(itertools.product((0, 1), repeat=len(others)))  # all alike at this rate
    capped = [(release(-1.0, theirs), release(0.0, theirs)) for theirs in coins]
    chances = stats.binom.pmf(range(copies + 1), copies, rate)
    whole = [(density(Counter(dict(enumerate(chances)))), density(Counter({0.0: 1.0})))]
    charged = overflow_of_several(
        [accountants.ReleaseGroup(rate, 1.0, 1, copies + len(others), cap)], copies
    )
    excesses = [
        (excess(capped, epsilon), excess(whole, epsilon)) for epsilon in (0.1, 0.5, 1.0, 2.0)
    ]
    assert all(of_capped <= of_whole + charged for of_capped, of_whole in excesses)
    assert copies > 1 or any(of_capped > of_whole for of_capped, of_whole in excesses)


def test_no_epsilon_of_several_is_stated_for_noise_of_version_0_1() -> None:
    """Several could pass the edge of that noise together; at ViP's noise five copies of today's have an epsilon."""
    plan = plan_of(233_000_000, 98_304, 6000, 0.451, cap=None)
    groups = [plan.release_group(plan.num_steps)]
    old = replace(plan, noise_kind=None)
    for copies in (2, 5):
        found = epsilon_of_several(plan, groups, copies, 2e-2)
        assert (
            found == accountants.epsilon_group(groups, plan.target_delta, copies, 2e-2) < math.inf
        )
        assert epsilon_of_several(old, groups, copies, 2e-2) == math.inf


def test_copies_that_meet_in_a_batch_move_it_together() -> None:
    """Where all are always drawn, k of them are one release of k times the sensitivity: the closed form."""
    together = accountants.epsilon_gaussian([accountants.ReleaseGroup(1.0, 20 / 3, 4)], 1e-5)
    found = accountants.epsilon_group([accountants.ReleaseGroup(1.0, 20.0, 4)], 1e-5, 3, 1e-2)
    assert together <= found * (1 + 1e-9) and found == pytest.approx(together, rel=1e-2)
