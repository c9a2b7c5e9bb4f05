"""The plan of certified arithmetic: accounted with sigma itself, frozen in the ledger, and refused where it cannot hold."""

from pathlib import Path
from typing import Any

import pytest

from privacy import verify
from privacy.accounting.accountants import ReleaseGroup, epsilon_pld
from privacy.adaptive_clipping import AdaptiveClipping
from privacy.configured_plan import contradiction
from privacy.errors import PrivacyConfigError
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.plan import PrivacyPlan, make_plan, require_equal
from privacy.plan_request import PlanRequest
from privacy.releases import step_releases

DPCAP = {
    "num_examples": 233_000_000, "expected_batch_size": 1_310_720, "num_steps": 5708, "noise_multiplier": 0.728,
    "target_delta": 4.2918e-9, "reserved_attempts": 0,
}  # fmt: skip
SMALL = {"num_examples": 3000, "expected_batch_size": 60, "num_steps": 150, "noise_multiplier": 3.0}


def plan(**changed: Any) -> PrivacyPlan:
    return make_plan(PlanRequest(**({**SMALL, "arithmetic": "certified"} | changed)))


@pytest.mark.parametrize("cap", [None, pytest.param("default", marks=pytest.mark.full)])
def test_epsilon_at_the_dp_cap_point_is_that_of_the_continuous_gaussian(cap: Any) -> None:
    own = plan(**DPCAP, cap=cap)
    assert own.effective_noise_multiplier == 0.728 and own.accounted_delta == 4.2918e-9
    continuous = ReleaseGroup(own.sample_rate, 0.728, 5708, 233_000_000, own.cap)
    assert own.epsilon_planned == epsilon_pld([continuous], 4.2918e-9)
    assert own.lattice is not None and own.lattice.target(1 << 30) > 0.9999


def test_arithmetic_and_lattice_are_frozen_with_the_plan() -> None:
    own = plan(max_grad_norm=0.3)
    frozen = own.frozen_fields()
    assert frozen["arithmetic"] == "certified" and frozen["lattice_exponent"] == 33 and frozen["sensitivity_slack"] == 0
    assert PrivacyPlan.from_frozen(frozen) == own
    for changed in ({"lattice_exponent": 32}, {"arithmetic": "floating"}, {"sensitivity_slack": 1e-3}):
        with pytest.raises(PrivacyConfigError):
            PrivacyPlan.from_frozen(frozen | changed)
    with pytest.raises(PrivacyConfigError, match="arithmetic was 'certified'"):
        require_equal(frozen, plan(max_grad_norm=0.3, arithmetic="floating").frozen_fields(), "ledger")
    assert "privacy.arithmetic" in (contradiction({"privacy": {"arithmetic": "floating"}}, own) or "")


@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ({"arithmetic": "exact"}, "arithmetic must be one of floating, certified"),
        ({"sensitivity_slack": 1e-3}, "sensitivity_slack is 0"),
        ({"noise_multiplier": 0.0}, "for runs with noise"),
        ({"enabled": False}, "for runs with noise"),
        ({"adaptive_clipping": AdaptiveClipping(0.5, 0.2, 6.0)}, "constant C"),
    ],
)
def test_what_cannot_be_certified_is_refused(changed: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacyConfigError, match=message):
        plan(**changed)


def test_the_verifier_recomputes_epsilon_with_sigma_itself(tmp_path: Path) -> None:
    own = plan(num_steps=6, cap=None)
    fields = {"plan": own.frozen_fields(), "key_commitment": "0" * 64}
    with Ledger.create(tmp_path / "ledger.jsonl", fields) as ledger:
        ledger.start_session({})
        for step in range(1, 6):
            ledger.intent(step, 0, step_releases(own.noise_multiplier, own.max_grad_norm, None))
            ledger.done(step, 0)
    epsilon = read_ledger(tmp_path / "ledger.jsonl").epsilon()
    assert epsilon == epsilon_pld([ReleaseGroup(own.sample_rate, 3.0, 5)], own.target_delta)
    read = verify.read_ledger(tmp_path / "ledger.jsonl")
    assert verify.epsilon(read.groups(), own.target_delta) == pytest.approx(epsilon, rel=1e-9)
