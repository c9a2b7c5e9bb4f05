"""Adaptive clipping: the two releases of a step are one Gaussian, C stays in its range, ledger and audit know both."""

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import dp_accounting
import numpy as np
import pytest
from dp_accounting import dp_event
from dp_accounting.pld import PLDAccountant
from dp_accounting.rdp import RdpAccountant
from hypothesis import given
from hypothesis import strategies as st

from privacy import verify
from privacy.adaptive_clipping import RANGE, AdaptiveClipping
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import noise_multiplier_of
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import GRADIENT, UNCLIPPED, Release, step_releases
from tests.privacy.ledger_epsilon import recompute

ADAPTIVE = AdaptiveClipping(target_unclipped_quantile=0.5, clipbound_learning_rate=0.2, unclipped_num_std=6.0)
BASE = {
    "num_examples": 2000, "expected_batch_size": 60, "num_steps": 6, "noise_multiplier": 4.0,
    "target_delta": 1e-5, "sensitivity_slack": 1e-3, "max_grad_norm": 0.7,
}  # fmt: skip


def plan(**changed: Any) -> PrivacyPlan:
    return make_plan(PlanRequest(**BASE | {"adaptive_clipping": ADAPTIVE} | changed))  # type: ignore[arg-type]


# The mechanism


@given(sigma=st.floats(0.3, 50), ratio=st.floats(1.01, 1e6), bound=st.floats(1e-6, 1e6))
def test_both_releases_together_are_one_gaussian_of_the_planned_noise(sigma: float, ratio: float, bound: float) -> None:
    adaptive = AdaptiveClipping(0.5, 0.2, sigma / 2 * ratio)
    releases = step_releases(sigma, bound, adaptive)
    assert [r["name"] for r in releases] == [GRADIENT, UNCLIPPED]
    inverse_squared = sum((r["sensitivity"] / r["std"]) ** 2 for r in releases)
    assert inverse_squared == pytest.approx(sigma**-2, rel=1e-12)
    assert noise_multiplier_of(json.loads(json.dumps(releases))) >= sigma * (1 - 1e-9)
    assert releases[0]["std"] > sigma * bound


def test_epsilon_is_that_of_the_plain_mechanism_by_dp_accounting() -> None:
    """dp-accounting composes the two releases by itself: by RDP on a Poisson sample, by PLD without sampling."""
    own = plan(sensitivity_slack=0.0, cap=None, num_steps=40)
    gaussians = [
        dp_event.GaussianDpEvent(r["std"] / r["sensitivity"])
        for r in step_releases(own.noise_multiplier, 0.3, ADAPTIVE)
    ]
    plain = dp_event.GaussianDpEvent(own.noise_multiplier)
    found = []
    for one in (dp_event.ComposedDpEvent(gaussians), plain):
        rdp = RdpAccountant(neighboring_relation=dp_accounting.NeighboringRelation.ADD_OR_REMOVE_ONE)
        rdp.compose(dp_event.PoissonSampledDpEvent(own.sample_rate, one), own.num_steps)
        pld = PLDAccountant(dp_accounting.NeighboringRelation.REPLACE_SPECIAL)
        pld.compose(one, own.num_steps)
        found.append([rdp.get_epsilon(1e-5), pld.get_epsilon(1e-5)])
    assert found[0] == pytest.approx(found[1], rel=1e-3)
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-9)
    without = plan(sensitivity_slack=0.0, cap=None, num_steps=40, adaptive_clipping=None)
    assert own.epsilon_planned == without.epsilon_planned


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
    bound = adaptive.next_bound(initial * factor, adaptive.noised_fraction(noised, batch_size), initial)
    assert initial / RANGE <= bound <= initial * RANGE


def test_the_update_is_the_papers() -> None:
    fraction = ADAPTIVE.noised_fraction(-12.0, 60)
    assert fraction == pytest.approx(0.3)
    assert ADAPTIVE.next_bound(0.7, fraction, 0.7) == pytest.approx(0.7 * math.exp(-0.2 * (0.3 - 0.5)), rel=1e-12)


# The plan


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"adaptive_clipping": AdaptiveClipping(0.5, 0.2, 2.0)}, "too little noise on the count"),
        ({"adaptive_clipping": AdaptiveClipping(0.5, 0.2, 0.1)}, "too little noise on the count"),
        ({"max_grad_norm": 1e10}, "adaptive clipping starts at"),
    ],
)
def test_infeasible_constants_are_refused_in_one_line(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(PrivacyConfigError, match=message) as error:
        plan(**changes)
    assert error.value.exit_code == 2 and "\n" not in str(error.value)


@pytest.mark.parametrize(
    "constants", [(-0.1, 0.2, 3.0), (1.1, 0.2, 3.0), (0.5, 0.0, 3.0), (0.5, 0.2, 0.0), (0.5, 0.2, math.inf)]
)
def test_senseless_constants_are_refused(constants: tuple[float, float, float]) -> None:
    with pytest.raises(PrivacyConfigError):
        AdaptiveClipping(*constants)


def test_feasibility_is_judged_by_the_calibrated_noise() -> None:
    loud = plan(noise_multiplier=None, target_epsilon=0.05, adaptive_clipping=None).noise_multiplier
    with pytest.raises(PrivacyConfigError, match="too little noise on the count"):
        plan(noise_multiplier=None, target_epsilon=0.05, adaptive_clipping=AdaptiveClipping(0.5, 0.2, 0.4 * loud))
    own = plan(noise_multiplier=None, target_epsilon=0.05, adaptive_clipping=AdaptiveClipping(0.5, 0.2, 0.6 * loud))
    assert own.noise_multiplier == loud


# Ledger, audit, card


def bounds_and_fractions(steps: int) -> list[tuple[float, float]]:
    rng, bound, found = np.random.default_rng(1), 0.7, []
    for _ in range(steps):
        fraction = ADAPTIVE.noised_fraction(float(10 * rng.standard_normal()), 60)
        found.append((bound, fraction))
        bound = ADAPTIVE.next_bound(bound, fraction, 0.7)
    return found


def write(
    path: Path, own: PrivacyPlan, releases: list[list[Release]], fractions: Sequence[float | None] | None = None
) -> Path:
    """A ledger whose steps state these fractions; its norms are too large to say anything."""
    fields = {"plan": own.frozen_fields(), "key_commitment": "0" * 64, "noised_coordinates": 1}
    with Ledger.create(path, fields) as ledger:
        ledger.start_session({})
        for step, released in enumerate(releases, start=1):
            ledger.intent(step, 0, released)
            stated = {} if fractions is None else {"noised_fraction": fractions[step - 1]}
            ledger.done(step, 0, noised_norm=1e3, **stated)
    return path


Lines = list[dict[str, Any]]


def line(step: int, bound: float, fraction: float) -> dict[str, Any]:
    """A line of metrics.jsonl."""
    return {"step": step, "privacy/clipping_bound": bound, "privacy/noised_unclipped_fraction": fraction}


def is_wrong(ledger: Path, published: Lines) -> bool:
    """As verify.py finds it, which is asked by `audit.py ledger` too."""
    (ledger.parent / "metrics.jsonl").write_text("".join(json.dumps(entry) + "\n" for entry in published))
    try:
        judged = verify.Folder(ledger.parent, verify.read_ledger(ledger), behind=[])
        verify.check_noise(judged)
        verify.check_metrics(judged)
    except verify.Violated:
        return True
    return False


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Lines]:
    path, moves = tmp_path_factory.mktemp("adaptive") / "ledger.jsonl", bounds_and_fractions(5)
    write(path, plan(), [step_releases(4.0, bound, ADAPTIVE) for bound, _ in moves], [one for _, one in moves])
    return path, [line(step, *move) for step, move in enumerate(moves, start=1)]


def test_the_ledger_lists_both_releases_and_the_claim_is_that_of_sigma(trained: tuple[Path, Lines]) -> None:
    path, claims = trained
    own = plan()
    intents = [r for r in map(json.loads, path.read_text().splitlines()) if r["type"] == "intent"]
    for intent, published in zip(intents, claims, strict=True):
        bound = published["privacy/clipping_bound"]
        gradient, count = intent["releases"]
        assert gradient == {
            "name": GRADIENT, "sensitivity": bound, "std": ADAPTIVE.gradient_noise_multiplier(4.0) * bound
        }  # fmt: skip
        assert count == {"name": UNCLIPPED, "sensitivity": 0.5, "std": 6.0}
    with Ledger.open(path) as ledger:
        assert len(ledger.state.charged_groups()) == 1, "rounding must not make a group of every step"
        assert ledger.state.epsilon() == own.epsilon_after(5)
        assert recompute(path)[1] == pytest.approx(ledger.state.epsilon(), rel=1e-6)
    assert not is_wrong(path, claims)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        (lambda gradient, count: [gradient], "plan releases gradient and unclipped_count"),
        (lambda gradient, count: [count, gradient], "plan releases gradient and unclipped_count"),
        (
            lambda gradient, count: [gradient | {"std": gradient["std"] * 1.1}, count | {"std": 5.9}],
            "where the plan has",
        ),
        (lambda gradient, count: [gradient, count | {"sensitivity": 0.25}], "plan has 6 for 0.5"),
        (
            lambda gradient, count: [gradient | {"std": 4.0 * gradient["sensitivity"]}, count],
            "gradient states noise of 2.8",
        ),
        (lambda gradient, count: [{"name": GRADIENT, "std": 1e9, "sensitivity": 1e5}, count], "outside of its range"),
    ],
)
def test_an_intent_without_the_count_or_with_other_noise_cannot_be_written(
    tmp_path: Path, wrong: Any, message: str
) -> None:
    gradient, count = step_releases(4.0, 0.7, ADAPTIVE)
    with pytest.raises(PrivacyStateRefused, match=message):
        write(tmp_path / "ledger.jsonl", plan(), [wrong(gradient, count)])


def test_a_count_that_no_intent_released_is_found(tmp_path: Path) -> None:
    """The run adapts C, its plan and its intents say nothing of it: the published metrics betray it."""
    own = plan(adaptive_clipping=None)
    path = write(tmp_path / "ledger.jsonl", own, [step_releases(own.noise_multiplier, own.max_grad_norm, None)] * 2)
    assert is_wrong(path, [line(1, 0.7, 0.4)]) and not is_wrong(path, [])


def test_a_bound_that_does_not_follow_from_what_was_released_is_found(
    trained: tuple[Path, Lines], tmp_path: Path
) -> None:
    path, claims = trained
    (_, bound, fraction), moves = claims[1].values(), bounds_and_fractions(5)
    assert is_wrong(path, [claims[0], line(2, bound * 1.001, fraction), *claims[2:]])
    assert is_wrong(path, [line(1, 0.7, fraction + 0.01), *claims[1:]])
    assert not is_wrong(path, claims[2:])
    releases = [
        step_releases(4.0, bound * (1.001 if step == 3 else 1.0), ADAPTIVE) for step, (bound, _) in enumerate(moves)
    ]
    assert is_wrong(write(tmp_path / "ledger.jsonl", plan(), releases, [one for _, one in moves]), [])


def test_a_first_bound_that_is_not_the_plans_is_found(tmp_path: Path) -> None:
    assert is_wrong(write(tmp_path / "ledger.jsonl", plan(), [step_releases(4.0, 0.9, ADAPTIVE)], [0.5]), [])
