"""A ledger that states another plan than config.toml next to it has no card, whatever the field."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from privacy.card.run_card import require_plan_of_recipe
from privacy.errors import PrivacyStateRefused
from privacy.ledger.ledger import Ledger
from privacy.plan.numbers import PrivacyPlan, make_plan
from tests.distributed.ranks import ROOT
from tests.e2e.launch import RECIPE
from trainer.config.recipe import RunConfig, load_config, to_toml

NOISE = ("privacy.noise_multiplier=1.0",)
RECIPES: dict[str, tuple[str, ...]] = {
    "plain": NOISE,
    "shuffled": (*NOISE, "privacy.sampling=shuffle"),
    "small noise": ("privacy.noise_multiplier=0.2", "privacy.allow_small_noise=true"),
    "simulated": (*NOISE, "privacy.simulation=true"),
    "not private": (*NOISE, "privacy.enabled=false"),
    "calibrated": ("privacy.target_epsilon=1.0", "train.num_steps=20"),
}


def planned(*overrides: str) -> tuple[RunConfig, PrivacyPlan]:
    """A recipe, and the plan that its ledger states."""
    recipe = (
        "recipes/quickstart.toml" if any("target_epsilon" in one for one in overrides) else RECIPE
    )
    config = load_config(ROOT / recipe, [*overrides])
    return config, make_plan(config.privacy.request(config.train.num_steps, 3000))


@pytest.mark.parametrize("name", RECIPES)
def test_an_honest_run_fits_and_any_changed_field_is_found(
    name: str, tmp_path: Path, no_fsync: None
) -> None:
    config, plan = planned(*RECIPES[name])
    recipe = tomllib.loads(to_toml(config))

    def judge(stated: PrivacyPlan) -> None:
        (tmp_path / "ledger.jsonl").unlink(missing_ok=True)
        fields = {"plan": stated.frozen_fields(), "key_commitment": "ab" * 32}
        Ledger.create(tmp_path / "ledger.jsonl", fields).release()
        require_plan_of_recipe(tmp_path, recipe)

    judge(plan)
    changes: list[dict[str, Any]] = [
        {"noise_multiplier": plan.noise_multiplier * (1 + 1e-9)},
        {"max_grad_norm": 2.0},
        {"num_steps": 3},
        {"expected_batch_size": 12, "cap": None},
        {"target_delta": 1e-4},
        {"reserved_attempts": 7},
        {"enabled": False},
        {"clipping_function": "per_layer"},
    ]
    if name == "calibrated":
        changes[0] = {"noise_multiplier": 1.2 * plan.noise_multiplier}
        changes += [{"target_epsilon": 2.0}]
    elif name == "simulated":
        changes += [{"informal_reasons": ()}]
    elif name == "not private":
        changes = [{"enabled": True, "noise_multiplier": 1.0}]
    for changed in changes:
        with pytest.raises(PrivacyStateRefused, match="one of the two was changed") as refused:
            judge(replace(plan, **changed))
        assert "\n" not in str(refused.value), changed
