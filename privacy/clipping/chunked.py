"""Outer products too large to hold: the output gradients are computed again, chunk by chunk of the output width.

Shapes: B examples, T tokens, d input width, V output width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

Chunks = Callable[[], Iterator[tuple[slice, Tensor]]]


@dataclass(frozen=True)
class ChunkedOuterProducts:
    """Per-example gradient sum_t g_t (x) a_t of shape (V, d), whose g (B, T, V) never exists as a whole.

    Attributes:
        a_BTd: layer inputs.
        gram_g_BTT: g_s . g_t, fp32 (or fp64), summed over the chunks.
        num_rows: V.
        gradients: yields (rows, g_BTv) for a partition of the rows, the same bits at every call: norm, inner products and sum
            must see the same gradient.
    """

    a_BTd: Tensor
    gram_g_BTT: Tensor
    num_rows: int
    gradients: Chunks

    @property
    def norm_terms(self) -> int:
        return self.a_BTd.shape[1] + self.a_BTd.shape[2] + self.num_rows

    @property
    def sum_terms(self) -> int:
        return self.a_BTd.shape[0] * self.a_BTd.shape[1]

    def norm(self) -> tuple[Tensor, Tensor]:
        """(B,) squared norm and gross norm, as in `OuterProducts.norm`."""
        a_BTd = self.a_BTd.to(self.gram_g_BTT.dtype)
        products_BTT = torch.bmm(a_BTd, a_BTd.transpose(1, 2)) * self.gram_g_BTT
        lengths_BT = products_BTT.diagonal(dim1=1, dim2=2).clamp_min(0).sqrt()
        return products_BTT.flatten(1).sum(1), lengths_BT.sum(1)

    def add_weighted(self, weight_B: Tensor, total: Tensor) -> None:
        """total (V, d) += sum_b weight_b grad_b."""
        a_Nd = (self.a_BTd.to(total.dtype) * weight_B[:, None, None]).flatten(0, 1)
        for rows, g_BTv in self.gradients():
            total[rows].addmm_(g_BTv.to(total.dtype).flatten(0, 1).t(), a_Nd)

    def without(self, excluded_B: Tensor) -> "ChunkedOuterProducts":
        def remaining() -> Iterator[tuple[slice, Tensor]]:
            for rows, g_BTv in self.gradients():
                yield rows, blank(g_BTv)

        def blank(x: Tensor) -> Tensor:  # not by multiplication: 0 * NaN is NaN
            return torch.where(excluded_B[:, None, None], x.new_zeros(()), x)

        return ChunkedOuterProducts(blank(self.a_BTd), blank(self.gram_g_BTT), self.num_rows, remaining)
