"""PrivacyPlan: sampler, clipping bound, noise and accountant, validated together."""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from fractions import Fraction
from functools import cached_property
from typing import Annotated, Any, Literal

from pydantic import Field
from scipy import stats

from ..accounting.accountants import (
    EpsilonTable,
    ReleaseGroup,
    effective_noise_multiplier,
    epsilon,
    epsilon_rdp,
)
from ..accounting.calibration import (
    MAX_NOISE_MULTIPLIER,
    MIN_NOISE_MULTIPLIER,
    Progress,
    calibrate_noise_multiplier,
)
from ..accounting.group_privacy import tail_of_doubles
from ..accounting.rounding import rounded_up, useless_delta
from ..errors import PrivacyConfigError
from .lattice import Lattice
from .limits import MAX_COUNT, MAX_EPSILON
from .options import Arithmetic, Option, options_of, require_compatible
from .request import PlanChoices, PlanRequest, require_types

ADJACENCY = "zero_out"
ROUNDED: Literal["rounded"] = "rounded"


@dataclass(frozen=True, kw_only=True)
class PrivacyPlan(PlanChoices):
    """The frozen privacy parameters of a run; built by `make_plan`, or by `from_frozen`.

    Attributes:
        noise_multiplier: sigma; the noise has standard deviation sigma times the clipper's
            sensitivity.
        target_delta: delta of the claim.
        reserved_attempts: intents beyond `num_steps` that crashes may use up.
        cap: largest batch, charged; None samples without a cap.
        noise_kind: "rounded" to whole multiples of the sums' step (privacy/noise/source.py). None
            in ledgers of version 0.1, which made noise of doubles, except in certified arithmetic.
            The cost of its bounded support is still charged, and no further step is taken.
        warnings: lines to print; not part of the plan's identity.
    """

    noise_multiplier: Annotated[float, Field(ge=0, le=MAX_NOISE_MULTIPLIER)]
    target_delta: Annotated[float, Field(gt=0, lt=1)]
    reserved_attempts: Annotated[int, Field(ge=0, le=MAX_COUNT)]
    cap: Annotated[int | None, Field(ge=1)]
    noise_kind: Literal["rounded"] | None = ROUNDED
    warnings: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        require_types(self)
        if self.expected_batch_size > self.num_examples:
            raise PrivacyConfigError(
                f"expected_batch_size {self.expected_batch_size} is larger than the data "
                f"({self.num_examples} examples)"
            )
        require_compatible(self)
        if self.accounted_delta <= 0:
            raise PrivacyConfigError(
                f"delta {self.target_delta:g} is below the tail {self.noise_tail_delta:.2g} of "
                "noise made of doubles"
            )
        # Refuses a slack above 1e-3.
        effective_noise_multiplier(self.noise_multiplier, self.sensitivity_slack)

    @cached_property
    def options(self) -> dict[str, Option]:
        """Returns kind -> the plan's option of that kind (privacy/plan/options.py)."""
        return options_of(self)

    @cached_property
    def arithmetic_option(self) -> Arithmetic:
        option = self.options["arithmetic"]
        assert isinstance(option, Arithmetic)
        return option

    @cached_property
    def lattice(self) -> Lattice | None:
        """Returns the lattice of certified arithmetic; None in floating point."""
        return self.arithmetic_option.lattice(self)

    @property
    def sampling_threshold(self) -> int:
        """Returns Q = floor(B 2^64 / n): an example is drawn where a coin of 64 bits is below Q."""
        return (self.expected_batch_size << 64) // self.num_examples

    @property
    def sample_rate(self) -> float:
        """Returns q = Q / 2^64, rounded up to a double, which the accountant is charged with."""
        exact_rate = Fraction(self.sampling_threshold, 2**64)
        rounded_rate = float(exact_rate)
        if Fraction(rounded_rate) < exact_rate:
            rounded_rate = math.nextafter(rounded_rate, 1.0)
        return rounded_rate

    @property
    def max_batch_size(self) -> int:
        """Returns the most examples of a step, for buffers and numbers of micro-batches."""
        if self.sampling == "shuffle":
            steps_per_epoch = -(-self.num_examples // self.expected_batch_size)
            return -(-self.num_examples // steps_per_epoch)
        return self.num_examples if self.cap is None else min(self.cap, self.num_examples)

    @property
    def max_intents(self) -> int:
        """Returns the budget in charged intents: steps plus reserve."""
        return self.num_steps + self.reserved_attempts

    @property
    def effective_noise_multiplier(self) -> float:
        """Returns sigma / (1 + r), which the accountant is charged with."""
        return effective_noise_multiplier(self.noise_multiplier, self.sensitivity_slack)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Returns why the run has no formal guarantee; empty when it has one."""
        reasons = []
        if not self.enabled:
            reasons.append("privacy is disabled (privacy.enabled = false)")
        elif self.noise_multiplier == 0:
            reasons.append("the noise multiplier is 0")
        reasons += [option.reason for option in self.options.values() if option.reason is not None]
        return (*reasons, *self.informal_reasons)

    @property
    def formal_guarantee(self) -> bool:
        """Returns whether an epsilon may be printed at all."""
        return not self.reasons

    def release_group(self, count: int) -> ReleaseGroup:
        """Returns `count` intents of this plan for the accountant."""
        return ReleaseGroup(
            self.sample_rate, self.effective_noise_multiplier, count, self.num_examples, self.cap
        )

    @property
    def had_doubles(self) -> bool:
        """Returns whether version 0.1 drew the noise, as doubles; no further step draws it."""
        return self.noise_kind is None and self.lattice is None and self.noise_multiplier > 0

    @cached_property
    def noise_tail_delta(self) -> float:
        """Returns the cost in delta of the bounded support of doubles, over all `max_intents`.

        0 for rounded noise.
        """
        if not (self.had_doubles and self.formal_guarantee):
            return 0.0
        return tail_of_doubles(self.release_group(self.max_intents), self.num_examples)

    @property
    def accounted_delta(self) -> float:
        """Returns the delta for the accountant: `target_delta` less `noise_tail_delta`."""
        return self.target_delta - self.noise_tail_delta

    def epsilon_after(self, count: int) -> float | None:
        """Returns the exact epsilon of `count` charged intents; None without a formal guarantee.

        It takes about 3 s with a cap.
        """
        if not self.formal_guarantee:
            return None
        return epsilon([self.release_group(count)], self.accounted_delta)

    @cached_property
    def epsilon_planned(self) -> float | None:
        """Returns the epsilon of a run without crashes."""
        return self.epsilon_after(self.num_steps)

    @cached_property
    def epsilon_with_reserve(self) -> float | None:
        """Returns the epsilon of a run that uses its whole reserve: the most that it can spend."""
        return self.epsilon_after(self.max_intents)

    def epsilon_table(self) -> EpsilonTable | None:
        """Returns a table of epsilon by charged intents, for one rank; None without a guarantee."""
        if not self.formal_guarantee:
            return None
        intent = self.release_group(1)
        return EpsilonTable(intent, self.accounted_delta, self.max_intents, self.num_steps)

    def frozen_fields(self) -> dict[str, Any]:
        """Returns `plan` of the ledger's `open` record, which every resume must repeat exactly."""
        plan_fields = {name: getattr(self, name) for name in _frozen_names()}
        # Ledgers of version 0.1 have no such field.
        if self.noise_kind is None:
            del plan_fields["noise_kind"]
        for option in self.options.values():
            plan_fields |= option.frozen(self)
        return plan_fields | {
            "informal_reasons": list(self.informal_reasons),
            "sample_rate": self.sample_rate,
            # As text: 64-bit integers do not survive JSON readers that use doubles.
            "sampling_threshold": str(self.sampling_threshold),
            "adjacency": ADJACENCY,
            "formal_guarantee": self.formal_guarantee,
        }

    @classmethod
    def from_frozen(cls, record: Mapping[str, Any]) -> PrivacyPlan:
        """Returns the plan whose `frozen_fields` a ledger has recorded.

        Raises:
            PrivacyConfigError: the record contradicts itself.
        """
        record = {"noise_kind": None, **with_constant_bound(record)}
        missing_names = [name for name in _frozen_names() if name not in record]
        if missing_names:
            raise PrivacyConfigError(f"the recorded plan lacks {', '.join(missing_names)}")
        numbers = {name: record[name] for name in _frozen_names()}
        numbers["informal_reasons"] = tuple(numbers["informal_reasons"])
        plan = cls(**numbers)
        require_equal(
            record,
            {"noise_kind": None, **plan.frozen_fields()},
            "the recorded plan contradicts itself",
        )
        return plan


def with_constant_bound(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recorded plan without `adaptive_clipping`, by which version 0.1 moved C.

    Raises:
        PrivacyConfigError: C moved.
    """
    plan_fields = dict(record)
    if plan_fields.pop("adaptive_clipping", None) is not None:
        raise PrivacyConfigError(
            "C of this run moves (adaptive clipping), which version 0.1 alone can do: judge it by "
            "its own verify.py"
        )
    return plan_fields


def _frozen_names() -> list[str]:
    return [field.name for field in fields(PrivacyPlan) if field.name != "warnings"]


def usual_cap(expected_batch_size: int) -> int:
    """Returns ceil(B + 8 sqrt(B)): eight standard deviations, whose truncation costs next to none.

    No default cap is above it; `default_cap` is the smaller one that is enough for the run's delta.
    """
    return math.ceil(expected_batch_size + 8 * math.sqrt(expected_batch_size))


def default_cap(plan: PrivacyPlan) -> int:
    """Returns the smallest cap that costs less than a thousandth of delta, at most `usual_cap`.

    Batches that pass the cap anywhere in the run, with a probability of at most tau, cost at most
    tau (1 + e^epsilon).
    """
    n = plan.num_examples
    num_intents = plan.max_intents
    largest = min(usual_cap(plan.expected_batch_size), n)
    if not plan.formal_guarantee:
        return largest
    group = plan.release_group(num_intents)
    epsilon_bound = plan.target_epsilon or epsilon_rdp([group], plan.target_delta)
    growth = 1 + math.exp(min(epsilon_bound, 700.0))
    tail_per_intent = plan.target_delta / (1000 * growth) / num_intents
    rate = plan.sample_rate
    caps = range(plan.expected_batch_size, largest)
    # The tail falls as caps grow, and the search needs rising numbers: it compares negatives.
    index = bisect_left(caps, -tail_per_intent, key=lambda cap: -stats.binom.sf(cap, n, rate))
    return caps.start + index


def make_plan(
    request: PlanRequest,
    *,
    resume: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> PrivacyPlan:
    """Returns a validated plan; calibrates sigma where a target epsilon is given.

    Args:
        resume: the `plan` of an existing ledger: sigma is then taken from it instead of being
            calibrated again, so that another library version cannot change it, and so are a default
            cap and the kind of noise. Compare with `require_equal` afterwards.
        progress: called with (stage, sigma, epsilon) during calibration.

    Raises:
        PrivacyConfigError: with one line that names the wrong field.
    """
    require_compatible(request)
    sigma = request.noise_multiplier if request.enabled else 0.0
    target = request.target_epsilon if request.enabled else None
    if (sigma is None) == (target is None):
        raise PrivacyConfigError("give exactly one of noise_multiplier and target_epsilon")
    if sigma is not None and 0 < sigma < MIN_NOISE_MULTIPLIER and not request.allow_small_noise:
        raise PrivacyConfigError(
            f"noise_multiplier {sigma:g} is below {MIN_NOISE_MULTIPLIER}, where epsilon explodes; "
            "allow it explicitly (allow_small_noise) if you mean it"
        )
    delta = request.target_delta
    if delta is None:
        delta = 1 / (2 * max(request.num_examples, 1))
    reserve = request.reserved_attempts
    if reserve is None:
        reserve = max(2, math.ceil(request.num_steps / 100))
    choices = {field.name: getattr(request, field.name) for field in fields(PlanChoices)}
    choices["target_epsilon"] = target
    plan = PrivacyPlan(
        **choices,
        # 1.0 stands in for a sigma that is not calibrated yet.
        noise_multiplier=1.0 if sigma is None else sigma,
        target_delta=delta,
        reserved_attempts=reserve,
        cap=None,
        noise_kind=ROUNDED if resume is None else resume.get("noise_kind"),
    )
    plan_default = default_cap(plan)
    cap = request.cap
    if cap == "default":
        recorded_cap = None if resume is None else resume.get("cap")
        largest = usual_cap(plan.expected_batch_size)
        # A recorded cap above the largest default was no default.
        is_default = isinstance(recorded_cap, int) and recorded_cap <= largest
        cap = recorded_cap if is_default else plan_default
    if cap is not None and request.sampling != "shuffle":
        plan = replace(plan, cap=min(cap, plan.num_examples))
    warnings = []
    delta_warning = useless_delta(plan.target_delta, plan.num_examples)
    if delta_warning and plan.enabled:
        warnings.append(delta_warning)
    if request.cap != "default" and plan.cap is not None and plan.cap < plan_default:
        warnings.append(f"cap {plan.cap} is below {plan_default}, and the truncation costs epsilon")
    if target is not None and resume is not None:
        sigma = float(resume["noise_multiplier"])
    elif target is not None:
        calibration = calibrate_noise_multiplier(
            plan.release_group(plan.max_intents),
            plan.accounted_delta,
            target,
            sensitivity_slack=plan.sensitivity_slack,
            allow_small_noise=request.allow_small_noise,
            progress=progress,
        )
        sigma = calibration.noise_multiplier
        if calibration.clamped:
            warnings.append(
                f"noise multiplier {sigma:g}, the smallest allowed, gives epsilon "
                f"{rounded_up(calibration.epsilon)}, below the target {target:g}"
            )
    assert sigma is not None
    plan = replace(plan, noise_multiplier=sigma, warnings=tuple(warnings))
    if plan.formal_guarantee:
        # By a bound that costs little: the exact computation of so large an epsilon would take
        # minutes and all memory.
        epsilon_bound = epsilon_rdp([plan.release_group(plan.max_intents)], plan.accounted_delta)
        if epsilon_bound > MAX_EPSILON:
            raise PrivacyConfigError(
                f"epsilon would be about {epsilon_bound:.3g}, which protects nobody, and above "
                f"{MAX_EPSILON:g} none is computed: take more noise, fewer steps or a smaller batch"
            )
    return plan


def require_equal(
    recorded_plan: Mapping[str, Any], current_plan: Mapping[str, Any], prefix: str
) -> None:
    """Refuses another plan than the recorded one: privacy fields are frozen.

    Args:
        prefix: of the message.

    Raises:
        PrivacyConfigError: names the first field that differs.
    """
    # In the order of the plan's fields, so that a field that was asked for is named before a field
    # that follows from it.
    names = [*current_plan, *(name for name in recorded_plan if name not in current_plan)]
    for name in names:
        recorded_value = recorded_plan.get(name)
        current_value = current_plan.get(name)
        if isinstance(recorded_value, dict) and isinstance(current_value, dict):
            require_equal(recorded_value, current_value, prefix)
        elif recorded_value != current_value or ((name in recorded_plan) != (name in current_plan)):
            raise PrivacyConfigError(
                f"{prefix}: {name} was {recorded_value!r} and is now {current_value!r}"
            )
