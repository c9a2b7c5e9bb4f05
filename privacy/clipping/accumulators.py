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
  so that hosts cannot disagree. privacy/step/reduction.py compares it between ranks before it adds.

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

Sums stay whole until the owner has added noise, which is whole in the same unit (privacy/noise.py); what becomes of it then, in
fp64, is post-processing. So the step is never finer than the noise can be drawn: where sigma is so large that the deviation
would pass 2^50 units, h is coarser, before anything is rounded (`Grid.of`). (Coarser noise on a finer sum would leave the sum's
last bits as they are.)

A step is there exactly where noise is. Where C is infinite or no noise is added, nothing is promised and small gradients matter:
there sums are plain fp64.
"""

import functools
import itertools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Literal

import torch
from torch import Tensor

from ..errors import PrivacyConfigError
from ..plan.releases import SENSITIVITY_SLACK
from ..rounded_normal import MOST_DEVIATION, deviation_in_units
from .fused import fused
from .precision import has_fp32_products_of_bf16

EXAMPLES_PER_SUM = 64
"""The most examples, padding included, whose contributions are added up in fp32."""
EXAMPLES_PER_PART = 1024
"""A larger micro-batch is gone through in parts, which bounds its memory."""
NARROW = 32
"""Products with fewer rows or columns are added up token by token: MKL does so below 4 rows, and below 12 columns."""
PRODUCT_ENTRIES = 1 << 22
"""Entries of a matrix product that wait in fp32 to be added to a total: 16 MiB."""
MOST_CANCELLED = 32
"""Gross norm of a clipped contribution, in units of C (norms.py)."""
WAITING = 8
"""Products that are made before they meet: one pass over the total then takes all of them."""
PIECE_ENTRIES = (1 << 18, 1 << 24)
"""Entries that are rounded and added at a time: on CPU what its caches hold, elsewhere what makes launches rare."""
SHORT = 1 << 14
"""The most numbers of a parameter that takes 8 bytes each in any layout, and is added together with others of its kind."""
BLOCK_COORDINATES = 1 << 23
"""Sums that are allocated together: 48 MiB, above the 32 that any malloc keeps in its heap (privacy/step/allocator.py)."""
LARGEST_SPLIT = (2**15 - 4) * 2**30
"""The largest sum of absolute values that int32 and an int16 for carries hold; 4 are for what waits to be carried."""
LARGEST_INT64 = 1 << 62
UNDECLARED_CAP = 1 << 20
"""Examples of a logical batch for which there is room where nobody says how many there are."""

Layout = Literal["float64", "int64", "int32+int16"]
Number = Tensor | float


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

    def whole(self, values: Tensor, num_examples: int) -> Tensor:
        """Returns int64: a sum of `num_examples` examples, fp64, rounded once. The values are written over."""
        return _rounded(
            values, torch.int64, False, 2.0**self.exponent, float(num_examples * self.largest)
        )[0]


class Total:
    """The sum of one parameter.

    Attributes:
        low: fp64, int64 or int32, flat. With `high`, an int16, the sum is low + 2^30 high.
        unit: how numbers become whole; None adds them as they are.
    """

    def __init__(self, low: Tensor, high: Tensor | None = None, unit: Unit | None = None) -> None:
        self.low, self.high, self.unit = low, high, unit
        self._waiting = 0  # additions since `low` was within [-2^29, 2^29)

    @classmethod
    def zeros(
        cls, counts: Sequence[int], layout: Layout, unit: Unit | None, device: torch.device
    ) -> "list[Total]":
        """Makes the sums of several parameters in one allocation, which is free again when all of them are."""
        kind = torch.float64 if layout == "float64" else torch.int64
        sizes, totals = [num_bytes(count, layout) for count in counts], []
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        for count, place in zip(counts, memory.split(sizes), strict=True):
            if layout == "int32+int16":
                low, high = place.split([len(place) // 3 * 2, len(place) // 3])
                totals.append(
                    cls(low.view(torch.int32)[:count], high.view(torch.int16)[:count], unit)
                )
            else:
                totals.append(cls(place.view(kind)[:count], None, unit))
        return totals

    def add(self, parts: Sequence[Tensor], num_examples: int, first: int = 0) -> None:
        """Adds a contribution of `num_examples` examples from entry `first` on.

        Args:
            parts: flat, fp32 or fp64, each of other examples, which meet in fp64 before they are rounded. Written over.
        """
        high = self.high if self._splits(num_examples) else None
        scale, most = self._limits(num_examples)
        for some in blocks(len(parts[0]), PIECE_ENTRIES[self.low.device.type != "cpu"]):
            place = slice(first + some.start, first + some.stop)
            _add(
                [x[some] for x in parts],
                self.low[place],
                None if high is None else high[place],
                scale,
                most,
            )

    def add_rows(self, ids_N: Tensor, values_Np: Tensor, num_examples: int) -> None:
        """Adds rows of a table, fp64, of which none but zeros comes twice."""
        width = values_Np.shape[1]
        for total, whole_Np in zip(
            (self.low, self.high), self._whole(values_Np, num_examples), strict=True
        ):
            if total is not None and whole_Np is not None:
                total.view(-1, width).index_add_(0, ids_N, whole_Np)

    def _whole(self, values: Tensor, num_examples: int) -> tuple[Tensor, Tensor | None]:
        return _rounded(
            values, self.low.dtype, self._splits(num_examples), *self._limits(num_examples)
        )

    def _splits(self, num_examples: int) -> bool:
        """Whether an addend of so many examples may be too large for `low`."""
        return (
            self.high is not None
            and self.unit is not None
            and num_examples * self.unit.largest >= 2**29
        )

    def _limits(self, num_examples: int) -> tuple[Number | None, Number]:
        """How many units are 1, and how many an addend may have. Tensors on CUDA, since compiled code is made for one number."""
        if self.unit is None:
            return None, 0.0
        scale, most = 2.0**self.unit.exponent, float(num_examples * self.unit.largest)
        device = self.low.device
        return (
            (scale, most)
            if device.type == "cpu"
            else (_on_device(scale, device), _on_device(most, device))
        )

    def make_room(self) -> None:
        """Called before every coordinate gets one more addend: three of 2^29 fit on top of what a carry leaves."""
        if self.high is None:
            return
        if self._waiting == 3:
            for some in blocks(len(self.low), PIECE_ENTRIES[self.low.device.type != "cpu"]):
                _carry(self.low[some], self.high[some])
            self._waiting = 0
        self._waiting += 1

    def read(self, some: slice) -> Tensor:
        """These entries of the sum: int64 in units, or fp64 where there is no unit."""
        if self.high is None:
            return self.low[some]
        return self.high[some].to(torch.int64).bitwise_left_shift_(30).add_(self.low[some])


@functools.lru_cache(maxsize=64)
def _on_device(value: float, device: torch.device) -> Tensor:
    """() fp64, which takes the dtype of what it meets. Filled there: nothing waits for a copy."""
    return torch.full((), value, dtype=torch.float64, device=device)


def _rounded(
    x: Tensor, kind: torch.dtype, splits: bool, scale: Number | None, most: Number
) -> tuple[Tensor, Tensor | None]:
    """(low, high) with x = low + 2^30 high in units, whole, |low| <= 2^29; no `high` where all fits into `low`."""
    if scale is None:
        return x, None
    # Clamped first: what no int32 holds would become any number. Both powers of two are exact.
    x = (
        x.mul_(scale) if x.device.type == "cpu" else x * scale
    )  # what is compiled would write its argument back
    x.nan_to_num_(0.0).clamp_(-most, most).round_()  # type: ignore[arg-type]  # both are numbers, or both tensors
    if not splits:
        return x.to(kind), None
    high = (x * 2.0**-30).round_()
    x.sub_(high, alpha=2.0**30)  # exact: a multiple of x's last place, and no longer than it
    return x.to(kind), high.to(torch.int16)


@fused(for_all_sizes=True)
def _add(
    parts: list[Tensor], low: Tensor, high: Tensor | None, scale: Number | None, most: Number
) -> None:
    x = functools.reduce(Tensor.add_, parts[1:], parts[0].double()) if len(parts) > 1 else parts[0]
    more_low, more_high = _rounded(x, low.dtype, high is not None, scale, most)
    low.add_(more_low)
    if high is not None and more_high is not None:
        high.add_(more_high)


@fused(for_all_sizes=True)
def _carry(low: Tensor, high: Tensor) -> None:
    carry = (
        (low >> 29).add_(1).bitwise_right_shift_(1)
    )  # floor((low + 2^29) / 2^30), without overflow
    high.add_(carry.to(torch.int16))
    low.sub_(carry.bitwise_left_shift_(30))


def add_together(totals: Sequence[Total], values: Sequence[Tensor], num_examples: int) -> None:
    """As `Total.add` on each, by few operations for all of them: for parameters of few numbers, of which a model has hundreds.

    Args:
        totals: without `high`, and in one allocation.
    """
    assert len({total.low.untyped_storage().data_ptr() for total in totals}) == 1
    low, _ = totals[0]._whole(torch.cat(list(values)), num_examples)
    starts = tuple((total.low.storage_offset(), len(total.low)) for total in totals)
    size = max(start + count for start, count in starts)
    totals[0].low.as_strided((size,), (1,), 0).index_add_(0, _places(starts, low.device), low)


@functools.lru_cache(maxsize=64)
def _places(starts: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """The entries from each start on, one range behind the other."""
    return torch.cat([torch.arange(start, start + count, device=device) for start, count in starts])


@dataclass(frozen=True)
class Slot:
    """Where one parameter's contributions to a micro-batch are added.

    Attributes:
        examples: the most examples, padding included, in one fp32 sum.
    """

    total: Total
    examples: int = EXAMPLES_PER_SUM

    def of_uses(self) -> "Slot":
        """A slot for several calls that contribute to one parameter, each by products of its own, to be joined.

        They meet in fp64; hand its `low` to `add` of this slot's total afterwards. The parts of one example in all calls are
        MOST_CANCELLED C long together. With products of n / sqrt(MOST_CANCELLED) examples the roundings are within n^2 u C.
        """
        together = Total(torch.zeros_like(self.total.low, dtype=torch.float64))
        return replace(
            self, total=together, examples=max(1, math.isqrt(self.examples**2 // MOST_CANCELLED))
        )

    def add_product(self, g_BTp: Tensor, a_BTd: Tensor, rows: slice = slice(None)) -> None:
        """The given rows (p, d) of the matrix += sum_{b,t} g_bt (x) a_bt, with no more than `examples` of them in one fp32 sum.

        Args:
            g_BTp, a_BTd: of one dtype. Products of bf16 come in fp32.
        """
        size, tokens, p, d = self.examples, g_BTp.shape[1], g_BTp.shape[2], a_BTd.shape[2]
        is_narrow = min(p, d) < NARROW
        on_matrix_units = (
            not is_narrow
            and g_BTp.dtype == torch.bfloat16
            and has_fp32_products_of_bf16(g_BTp.device)
        )
        if tokens > 1 and (is_narrow or (not on_matrix_units and adds_term_by_term(g_BTp))):
            # Any order of additions: with T (n^2 + 34 n) <= examples^2, a rounding for every token is within the bound.
            size = max(1, math.isqrt(size**2 // tokens + 17**2) - 17)
        wide = torch.promote_types(g_BTp.dtype, torch.float32)
        count = max(1, p // max(NARROW, PRODUCT_ENTRIES // d))
        for some in (
            slice(p * i // count, p * (i + 1) // count) for i in range(count)
        ):  # about equal: none is narrow
            parts = zip(g_BTp[:, :, some].split(size), a_BTd.split(size), strict=True)
            products = (_product(g, a, wide, on_matrix_units).view(-1) for g, a in parts)
            self.total.add(_few(products), len(g_BTp), ((rows.start or 0) + some.start) * d)

    def add_matrices(self, grad_Bn: Tensor, weight_B: Tensor) -> None:
        """The parameter, flattened, += sum_b weight_b grad_b, for as many numbers as matrices have: as in `add_product`."""
        parts = zip(grad_Bn.split(self.examples), weight_B.split(self.examples), strict=True)
        self.total.add(_few(torch.mv(grad.t(), weight) for grad, weight in parts), len(grad_Bn))


def _few(parts: Iterator[Tensor]) -> list[Tensor]:
    """At most WAITING of them, the last in fp64 what all others come to: short sums of a large micro-batch may be a thousand."""
    few = list(itertools.islice(parts, WAITING))
    for more in parts:
        few[-1] = few[-1].double().add_(more)
    return few


def adds_term_by_term(x: Tensor) -> bool:
    """Whether products of such operands in fp32 round an entry at every term: on CUDA, one fused multiply-add after the other.

    Of other accelerators nobody knows. (Meta tensors count what a CPU does.)
    """
    return x.device.type not in ("cpu", "meta") and x.dtype != torch.float64


def _product(g_BTp: Tensor, a_BTd: Tensor, wide: torch.dtype, on_matrix_units: bool) -> Tensor:
    """(p, d): a sum over examples and tokens in `wide`. The search for neighbours puts other orders of additions in its place."""
    x_pN, y_Nd = g_BTp.flatten(0, 1).t(), a_BTd.flatten(0, 1)
    if on_matrix_units:
        return torch.mm(x_pN, y_Nd, out_dtype=torch.float32)
    return torch.mm(x_pN.to(wide), y_Nd.to(wide))


def blocks(length: int, size: int) -> Iterator[slice]:
    """0 to `length` in steps of `size`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


class Accumulator:
    """Takes one micro-batch after the other: `start`, then `slot` and `filled` for each parameter, then `finish`.

    Attributes:
        leaves_process: whether values that depend on gradients leave the process before the logical batch is complete: then
            its intent comes first (contract 9).
        shapes: of the parameters whose sums gather here.
        unit: that of the sums; None for fp64.
    """

    leaves_process = False
    unit: Unit | None

    def __init__(self, shapes: Mapping[str, torch.Size], grid: Grid, device: torch.device) -> None:
        self.shapes, self._grid, self.device = dict(shapes), grid, device
        self.sum_dtype = torch.float64 if grid.layout == "float64" else torch.int64
        self.zero_(None)

    def zero_(self, unit: Unit | None) -> None:
        """Starts a new logical batch."""
        self.unit, self._num_rows = unit, 0

    def start(self, num_rows: int) -> None:
        """A micro-batch of `num_rows` examples begins, padding included.

        Raises:
            PrivacyConfigError: more rows than there is room for.
        """
        self._num_rows += num_rows
        if self._grid.rows is not None and self._num_rows > self._grid.rows:
            raise PrivacyConfigError(
                f"a logical batch of {self._num_rows:,} rows passes the {self._grid.rows:,} for which its sums have room: say "
                "how many there may be (cap, rows)"
            )

    def slot(self, name: str) -> Slot:
        """Where this micro-batch's contribution is to be added."""
        raise NotImplementedError

    def filled(self, name: str) -> None:
        """The contribution is complete. Not called for a parameter that has none."""

    def finish(self) -> None:
        """The micro-batch is complete."""


MakeAccumulator = Callable[[Mapping[str, torch.Size], Grid, torch.device], Accumulator]


class LocalSums(Accumulator):
    """Whole sums in this process. They are made when they are needed, and go as they are read (`take`)."""

    def zero_(self, unit: Unit | None) -> None:
        super().zero_(unit)
        self._is_taken = False
        self._totals: dict[str, Total] = {}

    def start(self, num_rows: int) -> None:
        super().start(num_rows)
        self._make()

    def _make(self) -> None:
        """All that is not there, in blocks that malloc takes from the system and gives back one by one as sums are taken.

        (What it takes from its heap stays in pieces: a sum of 6 bytes leaves no room for a gradient of 8.)
        """
        names = [name for name in self.shapes if name not in self._totals]
        short = [
            name for name in names if self.shapes[name].numel() <= SHORT
        ]  # together, for `add_together`
        blocks, count = [short], BLOCK_COORDINATES
        for name in names:
            if name not in short:
                if count >= BLOCK_COORDINATES:
                    blocks.append([])
                    count = 0
                blocks[-1].append(name)
                count += self.shapes[name].numel()
        for block in blocks:
            counts = [self.shapes[name].numel() for name in block]
            layout = self._grid.layout_of(max(counts, default=0))
            self._totals |= zip(
                block, Total.zeros(counts, layout, self.unit, self.device), strict=True
            )

    def slot(self, name: str) -> Slot:
        self._totals[name].make_room()
        return Slot(self._totals[name])

    @property
    def names(self) -> list[str]:
        return list(self.shapes)

    def take(self, name: str) -> Total:
        """Hands over the sum of a parameter; KeyError the second time, since zeros would pass for a sum."""
        if not self._totals and not self._is_taken:  # nothing was added
            self._make()
        self._is_taken = True
        return self._totals.pop(name)

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, sum in fp64; in int64 for certified arithmetic); this keeps its own."""
        self._make()
        for name in self.shapes:
            total = self._totals[name]
            values = total.read(slice(None)).view(self.shapes[name])
            yield name, values if self.unit is None else real(values, self.unit.exponent)


def real(values: Tensor, exponent: int) -> Tensor:
    """fp64 numbers that int64 multiples of 2^-exponent stand for; rounded where they have more than 53 bits."""
    return values.double().mul_(2.0**-exponent)


def real_(values: Tensor, exponent: int) -> Tensor:
    """Returns what `real` does, in the memory of the values, which are gone afterwards: contiguous int64."""
    numbers = values.view(torch.float64)
    for some in blocks(values.numel(), PIECE_ENTRIES[1]):
        numbers.view(-1)[some] = real(values.view(-1)[some], exponent)
    return numbers
