"""Hours with failures against runs that are simulated step by step; the price; a reserve that would not last."""

import math
from typing import Any

import numpy as np
import pytest

from privacy.plan.numbers import make_plan
from tests.processes import ROOT
from trainer.config.recipe import load_config
from trainer.planner.resources import CHECKPOINT_BYTES_PER_SECOND, RESTART_SECONDS, allocation

STEPS, STEP, RANKS = 1000, 60.0, 128


def planned(
    mtbf_hours: float, every: int, *, reserve: int = 500, price: float | None = None
) -> dict[str, Any]:
    """What is said of a run of 1,000 minutes on 128 GPUs whose checkpoints take a minute."""
    config = load_config(
        ROOT / "recipes/tiny.toml",
        [
            f"train.num_steps={STEPS}",
            f"train.checkpoint_every={every}",
            f"privacy.reserved_attempts={reserve}",
        ],
    )
    resources = {
        "time": {"seconds_per_step": STEP},
        "world_size": RANKS,
        "notes": [],
        "parameters": int(60 * CHECKPOINT_BYTES_PER_SECOND / 12),
        "frozen_parameters": 0,
    }
    found = allocation(
        resources, config, make_plan(config.privacy.request(STEPS, 3000)), price, mtbf_hours
    )
    return {**found, "notes": resources["notes"]}


def simulated(between: float, every: int, rng: np.random.Generator) -> tuple[float, int, int]:
    """Seconds, failures and steps taken again."""
    clock = again = failures = saved = 0
    fails_at, step = rng.exponential(between), 0
    while step < STEPS:
        clock += STEP + (60 if (step + 1) % every == 0 else 0)
        step += 1
        if clock >= fails_at:
            again, failures, step = again + step - saved, failures + 1, saved
            clock = fails_at + RESTART_SECONDS
            fails_at = clock + rng.exponential(between)
        elif step % every == 0:
            saved = step
    return clock, failures, again


@pytest.mark.parametrize(("mtbf_hours", "every"), [(20.0, 20), (20.0, 60), (4.0, 10)])
def test_hours_and_repeated_steps_are_those_of_simulated_runs(
    mtbf_hours: float, every: int
) -> None:
    found = planned(mtbf_hours * RANKS, every)
    rng = np.random.default_rng(0)
    seconds, failures, again = np.mean(
        [simulated(3600 * mtbf_hours, every, rng) for _ in range(300)], axis=0
    )
    assert found["hours_with_failures"] == pytest.approx(seconds / 3600, rel=0.04)
    assert found["failures"] == pytest.approx(failures, rel=0.15)
    assert found["repeated_steps"] == pytest.approx(again, rel=0.15)
    assert found["best_checkpoint_every"] == pytest.approx(
        math.sqrt(2 * 60 * 3600 * mtbf_hours) / STEP, abs=1
    )


def test_price_and_a_reserve_that_would_not_last() -> None:
    found = planned(50_000, 50, price=2.5)
    assert (
        found["price"] == pytest.approx(2.5 * found["gpu_hours_with_failures"])
        and found["notes"] == []
    )
    assert found["gpu_hours_with_failures"] == pytest.approx(RANKS * STEPS / 60, rel=0.03)
    (note,) = planned(20 * RANKS, 60, reserve=9)["notes"]
    assert "the reserve is 9 attempts" in note and "privacy.reserved_attempts" in note
    (note,) = planned(0.5 * RANKS, 60)["notes"]
    assert "sooner than it reaches its next checkpoint" in note
