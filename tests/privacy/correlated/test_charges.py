"""What correlated noise is charged with, against independent accountants, dense matrices and the published table."""

import math
from dataclasses import replace

import numpy as np
import pytest

from privacy.accounting import accountants as accounting
from privacy.accounting import noise_tail
from privacy.accounting.accountants import ReleaseGroup
from privacy.correlated.workload import Workload, optimised, running_sums_error
from privacy.errors import PrivacyConfigError
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest

DPCAP = PlanRequest(
    num_examples=233_000_000, expected_batch_size=1_310_720, num_steps=5708, target_delta=1 / 233e6,
    target_epsilon=8.0, cap=None, reserved_attempts=0,
)  # fmt: skip
VIP = replace(DPCAP, expected_batch_size=98_304, num_steps=6000)
SMALL = PlanRequest(
    num_examples=10_000, expected_batch_size=1000, num_steps=100, target_delta=1e-5, target_epsilon=8.0, cap=None,
    reserved_attempts=0,
)  # fmt: skip
TABLE = {
    "dpcap": (DPCAP, [0.708, 0.813, 0.970, 1.206, 1.559, 2.079, 2.819, 3.805],
              [1, 0.857, 0.764, 0.712, 0.689, 0.687, 0.700, 0.717], [1, 0.814, 0.690, 0.614, 0.574, 0.565, 0.582, 0.618]),
    "vip": (VIP, [0.451, 0.475, 0.503, 0.536, 0.577, 0.628, 0.694, 0.781],
            [1, 0.784, 0.622, 0.496, 0.400, 0.325, 0.270, 0.231], [1, 0.746, 0.562, 0.428, 0.333, 0.267, 0.224, 0.198]),
}  # fmt: skip
"""The request, and at 1, 2, 4, ... bands sigma, the error ratio, and the error ratio with optimised coefficients."""
WITHIN = 5e-3


def fixed(request: PlanRequest, sigma: float, **changes: object) -> PrivacyPlan:
    return make_plan(replace(request, noise_multiplier=sigma, target_epsilon=None, **changes))


@pytest.mark.parametrize(("name", "index"), [("dpcap", 5), pytest.param("vip", 7, marks=pytest.mark.full)])
def test_points_of_the_table(name: str, index: int) -> None:
    """Half a percent more noise than the table's is enough for epsilon 8, and half a percent less is not."""
    request, sigmas, *_ = TABLE[name]
    for factor, enough in ((1 + WITHIN, True), (1 - WITHIN, False)):
        plan = fixed(request, factor * sigmas[index], bands=2**index)
        assert (accounting.epsilon_pld([plan.release_group(plan.num_steps)], plan.accounted_delta) <= 8) is enough


@pytest.mark.full
@pytest.mark.parametrize("name", TABLE)
def test_the_whole_table(name: str) -> None:
    request, sigmas, ratios, optimised_ratios = TABLE[name]
    plans = [make_plan(replace(request, bands=2**k, cap=None)) for k in range(8)]
    assert [plan.noise_multiplier for plan in plans] == pytest.approx(sigmas, rel=WITHIN)
    steps, workload = request.num_steps, Workload([1.0] * request.num_steps)
    errors = [plan.noise_multiplier * running_sums_error(plan.noise_strategy, steps) for plan in plans]
    assert [error / errors[0] for error in errors] == pytest.approx(ratios, rel=WITHIN)
    errors = [plan.noise_multiplier * workload.error(optimised(workload, plan.bands)) for plan in plans]
    assert [error / errors[0] for error in errors] == pytest.approx(optimised_ratios, rel=WITHIN)


# (n, B, T, b, sigma)
POINTS = [
    (10_000, 1000, 100, 4, 1.6), (10_000, 1000, 100, 8, 2.2), (233_000_000, 1_310_720, 5708, 32, 2.079),
    (233_000_000, 98_304, 6000, 128, 0.781), (50_000, 500, 1000, 3, 1.0), (50_000, 500, 1000, 100, 4.0),
    (3000, 60, 151, 50, 5.0), (1_000_000, 4096, 2441, 16, 0.9), (60_000, 600, 77, 7, 0.8), (2_000_000, 98_304, 6000, 20, 8.0),
]  # fmt: skip


@pytest.mark.parametrize(
    "point", [p if i in (0, 8) else pytest.param(p, marks=pytest.mark.full) for i, p in enumerate(POINTS)], ids=str
)
def test_contract_10_two_other_accountants_agree(point: tuple[int, int, int, int, float]) -> None:
    """PRV and RDP, asked about ceil(T / b) participations at rate b B / n, which is computed here and not by the plan."""
    n, batch, steps, bands, sigma = point
    plan = make_plan(
        PlanRequest(
            num_examples=n, expected_batch_size=batch, num_steps=steps, noise_multiplier=sigma, bands=bands, cap=None,
            target_delta=1e-6,
        )
    )  # fmt: skip
    direct = [ReleaseGroup(bands * batch / n, sigma, math.ceil(steps / bands))]
    lower, _, upper = accounting.epsilon_prv(direct, 1e-6)
    assert plan.epsilon_planned is not None
    assert lower <= plan.epsilon_planned <= min(upper * 1.002, accounting.epsilon_rdp(direct, 1e-6))


@pytest.mark.parametrize("cap", ["default", None])
def test_one_band_is_charged_as_independent_noise_to_the_last_digit(cap: str | None) -> None:
    request = replace(SMALL, noise_multiplier=2.0, target_epsilon=None, cap=cap, sensitivity_slack=1e-3)
    plan = make_plan(replace(request, bands=1))
    assert plan == make_plan(request)
    for count in (1, 99, 102):
        assert plan.release_group(count) == ReleaseGroup(plan.sample_rate, 2.0 / 1.001, count, 10_000, plan.cap)
    edge = noise_tail.noise_tail_delta(2.0 / 1.001, plan.sample_rate * plan.max_intents)
    assert plan.noise_tail_delta == pytest.approx(edge, rel=1e-6)  # with the cut of the batches
    assert "correlated" not in plan.frozen_fields()


@pytest.mark.parametrize("bands", [1, 2, 3, 7, 50])
def test_no_group_has_more_participations_than_are_charged(bands: int) -> None:
    """Groups take turns by attempts, whatever is lost; and groups of examples are no larger than is charged."""
    plan = fixed(SMALL, 8.0, bands=min(bands, 10), reserved_attempts=30)
    for intents in range(131):
        turns = np.bincount(np.arange(intents) % plan.bands, minlength=plan.bands)
        assert plan.release_group(intents).count == plan.participations(intents) == turns.max()
    sizes = np.bincount(np.arange(plan.num_examples) % plan.bands)
    assert sizes.max() == plan.group_size == plan.release_group(1).num_examples
    # The coins' rate, rounded up, is no less than b B / n to within one coin in 2^64.
    exact = plan.bands * plan.expected_batch_size * 2**64 // plan.num_examples
    assert int(plan.sample_rate * 2**64) >= exact


def test_truncation_is_charged_for_every_participation_of_the_largest_group() -> None:
    """A cap near B costs; where groups differ in size the smaller one could cost more, and such a plan is refused."""
    plan = fixed(SMALL, 4.0, bands=4, cap=1050)
    capped, free = plan.release_group(100), plan.release_group(100).without_cap()
    assert (capped.num_examples, capped.cap, capped.count) == (2500, 1050, 25)
    worst = accounting.epsilon_pld([capped], 1e-5, accounting.COARSE_INTERVAL)
    assert worst > accounting.epsilon_pld([free], 1e-5, accounting.COARSE_INTERVAL) + 0.01
    with pytest.raises(PrivacyConfigError, match="3 groups of unequal size"):
        fixed(SMALL, 4.0, bands=3, cap=1050)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"bands": 0}, "bands must be greater than or equal to 1"),
        ({"bands": -3}, "bands must be greater than or equal to 1"),
        ({"bands": 2.0}, "bands must be a valid integer"),
        ({"bands": True}, "bands must be a valid integer"),
        ({"bands": 11}, "take 10 bands or fewer"),
        ({"bands": 8, "num_steps": 7}, "more than the 7 steps"),
        ({"bands": 2, "sampling": "shuffle"}, 'sampling = "shuffle" exclude each other'),
        ({"bands": 2, "arithmetic": "certified"}, 'arithmetic = "certified" exclude each other'),
    ],
)
def test_bands_that_cannot_be_are_refused_in_one_line(changes: dict[str, object], words: str) -> None:
    with pytest.raises(PrivacyConfigError, match=words) as refused:
        fixed(SMALL, 4.0, **changes)
    assert "\n" not in str(refused.value)


def test_several_examples_are_charged_by_group_privacy() -> None:
    """Never less than one release of k times the sensitivity, the exact answer where all are always drawn."""
    exact = accounting.epsilon_gaussian([ReleaseGroup(1.0, 10.0 / 5, 20)], 1e-5)
    assert exact <= accounting.epsilon_any_group([ReleaseGroup(1.0, 10.0, 20)], 1e-5, 5) < 30 * exact
    group = [ReleaseGroup(0.3, 4.0, 20)]
    assert accounting.epsilon_any_group(group, 1e-5, 10_000) == math.inf  # no delta that a double holds is small enough
    assert accounting.epsilon_any_group([], 1e-5, 5) == 0.0
    assert accounting.epsilon_any_group(group, 1e-5, 2) > accounting.epsilon_group(group, 1e-5, 2, 1e-2)


def test_contract_7_the_tail_of_correlated_noise_counts_the_coordinates_of_all_its_rows(monkeypatch) -> None:
    """A participation moves b d coordinates of fresh noise by a vector of norm at most 1."""
    once = noise_tail.noise_tail_delta(1.0, 5.0, rows=16)
    monkeypatch.setattr(noise_tail, "MOST_PARAMETERS", 16 * noise_tail.MOST_PARAMETERS)
    assert once == noise_tail.noise_tail_delta(1.0, 5.0)
