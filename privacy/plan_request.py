"""What a plan is asked for, and what it has in common with its plan."""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any, Literal

from .adaptive_clipping import AdaptiveClipping
from .correlated.strategy import Strategy
from .errors import PrivacyConfigError
from .sampling.poisson import default_cap

SAMPLING = ("poisson", "shuffle")
ARITHMETIC_MODES = ("floating", "certified")
CLIPPING_FUNCTIONS = ("flat", "automatic", "per_layer", "grouped")
STRATEGIES = ("square_root", "optimised")
MOST_BANDS = 4096
"""More would help nobody: past noise takes 8 bytes a band and coordinate."""
GROUP_OF_EXAMPLE = "its number modulo bands"
GROUP_OF_ATTEMPT = "the number of attempts charged before it modulo bands"


@dataclass(frozen=True, kw_only=True)
class PlanChoices:
    """What a request and its plan have in common.

    Attributes:
        num_examples: n, public under zero-out adjacency.
        expected_batch_size: B = q n, public, the divisor of the noised sum.
        num_steps: planned optimizer steps.
        target_epsilon: what sigma is calibrated to, or None where sigma is given.
        max_grad_norm: C, the L2 clipping bound of one example; under adaptive clipping the first one.
        clipping_function: a name of `privacy.clipping.functions.FUNCTIONS`.
        adaptive_clipping: C of flat clipping follows a quantile of the norms, whose release sigma pays for too; None where C is
            constant.
        arithmetic: "floating", whose rounding `sensitivity_slack` pays for, or "certified": whole numbers, which need none
            (docs/certified.md).
        sensitivity_slack: r; one example contributes at most C (1 + r), and the accountant gets sigma / (1 + r).
        enabled: False trains without any privacy.
        sampling: "poisson", or "shuffle", which makes no claim (privacy/sampling/shuffle.py).
        bands: b of correlated noise (docs/correlated_noise.md); 1 is independent noise. An example may join one step in b, at b
            times the rate: b groups take turns.
        strategy: where its coefficients come from: "square_root", or "optimised" for the run's own schedule.
        coefficients: the optimised ones, public and frozen; empty otherwise.
        informal_reasons: why the run makes no formal claim, as far as the plan does not see it by itself (contract, point 11).
    """

    num_examples: int
    expected_batch_size: int
    num_steps: int
    target_epsilon: float | None = None
    max_grad_norm: float = 1.0
    clipping_function: str = "flat"
    adaptive_clipping: AdaptiveClipping | None = None
    arithmetic: str = "floating"
    sensitivity_slack: float = 0.0
    enabled: bool = True
    sampling: str = "poisson"
    bands: int = 1
    strategy: str = "square_root"
    coefficients: tuple[float, ...] = ()
    informal_reasons: tuple[str, ...] = ()

    @cached_property
    def noise_strategy(self) -> Strategy:
        """The coefficients of the noise; 1 alone with one band."""
        return Strategy(self.coefficients) if self.coefficients else Strategy.square_root(self.bands)

    def frozen_correlation(self) -> dict[str, Any]:
        """What a ledger's `open` record says about correlated noise, under `correlated`; nothing where noise is independent."""
        if self.bands == 1:
            return {}
        return {
            "correlated": {
                "bands": self.bands,
                "strategy": self.strategy,
                "coefficients": list(self.noise_strategy.coefficients),
                "group_of_example": GROUP_OF_EXAMPLE,
                "group_of_attempt": GROUP_OF_ATTEMPT,
            }
        }

    @staticmethod
    def recorded_correlation(frozen: Mapping[str, Any]) -> dict[str, Any]:
        """The fields of this class that `frozen_correlation` described; PrivacyConfigError for a record of another form."""
        if "correlated" not in frozen:
            return {}
        recorded = frozen["correlated"]
        names = {"bands", "strategy", "coefficients", "group_of_example", "group_of_attempt"}
        if not isinstance(recorded, dict) or recorded.keys() != names:
            raise PrivacyConfigError(
                f"the recorded plan's correlated holds {', '.join(sorted(names))}, and nothing else"
            )
        coefficients = recorded["coefficients"]
        if not isinstance(coefficients, list) or not all(type(c) is float for c in coefficients):
            raise PrivacyConfigError("the recorded plan's coefficients must be a list of numbers with a decimal point")
        given = tuple(coefficients) if recorded["strategy"] == "optimised" else ()
        return {"bands": recorded["bands"], "strategy": recorded["strategy"], "coefficients": given}

    @property
    def group_size(self) -> int:
        """Examples of the largest of the groups that take turns: ceil(n / b)."""
        return -(-self.num_examples // self.bands)

    def require_even_groups(self, cap: int | None) -> None:
        """PrivacyConfigError for a cap that cuts batches of unequal groups: the smaller could cost more than is charged."""
        least = min(default_cap(self.expected_batch_size), self.group_size)
        if self.num_examples % self.bands and cap is not None and cap < least:
            raise PrivacyConfigError(
                f"cap {cap} would cut batches, and {self.bands} groups of unequal size then differ: take {least} or more"
            )

    def participations(self, intents: int) -> int:
        """How many of these intents the group with most of them has: ceil(intents / b), since the groups take turns."""
        return -(-intents // self.bands)

    def require_correlatable(self, noise_multiplier: float) -> None:
        """
        Args:
            noise_multiplier: 0 without noise.

        Raises:
            PrivacyConfigError: the bands do not fit the data or the steps, or what goes with independent noise only.
        """
        if not isinstance(self.bands, int) or isinstance(self.bands, bool) or not 1 <= self.bands <= MOST_BANDS:
            raise PrivacyConfigError(f"bands must be an integer from 1 to {MOST_BANDS:,}, not {self.bands!r}")
        if self.strategy not in STRATEGIES:
            raise PrivacyConfigError(f"strategy must be one of {', '.join(STRATEGIES)}, not {self.strategy!r}")
        if (self.strategy == "optimised") != bool(self.coefficients) or len(self.coefficients) not in (0, self.bands):
            raise PrivacyConfigError(
                f"strategy {self.strategy!r} with {self.bands} bands and {len(self.coefficients)} coefficients: optimised ones "
                "are as many as the bands, and square-root ones are not listed"
            )
        if self.bands == 1:
            if self.strategy != "square_root":
                raise PrivacyConfigError("strategy 'optimised' is for bands above 1: one band has nothing to choose")
            return
        if noise_multiplier == 0:
            raise PrivacyConfigError(
                "bands above 1 correlate the noise, and this run has none and makes no formal claim: take bands 1"
            )
        if self.bands > self.num_steps:
            raise PrivacyConfigError(
                f"bands {self.bands} are more than the {self.num_steps} steps that they take turns in"
            )
        if self.bands * self.expected_batch_size > self.num_examples:
            raise PrivacyConfigError(
                f"bands {self.bands} need a sample rate above 1 in each group: bands x expected_batch_size must be at most "
                f"{self.num_examples} examples, so take {self.num_examples // self.expected_batch_size} bands or fewer"
            )
        if self.sampling != "poisson":
            raise PrivacyConfigError(f"bands above 1 need sampling 'poisson', not {self.sampling!r}")
        if self.arithmetic != "floating":
            raise PrivacyConfigError("bands above 1 need arithmetic 'floating': the lattice holds no correlated noise")
        if self.adaptive_clipping is not None:
            raise PrivacyConfigError(
                "bands above 1 need a constant C, because past noise is in units of C: take clipping_function 'flat' rather "
                "than adaptive clipping"
            )
        _ = self.noise_strategy  # refuses coefficients that an example would be undercharged with


@dataclass(frozen=True, kw_only=True)
class PlanRequest(PlanChoices):
    """What `make_plan` is asked for.

    Attributes:
        noise_multiplier: sigma; exactly one of it and `target_epsilon` is given (neither is needed without privacy).
        target_delta: 1 / (2 n) by default.
        reserved_attempts: max(2, ceil(1 % of the steps)) by default.
        cap: "default" is ceil(B + 8 sqrt(B)); None samples without a cap. Shuffled batches need none.
        allow_small_noise: allows sigma below 0.3.
    """

    noise_multiplier: float | None = None
    target_delta: float | None = None
    reserved_attempts: int | None = None
    cap: int | Literal["default"] | None = "default"
    allow_small_noise: bool = False
