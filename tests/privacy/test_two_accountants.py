"""Every epsilon is computed twice, on random plans: by the project, and by verify.py or by quadrature.

What verify.py has (PLD, RDP) shares a library with the project and nothing else. For the rest the
numbers are derived here once more: Renyi divergences and composed privacy losses by quadrature, the
tail of a batch by its terms. Caps go down to B, and mostly lie where their overflow costs about delta.
"""

import functools
import json
import math
import random
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import pytest
from dp_accounting.rdp import rdp_privacy_accountant
from numpy.typing import NDArray
from scipy.special import gammaln, logsumexp, ndtr

from privacy import verify
from privacy.accounting import accountants
from privacy.accounting.accountants import EpsilonTable, ReleaseGroup
from privacy.accounting.group_privacy import epsilon_of_several
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.plan.request import PlanRequest

Floats = NDArray[np.float64]
POINTS = 1 << 16
"""Of a composed privacy loss, and of the quadrature of one release."""
QUICK = (0, 5, 7, 75)
"""Plans of much noise, whose grids are short: caps of B, B + 1, near delta and none; all examples in every step."""
LONG = [pytest.mark.full, pytest.mark.timeout(1800)]
CASES = [pytest.param(number, marks=() if number in QUICK else LONG) for number in range(200)]
HIDDEN = 1e-2
"""The library leaves Renyi orders out whose sum does not settle, and bounds fractional ones from above: by at most 0.31 % of
epsilon for one of the 200 plans."""


@dataclass(frozen=True)
class Case:
    """A random plan, and its numbers as they are charged: rate, noise multiplier, steps, cap and delta."""

    plan: PrivacyPlan
    group: ReleaseGroup
    theirs: verify.Group

    @property
    def n(self) -> int:
        return self.plan.num_examples

    @property
    def rate(self) -> float:
        return self.plan.expected_batch_size / self.plan.num_examples

    @property
    def sigma(self) -> float:
        return self.plan.noise_multiplier / (1 + SENSITIVITY_SLACK)

    @property
    def steps(self) -> int:
        return self.plan.num_steps

    @property
    def cap(self) -> int | None:
        return self.plan.cap

    @property
    def delta(self) -> float:
        return self.plan.target_delta


@functools.cache
def draw(number: int, largest_delta: float = 1e-3) -> Case:
    """T from 1 to 10^5, q to 1; the noise makes epsilon about 0.1 to 10."""
    rng = random.Random(f"plan {number}")
    n = round(10 ** rng.uniform(1.5, 6))
    batch = min(n, max(1, round(n * rng.choice([1.0, rng.random(), 10 ** rng.uniform(-3, 0)]))))
    steps = round(10 ** rng.uniform(0, 5))
    delta = largest_delta * 10 ** rng.uniform(-6, 0)
    signal = (
        batch
        / n
        * math.sqrt(steps)
        * math.sqrt(2 * math.log(1 / delta))
        / 10 ** rng.uniform(-0.7, 0.8)
    )
    sigma = max(0.6, signal)
    cap = rng.choice([None, batch, batch + 1, "near delta", "near delta", "near delta"])
    if cap == "near delta":
        wanted = delta * 10 ** rng.uniform(-4, 0) / steps
        cap = next(k for k in range(batch, n + 1) if k == n or tail(n, batch / n, k) <= wanted)
    request = PlanRequest(
        num_examples=n,
        expected_batch_size=batch,
        num_steps=steps,
        noise_multiplier=sigma,
        target_delta=delta,
        cap=None if cap is None else min(int(cap), n),
        sensitivity_slack=SENSITIVITY_SLACK,
    )
    plan = make_plan(request)
    read = verify.read_plan(json.loads(json.dumps(plan.frozen_fields())), head=False)
    return Case(plan, plan.release_group(steps), read.releases(steps))


def tail(n: int, rate: float, cap: int) -> float:
    """P(more than `cap` of n coins of this rate), term by term."""
    if rate >= 1:
        return float(n > cap)
    k = np.arange(max(cap + 1, 0), min(n, cap + 20 + round(60 * math.sqrt(n * rate))) + 1)
    terms = (
        gammaln(n + 1)
        - gammaln(k + 1)
        - gammaln(n - k + 1)
        + k * math.log(rate)
        + (n - k) * math.log1p(-rate)
    )
    return float(np.exp(terms).sum())


def overflow(case: Case, copies: int = 0) -> float:
    """What a run's batches above the cap cost in delta, for so many examples together (0: an RDP bound)."""
    if case.cap is None:
        return 0.0
    others = max(case.n - copies, 0)
    return max(copies, 1) * case.steps * tail(others, case.rate, case.cap - copies)


# Renyi DP


@functools.cache
def renyi(rate: float, sigma: float, order: float) -> float:
    """The Renyi divergence of one release (Mironov et al. 2019, equation 3), on a grid."""
    z = np.arange(-12 * sigma, order + 12 * sigma, sigma / 40)
    with np.errstate(divide="ignore"):
        ratio = np.logaddexp(np.log1p(-rate), np.log(rate) + (2 * z - 1) / (2 * sigma**2))
    density = -(z**2) / (2 * sigma**2) - math.log(sigma * math.sqrt(2 * math.pi))
    return float(logsumexp(order * ratio + density) + math.log(sigma / 40)) / (order - 1)


def converted(divergence: float, order: float, delta: float) -> float:
    """Epsilon of a Renyi divergence (Canonne, Kamath and Steinke 2020, proposition 12)."""
    if delta <= 0:
        return math.inf
    if delta**2 > -math.expm1(-divergence):  # total variation
        return 0.0
    return max(0.0, divergence + math.log1p(-1 / order) - math.log(delta * order) / (order - 1))


def by_renyi(case: Case, delta: float, orders: Sequence[float]) -> float:
    return min(
        converted(case.steps * renyi(case.rate, case.sigma, order), order, delta)
        for order in orders
    )


# Composed privacy losses

Mixture = dict[float, float]
"""Shift of a Gaussian -> its weight."""


def log_density(mixture: Mixture, x: Floats, sigma: float) -> Floats:
    terms = [
        math.log(p) - (x - shift) ** 2 / (2 * sigma**2) for shift, p in mixture.items() if p > 0
    ]
    return np.asarray(logsumexp(terms, axis=0))


def one_way(first: Mixture, second: Mixture, sigma: float, steps: int) -> tuple[Floats, Floats]:
    """(losses, masses) of log(first / second) under first, composed: a Fourier transform of a grid.

    Cells of the line have their exact masses; a loss between two points of the grid is split so that the mean
    stays, which widens each release by half a step of the grid at most.
    """
    shifts = [*first, *second]
    edges = np.linspace(min(shifts) - 11 * sigma, max(shifts) + 11 * sigma, POINTS + 1)
    x = (edges[1:] + edges[:-1]) / 2
    mass = sum(p * np.diff(ndtr((edges - shift) / sigma)) for shift, p in first.items())
    loss = log_density(first, x, sigma) - log_density(second, x, sigma)
    mean = float(mass @ loss)
    deviation = math.sqrt(float(mass @ (loss - mean) ** 2))
    seen = loss[mass > 1e-18]
    reach = 11 * deviation * math.sqrt(steps) + 2 * max(seen.max() - mean, mean - seen.min())
    h = 2 * reach / POINTS
    place = (loss - mean) / h
    low = np.floor(place)
    one = np.zeros(POINTS)
    for index, weight in ((low, mass * (low + 1 - place)), (low + 1, mass * (place - low))):
        np.add.at(
            one, index.astype(np.int64) % POINTS, weight
        )  # what is behind the reach has no mass
    composed = np.fft.irfft(np.fft.rfft(one) ** steps, POINTS)
    losses = (np.arange(POINTS) - POINTS // 2) * h + steps * mean
    return losses, np.roll(composed, POINTS // 2).clip(min=0)


def composed(first: Mixture, second: Mixture, sigma: float, steps: int, delta: float) -> float:
    """Epsilon at `delta`, whichever of the two is the data with the example."""

    def delta_of(epsilon: float, losses: Floats, masses: Floats) -> float:
        above = losses > epsilon
        return float(masses[above] @ -np.expm1(epsilon - losses[above]))

    worst = 0.0
    for ways in (one_way(first, second, sigma, steps), one_way(second, first, sigma, steps)):
        low, high = 0.0, float(ways[0][-1])
        for _ in range(60):
            middle = (low + high) / 2
            low, high = (middle, high) if delta_of(middle, *ways) > delta else (low, middle)
        worst = max(worst, high)
    return worst


def several(rate: float, copies: int) -> Mixture:
    """How many of them are drawn."""
    return {
        float(drawn): math.comb(copies, drawn) * rate**drawn * (1 - rate) ** (copies - drawn)
        for drawn in range(copies + 1)
    }


NOBODY: Mixture = {0.0: 1.0}


def at_most(case: Case, exact: float, interval: float, copies: int = 1) -> float:
    """What a privacy loss distribution of this grid may say of an exact epsilon: its steps widen each loss."""
    deviation = copies * case.rate * math.sqrt(math.expm1(1 / case.sigma**2))
    return exact * 1.005 * math.hypot(1, interval / (2 * deviation)) + 1e-3


def at_least(exact: float) -> float:
    return exact * (1 - 2e-3) - 1e-4


# The tests


@pytest.mark.parametrize("number", CASES)
def test_contract_10_epsilon_is_that_of_the_verifier_and_of_a_quadrature(number: int) -> None:
    case = draw(number)
    group, delta = case.group, case.delta
    value = accountants.epsilon([group], delta)
    assert value == pytest.approx(verify.epsilon([case.theirs], delta), rel=3e-9)
    assert accountants.claimed_epsilon([group], delta)[0] == pytest.approx(value, rel=1e-9)
    exact = composed(several(case.rate, 1), NOBODY, case.sigma, case.steps, delta)
    assert value >= at_least(exact)
    interval = accountants.FINE_INTERVAL
    if case.cap is None:
        assert value <= at_most(case, exact, interval)
    elif (left := delta - overflow(case) * (1 + math.exp(value))) > delta / 10:
        exact = composed(several(case.rate, 1), NOBODY, case.sigma, case.steps, left)
        assert value <= at_most(case, exact, interval)
    both = {0.0: 1 - case.rate, 1.0: case.rate}, {0.0: 1 - case.rate, -1.0: case.rate}
    replaced = composed(*both, case.sigma, case.steps, delta)
    found = accountants.epsilon_replace_one([group.without_cap()], delta, 1e-3)
    assert at_least(replaced) <= found <= at_most(case, replaced, 1e-3)


@pytest.mark.parametrize("number", CASES)
def test_contract_10_a_table_never_says_less_than_the_verifier(number: int) -> None:
    case = draw(number)
    table = EpsilonTable(case.group, case.delta, case.steps + 5, case.steps)
    assert table.epsilon(case.steps) == pytest.approx(
        verify.epsilon([case.theirs], case.delta), rel=3e-9
    )
    for count in {1, -(-case.steps // 3)}:
        theirs = verify.epsilon([case.theirs._replace(releases=count)], case.delta)
        assert table.epsilon(count) >= theirs * (1 - 3e-9)


ORDERS = rdp_privacy_accountant.DEFAULT_RDP_ORDERS


@pytest.mark.parametrize("number", CASES)
def test_contract_10_renyi_dp_is_that_of_the_verifier_and_of_a_quadrature(number: int) -> None:
    case = draw(number)
    value, exact = (
        accountants.epsilon_rdp([case.group], case.delta),
        by_renyi(case, case.delta, ORDERS),
    )
    assert value == pytest.approx(verify.renyi((case.theirs,), case.delta), rel=1e-9)
    assert exact * (1 - 1e-6) <= value <= exact * (1 + HIDDEN)


@pytest.mark.parametrize("number", CASES)
def test_contract_2_below_delta_1e_12_the_overflow_of_the_cap_is_charged(number: int) -> None:
    """The smallest epsilon that is enough for the uncapped run at what the overflow leaves of delta."""
    case = draw(number, 1e-12)
    tau = overflow(case)
    assert accountants.overflow_probability([case.group]) == pytest.approx(
        tau, rel=1e-6, abs=1e-300
    )
    if case.rate == 1 and case.cap is None:
        return  # one Gaussian, which the verifier has, too
    value, exact = accountants.epsilon([case.group], case.delta), by_renyi(case, case.delta, ORDERS)
    while exact < math.inf:
        following = by_renyi(case, case.delta - tau * (1 + math.exp(min(exact, 700.0))), ORDERS)
        if following <= exact * (1 + 1e-9):
            break
        exact = following
    assert value == exact or exact * (1 - 1e-6) <= value <= exact * (1 + HIDDEN)


@pytest.mark.parametrize("number", CASES)
def test_contract_10_an_rdp_filter_is_one_order_of_all_runs_together(number: int) -> None:
    """Of two runs, at the order at which most runs like the first one fit."""
    first, second = draw(number), draw((number + 7) % 200)
    ceiling, delta = 1.2 * max(0.5, by_renyi(first, first.delta, ORDERS)), first.delta
    growth = 1 + math.exp(min(ceiling, 700.0))

    def spent(order: float, *cases: Case) -> float:
        divergence = math.fsum(case.steps * renyi(case.rate, case.sigma, order) for case in cases)
        return converted(divergence, order, delta - growth * math.fsum(map(overflow, cases)))

    order = accountants.filter_order(first.group, ceiling, delta)
    for cases in ((first,), (first, second)):
        groups = [case.group for case in cases]
        value, exact = (
            accountants.filtered_epsilon(groups, delta, order, ceiling),
            spent(order, *cases),
        )
        assert value == exact or value >= exact * (1 - 1e-6)
        if (
            float(order).is_integer() or len(cases) == 1
        ):  # a fractional order of the first run may bound others coarsely
            assert value == exact or value <= exact * (1 + HIDDEN)
        assert (
            accountants.total_epsilon(groups, delta, adaptive=True, order=order, ceiling=ceiling)
            == value
        )

    def capacity(order: float) -> float:
        """How many runs like the first one fit."""
        one, two = spent(order, first), spent(order, first, first)
        return (ceiling - (2 * one - two)) / (two - one) if 0 < one < two < math.inf else -math.inf

    best = max(map(capacity, accountants._ORDERS))
    assert capacity(order) >= best * (1 - 0.05) or best == -math.inf


@pytest.mark.parametrize("number", CASES)
@pytest.mark.parametrize("copies", [2, 5])
def test_contract_2_several_examples_are_a_mixture_and_pay_for_the_cap(
    number: int, copies: int
) -> None:
    case = draw(number)
    interval = 1e-3 if case.sigma > 5 else 1e-2
    value = epsilon_of_several(case.plan, [case.group], copies, interval)
    left = case.delta - overflow(case, copies)
    if left < accountants.PLD_SMALLEST_DELTA:
        assert value == math.inf
        return
    exact = composed(several(case.rate, copies), NOBODY, case.sigma, case.steps, left)
    assert at_least(exact) <= value <= at_most(case, exact, interval, copies)
    if case.rate < 1 or case.cap is not None:
        assert accountants.epsilon_group([case.group], left, copies, interval) == pytest.approx(
            value, rel=1e-9
        )
