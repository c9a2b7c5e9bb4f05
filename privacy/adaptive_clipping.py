"""Adaptive clipping: C follows a quantile of the gradient norms, and what that reveals about the data is accounted for.

Andrew, Thakkar, McMahan and Ramaswamy 2021 (arXiv 1905.03871). A step makes two noised releases on one and the same sample:

* the clipped sum, of L2 sensitivity C_t, with noise of standard deviation sigma_Delta C_t;
* the centred count of unclipped examples, sum_i (b_i - 1/2) with b_i in [0, 1], with noise of standard deviation sigma_b.

An example that is added or removed (zero-out: replaced by one that contributes nothing) changes the first by at most C_t and
the second by at most 1/2, because |b_i - 1/2| <= 1/2; without centring it would be 1, and cost four times as much. Padding,
undecodable rows and non-finite examples contribute exactly 0 to both. Divided by their standard deviations the two releases
are one vector with noise N(0, I), which one example moves by at most

    sqrt(1 / sigma_Delta^2 + (1/2)^2 / sigma_b^2) = sqrt(sigma_Delta^-2 + (2 sigma_b)^-2),

so together they are exactly one Gaussian mechanism of noise multiplier sigma if (theorem 1 of the paper)

    sigma_Delta = (sigma^-2 - (2 sigma_b)^-2)^(-1/2).

Whatever accountant is used for plain clipping with sigma therefore holds unchanged. The clipper's slack r covers both: it
multiplies the first term alone, and the accountant is charged with sigma / (1 + r), which multiplies both. That C_t depends on
earlier releases changes nothing: the two noise multipliers do not, and composition holds for mechanisms that are chosen by
what was released before.

The update is post-processing: b~ = 1/2 + noised count / B for the public expected batch size B, and
C <- C exp(-eta_C (b~ - gamma)), kept within a factor RANGE of its first value.
"""

import math
from dataclasses import dataclass
from typing import Annotated

from pydantic import Field

from .errors import PrivacyConfigError
from .limits import MAX_COUNT

RANGE = 1e4
"""C_t stays between C_0 / RANGE and C_0 RANGE, so that no noise, however unlikely, makes it 0, infinite or NaN."""
COUNT_SENSITIVITY = 0.5
SMALLEST_BOUND, LARGEST_BOUND = 1e-12, 1e12
"""Any C, fixed or adapted, lies between these: squares of norms about C, and of the many small entries that they are made of, are
ordinary numbers in single precision. (Below 1e-20 they underflow, and contributions of several C pass unclipped.)"""


@dataclass(frozen=True)
class AdaptiveClipping:
    """The mechanism's constants; frozen with the plan.

    Attributes:
        target_unclipped_quantile: gamma, the fraction of examples that C should leave unclipped.
        clipbound_learning_rate: eta_C, of the geometric update.
        unclipped_num_std: sigma_b, standard deviation of the noise on the count of unclipped examples.
    """

    target_unclipped_quantile: float
    clipbound_learning_rate: float
    unclipped_num_std: float

    def __post_init__(self) -> None:
        if not 0 <= self.target_unclipped_quantile <= 1:
            raise PrivacyConfigError(
                f"target_unclipped_quantile must be between 0 and 1, not {self.target_unclipped_quantile:g}"
            )
        for name in ("clipbound_learning_rate", "unclipped_num_std"):
            if not 0 < getattr(self, name) < math.inf:
                raise PrivacyConfigError(
                    f"{name} must be positive and finite, not {getattr(self, name):g}"
                )

    def require_feasible(self, noise_multiplier: float, initial_bound: float) -> None:
        """PrivacyConfigError unless the count leaves some of sigma's budget to the gradient, and C_0 is an ordinary number."""
        if 2 * self.unclipped_num_std <= noise_multiplier:
            raise PrivacyConfigError(
                f"unclipped_num_std {self.unclipped_num_std:g} is too little noise on the count of unclipped examples: its "
                f"release alone would spend all that the noise multiplier {noise_multiplier:.4g} allows; it must be above "
                f"half of it, and a twentieth of the expected batch size costs next to nothing"
            )
        smallest, largest = SMALLEST_BOUND * RANGE, LARGEST_BOUND / RANGE
        if not smallest <= initial_bound <= largest:
            raise PrivacyConfigError(
                f"adaptive clipping starts at a max_grad_norm between {smallest:g} and {largest:g}, not {initial_bound:g}"
            )

    def gradient_noise_multiplier(self, noise_multiplier: float) -> float:
        """sigma_Delta, a little more than sigma = `noise_multiplier`; 0 for 0."""
        if noise_multiplier == 0:
            return 0.0
        return noise_multiplier / math.sqrt(
            1 - (noise_multiplier / (2 * self.unclipped_num_std)) ** 2
        )

    def noised_fraction(self, noised_count: float, expected_batch_size: int) -> float:
        """b~: the fraction of unclipped examples, as far as it is released; may be outside of [0, 1]."""
        return 0.5 + noised_count / expected_batch_size

    def next_bound(self, bound: float, noised_fraction: float, initial_bound: float) -> float:
        """C_{t+1}."""
        logarithm = math.log(bound) - self.clipbound_learning_rate * (
            noised_fraction - self.target_unclipped_quantile
        )
        low, high = initial_bound / RANGE, initial_bound * RANGE
        return min(max(math.exp(min(max(logarithm, math.log(low)), math.log(high))), low), high)


@dataclass(frozen=True, kw_only=True)
class AdaptiveKeys:
    """The keys of adaptive clipping in a recipe; None is the default."""

    target_unclipped_quantile: Annotated[float | None, Field(ge=0, le=1)] = None
    """Adaptive clipping: the fraction of examples that C should leave unclipped; default 0.5."""
    clipbound_learning_rate: Annotated[float | None, Field(gt=0, le=1e6)] = None
    """Adaptive clipping: eta_C of the geometric update; default 0.2."""
    unclipped_num_std: Annotated[float | None, Field(gt=0, le=MAX_COUNT)] = None
    """Adaptive clipping: sigma_b, the noise on the count of unclipped examples; default expected_batch_size / 20."""

    def constants(self, expected_batch_size: int) -> AdaptiveClipping:
        """The constants, defaults filled in."""
        quantile, rate, std = (
            self.target_unclipped_quantile,
            self.clipbound_learning_rate,
            self.unclipped_num_std,
        )
        return AdaptiveClipping(
            target_unclipped_quantile=0.5 if quantile is None else quantile,
            clipbound_learning_rate=0.2 if rate is None else rate,
            unclipped_num_std=expected_batch_size / 20 if std is None else std,
        )
