"""The clip factors of a micro-batch, and the statistics that follow from them."""

from typing import NamedTuple

import torch
from torch import Tensor

from .functions import unclipped


class MicroBatchStats(NamedTuple):
    """Scalars on the device, computed from private data without noise: they may only go to `private/`."""

    loss_sum: Tensor
    num_examples: Tensor
    num_clipped: Tensor
    num_nonfinite: Tensor
    norm_sum: Tensor
    centred_unclipped: Tensor
    """float64: sum of b_i - 1/2 (privacy/adaptive_clipping.py); padding and non-finite examples add nothing."""
    num_cancelled: Tensor
    """Examples whose own tokens cancel, so that they contribute less than the clipping function says (norms.py)."""


def no_examples(dtype: torch.dtype, device: torch.device) -> MicroBatchStats:
    """Those of a micro-batch without rows."""
    nothing = torch.zeros(0, dtype=dtype, device=device)
    return Factors([nothing], [nothing], nothing.bool(), None, 1.0, nothing.bool()).stats(nothing, nothing.bool())


class Factors(NamedTuple):
    """Clip factors of one micro-batch, by group of parameters.

    Attributes:
        blank_B: rows to be zeroed before they are summed.
        is_cancelled_B: rows with smaller factors than their norms ask for.
    """

    norms: list[Tensor]
    weights: list[Tensor]
    is_finite_B: Tensor
    blank_B: Tensor | None
    bound: float
    is_cancelled_B: Tensor

    def stats(self, loss_B: Tensor, is_padding_B: Tensor) -> MicroBatchStats:
        counted_B = ~is_padding_B & self.is_finite_B
        norm_B = torch.linalg.vector_norm(torch.stack(self.norms), dim=0)
        is_clipped_B = (torch.stack(self.weights) < 1).any(0)
        return MicroBatchStats(
            loss_sum=loss_B.float().masked_fill(~counted_B, 0).sum(),
            num_examples=(~is_padding_B).sum(),
            num_clipped=(counted_B & is_clipped_B).sum(),
            num_nonfinite=(~is_padding_B & ~self.is_finite_B).sum(),
            norm_sum=norm_B.masked_fill(~counted_B, 0).sum(),
            centred_unclipped=(unclipped(norm_B, self.bound) - 0.5).masked_fill(~counted_B, 0).sum(),
            num_cancelled=(counted_B & self.is_cancelled_B).sum(),
        )
