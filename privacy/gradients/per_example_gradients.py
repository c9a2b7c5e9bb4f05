"""What one layer call contributes to one parameter's per-example gradients, never written out unless that is cheaper.

A parameter's gradient for example b is the sum of its contributions, so a layer that is used twice and a weight that two
layers share need no special case: the squared norm of a sum is the sum of all pairwise inner products.

Four kinds cover every layer:

* `OuterProducts`: sum_t g_t (x) a_t, of Linear and convolution weights. Its inner products are sums over two small Gram
  matrices (the ghost norm of Goodfellow 2015; Li et al. 2022, section 4).
* `Rows`: the same with one-hot a_t, of embeddings; the one-hot vectors are never formed.
* `Dense`: the per-example gradient itself, of biases, norms and raw parameters.
* `ChunkedOuterProducts`: outer products of which g is too large to hold, and computed again, chunk by chunk, when it is needed.

Shapes: B examples, T tokens (any flattened middle dimensions), d input width, p output width, V rows.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..numerics.fused import fused
from ..numerics.precision import Norm, has_fp32_products_of_bf16, hidden, wide, wide_dtype
from ..sums.grid import EXAMPLES_PER_SUM, SHORT
from ..sums.totals import Slot, blocks

HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDENED_ENTRIES = (1 << 18, 1 << 24)
"""Entries of a written-out gradient that are widened to fp64 at a time: 2 MiB on CPU, which stay in its caches; 128 on CUDA."""


@dataclass(frozen=True)
class OuterProducts:
    """Per-example gradient sum_t g_t (x) a_t of shape (p, d), or its transpose when the layer stores (d, p).

    Attributes:
        a_BTd: layer inputs.
        g_BTp: gradients of the summed loss with respect to the layer's outputs.
    """

    a_BTd: Tensor
    g_BTp: Tensor

    @property
    def norm_terms(self) -> int:
        """How many roundings a term of the squared norm passes through at most (norms.py)."""
        return (
            _gram_roundings(self.a_BTd) + _gram_roundings(self.g_BTp) + 2 * self.a_BTd.shape[1] + 3
        )

    @property
    def sum_terms(self) -> int:
        """Number of products behind one entry of an fp32 sum."""
        return EXAMPLES_PER_SUM * self.a_BTd.shape[1]

    def settled(self) -> "OuterProducts | Dense":
        """What to keep until the weighted sum: the written-out gradient where it has fewer numbers than its two factors.

        Its norm and its weighted sum only read it, so the layer costs one matrix product, as without privacy.
        Under autocast on CUDA, an fp32 input is kept as the bf16 copy that the layer itself worked with.
        """
        tokens, d, p = self.a_BTd.shape[1], self.a_BTd.shape[2], self.g_BTp.shape[2]
        if tokens * (d + p) >= d * p:
            return Dense(self.instantiate(), is_product=True)
        if _has_bf16_units(self.g_BTp.device) and self.g_BTp.dtype == torch.bfloat16:
            return OuterProducts(self.a_BTd.bfloat16(), self.g_BTp)
        return self

    def instantiate(self) -> Tensor:
        """(B, p, d)."""
        return product(self.g_BTp.transpose(1, 2), self.a_BTd)

    def norm(self) -> Norm:
        """The ghost norm, by Gram matrices."""
        return ghost_norm(self.a_BTd, self.g_BTp)

    def add_weighted(self, weight_B: Tensor, slot: Slot) -> None:
        """slot (p, d) += sum_b weight_b grad_b; the factor goes into the smaller operand, which is copied."""
        a, g = self.a_BTd, self.g_BTp
        if not self.folds_in_bf16:
            a, g = wide(a), wide(g)
        if a.shape[2] < g.shape[2]:
            a = _scaled(a, weight_B)
        else:
            g = _scaled(g, weight_B)
        slot.add_product(g, a)

    @property
    def folds_in_bf16(self) -> bool:
        """Whether the weighted sum is one product of bf16 matrices, for the sake of CUDA's matrix units.

        Then the factor times the operand is rounded to bf16 again, which norms.py allows for (`fold_error`).
        """
        return _are_on_matrix_units(self.a_BTd, self.g_BTp)


@dataclass(frozen=True)
class Rows:
    """Per-example gradient of a (V, p) table: row ids_BT[b, t] receives g_BTp[b, t]."""

    ids_BT: Tensor
    g_BTp: Tensor
    sum_terms = 1  # fp64

    @property
    def norm_terms(self) -> int:
        return _gram_roundings(self.g_BTp) + 2 * self.ids_BT.shape[1] + 3

    def norm(self) -> Norm:
        squared_B = inner(self, self)
        num_tokens, width = self.ids_BT.shape[1], self.g_BTp.shape[2]
        by_underflow = num_tokens * (hidden(width, squared_B.dtype) + hidden(1, squared_B.dtype))
        return Norm(squared_B, wide(self.g_BTp).norm(dim=2).sum(1), by_underflow)

    def add_weighted(self, weight_B: Tensor, slot: Slot) -> None:
        """slot (V, p) += sum_b weight_b grad_b.

        Tokens of one row are added up first, so that a row of the total rounds once for many examples and not at every token.
        """
        for some in blocks(len(self.ids_BT), EXAMPLES_PER_SUM):
            ids_N, order_N = self.ids_BT[some].flatten().sort()
            g_Np = (self.g_BTp[some].double() * weight_B[some, None, None]).flatten(0, 1)[order_N]
            is_new_N = torch.ones_like(ids_N, dtype=torch.bool)
            is_new_N[1:] = ids_N[1:] != ids_N[:-1]
            place_N = is_new_N.cumsum(0) - 1
            # Zeros behind the last different id, for row 0.
            sums_Np = torch.zeros_like(g_Np).index_add_(0, place_N, g_Np)
            if some.start > 0:  # the slot has room for one addend, and a row may be in every block
                slot.total.make_room()
            slot.total.add_rows(
                torch.zeros_like(ids_N).scatter_(0, place_N, ids_N), sums_Np, some.stop - some.start
            )


@dataclass(frozen=True)
class Dense:
    """The per-example gradient, written out.

    Attributes:
        grad_B: (B, *parameter shape).
        is_product: as many numbers as a matrix has, because the layer's product was written out (`OuterProducts.settled`);
            its sums are fp32 over a few examples, as those of products are. All others are summed in fp64.
    """

    grad_B: Tensor
    is_product: bool = False
    sum_terms = 1

    @property
    def norm_terms(self) -> int:
        return roundings(self.grad_B[0].numel()) + 3

    def norm(self) -> Norm:
        """The norm of blocks, added up in fp64."""
        grad_Bn = self.grad_B.flatten(1)
        n = grad_Bn.shape[1]
        whole = n // TERMS_PER_SUM * TERMS_PER_SUM
        norms_BN = []
        if whole:
            norms_BN.append(
                torch.linalg.vector_norm(
                    grad_Bn[:, :whole].unflatten(1, (-1, TERMS_PER_SUM)), dim=2
                )
            )
        if whole < n:
            norms_BN.append(torch.linalg.vector_norm(grad_Bn[:, whole:], dim=1, keepdim=True))
        norm_B = torch.cat(norms_BN, 1).double().norm(dim=1).to(grad_Bn.dtype)
        return Norm(norm_B.square(), norm_B, hidden(n, norm_B.dtype))

    def add_weighted(self, weight_B: Tensor, slot: Slot) -> None:
        grad_Bn, wide_B = self.grad_B.flatten(1), weight_B.double()
        if self.is_product:
            slot.add_matrices(grad_Bn, weight_B)
            return
        entries = WIDENED_ENTRIES[grad_Bn.device.type == "cuda"]
        for some in blocks(grad_Bn.shape[1], max(1, entries // len(grad_Bn))):
            slot.total.add(
                [torch.mv(grad_Bn[:, some].double().t(), wide_B)], len(grad_Bn), some.start
            )


@dataclass(frozen=True)
class ChunkedOuterProducts:
    """Per-example gradient sum_t g_t (x) a_t of shape (V, d), whose g (B, T, V) never exists as a whole (V output width).

    Attributes:
        a_BTd: layer inputs.
        gram_g_BTT: g_s . g_t, fp32 (or fp64), summed over the chunks.
        num_rows: V.
        gradients: yields (rows, g_BTv), in the dtype of a and free to be written to, for a partition of the rows, the same bits
            at every call: norm, inner products and sum must see the same gradient.
    """

    a_BTd: Tensor
    gram_g_BTT: Tensor
    num_rows: int
    gradients: Callable[[], Iterator[tuple[slice, Tensor]]]

    @property
    def norm_terms(self) -> int:
        a, num_tokens = self.a_BTd, self.a_BTd.shape[1]
        return _gram_roundings(a) + _gram_roundings(a, self.num_rows) + 2 * num_tokens + 3

    @property
    def sum_terms(self) -> int:
        return EXAMPLES_PER_SUM * self.a_BTd.shape[1]

    def norm(self) -> Norm:
        """The ghost norm, as in `OuterProducts.norm`."""
        return _norm_of_strips(
            *_strip(_grams(self.a_BTd, self.a_BTd), [self.gram_g_BTT], 0),
            self.a_BTd.shape[2],
            self.num_rows,
        )

    def add_weighted(self, weight_B: Tensor, slot: Slot) -> None:
        """slot (V, d) += sum_b weight_b grad_b."""
        narrow = self.folds_in_bf16
        a_BTd = _scaled(self.a_BTd if narrow else wide(self.a_BTd), weight_B)
        for rows, g_BTv in self.gradients():
            slot.add_product(g_BTv if narrow else wide(g_BTv), a_BTd, rows)

    @property
    def folds_in_bf16(self) -> bool:
        """As in `OuterProducts`."""
        return _are_on_matrix_units(self.a_BTd)


Contribution = OuterProducts | Rows | Dense | ChunkedOuterProducts


def owned(part: Contribution, *borrowed: Tensor | None) -> Contribution:
    """The same, with copies of the tensors that share memory with those that are borrowed."""
    places = {x.untyped_storage().data_ptr() for x in borrowed if x is not None}
    copies = {
        name: value.clone()
        for name, value in vars(part).items()
        if isinstance(value, Tensor) and value.untyped_storage().data_ptr() in places
    }
    return replace(part, **copies)  # type: ignore[arg-type]  # each kind has tensors of its own


def is_short(parts: Sequence[Contribution]) -> bool:
    """Whether a parameter's contributions are one written-out gradient of few numbers: of biases, norms, small raw parameters."""
    x = parts[0]
    return (
        len(parts) == 1
        and isinstance(x, Dense)
        and not x.is_product
        and x.grad_B[0].numel() <= SHORT
    )


def may_cancel(parts: Sequence[Contribution]) -> bool:
    """Whether the gross norm may be longer than the norm, by the shapes of a parameter's contributions."""
    x = parts[0]
    return len(parts) > 1 or not (
        isinstance(x, Dense) or (x.ids_BT if isinstance(x, Rows) else x.a_BTd).shape[1] == 1
    )


def in_full(parts: Sequence[Contribution], shape: torch.Size) -> Dense:
    """The sum of one parameter's contributions, written out: its norm is that of what is summed. shape: the parameter's."""
    written = []  # (B, ...) in any form that flattens to the shape; the same bits at every call
    for part in parts:
        match part:
            case Dense():
                written.append(part.grad_B)
            case OuterProducts():
                written.append(part.instantiate())
            case Rows():
                g_BTp = wide(part.g_BTp)
                first_B1 = torch.arange(len(g_BTp), device=g_BTp.device)[:, None] * shape[0]
                table, ids_N = (
                    g_BTp.new_zeros(len(g_BTp) * shape[0], shape[1]),
                    (part.ids_BT + first_B1).flatten(),
                )
                if table.is_cuda:  # where index_add_ adds up in no fixed order
                    table.index_put_((ids_N,), g_BTp.flatten(0, 1), accumulate=True)
                else:
                    table.index_add_(0, ids_N, g_BTp.flatten(0, 1))
                written.append(table.view(len(g_BTp), *shape))
            case ChunkedOuterProducts():
                written.append(part.gram_g_BTT.new_empty(len(part.a_BTd), *shape))
                for rows, g_BTv in part.gradients():
                    written[-1][:, rows] = product(g_BTv.transpose(1, 2), part.a_BTd)
    return Dense(functools.reduce(torch.add, [x.flatten(1) for x in written]), is_product=True)


# Rows of excluded examples become exact zeros before anything is summed, because 0 * NaN is not 0.


def without(part: Contribution, excluded_B: Tensor | None) -> Contribution:
    """The same, with the excluded rows, if there are any, exactly zero in all that its weighted sum reads."""
    if excluded_B is None:
        return part
    match part:
        case Dense():
            return Dense(blanked(part.grad_B, excluded_B), part.is_product)
        case Rows():
            return Rows(part.ids_BT, blanked(part.g_BTp, excluded_B))
        case OuterProducts(a, g) if _in_place(a) and _in_place(g):  # one kernel for both
            return OuterProducts(blank_rows_(a, excluded_B, g), g)
        case OuterProducts(a, g):
            return OuterProducts(blanked(a, excluded_B), blanked(g, excluded_B))
        case ChunkedOuterProducts(gradients=gradients):
            return replace(
                part,
                a_BTd=blanked(part.a_BTd, excluded_B),
                gradients=lambda: (
                    (rows, blanked(g_BTv, excluded_B)) for rows, g_BTv in gradients()
                ),
            )


def blanked(x: Tensor, excluded_B: Tensor) -> Tensor:
    """x (B, ...) with the excluded rows exactly zero. On CUDA x itself may be overwritten: it is the recorder's own copy."""
    if _in_place(x):
        return blank_rows_(x, excluded_B)
    return torch.where(excluded_B.view(-1, *[1] * (x.dim() - 1)), x.new_zeros(()), x)


def blank_rows_(x: Tensor, excluded_B: Tensor, y: Tensor | None = None) -> Tensor:
    """Zeroes the excluded rows of a contiguous x (B, ...) in place, and those of y; returns x.

    On CUDA nothing may wait for the answer whether there are such rows, nor may launches depend on the data: every micro-batch
    launches the same kernels. No library has a kernel that leaves good rows alone: to write every tensor again would cost 15 % of
    a step (counted in bytes, ViT-L in bf16). So one program a row overwrites it where it stands, and ends at once if it is good.
    """
    from ..numerics.kernels import ROW_BLOCK, zero_excluded_rows

    y = x[:0] if y is None else y
    if x.numel() + y.numel() > 0:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            sizes = (x.numel() // len(x), y.numel() // len(x))
            zero_excluded_rows[(len(x),)](
                x, y, excluded_B.view(torch.uint8), *sizes, BLOCK=ROW_BLOCK
            )
    return x


def _in_place(x: Tensor) -> bool:
    return x.is_cuda and x.is_contiguous() and HAS_TRITON


def sum_over_tokens(x_BTd: Tensor) -> Tensor:
    """(B, d), widened. On CPU as a product with ones, which is four times as fast as torch's sum over a middle dimension."""
    if x_BTd.device.type != "cpu":
        return x_BTd.sum(1, dtype=wide_dtype(x_BTd.dtype))
    x_BTd = wide(x_BTd)
    return torch.bmm(x_BTd.new_ones(len(x_BTd), 1, x_BTd.shape[1]), x_BTd).squeeze(1)


def fold_error(x: Contribution) -> float:
    """Relative error, of the gross norm, by which the weighted sum may miss the gradient whose norm was taken.

    Zero but where a factor is folded into bf16: half a unit in the last place of every product of factor and entry (and a
    little for fp32 rounding before), and matrix units that cut off rather than round at every 8 or more products.
    """
    if isinstance(x, Dense | Rows) or not x.folds_in_bf16:
        return 0.0
    return 2**-8 * (1 + 2**-10) + x.sum_terms / 8 * 2**-23


def _has_bf16_units(device: torch.device) -> bool:
    return device.type == "cuda"


def _are_on_matrix_units(*operands: Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 and _has_bf16_units(x.device) for x in operands)


def _scaled(x_BTd: Tensor, weight_B: Tensor) -> Tensor:
    """x times its example's weight, rounded once from fp32 (or fp64) to x's dtype."""
    return torch.mul(x_BTd, weight_B[:, None, None], out=torch.empty_like(x_BTd))


TERMS_PER_SUM = 1024
"""The most terms that are added up in fp32, in an order that is not known, before a norm takes their sum."""


def roundings(terms: int, at_once: int = TERMS_PER_SUM, each: int = 1) -> int:
    """How many roundings a term of a sum passes through at most, whatever the order in which `at_once` of them are added.

    Args:
        each: what a term counts for in its sum.
    """
    return min(each * terms, each * at_once + -(-terms // at_once))


def _terms_of_gram(x_BTd: Tensor) -> tuple[int, int]:
    """`at_once` and `each`. On matrix units a term counts four (norms.py), so sums are short where a Gram matrix, which each of
    them writes, is small beside its operands."""
    if not _are_on_matrix_units(x_BTd):
        return TERMS_PER_SUM, 1
    return (512 if x_BTd.shape[1] <= 64 else 2048), 4


def _gram_roundings(x_BTd: Tensor, width: int | None = None) -> int:
    """Those of a term of `gram(x, x)`, x being of the given width."""
    return roundings(x_BTd.shape[2] if width is None else width, *_terms_of_gram(x_BTd))


def product(x_BTd: Tensor, y_BdS: Tensor) -> Tensor:
    """(B, T, S), widened: on CUDA products of bf16 come in fp32."""
    if _are_on_matrix_units(x_BTd, y_BdS) and has_fp32_products_of_bf16(x_BTd.device):
        return torch.bmm(x_BTd, y_BdS, out_dtype=torch.float32)
    return torch.bmm(wide(x_BTd), wide(y_BdS))


def gram(x_BTd: Tensor, y_BSd: Tensor) -> Tensor:
    """(B, T, S): x_t . y_s, widened."""
    return functools.reduce(Tensor.add_, _grams(x_BTd, y_BSd))


def _grams(x_BTd: Tensor, y_BSd: Tensor) -> list[Tensor]:
    """What `gram` adds up, each of so many terms. (Not `baddbmm`, whose order may be that of one long sum.)"""
    at_once, _ = _terms_of_gram(y_BSd)
    parts = zip(x_BTd.split(at_once, 2), y_BSd.split(at_once, 2), strict=True)
    return [product(x, y.transpose(1, 2)) for x, y in parts]


def total(x_BTS: Tensor) -> Tensor:
    """(B,): the sum over S, and of such sums in fp64."""
    return x_BTS.sum(2).sum(1, dtype=torch.float64).to(x_BTS.dtype)


def ghost_norm(a_BTd: Tensor, g_BTp: Tensor) -> Norm:
    """The norm of sum_t g_t (x) a_t, whose square is sum_{s,t} (a_s . a_t) (g_s . g_t)  (Goodfellow 2015; Li et al. 2022).

    Both Gram matrices are symmetric, so only the lower triangle is computed, in strips: 5 / 8 of the products at 197 tokens.
    On CUDA a strip is larger: as one product of cuBLAS, 197 tokens are memory bound. The diagonals hold the squared lengths of
    the tokens.
    """
    if not _are_on_matrix_units(a_BTd, g_BTp):
        a_BTd, g_BTp = wide(a_BTd), wide(g_BTp)
    tokens, size = a_BTd.shape[1], _TOKENS_PER_STRIP[_has_bf16_units(a_BTd.device)]
    count, strips = max(1, tokens // size), []
    for i in range(count):
        start, until = i * size, tokens if i == count - 1 else (i + 1) * size
        grams_a, grams_g = (_grams(x[:, start:until], x[:, :until]) for x in (a_BTd, g_BTp))
        strips.append(_strip(grams_a, grams_g, start))
    rows_BT, square_a_BT, square_g_BT = (
        x[0] if count == 1 else torch.cat(x, 1) for x in zip(*strips, strict=True)
    )
    return _norm_of_strips(rows_BT, square_a_BT, square_g_BT, a_BTd.shape[2], g_BTp.shape[2])


_TOKENS_PER_STRIP = (48, 256)
"""Rows on CPU and on CUDA: smaller strips compute less of the upper triangle, larger ones use the processor better."""


@fused(for_all_sizes=True)
def _strip(
    grams_a: list[Tensor], grams_g: list[Tensor], start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Takes the t tokens from `start` on; (B, t) each: their parts of the squared norm, and the squared lengths of a and g.

    Args:
        grams_a: of these tokens and all up to the last of them, (B, t, start + t), in parts to be added up. Written over.
    """
    on_cpu = (
        grams_a[0].device.type == "cpu"
    )  # elsewhere what is compiled would write its arguments back
    strip_a, strip_g = (
        functools.reduce(Tensor.add_ if on_cpu else torch.add, x) for x in (grams_a, grams_g)
    )
    square_a_Bt, square_g_Bt = (x.diagonal(start, 1, 2).clone() for x in (strip_a, strip_g))
    product_Bts = strip_a.mul_(strip_g) if on_cpu else strip_a * strip_g
    left_Bts, square_Btt = product_Bts.split([start, product_Bts.shape[1]], 2)
    rows_Bt = square_Btt.sum(2)
    if (
        start > 0
    ):  # what is left of the square on the diagonal has a mirror image, which is not computed
        rows_Bt = rows_Bt + 2 * left_Bts.sum(2)
    return rows_Bt, square_a_Bt, square_g_Bt


@fused(for_all_sizes=True)
def _norm_of_strips(
    rows_BT: Tensor, square_a_BT: Tensor, square_g_BT: Tensor, d: int, p: int
) -> Norm:
    """The norm of outer products; gross and hidden ones from the squared lengths of inputs and output gradients."""
    squared_B, dtype = rows_BT.sum(1, dtype=torch.float64).to(rows_BT.dtype), rows_BT.dtype
    hidden_a, hidden_g = hidden(d, dtype), hidden(p, dtype)
    length_a_BT, length_g_BT = (
        (square_a_BT + hidden_a**2).sqrt(),
        (square_g_BT + hidden_g**2).sqrt(),
    )
    hidden_BT = hidden_g * length_a_BT + hidden_a * length_g_BT + hidden(1, dtype)
    return Norm(squared_B, (length_a_BT * length_g_BT).sum(1), hidden_BT.sum(1))


def inner(x: Contribution, y: Contribution) -> Tensor:
    """(B,) Frobenius inner product of two contributions to the same parameter."""
    match x, y:
        case ChunkedOuterProducts(), _:
            parts = [
                inner(OuterProducts(x.a_BTd, g), _restricted(y, rows)) for rows, g in x.gradients()
            ]
            return torch.stack(parts).sum(0)
        case _, ChunkedOuterProducts():
            return inner(y, x)
        case OuterProducts(), OuterProducts():
            return total(gram(x.a_BTd, y.a_BTd) * gram(x.g_BTp, y.g_BTp))
        case Rows(), Rows():
            same_BTS = x.ids_BT[:, :, None] == y.ids_BT[:, None, :]
            return total(gram(x.g_BTp, y.g_BTp) * same_BTS)
        case Rows(), OuterProducts():
            # <sum_s e_{id_s} (x) r_s, sum_t g_t (x) a_t> = sum_{s,t} g_t[id_s] (r_s . a_t): a tied embedding and head.
            picked_BTS = wide(y.g_BTp).gather(
                2, x.ids_BT[:, None, :].expand(-1, y.g_BTp.shape[1], -1)
            )
            return total(picked_BTS * gram(y.a_BTd, x.g_BTp))
        case OuterProducts(), Rows():
            return inner(y, x)
        case Dense(), Dense():
            return (
                (x.grad_B.flatten(1) * y.grad_B.flatten(1))
                .sum(1, dtype=torch.float64)
                .to(x.grad_B.dtype)
            )
        case Dense(), OuterProducts():
            return inner(x, Dense(y.instantiate()))
        case Dense(), Rows():
            # sum_t D[id_t] . g_t
            picked_BTp = x.grad_B.gather(1, y.ids_BT[:, :, None].expand(-1, -1, x.grad_B.shape[2]))
            return (
                (picked_BTp * wide(y.g_BTp))
                .flatten(1)
                .sum(1, dtype=torch.float64)
                .to(picked_BTp.dtype)
            )
        case OuterProducts() | Rows(), Dense():
            return inner(y, x)
        case _:
            raise NotImplementedError(
                f"one parameter used as {type(x).__name__} and as {type(y).__name__}"
            )


def _restricted(x: Contribution, rows: slice) -> Contribution:
    """The part of x that belongs to some rows of the parameter, numbered from 0."""
    match x:
        case OuterProducts():
            return OuterProducts(x.a_BTd, x.g_BTp[:, :, rows])
        case Rows():
            is_here_BT = (x.ids_BT >= rows.start) & (x.ids_BT < rows.stop)
            ids_BT = (x.ids_BT - rows.start).clamp(0, rows.stop - rows.start - 1)
            return Rows(ids_BT, x.g_BTp.masked_fill(~is_here_BT[:, :, None], 0))
        case Dense():
            return Dense(x.grad_B[:, rows])
        case ChunkedOuterProducts():
            parts = [
                g[
                    :,
                    :,
                    max(rows.start - chunk.start, 0) : max(
                        min(rows.stop, chunk.stop) - chunk.start, 0
                    ),
                ]
                for chunk, g in x.gradients()
            ]
            return OuterProducts(x.a_BTd, torch.cat(parts, 2))
