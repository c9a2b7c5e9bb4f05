"""Sums of whole numbers: each contribution is rounded once to multiples of a public unit.

docs/sums.md proves how far rounding and the order of additions can move such a sum, and explains
n, u, C and T.
"""

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
"""A product of fewer rows or columns is treated as one that rounds at every token. MKL rounds so
below 4 rows and below 12 columns; 32 is above both."""
PRODUCT_ENTRIES = 1 << 22
"""Entries of a matrix product that wait in fp32 to be added to a total: 16 MiB."""
WAITING = 8
"""Products of other examples that are added to the sum in one pass over its memory."""
PIECE_ENTRIES = {"cpu": 1 << 18}
"""Entries that are rounded and added at a time by device; on a CPU they fit its caches."""
MOST_PIECE_ENTRIES = 1 << 24
"""The same on all other devices, where large pieces make launches rare."""
Number = Tensor | float


class ParameterSum:
    """The sum of one parameter.

    Attributes:
        low: fp64, int64 or int32, flat. With `high`, an int16, the sum is low + 2^30 high.
        unit: of the whole numbers; None adds numbers without rounding.
    """

    def __init__(self, low: Tensor, high: Tensor | None = None, unit: Unit | None = None) -> None:
        self.low = low
        self.high = high
        self.unit = unit
        # `low` is within [-2^29, 2^29) after a carry.
        self._num_since_carry = 0

    @classmethod
    def zeros(
        cls, counts: Sequence[int], layout: Layout, unit: Unit | None, device: torch.device
    ) -> "list[ParameterSum]":
        """Returns sums of several parameters in one allocation, free again when all of them are."""
        dtype = torch.float64 if layout == "float64" else torch.int64
        sizes = [num_bytes(count, layout) for count in counts]
        memory = torch.zeros(sum(sizes), dtype=torch.uint8, device=device)
        totals = []
        for count, part in zip(counts, memory.split(sizes), strict=True):
            if layout == "int32+int16":
                # 4 of 6 bytes are for `low`.
                third = len(part) // 3
                low, high = part.split([third * 2, third])
                low_n = low.view(torch.int32)[:count]
                high_n = high.view(torch.int16)[:count]
                totals.append(cls(low_n, high_n, unit))
            else:
                totals.append(cls(part.view(dtype)[:count], None, unit))
        return totals

    def set_to(self, total: "ParameterSum") -> None:
        """Takes over the sum of another total of the same layout."""
        self.low.copy_(total.low)
        if self.high is not None and total.high is not None:
            self.high.copy_(total.high)
        self._num_since_carry = total._num_since_carry

    def add(self, parts: Sequence[Tensor], num_examples: int, first: int = 0) -> None:
        """Adds a contribution of `num_examples` examples from entry `first` on.

        Args:
            parts: flat, fp32 or fp64. Each is a sum over examples that are in no other part. They
                are added up in fp64, and the result is rounded. The first part is overwritten.
        """
        high = self.high if self._splits(num_examples) else None
        scale, largest = self._limits(num_examples)
        for piece in blocks(len(parts[0]), piece_entries(self.low.device)):
            place = slice(first + piece.start, first + piece.stop)
            high_piece = None if high is None else high[place]
            _add([x[piece] for x in parts], self.low[place], high_piece, scale, largest)

    def add_rows(self, ids_N: Tensor, values_Np: Tensor, num_examples: int) -> None:
        """Adds fp64 rows to the rows `ids_N` of a table.

        An id may occur twice only if all its rows but one are zero: two rows would round twice.
        """
        width = values_Np.shape[1]
        low_Np, high_Np = self._whole(values_Np, num_examples)
        self.low.view(-1, width).index_add_(0, ids_N, low_Np)
        if self.high is not None and high_Np is not None:
            self.high.view(-1, width).index_add_(0, ids_N, high_Np)

    def _whole(self, numbers: Tensor, num_examples: int) -> tuple[Tensor, Tensor | None]:
        splits = self._splits(num_examples)
        return _rounded(numbers, self.low.dtype, splits, *self._limits(num_examples))

    def _splits(self, num_examples: int) -> bool:
        """Returns whether an addend of so many examples may be too large for `low`."""
        if self.high is None or self.unit is None:
            return False
        return num_examples * self.unit.largest >= 2**29

    def _limits(self, num_examples: int) -> tuple[Number | None, Number]:
        """Returns the units in 1, and the most units of an addend.

        On CUDA they are tensors: compiled code is specialised to each Python number.
        """
        if self.unit is None:
            return None, 0.0
        scale = 2.0**self.unit.exponent
        largest = float(num_examples * self.unit.largest)
        device = self.low.device
        if device.type == "cpu":
            return scale, largest
        return _on_device(scale, device), _on_device(largest, device)

    def make_room(self) -> None:
        """Carries where needed; call it before every coordinate gets one more addend.

        A carry leaves at most 2^29, and three addends of at most 2^29 more stay within 2^31.
        """
        if self.high is None:
            return
        if self._num_since_carry == 3:
            for piece in blocks(len(self.low), piece_entries(self.low.device)):
                _carry(self.low[piece], self.high[piece])
            self._num_since_carry = 0
        self._num_since_carry += 1

    def read(self, entries: slice) -> Tensor:
        """Returns these entries of the sum: int64 in units, or fp64 where there is no unit."""
        if self.high is None:
            return self.low[entries]
        high = self.high[entries].to(torch.int64)
        return high.bitwise_left_shift_(30).add_(self.low[entries])


def whole_numbers(unit: Unit, numbers: Tensor, num_examples: int) -> Tensor:
    """Returns a fp64 sum over `num_examples` examples in units, rounded once to int64.

    The numbers are overwritten.
    """
    scale = 2.0**unit.exponent
    largest = float(num_examples * unit.largest)
    return _rounded(numbers, torch.int64, False, scale, largest)[0]


@functools.lru_cache(maxsize=64)
def _on_device(number: float, device: torch.device) -> Tensor:
    """Returns () fp64, which takes the dtype of its operands.

    It is filled on the device, so nothing waits for a copy.
    """
    return torch.full((), number, dtype=torch.float64, device=device)


def _rounded(
    x: Tensor, dtype: torch.dtype, splits: bool, scale: Number | None, largest: Number
) -> tuple[Tensor, Tensor | None]:
    """Returns (low, high) with x = low + 2^30 high in units, low and high integers, |low| <= 2^29.

    Without `splits` all fits into `low`, and `high` is None.
    """
    if scale is None:
        return x, None
    # On CPU the caller's memory is reused. Compiled code would copy its result back into an
    # argument that it overwrites. A product with a power of two is exact.
    x = x.mul_(scale) if x.device.type == "cpu" else x * scale
    # Clamped before the conversion, which turns a number beyond int32 into any number.
    x.nan_to_num_(0.0).clamp_(-largest, largest).round_()  # type: ignore[arg-type]  # of one type
    if not splits:
        return x.to(dtype), None
    high = (x * 2.0**-30).round_()
    # Exact: the difference is a multiple of the last binary place of x, and no larger than x.
    x.sub_(high, alpha=2.0**30)
    return x.to(dtype), high.to(torch.int16)


@fused(for_all_sizes=True)
def _add(
    parts: list[Tensor], low: Tensor, high: Tensor | None, scale: Number | None, largest: Number
) -> None:
    x = parts[0]
    if len(parts) > 1:
        x = functools.reduce(Tensor.add_, parts[1:], x.double())
    low_addend, high_addend = _rounded(x, low.dtype, high is not None, scale, largest)
    low.add_(low_addend)
    if high is not None and high_addend is not None:
        high.add_(high_addend)


@fused(for_all_sizes=True)
def _carry(low: Tensor, high: Tensor) -> None:
    # floor((low + 2^29) / 2^30), without overflow. A carry of 2 wraps around in the last line, and
    # the difference wraps back: int32 is arithmetic modulo 2^32.
    carry = (low >> 29).add_(1).bitwise_right_shift_(1)
    high.add_(carry.to(torch.int16))
    low.sub_(carry.bitwise_left_shift_(30))


def add_together(
    totals: Sequence[ParameterSum], values: Sequence[Tensor], num_examples: int
) -> None:
    """Adds to each total, as `ParameterSum.add` does, by few operations for all of them.

    It serves parameters of few numbers, of which a model has hundreds.

    Args:
        totals: of one unit, without `high`, and in one allocation, as `zeros` makes them.
    """
    assert len({total.low.untyped_storage().data_ptr() for total in totals}) == 1
    low, _ = totals[0]._whole(torch.cat(list(values)), num_examples)
    starts = tuple((total.low.storage_offset(), len(total.low)) for total in totals)
    size = max(start + count for start, count in starts)
    allocation = totals[0].low.as_strided((size,), (1,), 0)
    allocation.index_add_(0, _places(starts, low.device), low)


@functools.lru_cache(maxsize=64)
def _places(starts: tuple[tuple[int, int], ...], device: torch.device) -> Tensor:
    """Returns the entries from each start on, one range behind the other."""
    return torch.cat([torch.arange(start, start + count, device=device) for start, count in starts])


@dataclass(frozen=True)
class SumTarget:
    """Adds the contribution of a micro-batch to the sum of one parameter.

    Attributes:
        examples: the most examples, padding included, in one fp32 sum.
    """

    total: ParameterSum
    examples: int = EXAMPLES_PER_SUM

    def of_uses(self) -> "SumTarget":
        """Returns a target in fp64 for several calls that contribute to one parameter.

        Add the calls' products to it, and then the result's `low` to this target's sum. An
        example's parts in all calls together may be MOST_CANCELLED times longer than C, where they
        cancel. So a product has sqrt(MOST_CANCELLED) times fewer examples (docs/sums.md).
        """
        sum_of_calls = ParameterSum(torch.zeros_like(self.total.low, dtype=torch.float64))
        examples = max(1, math.isqrt(self.examples**2 // MOST_CANCELLED))
        return replace(self, total=sum_of_calls, examples=examples)

    def add_product(self, g_BTp: Tensor, a_BTd: Tensor, rows: slice = slice(None)) -> None:
        """Adds sum_{b,t} g_bt (x) a_bt, (p, d), to a matrix, from its row `rows.start` on.

        At most `examples` examples are added up in one fp32 sum.

        Args:
            g_BTp, a_BTd: of one dtype. Products of bf16 come in fp32.
        """
        size = self.examples
        tokens = g_BTp.shape[1]
        p = g_BTp.shape[2]
        d = a_BTd.shape[2]
        is_narrow = min(p, d) < NARROW
        is_bfloat16 = g_BTp.dtype == torch.bfloat16
        on_matrix_units = not is_narrow and is_bfloat16 and has_fp32_products_of_bf16(g_BTp.device)
        rounds_each_token = is_narrow or (not on_matrix_units and adds_term_by_term(g_BTp))
        if tokens > 1 and rounds_each_token:
            # Whatever the order of additions, T (n^2 + 34 n) u C bounds a rounding at every token,
            # and examples^2 u C is granted (docs/sums.md): the largest n solves a quadratic
            # equation.
            size = max(1, math.isqrt(size**2 // tokens + 17**2) - 17)
        wide = torch.promote_types(g_BTp.dtype, torch.float32)
        # Bands of rows bound the memory of a product. They are about equal, so that none is narrow.
        rows_of_band = max(NARROW, PRODUCT_ENTRIES // d)
        num_bands = max(1, p // rows_of_band)
        for i in range(num_bands):
            band = slice(p * i // num_bands, p * (i + 1) // num_bands)
            operands = zip(g_BTp[:, :, band].split(size), a_BTd.split(size), strict=True)
            products = (_product(g, a, wide, on_matrix_units).view(-1) for g, a in operands)
            first_row = (rows.start or 0) + band.start
            self.total.add(_few(products), len(g_BTp), first_row * d)

    def add_matrices(self, grad_Bn: Tensor, weight_B: Tensor) -> None:
        """Adds sum_b weight_b grad_b to the flattened parameter.

        At most `examples` examples are added up in one fp32 sum, as in `add_product`.
        """
        operands = zip(grad_Bn.split(self.examples), weight_B.split(self.examples), strict=True)
        products = (torch.mv(grad.t(), weight) for grad, weight in operands)
        self.total.add(_few(products), len(grad_Bn))


def _few(products: Iterator[Tensor]) -> list[Tensor]:
    """Returns at most WAITING tensors: the first products, and all others added up in fp64.

    Short sums of a large micro-batch may be a thousand.
    """
    addends = list(itertools.islice(products, WAITING))
    for product in products:
        addends[-1] = addends[-1].double().add_(product)
    return addends


def adds_term_by_term(x: Tensor) -> bool:
    """Returns whether fp32 products of such operands round an entry at every term.

    They do on CUDA, one fused multiply-add after the other, and may on other accelerators. (Meta
    tensors count what a CPU does.)
    """
    return x.device.type not in ("cpu", "meta") and x.dtype != torch.float64


def _product(g_BTp: Tensor, a_BTd: Tensor, wide: torch.dtype, on_matrix_units: bool) -> Tensor:
    """Returns (p, d): a sum over examples and tokens in `wide`.

    Tests replace this function by one with another order of additions, to search for neighbouring
    data sets that move a sum most.
    """
    g_pN = g_BTp.flatten(0, 1).t()
    a_Nd = a_BTd.flatten(0, 1)
    if on_matrix_units:
        return torch.mm(g_pN, a_Nd, out_dtype=torch.float32)
    return torch.mm(g_pN.to(wide), a_Nd.to(wide))


def piece_entries(device: torch.device) -> int:
    """Returns how many entries are rounded and added at a time."""
    return PIECE_ENTRIES.get(device.type, MOST_PIECE_ENTRIES)


def blocks(length: int, size: int) -> Iterator[slice]:
    """Yields slices of `size` that cover `range(length)`; the last may be shorter."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def real_numbers(values: Tensor, exponent: int) -> Tensor:
    """Returns the fp64 numbers that int64 multiples of 2^-exponent stand for.

    Numbers of more than 53 bits are rounded.
    """
    return values.double().mul_(2.0**-exponent)


def real_numbers_(values: Tensor, exponent: int) -> Tensor:
    """Returns what `real_numbers` does, in the memory of the values.

    The values are contiguous int64, and gone afterwards.
    """
    numbers = values.view(torch.float64)
    for piece in blocks(values.numel(), MOST_PIECE_ENTRIES):
        numbers.view(-1)[piece] = real_numbers(values.view(-1)[piece], exponent)
    return numbers
