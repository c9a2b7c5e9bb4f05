"""Plans: what is refused, what is charged, and what a ledger freezes of them."""

import dataclasses
import json
import math
from dataclasses import replace
from typing import Any

import pytest
from scipy import stats

from privacy.accounting.accountants import ReleaseGroup, epsilon, epsilon_pld
from privacy.errors import PrivacyConfigError
from privacy.plan.numbers import PrivacyPlan, make_plan, require_equal, usual_cap
from privacy.plan.request import PlanRequest
from privacy.sampling.sampler import sampler_of

BASE = {"num_examples": 3000, "expected_batch_size": 60, "num_steps": 150, "noise_multiplier": 3.0}


def _plan(resume=None, **changes):
    request = PlanRequest(
        **{name: value for name, value in (BASE | changes).items() if value != "left out"}
    )
    return make_plan(request, resume=resume)


def test_defaults_of_the_contract():
    plan = _plan()
    assert plan.target_delta == 1 / 6000
    assert plan.reserved_attempts == 2 and _plan(num_steps=1000).reserved_attempts == 10
    assert plan.cap == 112 == plan.max_batch_size
    assert plan.max_intents == 152
    assert plan.formal_guarantee and plan.reasons == () and plan.warnings == ()
    assert plan.sample_rate == pytest.approx(0.02) and sampler_of(plan).cap == 112
    assert _plan(expected_batch_size=2999).cap == 3000
    assert _plan(cap=None).max_batch_size == 3000


def test_contract_4_the_accountant_is_charged_with_the_slack():
    plan = _plan(sensitivity_slack=1e-3, cap=None)
    assert plan.effective_noise_multiplier == 3.0 / 1.001
    assert plan.epsilon_planned == epsilon_pld(
        [ReleaseGroup(plan.sample_rate, 3.0 / 1.001, 150)], plan.accounted_delta
    )
    assert plan.epsilon_planned < plan.epsilon_with_reserve
    assert plan.release_group(7).count == 7


def test_contract_10_calibration_keeps_the_reserve():
    plan = _plan(
        noise_multiplier="left out",
        target_epsilon=2.0,
        target_delta=1e-5,
        reserved_attempts=20,
        cap=None,
    )
    assert 2.0 - 1e-3 <= plan.epsilon_with_reserve <= 2.0
    assert plan.epsilon_planned < plan.epsilon_with_reserve - 1e-2
    table = plan.epsilon_table()
    assert (
        table.epsilon(150) == plan.epsilon_planned
        and table.epsilon(170) == plan.epsilon_with_reserve
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"expected_batch_size": 3001}, "larger than the data"),
        ({"expected_batch_size": 0}, "expected_batch_size"),
        ({"num_steps": 0}, "num_steps"),
        ({"num_examples": 0}, "num_examples"),
        ({"num_steps": 1.5}, "num_steps"),
        (
            {"noise_multiplier": 0.0, "target_epsilon": 8.0},
            "noise_multiplier = 0 gives no guarantee",
        ),
        ({"target_epsilon": 8.0}, "exactly one"),
        ({"noise_multiplier": "left out"}, "exactly one"),
        ({"noise_multiplier": "left out", "target_epsilon": 0.0}, "target_epsilon"),
        ({"noise_multiplier": -1.0}, "noise_multiplier must be 0 or more, not -1.0"),
        ({"noise_multiplier": float("nan")}, "finite"),
        ({"noise_multiplier": 0.29}, "below 0.3"),
        ({"target_delta": 0.0}, "target_delta"),
        ({"target_delta": 5.0}, "target_delta must be below 1, not 5.0"),
        ({"target_delta": float("nan")}, "finite"),
        ({"max_grad_norm": 0.0}, "max_grad_norm"),
        ({"max_grad_norm": 1e-13}, "max_grad_norm"),
        ({"sensitivity_slack": 2e-3}, "sensitivity_slack"),
        ({"reserved_attempts": -1}, "reserved_attempts"),
        ({"cap": 0}, "cap"),
        ({"sampling": "streamed"}, "sampling must be one of"),
        ({"arithmetic": "certified", "sensitivity_slack": 1e-3}, "sensitivity_slack is 0"),
    ],
)
def test_bad_plans_are_refused_in_one_line(changes, message):
    with pytest.raises(PrivacyConfigError, match=message) as error:
        _plan(**changes)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


def test_warnings():
    assert "above 1/n" in _plan(target_delta=1e-2).warnings[0]
    assert "the truncation costs epsilon" in _plan(cap=70).warnings[0]
    assert _plan(noise_multiplier=0.2, allow_small_noise=True).noise_multiplier == 0.2


@pytest.mark.parametrize(
    ("n", "size", "steps", "cap", "more"),
    [
        (1200, 200, 36, 291, {"target_delta": 1e-5}),
        (10_000, 2000, 120, 2306, {"target_delta": 1e-5, "target_epsilon": 8.0}),
        (1200, 200, 36, 314, {"target_delta": 1e-5, "enabled": False}),
        (233_000_000, 1_310_720, 5708, 1_319_879, {}),
        (50, 50, 5, 50, {}),
    ],
)
def test_contract_2_the_default_cap_follows_delta_steps_and_rate(n, size, steps, cap, more):
    """It is the smallest whose overflow costs less than a thousandth of delta, and never above B + 8 sqrt(B)."""
    asked = {"target_epsilon": 3.0} | more
    plan = make_plan(
        PlanRequest(num_examples=n, expected_batch_size=size, num_steps=steps, **asked),
        resume={"noise_multiplier": 1.5},
    )
    assert plan.cap == cap == min(cap, usual_cap(size), n) and not plan.warnings
    if cap < min(usual_cap(size), n):
        tail = [plan.max_intents * stats.binom.sf(c, n, plan.sample_rate) for c in (cap - 1, cap)]
        allowed = plan.target_delta / (1000 * (1 + math.exp(plan.target_epsilon)))
        assert tail[1] <= allowed < tail[0]


def test_contract_2_a_cap_is_frozen_at_the_opening(monkeypatch):
    """A ledger of another version keeps its cap, and one that no version writes is refused by the comparison that follows."""
    request = PlanRequest(
        num_examples=3000, expected_batch_size=256, num_steps=30, noise_multiplier=2.0
    )
    opened = make_plan(request)
    for cap, kept in (
        (384, 384),
        (opened.cap - 3, opened.cap - 3),
        (385, opened.cap),
        (None, opened.cap),
    ):
        assert make_plan(request, resume={"noise_multiplier": 2.0, "cap": cap}).cap == kept


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"noise_multiplier": 0.0}, "noise multiplier is 0"),
        ({"enabled": False, "noise_multiplier": "left out"}, "disabled"),
        ({"enabled": False, "noise_multiplier": "left out", "target_epsilon": 8.0}, "disabled"),
        ({"enabled": False}, "disabled"),
        ({"sampling": "shuffle"}, "not Poisson"),
        ({"informal_reasons": ("TAN simulation",)}, "TAN simulation"),
    ],
)
def test_contract_11_no_guarantee_no_epsilon(changes, reason):
    plan = _plan(**changes)
    assert not plan.formal_guarantee and reason in plan.reasons[0]
    assert (
        plan.epsilon_planned is None
        and plan.epsilon_with_reserve is None
        and plan.epsilon_table() is None
    )
    assert plan.epsilon_after(3) is None and plan.frozen_fields()["formal_guarantee"] is False


def test_frozen_fields_survive_json_and_name_what_changed():
    plan = _plan(informal_reasons=("a reason",), target_delta=1e-2)
    frozen = json.loads(json.dumps(plan.frozen_fields()))
    assert frozen == plan.frozen_fields()
    again = PrivacyPlan.from_frozen(frozen)
    assert dataclasses.replace(again, warnings=plan.warnings) == plan
    assert int(frozen["sampling_threshold"]) == plan.sampling_threshold
    for name, value in {
        "num_steps": 151,
        "max_grad_norm": 2.0,
        "noise_multiplier": 3.1,
        "cap": None,
    }.items():
        with pytest.raises(PrivacyConfigError, match=f"here: {name} was"):
            require_equal(
                frozen,
                _plan(
                    **{"informal_reasons": ("a reason",), "target_delta": 1e-2, name: value}
                ).frozen_fields()
                | ({"sample_rate": frozen["sample_rate"]}),
                "here",
            )
    with pytest.raises(PrivacyConfigError, match="lacks"):
        PrivacyPlan.from_frozen({})
    with pytest.raises(PrivacyConfigError, match="contradicts"):
        PrivacyPlan.from_frozen(frozen | {"adjacency": "replace_one"})


def test_resume_takes_sigma_from_the_ledger_and_not_from_another_calibration():
    frozen = _plan().frozen_fields() | {"noise_multiplier": 2.5}
    plan = _plan(noise_multiplier="left out", target_epsilon=8.0, resume=frozen)
    assert plan.noise_multiplier == 2.5
    assert (
        _plan(resume=frozen).noise_multiplier == 3.0
    )  # given explicitly: the comparison will refuse it


def test_contract_7_the_tail_of_noise_of_version_0_1_is_charged_in_delta_and_no_other():
    plan = _plan(noise_multiplier=1.0, target_delta=1e-13, cap=None)
    assert plan.noise_tail_delta == 0 and plan.frozen_fields()["noise_kind"] == "rounded"
    old = PrivacyPlan.from_frozen(
        {k: v for k, v in plan.frozen_fields().items() if k != "noise_kind"}
    )
    assert "noise_kind" not in old.frozen_fields() and old != plan
    assert 0 < old.noise_tail_delta < 1e-13 and old.accounted_delta == 1e-13 - old.noise_tail_delta
    assert old.epsilon_planned == epsilon([old.release_group(150)], old.accounted_delta)
    assert replace(_plan(noise_multiplier=0.0), noise_kind=None).noise_tail_delta == 0
    with pytest.raises(PrivacyConfigError, match="noise_kind must be"):
        PrivacyPlan.from_frozen(plan.frozen_fields() | {"noise_kind": "doubles"})
    # A run that is there keeps its kind, so that it can be shown and ended.
    assert _plan(noise_multiplier=1.0, resume=old.frozen_fields()).noise_kind is None


def test_shuffled_data_claim_nothing_and_meet_no_target():
    plan = _plan(sampling="shuffle", num_steps=150)
    assert not plan.formal_guarantee and plan.reasons == ("sampling is 'shuffle', not Poisson",)
    assert (
        plan.cap is None
        and plan.max_batch_size == 60
        and plan.epsilon_planned is plan.epsilon_table() is None
    )
    assert PrivacyPlan.from_frozen(json.loads(json.dumps(plan.frozen_fields()))) == plan
    with pytest.raises(PrivacyConfigError, match="shuffled data meet no target_epsilon"):
        _plan(sampling="shuffle", noise_multiplier="left out", target_epsilon=2.0)


# Certified arithmetic: accounted with sigma itself, frozen in the ledger, and refused where it cannot hold

DPCAP = {
    "num_examples": 233_000_000,
    "expected_batch_size": 1_310_720,
    "num_steps": 5708,
    "noise_multiplier": 0.728,
    "target_delta": 4.2918e-9,
    "reserved_attempts": 0,
}


def certified(**changed: Any) -> PrivacyPlan:
    return make_plan(PlanRequest(**({**BASE, "arithmetic": "certified"} | changed)))


@pytest.mark.parametrize("cap", [None, pytest.param("default", marks=pytest.mark.full)])
def test_epsilon_at_the_dp_cap_point_is_that_of_the_continuous_gaussian(cap: Any) -> None:
    own = certified(**DPCAP, cap=cap)
    assert own.effective_noise_multiplier == 0.728 and own.accounted_delta == 4.2918e-9
    continuous = ReleaseGroup(own.sample_rate, 0.728, 5708, 233_000_000, own.cap)
    assert own.epsilon_planned == epsilon_pld([continuous], 4.2918e-9)
    assert own.lattice is not None and own.lattice.target(1 << 30) > 0.9999


def test_arithmetic_and_lattice_are_frozen_with_the_plan() -> None:
    own = certified(max_grad_norm=0.3)
    frozen = own.frozen_fields()
    assert (
        frozen["arithmetic"] == "certified"
        and frozen["lattice_exponent"] == 33
        and frozen["sensitivity_slack"] == 0
    )
    assert PrivacyPlan.from_frozen(frozen) == own
    for changed in (
        {"lattice_exponent": 32},
        {"arithmetic": "floating"},
        {"sensitivity_slack": 1e-3},
    ):
        with pytest.raises(PrivacyConfigError):
            PrivacyPlan.from_frozen(frozen | changed)
    with pytest.raises(PrivacyConfigError, match="arithmetic was 'certified'"):
        require_equal(
            frozen, certified(max_grad_norm=0.3, arithmetic="floating").frozen_fields(), "ledger"
        )
