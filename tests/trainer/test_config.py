"""Recipes and overrides: what is accepted, what is refused and how the refusal reads."""

import json
import math
import tomllib
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from privacy.errors import PrivacyConfigError
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from tests.fuzz.test_fuzz import flat, leaves
from trainer.config.recipe import RunConfig, load_config, to_toml
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
RECIPES = sorted((ROOT / "recipes").glob("*.toml"))
QUICKSTART = ROOT / "recipes" / "quickstart.toml"

MINIMAL = """
name = "small"
[model]
size = "pico"
[data]
shards = "shards/*.tar"
[privacy]
expected_batch_size = 8
noise_multiplier = 1.0
[optimizer]
peak_lr = 1e-3
[train]
num_steps = 10
micro_batch_size = 4
"""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    path = tmp_path / "small.toml"
    path.write_text(MINIMAL)
    return path


def refusal(recipe: Path, *overrides: str) -> str:
    """The one line with which loading is refused."""
    with pytest.raises(ConfigError) as caught:
        load_config(recipe, overrides)
    assert caught.value.exit_code == 2
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_round_trip(path: Path, tmp_path: Path) -> None:
    config = load_config(path)
    written = tmp_path / "config.toml"
    written.write_text(to_toml(config))
    assert load_config(written) == config


def test_round_trip_of_awkward_values(recipe: Path, tmp_path: Path) -> None:
    """Paths hold whatever a file system allows; small and large floats keep all their digits."""
    shards = 'a "quoted"\\ folder\n\t\x7f\u00e4\U0001f600{0..1}.tar'
    tree: dict[str, Any] = tomllib.loads(MINIMAL)
    tree["data"]["shards"] = shards
    tree["model"]["overrides"] = {
        "decoder_depth": 3,
        "qkv_bias": True,
        "mlp_ratio": 2.5,
        "position": "learned",
    }
    tree["privacy"] |= {"target_delta": 4.2918454935622317e-9, "max_grad_norm": 1e11}
    config = RunConfig.model_validate(tree)
    written = tmp_path / "config.toml"
    written.write_text(to_toml(config))
    loaded = load_config(written)
    assert loaded == config
    assert loaded.data.shards == shards
    assert {k: type(v) for k, v in loaded.model.overrides.items()} == {
        "decoder_depth": int,
        "qkv_bias": bool,
        "mlp_ratio": float,
        "position": str,
    }


@pytest.mark.parametrize(
    ("override", "expected"),
    [
        ("train.nmu_steps=4", "unknown key train.nmu_steps"),
        ("seed=1", "unknown key seed"),
        ("train.num_steps=many", "train.num_steps"),
        ("train.num_steps=true", "train.num_steps"),
        ("train.num_steps=0", "train.num_steps"),
        ("optimizer.peak_lr=0", "optimizer.peak_lr"),
        ("optimizer.peak_lr=nan", "optimizer.peak_lr"),
        ("optimizer.betas=[0.9, 1.0]", "optimizer.betas"),
        ("optimizer.name=adagrad", "optimizer.name"),
        ("privacy.max_grad_norm=0", "privacy.max_grad_norm"),
        ("privacy.enabled=1", "privacy.enabled"),
        (
            "privacy.target_epsilonn=8",
            "unknown key privacy.target_epsilonn; did you mean target_epsilon?",
        ),
        ("data.remote.timeout=3", "unknown key data.remote.timeout; did you mean timeout_seconds?"),
        ("trian.num_steps=8", "unknown key trian; did you mean train?"),
        ("model.kind=captionner", "did you mean captioner?"),
        ("privacy.sampling=poison", "did you mean poisson?"),
        ("privacy.target_epsilon=8", "exactly one of noise_multiplier and target_epsilon"),
        ("data.streaming=true", "privacy.enabled = false"),
        ("privacy.max_examples_per_owner=0", "privacy.max_examples_per_owner"),
        ("name=a/b", "name"),
        ("train=5", "train"),
        ("model.overrides.width=[1]", "model.overrides.width"),
    ],
)
def test_refused(recipe: Path, override: str, expected: str) -> None:
    line = refusal(recipe, override)
    assert expected in line and str(recipe) in line


def test_noise_must_be_stated(recipe: Path) -> None:
    recipe.write_text(MINIMAL.replace("noise_multiplier = 1.0\n", ""))
    assert "exactly one of" in refusal(recipe)
    assert load_config(recipe, ["privacy.target_epsilon=8"]).privacy.target_epsilon == 8.0
    assert load_config(recipe, ["privacy.enabled=false"]).privacy.noise_multiplier is None


@pytest.mark.parametrize(
    "override", ["train.num_steps", "=4", ".num_steps=4", "train.=4", "train..num_steps=4", ""]
)
def test_override_syntax(recipe: Path, override: str) -> None:
    assert "section.key=value" in refusal(recipe, override)
    assert "num_steps is no section" in refusal(recipe, "train.num_steps.x=1")


def test_override_values(recipe: Path) -> None:
    config = load_config(
        recipe,
        [
            "train.num_steps=5",
            "optimizer.betas=[0.8, 0.99]",
            "optimizer.peak_lr=2",
            "data.shards=/data/x=1/train-{0..3}.tar",
            "model.overrides.decoder_depth=3",
            "heldout.shards=h.tar",
            "heldout.is_public=true",
        ],
    )
    assert config.train.num_steps == 5, "the last one counts"
    assert config.optimizer.betas == (0.8, 0.99)
    assert isinstance(config.optimizer.peak_lr, float) and config.optimizer.peak_lr == 2.0
    assert config.data.shards == "/data/x=1/train-{0..3}.tar"
    assert config.model.overrides == {"decoder_depth": 3}
    assert config.heldout is not None and config.heldout.is_public is True


def test_no_recipe_and_no_toml(tmp_path: Path) -> None:
    assert "recipes/" in refusal(tmp_path / "absent.toml")
    (tmp_path / "broken.toml").write_text("name = \n")
    assert "is not TOML" in refusal(tmp_path / "broken.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe\x00")
    assert "is not TOML" in refusal(tmp_path / "binary.toml")
    assert str(tmp_path) in refusal(tmp_path)


def test_a_step_at_rate_zero_spends_budget_for_nothing(recipe: Path) -> None:
    line = refusal(recipe, "schedule.warmup_steps=10", "schedule.decay_steps=10")
    assert "decay_steps" in line and "warmup_steps" in line, "a cosine must outlast the warm-up"
    assert "rate 0" in refusal(recipe, "schedule.decay_steps=9")
    assert load_config(recipe, ["schedule.decay_steps=9", "schedule.final_fraction=0.1"])
    assert load_config(recipe, ["schedule.decay_steps=9", "schedule.decay=constant"])
    assert load_config(recipe, ["schedule.decay_steps=10"])
    # `train.num_steps=4` is how launches are tried out, whatever the recipe's warm-up.
    assert load_config(QUICKSTART, ["train.num_steps=4"]).train.num_steps == 4


NUMBERS = [path for path, kind in leaves(RunConfig) if {int, float} & set(flat(kind))]
OF_THE_PLAN = {("privacy", name) for name in ("noise_multiplier", "target_epsilon")}
"""Refused with the rest of the plan, by the one place that knows what they are for."""


@pytest.mark.parametrize("path", NUMBERS, ids=".".join)
@pytest.mark.parametrize("value", [10**23, 1e308, float("inf"), float("nan"), -(10**12)])
def test_no_number_is_without_limits(path: tuple[str, ...], value: float) -> None:
    tree: dict[str, Any] = tomllib.loads(MINIMAL)
    section = tree
    for name in path[:-1]:
        section = section.setdefault(name, {})
    section[path[-1]] = value
    if path == ("model", "overrides") or (path in OF_THE_PLAN and 0 < value < math.inf):
        return
    with pytest.raises(ValidationError, match=path[-1]):
        RunConfig.model_validate(tree)


@pytest.mark.parametrize(
    "numbers",
    [
        {"noise_multiplier": 1e308},
        {"noise_multiplier": 1.0, "max_grad_norm": 1e308},
        {"noise_multiplier": 1.0, "num_steps": 10**13},
        {"noise_multiplier": 1.0, "reserved_attempts": 10**13},
        {"noise_multiplier": 1.0, "num_examples": 10**13},
        {"noise_multiplier": 1.0, "num_steps": 10**8},
        {"noise_multiplier": 0.3, "num_steps": 10**5},
        {
            "target_epsilon": 1e-9,
            "num_examples": 60_000,
            "expected_batch_size": 600,
            "num_steps": 1000,
        },
    ],
)
def test_no_plan_is_without_limits(numbers: dict[str, float]) -> None:
    """In seconds: an epsilon of thousands would take all memory."""
    usual = {"num_examples": 3000, "expected_batch_size": 60, "num_steps": 50, "target_delta": 1e-5}
    with pytest.raises(PrivacyConfigError):
        make_plan(PlanRequest(**usual | numbers))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "name",
    [
        "..",
        ".",
        "",
        "a/b",
        "/",
        "a\\b",
        "a\n",
        "a b",
        "-x",
        "x" * 201,
        "\u202e",
        "\x1b[31m",
        "~",
        "é",
    ],
)
def test_a_run_s_name_is_the_name_of_one_folder(name: str, recipe: Path) -> None:
    """The default run folder is runs/NAME, which must not be another folder, or be shown as another one."""
    recipe.write_text(MINIMAL.replace('"small"', json.dumps(name)))
    assert "name" in refusal(recipe)
    for kept in ("a", "a.b", "v1.0_x-2", "x" * 200, "a..b"):
        recipe.write_text(MINIMAL.replace('"small"', f'"{kept}"'))
        assert load_config(recipe).name == kept
