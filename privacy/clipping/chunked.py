"""Outer products too large to hold: the output gradients are computed again, chunk by chunk of the output width.

Shapes: B examples, T tokens, d input width, V output width.
"""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from privacy.clipping.accumulators import EXAMPLES_PER_SUM, Slot
from privacy.clipping.underflow import Norm, norm_of_grams

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
    is_product = True

    @property
    def norm_terms(self) -> int:
        return self.a_BTd.shape[1] + self.a_BTd.shape[2] + self.num_rows

    @property
    def sum_terms(self) -> int:
        return min(len(self.a_BTd), EXAMPLES_PER_SUM) * self.a_BTd.shape[1]

    def norm(self) -> Norm:
        """As `OuterProducts.norm`."""
        a_BTd = self.a_BTd.to(self.gram_g_BTT.dtype)
        gram_a_BTT = torch.bmm(a_BTd, a_BTd.transpose(1, 2))
        squared_B = (gram_a_BTT * self.gram_g_BTT).flatten(1).sum(1)
        square_a_BT, square_g_BT = gram_a_BTT.diagonal(dim1=1, dim2=2), self.gram_g_BTT.diagonal(dim1=1, dim2=2)
        return norm_of_grams(squared_B, square_a_BT, square_g_BT, self.a_BTd.shape[2], self.num_rows)

    def add_weighted(self, weight_B: Tensor, slot: Slot) -> None:
        """slot (V, d) += sum_b weight_b grad_b."""
        a_BTd = self.a_BTd.to(weight_B.dtype) * weight_B[:, None, None]
        for rows, g_BTv in self.gradients():
            slot.add_product(g_BTv.to(weight_B.dtype), a_BTd, rows)

    def without(self, excluded_B: Tensor) -> "ChunkedOuterProducts":
        def remaining() -> Iterator[tuple[slice, Tensor]]:
            for rows, g_BTv in self.gradients():
                yield rows, blank(g_BTv)

        def blank(x: Tensor) -> Tensor:  # not by multiplication: 0 * NaN is NaN
            return torch.where(excluded_B[:, None, None], x.new_zeros(()), x)

        return ChunkedOuterProducts(blank(self.a_BTd), blank(self.gram_g_BTT), self.num_rows, remaining)
