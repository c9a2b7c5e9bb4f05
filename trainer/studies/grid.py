"""What a study varies: a TOML file with a base recipe and axes, expanded into points, each with the recipe that it trains.

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

from privacy.card.folder import read_utility
from privacy.checkpoints.read import MANIFEST
from privacy.files.toml_text import read_toml
from privacy.plan.numbers import make_plan
from trainer.config.optimizer import Section
from trainer.config.recipe import (
    EngineName,
    PrivacySection,
    RunConfig,
    load_config,
    to_toml,
    validate_section,
)
from trainer.errors import ConfigError

Label = str | int | float | bool
_NAME = r"^[A-Za-z0-9_.-]+$"
_LONGEST_NAME = 150  # of a point: it becomes a file name
SECTIONS = frozenset(RunConfig.model_fields)
HELDOUT = "evaluation/heldout.jsonl"
_OF_OTHERS = frozenset({"privacy.tuning", "privacy.fixed_in_advance"})
"""Keys that depend on the other points; a point that began keeps those it began with."""


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
    """A study's file. `axis` is checked by `plan_points`."""

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
        config: the recipe that it trains.
    """

    name: str
    labels: Mapping[str, Label]
    seed: int
    config: RunConfig


def load_study(path: Path) -> StudyConfig:
    """Reads a study's file.

    Raises:
        ConfigError: missing or malformed file, unknown key, value out of range; one line with file and key.
    """
    tree = read_toml(
        path, "study", "give a file as in studies/; to report, the folder that `study.py run` wrote"
    )
    if "privacy" in tree:
        raise ConfigError(
            f"{path} is a recipe, not a study: train it with train.py, or give a file as in studies/"
        )
    study = validate_section(StudyConfig, tree, f"study {path}")
    if study.report.color is not None and study.report.color not in study.axis:
        raise ConfigError(
            f"study {path}: report.color names no axis: {study.report.color!r}; there are {', '.join(study.axis)}"
        )
    return study


def plan_points(study: StudyConfig, where: str, root: Path) -> list[Point]:
    """All points with their recipes: the axes crossed in their order, then the seeds.

    Args:
        where: the study in an error.
        root: the project's root, which the study's paths are relative to.

    Raises:
        ConfigError: an axis is neither lists of one length nor named variants, two points would be the same run, a point's recipe
            is wrong, or its runs on private data are not charged together.
    """
    base = flat(study.base, where)
    if "train.seed" in base:
        raise ConfigError(f"{where}: base.train.seed would be overwritten; list it in seeds")
    axes = {
        name: _steps(name, table, f"{where}: axis.{name}") for name, table in study.axis.items()
    }
    points: dict[str, Point] = {}
    for steps in itertools.product(*axes.values()):
        labels = {name: label for name, (label, _) in zip(axes, steps, strict=True)}
        values: dict[str, Any] = {}
        for name, (_, overrides) in zip(axes, steps, strict=True):
            if twice := values.keys() & overrides.keys():
                raise ConfigError(
                    f"{where}: axis.{name} sets {min(twice)}, and so does an axis before it"
                )
            values |= overrides
        parts = [
            f"{axis}-{re.sub(r'[^A-Za-z0-9_.-]+', '-', str(label))}"
            for axis, label in labels.items()
        ]
        for seed in study.seeds:
            name = "_".join([*parts, f"seed-{seed}"])
            if name in points:
                raise ConfigError(
                    f"{where}: two points are both called {name}; values and seeds must differ"
                )
            if len(name) > _LONGEST_NAME:
                raise ConfigError(
                    f"{where}: the point's name {name} is longer than {_LONGEST_NAME}; use named variants"
                )
            config = _resolved(study, root, name, {**base, **values, "train.seed": seed})
            # Runs on private data compose: one ledger charges their total, and permits or refuses those without a guarantee.
            if config.data.provenance == "private" and config.privacy.shared_ledger is None:
                raise ConfigError(
                    f"study {study.name}: its runs are on private data and compose. Make a ledger of what they may spend "
                    "together (launch_scripts/shared_ledger.py create) and name it in [base] privacy.shared_ledger; or declare "
                    "data.provenance"
                )
            points[name] = Point(name, labels, seed, config)
    # What the privacy card needs to know: siblings and tuning on the same data. The run's own plan decides in the end.
    sections = [one.config.privacy for one in points.values()]
    informal = sum(
        not p.enabled or p.simulation or p.noise_multiplier == 0 or p.sampling != "poisson"
        for p in sections
    )
    words = (
        f"one of {len(points)} runs of study {study.name}; {len(points) - informal} claim a guarantee of their own, "
        f"{informal} have none (TAN simulations, or privacy.enabled = false) and are charged nowhere; "
        f"varied: {', '.join([*study.axis, 'seed'])}"
    )
    planned = []
    for one in points.values():
        own = one.config.privacy.tuning
        planned.append(
            replace(
                one,
                config=with_privacy(one.config, {"tuning": f"{own}; {words}" if own else words}),
            )
        )
    return planned


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
            raise ConfigError(
                f"{where}: {key} is no key of a recipe; its sections are {', '.join(sorted(SECTIONS))}"
            )
    return leaves


def _steps(name: str, table: Mapping[str, Any], where: str) -> list[tuple[Label, dict[str, Any]]]:
    """(label, overrides) for each value of an axis."""
    if not re.match(_NAME, name) or name == "seed":
        raise ConfigError(
            f"{where}: an axis is named by letters, digits, '_', '.' and '-', and not 'seed'"
        )
    if not table:
        raise ConfigError(f"{where} is empty")
    if {key.split(".")[0] for key in table} & SECTIONS:
        lists = flat(table, where)
        for key, values in lists.items():
            if not isinstance(values, list) or not values:
                raise ConfigError(
                    f"{where}: {key} must be a list of values, one for each point, not {values!r}"
                )
        if len({len(values) for values in lists.values()}) > 1:
            counts = ", ".join(f"{key} has {len(values)}" for key, values in lists.items())
            raise ConfigError(
                f"{where}: lists of one axis go together and need one length: {counts}"
            )
        firsts = [
            v if isinstance(v, str | int | float | bool) else json.dumps(v)
            for v in next(iter(lists.values()))
        ]
        rows = zip(*lists.values(), strict=True)
        return [
            (label, dict(zip(lists, row, strict=True)))
            for label, row in zip(firsts, rows, strict=True)
        ]
    for variant, overrides in table.items():
        if not isinstance(overrides, dict):
            raise ConfigError(
                f"{where}: {variant} is neither a key of a recipe nor a table of overrides"
            )
    return [
        (variant, flat(overrides, f"{where}.{variant}")) for variant, overrides in table.items()
    ]


def _resolved(study: StudyConfig, root: Path, name: str, values: Mapping[str, Any]) -> RunConfig:
    """The recipe of a point; under [tan] with sigma in proportion to the batch, a simulation unless that is the reference's."""
    tan = study.tan
    noise = {
        "privacy.target_epsilon",
        "privacy.noise_multiplier",
        "privacy.simulation",
    } & values.keys()
    if tan is not None and noise:
        raise ConfigError(
            f"study {study.name}: {min(noise)} would be overwritten by [tan]; remove one of the two"
        )
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in values.items()]
    try:
        config = load_config(root / study.recipe, [*overrides, f'name="{name}"'])
        if (
            tan is None or not config.privacy.enabled
        ):  # that is the curve without noise, to compare with
            return config
        scale, sigma = (
            config.privacy.expected_batch_size / tan.reference_batch_size,
            tan.reference_noise_multiplier,
        )
        if sigma is None:
            if config.data.num_examples is None:
                raise ConfigError(
                    "tan.reference_epsilon needs data.num_examples in the recipe: sigma belongs to a number of examples"
                )
            aim = {"target_epsilon": tan.reference_epsilon, "noise_multiplier": None}
            privacy = with_privacy(
                config, {"expected_batch_size": tan.reference_batch_size, **aim}
            ).privacy
            sigma = _sigma(privacy, config.train.num_steps, config.data.num_examples)
        own = {"noise_multiplier": sigma * scale, "target_epsilon": None, "simulation": scale != 1}
        return with_privacy(config, own)
    except ConfigError as error:
        raise ConfigError(f"point {name}: {error}") from error


def require_useful_starts(planned: Sequence[Point], root: Path) -> None:
    """Refuses points whose start knows less of its public held-out examples than what one gets without looking at them.

    The last whole line of `evaluation/heldout.jsonl` in its run folder says so. A start without any is taken as it is.

    Raises:
        ConfigError: naming the point, the start and both losses.
    """
    for one in planned:
        run = root / one.config.init.checkpoint if one.config.init is not None else None
        if run is not None and (run / MANIFEST).is_file():
            run = run.parent.parent
        losses = () if run is None else read_utility(run).heldout_loss
        if not losses:
            continue
        loss = math.nan if losses[-1].loss is None else losses[-1].loss
        blind = math.inf if losses[-1].blind_loss is None else losses[-1].blind_loss
        if not loss < blind:
            raise ConfigError(
                f"point {one.name}: its start {run} has a held-out loss of {loss:.4f}, and {blind:.4f} is had without looking at "
                "the pictures, so it is worse than none: train it longer or on other pictures, or start at random"
            )


@functools.cache
def _sigma(privacy: PrivacySection, num_steps: int, num_examples: int) -> float:
    return make_plan(privacy.request(num_steps, num_examples)).noise_multiplier


def with_privacy(config: RunConfig, privacy: dict[str, Any]) -> RunConfig:
    """`config` with other values in [privacy]; None removes a key."""
    tree = tomllib.loads(to_toml(config))
    merged = {**tree["privacy"], **privacy}
    tree["privacy"] = {key: value for key, value in merged.items() if value is not None}
    return validate_section(RunConfig, tree, "the recipe")


def trained_keys(recipe: str) -> dict[str, Any]:
    """Dotted keys of a resolved recipe, without what it says of other points."""
    leaves = flat(tomllib.loads(recipe), "recipe")
    return {key: value for key, value in leaves.items() if key not in _OF_OTHERS}
