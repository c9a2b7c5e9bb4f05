"""A run's configuration: one frozen tree, loaded from a TOML recipe and `section.key=value` overrides.

Every key has one owner. What the machine decides (ZeRO stage, offload, dtype) is in ds_configs/*.json and nowhere here;
what the experiment means is here and nowhere there. Nothing changes a configuration after loading; derived values are
properties.
"""

import copy
import re
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, Field, ValidationError, field_validator, model_validator

from models.config import MAX_IMAGE_SIZE, MAX_TOKENS
from privacy.files.toml_text import read_toml, refuse_nul, toml_literal, toml_value
from privacy.plan.options import OPTIONS, Arithmetic, require_compatible
from privacy.plan.request import Choices, PlanRequest, in_plain_words
from trainer.config.declarations import DECLARED_OF, Resolved, leaf
from trainer.config.optimizer import (
    Count,
    OptimizerSection,
    Positive,
    ScheduleSection,
    Seconds,
    Section,
    TrainSection,
    did_you_mean,
    section_of,
)
from trainer.errors import ConfigError

EngineName = Literal["deepspeed", "fsdp", "fairscale", "local"]


class ModelSection(Section):
    """What is trained. `overrides` sets single fields of the size's configuration, e.g. decoder depth."""

    kind: Literal["captioner", "masked_autoencoder", "classifier"] = "captioner"
    size: str
    overrides: dict[str, int | float | bool | str] = Field({})


class RemoteSection(Section):
    """How shards given by URLs are read; see `data.reading.storage.RemoteOptions`."""

    timeout_seconds: Seconds = Field(60.0, gt=0)
    tries: int = Field(6, ge=1, le=1000)
    backoff_seconds: Seconds = 0.5
    """First pause between tries; it doubles."""
    connections: int = Field(16, ge=1, le=1024)
    """Requests at the same time, per data worker."""
    allow_plain_http: bool = False
    """Permits http:// beyond this machine: everyone on the network then knows who is in every batch."""


class InitSection(Section):
    """Start from another run's weights instead of random ones."""

    checkpoint: str
    """A checkpoint's folder, or a run folder, of which the newest is taken; relative to the project root."""
    parts: Literal["all", "encoder", "none"] = "all"
    """What is taken; the rest starts at random. None: the run has no [init], whatever its recipe says."""
    disjoint_data: bool = False
    """Declares that no example of this run is in the data of any private run behind the checkpoint (other shards are not enough):
    then the larger of the epsilons counts instead of their composition. Naming other data or another checkpoint resets it."""


class DataSection(Section):
    """Where the image-text pairs are and how they become tensors."""

    provenance: Literal["private", "public", "synthetic"] = "private"
    """Whether a private run may start from the weights of a run without privacy. Other shards or another field reset it."""

    shards: str
    """Tar shards: a folder, a glob, a brace range or a comma list, relative to the project root; or URLs."""
    caption_field: str | None = None
    """Field of each example's JSON member; by default its text member, or else the field `caption`."""
    label_field: str | None = None
    """Classifiers: field of each example's JSON member that holds its label; by default the member `cls`."""
    num_examples: Positive | None = None
    """How many examples there should be: other data are refused, since sigma and epsilon belong to a number of examples."""
    tokenizer: str = "data/tokenizer/tokenizer.json"
    index: str | None = None
    """Folder made by `prepare.py index`; without it the first start builds one in the run folder's private part."""
    image_size: int = Field(224, ge=1, le=MAX_IMAGE_SIZE)
    augment: bool = True
    """Training sees random crops and flips; false takes the centre, for captions like "left of", which a flip makes wrong."""
    num_tokens: int = Field(40, ge=3, le=MAX_TOKENS)
    """Caption length after padding or truncation, begin and end tokens included."""
    max_unusable_share: float | None = Field(None, ge=0, le=1)
    """The largest share of a private run's examples that may be unusable for one reason; by default 1 %, and no whole label."""
    num_workers: int = Field(2, ge=0, le=1024)
    """Decoding processes per rank."""
    memory_limit_mib: int = Field(4096, ge=1, le=2**30)
    """Memory of the micro-batches that the workers of one rank prepare ahead."""
    remote: RemoteSection = RemoteSection()
    staging: str | None = None
    """A local folder of each node, e.g. "/local/nvme" or "$TMPDIR/shards", to which the shards of its ranks are copied whole."""
    streaming: bool = False
    """Reads the shards in order: for public data in runs without privacy only (data/reading/streaming.py)."""
    dataset_name: str | None = None
    """The name of the data, in words for the privacy card; public, like the next five."""
    dataset_owner: str | None = None
    """Who answers for the data."""
    dataset_purpose: str | None = None
    """What they were collected for, or may be used for."""
    dataset_licence: str | None = None
    """The licence or agreement under which they are used."""
    dataset_contact: str | None = None
    """Who answers questions about the run's privacy card."""
    dataset_validity: str | None = None
    """Until when, or for which use, its claim may be relied on."""
    deduplication: str | None = None
    """How duplicates were removed, in words for the privacy card; the guarantee does not cover it."""


class HeldoutSection(Section):
    """Held-out pairs for the caption loss and sample captions."""

    shards: str
    is_public: bool = False
    """Whether losses, captions and pictures of these examples may leave `private/` (contract 12).
    Naming other shards or another field resets it."""
    num_examples: Positive | None = None
    """How many examples are used, from the first; all by default."""
    num_captions: int = Field(5, ge=0, le=10_000)
    every_steps: Positive | None = None
    """Evaluation happens before the first and after the last step; with this key also each time this many steps are done."""


class PrivacySection(Section, Choices):
    """The guarantee. Frozen for a run folder at its first start. More keys are those of `Choices`."""

    noise_multiplier: float | None = Field(None, ge=0)
    """sigma; give it or target_epsilon."""
    target_delta: float | None = Field(None, gt=0, lt=1)
    """Default 1 / (2n)."""
    clipping_mode: Literal["auto", "bookkeeping", "two_pass"] = "auto"
    """One backward, or two with less memory; the sum is the same. By default the first where a trial with made-up
    examples shows that it fits (trainer/run/clipping_mode.py). May change between starts."""
    reserved_attempts: Count | None = None
    """Attempts that the budget keeps for crashed steps; default max(2, 1 % of the steps)."""
    allow_small_noise: bool = False
    """Permits a noise multiplier below 0.3."""
    simulation: bool = False
    """TAN simulation (Sander et al. 2023): a larger batch's sigma / B. Not private, and marked so everywhere."""
    shared_ledger: str | None = None
    """The data owner's ledger over all runs on these data (launch_scripts/shared_ledger.py); the run reserves its budget."""
    fixed_in_advance: bool = False
    """The owner states that this run was fixed before any output of the other runs was seen; else an RDP filter adds it."""
    max_examples_per_owner: Positive | None = None
    """The most examples of one owner in the data (prepare.py import --max_per_owner): the card adds their epsilon."""
    tuning: str | None = None
    """How the hyper-parameters were chosen, and on which data, in words for the privacy card."""
    ledger_mirror: str | None = None
    """A second location for the ledger, best on another file system: it detects a rollback of the whole run folder."""

    @model_validator(mode="after")
    def _keys_fit(self) -> "PrivacySection":
        require_compatible(self)
        if self.enabled and (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                "give exactly one of noise_multiplier and target_epsilon; a copy of the recipe can leave its own out"
            )
        return self

    def request(self, num_steps: int, num_examples: int) -> PlanRequest:
        """What these keys ask for on a data set: capped batches, slack and reserve."""
        simulation = (
            "a TAN simulation: the noise of a larger batch, scaled down (privacy.simulation = true)",
        )
        asked = {field.name for field in fields(PlanRequest)} & type(self).model_fields.keys()
        arithmetic = OPTIONS["arithmetic"][self.arithmetic]
        assert isinstance(arithmetic, Arithmetic)
        derived = {
            "sensitivity_slack": arithmetic.slack,
            "informal_reasons": simulation if self.simulation else (),
            "allow_small_noise": self.allow_small_noise or self.simulation,
        }
        same = {name: getattr(self, name) for name in asked}
        return PlanRequest(num_steps=num_steps, num_examples=num_examples, **same | derived)


class RunConfig(Section):
    """The whole recipe. `name` names the default run folder."""

    name: str = Field(pattern=r"^[A-Za-z0-9_][A-Za-z0-9_.-]*$", max_length=200)
    model: ModelSection
    init: InitSection | None = None
    data: DataSection
    heldout: HeldoutSection | None = None
    privacy: PrivacySection
    optimizer: OptimizerSection
    schedule: ScheduleSection = ScheduleSection()
    train: TrainSection

    @field_validator("init")
    @classmethod
    def _nothing_taken_is_no_start(cls, init: InitSection | None) -> InitSection | None:
        return None if init is not None and init.parts == "none" else init

    @model_validator(mode="after")
    def _sections_fit(self) -> "RunConfig":
        if self.data.streaming and (self.privacy.enabled or self.data.provenance == "private"):
            raise ValueError(
                "data.streaming amplifies no privacy: it needs privacy.enabled = false and data.provenance = public or synthetic"
            )
        if self.data.streaming and self.data.staging:
            raise ValueError("data.staging needs random access; remove it or data.streaming")
        require_compatible(self.privacy, {"train.compile = true": self.train.compile})
        schedule, last = self.schedule, self.train.num_steps
        end = schedule.decay_steps or last
        if schedule.decay == "cosine" and schedule.final_fraction == 0 and end < last:
            raise ValueError(
                f"schedule.decay_steps {end} is before train.num_steps {last}: the steps between would spend budget at "
                "rate 0; give a schedule.final_fraction or more decay_steps"
            )
        return self


def load_config(recipe: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads a recipe and applies `section.key=value` overrides; see `resolved`.

    Raises:
        ConfigError: missing or malformed file, unknown key, value out of range; names the file and the key.
    """
    return validated(RunConfig, resolved(recipe, overrides).tree, f"recipe {recipe}")


def resolved(recipe: Path, overrides: Sequence[str] = ()) -> Resolved:
    """A recipe with overrides; one that names other data resets what the recipe declares of its own (contract 12)."""
    tree, changes = (
        read_toml(recipe, "recipe", "see recipes/ for the shipped ones"),
        dict[str, Any](),
    )
    written_tree = copy.deepcopy(tree)
    keys = [override.partition("=")[0] for override in overrides]
    for key, override in zip(keys, overrides, strict=True):
        if (
            keys.count(key) > 1
        ):  # an unquoted {0..9} becomes ten overrides in a shell, of which nine would be lost
            raise ConfigError(
                f"override {key} is given more than once; quote patterns, or put them into the recipe"
            )
        _apply(tree, override)
        _apply(changes, override)
    reset = []
    for named, declarations in DECLARED_OF.items():
        for declared in declarations if leaf(tree, named) != leaf(written_tree, named) else ():
            section, _, name = declared.partition(".")
            if leaf(changes, declared) is None and leaf(tree, declared) is not None:
                del tree[section][name]
                reset.append(declared)
    return Resolved(recipe, tree, changes, reset)


SectionKind = TypeVar("SectionKind", bound=Section)


def validated(kind: type[SectionKind], tree: Mapping[str, Any], where: str) -> SectionKind:
    """`tree` as a frozen section; ConfigError is one line with `where` and the first key that is wrong."""
    refuse_nul(tree, where)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        errors = error.errors()
        # A misspelt required key is also a missing one: what was written says more.
        first = next((one for one in errors if one["type"] == "extra_forbidden"), errors[0])
        key, message = ".".join(map(str, first["loc"])), in_plain_words(first)
        if first["type"] == "extra_forbidden":
            section: type[BaseModel] | None = kind
            for part in first["loc"][:-1]:
                field = section.model_fields.get(str(part)) if section is not None else None
                section = section_of(field) if field is not None else None
            line = f"unknown key {key}" + did_you_mean(
                first["loc"][-1], section.model_fields if section else ()
            )
        elif first["type"] == "missing":
            line = f"key {key} is missing"
        else:
            if first["type"] == "literal_error":
                message += did_you_mean(
                    first["input"], re.findall("'([^']+)'", first["ctx"]["expected"])
                )
            line = f"{key}: {message}" if key else message
        raise ConfigError(f"{where}: {line}") from error


def _apply(tree: dict[str, Any], override: str) -> None:
    path, equals, text = override.partition("=")
    keys = path.split(".")
    if not equals or not all(keys):
        raise ConfigError(f"override {override!r} is not of the form section.key=value")
    for key in keys[:-1]:
        tree = tree.setdefault(key, {})
        if not isinstance(tree, dict):
            raise ConfigError(f"override {override!r}: {key} is no section")
    tree[keys[-1]] = toml_value(text)


def to_toml(config: RunConfig) -> str:
    """The fully resolved configuration as TOML; loading it gives an equal configuration."""
    sections = config.model_dump()
    lines = [f"name = {toml_literal(sections.pop('name'))}"]
    for name, section in sections.items():
        if section is not None:
            lines += ["", f"[{name}]"]
            lines += [
                f"{key} = {toml_literal(value)}"
                for key, value in section.items()
                if value is not None
            ]
    return "\n".join(lines) + "\n"
