"""Declares a recipe's sections [optimizer], [schedule] and [train]; recipe.py has the others."""

import difflib
import json
from collections.abc import Iterable
from typing import Annotated, Any, Literal, get_args

from pydantic import (
    BaseModel,
    ConfigDict,
    Field,
    SerializerFunctionWrapHandler,
    model_serializer,
    model_validator,
)
from pydantic.fields import FieldInfo

from privacy.plan.limits import MAX_COUNT


class Section(BaseModel):
    """A frozen section of a recipe.

    An unknown key is an error, and so is a value of another type: "4" and true are no step counts.
    """

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def did_you_mean(wrong: object, words: Iterable[str]) -> str:
    """Returns "; did you mean X?", or "" where no word is like the wrong one."""
    matches = difflib.get_close_matches(str(wrong), list(words), n=1)
    return f"; did you mean {matches[0]}?" if matches else ""


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """Returns the class of a key that is a section, or None for a value."""
    for annotation in (field.annotation, *get_args(field.annotation)):
        if isinstance(annotation, type) and issubclass(annotation, BaseModel):
            return annotation
    return None


def key_lines(section: type[BaseModel], prefix: str = "") -> list[str]:
    """Returns a line for each key below a section: its values, default first, and its help."""
    lines = []
    for name, field in section.model_fields.items():
        inner_section = section_of(field)
        if inner_section is not None:
            lines += key_lines(inner_section, f"{prefix}{name}.")
            continue
        default = "required"
        if not field.is_required():
            default = json.dumps(field.get_default(call_default_factory=True))
        values = [default.replace("null", "not set")]
        for choice in get_args(field.annotation):
            if isinstance(choice, str):
                values.append(json.dumps(choice))
        values_text = " | ".join(dict.fromkeys(values))
        help_text = " ".join((field.description or "").split())
        lines.append(f"{prefix}{name} ({values_text}): {help_text}".removesuffix(": "))
    return lines


RATE_LIMIT = 1e6
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""A number of steps or examples, 0 included; the limit is beyond any data set or run."""
Positive = Annotated[int, Field(ge=1, le=MAX_COUNT)]
Rate = Annotated[float, Field(gt=0, le=RATE_LIMIT)]
Seconds = Annotated[float, Field(ge=0, le=86_400)]
"""A time to wait: a day at most, which every clock and socket takes."""

OptimizerName = Literal["adamw", "sgd"]
OPTIMIZER_KEYS: dict[str, OptimizerName] = {
    "betas": "adamw",
    "eps": "adamw",
    "momentum": "sgd",
}
"""Key -> the optimizer that it belongs to; other keys belong to both."""


class OptimizerSection(Section):
    """The optimizer; see trainer/optimizers. A key of another optimizer is an error."""

    name: OptimizerName = "adamw"
    peak_lr: Rate
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)  # TOML has lists only
    eps: Rate = 1e-8
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, le=RATE_LIMIT)
    """Decoupled (SGD: added to the gradient); biases, norms and other vectors are excluded."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Each block of the encoder takes this part of the rate of the block above it; the layers after
    the encoder take the whole rate."""

    @model_validator(mode="after")
    def _keys_belong(self) -> "OptimizerSection":
        for key, name in OPTIMIZER_KEYS.items():
            if key in self.model_fields_set and self.name != name:
                raise ValueError(f"{key} belongs to {name}, not to {self.name}")
        return self

    @model_serializer(mode="wrap")
    def _own_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out the keys of other optimizers, so that a written recipe can be read."""
        keys: dict[str, Any] = dump(self)
        for key, name in OPTIMIZER_KEYS.items():
            if self.name != name:
                keys.pop(key, None)
        return keys


class ScheduleSection(Section):
    """The learning rate, as a pure function of the step.

    It warms up linearly, and then follows `decay` until `decay_steps`.
    """

    warmup_steps: Count = 0
    decay: Literal["cosine", "cosine_from_start", "constant"] = "cosine"
    """`cosine_from_start`: the lesser of warm-up and a cosine that began with the first step, as in
    ViP's released code."""
    decay_steps: Positive | None = None
    """Step at which a cosine reaches the final rate; default: the last step. A later step stops the
    cosine midway."""
    final_fraction: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _decay_follows_warmup(self) -> "ScheduleSection":
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} must be more than warmup_steps {self.warmup_steps}"
            )
        return self


class TrainSection(Section):
    """The steps of a run, and how a machine takes them."""

    num_steps: Positive
    micro_batch_size: int = Field(ge=1, le=2**20)
    """Examples per forward on one rank: speed and memory only, never the result."""
    accumulation: Literal["local", "sharded"] = "local"
    """Each rank sums in place and one reduction ends the logical batch; or every micro-batch is
    reduced to sharded sums, for models whose sum does not fit. Speed and memory only, never the
    result."""
    compile: bool = False
    """torch.compile of the model's blocks: minutes at the start, less time per step on a GPU. May
    change between starts."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, which are public. No secret and no noise comes from it."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints; a crash repeats, and is charged for, the steps since the last.
    Default: 1/20 of the reserve."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Positive | None = None
    """Every checkpoint whose step is a multiple of this number is kept, too."""
    async_checkpoints: bool = False
    """Writes checkpoints in the background, from a copy in CPU memory; a crash meanwhile goes back
    to the checkpoint before."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keeps an exponential moving average of the weights in checkpoints: post-processing, free of
    privacy cost."""
    max_minutes: float | None = Field(None, gt=0, le=10**7)
    """Stops the run at the first step boundary after this time (exit 7); the same command
    resumes."""
    grace_seconds: Seconds = Field(20.0, gt=0)
    """How long a step may take to end after a request to stop; then it is abandoned. Launchers kill
    30 s after SIGTERM."""
    log_every: Positive = 1
    profile: tuple[Positive, Positive] | None = Field(None, strict=False)  # TOML has lists only
    """The first and the last step of which torch's profiler writes a trace into `private/profile/`,
    one file per rank."""

    @model_validator(mode="after")
    def _profile_has_an_order(self) -> "TrainSection":
        if self.profile is not None and not self.profile[0] <= self.profile[1] <= self.num_steps:
            raise ValueError(
                "train.profile = [first, last] needs first <= last <= train.num_steps "
                f"{self.num_steps}, not {list(self.profile)}"
            )
        return self
