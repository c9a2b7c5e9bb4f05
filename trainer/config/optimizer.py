"""What sections of a recipe are made of, and its [optimizer], [schedule] and [train]; see trainer/config/recipe.py."""

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
    """Frozen; an unknown key is an error, and so is a value of another type: "4" and true are no step counts."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )


def did_you_mean(wrong: object, known: Iterable[str]) -> str:
    """ "; did you mean X?", or nothing where no known word is like it."""
    close = difflib.get_close_matches(str(wrong), list(known), n=1)
    return f"; did you mean {close[0]}?" if close else ""


def section_of(field: FieldInfo) -> type[BaseModel] | None:
    """The section that a key is, or None for a value."""
    options = (field.annotation, *get_args(field.annotation))
    return next(
        (one for one in options if isinstance(one, type) and issubclass(one, BaseModel)), None
    )


def key_lines(section: type[BaseModel], prefix: str = "") -> list[str]:
    """All keys below a section, each with its default and what it says of itself."""
    lines = []
    for name, field in section.model_fields.items():
        if (inner := section_of(field)) is not None:
            lines += key_lines(inner, f"{prefix}{name}.")
            continue
        default = (
            "required"
            if field.is_required()
            else json.dumps(field.get_default(call_default_factory=True))
        )
        others = [json.dumps(one) for one in get_args(field.annotation) if isinstance(one, str)]
        default = " | ".join(dict.fromkeys([default.replace("null", "not set"), *others]))
        lines.append(
            f"{prefix}{name} ({default}): {' '.join((field.description or '').split())}".removesuffix(
                ": "
            )
        )
    return lines


RATE_LIMIT = 1e6
Beta = Annotated[float, Field(ge=0, lt=1)]
Count = Annotated[int, Field(ge=0, le=MAX_COUNT)]
"""Steps or examples: none, or up to more than any data set or run has."""
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
"""Which optimizer a key belongs to; the others belong to both."""


class OptimizerSection(Section):
    """See trainer/optimizers. A key that the named optimizer does not have is an error."""

    name: OptimizerName = "adamw"
    peak_lr: Rate
    betas: tuple[Beta, Beta] = Field((0.9, 0.95), strict=False)  # TOML has lists only
    eps: Rate = 1e-8
    momentum: float = Field(0.9, ge=0, lt=1)
    weight_decay: float = Field(0.0, ge=0, le=RATE_LIMIT)
    """Decoupled (SGD: added to the gradient); biases, norms and other vectors are excluded."""
    layer_decay: float | None = Field(None, gt=0, le=1)
    """Each block of the encoder takes this part of the rate of the block above it; what follows the encoder the whole rate."""

    @model_validator(mode="after")
    def _keys_belong(self) -> "OptimizerSection":
        for key, name in OPTIMIZER_KEYS.items():
            if key in self.model_fields_set and self.name != name:
                raise ValueError(f"{key} belongs to {name}, not to {self.name}")
        return self

    @model_serializer(mode="wrap")
    def _own_keys(self, dump: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Leaves out the keys of other optimizers, so that what is written can be read."""
        others = {key for key, name in OPTIMIZER_KEYS.items() if self.name != name}
        return {key: value for key, value in dump(self).items() if key not in others}


class ScheduleSection(Section):
    """Learning rate as a pure function of the step: linear warm-up, then `decay` until `decay_steps`."""

    warmup_steps: Count = 0
    decay: Literal["cosine", "cosine_from_start", "constant"] = "cosine"
    """`cosine_from_start`: the lesser of warm-up and a cosine that began with the first step, as ViP's released code has it."""
    decay_steps: Positive | None = None
    """Step at which a cosine reaches the final rate; default: the last step. Longer than training stops it midway."""
    final_fraction: float = Field(0.0, ge=0, le=1)

    @model_validator(mode="after")
    def _decay_follows_warmup(self) -> "ScheduleSection":
        if self.decay_steps is not None and self.decay_steps <= self.warmup_steps:
            raise ValueError(
                f"decay_steps {self.decay_steps} must be more than warmup_steps {self.warmup_steps}"
            )
        return self


class TrainSection(Section):
    num_steps: Positive
    micro_batch_size: int = Field(ge=1, le=2**20)
    """Examples per forward on one rank: speed and memory only, never the result."""
    accumulation: Literal["local", "sharded"] = "local"
    """Each rank sums in place and one reduction ends the logical batch; or every micro-batch is reduced to sharded sums, for
    models whose sum does not fit. Speed and memory only, never the result."""
    compile: bool = False
    """torch.compile of the model's blocks: minutes at the start, less time per step on a GPU. May change between starts."""
    seed: int = Field(0, ge=0, lt=2**63)
    """Seed of the initial weights, which are public. No secret and no noise comes from it."""
    checkpoint_every: Positive | None = None
    """Steps between checkpoints; a crash repeats, and is charged for, the steps since the last. Default: 1/20 of the reserve."""
    keep_checkpoints: Positive = 2
    """How many of the newest checkpoints are kept."""
    keep_every: Positive | None = None
    """Every checkpoint whose step is a multiple of this is kept, too."""
    async_checkpoints: bool = False
    """Write in the background, from a copy in CPU memory; a crash meanwhile goes back to the checkpoint before."""
    ema_decay: float | None = Field(None, gt=0, lt=1)
    """Keeps an exponential moving average of the weights in checkpoints: post-processing, free of privacy cost."""
    max_minutes: float | None = Field(None, gt=0, le=10**7)
    """Stop as if asked to (exit 7) at the first step boundary after so long; the same command resumes."""
    grace_seconds: Seconds = Field(20.0, gt=0)
    """How long a step may take to end after a request to stop; then it is abandoned. Launchers kill 30 s after SIGTERM."""
    log_every: Positive = 1
    profile: tuple[Positive, Positive] | None = Field(None, strict=False)  # TOML has lists only
    """The first and the last step of which torch's profiler writes a trace into `private/profile/`, one file per rank."""

    @model_validator(mode="after")
    def _profile_has_an_order(self) -> "TrainSection":
        if self.profile is not None and not self.profile[0] <= self.profile[1] <= self.num_steps:
            raise ValueError(
                f"train.profile = [first, last] needs first <= last <= train.num_steps {self.num_steps}, not {list(self.profile)}"
            )
        return self
