"""The lattice of certified arithmetic: contributions, sums and noise are multiples of 2^-f.

f is the largest exponent with (cap + NOISE_ROOM sigma + 1) C 2^f <= 2^62 whose entries fit int32,
so that no sum of a capped batch overflows 64 bits. It depends on C, the cap and sigma alone,
neither on the ranks nor on the data. docs/certified.md has the proof.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from ..errors import PrivacyConfigError
from .limits import MOST_DEVIATION

NOISE_ROOM = 64
"""Standard deviations of noise for which the sum has room. The noise passes them with a probability
below 10^-880; an overflow would spoil the update and cost no privacy, since wrapping around is a
function of the exact result."""
LARGEST_SUM = 1 << 62
MARGIN = 2.0**-20
"""Relative distance of `Lattice.target` from C, beside the rounding of entries: far above the error
of norms in fp64."""
COARSEST = 2.0**-10
"""The most that rounding to the lattice may move a gradient, in units of C. Below a cap of 2^29 a
model of a billion parameters loses less than 2^-16 C."""


@dataclass(frozen=True)
class Lattice:
    """Multiples of 2^-exponent, for contributions of norm at most `bound`.

    Attributes:
        bound: C.
        exponent: f; negative where C is large.
    """

    bound: float
    exponent: int

    @classmethod
    def of(cls, bound: float, cap: int, noise_multiplier: float) -> "Lattice":
        """Returns the finest lattice on which entries and sums fit.

        Args:
            bound: C, positive and finite.
            cap: the most examples of a logical batch, on all ranks together.
            noise_multiplier: sigma.
        """
        # C = m 2^e with m in [1/2, 1): an entry k of at most C 2^(f - 1) is below 2^31.
        exponent = 32 - math.frexp(bound)[1]
        sigma = Fraction(noise_multiplier)
        largest_sum = (cap + NOISE_ROOM * sigma + 1) * Fraction(bound)
        deviation = sigma * Fraction(bound)
        # Where sigma is above 10^5 the deviation decides: the sampler of the noise has a range.
        while (
            largest_sum * Fraction(2) ** exponent > LARGEST_SUM
            or deviation * Fraction(2) ** exponent > MOST_DEVIATION / 2
        ):
            exponent -= 1
        return cls(bound, exponent)

    @property
    def limit(self) -> int:
        """Returns L = floor(C^2 4^f), below 2^64."""
        return math.floor(Fraction(self.bound) ** 2 * Fraction(4) ** self.exponent)

    def target(self, num_coordinates: int) -> float:
        """Returns the norm to which floating-point clipping scales a gradient.

        Rounding the scaled gradient to the lattice does not pass C.

        Raises:
            PrivacyConfigError: rounding would move a gradient of this number of coordinates by more
                than COARSEST C.
        """
        rounding = math.sqrt(num_coordinates) * 2.0**-self.exponent
        if rounding > COARSEST * self.bound:
            raise PrivacyConfigError(
                f"privacy.arithmetic = 'certified' would round gradients of {num_coordinates:,} "
                f"coordinates to a lattice that moves them by {rounding / self.bound:.2g} C; use a "
                "smaller batch (the lattice has to hold the sum of a capped one), or "
                "privacy.arithmetic = 'floating'"
            )
        return (self.bound - rounding) * (1 - MARGIN)
