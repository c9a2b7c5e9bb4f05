"""What a plan is asked for, and what it has in common with its plan."""

from dataclasses import dataclass
from typing import Literal

from privacy.adaptive_clipping import AdaptiveClipping
from privacy.errors import PrivacyConfigError
from privacy.limits import MAX_COUNT

SAMPLING = ("poisson", "shuffle")
ARITHMETIC_MODES = ("floating", "certified")
CLIPPING_FUNCTIONS = ("flat", "automatic", "per_layer", "grouped")


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
        sampling: "poisson" or "shuffle" (privacy/sampling/shuffle.py).
        shuffle_as_gaussian: says explicitly that shuffled data are accounted without any amplification, as a Gaussian with
            mu = sqrt(k_max) / sigma, k_max = ceil(epochs) + replays; without it a shuffled run makes no claim.
        noise_source: "system" or "aes_ctr" (privacy/noise.py).
        bands: b of correlated noise (docs/correlated_noise.md); 1 is independent noise. An example may join one step in b, at b
            times the rate: b groups take turns.
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
    shuffle_as_gaussian: bool = False
    noise_source: str = "system"
    bands: int = 1
    informal_reasons: tuple[str, ...] = ()

    @property
    def group_size(self) -> int:
        """Examples of the largest of the groups that take turns: ceil(n / b)."""
        return -(-self.num_examples // self.bands)

    def participations(self, intents: int) -> int:
        """How many of so many intents the group with most of them has: ceil(intents / b), since the groups take turns."""
        return -(-intents // self.bands)

    def require_correlatable(self) -> None:
        """
        Raises:
            PrivacyConfigError: the bands do not fit the data or the steps, or what goes with independent noise only.
        """
        if not isinstance(self.bands, int) or isinstance(self.bands, bool) or not 1 <= self.bands <= MAX_COUNT:
            raise PrivacyConfigError(f"bands must be an integer from 1 to {MAX_COUNT:,}, not {self.bands!r}")
        if self.bands == 1:
            return
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
