"""The rehearsal's part `budget`, on small plans, and which plans it takes."""

import re
from dataclasses import replace
from pathlib import Path

import pytest

from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from tests.rehearsal import budget
from tests.rehearsal.part import ROOT, Part
from trainer.studies import grid

SMALL = PlanRequest(
    num_examples=1000,
    expected_batch_size=20,
    num_steps=12,
    noise_multiplier=4.0,
    sensitivity_slack=1e-3,
    target_delta=1e-5,
)
TO_ONE = replace(SMALL, noise_multiplier=None, target_epsilon=0.2)


@pytest.mark.full
def test_two_small_plans(tmp_path: Path) -> None:
    part = Part("budget", tmp_path / "budget")
    budget.rehearse(part, {SMALL: ["a plan"], TO_ONE: ["a plan to calibrate", "another plan"]})
    given, calibrated = (stage["measured"] for stage in part.stages)
    assert (
        part.sizes == {"plans": 2}
        and given["sigma"] == 4.0
        and 0.199 <= calibrated["with_reserve"] <= 0.2
    )
    assert given["composed_again"] == pytest.approx(given["with_reserve"], abs=1e-6)


def test_every_private_recipe_and_study_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grid, "_sigma", lambda *_: 2.0)  # calibration takes a minute
    names = {name for given in budget.distinct_plans().values() for name in given}
    private = re.compile(r"^\[privacy\]\n(?!enabled = false)", re.MULTILINE)
    for path in [*ROOT.glob("recipes/*.toml"), *ROOT.glob("studies/recipes/*.toml")]:
        assert (str(path.relative_to(ROOT)) in names) == (
            private.search(path.read_text()) is not None
        ), path
    for path in ROOT.glob("studies/*.toml"):
        assert any(name.startswith(f"{path.relative_to(ROOT)} ") for name in names), path


def test_a_comment_with_another_epsilon_is_found() -> None:
    with pytest.raises(AssertionError):
        budget.account(SMALL, ["recipes/vip_base.toml"])


def test_a_claim_that_is_too_small_is_seen_by_the_second_composition() -> None:
    plan = make_plan(SMALL)
    releases, claim, delta = (
        plan.release_group(plan.max_intents),
        plan.epsilon_with_reserve,
        plan.accounted_delta,
    )
    assert claim is not None
    composed, reached = budget.compose_again(releases, claim, delta)
    assert composed == pytest.approx(claim, rel=1e-9) and reached <= delta * (1 + 1e-6)
    assert budget.compose_again(releases, claim - 1e-3, delta)[1] > delta * (1 + 1e-3)
