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

from trainer.config.optimizer import Section
from trainer.config.recipe import EngineName, RunConfig, validated
from trainer.config.toml_text import read_toml
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


class BudgetSection(Section):
    """What all runs of a study on private data may spend together; they share a ledger in the study's folder."""

    target_epsilon: float = Field(gt=0)
    target_delta: float = Field(gt=0, lt=1)
    informal_runs: bool = False
    """The data owner's leave for points without a guarantee (simulations, privacy.enabled = false), which nothing covers."""
    mirror: str | None = None
    """A second copy of the shared ledger, best on another file system: it detects lines that were cut off."""


class ReportSection(Section):
    """Which axis a plot tells apart by colour, and which by panel; the first two by default."""

    color: str | None = None
    panels: str | None = None
    x: Literal["steps", "examples"] = "steps"
    """Of the curves: steps, or examples seen (expected_batch_size for each step)."""


class StudyConfig(Section):
    """A study's file. `axis` is checked by `expand`."""

    name: str = Field(pattern=_NAME)
    title: str = ""
    recipe: str
    ds_config: str = "ds_configs/zero1.json"
    engine: EngineName = "local"
    seeds: list[int] = Field([0], min_length=1)
    """Of the initial weights. Coins and noise differ between any two runs anyway: they come from the operating system."""
    base: dict[str, Any] = Field({})
    axis: dict[str, dict[str, Any]] = Field({})
    tan: TanSection | None = None
    budget: BudgetSection | None = None
    report: ReportSection = ReportSection()


@dataclass(frozen=True)
class Point:
    """One run of a study.

    Attributes:
        name: of its run folder; says the values.
        labels: axis -> what tells its value from the others: the first key's value, or the variant's name.
        overrides: dotted recipe key -> value.
    """

    name: str
    labels: Mapping[str, Label]
    seed: int
    overrides: Mapping[str, Any]

    def override_arguments(self) -> list[str]:
        """As on train.py's command line."""
        return [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in self.overrides.items()]


def load_study(path: Path) -> StudyConfig:
    """
    Raises:
        ConfigError: missing or malformed file, unknown key, value out of range; one line with file and key.
    """
    study = validated(StudyConfig, read_toml(path, "study", "see studies/ for examples"), f"study {path}")
    for which in ("color", "panels"):
        axis = getattr(study.report, which)
        if axis is not None and axis not in study.axis:
            raise ConfigError(
                f"study {path}: report.{which} names no axis: {axis!r}; there are {', '.join(study.axis)}"
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
        own: dict[str, Any] = {}
        for name, (_, overrides) in zip(axes, steps, strict=True):
            twice = own.keys() & overrides.keys()
            if twice:
                raise ConfigError(f"{where}: axis.{name} sets {min(twice)}, and so does an axis before it")
            own |= overrides
        for seed in study.seeds:
            overrides = {**base, **own, "train.seed": seed}
            points.append(Point(_point_name(labels, seed), labels, seed, overrides))
    _require_different([point.name for point in points], where)
    return points


def flat(tree: Mapping[str, Any], where: str, prefix: str = "") -> dict[str, Any]:
    """Nested tables as dotted keys of a recipe."""
    found: dict[str, Any] = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            found |= flat(value, where, f"{prefix}{key}.")
        else:
            found[f"{prefix}{key}"] = value
    for key in found:
        if not prefix and key.split(".")[0] not in SECTIONS:
            raise ConfigError(f"{where}: {key} is no key of a recipe; its sections are {', '.join(sorted(SECTIONS))}")
    return found


def _steps(name: str, table: Mapping[str, Any], where: str) -> list[tuple[Label, dict[str, Any]]]:
    """(label, overrides) for each value of an axis."""
    if not re.match(_NAME, name) or name == "seed":
        raise ConfigError(f"{where}: an axis is named by letters, digits, '_', '.' and '-', and not 'seed'")
    if not table:
        raise ConfigError(f"{where} is empty")
    if {key.split(".")[0] for key in table} & SECTIONS:
        return _zipped(flat(table, where), where)
    for variant, overrides in table.items():
        if not isinstance(overrides, dict):
            raise ConfigError(f"{where}: {variant} is neither a key of a recipe nor a table of overrides")
    return [(variant, flat(overrides, f"{where}.{variant}")) for variant, overrides in table.items()]


def _zipped(lists: Mapping[str, Any], where: str) -> list[tuple[Label, dict[str, Any]]]:
    for key, values in lists.items():
        if not isinstance(values, list) or not values:
            raise ConfigError(f"{where}: {key} must be a list of values, one for each point, not {values!r}")
    lengths = {key: len(values) for key, values in lists.items()}
    if len(set(lengths.values())) > 1:
        counts = ", ".join(f"{key} has {length}" for key, length in lengths.items())
        raise ConfigError(f"{where}: lists of one axis go together and need one length: {counts}")
    rows = [dict(zip(lists, row, strict=True)) for row in zip(*lists.values(), strict=True)]
    return [(_label(next(iter(row.values()))), row) for row in rows]


def _label(value: Any) -> Label:
    return value if isinstance(value, str | int | float | bool) else json.dumps(value)


def _point_name(labels: Mapping[str, Label], seed: int) -> str:
    parts = [f"{axis}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', str(label))}" for axis, label in labels.items()]
    return "_".join([*parts, f"seed-{seed}"])


def _require_different(names: list[str], where: str) -> None:
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{where}: two points are both called {name}; values and seeds must differ")
        if len(name) > _LONGEST_NAME:
            raise ConfigError(f"{where}: the point's name {name} is longer than {_LONGEST_NAME}; use named variants")
