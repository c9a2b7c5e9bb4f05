"""The step h = 2^-f of the clipped sum of a logical batch, and how its whole numbers are stored.

A micro-batch's contribution to a coordinate is rounded once, to a whole multiple of h, and whole
numbers are added: those additions neither round nor have an order. So one example changes the
rounding of its own micro-batch alone. docs/sums.md proves that a sum then moves by at most
C (1 + r), whatever the example is. Sums without noise promise nothing and are plain fp64.
"""

import math
from dataclasses import dataclass
from fractions import Fraction
from typing import Literal

import torch

from ..errors import PrivacyConfigError
from ..noise.rounded_normal import deviation_in_units
from ..plan.limits import MOST_DEVIATION
from ..plan.releases import SENSITIVITY_SLACK

EXAMPLES_PER_SUM = 64
"""The most examples, padding included, whose contributions are added up in fp32."""
EXAMPLES_PER_PART = 1024
"""A larger micro-batch is gone through in parts, which bounds its memory."""
MOST_CANCELLED = 32
"""Gross norm of a clipped contribution, in units of C (docs/sums.md)."""
SHORT = 1 << 14
"""The most numbers of a parameter that takes 8 bytes each in any layout, and is added together with
others of its kind."""
LARGEST_SPLIT = (2**15 - 4) * 2**30
"""The largest sum of absolute values that int32 and an int16 for carries hold; 4 are for addends
that wait to be carried."""
LARGEST_INT64 = 1 << 62
UNDECLARED_CAP = 1 << 20
"""Examples of a logical batch for which there is room where the caller declares no cap."""
Layout = Literal["float64", "int64", "int32+int16"]


@dataclass(frozen=True)
class Grid:
    """The step h = 2^-f of a run's sums, and how they are stored.

    With C = m 2^e and m in [1/2, 1), f = bits - e: an entry of one example's contribution is at
    most C (1 + r) 2^f, below 2^bits (1 + r) whatever C is.

    Attributes:
        bits: from the numbers of coordinates, the cap and sigma, so it is the same on any number of
            ranks; 0 without a grid.
        layout: 6 bytes a coordinate where this rank's rows fit, else 8.
        rows: examples, padding included, that this rank may add in one logical batch; None without
            a grid.
    """

    bits: int = 0
    layout: Layout = "float64"
    rows: int | None = None

    @classmethod
    def of(
        cls,
        num_coordinates: int,
        dtype: torch.dtype,
        cap: int | None = None,
        rows: int | None = None,
        *,
        noise_multiplier: float = 1.0,
    ) -> "Grid":
        """Returns the finest step for which sums fit into 6 bytes.

        Where 6 bytes do not hold the coarsest step that the bound allows, sums take 8.

        Args:
            dtype: of gradients; fp64 models deserve a finer step than 6 bytes hold.
            cap: the most examples of a logical batch on all ranks together; None gives room for
                UNDECLARED_CAP.
            rows: see the attribute; by default twice the cap, which leaves room for padding.
            noise_multiplier: sigma; in units of the step the noise of any C has a standard
                deviation of at most 2^50.

        Raises:
            PrivacyConfigError: no layout has room for so many rows of so many coordinates, or no
                step for so much noise.
        """
        # sqrt(d) h <= 2^-13 C also for the smallest C of its binade: d 4^13 <= 4^(bits - 1).
        min_bits = 1
        while num_coordinates * 4**13 > 4 ** (min_bits - 1):
            min_bits += 1
        max_examples = cap or UNDECLARED_CAP
        rows = rows or 2 * max_examples

        def fits(num_rows: int, bits: int, limit: int) -> bool:
            # In units: one example's contribution with its rounding, and the error of clamping in
            # fp32.
            largest_entry = (1 << bits) + (1 << bits >> 9) + 2
            return num_rows * largest_entry <= limit

        is_fine = cap is None or dtype == torch.float64
        limit = LARGEST_SPLIT
        room = max_examples
        # With the finer step a micro-batch may hold far more rows than the cap.
        if is_fine:
            limit = LARGEST_INT64
            room = max(max_examples, UNDECLARED_CAP)
        # The cap decides and not this rank's rows, so that the step is the same on any number of
        # ranks. Four times the cap: the twofold rows that callers ask for then fit with the padding
        # of a last micro-batch.
        finest_bits = 61
        while finest_bits > 0 and not fits(4 * room, finest_bits, limit):
            finest_bits -= 1
        bits = max(min_bits, finest_bits)
        # The largest C of a binade is a hair below 2^e, and in units of 2^(e - bits) the deviation
        # grows with C.
        largest_std = noise_multiplier * math.nextafter(1.0, 0.0)
        # Noise of more than 2^50 steps is not drawn exactly, so the step is coarser then.
        while bits >= min_bits and deviation_in_units(largest_std, bits) > MOST_DEVIATION:
            bits -= 1
        if bits < min_bits:
            raise PrivacyConfigError(
                f"noise of {noise_multiplier:g} C on {num_coordinates:,} numbers passes what is "
                "drawn exactly, 2^50 steps of their sum: take a smaller noise multiplier"
            )
        if not is_fine and fits(rows, bits, LARGEST_SPLIT):
            return cls(bits, "int32+int16", rows)
        if not fits(max(rows, 2 * max_examples), bits, LARGEST_INT64):
            raise PrivacyConfigError(
                f"sums of {num_coordinates:,} coordinates over {max_examples:,} examples pass "
                "64 bits: use a smaller batch"
            )
        return cls(bits, "int64", rows)

    def layout_of(self, count: int) -> Layout:
        """Returns how the sum of a parameter of `count` numbers is stored."""
        return "int64" if self.bits > 0 and count <= SHORT else self.layout

    def unit(self, bound: float) -> "Unit | None":
        """Returns h and the largest entry at C = `bound`, exactly.

        None stands for sums in fp64, and for whole numbers that are added as they come.
        """
        if self.bits == 0:
            return None
        exponent = self.bits - math.frexp(bound)[1]
        largest = Fraction(bound) * Fraction(2) ** exponent * (1 + Fraction(SENSITIVITY_SLACK))
        return Unit(exponent, math.ceil(largest))


def num_bytes(count: int, layout: Layout) -> int:
    """Counts the memory of a sum of `count` numbers, with the gap that aligns the next sum."""
    bytes_per_number = 6 if layout == "int32+int16" else 8
    return -(-count // 32) * 32 * bytes_per_number


@dataclass(frozen=True)
class Unit:
    """The unit of whole numbers: multiples of 2^-exponent.

    Attributes:
        largest: no entry of one example's contribution is above it.
    """

    exponent: int
    largest: int
