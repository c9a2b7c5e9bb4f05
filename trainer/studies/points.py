"""A point's recipe: base recipe and overrides, its noise, and what its card has to say about the other points."""

import functools
import hashlib
import json
import tomllib
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from privacy.plan import make_plan
from trainer.config.recipe import PrivacySection, RunConfig, load_config, to_toml, validated
from trainer.errors import ConfigError
from trainer.studies.grid import Point, StudyConfig, TanSection, expand, flat

_OF_OTHERS = frozenset({"privacy.tuning", "privacy.fixed_in_advance"})
"""Keys that depend on the other points; a point that began keeps those it began with."""


@dataclass(frozen=True)
class PlannedPoint:
    """A point with the recipe that it trains."""

    point: Point
    config: RunConfig

    @property
    def name(self) -> str:
        return self.point.name

    @property
    def is_simulation(self) -> bool:
        return self.config.privacy.simulation

    @property
    def claims(self) -> bool:
        """Whether the run can have a guarantee; what the run's own plan says decides in the end."""
        privacy = self.config.privacy
        is_private = privacy.enabled and not privacy.simulation and privacy.noise_multiplier != 0
        return is_private and privacy.sampling == "poisson"


def plan_points(study: StudyConfig, where: str, root: Path) -> list[PlannedPoint]:
    """All points with their recipes.

    Args:
        where: the study in an error.
        root: the project's root, which the study's paths are relative to.

    Raises:
        ConfigError: the grid, or a point's recipe, is wrong, or its runs on private data are not charged together.
    """
    planned = [PlannedPoint(point, _resolved(study, point, root)) for point in expand(study, where)]
    for one in planned:
        # Runs on private data compose: one ledger charges their total, and permits or refuses those without a guarantee.
        if one.config.data.provenance == "private" and one.config.privacy.shared_ledger is None:
            raise ConfigError(
                f"study {study.name}: its runs are on private data and compose. Make a ledger of what they may spend together "
                "(launch_scripts/shared_ledger.py create) and name it in [base] privacy.shared_ledger; or declare data.provenance"
            )
    # What the privacy card needs to know: siblings and tuning on the same data.
    informal = sum(not one.claims for one in planned)
    words = (
        f"one of {len(planned)} runs of study {study.name}; {len(planned) - informal} claim a guarantee of their own, "
        f"{informal} have none (TAN simulations, or privacy.enabled = false) and are charged nowhere; "
        f"varied: {', '.join([*study.axis, 'seed'])}"
    )
    tuned = [one.config.privacy.tuning for one in planned]
    return [
        PlannedPoint(one.point, with_privacy(one.config, {"tuning": f"{own}; {words}" if own else words}))
        for one, own in zip(planned, tuned, strict=True)
    ]


def _resolved(study: StudyConfig, point: Point, root: Path) -> RunConfig:
    recipe = root / study.recipe
    noise = {"privacy.target_epsilon", "privacy.noise_multiplier", "privacy.simulation"} & point.overrides.keys()
    if study.tan is not None and noise:
        raise ConfigError(f"study {study.name}: {min(noise)} would be overwritten by [tan]; remove one of the two")
    overrides = [f"{key}={json.dumps(value, ensure_ascii=False)}" for key, value in point.overrides.items()]
    overrides.append(f'name="{point.name}"')
    try:
        if study.tan is None:
            return load_config(recipe, overrides)
        return _with_reference_noise(study.tan, load_config(recipe, overrides))
    except ConfigError as error:
        raise ConfigError(f"point {point.name}: {error}") from error


def _with_reference_noise(tan: TanSection, config: RunConfig) -> RunConfig:
    """Takes sigma in proportion to the batch; a simulation unless the batch is the reference's."""
    privacy = config.privacy
    if not privacy.enabled:
        return config  # the curve without noise, to compare with
    size, reference = privacy.expected_batch_size, tan.reference_batch_size
    sigma = tan.reference_noise_multiplier
    if sigma is None:
        if config.data.num_examples is None:
            raise ConfigError(
                "tan.reference_epsilon needs data.num_examples in the recipe: sigma belongs to a number of examples"
            )
        changes = {"expected_batch_size": reference, "target_epsilon": tan.reference_epsilon, "noise_multiplier": None}
        sigma = _sigma(with_privacy(config, changes).privacy, config.train.num_steps, config.data.num_examples)
    simulated = {"noise_multiplier": sigma * size / reference, "target_epsilon": None, "simulation": size != reference}
    return with_privacy(config, simulated)


@functools.cache
def _sigma(privacy: PrivacySection, num_steps: int, num_examples: int) -> float:
    return make_plan(privacy.request(num_steps, num_examples)).noise_multiplier


def with_privacy(config: RunConfig, privacy: dict[str, Any]) -> RunConfig:
    """`config` with other values in [privacy]; None removes a key."""
    tree = tomllib.loads(to_toml(config))
    merged = {**tree["privacy"], **privacy}
    tree["privacy"] = {key: value for key, value in merged.items() if value is not None}
    return validated(RunConfig, tree, "the recipe")


def trained_keys(recipe: str) -> dict[str, Any]:
    """Dotted keys of a resolved recipe, without what it says of other points."""
    leaves = flat(tomllib.loads(recipe), "recipe")
    return {key: value for key, value in leaves.items() if key not in _OF_OTHERS}


def recipe_digest(config: RunConfig) -> str:
    """SHA-256 of everything that a point trains, in hex."""
    return hashlib.sha256(json.dumps(trained_keys(to_toml(config)), sort_keys=True).encode()).hexdigest()


def changed_keys(begun: str, now: str) -> list[str]:
    """Dotted keys in which two resolved recipes differ, but for what they say of other points."""
    one, other = trained_keys(begun), trained_keys(now)
    return sorted(key for key in one.keys() | other.keys() if one.get(key) != other.get(key))
