"""What a study varies: a TOML file with a base recipe and axes, expanded into points.

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

import itertools
import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from pydantic import Field, model_validator

from privacy.files.toml_text import read_toml
from trainer.config.optimizer import Section
from trainer.config.recipe import EngineName, RunConfig, validated
from trainer.errors import ConfigError

Label = str | int | float | bool
_NAME = r"^[A-Za-z0-9_.-]+$"
_LONGEST_NAME = 150  # of a point: it becomes a file name
SECTIONS = frozenset(RunConfig.model_fields)


class TanSection(Section):
    """Constant sigma / B: every point has the noise of a reference batch, scaled to its own (Sander et al. 2023).

    Source: TAN Without a Burn, https://arxiv.org/abs/2210.03403, section 4: the same steps, rate and sigma / B predict the run at
    the reference batch at a fraction of its cost. All points but those at the reference batch itself are simulations.
    """

    reference_batch_size: int = Field(ge=1)
    reference_noise_multiplier: float | None = Field(None, gt=0)
    reference_epsilon: float | None = Field(None, gt=0)
    """Calibrates the reference's noise for each point's data and steps; the recipe must then state data.num_examples."""

    @model_validator(mode="after")
    def _noise_is_stated(self) -> "TanSection":
        if (self.reference_noise_multiplier is None) == (self.reference_epsilon is None):
            raise ValueError("give exactly one of reference_noise_multiplier and reference_epsilon")
        return self


class ReportSection(Section):
    """Which axis a plot shows by colour; the first by default."""

    color: str | None = None
    x: Literal["steps", "examples"] = "steps"
    """The x axis of the curves: steps, or examples seen (expected_batch_size for each step)."""


class StudyConfig(Section):
    """A study's file. `axis` is checked by `expand`."""

    name: str = Field(pattern=_NAME)
    title: str = ""
    recipe: str
    ds_config: str = "ds_configs/zero1.json"
    engine: EngineName = "local"
    seeds: list[int] = Field([0], min_length=1)
    """Seeds of the initial weights. Coins and noise differ between any two runs: they come from the operating system."""
    base: dict[str, Any] = Field({})
    axis: dict[str, dict[str, Any]] = Field({})
    tan: TanSection | None = None
    report: ReportSection = ReportSection()


@dataclass(frozen=True)
class Point:
    """One run of a study.

    Attributes:
        name: name of its run folder, made of the values.
        labels: axis -> the first key's value, or the variant's name.
        overrides: dotted recipe key -> value.
    """

    name: str
    labels: Mapping[str, Label]
    seed: int
    overrides: Mapping[str, Any]


def load_study(path: Path) -> StudyConfig:
    """Reads a study's file.

    Raises:
        ConfigError: missing or malformed file, unknown key, value out of range; one line with file and key.
    """
    study = validated(StudyConfig, read_toml(path, "study", "see studies/ for examples"), f"study {path}")
    if study.report.color is not None and study.report.color not in study.axis:
        raise ConfigError(
            f"study {path}: report.color names no axis: {study.report.color!r}; there are {', '.join(study.axis)}"
        )
    return study


def expand(study: StudyConfig, where: str = "study") -> list[Point]:
    """All points: the axes crossed in their order, then the seeds.

    Raises:
        ConfigError: an axis is neither lists of one length nor named variants, or two points would be the same run.
    """
    base = flat(study.base, where)
    if "train.seed" in base:
        raise ConfigError(f"{where}: base.train.seed would be overwritten; list it in seeds")
    axes = {name: _steps(name, table, f"{where}: axis.{name}") for name, table in study.axis.items()}
    points: list[Point] = []
    for steps in itertools.product(*axes.values()):
        labels = {name: label for name, (label, _) in zip(axes, steps, strict=True)}
        values: dict[str, Any] = {}
        for name, (_, overrides) in zip(axes, steps, strict=True):
            twice = values.keys() & overrides.keys()
            if twice:
                raise ConfigError(f"{where}: axis.{name} sets {min(twice)}, and so does an axis before it")
            values |= overrides
        parts = [f"{axis}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', str(label))}" for axis, label in labels.items()]
        for seed in study.seeds:
            overrides = {**base, **values, "train.seed": seed}
            points.append(Point("_".join([*parts, f"seed-{seed}"]), labels, seed, overrides))
    names = [point.name for point in points]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two points are both called {name}; values and seeds must differ")
        if len(name) > _LONGEST_NAME:
            raise ConfigError(f"{where}: the point's name {name} is longer than {_LONGEST_NAME}; use named variants")
    return points


def flat(tree: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys of a recipe."""
    leaves: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            leaves |= flat(value, where, f"{prefix}{key}.")
        else:
            leaves[f"{prefix}{key}"] = value
    for key in leaves:
        if not prefix and key.split(".")[0] not in SECTIONS:
            raise ConfigError(f"{where}: {key} is no key of a recipe; its sections are {', '.join(sorted(SECTIONS))}")
    return leaves


def _steps(name: str, table: Mapping[str, Any], where: str) -> list[tuple[Label, dict[str, Any]]]:
    """(label, overrides) for each value of an axis."""
    if not re.match(_NAME, name) or name == "seed":
        raise ConfigError(f"{where}: an axis is named by letters, digits, '_', '.' and '-', and not 'seed'")
    if not table:
        raise ConfigError(f"{where} is empty")
    if {key.split(".")[0] for key in table} & SECTIONS:
        lists = flat(table, where)
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(f"{where}: {key} must be a list of values, one for each point, not {values!r}")
        if len({len(values) for values in lists.values()}) > 1:
            counts = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
            raise ConfigError(f"{where}: lists of one axis go together and need one length: {counts}")
        firsts = [v if isinstance(v, str | int | float | bool) else json.dumps(v) for v in next(iter(lists.values()))]
        rows = zip(*lists.values(), strict=True)
        return [(label, dict(zip(lists, row, strict=True))) for label, row in zip(firsts, rows, strict=True)]
    for variant, overrides in table.items():
        if not isinstance(overrides, dict):
            raise ConfigError(f"{where}: {variant} is neither a key of a recipe nor a table of overrides")
    return [(variant, flat(overrides, f"{where}.{variant}")) for variant, overrides in table.items()]
