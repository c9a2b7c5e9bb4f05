"""A ledger that states another plan than config.toml next to it is found, whatever the field."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest

from privacy.plan import PrivacyPlan, contradiction, make_plan
from tests.distributed.ranks import ROOT
from tests.e2e.launch import RECIPE
from trainer.config.recipe import load_config, to_toml

TINY = ROOT / RECIPE
RECIPES: dict[str, list[str]] = {
    "plain": [],
    "adaptive": ["privacy.clipping_function=adaptive"],
    "adaptive, stated": ["privacy.clipping_function=adaptive", "privacy.unclipped_num_std=3.0"],
    "shuffled": ["privacy.sampling=shuffle"],
    "small noise": ["privacy.noise_multiplier=0.2", "privacy.allow_small_noise=true"],
    "simulated": ["privacy.simulation=true"],
    "not private": ["privacy.enabled=false"],
}


def planned(overrides: list[str]) -> tuple[dict[str, Any], PrivacyPlan]:
    """What config.toml of such a run holds, and the plan that its ledger states."""
    stated = any("noise_multiplier" in one for one in overrides)
    config = load_config(TINY, overrides if stated else ["privacy.noise_multiplier=1.0", *overrides])
    return tomllib.loads(to_toml(config)), make_plan(config.privacy.request(config.train.num_steps, 3000))


@pytest.mark.parametrize("name", RECIPES)
def test_an_honest_run_fits_and_any_changed_field_is_found(name: str) -> None:
    recipe, plan = planned(RECIPES[name])
    assert contradiction(recipe, plan) is None and contradiction({}, plan) is None
    if not plan.enabled:
        assert contradiction(recipe, planned([])[1]) is not None
        return
    changes: list[dict[str, Any]] = [
        {"noise_multiplier": plan.noise_multiplier * 1.5}, {"noise_multiplier": plan.noise_multiplier * (1 + 1e-9)},
        {"max_grad_norm": 2.0}, {"expected_batch_size": 12, "cap": None}, {"num_steps": 3}, {"target_delta": 1e-4},
        {"reserved_attempts": 2}, {"enabled": False, "adaptive_clipping": None},
    ]  # fmt: skip
    if plan.adaptive_clipping is None:
        changes += [{"adaptive_clipping": planned(RECIPES["adaptive"])[1].adaptive_clipping}]
    else:
        changes += [{"adaptive_clipping": None}]
    if name == "adaptive, stated":
        changes += [{"adaptive_clipping": replace(plan.adaptive_clipping, unclipped_num_std=9.0)}]
    if name == "simulated":
        changes += [{"informal_reasons": ()}]
    for changed in changes:
        if name == "small noise" and "adaptive_clipping" in changed and changed["adaptive_clipping"] is None:
            continue
        found = contradiction(recipe, replace(plan, **changed))
        assert found is not None and "\n" not in found, changed


def test_calibrated_noise_is_held_against_its_target() -> None:
    config = load_config(ROOT / "recipes/quickstart.toml", ["train.num_steps=20", "privacy.target_epsilon=1.0"])
    recipe = tomllib.loads(to_toml(config))
    plan = make_plan(config.privacy.request(config.train.num_steps, 3000))
    assert contradiction(recipe, plan) is None
    assert "more than that takes" in str(
        contradiction(recipe, replace(plan, noise_multiplier=1.2 * plan.noise_multiplier))
    )
    assert contradiction(recipe, replace(plan, target_epsilon=2.0)) is not None
