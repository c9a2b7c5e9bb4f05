"""The contribution of one layer call to one parameter's per-example gradients.

A parameter's gradient for example b is the sum of its contributions, so a layer that is used twice
and a weight that two layers share need no special case: the squared norm of a sum is the sum of all
pairwise inner products. A gradient is written out only where that is cheaper.

Shapes: B examples, T tokens (any flattened middle dimensions), d input width, p output width, V
rows.
"""

import functools
import importlib.util
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from ..numerics.fused import fused
from ..numerics.precision import Norm, has_fp32_products_of_bf16, underflow_bound, wide, wide_dtype
from ..sums.grid import EXAMPLES_PER_SUM, SHORT
from ..sums.totals import SumTarget, blocks

HAS_TRITON = importlib.util.find_spec("triton") is not None
WIDENED_ENTRIES = (1 << 18, 1 << 24)
"""Entries of a written-out gradient that are widened to fp64 at a time: 2 MiB on CPU, which stay in
its caches; 128 on CUDA."""


@dataclass(frozen=True)
class OuterProducts:
    """Per-example gradient sum_t g_t (x) a_t of shape (p, d): Linear and convolution weights.

    Where a layer stores (d, p), a and g change places. Inner products are sums over two small Gram
    matrices (the ghost norm of Goodfellow 2015; Li et al. 2022, section 4).

    Attributes:
        a_BTd: layer inputs.
        g_BTp: gradients of the summed loss with respect to the layer's outputs.
    """

    a_BTd: Tensor
    g_BTp: Tensor

    @property
    def norm_terms(self) -> int:
        """Returns the most roundings of a term of the squared norm (docs/sums.md)."""
        num_tokens = self.a_BTd.shape[1]
        return _gram_roundings(self.a_BTd) + _gram_roundings(self.g_BTp) + 2 * num_tokens + 3

    @property
    def sum_terms(self) -> int:
        """Returns the number of products behind one entry of an fp32 sum."""
        return EXAMPLES_PER_SUM * self.a_BTd.shape[1]

    def compact(self) -> "OuterProducts | Dense":
        """Returns the form that is kept until the weighted sum.

        It is the written-out gradient where that has fewer numbers than its two factors. Its norm
        and its weighted sum only read it, so the layer costs one matrix product, as without
        privacy. Under autocast on CUDA, an fp32 input is kept as the bf16 copy that the layer
        itself worked with.
        """
        tokens = self.a_BTd.shape[1]
        d = self.a_BTd.shape[2]
        p = self.g_BTp.shape[2]
        if tokens * (d + p) >= d * p:
            return Dense(self.instantiate(), is_product=True)
        if _has_bf16_units(self.g_BTp.device) and self.g_BTp.dtype == torch.bfloat16:
            return OuterProducts(self.a_BTd.bfloat16(), self.g_BTp)
        return self

    def instantiate(self) -> Tensor:
        """Returns the gradient (B, p, d), written out."""
        return product(self.g_BTp.transpose(1, 2), self.a_BTd)

    def norm(self) -> Norm:
        """Returns the ghost norm, by Gram matrices."""
        return ghost_norm(self.a_BTd, self.g_BTp)

    def add_weighted(self, weight_B: Tensor, slot: SumTarget) -> None:
        """Adds sum_b weight_b grad_b to the slot (p, d).

        The factor goes into the smaller operand, which is copied.
        """
        a_BTd = self.a_BTd
        g_BTp = self.g_BTp
        if not self.folds_in_bf16:
            a_BTd = wide(a_BTd)
            g_BTp = wide(g_BTp)
        if a_BTd.shape[2] < g_BTp.shape[2]:
            a_BTd = _scaled(a_BTd, weight_B)
        else:
            g_BTp = _scaled(g_BTp, weight_B)
        slot.add_product(g_BTp, a_BTd)

    @property
    def folds_in_bf16(self) -> bool:
        """Returns whether the weighted sum is one product of bf16 matrices on matrix units.

        Then the factor times the operand is rounded to bf16 again, which the safe norm allows for
        (`fold_error`).
        """
        return _are_on_matrix_units(self.a_BTd, self.g_BTp)


@dataclass(frozen=True)
class EmbeddingGradient:
    """Per-example gradient of an embedding (V, p): row ids_BT[b, t] receives g_BTp[b, t].

    It is an outer product with one-hot inputs, which are never formed.
    """

    ids_BT: Tensor
    g_BTp: Tensor
    # Sums are fp64.
    sum_terms = 1

    @property
    def norm_terms(self) -> int:
        """Returns the most roundings of a term of the squared norm (docs/sums.md)."""
        return _gram_roundings(self.g_BTp) + 2 * self.ids_BT.shape[1] + 3

    def norm(self) -> Norm:
        """Returns the norm by a Gram matrix of g."""
        squared_B = inner(self, self)
        num_tokens = self.ids_BT.shape[1]
        dtype = squared_B.dtype
        by_underflow = num_tokens * (
            underflow_bound(self.g_BTp.shape[2], dtype) + underflow_bound(1, dtype)
        )
        return Norm(squared_B, wide(self.g_BTp).norm(dim=2).sum(1), by_underflow)

    def add_weighted(self, weight_B: Tensor, slot: SumTarget) -> None:
        """Adds sum_b weight_b grad_b to the slot (V, p).

        Tokens of one row are added up first, so that a row of the total rounds once for many
        examples and not at every token.
        """
        for examples in blocks(len(self.ids_BT), EXAMPLES_PER_SUM):
            ids_N, order_N = self.ids_BT[examples].flatten().sort()
            g_BTp = self.g_BTp[examples].double() * weight_B[examples, None, None]
            g_Np = g_BTp.flatten(0, 1)[order_N]
            del g_BTp
            is_new_N = torch.ones_like(ids_N, dtype=torch.bool)
            is_new_N[1:] = ids_N[1:] != ids_N[:-1]
            place_N = is_new_N.cumsum(0) - 1
            # Zeros behind the last different id, for row 0.
            sums_Np = torch.zeros_like(g_Np).index_add_(0, place_N, g_Np)
            # The slot has room for one addend, and a row may be in every block.
            if examples.start > 0:
                slot.total.make_room()
            rows_N = torch.zeros_like(ids_N).scatter_(0, place_N, ids_N)
            slot.total.add_rows(rows_N, sums_Np, examples.stop - examples.start)


@dataclass(frozen=True)
class Dense:
    """The per-example gradient, written out: of biases, norm layers and raw parameters.

    Attributes:
        grad_B: (B, *parameter shape).
        is_product: as many numbers as a matrix has, because the layer's product was written out
            (`OuterProducts.compact`); its sums are fp32 over a few examples, as those of products
            are. All others are summed in fp64.
    """

    grad_B: Tensor
    is_product: bool = False
    sum_terms = 1

    @property
    def norm_terms(self) -> int:
        """Returns the most roundings of a term of the squared norm (docs/sums.md)."""
        return roundings(self.grad_B[0].numel()) + 3

    def norm(self) -> Norm:
        """Returns the norm: those of blocks, added up in fp64."""
        grad_Bn = self.grad_B.flatten(1)
        n = grad_Bn.shape[1]
        end_of_blocks = n // TERMS_PER_SUM * TERMS_PER_SUM
        norms_BN = []
        if end_of_blocks:
            blocks_BNt = grad_Bn[:, :end_of_blocks].unflatten(1, (-1, TERMS_PER_SUM))
            norms_BN.append(torch.linalg.vector_norm(blocks_BNt, dim=2))
        if end_of_blocks < n:
            rest_Bn = grad_Bn[:, end_of_blocks:]
            norms_BN.append(torch.linalg.vector_norm(rest_Bn, dim=1, keepdim=True))
        norm_B = torch.cat(norms_BN, 1).double().norm(dim=1).to(grad_Bn.dtype)
        return Norm(norm_B.square(), norm_B, underflow_bound(n, norm_B.dtype))

    def add_weighted(self, weight_B: Tensor, slot: SumTarget) -> None:
        """Adds sum_b weight_b grad_b to the slot."""
        grad_Bn = self.grad_B.flatten(1)
        wide_weight_B = weight_B.double()
        if self.is_product:
            slot.add_matrices(grad_Bn, weight_B)
            return
        entries = WIDENED_ENTRIES[grad_Bn.device.type == "cuda"]
        for columns in blocks(grad_Bn.shape[1], max(1, entries // len(grad_Bn))):
            sum_n = torch.mv(grad_Bn[:, columns].double().t(), wide_weight_B)
            slot.total.add([sum_n], len(grad_Bn), columns.start)


@dataclass(frozen=True)
class ChunkedOuterProducts:
    """Per-example gradient sum_t g_t (x) a_t of shape (V, d), with g (B, T, V) too large to hold.

    g is computed again, chunk by chunk, when it is needed.

    Attributes:
        a_BTd: layer inputs.
        gram_g_BTT: g_s . g_t, fp32 (or fp64), summed over the chunks.
        num_rows: V.
        gradients: yields (rows, g_BTv), in the dtype of a and free to be written to, for a
            partition of the rows, the same bits at every call: norm, inner products and sum must
            see the same gradient.
    """

    a_BTd: Tensor
    gram_g_BTT: Tensor
    num_rows: int
    gradients: Callable[[], Iterator[tuple[slice, Tensor]]]

    @property
    def norm_terms(self) -> int:
        """Returns the most roundings of a term of the squared norm (docs/sums.md)."""
        a_BTd = self.a_BTd
        of_grams = _gram_roundings(a_BTd) + _gram_roundings(a_BTd, self.num_rows)
        return of_grams + 2 * a_BTd.shape[1] + 3

    @property
    def sum_terms(self) -> int:
        """Returns the number of products behind one entry of an fp32 sum."""
        return EXAMPLES_PER_SUM * self.a_BTd.shape[1]

    def norm(self) -> Norm:
        """Returns the ghost norm, as `OuterProducts.norm` does."""
        strip = _strip(_grams(self.a_BTd, self.a_BTd), [self.gram_g_BTT], 0)
        return _norm_of_strips(*strip, self.a_BTd.shape[2], self.num_rows)

    def add_weighted(self, weight_B: Tensor, slot: SumTarget) -> None:
        """Adds sum_b weight_b grad_b to the slot (V, d)."""
        in_bf16 = self.folds_in_bf16
        a_BTd = _scaled(self.a_BTd if in_bf16 else wide(self.a_BTd), weight_B)
        for rows, g_BTv in self.gradients():
            slot.add_product(g_BTv if in_bf16 else wide(g_BTv), a_BTd, rows)

    @property
    def folds_in_bf16(self) -> bool:
        """Returns the same as `OuterProducts.folds_in_bf16`."""
        return _are_on_matrix_units(self.a_BTd)


Contribution = OuterProducts | EmbeddingGradient | Dense | ChunkedOuterProducts


def copy_borrowed(part: Contribution, *borrowed: Tensor | None) -> Contribution:
    """Returns the contribution with copies of the tensors that share memory with borrowed ones."""
    places = {x.untyped_storage().data_ptr() for x in borrowed if x is not None}
    copies = {}
    for name, x in vars(part).items():
        if isinstance(x, Tensor) and x.untyped_storage().data_ptr() in places:
            copies[name] = x.clone()
    return replace(part, **copies)  # type: ignore[arg-type]  # each kind has tensors of its own


def is_short(parts: Sequence[Contribution]) -> bool:
    """Returns whether a parameter's contributions are one written-out gradient of few numbers.

    Biases, norm layers and small raw parameters have such gradients.
    """
    x = parts[0]
    if len(parts) > 1 or not isinstance(x, Dense):
        return False
    return not x.is_product and x.grad_B[0].numel() <= SHORT


def may_cancel(parts: Sequence[Contribution]) -> bool:
    """Returns whether the gross norm may be longer than the norm, by shapes alone."""
    if len(parts) > 1:
        return True
    x = parts[0]
    if isinstance(x, Dense):
        return False
    inputs = x.ids_BT if isinstance(x, EmbeddingGradient) else x.a_BTd
    return inputs.shape[1] != 1


def write_out(parts: Sequence[Contribution], shape: torch.Size) -> Dense:
    """Returns the sum of one parameter's contributions, written out.

    Its norm is that of the summed numbers. Every call gives the same bits.

    Args:
        shape: the parameter's.
    """
    # (B, ...) in any form that flattens to the shape.
    gradients = []
    for part in parts:
        match part:
            case Dense():
                gradients.append(part.grad_B)
            case OuterProducts():
                gradients.append(part.instantiate())
            case EmbeddingGradient():
                g_BTp = wide(part.g_BTp)
                batch_size = len(g_BTp)
                first_row_B1 = torch.arange(batch_size, device=g_BTp.device)[:, None] * shape[0]
                table = g_BTp.new_zeros(batch_size * shape[0], shape[1])
                ids_N = (part.ids_BT + first_row_B1).flatten()
                # On CUDA index_add_ adds up in no fixed order.
                if table.is_cuda:
                    table.index_put_((ids_N,), g_BTp.flatten(0, 1), accumulate=True)
                else:
                    table.index_add_(0, ids_N, g_BTp.flatten(0, 1))
                gradients.append(table.view(batch_size, *shape))
            case ChunkedOuterProducts():
                gradients.append(part.gram_g_BTT.new_empty(len(part.a_BTd), *shape))
                for rows, g_BTv in part.gradients():
                    gradients[-1][:, rows] = product(g_BTv.transpose(1, 2), part.a_BTd)
    grad_Bn = functools.reduce(torch.add, [x.flatten(1) for x in gradients])
    return Dense(grad_Bn, is_product=True)


# Rows of excluded examples become exact zeros before anything is summed, because 0 * NaN is not 0.


def blank_excluded(part: Contribution, excluded_B: Tensor | None) -> Contribution:
    """Returns the contribution with excluded rows exactly zero in all that its weighted sum reads.

    Args:
        excluded_B: None where no row is excluded.
    """
    if excluded_B is None:
        return part
    match part:
        case Dense():
            return Dense(blank_rows(part.grad_B, excluded_B), part.is_product)
        case EmbeddingGradient():
            return EmbeddingGradient(part.ids_BT, blank_rows(part.g_BTp, excluded_B))
        # One kernel for both.
        case OuterProducts(a, g) if _in_place(a) and _in_place(g):
            return OuterProducts(blank_rows_(a, excluded_B, g), g)
        case OuterProducts(a, g):
            return OuterProducts(blank_rows(a, excluded_B), blank_rows(g, excluded_B))
        case ChunkedOuterProducts(gradients=gradients):
            a_BTd = blank_rows(part.a_BTd, excluded_B)
            blanked_gradients = functools.partial(_blanked_chunks, gradients, excluded_B)
            return replace(part, a_BTd=a_BTd, gradients=blanked_gradients)


def _blanked_chunks(
    gradients: Callable[[], Iterator[tuple[slice, Tensor]]], excluded_B: Tensor
) -> Iterator[tuple[slice, Tensor]]:
    """Yields the chunks of `ChunkedOuterProducts.gradients` with excluded rows exactly zero."""
    for rows, g_BTv in gradients():
        yield rows, blank_rows(g_BTv, excluded_B)


def blank_rows(x: Tensor, excluded_B: Tensor) -> Tensor:
    """Returns x (B, ...) with the excluded rows exactly zero.

    On CUDA x itself may be overwritten: it is the recorder's own copy.
    """
    if _in_place(x):
        return blank_rows_(x, excluded_B)
    singleton_dims = [1] * (x.dim() - 1)
    return torch.where(excluded_B.view(-1, *singleton_dims), x.new_zeros(()), x)


def blank_rows_(x: Tensor, excluded_B: Tensor, y: Tensor | None = None) -> Tensor:
    """Zeroes the excluded rows of a contiguous x (B, ...) in place, and those of y; returns x.

    On CUDA nothing may wait for the answer whether there are such rows, nor may launches depend on
    the data: every micro-batch launches the same kernels. No library has a kernel that leaves good
    rows alone: to write every tensor again would cost 15 % of a step (counted in bytes, ViT-L in
    bf16). So one program a row overwrites it in place, and ends at once if the row is good.
    """
    from ..numerics.kernels import ROW_BLOCK, zero_excluded_rows

    y = x[:0] if y is None else y
    if x.numel() + y.numel() > 0:
        # Triton launches on the current device.
        with torch.cuda.device_of(x):
            num_rows = len(x)
            row_sizes = (x.numel() // num_rows, y.numel() // num_rows)
            is_excluded_B = excluded_B.view(torch.uint8)
            zero_excluded_rows[(num_rows,)](x, y, is_excluded_B, *row_sizes, BLOCK=ROW_BLOCK)
    return x


def _in_place(x: Tensor) -> bool:
    return x.is_cuda and x.is_contiguous() and HAS_TRITON


def sum_over_tokens(x_BTd: Tensor) -> Tensor:
    """Returns the sum (B, d), widened.

    On CPU it is a product with ones, four times as fast as torch's sum over a middle dimension.
    """
    if x_BTd.device.type != "cpu":
        return x_BTd.sum(1, dtype=wide_dtype(x_BTd.dtype))
    x_BTd = wide(x_BTd)
    ones_B1T = x_BTd.new_ones(len(x_BTd), 1, x_BTd.shape[1])
    return torch.bmm(ones_B1T, x_BTd).squeeze(1)


def fold_error(x: Contribution) -> float:
    """Returns how far the weighted sum may miss the gradient, relative to the gross norm.

    It is zero unless a factor is folded into bf16: half a unit in the last place of every product
    of factor and entry (and a little for fp32 rounding before), and matrix units that cut off
    rather than round at every 8 or more products.
    """
    if isinstance(x, Dense | EmbeddingGradient) or not x.folds_in_bf16:
        return 0.0
    fold = 2**-8 * (1 + 2**-10)
    cut_off = x.sum_terms / 8 * 2**-23
    return fold + cut_off


def _has_bf16_units(device: torch.device) -> bool:
    return device.type == "cuda"


def _are_on_matrix_units(*operands: Tensor) -> bool:
    return all(x.dtype == torch.bfloat16 and _has_bf16_units(x.device) for x in operands)


def _scaled(x_BTd: Tensor, weight_B: Tensor) -> Tensor:
    """Returns x times its example's weight, rounded once from fp32 (or fp64) to x's dtype."""
    return torch.mul(x_BTd, weight_B[:, None, None], out=torch.empty_like(x_BTd))


TERMS_PER_SUM = 1024
"""The most terms that are added up in fp32, in an order that is not known, before a norm takes the
sum."""


def roundings(terms: int, block_terms: int = TERMS_PER_SUM, roundings_per_term: int = 1) -> int:
    """Returns the most roundings of a term of a sum, whatever the order of additions.

    Args:
        block_terms: how many terms are added in an order that is not known.
        roundings_per_term: what a term counts for in its block.
    """
    at_once = roundings_per_term * terms
    by_blocks = roundings_per_term * block_terms + -(-terms // block_terms)
    return min(at_once, by_blocks)


def _terms_of_gram(x_BTd: Tensor) -> tuple[int, int]:
    """Returns `block_terms` and `roundings_per_term` of a Gram matrix.

    On matrix units a term counts four (docs/sums.md), so sums are short where a Gram matrix, which
    each block of terms writes, is small beside its operands.
    """
    if not _are_on_matrix_units(x_BTd):
        return TERMS_PER_SUM, 1
    return (512 if x_BTd.shape[1] <= 64 else 2048), 4


def _gram_roundings(x_BTd: Tensor, width: int | None = None) -> int:
    """Returns the roundings of a term of `gram(x, x)`, for x of the given width."""
    terms = x_BTd.shape[2] if width is None else width
    return roundings(terms, *_terms_of_gram(x_BTd))


def product(x_BTd: Tensor, y_BdS: Tensor) -> Tensor:
    """Returns the product (B, T, S), widened: on CUDA products of bf16 come in fp32."""
    if _are_on_matrix_units(x_BTd, y_BdS) and has_fp32_products_of_bf16(x_BTd.device):
        return torch.bmm(x_BTd, y_BdS, out_dtype=torch.float32)
    return torch.bmm(wide(x_BTd), wide(y_BdS))


def gram(x_BTd: Tensor, y_BSd: Tensor) -> Tensor:
    """Returns x_t . y_s, (B, T, S), widened."""
    return functools.reduce(Tensor.add_, _grams(x_BTd, y_BSd))


def _grams(x_BTd: Tensor, y_BSd: Tensor) -> list[Tensor]:
    """Returns the addends of `gram`, each of one block of terms.

    (`baddbmm` may add them in the order of one long sum.)
    """
    block_terms, _ = _terms_of_gram(y_BSd)
    operands = zip(x_BTd.split(block_terms, 2), y_BSd.split(block_terms, 2), strict=True)
    return [product(x, y.transpose(1, 2)) for x, y in operands]


def total(x_BTS: Tensor) -> Tensor:
    """Returns the sum (B,): over S in the dtype of x, and of such sums in fp64."""
    return x_BTS.sum(2).sum(1, dtype=torch.float64).to(x_BTS.dtype)


def ghost_norm(a_BTd: Tensor, g_BTp: Tensor) -> Norm:
    """Returns the norm of sum_t g_t (x) a_t, whose square is sum_{s,t} (a_s . a_t) (g_s . g_t).

    (Goodfellow 2015; Li et al. 2022.) Both Gram matrices are symmetric, so only the lower triangle
    is computed, in strips: 5 / 8 of the products at 197 tokens. On CUDA a strip is larger: as one
    product of cuBLAS, 197 tokens are memory bound. The diagonals hold the squared lengths of the
    tokens.
    """
    if not _are_on_matrix_units(a_BTd, g_BTp):
        a_BTd = wide(a_BTd)
        g_BTp = wide(g_BTp)
    num_tokens = a_BTd.shape[1]
    size = _TOKENS_PER_STRIP[_has_bf16_units(a_BTd.device)]
    count = max(1, num_tokens // size)
    strips = []
    for i in range(count):
        start = i * size
        stop = num_tokens if i == count - 1 else (i + 1) * size
        grams_a = _grams(a_BTd[:, start:stop], a_BTd[:, :stop])
        grams_g = _grams(g_BTp[:, start:stop], g_BTp[:, :stop])
        strips.append(_strip(grams_a, grams_g, start))
    columns = zip(*strips, strict=True)
    rows_BT, square_a_BT, square_g_BT = (x[0] if count == 1 else torch.cat(x, 1) for x in columns)
    return _norm_of_strips(rows_BT, square_a_BT, square_g_BT, a_BTd.shape[2], g_BTp.shape[2])


_TOKENS_PER_STRIP = (48, 256)
"""Rows on CPU and on CUDA: smaller strips compute less of the upper triangle, larger ones use the
processor better."""


@fused(for_all_sizes=True)
def _strip(
    grams_a: list[Tensor], grams_g: list[Tensor], start: int
) -> tuple[Tensor, Tensor, Tensor]:
    """Returns parts of the squared norm, and squared lengths of a and g, (B, t) each.

    They belong to the t tokens from `start` on.

    Args:
        grams_a: of these tokens and all up to the last of them, (B, t, start + t), in parts to be
            added up. Written over.
    """
    # Compiled code would write its arguments back.
    on_cpu = grams_a[0].device.type == "cpu"
    add = Tensor.add_ if on_cpu else torch.add
    strip_a = functools.reduce(add, grams_a)
    strip_g = functools.reduce(add, grams_g)
    square_a_Bt = strip_a.diagonal(start, 1, 2).clone()
    square_g_Bt = strip_g.diagonal(start, 1, 2).clone()
    product_Bts = strip_a.mul_(strip_g) if on_cpu else strip_a * strip_g
    left_Bts, square_Btt = product_Bts.split([start, product_Bts.shape[1]], 2)
    rows_Bt = square_Btt.sum(2)
    # Products left of the square on the diagonal have a mirror image, which is not computed.
    if start > 0:
        rows_Bt = rows_Bt + 2 * left_Bts.sum(2)
    return rows_Bt, square_a_Bt, square_g_Bt


@fused(for_all_sizes=True)
def _norm_of_strips(
    rows_BT: Tensor, square_a_BT: Tensor, square_g_BT: Tensor, d: int, p: int
) -> Norm:
    """Returns the norm of outer products.

    Gross norm and underflow follow from the squared lengths of inputs and output gradients.
    """
    dtype = rows_BT.dtype
    squared_B = rows_BT.sum(1, dtype=torch.float64).to(dtype)
    underflow_a = underflow_bound(d, dtype)
    underflow_g = underflow_bound(p, dtype)
    length_a_BT = (square_a_BT + underflow_a**2).sqrt()
    length_g_BT = (square_g_BT + underflow_g**2).sqrt()
    underflow_BT = underflow_g * length_a_BT + underflow_a * length_g_BT + underflow_bound(1, dtype)
    return Norm(squared_B, (length_a_BT * length_g_BT).sum(1), underflow_BT.sum(1))


def inner(x: Contribution, y: Contribution) -> Tensor:
    """Returns the (B,) Frobenius inner product of two contributions to the same parameter."""
    match x, y:
        case ChunkedOuterProducts(), _:
            parts = []
            for rows, g_BTv in x.gradients():
                parts.append(inner(OuterProducts(x.a_BTd, g_BTv), _restricted(y, rows)))
            return torch.stack(parts).sum(0)
        case _, ChunkedOuterProducts():
            return inner(y, x)
        case OuterProducts(), OuterProducts():
            return total(gram(x.a_BTd, y.a_BTd) * gram(x.g_BTp, y.g_BTp))
        case EmbeddingGradient(), EmbeddingGradient():
            is_same_id_BTS = x.ids_BT[:, :, None] == y.ids_BT[:, None, :]
            return total(gram(x.g_BTp, y.g_BTp) * is_same_id_BTS)
        case EmbeddingGradient(), OuterProducts():
            # A tied embedding and head:
            # <sum_s e_{id_s} (x) r_s, sum_t g_t (x) a_t> = sum_{s,t} g_t[id_s] (r_s . a_t).
            ids_BTS = x.ids_BT[:, None, :].expand(-1, y.g_BTp.shape[1], -1)
            entries_BTS = wide(y.g_BTp).gather(2, ids_BTS)
            return total(entries_BTS * gram(y.a_BTd, x.g_BTp))
        case OuterProducts(), EmbeddingGradient():
            return inner(y, x)
        case Dense(), Dense():
            products_Bn = x.grad_B.flatten(1) * y.grad_B.flatten(1)
            return products_Bn.sum(1, dtype=torch.float64).to(x.grad_B.dtype)
        case Dense(), OuterProducts():
            return inner(x, Dense(y.instantiate()))
        case Dense(), EmbeddingGradient():
            # sum_t D[id_t] . g_t
            ids_BTp = y.ids_BT[:, :, None].expand(-1, -1, x.grad_B.shape[2])
            entries_BTp = x.grad_B.gather(1, ids_BTp)
            products_Bn = (entries_BTp * wide(y.g_BTp)).flatten(1)
            return products_Bn.sum(1, dtype=torch.float64).to(entries_BTp.dtype)
        case OuterProducts() | EmbeddingGradient(), Dense():
            return inner(y, x)
        case _:
            raise NotImplementedError(
                f"one parameter used as {type(x).__name__} and as {type(y).__name__}"
            )


def _restricted(x: Contribution, rows: slice) -> Contribution:
    """Returns the part of x that belongs to some rows of the parameter, numbered from 0."""
    match x:
        case OuterProducts():
            return OuterProducts(x.a_BTd, x.g_BTp[:, :, rows])
        case EmbeddingGradient():
            is_in_rows_BT = (x.ids_BT >= rows.start) & (x.ids_BT < rows.stop)
            last = rows.stop - rows.start - 1
            ids_BT = (x.ids_BT - rows.start).clamp(0, last)
            return EmbeddingGradient(ids_BT, x.g_BTp.masked_fill(~is_in_rows_BT[:, :, None], 0))
        case Dense():
            return Dense(x.grad_B[:, rows])
        case ChunkedOuterProducts():
            parts = []
            for chunk, g_BTv in x.gradients():
                first = max(rows.start - chunk.start, 0)
                last = max(min(rows.stop, chunk.stop) - chunk.start, 0)
                parts.append(g_BTv[:, :, first:last])
            return OuterProducts(x.a_BTd, torch.cat(parts, 2))
