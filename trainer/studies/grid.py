"""A study's grid: a TOML file with a base recipe and axes, expanded into points with recipes.

name = "batch_size"
recipe = "recipes/quickstart.toml"       # relative to the project root
seeds = [0, 1, 2]
[base]                                   # overrides of the recipe for all points
train.log_every = 10
[axis.batch]                             # lists of one length go together; several axes are crossed
privacy.expected_batch_size = [64, 256]
train.num_steps = [256, 64]
[axis.start.random]                      # or named variants, each with overrides of its own
[axis.start.synthetic]
init.checkpoint = "runs/synthetic"
"""

import functools
import itertools
import json
import math
import re
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from privacy.card.run_card import read_utility
from privacy.checkpoints.read import MANIFEST
from privacy.files.toml_text import read_toml
from privacy.plan.numbers import make_plan
from trainer.config.recipe import (
    EngineName,
    PrivacySection,
    RunConfig,
    load_config,
    to_toml,
    validate_section,
)
from trainer.config.sections import Section
from trainer.errors import ConfigError

Label = str | int | float | bool
_NAME = r"^[A-Za-z0-9_.-]+$"
_LONGEST_NAME = 150
"""Characters of a point's name, which becomes a file name."""
SECTIONS = frozenset(RunConfig.model_fields)
HELDOUT = "evaluation/heldout.jsonl"
_OF_OTHERS = frozenset({"privacy.tuning", "privacy.fixed_in_advance"})
"""Keys that depend on the other points; a point that began keeps its first values of them."""


class TanSection(Section):
    """Constant sigma / B: every point has the noise of a reference batch, scaled to its own batch.

    Source: Sander et al. 2023, TAN Without a Burn, https://arxiv.org/abs/2210.03403, section 4: the
    same steps, rate and sigma / B predict the run at the reference batch at a fraction of its cost.
    All points but those at the reference batch itself are simulations.
    """

    reference_batch_size: int = Field(ge=1)
    reference_noise_multiplier: float | None = Field(None, gt=0)
    reference_epsilon: float | None = Field(None, gt=0)
    """Calibrates the reference's noise for each point's data and steps; the recipe must then state
    data.num_examples."""

    @model_validator(mode="after")
    def _noise_is_stated(self) -> "TanSection":
        if (self.reference_noise_multiplier is None) == (self.reference_epsilon is None):
            raise ValueError("give exactly one of reference_noise_multiplier and reference_epsilon")
        return self


class ReportSection(Section):
    """The axis that plots show by colour (the first by default), and the x axis of curves."""

    color: str | None = None
    x: Literal["steps", "examples"] = "steps"
    """Steps, or examples seen (expected_batch_size for each step)."""


class StudyConfig(Section):
    """A study's file; `plan_points` checks `axis`."""

    name: str = Field(pattern=_NAME)
    title: str = ""
    recipe: str
    ds_config: str = "ds_configs/zero1.json"
    engine: EngineName = "local"
    seeds: list[int] = Field([0], min_length=1)
    """Seeds of the initial weights.

    Coins and noise differ between any two runs: they come from the operating system.
    """
    base: dict[str, Any] = Field({})
    axis: dict[str, dict[str, Any]] = Field({})
    tan: TanSection | None = None
    report: ReportSection = ReportSection()


@dataclass(frozen=True)
class Point:
    """A run of a study.

    Attributes:
        name: name of its run folder, made of the values.
        labels: axis -> the first key's value, or the variant's name.
        config: the point's recipe.
    """

    name: str
    labels: Mapping[str, Label]
    seed: int
    config: RunConfig


def load_study(path: Path) -> StudyConfig:
    """Reads a study's file.

    Raises:
        ConfigError: missing or malformed file, unknown key, value out of range; one line with file
            and key.
    """
    hint = "give a file as in studies/; to report, the folder that `study.py run` wrote"
    tree = read_toml(path, "study", hint)
    if "privacy" in tree:
        raise ConfigError(
            f"{path} is a recipe, not a study: train it with train.py, or give a file as in "
            "studies/"
        )
    study = validate_section(StudyConfig, tree, f"study {path}")
    if study.report.color is not None and study.report.color not in study.axis:
        raise ConfigError(
            f"study {path}: report.color names no axis: {study.report.color!r}; there are "
            f"{', '.join(study.axis)}"
        )
    return study


def plan_points(study: StudyConfig, source: str, root: Path) -> list[Point]:
    """Returns all points with their recipes: the axes crossed in their order, then the seeds.

    Args:
        source: the study in an error.
        root: the project's root, base of the study's relative paths.

    Raises:
        ConfigError: an axis is neither lists of one length nor named variants, two points would be
            the same run, a point's recipe is wrong, or its runs on private data are not charged
            together.
    """
    base = dotted_keys(study.base, source)
    if "train.seed" in base:
        raise ConfigError(f"{source}: base.train.seed would be overwritten; list it in seeds")
    axes = {}
    for name, table in study.axis.items():
        axes[name] = _steps(name, table, f"{source}: axis.{name}")
    points: dict[str, Point] = {}
    for steps in itertools.product(*axes.values()):
        labels: dict[str, Label] = {}
        values: dict[str, Any] = {}
        for axis, (label, overrides) in zip(axes, steps, strict=True):
            repeated = values.keys() & overrides.keys()
            if repeated:
                raise ConfigError(
                    f"{source}: axis.{axis} sets {min(repeated)}, and so does an axis before it"
                )
            labels[axis] = label
            values |= overrides
        parts = []
        for axis, label in labels.items():
            file_label = re.sub(r"[^A-Za-z0-9_.-]+", "-", str(label))
            parts.append(f"{axis}-{file_label}")
        for seed in study.seeds:
            name = "_".join([*parts, f"seed-{seed}"])
            if name in points:
                raise ConfigError(
                    f"{source}: two points are both called {name}; values and seeds must differ"
                )
            if len(name) > _LONGEST_NAME:
                raise ConfigError(
                    f"{source}: the point's name {name} is longer than {_LONGEST_NAME}; use named "
                    "variants"
                )
            config = _resolved(study, root, name, {**base, **values, "train.seed": seed})
            # Runs on private data compose: one ledger charges their total, and permits or refuses
            # those without a guarantee.
            if config.data.provenance == "private" and config.privacy.shared_ledger is None:
                raise ConfigError(
                    f"study {study.name}: its runs are on private data and compose. Make a ledger "
                    "of what they may spend together (launch_scripts/shared_ledger.py create) and "
                    "name it in [base] privacy.shared_ledger; or declare data.provenance"
                )
            points[name] = Point(name, labels, seed, config)
    # The privacy card states siblings and tuning on the same data. The run's own plan decides in
    # the end.
    num_informal = 0
    for point in points.values():
        privacy = point.config.privacy
        is_noiseless = not privacy.enabled or privacy.noise_multiplier == 0
        if is_noiseless or privacy.simulation or privacy.sampling != "poisson":
            num_informal += 1
    axis_names = ", ".join([*study.axis, "seed"])
    siblings = (
        f"one of {len(points)} runs of study {study.name}; {len(points) - num_informal} claim a "
        f"guarantee of their own, {num_informal} have none (TAN simulations, or privacy.enabled = "
        f"false) and are charged nowhere; varied: {axis_names}"
    )
    planned = []
    for point in points.values():
        recipe_tuning = point.config.privacy.tuning
        tuning = f"{recipe_tuning}; {siblings}" if recipe_tuning else siblings
        planned.append(replace(point, config=with_privacy(point.config, {"tuning": tuning})))
    return planned


def dotted_keys(tree: Mapping[str, Any], source: str, prefix: str = "") -> dict[str, Any]:
    """Returns nested tables as dotted keys of a recipe.

    Raises:
        ConfigError: a key of a section that recipes do not have.
    """
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= dotted_keys(value, source, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    for key in leaves:
        if not prefix and key.split(".")[0] not in SECTIONS:
            raise ConfigError(
                f"{source}: {key} is not a key of a recipe; its sections are "
                f"{', '.join(sorted(SECTIONS))}"
            )
    return leaves


def _steps(name: str, table: Mapping[str, Any], source: str) -> list[tuple[Label, dict[str, Any]]]:
    """Returns (label, overrides) for each value of an axis."""
    if not re.match(_NAME, name) or name == "seed":
        raise ConfigError(
            f"{source}: an axis is named by letters, digits, '_', '.' and '-', and not 'seed'"
        )
    if not table:
        raise ConfigError(f"{source} is empty")
    if {key.split(".")[0] for key in table} & SECTIONS:
        lists = dotted_keys(table, source)
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(
                    f"{source}: {key} must be a list of values, one for each point, not {values!r}"
                )
        if len({len(values) for values in lists.values()}) > 1:
            counts = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
            raise ConfigError(
                f"{source}: lists of one axis go together and need one length: {counts}"
            )
        steps: list[tuple[Label, dict[str, Any]]] = []
        first_list = next(iter(lists.values()))
        for first, row in zip(first_list, zip(*lists.values(), strict=True), strict=True):
            label = first if isinstance(first, str | int | float | bool) else json.dumps(first)
            steps.append((label, dict(zip(lists, row, strict=True))))
        return steps
    for variant, overrides in table.items():
        if not isinstance(overrides, dict):
            raise ConfigError(
                f"{source}: {variant} is neither a key of a recipe nor a table of overrides"
            )
    return [
        (variant, dotted_keys(overrides, f"{source}.{variant}"))
        for variant, overrides in table.items()
    ]


def _resolved(study: StudyConfig, root: Path, name: str, values: Mapping[str, Any]) -> RunConfig:
    """Returns the recipe of a point.

    Under [tan] sigma is in proportion to the batch, and the run a simulation unless its batch is
    the reference's.
    """
    tan = study.tan
    noise_keys = {"privacy.target_epsilon", "privacy.noise_multiplier", "privacy.simulation"}
    repeated = noise_keys & values.keys()
    if tan is not None and repeated:
        raise ConfigError(
            f"study {study.name}: {min(repeated)} would be overwritten by [tan]; remove one of the "
            "two"
        )
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    try:
        config = load_config(root / study.recipe, [*overrides, f'name="{name}"'])
        # A point without noise is the curve to compare with.
        if tan is None or not config.privacy.enabled:
            return config
        scale = config.privacy.expected_batch_size / tan.reference_batch_size
        sigma = tan.reference_noise_multiplier
        if sigma is None:
            if config.data.num_examples is None:
                raise ConfigError(
                    "tan.reference_epsilon needs data.num_examples in the recipe: sigma belongs "
                    "to a number of examples"
                )
            reference = {
                "expected_batch_size": tan.reference_batch_size,
                "target_epsilon": tan.reference_epsilon,
                "noise_multiplier": None,
            }
            privacy = with_privacy(config, reference).privacy
            sigma = _sigma(privacy, config.train.num_steps, config.data.num_examples)
        noise = {
            "noise_multiplier": sigma * scale,
            "target_epsilon": None,
            "simulation": scale != 1,
        }
        return with_privacy(config, noise)
    except ConfigError as error:
        raise ConfigError(f"point {name}: {error}") from error


def require_useful_starts(planned: Sequence[Point], root: Path) -> None:
    """Refuses points whose start predicts held-out examples worse than a blind guess.

    The last whole line of `evaluation/heldout.jsonl` in the start's run folder states both losses.
    A start without that file is accepted.

    Raises:
        ConfigError: naming the point, the start and both losses.
    """
    for point in planned:
        init = point.config.init
        if init is None:
            continue
        run_dir = root / init.checkpoint
        if (run_dir / MANIFEST).is_file():
            run_dir = run_dir.parent.parent
        losses = read_utility(run_dir).heldout_loss
        if not losses:
            continue
        last = losses[-1]
        loss = math.nan if last.loss is None else last.loss
        blind_loss = math.inf if last.blind_loss is None else last.blind_loss
        # Written so that NaN is refused too.
        if not loss < blind_loss:
            raise ConfigError(
                f"point {point.name}: its start {run_dir} has a held-out loss of {loss:.4f}, and "
                f"{blind_loss:.4f} is the loss without looking at the pictures, so it is worse "
                "than none: train it longer or on other pictures, or start at random"
            )


@functools.cache
def _sigma(privacy: PrivacySection, num_steps: int, num_examples: int) -> float:
    return make_plan(privacy.request(num_steps, num_examples)).noise_multiplier


def with_privacy(config: RunConfig, privacy: dict[str, Any]) -> RunConfig:
    """Returns `config` with other values in [privacy]; None removes a key."""
    tree = tomllib.loads(to_toml(config))
    merged = {**tree["privacy"], **privacy}
    tree["privacy"] = {key: value for key, value in merged.items() if value is not None}
    return validate_section(RunConfig, tree, "the recipe")


def trained_keys(recipe: str) -> dict[str, Any]:
    """Returns the dotted keys of a resolved recipe without statements on other points."""
    leaves = dotted_keys(tomllib.loads(recipe), "recipe")
    return {key: value for key, value in leaves.items() if key not in _OF_OTHERS}
