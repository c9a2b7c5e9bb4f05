"""An option has one home: what is planted there is seen by recipe, plan, ledger, card and planner, and refused by verify.py."""

import io
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from privacy import verify
from privacy.card.render import to_markdown
from privacy.clipping.clip_factors import function_of
from privacy.errors import ConfigError, PrivacyConfigError
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.options import OPTIONS, OTHER_EXCLUSIONS, Clipping
from tests.privacy.cards import privacy_card
from trainer.config.recipe import load_config, to_toml
from trainer.planner.privacy import summarise
from trainer.planner.tables import privacy_table

TINY = Path(__file__).parents[2] / "recipes/tiny.toml"


class Halved(Clipping):
    """By the parity of a parameter's name."""

    name = "halved"
    clipped = "is clipped in two halves"
    excludes = {"simulation = true": "halves are not simulated"}  # noqa: RUF012

    def group_of(self, parameter: str) -> str:
        return str(len(parameter) % 2)

    def frozen(self, plan: PrivacyPlan) -> dict[str, Any]:
        return {"halves": 2}

    def rows(self, plan: PrivacyPlan) -> list[tuple[str, str]]:
        return [("halves of the parameters", "two")]


def test_a_planted_option_is_seen_everywhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(ConfigError, match="did you mean"):
        load_config(TINY, ["privacy.clipping_function=flatt"])
    with pytest.raises(ConfigError, match=r"privacy\.clipping_function: must be 'flat'"):
        load_config(TINY, ["privacy.clipping_function=halved"])
    monkeypatch.setitem(OPTIONS["clipping_function"], "halved", Halved())
    # Recipe
    config = load_config(TINY, ["privacy.clipping_function=halved"])
    assert 'clipping_function = "halved"' in to_toml(config)
    with pytest.raises(
        ConfigError,
        match='"halved" and simulation = true exclude each other: halves are not simulated',
    ):
        load_config(TINY, ["privacy.clipping_function=halved", "privacy.simulation=true"])
    # Plan
    plan = make_plan(config.privacy.request(config.train.num_steps, 3000))
    frozen = plan.frozen_fields()
    assert (
        frozen["clipping_function"] == "halved"
        and frozen["halves"] == 2
        and PrivacyPlan.from_frozen(frozen) == plan
    )
    assert function_of(Halved())(["a", "bb", "cc"], 1.0).bounds == pytest.approx(
        (0.5**0.5, 0.5**0.5)
    )
    # Ledger, which the verifier refuses until its own table knows the option
    Ledger.create(
        tmp_path / "ledger.jsonl", {"plan": frozen, "key_commitment": "ab" * 32}
    ).release()
    assert read_ledger(tmp_path / "ledger.jsonl").plan == plan
    with pytest.raises(verify.Violated, match="halves"):
        verify.read_ledger(tmp_path / "ledger.jsonl")
    # Card and planner
    page = to_markdown(privacy_card(tmp_path / "ledger.jsonl"))
    assert "gradient over all trainable parameters is clipped in two halves" in page
    assert "| halves of the parameters | two | attested |" in page
    console = Console(file=io.StringIO(), width=200)
    console.print(privacy_table(summarise(plan, print, extras=False)))
    assert "halves of the parameters" in console.file.getvalue()


SETTINGS = {
    "enabled = false": {"enabled": False},
    "noise_multiplier = 0": {"noise_multiplier": 0},
    "target_epsilon": {"target_epsilon": 8},
    "simulation = true": {"simulation": True},
    "clipping_mode": {"clipping_mode": "two_pass"},
    **{one.setting: {kind: name} for kind, named in OPTIONS.items() for name, one in named.items()},
}
"""Setting -> the keys of [privacy] that make it."""
OTHER_SECTIONS = {"train.compile = true": "train.compile=true"}
PAIRS = [
    (one.setting, other)
    for named in OPTIONS.values()
    for one in named.values()
    for other in one.excludes
]
PAIRS += [(one, other) for one, other, _, _ in OTHER_EXCLUSIONS]


@pytest.mark.parametrize(("one", "other"), PAIRS)
def test_two_settings_that_exclude_each_other_are_refused_alike_by_recipe_and_plan(
    one: str, other: str
) -> None:
    if other == "sensitivity_slack above 0":  # no recipe states it; tests/privacy/test_plan.py
        return
    keys = {**SETTINGS.get(one, {}), **SETTINGS.get(other, {})}
    overrides = [f"privacy.{name}={str(value).lower()}" for name, value in keys.items()]
    overrides += [OTHER_SECTIONS[name] for name in (one, other) if name in OTHER_SECTIONS]
    with pytest.raises(ConfigError) as refused:
        load_config(TINY, overrides)
    said = f"{one} and {other} exclude each other: "
    assert said in str(refused.value) and "\n" not in str(refused.value)
    if {"simulation", "clipping_mode"} & keys.keys() or len(keys) < 2:
        return  # the recipe's alone
    request = (
        load_config(TINY, ["privacy.target_delta=1e-5"])
        .privacy.model_copy(update=keys)
        .request(4, 3000)
    )
    with pytest.raises(PrivacyConfigError) as of_the_plan:
        make_plan(request)
    assert said in str(of_the_plan.value) and str(of_the_plan.value) in str(refused.value)
