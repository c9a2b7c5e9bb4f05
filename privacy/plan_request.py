"""The choices behind a plan: those that a recipe states, and the request that `make_plan` turns into a plan."""

import functools
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Annotated, Any, Literal, get_type_hints

from pydantic import AfterValidator, ConfigDict, Field, TypeAdapter, ValidationError
from pydantic_core import PydanticCustomError

from .adaptive_clipping import LARGEST_BOUND, SMALLEST_BOUND, AdaptiveClipping
from .correlated.strategy import Strategy
from .errors import PrivacyConfigError
from .limits import MAX_COUNT
from .options import OPTIONS

MOST_BANDS = 4096
"""More would help nobody: past noise takes 8 bytes a band and coordinate."""


@functools.cache
def _checks(kind: type) -> dict[str, TypeAdapter[Any]]:
    """Field -> what checks its type; strict, so that "4", true and NaN are no numbers."""
    strict, hints = ConfigDict(strict=True, allow_inf_nan=False), get_type_hints(kind, include_extras=True)
    # A dataclass has a configuration of its own and takes none.
    own = {name: hints[name] for name in (field.name for field in fields(kind)) if name != "adaptive_clipping"}
    return {name: TypeAdapter(hint, config=strict) for name, hint in own.items()}


def require_types(plan: Any) -> None:
    """PrivacyConfigError naming the first field of a dataclass that its declared type does not take."""
    for name, check in _checks(plan.__class__).items():
        try:
            check.validate_python(getattr(plan, name))
        except ValidationError as error:
            said = error.errors()[0]["msg"].replace("Input should be", "must be")
            raise PrivacyConfigError(f"{name} {said}, not {getattr(plan, name)!r}") from error


def _one_of(kind: str) -> AfterValidator:
    """Refuses what is no option of that kind, in pydantic's own words for a Literal."""

    def known(name: str) -> str:
        if name not in OPTIONS[kind]:
            raise PydanticCustomError(
                "literal_error", "Input should be {expected}", {"expected": " or ".join(map(repr, OPTIONS[kind]))}
            )
        return name

    return AfterValidator(known)


@dataclass(frozen=True, kw_only=True)
class Choices:
    """What a recipe states and its plan keeps: one declaration for the recipe's section, the request and the plan.

    These types are checked where a recipe is loaded and where a plan is made.
    """

    enabled: bool = True
    """False trains without any privacy."""
    expected_batch_size: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    """B: the logical batch has B examples on average; each example is in it with probability q = B / n. Public."""
    target_epsilon: Annotated[float | None, Field(gt=0)] = None
    """What the noise multiplier is calibrated to; None where it is given."""
    max_grad_norm: Annotated[float, Field(ge=SMALLEST_BOUND, le=LARGEST_BOUND)] = 1.0
    """C, the L2 clipping bound of one example; under adaptive clipping the first one."""
    clipping_function: Annotated[str, _one_of("clipping_function")] = "flat"
    """Flat with constant C; adaptive: flat, with C that follows a quantile of the norms (Andrew et al. 2021); automatic:
    normalised gradients (Bu et al. 2023); per_layer or grouped: one norm per layer, or per top-level part of the model."""
    arithmetic: Annotated[str, _one_of("arithmetic")] = "floating"
    """Certified: clipped gradients are whole numbers, so that no rounding moves a sum by more than C (docs/certified.md)."""
    sampling: Annotated[str, _one_of("sampling")] = "poisson"
    """Shuffled data are read epoch by epoch (privacy/sampling/shuffle.py), for public data: such a run claims nothing."""
    bands: Annotated[int, Field(ge=1, le=MOST_BANDS)] = 1
    """b of correlated noise: b groups of examples take turns, and a step's noise cancels that of the b - 1 steps before."""
    strategy: Literal["square_root", "optimised"] = "square_root"
    """Its coefficients; optimised for this recipe's schedule, weight decay and momentum (docs/correlated_noise.md)."""


@dataclass(frozen=True, kw_only=True)
class PlanChoices(Choices):
    """What a request and its plan have in common.

    Attributes:
        num_examples: n, public under zero-out adjacency.
        num_steps: planned optimizer steps.
        adaptive_clipping: C of flat clipping follows a quantile of the norms, whose release sigma pays for too; None where C is
            constant.
        sensitivity_slack: r; one example contributes at most C (1 + r), and the accountant gets sigma / (1 + r).
        coefficients: the optimised ones of correlated noise, public and frozen; empty otherwise.
        informal_reasons: why the run makes no formal claim, as far as the plan does not see it by itself (contract, point 11).
    """

    num_examples: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    num_steps: Annotated[int, Field(ge=1, le=MAX_COUNT)]
    adaptive_clipping: AdaptiveClipping | None = None
    sensitivity_slack: Annotated[float, Field(ge=0, le=1e-3)] = 0.0
    coefficients: tuple[float, ...] = ()
    informal_reasons: tuple[str, ...] = ()

    @cached_property
    def noise_strategy(self) -> Strategy:
        """The coefficients of the noise; 1 alone with one band."""
        return Strategy(self.coefficients) if self.coefficients else Strategy.square_root(self.bands)

    @property
    def group_size(self) -> int:
        """Examples of the largest of the groups that take turns: ceil(n / b)."""
        return -(-self.num_examples // self.bands)

    def participations(self, intents: int) -> int:
        """How many of these intents the group with most of them has: ceil(intents / b), since the groups take turns."""
        return -(-intents // self.bands)

    def require_strategy(self) -> None:
        """PrivacyConfigError for bands, strategy and coefficients that contradict each other."""
        bands, count = self.bands, len(self.coefficients)
        if (self.strategy == "optimised") != bool(count) or count not in (0, bands):
            raise PrivacyConfigError(
                f"strategy {self.strategy!r} with {bands} bands and {count} coefficients: optimised ones are as many as the "
                "bands, and square-root ones are not listed"
            )
        if bands == 1 and self.strategy != "square_root":
            raise PrivacyConfigError("strategy 'optimised' is for bands above 1: one band has nothing to choose")


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanChoices):
    """What `make_plan` is asked for.

    Attributes:
        noise_multiplier: sigma; exactly one of it and `target_epsilon` is given (neither is needed without privacy).
        target_delta: 1 / (2 n) by default.
        reserved_attempts: max(2, ceil(1 % of the steps)) by default.
        cap: "default" follows delta, steps and rate, up to ceil(B + 8 sqrt(B)) (`privacy.plan.default_cap`); None samples
            without a cap. Shuffled batches need none.
        allow_small_noise: allows sigma below 0.3.
    """

    noise_multiplier: float | None = None
    target_delta: float | None = None
    reserved_attempts: int | None = None
    cap: int | Literal["default"] | None = "default"
    allow_small_noise: bool = False
