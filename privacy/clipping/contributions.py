"""What one layer call contributes to one parameter's per-example gradients, never written out unless that is cheaper.

A parameter's gradient for example b is the sum of its contributions, so a layer that is used twice and a weight that two
layers share need no special case: the squared norm of a sum is the sum of all pairwise inner products.

Four kinds cover every layer:

* `OuterProducts`: sum_t g_t (x) a_t, of Linear and convolution weights. Its inner products are sums over two small Gram
  matrices (the ghost norm of Goodfellow 2015; Li et al. 2022, section 4).
* `Rows`: the same with one-hot a_t, of embeddings; the one-hot vectors are never formed.
* `Dense`: the per-example gradient itself, of biases, norms and raw parameters.
* `ChunkedOuterProducts`: outer products of which g is too large to hold, and computed again when it is needed (chunked.py).

Shapes: B examples, T tokens (any flattened middle dimensions), d input width, p output width, V rows.
"""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from privacy.clipping import triton_norm
from privacy.clipping.accumulators import EXAMPLES_PER_SUM, Slot, blocks
from privacy.clipping.blanking import blanked
from privacy.clipping.chunked import ChunkedOuterProducts
from privacy.clipping.underflow import Norm, hidden, norm_of_grams

WIDENED_ENTRIES = 1 << 18
"""Of a written-out gradient at a time, as fp64: 2 MiB, which stay in a processor's caches."""


def _accumulate_dtype(tensor: Tensor) -> torch.dtype:
    """Gram matrices and sums are fp32 whatever the compute dtype, and fp64 for fp64 (contract 6)."""
    return torch.float64 if tensor.dtype == torch.float64 else torch.float32


def _wide(tensor: Tensor) -> Tensor:
    return tensor.to(_accumulate_dtype(tensor))


@dataclass(frozen=True)
class OuterProducts:
    """Per-example gradient sum_t g_t (x) a_t of shape (p, d), or its transpose when the layer stores (d, p).

    Attributes:
        a_BTd: layer inputs.
        g_BTp: gradients of the summed loss with respect to the layer's outputs.
    """

    a_BTd: Tensor
    g_BTp: Tensor
    is_product = True

    @property
    def prefers_instantiation(self) -> bool:
        """Whether the (p, d) gradient has fewer numbers than its two factors: T (d + p) >= d p."""
        tokens, d, p = self.a_BTd.shape[1], self.a_BTd.shape[2], self.g_BTp.shape[2]
        return tokens * (d + p) >= d * p

    @property
    def norm_terms(self) -> int:
        """Number of products behind one entry of the norm, for the rounding bound."""
        return self.a_BTd.shape[1] + self.a_BTd.shape[2] + self.g_BTp.shape[2]

    @property
    def sum_terms(self) -> int:
        """Number of products behind one entry of an fp32 sum."""
        return min(len(self.a_BTd), EXAMPLES_PER_SUM) * self.a_BTd.shape[1]

    def settled(self) -> "OuterProducts | Dense":
        """What to keep until the weighted sum: the written-out gradient where it is the smaller, and then nothing is lost.

        Its norm and its weighted sum only read it, so the layer costs one matrix product, as without privacy.
        Under autocast on CUDA, an fp32 input is kept as the bf16 copy that the layer itself worked with.
        """
        if self.prefers_instantiation:
            return Dense(self.instantiate(), is_product=True)
        if _has_bf16_units(self.g_BTp.device) and self.g_BTp.dtype == torch.bfloat16:
            return OuterProducts(self.a_BTd.bfloat16(), self.g_BTp)
        return self

    def instantiate(self) -> Tensor:
        """(B, p, d)."""
        g_BpT, a_BTd = self.g_BTp.transpose(1, 2), self.a_BTd
        if self.folds_in_bf16 and a_BTd.is_cuda:
            return torch.bmm(g_BpT, a_BTd, out_dtype=torch.float32)
        return torch.bmm(_wide(g_BpT), _wide(a_BTd))

    def norm(self) -> Norm:
        """By Gram matrices: the ghost norm."""
        if triton_norm.can_run(self.a_BTd, self.g_BTp):
            return triton_norm.ghost_norm(self.a_BTd, self.g_BTp)
        return _ghost_norm(_wide(self.a_BTd), _wide(self.g_BTp))

    def add_weighted(self, weight_B: Tensor, slot: Slot) -> None:
        """slot (p, d) += sum_b weight_b grad_b; the factor goes into the smaller operand, which is copied."""
        a, g = self.a_BTd, self.g_BTp
        if not self.folds_in_bf16:
            a, g = _wide(a), _wide(g)
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
        return _has_bf16_units(self.g_BTp.device) and self.a_BTd.dtype == self.g_BTp.dtype == torch.bfloat16

    def without(self, excluded_B: Tensor) -> "OuterProducts":
        return OuterProducts(blanked(self.a_BTd, excluded_B), blanked(self.g_BTp, excluded_B))


@dataclass(frozen=True)
class Rows:
    """Per-example gradient of a (V, p) table: row ids_BT[b, t] receives g_BTp[b, t]."""

    ids_BT: Tensor
    g_BTp: Tensor
    is_product = False
    sum_terms = 1  # fp64

    @property
    def norm_terms(self) -> int:
        return self.ids_BT.shape[1] + self.g_BTp.shape[2]

    def norm(self) -> Norm:
        squared_B = inner(self, self)
        num_tokens, width = self.ids_BT.shape[1], self.g_BTp.shape[2]
        own = num_tokens * (hidden(width, squared_B.dtype) + hidden(1, squared_B.dtype))
        return Norm(squared_B, _wide(self.g_BTp).norm(dim=2).sum(1), own)

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
            sums_Np = torch.zeros_like(g_Np).index_add_(
                0, place_N, g_Np
            )  # zeros behind the last different id, for row 0
            slot.total.index_add_(0, torch.zeros_like(ids_N).scatter_(0, place_N, ids_N), sums_Np)

    def without(self, excluded_B: Tensor) -> "Rows":
        return Rows(self.ids_BT, blanked(self.g_BTp, excluded_B))


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
        return self.grad_B[0].numel()

    def norm(self) -> Norm:
        norm_B = torch.linalg.vector_norm(self.grad_B.flatten(1), dim=1)
        return Norm(norm_B.square(), norm_B, hidden(self.norm_terms, norm_B.dtype))

    def add_weighted(self, weight_B: Tensor, slot: Slot) -> None:
        grad_Bn, wide_B = self.grad_B.flatten(1), weight_B.double()
        if self.is_product:
            slot.add_matrices(grad_Bn, weight_B)
            return
        for some in blocks(grad_Bn.shape[1], max(1, WIDENED_ENTRIES // len(grad_Bn))):
            slot.total.view(-1)[some] += torch.mv(grad_Bn[:, some].double().t(), wide_B)

    def without(self, excluded_B: Tensor) -> "Dense":
        return Dense(blanked(self.grad_B, excluded_B), self.is_product)


Contribution = OuterProducts | Rows | Dense | ChunkedOuterProducts


def sum_over_tokens(x_BTd: Tensor) -> Tensor:
    """(B, d), widened. On CPU as a product with ones, which is four times as fast as torch's sum over a middle dimension."""
    if x_BTd.device.type != "cpu":
        return x_BTd.sum(1, dtype=_accumulate_dtype(x_BTd))
    x_BTd = _wide(x_BTd)
    return torch.bmm(x_BTd.new_ones(len(x_BTd), 1, x_BTd.shape[1]), x_BTd).squeeze(1)


def dense_sum_over_tokens(g_BTp: Tensor) -> Dense:
    """A bias gradient: sum_t g_t."""
    return Dense(sum_over_tokens(g_BTp))


def fold_error(x: Contribution) -> float:
    """Relative error, of the gross norm, by which the weighted sum may miss the gradient whose norm was taken.

    Zero but where a factor is folded into bf16: half a unit in the last place of every product of factor and entry (and a
    little for fp32 rounding before), and matrix units that cut off rather than round at every 8 or more products.
    """
    if not isinstance(x, OuterProducts) or not x.folds_in_bf16:
        return 0.0
    return 2**-8 * (1 + 2**-10) + x.sum_terms / 8 * 2**-23


def _has_bf16_units(device: torch.device) -> bool:
    return device.type == "cuda"


def _scaled(x_BTd: Tensor, weight_B: Tensor) -> Tensor:
    """x times its example's weight, rounded once from fp32 (or fp64) to x's dtype."""
    return torch.mul(x_BTd, weight_B[:, None, None], out=torch.empty_like(x_BTd))


def _gram(x_BTd: Tensor, y_BSd: Tensor) -> Tensor:
    return torch.bmm(_wide(x_BTd), _wide(y_BSd).transpose(1, 2))


def _ghost_norm(a_BTd: Tensor, g_BTp: Tensor) -> Norm:
    """Of sum_t g_t (x) a_t, whose squared norm is sum_{s,t} (a_s . a_t) (g_s . g_t).

    Both Gram matrices are symmetric, so only the lower triangle is computed, in strips: 5 / 8 of the products at 197 tokens.
    The diagonals hold the squared lengths of the tokens.
    """
    squared_B = a_BTd.new_zeros(len(a_BTd))
    square_a_BT, square_g_BT = a_BTd.new_empty(a_BTd.shape[:2]), a_BTd.new_empty(a_BTd.shape[:2])
    for rows, until in _row_strips(a_BTd):
        strip_a, strip_g = _gram(a_BTd[:, rows], a_BTd[:, :until]), _gram(g_BTp[:, rows], g_BTp[:, :until])
        square_a, square_g = strip_a[:, :, rows], strip_g[:, :, rows]
        square_a_BT[:, rows] = square_a.diagonal(dim1=1, dim2=2)
        square_g_BT[:, rows] = square_g.diagonal(dim1=1, dim2=2)
        square_g *= 0.5  # everything left of the square on the diagonal counts twice; halving and doubling are exact
        squared_B += 2 * strip_a.mul_(strip_g).flatten(1).sum(1)
    return norm_of_grams(squared_B, square_a_BT, square_g_BT, a_BTd.shape[2], g_BTp.shape[2])


def _row_strips(x_BTd: Tensor) -> Iterator[tuple[slice, int]]:
    """Blocks of rows of a symmetric matrix, each with the column where it ends: the lower triangle, rounded up to blocks."""
    tokens, size = x_BTd.shape[1], _TOKENS_PER_STRIP[x_BTd.device.type == "cuda"]
    count = max(1, tokens // size)
    for i in range(count):
        until = tokens if i == count - 1 else (i + 1) * size
        yield slice(i * size, until), until


_TOKENS_PER_STRIP = (48, 128)
"""On CPU, on CUDA: smaller strips compute less of the upper triangle, larger ones use the processor better."""


def inner(x: Contribution, y: Contribution) -> Tensor:
    """(B,) Frobenius inner product of two contributions to the same parameter."""
    match x, y:
        case ChunkedOuterProducts(), _:
            parts = [inner(OuterProducts(x.a_BTd, g), _restricted(y, rows)) for rows, g in x.gradients()]
            return torch.stack(parts).sum(0)
        case _, ChunkedOuterProducts():
            return inner(y, x)
        case OuterProducts(), OuterProducts():
            return (_gram(x.a_BTd, y.a_BTd) * _gram(x.g_BTp, y.g_BTp)).flatten(1).sum(1)
        case Rows(), Rows():
            same_BTS = x.ids_BT[:, :, None] == y.ids_BT[:, None, :]
            return (_gram(x.g_BTp, y.g_BTp) * same_BTS).flatten(1).sum(1)
        case Rows(), OuterProducts():
            # <sum_s e_{id_s} (x) r_s, sum_t g_t (x) a_t> = sum_{s,t} g_t[id_s] (r_s . a_t): a tied embedding and head.
            picked_BTS = _wide(y.g_BTp).gather(2, x.ids_BT[:, None, :].expand(-1, y.g_BTp.shape[1], -1))
            return (picked_BTS * _gram(y.a_BTd, x.g_BTp)).flatten(1).sum(1)
        case OuterProducts(), Rows():
            return inner(y, x)
        case Dense(), Dense():
            return (x.grad_B.flatten(1) * y.grad_B.flatten(1)).sum(1)
        case Dense(), OuterProducts():
            return inner(x, Dense(y.instantiate()))
        case Dense(), Rows():
            # sum_t D[id_t] . g_t
            picked_BTp = x.grad_B.gather(1, y.ids_BT[:, :, None].expand(-1, -1, x.grad_B.shape[2]))
            return (picked_BTp * _wide(y.g_BTp)).flatten(1).sum(1)
        case OuterProducts() | Rows(), Dense():
            return inner(y, x)
        case _:
            raise NotImplementedError(f"one parameter used as {type(x).__name__} and as {type(y).__name__}")


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
            parts = [g[:, :, _overlap(own, rows)] for own, g in x.gradients()]
            return OuterProducts(x.a_BTd, torch.cat(parts, 2))


def _overlap(own: slice, rows: slice) -> slice:
    """Which of its own rows, numbered from 0, a chunk has in common with `rows`."""
    return slice(max(rows.start - own.start, 0), max(min(rows.stop, own.stop) - own.start, 0))
