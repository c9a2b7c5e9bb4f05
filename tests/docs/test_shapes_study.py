"""The record of benchmarks/results/shapes/shapes_study.py belongs to the recipes as they are, and says what it is quoted for."""

import json
import math
import tomllib
from typing import Any

import pytest

from benchmarks.results.shapes.shapes_study import RUNS, TEST_SEED, VALIDATION_SEED, beats, markdown
from tests.docs.pages import ROOT
from trainer.config.recipe import load_config

NAME = "benchmarks/results/shapes/2026-11-22-shapes"


@pytest.fixture(scope="module")
def record() -> Any:
    return json.loads((ROOT / f"{NAME}.json").read_text())


def test_record_is_of_these_recipes(record: Any) -> None:
    for label, name in RUNS.items():
        recipes = [record["models"][label]["recipe"], (ROOT / "recipes" / f"{name}.toml").read_text()]
        measured, now = map(tomllib.loads, recipes)
        for recipe in (measured, now):
            del recipe["train"]["micro_batch_size"]  # changes no claim
        assert measured == now
        assert record["models"][label]["step"] == load_config(ROOT / "recipes" / f"{name}.toml").train.num_steps
    assert markdown(record, NAME) == (ROOT / f"{NAME}.md").read_text()


def test_one_captioner_on_the_same_pairs() -> None:
    plain, private = (load_config(ROOT / "recipes" / f"{name}.toml") for name in RUNS.values())
    assert plain.model == private.model
    assert plain.data.model_copy(update={"provenance": private.data.provenance}) == private.data
    assert private.init is None
    assert private.privacy.enabled and private.privacy.target_epsilon == 8.0 and private.privacy.target_delta == 2.5e-5


def test_what_is_claimed(record: Any) -> None:
    models = record["models"]
    assert record["picture_seed"] == TEST_SEED != VALIDATION_SEED
    assert models["epsilon 8"]["formal_guarantee"] and models["epsilon 8"]["epsilon"] <= 8
    assert not models["non-private"]["formal_guarantee"]
    assert all(one["times_chance"] >= 3 for one in models["non-private"]["results"].values())
    for test, one in models["epsilon 8"]["results"].items():
        assert one["accuracy"] == one["right"] / one["tests"]
        assert max(one["p"], one["p_against_untrained"]) < 0.01, test


def test_beats_is_the_hypergeometric_tail() -> None:
    """7 of 10 against 2 of 8 by hand."""
    ways = sum(math.comb(10, k) * math.comb(8, 9 - k) for k in range(7, 10))
    one, other = ({"right": right, "tests": tests} for right, tests in ((7, 10), (2, 8)))
    assert beats(one, other) == pytest.approx(ways / math.comb(18, 9))
