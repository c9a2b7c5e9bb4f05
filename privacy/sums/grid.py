"""Where the clipped sum of a logical batch gathers: in whole numbers, so that additions neither round nor have an order.

Whatever a micro-batch contributes to one coordinate is rounded **once**, to a whole multiple of a public step h = 2^-f, and whole
numbers are added. So one example x can change the rounding of its own micro-batch's contribution and of nothing else. Write P_k
for that contribution with x and P'_k for the one without it, d for the number of coordinates: rounding is off by h / 2 at most on
either side, and for the sums

    |S - S'|  <=  |P_k - P'_k| + sqrt(d) h,      sqrt(d) h <= 2^-13 C, an eighth of SENSITIVITY_SLACK r.

The sum is a function of the multiset of contributions: which rank adds them, and in which order, changes no bit. (Another world
size makes other micro-batches, hence other contributions: those sums agree to rounding.) What the bound needs, and where it is:

* *One rounding a coordinate.* All contributions of a micro-batch to one parameter that share examples (several calls, a tied
  table) meet in fp64 first (`Slot.of_uses`); rounded apart, c of them would cost c sqrt(d) h. Products of different examples
  meet in fp64 too (`Slot.add_product`), never in fp32, which saves passes over the total.
* *Clamping*: an addend of n examples is no larger than n C (1 + r), and is clamped to it before it becomes an integer; NaN
  becomes zero (`Total.add`). Clamping moves no two numbers apart. That says nothing of NaN, but P_k is finite: an example whose
  squares overflow is left out (precision.py), of all others no part is longer than 32 C, and C is at most 1e20. Calls may
  cancel (MOST_CANCELLED), so clamping acts on their sum and never on one of them.
* *Range*: rows times the largest entry stays within the layout (`Grid.layout`), so no sum wraps, in any order of additions.
* *f is public*: it follows from d, C and the cap by whole numbers alone (`Grid`), never by a logarithm of a maths library,
  so that hosts cannot disagree. privacy/sums/reduction.py compares it between ranks before it adds.

|P_k - P'_k| is what x adds itself, and the rounding inside of one micro-batch, which whole numbers do not touch. x adds at most
C (1 + r/2): where its own tokens or calls cancel, E of norms.py pays for what they round to. The rest is for the others, whose
roundings x changes. Write u for the unit roundoff of fp32: a rounding moves a partial sum by at most u of its length, and with x
and without it the two roundings differ by at most twice that.

How long is a partial sum? One of m whole examples is no longer than m C. An example of which a product has added a part may
stand for more, where its tokens or calls cancel: their lengths together are its gross norm, at most 32 C (MOST_CANCELLED), so a
part is no longer than (32 C + C) / 2 = 16.5 C. E does not pay for that: it clips the example that cancels (to 0.992 C at a gross
norm of 32 N), and not an x whose additions round beside it.

* **fp32 sums are short.** A matrix product, or a sum of gradients written out in its place, is over at most n = EXAMPLES_PER_SUM
  examples, padding included. With a rounding for every example, before which at most one is not whole, that is
  2 u C (1 + ... + n + 16.5 n) = 3.7e-4 C, below 3 r / 8.
* **Where several calls contribute to a parameter** each has a product of its own, in which a part of an example stays. The parts
  of all calls together are no longer than 32 C, so that is 32 * 2 u C (1 + ... + n), and n is 11 (`Slot.of_uses`): 2.5e-4 C.
  (With n = 45 for two calls, two such sums carried past a power of two by an ordinary x differed by 1.00101 C.)
* **Everything else is fp64**: embedding rows, biases, norm layers, raw parameters, and what meets before it is rounded. That adds
  2^-53 n^2 C for the n examples of a micro-batch, or 32 times that where calls cancel.

A rounding for every example is a theorem for written-out gradients, and for products over one token. Products over T tokens that
round an entry at every term are shorter (`Slot.add_product`): T (n^2 + 34 n) u C is within 2.5e-4 C, or n is 1 and x is alone.
That is, those in fp32 on CUDA, one fused multiply-add after the other, and those with few rows or columns (NARROW), as some
kernels on CPU add them up. (With n = 64 and 77 tokens the search found pairs that move a sum by 1.0023 C under such additions.)

Other products over T tokens are the one assumption, about the order of additions inside one matrix product. Kernels on CPU add
blocks of some hundred terms, each of which starts at zero, and so round an entry, at the size that the sum of several examples
has by then, about once an example. CUDA's matrix units cut off after 8 to 16 terms, 12 to 25 times an example of 197 tokens;
there it is assumed that what is cut off does not add up in one direction, which would be 0.012 C. The search in
tests/privacy/clipping/neighbours.py supports both, with emulated products for CUDA; docs/guarantee.md states it.

All this compares x with zeros in its place, and privacy/sampling/rows.py makes that suffice: members stand in random rows of a
fixed number, so that all others stand alike whether x is drawn or not. Were the rows behind x to close up instead, other
micro-batches would form, whose products all round anew: no useful bound.

Sums stay whole until the owner has added noise, which is whole in the same unit (privacy/noise/source.py). What
becomes of it then, in fp64, is post-processing. So the step is never finer than the noise can be drawn: where sigma
is so large that the deviation would pass 2^50 units, h is coarser, before anything is rounded (`Grid.of`). (Coarser
noise on a finer sum would leave the sum's last bits as they are.)

A step is there exactly where noise is. Where C is infinite or no noise is added, nothing is promised and small gradients matter:
there sums are plain fp64.
"""

import itertools
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
"""Gross norm of a clipped contribution, in units of C (norms.py)."""
SHORT = 1 << 14
"""The most numbers of a parameter that takes 8 bytes each in any layout, and is added together with others of its kind."""
LARGEST_SPLIT = (2**15 - 4) * 2**30
"""The largest sum of absolute values that int32 and an int16 for carries hold; 4 are for what waits to be carried."""
LARGEST_INT64 = 1 << 62
UNDECLARED_CAP = 1 << 20
"""Examples of a logical batch for which there is room where nobody says how many there are."""
Layout = Literal["float64", "int64", "int32+int16"]


@dataclass(frozen=True)
class Grid:
    """The step h = 2^-f of a run's sums, and how they are stored.

    With C = m 2^e and m in [1/2, 1), f = bits - e: an entry of one example's contribution is at most C (1 + r) 2^f, below
    2^bits (1 + r) whatever C is.

    Attributes:
        bits: from the numbers of coordinates, the cap and sigma, so it is the same on any number of ranks; 0 without a grid.
        layout: 6 bytes a coordinate where this rank's rows fit, else 8.
        rows: examples, padding included, that this rank may add in one logical batch; None without a grid.
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
        """The finest step for which sums fit into 6 bytes, or the coarsest that the bound allows, in as many bytes as it takes.

        Args:
            dtype: of gradients; those of fp64 models deserve a finer step than 6 bytes hold.
            cap: the most examples of a logical batch on all ranks together; None gives room for UNDECLARED_CAP.
            rows: see the attribute; by default twice the cap, which leaves room for padding.
            noise_multiplier: sigma; in units of the step the noise of any C has a standard deviation of at most 2^50.

        Raises:
            PrivacyConfigError: no layout has room for so many rows of so many coordinates, or no step for so much noise.
        """
        # sqrt(d) h <= 2^-13 C also for the smallest C of its binade: d 4^13 <= 4^(bits - 1).
        least = next(
            bits for bits in itertools.count(1) if num_coordinates * 4**13 <= 4 ** (bits - 1)
        )
        most = cap or UNDECLARED_CAP
        rows = rows or 2 * most

        def fits(num_rows: int, bits: int, limit: int) -> bool:
            # In units, of one example's contribution with its rounding, and of what clamping in fp32 may be off by.
            largest_entry = (1 << bits) + (1 << bits >> 9) + 2
            return num_rows * largest_entry <= limit

        is_fine = cap is None or dtype == torch.float64
        limit, room = LARGEST_SPLIT, most
        if is_fine:  # where a micro-batch may hold far more rows than the cap
            limit, room = LARGEST_INT64, max(most, UNDECLARED_CAP)
        # The cap decides and not this rank's rows, so that the step is the same on any number of ranks. Four times the cap: the
        # twofold rows that callers ask for then fit with the padding of a last micro-batch.
        bits = max(
            least, next((bits for bits in range(61, 0, -1) if fits(4 * room, bits, limit)), 0)
        )
        # The largest C of a binade is a hair below 2^e, and in units of 2^(e - bits) the deviation grows with C.
        largest_std = noise_multiplier * math.nextafter(1.0, 0.0)
        while bits >= least and deviation_in_units(largest_std, bits) > MOST_DEVIATION:
            bits -= 1
        if bits < least:
            raise PrivacyConfigError(
                f"noise of {noise_multiplier:g} C on {num_coordinates:,} numbers passes what is drawn exactly, 2^50 steps of "
                "their sum: take a smaller noise multiplier"
            )
        if not is_fine and fits(rows, bits, LARGEST_SPLIT):
            return cls(bits, "int32+int16", rows)
        if not fits(max(rows, 2 * most), bits, LARGEST_INT64):
            raise PrivacyConfigError(
                f"sums of {num_coordinates:,} coordinates over {most:,} examples pass 64 bits: use a smaller batch"
            )
        return cls(bits, "int64", rows)

    def layout_of(self, count: int) -> Layout:
        """Says how the sum of a parameter of so many numbers is stored."""
        return "int64" if self.bits > 0 and count <= SHORT else self.layout

    def unit(self, bound: float) -> "Unit | None":
        """h and the largest entry at C = `bound`, exactly; None where sums are fp64, or whole numbers as they come."""
        if self.bits == 0:
            return None
        exponent = self.bits - math.frexp(bound)[1]
        largest = Fraction(bound) * Fraction(2) ** exponent * (1 + Fraction(SENSITIVITY_SLACK))
        return Unit(exponent, math.ceil(largest))


def num_bytes(count: int, layout: Layout) -> int:
    """Counts the memory of a sum, with what is left free so that the next one is aligned."""
    return -(-count // 32) * 32 * (6 if layout == "int32+int16" else 8)


@dataclass(frozen=True)
class Unit:
    """Whole numbers stand for multiples of 2^-exponent; no entry of one example's contribution is above `largest`."""

    exponent: int
    largest: int
