"""What one layer call contributes to one parameter's per-example gradients, never written out unless that is cheaper.

A parameter's gradient for example b is the sum of its contributions, so a layer that is used twice and a weight that two
layers share need no special case: the squared norm of a sum is the sum of all pairwise inner products.

Three kinds cover every layer:

* `OuterProducts`: sum_t g_t (x) a_t, of Linear and convolution weights. Its inner products are sums over two small Gram
  matrices (the ghost norm of Goodfellow 2015; Li et al. 2022, section 4).
* `Rows`: the same with one-hot a_t, of embeddings; the one-hot vectors are never formed.
* `Dense`: the per-example gradient itself, of biases, norms and raw parameters.

Shapes: B examples, T tokens (any flattened middle dimensions), d input width, p output width, V rows.
"""

import itertools
from dataclasses import dataclass

import torch
from torch import Tensor


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
        """Whether writing out the (p, d) gradient needs fewer FLOPs than two Gram matrices: T (d + p) >= d p."""
        tokens, d, p = self.a_BTd.shape[1], self.a_BTd.shape[2], self.g_BTp.shape[2]
        return tokens * (d + p) >= d * p

    @property
    def norm_terms(self) -> int:
        """Number of products behind one entry of the norm, for the rounding bound."""
        tokens = self.a_BTd.shape[1]
        return tokens if self.prefers_instantiation else tokens + self.a_BTd.shape[2] + self.g_BTp.shape[2]

    @property
    def sum_terms(self) -> int:
        """Number of products behind one entry of the weighted sum."""
        return self.a_BTd.shape[0] * self.a_BTd.shape[1]

    def instantiate(self) -> Tensor:
        """(B, p, d)."""
        return torch.bmm(_wide(self.g_BTp).transpose(1, 2), _wide(self.a_BTd))

    def norm(self) -> tuple[Tensor, Tensor]:
        """(B,) squared norm, and gross norm sum_t |a_t| |g_t|.

        The gross norm is what the norm would be if no two tokens cancelled; it scales every rounding error.
        """
        if self.prefers_instantiation:
            lengths_BT = _wide(self.a_BTd).norm(dim=2) * _wide(self.g_BTp).norm(dim=2)
            return self.instantiate().square().flatten(1).sum(1), lengths_BT.sum(1)
        return _ghost_norm(_wide(self.a_BTd), _wide(self.g_BTp))

    def add_weighted(self, weight_B: Tensor, total: Tensor) -> None:
        """total (p, d) += sum_b weight_b grad_b."""
        a, g = _wide(self.a_BTd), _wide(self.g_BTp)
        if a.shape[2] < g.shape[2]:  # the factor goes into the smaller operand, which is copied
            a = a * weight_B[:, None, None]
        else:
            g = g * weight_B[:, None, None]
        total.addmm_(g.flatten(0, 1).t(), a.flatten(0, 1))

    def without(self, excluded_B: Tensor) -> "OuterProducts":
        return OuterProducts(_zeroed(self.a_BTd, excluded_B), _zeroed(self.g_BTp, excluded_B))


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
        return Rows(self.ids_BT, _zeroed(self.g_BTp, excluded_B))


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
        squared_B = self.grad_B.square().flatten(1).sum(1)
        return squared_B, squared_B.sqrt()

    def add_weighted(self, weight_B: Tensor, total: Tensor) -> None:
        total.view(-1).addmv_(self.grad_B.flatten(1).t(), weight_B)

    def without(self, excluded_B: Tensor) -> "Dense":
        return Dense(_zeroed(self.grad_B, excluded_B))


Contribution = OuterProducts | Rows | Dense


def dense_sum_over_tokens(g_BTp: Tensor) -> Dense:
    """A bias gradient: sum_t g_t. As a product with ones, which on CPU is many times faster than `sum`."""
    g_BTp = _wide(g_BTp)
    return Dense(torch.bmm(g_BTp.new_ones(len(g_BTp), 1, g_BTp.shape[1]), g_BTp).squeeze(1))


def _zeroed(tensor: Tensor, excluded_B: Tensor) -> Tensor:
    # where, not multiplication: 0 * inf is NaN.
    return torch.where(excluded_B.view(-1, *[1] * (tensor.dim() - 1)), tensor.new_zeros(()), tensor)


def _gram(x_BTd: Tensor, y_BSd: Tensor) -> Tensor:
    return torch.bmm(_wide(x_BTd), _wide(y_BSd).transpose(1, 2))


def _ghost_norm(a_BTd: Tensor, g_BTp: Tensor) -> tuple[Tensor, Tensor]:
    """Squared norm sum_{s,t} (a_s . a_t) (g_s . g_t) and gross norm of sum_t g_t (x) a_t, both (B,).

    Both Gram matrices are symmetric, so of k by k blocks only k (k + 1) / 2 are computed: 15 of 25 at 197 tokens. The
    diagonals hold the squared lengths that the gross norm needs.
    """
    tokens = a_BTd.shape[1]
    num_blocks = max(1, tokens // _TOKENS_PER_BLOCK)
    cuts = [tokens * i // num_blocks for i in range(num_blocks + 1)]
    blocks = [slice(a, b) for a, b in itertools.pairwise(cuts)]
    squared_B, gross_B = a_BTd.new_zeros(len(a_BTd)), a_BTd.new_zeros(len(a_BTd))
    for i, rows in enumerate(blocks):
        gram_a, gram_g = _gram(a_BTd[:, rows], a_BTd[:, rows]), _gram(g_BTp[:, rows], g_BTp[:, rows])
        lengths_BT = (gram_a.diagonal(dim1=1, dim2=2) * gram_g.diagonal(dim1=1, dim2=2)).clamp_min(0).sqrt()
        squared_B, gross_B = squared_B + _sum_of_products(gram_a, gram_g), gross_B + lengths_BT.sum(1)
        for columns in blocks[:i]:
            gram_a, gram_g = _gram(a_BTd[:, rows], a_BTd[:, columns]), _gram(g_BTp[:, rows], g_BTp[:, columns])
            squared_B = squared_B + 2 * _sum_of_products(gram_a, gram_g)
    return squared_B, gross_B


_TOKENS_PER_BLOCK = 36


def _sum_of_products(x: Tensor, y: Tensor) -> Tensor:
    return (x * y).flatten(1).sum(1)


def inner(x: Contribution, y: Contribution) -> Tensor:
    """(B,) Frobenius inner product of two contributions to the same parameter."""
    match x, y:
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
            return (x.grad_B * y.grad_B).flatten(1).sum(1)
        case Dense(), OuterProducts():
            return (x.grad_B.view(len(x.grad_B), y.g_BTp.shape[2], -1) * y.instantiate()).flatten(1).sum(1)
        case OuterProducts(), Dense():
            return inner(y, x)
        case _:
            raise NotImplementedError(f"one parameter used as {type(x).__name__} and as {type(y).__name__}")
