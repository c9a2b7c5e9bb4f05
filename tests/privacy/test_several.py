"""Several examples together pass the edge of the noise more often than one, and their epsilon pays for that.

What they pay is derived here once more: by enumeration of coins and of ways to spread a contribution, with mpmath.
"""

import itertools
import math
from collections import Counter

import mpmath
import numpy as np
import pytest
from scipy import stats

from privacy import verify
from privacy.accounting import accountants, group_privacy
from privacy.accounting.group_privacy import (
    epsilon_of_several,
    noise_tail_delta,
    noise_tail_of_plan,
    noise_tail_of_several,
    overflow_of_several,
)
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest

mpmath.mp.dps = 40


def plan_of(n: int, batch: int, steps: int, sigma: float, **more: object) -> PrivacyPlan:
    return make_plan(
        PlanRequest(num_examples=n, expected_batch_size=batch, num_steps=steps, noise_multiplier=sigma, **more)
    )  # type: ignore[arg-type]


def upper(x: mpmath.mpf) -> mpmath.mpf:
    """P(a standard normal is above x)."""
    return mpmath.erfc(x / mpmath.sqrt(2)) / 2


@pytest.mark.parametrize("copies", [2, 3, 5])
@pytest.mark.parametrize(("sigma", "rate"), [(0.45, 4e-4), (0.71, 5.6e-3), (2.0, 0.2), (1.0, 1.0)])
def test_copies_in_one_step_never_pass_the_edge_more_often(sigma: float, rate: float, copies: int) -> None:
    """All point the same way, spread over any number of coordinates: the worst for each number that is drawn.

    Over the steps of a run that is added up, which is the union of all of them.
    """
    worst = mpmath.mpf(0)
    for drawn in range(1, copies + 1):
        chance = math.comb(copies, drawn) * mpmath.mpf(rate) ** drawn * (1 - mpmath.mpf(rate)) ** (copies - drawn)
        edge = mpmath.mpf(group_privacy.EDGE)
        spread = [
            count * (upper(edge - drawn / (mpmath.sqrt(count) * sigma)) - upper(edge))
            for count in (1, 2, 3, 4, 10, 1000, 10**6, 1 << 36)
        ]
        worst += chance * max(spread)
    charged = noise_tail_of_several(sigma, rate, 1, copies)
    assert noise_tail_of_several(sigma, rate, 9, copies) == pytest.approx(9 * charged)
    assert worst <= charged * (1 + 1e-12) and charged < 4 * worst
    assert charged > copies * noise_tail_delta(sigma, rate) * (1 - 1e-9)


def test_of_one_example_it_is_what_one_example_costs() -> None:
    plan = plan_of(2000, 100, 50, 1.0)
    assert noise_tail_of_plan(plan, 1) == plan.noise_tail_delta
    assert noise_tail_of_several(1.0, 0.3, 7, 1) == noise_tail_delta(1.0, 0.3 * 7)


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
    theirs = verify.read_plan(plan.frozen_fields(), head=False)
    assert theirs.noise_tail() == pytest.approx(noise_tail_of_plan(plan, 1), rel=1e-9)


def test_contract_2_a_batch_that_is_cut_moves_by_two_and_its_tail_is_charged() -> None:
    """Half of the batches are cut here: whoever is drawn pushes another one out, and noise is passed at twice the distance."""
    cut, edge = plan_of(2000, 100, 5, 0.7, cap=100, target_delta=1e-5), group_privacy.EDGE
    whole = plan_of(2000, 100, 5, 0.7, cap=None, target_delta=1e-5)
    random = np.random.default_rng(1)
    full = np.mean(random.binomial(1999, cut.sample_rate, 200_000) >= 100)  # of the others
    drawn = cut.sample_rate * cut.max_intents
    moved_by_two = float(drawn * full * (upper(mpmath.mpf(edge) - 2 / mpmath.mpf(0.7)) - upper(mpmath.mpf(edge))))
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
    charged = overflow_of_several([accountants.ReleaseGroup(rate, 1.0, 1, copies + len(others), cap)], copies)
    excesses = [(excess(capped, epsilon), excess(whole, epsilon)) for epsilon in (0.1, 0.5, 1.0, 2.0)]
    assert all(of_capped <= of_whole + charged for of_capped, of_whole in excesses)
    assert copies > 1 or any(of_capped > of_whole for of_capped, of_whole in excesses)


def test_no_epsilon_is_stated_where_several_pass_the_edge() -> None:
    """At ViP's noise five copies pass it with a probability above delta, and two do not."""
    plan = plan_of(233_000_000, 98_304, 6000, 0.451, cap=None)
    groups = [plan.release_group(plan.num_steps)]
    assert noise_tail_of_plan(plan, 5) > plan.target_delta > noise_tail_of_plan(plan, 2) > 100 * plan.noise_tail_delta
    assert epsilon_of_several(plan, groups, 5, 2e-2) == math.inf
    two = epsilon_of_several(plan, groups, 2, 2e-2)
    assert math.isfinite(two) and two >= accountants.epsilon_group(groups, plan.accounted_delta, 2, 2e-2)


def test_copies_that_meet_in_a_batch_move_it_together() -> None:
    """Where all are always drawn, k of them are one release of k times the sensitivity: the closed form."""
    together = accountants.epsilon_gaussian([accountants.ReleaseGroup(1.0, 20 / 3, 4)], 1e-5)
    found = accountants.epsilon_group([accountants.ReleaseGroup(1.0, 20.0, 4)], 1e-5, 3, 1e-2)
    assert together <= found * (1 + 1e-9) and found == pytest.approx(together, rel=1e-2)
