"""Whether a model's tensors are what they were, to the bit and in place, without a copy of them."""

from collections.abc import Mapping

import torch
from torch import Tensor, nn

WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
PIECE = 1 << 22
"""Words at a time: 32 MiB for each temporary."""
ODD = -7046029254386353131, -4658895280553007687
"""Multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed numbers."""


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers: no step changes them, and no checkpoint holds them."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | dict(model.named_buffers())


@torch.no_grad()
def fingerprint(tensors: Mapping[str, Tensor]) -> list[int]:
    """One number for each tensor: changed bits, exchanged values and changes that cancel in a sum give another one.

    What is written through `.data` is found, too, which torch's own counts of writes do not see.
    """
    totals = [_mixed(tensor.detach().contiguous().view(-1)) for tensor in tensors.values()]
    return torch.stack([total.cpu() for total in totals]).tolist() if totals else []


def _mixed(flat: Tensor) -> Tensor:
    """() int64: a sum over the words of a function of the word and its place."""
    words = flat.view(WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    for start in range(0, len(words), PIECE):
        mixed = words[start : start + PIECE].to(torch.int64, copy=True)
        mixed += torch.arange(start + 1, start + 1 + len(mixed), device=flat.device) * ODD[0]
        mixed ^= mixed >> 30
        mixed *= ODD[1]
        mixed ^= mixed >> 27
        total += mixed.sum()
    return total
