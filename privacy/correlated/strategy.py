"""The strategy of correlated noise: b public numbers that say how the noise of a step cancels that of the steps before.

Fresh noise z_t is drawn as without correlation, and step t releases its sum plus w_t = (z_t - sum_{k=1}^{b-1} c_k w_{t-k}) / c_0.
In matrices C W = Z, where C is lower triangular, Toeplitz and has b bands. What is released says as much as C S + Z, a Gaussian
mechanism in which what an example adds to one step moves the rows of one column of C; docs/correlated_noise.md has the proof. It
needs of C that no column is longer than 1, which is checked here without rounding.
Sources: Choquette-Choo et al. 2023 (arXiv 2306.08153), McKenna 2024 (arXiv 2405.15913); square-root coefficients: Fichtenberger
et al. 2022 (arXiv 2202.11205), in bands: Kalinin and Lampert 2024 (arXiv 2405.13763).
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction
from itertools import pairwise
from typing import Self

import numpy as np
from numpy.typing import NDArray

from ..errors import PrivacyConfigError


@dataclass(frozen=True)
class Strategy:
    """The first column c_0, ..., c_{b-1} of C. One band, c_0 = 1, is independent noise.

    Raises:
        PrivacyConfigError: a coefficient is not positive or not finite, one is larger than the one before, or the column is
            longer than 1 (in rationals, on these very doubles).
    """

    coefficients: tuple[float, ...]

    def __post_init__(self) -> None:
        if not self.coefficients or not all(0 < c < math.inf for c in self.coefficients):
            raise PrivacyConfigError("the coefficients of correlated noise must be positive numbers, at least one")
        if any(later > earlier for earlier, later in pairwise(self.coefficients)):
            raise PrivacyConfigError("the coefficients of correlated noise must not grow")
        if _squared_length(self.coefficients) > 1:
            raise PrivacyConfigError(
                "the coefficients of correlated noise have a norm above 1: an example would be undercharged"
            )

    @classmethod
    def independent(cls) -> Self:
        """C = 1: the noise of DP-SGD."""
        return cls((1.0,))

    @classmethod
    def square_root(cls, bands: int) -> Self:
        """The first `bands` coefficients of (1 - x)^(-1/2), whose square is the matrix of running sums, at length 1."""
        coefficients = [1.0]
        for k in range(1, bands):
            coefficients.append(coefficients[-1] * (2 * k - 1) / (2 * k))
        return cls.of_unit_length(coefficients)

    @classmethod
    def of_unit_length(cls, coefficients: Sequence[float]) -> Self:
        """These proportions at the largest length that doubles have not above 1."""
        length = math.sqrt(math.fsum(c * c for c in coefficients))
        scaled = tuple(c / length for c in coefficients)
        while _squared_length(scaled) > 1:
            scaled = tuple(math.nextafter(c, 0.0) for c in scaled)
        return cls(scaled)

    @property
    def bands(self) -> int:
        """b: a step's noise depends on that of the b - 1 steps before."""
        return len(self.coefficients)

    def inverse(self, count: int) -> NDArray[np.float64]:
        """(count,) first column a of the inverse of C: w_t = sum_k a_k z_{t-k}, and w_t has variance sum_{k<r} a_k^2 in row r."""
        first, later = self.coefficients[0], np.array(self.coefficients[:0:-1])  # from c_{b-1} down to c_1
        inverse = np.zeros(count)
        inverse[:1] = 1 / first
        for r in range(1, count):
            known = min(r, len(later))
            inverse[r] = -(later[len(later) - known :] @ inverse[r - known : r]) / first
        return inverse


def _squared_length(coefficients: Sequence[float]) -> Fraction:
    return sum((Fraction(c) ** 2 for c in coefficients), Fraction(0))
