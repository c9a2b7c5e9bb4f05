"""What a plan is asked for, and what it has in common with its plan."""

from dataclasses import dataclass
from typing import Literal

from privacy.adaptive_clipping import AdaptiveClipping

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
    informal_reasons: tuple[str, ...] = ()


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
