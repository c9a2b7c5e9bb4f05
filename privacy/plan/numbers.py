"""PrivacyPlan: sampler, clipping bound, noise and accountant, validated together so that they cannot disagree."""

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
    """The frozen privacy parameters of a run; built by `make_plan`, or by `from_frozen` from a ledger.

    Attributes:
        noise_multiplier: sigma; the noise has standard deviation sigma times the clipper's sensitivity.
        target_delta: delta of the claim.
        reserved_attempts: intents beyond `num_steps` that crashes may use up.
        cap: largest batch, charged; None samples without a cap.
        noise_kind: rounded to whole multiples of the sums' step (privacy/noise/source.py). None in ledgers of
            version 0.1: there noise was made of doubles, except in certified arithmetic. What its bounded
            support costs is still charged, and no step is taken any more.
        warnings: lines to print; no part of the plan's identity.
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
                f"expected_batch_size {self.expected_batch_size} is larger than the data ({self.num_examples} examples)"
            )
        require_compatible(self)
        if self.accounted_delta <= 0:
            raise PrivacyConfigError(
                f"delta {self.target_delta:g} is below the tail {self.noise_tail_delta:.2g} of noise made of doubles"
            )
        effective_noise_multiplier(
            self.noise_multiplier, self.sensitivity_slack
        )  # refuses a slack above 1e-3

    @cached_property
    def options(self) -> dict[str, Option]:
        """Kind -> the plan's option of it; what they say of themselves is in privacy/plan/options.py."""
        return options_of(self)

    @cached_property
    def arithmetic_option(self) -> Arithmetic:
        option = self.options["arithmetic"]
        assert isinstance(option, Arithmetic)
        return option

    @cached_property
    def lattice(self) -> Lattice | None:
        """Where contributions, sums and noise lie in certified arithmetic; None in floating point."""
        return self.arithmetic_option.lattice(self)

    @property
    def sampling_threshold(self) -> int:
        """Q = floor(B 2^64 / n): an example is in a step where a coin of 64 bits is below it."""
        return (self.expected_batch_size << 64) // self.num_examples

    @property
    def sample_rate(self) -> float:
        """q = Q / 2^64, rounded up to a double; what the accountant is charged with where sampling is Poisson."""
        exact = Fraction(self.sampling_threshold, 2**64)
        rounded = float(exact)
        return rounded if Fraction(rounded) >= exact else math.nextafter(rounded, 1.0)

    @property
    def max_batch_size(self) -> int:
        """The most examples that a step may hold: what buffers and micro-batch counts are sized for."""
        if self.sampling == "shuffle":
            steps_per_epoch = -(-self.num_examples // self.expected_batch_size)
            return -(-self.num_examples // steps_per_epoch)
        return self.num_examples if self.cap is None else min(self.cap, self.num_examples)

    @property
    def max_intents(self) -> int:
        """The budget in charged intents: steps plus reserve."""
        return self.num_steps + self.reserved_attempts

    @property
    def effective_noise_multiplier(self) -> float:
        """sigma / (1 + r): what the accountant is charged with."""
        return effective_noise_multiplier(self.noise_multiplier, self.sensitivity_slack)

    @property
    def reasons(self) -> tuple[str, ...]:
        """Why the run has no formal guarantee; empty when it has one."""
        reasons = []
        if not self.enabled:
            reasons.append("privacy is disabled (privacy.enabled = false)")
        elif self.noise_multiplier == 0:
            reasons.append("the noise multiplier is 0")
        reasons += [option.reason for option in self.options.values() if option.reason is not None]
        return (*reasons, *self.informal_reasons)

    @property
    def formal_guarantee(self) -> bool:
        """Whether an epsilon may be printed at all."""
        return not self.reasons

    def release_group(self, count: int) -> ReleaseGroup:
        """`count` intents of this plan, as the accountant sees them."""
        return ReleaseGroup(
            self.sample_rate, self.effective_noise_multiplier, count, self.num_examples, self.cap
        )

    @property
    def had_doubles(self) -> bool:
        """Whether the noise was made of doubles, by version 0.1 in floating-point arithmetic: no further step draws it."""
        return self.noise_kind is None and self.lattice is None and self.noise_multiplier > 0

    @cached_property
    def noise_tail_delta(self) -> float:
        """What noise made of doubles costs in delta, over all `max_intents`, because it ends somewhere; 0 for rounded noise."""
        if not (self.had_doubles and self.formal_guarantee):
            return 0.0
        return tail_of_doubles(self.release_group(self.max_intents), self.num_examples)

    @property
    def accounted_delta(self) -> float:
        """The delta that is left for the accountant: `target_delta` less `noise_tail_delta`."""
        return self.target_delta - self.noise_tail_delta

    def epsilon_after(self, count: int) -> float | None:
        """Exact epsilon of `count` charged intents (about 3 s with a cap); None without a formal guarantee."""
        return (
            epsilon([self.release_group(count)], self.accounted_delta)
            if self.formal_guarantee
            else None
        )

    @cached_property
    def epsilon_planned(self) -> float | None:
        """Epsilon of a run without crashes."""
        return self.epsilon_after(self.num_steps)

    @cached_property
    def epsilon_with_reserve(self) -> float | None:
        """Epsilon when the whole reserve is used: the most that this run can spend."""
        return self.epsilon_after(self.max_intents)

    def epsilon_table(self) -> EpsilonTable | None:
        """Look-up of epsilon by charged intents, for one rank; None without a formal guarantee."""
        if not self.formal_guarantee:
            return None
        one = self.release_group(1)
        return EpsilonTable(one, self.accounted_delta, self.max_intents, self.num_steps)

    def frozen_fields(self) -> dict[str, Any]:
        """What the ledger's `open` record holds under `plan` and every resume must repeat exactly."""
        frozen = {name: getattr(self, name) for name in _frozen_names()}
        if self.noise_kind is None:  # as it stands in ledgers of version 0.1
            del frozen["noise_kind"]
        for option in self.options.values():
            frozen |= option.frozen(self)
        return frozen | {
            "informal_reasons": list(self.informal_reasons),
            "sample_rate": self.sample_rate,
            # As text: 64-bit integers do not survive JSON readers that use doubles.
            "sampling_threshold": str(self.sampling_threshold),
            "adjacency": ADJACENCY,
            "formal_guarantee": self.formal_guarantee,
        }

    @classmethod
    def from_frozen(cls, frozen: Mapping[str, Any]) -> PrivacyPlan:
        """The plan that `frozen_fields` described; PrivacyConfigError when the record contradicts itself."""
        frozen = {"noise_kind": None, **with_constant_bound(frozen)}
        missing = [name for name in _frozen_names() if name not in frozen]
        if missing:
            raise PrivacyConfigError(f"the recorded plan lacks {', '.join(missing)}")
        values = {name: frozen[name] for name in _frozen_names()}
        values["informal_reasons"] = tuple(values["informal_reasons"])
        plan = cls(**values)
        require_equal(
            frozen,
            {"noise_kind": None, **plan.frozen_fields()},
            "the recorded plan contradicts itself",
        )
        return plan


def with_constant_bound(frozen: Mapping[str, Any]) -> dict[str, Any]:
    """Returns a recorded plan without the field in which version 0.1 said how C moves.

    Raises:
        PrivacyConfigError: C moved.
    """
    fields_left = dict(frozen)
    if fields_left.pop("adaptive_clipping", None) is not None:
        raise PrivacyConfigError(
            "C of this run moves (adaptive clipping), which version 0.1 alone can do: judge it by its own verify.py"
        )
    return fields_left


def _frozen_names() -> list[str]:
    """The plan's fields that a ledger holds under their own names."""
    return [field.name for field in fields(PrivacyPlan) if field.name != "warnings"]


def usual_cap(expected_batch_size: int) -> int:
    """Returns ceil(B + 8 sqrt(B)): eight standard deviations, so that the charged truncation costs next to nothing.

    No default cap is above it; `default_cap` is the smaller one that is enough for the run's delta.
    """
    return math.ceil(expected_batch_size + 8 * math.sqrt(expected_batch_size))


def default_cap(plan: PrivacyPlan) -> int:
    """The smallest cap that costs less than a thousandth of delta, and B + 8 sqrt(B) where that is less.

    Batches that pass the cap anywhere in the run, with a probability of at most tau, cost at most tau (1 + e^epsilon).
    """
    n, size, most = plan.num_examples, plan.expected_batch_size, plan.max_intents
    usual = min(usual_cap(size), n)
    if not plan.formal_guarantee:
        return usual
    reached = plan.target_epsilon or epsilon_rdp([plan.release_group(most)], plan.target_delta)
    allowed = plan.target_delta / (1000 * (1 + math.exp(min(reached, 700.0)))) / most
    caps = range(size, usual)
    rate = plan.sample_rate
    return caps.start + bisect_left(
        caps, -allowed, key=lambda cap: -float(stats.binom.sf(cap, n, rate))
    )


def make_plan(
    request: PlanRequest,
    *,
    resume: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> PrivacyPlan:
    """Validates everything together and calibrates sigma where a target epsilon is given.

    Args:
        resume: the `plan` of an existing ledger: sigma is then taken from there instead of being calibrated again,
            so that another library version cannot change it, and so are a default cap and the kind of noise.
            Compare with `require_equal` afterwards.
        progress: called with (stage, sigma, epsilon) during calibration.

    Raises:
        PrivacyConfigError: with one line that names what is wrong.
    """
    require_compatible(request)
    sigma, target = (
        (request.noise_multiplier, request.target_epsilon) if request.enabled else (0.0, None)
    )
    if (sigma is None) == (target is None):
        raise PrivacyConfigError("give exactly one of noise_multiplier and target_epsilon")
    if sigma is not None and 0 < sigma < MIN_NOISE_MULTIPLIER and not request.allow_small_noise:
        raise PrivacyConfigError(
            f"noise_multiplier {sigma:g} is below {MIN_NOISE_MULTIPLIER}, where epsilon explodes; "
            "allow it explicitly (allow_small_noise) if you mean it"
        )
    delta, reserve = request.target_delta, request.reserved_attempts
    plan = PrivacyPlan(
        **{field.name: getattr(request, field.name) for field in fields(PlanChoices)}
        | {
            "target_epsilon": target,
            "noise_multiplier": 1.0 if sigma is None else sigma,
            "target_delta": 1 / (2 * max(request.num_examples, 1)) if delta is None else delta,
            "reserved_attempts": max(2, math.ceil(request.num_steps / 100))
            if reserve is None
            else reserve,
            "cap": None,
            "noise_kind": ROUNDED if resume is None else resume.get("noise_kind"),
        }
    )
    asked, recorded, default = (
        request.cap,
        None if resume is None else resume.get("cap"),
        default_cap(plan),
    )
    if asked == "default":
        keeps = isinstance(recorded, int) and recorded <= usual_cap(plan.expected_batch_size)
        asked = recorded if keeps else default
    if asked is not None and request.sampling != "shuffle":
        plan = replace(plan, cap=min(asked, plan.num_examples))
    useless = useless_delta(plan.target_delta, plan.num_examples)
    notes = [useless] if useless and plan.enabled else []
    if request.cap != "default" and plan.cap is not None and plan.cap < default:
        notes.append(f"cap {plan.cap} is below {default}, and the truncation costs epsilon")
    if target is not None and resume is not None:
        sigma = float(resume["noise_multiplier"])
    elif target is not None:
        result = calibrate_noise_multiplier(
            plan.release_group(plan.max_intents),
            plan.accounted_delta,
            target,
            sensitivity_slack=plan.sensitivity_slack,
            allow_small_noise=request.allow_small_noise,
            progress=progress,
        )
        sigma = result.noise_multiplier
        if result.clamped:
            smallest = f"noise multiplier {sigma:g}, the smallest allowed, gives epsilon {rounded_up(result.epsilon)}"
            notes.append(f"{smallest}, below the target {target:g}")
    assert sigma is not None
    plan = replace(plan, noise_multiplier=sigma, warnings=tuple(notes))
    if plan.formal_guarantee:
        # By a bound that costs little: to compute so large an epsilon exactly would take minutes and all memory.
        about = epsilon_rdp([plan.release_group(plan.max_intents)], plan.accounted_delta)
        if about > MAX_EPSILON:
            raise PrivacyConfigError(
                f"epsilon would be about {about:.3g}, which protects nobody, and above {MAX_EPSILON:g} none is computed: take "
                "more noise, fewer steps or a smaller batch"
            )
    return plan


def require_equal(recorded: Mapping[str, Any], current: Mapping[str, Any], where: str) -> None:
    """Raises a PrivacyConfigError that names the first field that differs: privacy fields are frozen when a run folder opens."""
    # In the order of the plan's fields, so that what was asked for is named before what follows from it.
    names = [*current, *(name for name in recorded if name not in current)]
    for name in names:
        was, now = recorded.get(name), current.get(name)
        if isinstance(was, dict) and isinstance(now, dict):
            require_equal(was, now, where)
        elif was != now or ((name in recorded) != (name in current)):
            raise PrivacyConfigError(f"{where}: {name} was {was!r} and is now {now!r}")
