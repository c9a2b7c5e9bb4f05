"""Where the clipped sum of a logical batch gathers, parameter by parameter, so that rounding keeps within contract 4.

Rounding is a part of the sensitivity: an example x that is zeroed out changes every partial sum that follows it, and so may
change how all later additions round. Write u for the unit roundoff and C for the bound of one example's contribution. The
partial sum of m examples is a vector no longer than m C, one rounding of it moves it by at most u m C, and with x and without
it the two roundings differ by at most twice that. So all roundings together move the difference of the two sums by at most

    2 u C (sum over the additions that x comes before, of the number of examples behind the partial sum),

whatever all other examples are. SENSITIVITY_SLACK r is spent half on norms (norms.py), and here on two rules:

* **fp32 sums are short.** Results of matrix products, and gradients that are written out in their place, are added up
  in fp32 over at most n = EXAMPLES_PER_SUM examples, then in fp64. With a rounding for every example the difference is at most
  2 u C (1 + ... + n), about n^2 u C = 2.4e-4 C, below r/4. Only the one fp32 sum that x belongs to counts: all others have the
  same bits without it. A parameter that several calls contribute to has no window, and shorter sums (`Slot.of_uses`). Padding
  counts as examples, so when a sum ends depends on public sizes alone.
* **Everything else is fp64.** Embedding rows, biases, norm layers and raw parameters, where values of examples are added one
  after the other, never meet in fp32. With A additions into a total of N examples the difference is at most 2^-53 A N C,
  which `require_resolution` keeps below 2^-13 C, an eighth of r: a million examples one by one, more in larger micro-batches.

A rounding for every example is a theorem for written-out gradients, and for products over one token. Products with few rows or
columns (NARROW) are added up token by token by some kernels: there n is so small that n^2 T u C is within the same bound. For
other products over T tokens it is the one assumption, about the order of additions inside one matrix product: that its kernel
rounds an entry, at the size that the sum of several examples has by then, at most about once an example, not at each of the T
terms. (Kernels on CPU add blocks of some hundred terms, each of which starts at zero; matrix units of a GPU add 8 to 16 terms at
a time.) The search in tests/privacy/clipping/neighbours.py supports it; docs/guarantee.md states it.

All this compares x with zeros in its place, and privacy/sampling/rows.py makes that suffice: members stand in random rows of a
fixed number, so that all others stand alike whether x is drawn or not. Were the rows behind x to close up instead, every product
would round anew, by n u C / 2 for each of up to a million examples at worst: no useful bound, whatever n is.

Sharded sums (privacy/step/sharded_sums.py) keep the same two rules. They have no windows, so that an fp32 sum ends with its
product, and the reduction over ranks is one more addition in fp64.
"""

import functools
import math
from collections.abc import Iterator, Mapping
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from ..errors import PrivacyConfigError
from .precision import has_fp32_products_of_bf16

EXAMPLES_PER_SUM = 64
"""The most examples, padding included, whose contributions are added up in fp32."""
EXAMPLES_PER_PART = 1024
"""A larger micro-batch is gone through in parts, which bounds its memory."""
NARROW = 32
"""Products with fewer rows or columns are added up token by token: MKL does so below 4 rows, and below 12 columns."""
PRODUCT_ENTRIES = 1 << 22
"""Entries of a matrix product that wait in fp32 to be added to an fp64 total: 16 MiB."""


class Slot(NamedTuple):
    """Where one parameter's contributions are added.

    Attributes:
        total: fp64, of the parameter's shape.
        window: fp32, for products of at most EXAMPLES_PER_SUM examples of several micro-batches; None where the products
            of this micro-batch go straight to `total`.
        examples: the most examples, padding included, in one fp32 sum.
    """

    total: Tensor
    window: Tensor | None = None
    examples: int = EXAMPLES_PER_SUM

    def of_uses(self, count: int) -> "Slot":
        """The slot of a parameter that `count` calls contribute to, each by a product of its own, and none by a window.

        Parts of one example that do not cancel are C / sqrt(count) long on average. With count products of n / sqrt(count)
        examples the roundings are within the bound of one product of n.
        """
        return self._replace(examples=max(1, math.isqrt(self.examples**2 // count)))

    def matrix(self) -> "Slot":
        """(first dimension, all others); a vector stays one."""
        if self.total.dim() <= 1:
            return self
        shape = (self.total.shape[0], -1)
        window = None if self.window is None else self.window.view(shape)
        return self._replace(total=self.total.view(shape), window=window)

    def add_product(self, g_BTp: Tensor, a_BTd: Tensor, rows: slice = slice(None)) -> None:
        """The given rows (p, d) of the matrix += sum_{b,t} g_bt (x) a_bt, with no more than `examples` of them in one fp32 sum.

        Args:
            g_BTp, a_BTd: of one dtype. Products of bf16 come in fp32.
        """
        if min(g_BTp.shape[2], a_BTd.shape[2]) < NARROW:
            self._add_narrow_product(g_BTp, a_BTd, rows)
            return
        for g, a in zip(g_BTp.split(self.examples), a_BTd.split(self.examples), strict=True):
            x_pN, y_Nd = g.flatten(0, 1).t(), a.flatten(0, 1)
            on_matrix_units = g.dtype == torch.bfloat16 and has_fp32_products_of_bf16(g.device)
            if self.window is not None:  # the micro-batch has so few examples that there is one product
                window_pd = self.window[rows]
                if on_matrix_units:
                    torch.addmm(window_pd, x_pN, y_Nd, out_dtype=torch.float32, out=window_pd)
                else:
                    window_pd.addmm_(x_pN.to(window_pd.dtype), y_Nd.to(window_pd.dtype))
                continue
            total_pd, wide = self.total[rows], torch.promote_types(g.dtype, torch.float32)
            p = len(x_pN)
            count = -(-p // max(NARROW, PRODUCT_ENTRIES // y_Nd.shape[1]))
            for some in (
                slice(p * i // count, p * (i + 1) // count) for i in range(count)
            ):  # about equal: none is narrow
                if on_matrix_units:
                    product_pd = torch.mm(x_pN[some], y_Nd, out_dtype=torch.float32)
                else:
                    product_pd = torch.mm(x_pN[some].to(wide), y_Nd.to(wide))
                total_pd[some].add_(product_pd)  # `+=` would copy the rows to themselves

    def _add_narrow_product(self, g_BTp: Tensor, a_BTd: Tensor, rows: slice) -> None:
        """Any order of additions: with n^2 T <= examples^2, a rounding for every token is within the same bound."""
        size = max(1, math.isqrt(self.examples**2 // max(1, g_BTp.shape[1])))
        wide = torch.promote_types(g_BTp.dtype, torch.float32)
        total_pd = self.total[rows]
        for some in blocks(len(g_BTp), EXAMPLES_PER_SUM):
            parts = zip(g_BTp[some].to(wide).split(size), a_BTd[some].to(wide).split(size), strict=True)
            products = (torch.mm(g.flatten(0, 1).t(), a.flatten(0, 1)).double() for g, a in parts)
            total_pd += functools.reduce(Tensor.add_, products)

    def add_matrices(self, grad_Bn: Tensor, weight_B: Tensor) -> None:
        """The parameter, flattened, += sum_b weight_b grad_b, for as many numbers as matrices have: as in `add_product`."""
        for grad, weight in zip(grad_Bn.split(self.examples), weight_B.split(self.examples), strict=True):
            if self.window is not None:
                self.window.view(-1).addmv_(grad.t(), weight)
            else:
                self.total.view(-1).add_(torch.mv(grad.t(), weight))


def total_dtype(dtype: torch.dtype) -> torch.dtype:
    """What totals are in: int64 for multiples of a lattice (privacy/lattice.py), which do not round, and else fp64."""
    return torch.int64 if dtype == torch.int64 else torch.float64


def blocks(length: int, size: int) -> Iterator[slice]:
    """0 to `length` in steps of `size`."""
    return (slice(start, min(start + size, length)) for start in range(0, length, size))


def require_resolution(num_additions: int, num_rows: int) -> None:
    """Refuses a logical batch for whose fp64 totals the second rule of the module docstring does not hold.

    Args:
        num_additions: into one total, one for every EXAMPLES_PER_SUM examples of a micro-batch or fewer.
        num_rows: examples behind the total, padding included.

    Raises:
        PrivacyConfigError: the batch is too large.
    """
    if num_additions * num_rows > 1 << 40:
        raise PrivacyConfigError(
            f"a logical batch of {num_rows:,} rows is added up in {num_additions:,} parts, which is more than fp64 sums take "
            "within the stated rounding; use a larger train.micro_batch_size or a smaller batch"
        )


class Accumulator(Protocol):
    """Takes one micro-batch after the other: `start`, then `slot` and `filled` for each parameter, then `finish`."""

    leaves_process: bool
    """Whether values that depend on gradients leave the process before the logical batch is complete (contract 9)."""

    def zero_(self) -> None:
        """Starts a new logical batch."""
        ...

    def start(self, num_rows: int) -> None:
        """A micro-batch of `num_rows` examples begins, padding included. Raises as `require_resolution` does."""
        ...

    def slot(self, name: str, *, of_products: bool) -> Slot:
        """Where this micro-batch's contribution is to be added; `of_products` if the slot's `add_...` will be called."""
        ...

    def filled(self, name: str) -> None:
        """The contribution is complete. Not called for a parameter that has none."""
        ...

    def finish(self) -> None:
        """The micro-batch is complete."""
        ...


class LocalSums:
    """Whole sums in this process: fp64 totals, and for products of small micro-batches fp32 windows that are emptied into them.

    A window saves memory traffic: an fp64 total of every weight at each micro-batch of 8 costs 1.5 % of a step. Windows are
    made when they are needed and live no longer than the logical batch. Micro-batches of more than half of EXAMPLES_PER_SUM
    examples need none, and fp64 models neither.
    """

    leaves_process = False

    def __init__(
        self, shapes: Mapping[str, torch.Size], dtype: torch.dtype, device: torch.device, *, windows: bool = True
    ) -> None:
        kind = total_dtype(dtype)
        self._totals = {n: torch.zeros(shape, dtype=kind, device=device) for n, shape in shapes.items()}
        self._rounds = kind.is_floating_point
        self._windows: dict[str, Tensor] = {}
        self._may_have_windows = windows and dtype == torch.float32
        self.zero_()

    def zero_(self) -> None:
        self._rows = self._additions = self._rows_in_windows = 0
        self._has_windows = False
        self._windows = {}
        for total in self._totals.values():
            total.zero_()

    def start(self, num_rows: int) -> None:
        self._rows += num_rows
        self._additions += -(-num_rows // EXAMPLES_PER_SUM)
        if self._rounds:
            require_resolution(self._additions, self._rows)
        self._has_windows = 2 * num_rows <= EXAMPLES_PER_SUM and self._may_have_windows
        if self._has_windows:
            if self._rows_in_windows + num_rows > EXAMPLES_PER_SUM:
                self._empty_windows()
            self._rows_in_windows += num_rows

    def slot(self, name: str, *, of_products: bool) -> Slot:
        total = self._totals[name]
        if not (of_products and self._has_windows):
            return Slot(total)
        if name not in self._windows:
            self._windows[name] = torch.zeros_like(total, dtype=torch.float32)
        return Slot(total, self._windows[name])

    def filled(self, name: str) -> None:
        pass

    def finish(self) -> None:
        pass

    def _empty_windows(self) -> None:
        for name, window in self._windows.items():
            self._totals[name] += window
            window.zero_()
        self._rows_in_windows = 0

    def sums(self) -> Iterator[tuple[str, Tensor]]:
        """(parameter name, sum in fp64; in int64 for certified arithmetic)."""
        self._empty_windows()
        self._windows = {}
        yield from self._totals.items()
