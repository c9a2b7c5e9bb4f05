"""Loads a run's configuration, a frozen tree, from a TOML recipe and `section.key=value` overrides.

A recipe states the experiment. The machine's settings (ZeRO stage, offload, dtype) are in
ds_configs/*.json alone, so that every key has one owner. A loaded configuration never changes.
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
from trainer.config.declarations import DECLARED_OF, ResolvedRecipe, leaf
from trainer.config.sections import (
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
    """The model. `overrides` sets single fields of the size's configuration, e.g. decoder depth."""

    kind: Literal["captioner", "masked_autoencoder", "classifier"] = "captioner"
    size: str
    overrides: dict[str, int | float | bool | str] = Field({})


class RemoteSection(Section):
    """Options of reading shards from URLs; see `data.reading.storage.RemoteOptions`."""

    timeout_seconds: Seconds = Field(60.0, gt=0)
    tries: int = Field(6, ge=1, le=1000)
    backoff_seconds: Seconds = 0.5
    """First pause between tries; each further pause is twice as long."""
    connections: int = Field(16, ge=1, le=1024)
    """Requests at the same time, per data worker."""
    allow_plain_http: bool = False
    """Permits http:// beyond this machine: everyone on the network then knows who is in every
    batch."""


class InitSection(Section):
    """A start from another run's weights in place of random ones."""

    checkpoint: str
    """A checkpoint's folder, or a run folder, whose newest checkpoint is taken; relative to the
    project root."""
    parts: Literal["all", "encoder", "none"] = "all"
    """The weights that are taken; the others start at random. With "none" the run has no [init],
    whatever its recipe says."""
    disjoint_data: bool = False
    """Declares that no example of this run is in the data of any private run behind the checkpoint
    (other shards are not enough): then the larger of the epsilons counts instead of their
    composition. Naming other data or another checkpoint resets it."""


class DataSection(Section):
    """The image-text pairs, and the way from their bytes to tensors."""

    provenance: Literal["private", "public", "synthetic"] = "private"
    """Whether a private run may start from the weights of a run without privacy. Naming other
    shards or another field resets it."""

    shards: str
    """Tar shards: a folder, a glob, a brace range or a comma list, relative to the project root; or
    URLs."""
    caption_field: str | None = None
    """Field of each example's JSON member that holds its caption; by default the example's text
    member, or else the field `caption`."""
    label_field: str | None = None
    """Classifiers: field of each example's JSON member that holds its label; by default the member
    `cls`."""
    num_examples: Positive | None = None
    """The expected number of examples: other data are refused, since sigma and epsilon belong to a
    number of examples."""
    tokenizer: str = "data/tokenizer/tokenizer.json"
    index: str | None = None
    """Folder made by `prepare.py index`; without it the first start builds an index in the run
    folder's private part."""
    image_size: int = Field(224, ge=1, le=MAX_IMAGE_SIZE)
    augment: bool = True
    """Training sees random crops and flips; false takes the centre, for captions like "left of",
    which a flip makes wrong."""
    num_tokens: int = Field(40, ge=3, le=MAX_TOKENS)
    """Caption length after padding or truncation, begin and end tokens included."""
    max_unusable_share: float | None = Field(None, ge=0, le=1)
    """The largest share of a private run's examples that may be unusable for one reason; by default
    1 %, and never all examples of a label."""
    num_workers: int = Field(2, ge=0, le=1024)
    """Decoding processes per rank."""
    memory_limit_mib: int = Field(4096, ge=1, le=2**30)
    """Memory of the micro-batches that the workers of one rank prepare ahead."""
    remote: RemoteSection = RemoteSection()
    staging: str | None = None
    """A local folder of each node, e.g. "/local/nvme" or "$TMPDIR/shards", to which the shards of
    its ranks are copied whole."""
    streaming: bool = False
    """Reads the shards in order: for public data in runs without privacy only
    (data/reading/streaming.py)."""
    dataset_name: str | None = None
    """The name of the data, in words for the privacy card; public, like the next five."""
    dataset_owner: str | None = None
    """The person or organisation that answers for the data."""
    dataset_purpose: str | None = None
    """The purpose for which the data were collected, or may be used."""
    dataset_licence: str | None = None
    """The licence or agreement under which the data are used."""
    dataset_contact: str | None = None
    """The person who answers questions about the run's privacy card."""
    dataset_validity: str | None = None
    """Until when, or for which use, the card's claim may be relied on."""
    deduplication: str | None = None
    """How duplicates were removed, in words for the privacy card; the guarantee does not cover
    it."""


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
    """Steps between evaluations during training; evaluation before the first and after the last
    step always happens."""


class PrivacySection(Section, Choices):
    """The guarantee, frozen for a run folder at its first start. `Choices` has further keys."""

    noise_multiplier: float | None = Field(None, ge=0)
    """sigma; give it or target_epsilon."""
    target_delta: float | None = Field(None, gt=0, lt=1)
    """Default 1 / (2n)."""
    clipping_mode: Literal["auto", "bookkeeping", "two_pass"] = "auto"
    """Bookkeeping takes one backward, two_pass two with less memory; the sum is the same. "auto"
    takes bookkeeping where a trial with made-up examples shows that it fits
    (trainer/run/clipping_mode.py). May change between starts."""
    reserved_attempts: Count | None = None
    """Attempts that the budget reserves for crashed steps; default max(2, 1 % of the steps)."""
    allow_small_noise: bool = False
    """Permits a noise multiplier below 0.3."""
    simulation: bool = False
    """TAN simulation (Sander et al. 2023): a larger batch's sigma / B. It is not private, and
    marked so everywhere."""
    shared_ledger: str | None = None
    """The data owner's ledger over all runs on these data (launch_scripts/shared_ledger.py); the
    run reserves its budget there."""
    fixed_in_advance: bool = False
    """The owner states that this run was fixed before any output of the other runs was seen; else
    an RDP filter adds it."""
    max_examples_per_owner: Positive | None = None
    """The most examples of one owner in the data (prepare.py import --max_per_owner): the card adds
    their epsilon."""
    tuning: str | None = None
    """How the hyper-parameters were chosen, and on which data, in words for the privacy card."""
    ledger_mirror: str | None = None
    """A second location for the ledger, best on another file system: it detects a rollback of the
    whole run folder."""

    @model_validator(mode="after")
    def _keys_fit(self) -> "PrivacySection":
        require_compatible(self)
        if self.enabled and (self.noise_multiplier is None) == (self.target_epsilon is None):
            raise ValueError(
                "give exactly one of noise_multiplier and target_epsilon; a copy of the recipe can "
                "leave its own out"
            )
        return self

    def request(self, num_steps: int, num_examples: int) -> PlanRequest:
        """Returns the request for a plan on a data set, with cap, slack and reserve."""
        arithmetic = OPTIONS["arithmetic"][self.arithmetic]
        assert isinstance(arithmetic, Arithmetic)
        names = {field.name for field in fields(PlanRequest)} & type(self).model_fields.keys()
        terms: dict[str, Any] = {name: getattr(self, name) for name in names}
        terms["sensitivity_slack"] = arithmetic.slack
        terms["informal_reasons"] = ()
        if self.simulation:
            terms["allow_small_noise"] = True
            terms["informal_reasons"] = (
                "a TAN simulation: the noise of a larger batch, scaled down "
                "(privacy.simulation = true)",
            )
        return PlanRequest(num_steps=num_steps, num_examples=num_examples, **terms)


class RunConfig(Section):
    """A recipe. `name` names the default run folder."""

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
    def _drop_init_without_weights(cls, init: InitSection | None) -> InitSection | None:
        return None if init is not None and init.parts == "none" else init

    @model_validator(mode="after")
    def _sections_fit(self) -> "RunConfig":
        if self.data.streaming and (self.privacy.enabled or self.data.provenance == "private"):
            raise ValueError(
                "data.streaming amplifies no privacy: it needs privacy.enabled = false and "
                "data.provenance = public or synthetic"
            )
        if self.data.streaming and self.data.staging:
            raise ValueError("data.staging needs random access; remove it or data.streaming")
        require_compatible(self.privacy, {"train.compile = true": self.train.compile})
        schedule = self.schedule
        num_steps = self.train.num_steps
        end = schedule.decay_steps or num_steps
        if schedule.decay == "cosine" and schedule.final_fraction == 0 and end < num_steps:
            raise ValueError(
                f"schedule.decay_steps {end} is before train.num_steps {num_steps}: the steps "
                "between would spend budget at rate 0; give a schedule.final_fraction or more "
                "decay_steps"
            )
        return self


def load_config(recipe: Path, overrides: Sequence[str] = ()) -> RunConfig:
    """Loads a recipe and applies `section.key=value` overrides; see `resolve_recipe`.

    Raises:
        ConfigError: missing or malformed file, unknown key, value out of range; names the file and
            the key.
    """
    return validate_section(RunConfig, resolve_recipe(recipe, overrides).tree, f"recipe {recipe}")


def resolve_recipe(recipe: Path, overrides: Sequence[str] = ()) -> ResolvedRecipe:
    """Returns a recipe with overrides.

    An override that names other data resets the recipe's declarations of its data (contract 12).
    """
    tree = read_toml(recipe, "recipe", "see recipes/ for the shipped ones")
    recipe_tree = copy.deepcopy(tree)
    override_tree = dict[str, Any]()
    keys = [override.partition("=")[0] for override in overrides]
    for key, override in zip(keys, overrides, strict=True):
        # A shell makes ten overrides of an unquoted {0..9}; nine of them would be lost.
        if keys.count(key) > 1:
            raise ConfigError(
                f"override {key} is given more than once; quote patterns, or put them into the "
                "recipe"
            )
        _apply(tree, override)
        _apply(override_tree, override)
    reset = []
    for data_key, declarations in DECLARED_OF.items():
        if leaf(tree, data_key) == leaf(recipe_tree, data_key):
            continue
        for declaration in declarations:
            section, _, name = declaration.partition(".")
            is_repeated = leaf(override_tree, declaration) is not None
            if not is_repeated and leaf(tree, declaration) is not None:
                del tree[section][name]
                reset.append(declaration)
    return ResolvedRecipe(recipe, tree, override_tree, reset)


SectionKind = TypeVar("SectionKind", bound=Section)


def validate_section(kind: type[SectionKind], tree: Mapping[str, Any], source: str) -> SectionKind:
    """Returns `tree` as a frozen section.

    Raises:
        ConfigError: a key is wrong; one line with `source` and the first wrong key.
    """
    refuse_nul(tree, source)
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        # A misspelt required key is also a missing key: the misspelt key tells more.
        errors = error.errors()
        unknown_keys = [entry for entry in errors if entry["type"] == "extra_forbidden"]
        first_error = unknown_keys[0] if unknown_keys else errors[0]
        path = first_error["loc"]
        key = ".".join(map(str, path))
        message = in_plain_words(first_error)
        if first_error["type"] == "extra_forbidden":
            section: type[BaseModel] | None = kind
            for name in path[:-1]:
                field = section.model_fields.get(str(name)) if section is not None else None
                section = section_of(field) if field is not None else None
            hint = did_you_mean(path[-1], section.model_fields if section else ())
            line = f"unknown key {key}{hint}"
        elif first_error["type"] == "missing":
            line = f"key {key} is missing"
        else:
            if first_error["type"] == "literal_error":
                choices = re.findall("'([^']+)'", first_error["ctx"]["expected"])
                message += did_you_mean(first_error["input"], choices)
            line = f"{key}: {message}" if key else message
        raise ConfigError(f"{source}: {line}") from error


def _apply(tree: dict[str, Any], override: str) -> None:
    """Sets the key of `section.key=value` in the tree."""
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
    """Returns the fully resolved configuration as TOML; loading it gives an equal configuration."""
    sections = config.model_dump()
    lines = [f"name = {toml_literal(sections.pop('name'))}"]
    for name, section in sections.items():
        if section is not None:
            lines += ["", f"[{name}]"]
            for key, setting in section.items():
                if setting is not None:
                    lines.append(f"{key} = {toml_literal(setting)}")
    return "\n".join(lines) + "\n"
