"""Totals of whole numbers: how a contribution is rounded once to the step of its sum and added (grid.py has the proof)."""

import functools
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..numerics.fused import fused
from ..numerics.precision import has_fp32_products_of_bf16
from .grid import EXAMPLES_PER_SUM, MOST_CANCELLED, Layout, Unit, num_bytes

NARROW = 32
"""Products with fewer rows or columns are added up token by token: MKL does so below 4 rows, and below 12 columns."""
PRODUCT_ENTRIES = 1 << 22
"""Entries of a matrix product that wait in fp32 to be added to a total: 16 MiB."""
WAITING = 8
"""Products that are made before they meet: one pass over the total then takes all of them."""
PIECE_ENTRIES = (1 << 18, 1 << 24)
"""Entries that are rounded and added at a time: on CPU what its caches hold, elsewhere what makes launches rare."""
Number = Tensor | float


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


def whole(unit: Unit, values: Tensor, num_examples: int) -> Tensor:
    """Returns int64: a sum of `num_examples` examples, fp64, rounded once to multiples of the unit.

    The values are written over.
    """
    scale, most = 2.0**unit.exponent, float(num_examples * unit.largest)
    return _rounded(values, torch.int64, False, scale, most)[0]


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


def real(values: Tensor, exponent: int) -> Tensor:
    """fp64 numbers that int64 multiples of 2^-exponent stand for; rounded where they have more than 53 bits."""
    return values.double().mul_(2.0**-exponent)


def real_(values: Tensor, exponent: int) -> Tensor:
    """Returns what `real` does, in the memory of the values, which are gone afterwards: contiguous int64."""
    numbers = values.view(torch.float64)
    for some in blocks(values.numel(), PIECE_ENTRIES[1]):
        numbers.view(-1)[some] = real(values.view(-1)[some], exponent)
    return numbers
