"""The choices of a recipe, and the request that `make_plan` turns into a plan."""

import functools
from dataclasses import dataclass, fields
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import ErrorDetails, PydanticCustomError

from ..errors import PrivacyConfigError
from .limits import LARGEST_BOUND, MAX_COUNT, SMALLEST_BOUND
from .options import OPTIONS

_MUST_BE = {
    "int_parsing": "a whole number",
    "int_type": "a whole number",
    "int_from_float": "a whole number",
    "float_parsing": "a number",
    "float_type": "a number",
    "finite_number": "a finite number",
    "bool_parsing": "true or false",
    "bool_type": "true or false",
    "string_type": "text",
    "literal_error": "{expected}",
    "greater_than": "above {gt:,.12g}",
    "greater_than_equal": "{ge:,.12g} or more",
    "less_than": "below {lt:,.12g}",
    "less_than_equal": "{le:,.12g} or less",
}
"""Type of pydantic's error -> the values that the field accepts."""


def in_plain_words(error: ErrorDetails) -> str:
    """Returns the fault of a value, and the value: `must be 0 or more, not -1`.

    A rare error keeps pydantic's own words.
    """
    if error["type"] not in _MUST_BE:
        return error["msg"].removeprefix("Value error, ").replace("Input should be", "must be")
    accepted = _MUST_BE[error["type"]].format(**error.get("ctx", {}))
    return f"must be {accepted}, not {error['input']!r:.60}"


@functools.cache
def _checks(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Returns field -> check of its type; strict, so that "4", true and NaN are not numbers."""
    strict = ConfigDict(strict=True, allow_inf_nan=False)
    hints = get_type_hints(kind, include_extras=True)
    return {field.name: TypeAdapter(hints[field.name], config=strict) for field in fields(kind)}


def require_types(plan: Any) -> None:
    """Raises PrivacyConfigError with the first field of a dataclass that is not of its type."""
    for name, check in _checks(plan.__class__).items():
        try:
            check.validate_python(getattr(plan, name))
        except ValidationError as error:
            raise PrivacyConfigError(f"{name} {in_plain_words(error.errors()[0])}") from error


def _one_of(kind: str) -> AfterValidator:
    """Returns a validator that refuses unknown options, in pydantic's own words for a Literal."""

    def require_option(name: str) -> str:
        if name not in OPTIONS[kind]:
            raise PydanticCustomError(
                "literal_error",
                "Input should be {expected}",
                {"expected": " or ".join(map(repr, OPTIONS[kind]))},
            )
        return name

    return AfterValidator(require_option)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """The choices of a recipe that its plan keeps.

    Recipe section, request and plan share this declaration. Its types are checked where a recipe is
    loaded and where a plan is made.
    """

    enabled: bool = True
    """False trains without any privacy."""
    expected_batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """B: the logical batch has B examples on average; each example is in it with probability
    q = B / n. Public."""
    target_epsilon: Annotated[float | None, Field(gt=0)] = None
    """Target of the calibration of the noise multiplier; None where the multiplier is given."""
    max_grad_norm: Annotated[float, Field(ge=SMALLEST_BOUND, le=LARGEST_BOUND)] = 1.0
    """C, the L2 clipping bound of one example."""
    clipping_function: Annotated[str, _one_of("clipping_function")] = "flat"
    """Flat: one norm of all parameters; automatic: normalised gradients (Bu et al. 2023); per_layer
    or grouped: one norm per layer, or per top-level part of the model."""
    arithmetic: Annotated[str, _one_of("arithmetic")] = "floating"
    """Certified: clipped gradients are whole numbers, so that no rounding moves a sum by more than
    C (docs/certified.md)."""
    sampling: Annotated[str, _one_of("sampling")] = "poisson"
    """Shuffled data are read epoch by epoch (privacy/sampling/shuffle.py), for public data: such a
    run claims nothing."""


@dataclass(frozen=True, kw_only=True)
class PlanChoices(Choices):
    """The fields that a request and its plan share.

    Attributes:
        num_examples: n, public under zero-out adjacency.
        num_steps: planned optimizer steps.
        sensitivity_slack: r; one example contributes at most C (1 + r), and the accountant gets
            sigma / (1 + r).
        informal_reasons: why the run makes no formal claim, beyond the reasons that follow from the
            plan itself (contract, point 11).
    """

    num_examples: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    num_steps: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    sensitivity_slack: Annotated[float, Field(ge=0, le=1e-3)] = 0.0
    informal_reasons: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanChoices):
    """The request for a plan, for `make_plan`.

    Attributes:
        noise_multiplier: sigma; exactly one of it and `target_epsilon` is given (neither is needed
            without privacy).
        target_delta: 1 / (2 n) by default.
        reserved_attempts: max(2, ceil(1 % of the steps)) by default.
        cap: "default" follows delta, steps and rate, up to ceil(B + 8 sqrt(B))
            (`privacy.plan.numbers.default_cap`); None samples without a cap. Shuffled batches need
            none.
        allow_small_noise: allows sigma below 0.3.
    """

    noise_multiplier: float | None = None
    target_delta: float | None = None
    reserved_attempts: int | None = None
    cap: int | Literal["default"] | None = "default"
    allow_small_noise: bool = False
