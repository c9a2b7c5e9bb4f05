"""Adaptive clipping: the two releases of a step are one Gaussian, C stays in its range, the ledger knows both."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from privacy import verify
from privacy.adaptive_clipping import RANGE, AdaptiveClipping
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import noise_multiplier_of, read_ledger
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import GRADIENT, UNCLIPPED, Release, step_releases
from tests.privacy.ledger_epsilon import recompute

ADAPTIVE = AdaptiveClipping(
    target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, unclipped_num_std=6.0
)
BASE = {
    "num_examples": 2000,
    "expected_batch_size": 60,
    "num_steps": 6,
    "noise_multiplier": 4.0,
    "target_delta": 1e-5,
    "sensitivity_slack": 1e-3,
    "max_grad_norm": 0.7,
}


def plan(**changed: Any) -> PrivacyPlan:
    return make_plan(PlanRequest(**BASE | {"adaptive_clipping": ADAPTIVE} | changed))  # type: ignore[arg-type]


# The mechanism


@given(sigma=st.floats(0.3, 50), ratio=st.floats(1.01, 1e6), bound=st.floats(1e-6, 1e6))
def test_both_releases_together_are_one_gaussian_of_the_planned_noise(
    sigma: float, ratio: float, bound: float
) -> None:
    adaptive = AdaptiveClipping(0.5, 0.2, sigma / 2 * ratio)
    releases = step_releases(sigma, bound, adaptive)
    assert [r["name"] for r in releases] == [GRADIENT, UNCLIPPED]
    inverse_squared = sum((r["sensitivity"] / r["std"]) ** 2 for r in releases)
    assert inverse_squared == pytest.approx(sigma**-2, rel=1e-12)
    assert noise_multiplier_of(json.loads(json.dumps(releases))) >= sigma * (1 - 1e-9)
    assert releases[0]["std"] > sigma * bound


# C


@given(
    bounds=st.tuples(st.floats(1e-8, 1e8), st.floats(1 / RANGE, RANGE)),
    noised=st.floats(-1e300, 1e300),
    rate=st.floats(1e-6, 1e6),
    batch_size=st.integers(1, 10**7),
)
def test_the_bound_stays_in_its_range_whatever_the_noise(
    bounds: tuple[float, float], noised: float, rate: float, batch_size: int
) -> None:
    initial, factor = bounds
    adaptive = AdaptiveClipping(0.5, rate, 1.0)
    bound = adaptive.next_bound(
        initial * factor, adaptive.noised_fraction(noised, batch_size), initial
    )
    assert initial / RANGE <= bound <= initial * RANGE


def test_the_update_is_the_papers() -> None:
    fraction = ADAPTIVE.noised_fraction(-12.0, 60)
    assert fraction == pytest.approx(0.3)
    assert ADAPTIVE.next_bound(0.7, fraction, 0.7) == pytest.approx(
        0.7 * math.exp(-0.2 * (0.3 - 0.5)), rel=1e-12
    )


# The plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adaptive_clipping": AdaptiveClipping(0.5, 0.2, 2.0)}, "too little noise on the count"),
        ({"adaptive_clipping": AdaptiveClipping(0.5, 0.2, 0.1)}, "too little noise on the count"),
        ({"max_grad_norm": 1e10}, "adaptive clipping starts at"),
    ],
)
def test_infeasible_constants_are_refused_in_one_line(
    changes: dict[str, Any], message: str
) -> None:
    with pytest.raises(PrivacyConfigError, match=message) as error:
        plan(**changes)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "constants",
    [(-0.1, 0.2, 3.0), (1.1, 0.2, 3.0), (0.5, 0.0, 3.0), (0.5, 0.2, 0.0), (0.5, 0.2, math.inf)],
)
def test_senseless_constants_are_refused(constants: tuple[float, float, float]) -> None:
    with pytest.raises(PrivacyConfigError):
        AdaptiveClipping(*constants)


def test_feasibility_is_judged_by_the_calibrated_noise() -> None:
    loud = plan(noise_multiplier=None, target_epsilon=0.05, adaptive_clipping=None).noise_multiplier
    with pytest.raises(PrivacyConfigError, match="too little noise on the count"):
        plan(
            noise_multiplier=None,
            target_epsilon=0.05,
            adaptive_clipping=AdaptiveClipping(0.5, 0.2, 0.4 * loud),
        )
    own = plan(
        noise_multiplier=None,
        target_epsilon=0.05,
        adaptive_clipping=AdaptiveClipping(0.5, 0.2, 0.6 * loud),
    )
    assert own.noise_multiplier == loud


# The ledger


def write(path: Path, own: PrivacyPlan, *releases: list[Release]) -> Path:
    """A ledger of a step for each of the releases; its norms are too large to say anything, and its fractions say 1/2."""
    fields = {"plan": own.frozen_fields(), "key_commitment": "0" * 64, "noised_coordinates": 1}
    with Ledger.create(path, fields) as ledger:
        ledger.start_session({})
        for step, released in enumerate(releases, start=1):
            ledger.intent(step, 0, released)
            ledger.done(step, 0, noised_norm=1e3, noised_fraction=0.5)
    return path


def test_the_claim_of_moving_bounds_is_that_of_sigma(tmp_path: Path) -> None:
    own, bounds = plan(), [0.7 * 1.05**step for step in range(5)]
    path = write(
        tmp_path / "ledger.jsonl", own, *(step_releases(4.0, bound, ADAPTIVE) for bound in bounds)
    )
    state = read_ledger(path)
    assert len(state.charged_groups()) == 1, "rounding must not make a group of every step"
    assert state.epsilon() == own.epsilon_after(5)
    assert recompute(path)[1] == pytest.approx(state.epsilon(), rel=1e-6)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda gradient, count: [gradient], "plan releases gradient and unclipped_count"),
        (lambda gradient, count: [count, gradient], "plan releases gradient and unclipped_count"),
        (lambda gradient, count: [gradient, count | {"std": 5.9}], "where the plan has"),
        (
            lambda gradient, count: [gradient | {"std": 4.0 * 0.7}, count],
            "gradient states noise of 2.8",
        ),
        (
            lambda gradient, count: [{"name": GRADIENT, "std": 1e9, "sensitivity": 1e5}, count],
            "outside of its range",
        ),
    ],
)
def test_an_intent_without_the_count_or_with_other_noise_cannot_be_written(
    tmp_path: Path, wrong: Any, message: str
) -> None:
    with pytest.raises(PrivacyStateRefused, match=message):
        write(tmp_path / "ledger.jsonl", plan(), wrong(*step_releases(4.0, 0.7, ADAPTIVE)))


def test_a_first_bound_that_is_not_the_plans_is_found(tmp_path: Path) -> None:
    with pytest.raises(verify.Violated, match="C does not start at the plan's"):
        verify.read_ledger(
            write(tmp_path / "ledger.jsonl", plan(), step_releases(4.0, 0.9, ADAPTIVE))
        )
