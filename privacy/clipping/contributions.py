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
from privacy.clipping.blanking import blanked
from privacy.clipping.chunked import ChunkedOuterProducts


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
        """Number of products behind one entry of the weighted sum."""
        return self.a_BTd.shape[0] * self.a_BTd.shape[1]

    def settled(self) -> "OuterProducts | Dense":
        """What to keep until the weighted sum: the written-out gradient where it is the smaller, and then nothing is lost.

        Its norm and its weighted sum only read it, so the layer costs one matrix product, as without privacy.
        Under autocast on CUDA, an fp32 input is kept as the bf16 copy that the layer itself worked with.
        """
        if self.prefers_instantiation:
            return Dense(self.instantiate())
        if _has_bf16_units(self.g_BTp.device) and self.g_BTp.dtype == torch.bfloat16:
            return OuterProducts(self.a_BTd.bfloat16(), self.g_BTp)
        return self

    def instantiate(self) -> Tensor:
        """(B, p, d)."""
        g_BpT, a_BTd = self.g_BTp.transpose(1, 2), self.a_BTd
        if self.folds_in_bf16 and a_BTd.is_cuda:
            return torch.bmm(g_BpT, a_BTd, out_dtype=torch.float32)
        return torch.bmm(_wide(g_BpT), _wide(a_BTd))

    def norm(self) -> tuple[Tensor, Tensor]:
        """(B,) squared norm, and gross norm sum_t |a_t| |g_t|.

        The gross norm is what the norm would be if no two tokens cancelled; it scales every rounding error.
        """
        if triton_norm.can_run(self.a_BTd, self.g_BTp):
            return triton_norm.ghost_norm(self.a_BTd, self.g_BTp)
        return _ghost_norm(_wide(self.a_BTd), _wide(self.g_BTp))

    def add_weighted(self, weight_B: Tensor, total: Tensor) -> None:
        """total (p, d) += sum_b weight_b grad_b; the factor goes into the smaller operand, which is copied."""
        a, g = self.a_BTd, self.g_BTp
        if not self.folds_in_bf16:
            a, g = _wide(a), _wide(g)
        if a.shape[2] < g.shape[2]:
            a = _scaled(a, weight_B)
        else:
            g = _scaled(g, weight_B)
        _add_product(total, g.flatten(0, 1).t(), a.flatten(0, 1))

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

    @property
    def norm_terms(self) -> int:
        return self.ids_BT.shape[1] + self.g_BTp.shape[2]

    @property
    def sum_terms(self) -> int:
        return self.ids_BT.numel()

    def norm(self) -> tuple[Tensor, Tensor]:
        return inner(self, self), _wide(self.g_BTp).norm(dim=2).sum(1)

    def add_weighted(self, weight_B: Tensor, total: Tensor) -> None:
        g = _wide(self.g_BTp) * weight_B[:, None, None]
        total.index_add_(0, self.ids_BT.flatten(), g.flatten(0, 1))

    def without(self, excluded_B: Tensor) -> "Rows":
        return Rows(self.ids_BT, blanked(self.g_BTp, excluded_B))


@dataclass(frozen=True)
class Dense:
    """The per-example gradient, written out: (B, *parameter shape)."""

    grad_B: Tensor

    @property
    def norm_terms(self) -> int:
        return self.grad_B[0].numel()

    @property
    def sum_terms(self) -> int:
        return len(self.grad_B)

    def norm(self) -> tuple[Tensor, Tensor]:
        norm_B = torch.linalg.vector_norm(self.grad_B.flatten(1), dim=1)
        return norm_B.square(), norm_B

    def add_weighted(self, weight_B: Tensor, total: Tensor) -> None:
        total.view(-1).addmv_(self.grad_B.flatten(1).t(), weight_B)

    def without(self, excluded_B: Tensor) -> "Dense":
        return Dense(blanked(self.grad_B, excluded_B))


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


def _add_product(total: Tensor, x: Tensor, y: Tensor) -> None:
    """total += x y, in total's precision whatever that of x and y."""
    if x.is_cuda and x.dtype != total.dtype:
        torch.addmm(total, x, y, out_dtype=total.dtype, out=total)
    else:
        total.addmm_(x.to(total.dtype), y.to(total.dtype))


def _gram(x_BTd: Tensor, y_BSd: Tensor) -> Tensor:
    return torch.bmm(_wide(x_BTd), _wide(y_BSd).transpose(1, 2))


def _ghost_norm(a_BTd: Tensor, g_BTp: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norm sum_{s,t} (a_s . a_t) (g_s . g_t) and gross norm of sum_t g_t (x) a_t, both (B,).

    Both Gram matrices are symmetric, so only the lower triangle is computed, in strips: 5 / 8 of the products at 197 tokens.
    The diagonals hold the squared lengths that the gross norm needs.
    """
    squared_B, gross_B = a_BTd.new_zeros(len(a_BTd)), a_BTd.new_zeros(len(a_BTd))
    for rows, until in _row_strips(a_BTd):
        strip_a, strip_g = _gram(a_BTd[:, rows], a_BTd[:, :until]), _gram(g_BTp[:, rows], g_BTp[:, :until])
        square_a, square_g = strip_a[:, :, rows], strip_g[:, :, rows]
        lengths_BT = (square_a.diagonal(dim1=1, dim2=2) * square_g.diagonal(dim1=1, dim2=2)).clamp_min(0).sqrt()
        square_g *= 0.5  # everything left of the square on the diagonal counts twice; halving and doubling are exact
        squared_B += 2 * strip_a.mul_(strip_g).flatten(1).sum(1)
        gross_B += lengths_BT.sum(1)
    return squared_B, gross_B


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
