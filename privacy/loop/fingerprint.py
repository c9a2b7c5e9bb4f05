"""Whether a model's tensors are what they were, to the bit and in place, without a copy of them."""

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..step.row_shards import own_rows

WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
PIECE = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Words at a time: temporaries stay in a processor's cache, or take 32 MiB each of a GPU."""
ODD = -7046029254386353131, -4658895280553007687
"""Multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed numbers."""


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Frozen parameters and buffers: no step changes them, and no checkpoint holds them."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | dict(model.named_buffers())


@torch.no_grad()
def fingerprint(tensors: Mapping[Any, Tensor]) -> list[int]:
    """One number for each tensor: changed bits, exchanged values and changes that cancel in a sum give another one.

    What is written through `.data` is found, too, which torch's own counts of writes do not see. Of a tensor in shards it is
    this rank's share of the number.
    """
    rows = (own_rows(tensor) for tensor in tensors.values())
    totals = [_mixed(local.contiguous().view(-1), start) for local, start in rows]
    return torch.stack([total.cpu() for total in totals]).tolist() if totals else []


def _mixed(flat: Tensor, first: int) -> Tensor:
    """() int64: a sum over the words of a function of the word and its place, which is `first` for the first one."""
    words = flat.view(WORDS[flat.element_size()])
    total = torch.zeros((), dtype=torch.int64, device=flat.device)
    piece = PIECE[flat.device.type]
    for start in range(0, len(words), piece):
        mixed = words[start : start + piece].to(torch.int64, copy=True)
        mixed += torch.arange(first + start + 1, first + start + 1 + len(mixed), device=flat.device) * ODD[0]
        mixed ^= mixed >> 30
        mixed *= ODD[1]
        mixed ^= mixed >> 27
        total += mixed.sum()
    return total
