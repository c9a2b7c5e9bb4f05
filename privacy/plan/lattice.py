"""The lattice of certified arithmetic: which multiples of 2^-f stand for a run's contributions, sums and noise. Without torch.

**No overflow in the sum.** f is chosen so that (cap + NOISE_ROOM sigma + 1) C 2^f <= 2^62. An entry of a contribution is at most
C 2^f (privacy/certified/integers.py), hence an entry of the sum of `cap` examples, or of any part of it on any rank, at most
cap C 2^f. What the noise adds passes NOISE_ROOM standard deviations with a probability below 10^-880. (An overflow would wrap
around, which is a function of the exact result: it would spoil the update and cost no privacy.) f depends on C, cap and sigma,
and on nothing else: neither on the world nor on the data. (Where sigma is above 10^5 it is smaller, for the sampler's range.)

**Accuracy.** Rounding to even numbers moves a gradient of d coordinates by at most sqrt(d) 2^-f, and C 2^f is at least 2^31
wherever the cap is below 2^29, so the loss is below 2^-16 C for a model of a billion parameters. A lattice that is too coarse
is refused.
"""

import math
from dataclasses import dataclass
from fractions import Fraction

from ..errors import PrivacyConfigError
from .limits import MOST_DEVIATION

NOISE_ROOM = 64
"""Standard deviations of noise for which the sum has room."""
LARGEST_SUM = 1 << 62
MARGIN = 2.0**-20
"""Relative distance of `Lattice.target` from C, on top of the rounding of entries: far above what fp64 norms may be wrong by."""
COARSEST = 2.0**-10
"""The most that rounding to the lattice may move a gradient, in units of C."""


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
        """The finest lattice on which entries and sums fit; see the module docstring.

        Args:
            bound: C, positive and finite.
            cap: the most examples of a logical batch, on all ranks together.
            noise_multiplier: sigma.
        """
        # C = m 2^e with m in [1/2, 1): an entry k of at most C 2^(f - 1) is below 2^31.
        exponent = 32 - math.frexp(bound)[1]
        most = (cap + NOISE_ROOM * Fraction(noise_multiplier) + 1) * Fraction(bound)
        deviation = Fraction(noise_multiplier) * Fraction(bound)
        while (
            most * Fraction(2) ** exponent > LARGEST_SUM
            or deviation * Fraction(2) ** exponent > MOST_DEVIATION / 2
        ):
            exponent -= 1
        return cls(bound, exponent)

    @property
    def limit(self) -> int:
        """L = floor(C^2 4^f), below 2^64."""
        return math.floor(Fraction(self.bound) ** 2 * Fraction(4) ** self.exponent)

    def target(self, num_coordinates: int) -> float:
        """The norm to which floating-point clipping scales, so that rounding to the lattice does not pass C.

        Raises:
            PrivacyConfigError: rounding would move a gradient of this number of coordinates by more than COARSEST C.
        """
        moved = math.sqrt(num_coordinates) * 2.0**-self.exponent
        if moved > COARSEST * self.bound:
            raise PrivacyConfigError(
                f"privacy.arithmetic = 'certified' would round gradients of {num_coordinates:,} coordinates to a lattice that "
                f"moves them by {moved / self.bound:.2g} C; use a smaller batch (the lattice has to hold the sum of a capped "
                "one), or privacy.arithmetic = 'floating'"
            )
        return (self.bound - moved) * (1 - MARGIN)
