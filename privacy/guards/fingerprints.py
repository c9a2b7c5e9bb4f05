"""Hashes of a model's tensors, which show any change to the bit and in place."""

import functools
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..ranks.row_shards import own_rows

WORDS = {16: torch.int64, 8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}
PIECE = {"cpu": 1 << 15, "cuda": 1 << 22}
"""Words at a time: temporaries stay in a processor's cache, or take 32 MiB each of a GPU."""
ODD = (-7046029254386353131, -4658895280553007687)
"""Odd multipliers of splitmix64 (Steele, Lea and Flood 2014), as signed numbers."""


def fixed_tensors(model: nn.Module) -> dict[str, Tensor]:
    """Returns frozen parameters and buffers, which no step changes and no checkpoint holds."""
    frozen = {name: p for name, p in model.named_parameters() if not p.requires_grad}
    return frozen | dict(model.named_buffers())


@functools.cache
def _can_be_compared(dtype: torch.dtype, device: torch.device) -> bool:
    """Returns whether torch compares numbers of a dtype; for some dtypes it only stores bits."""
    try:
        zero = torch.zeros(1, dtype=dtype, device=device)
        return torch.allclose(zero, zero, 0, 0, equal_nan=True)
    except (RuntimeError, TypeError):
        return False


def is_strided(tensor: Tensor) -> bool:
    """Returns whether a tensor is plain numbers in memory, at strides."""
    return tensor.layout == torch.strided and not (tensor.is_nested or tensor.is_quantized)


def require_comparable(name: object, tensor: Tensor) -> None:
    """Refuses a tensor whose changes no check can see.

    Raises:
        PrivacyConfigError: naming the tensor and its kind.
    """
    if not is_strided(tensor) or not _can_be_compared(tensor.dtype, tensor.device):
        kinds = {
            "nested": tensor.is_nested,
            "quantized": tensor.is_quantized,
            "sparse": tensor.layout != torch.strided,
        }
        kind = next(
            (kind for kind, is_of_kind in kinds.items() if is_of_kind), f"of {tensor.dtype}"
        )
        raise PrivacyConfigError(
            f"{name} is {kind}, and the checks compare dense numbers of ordinary dtypes alone: "
            "keep it dense, and convert it in the forward"
        )


def overlaps(tensor: Tensor) -> bool:
    """Returns whether two coordinates of a strided tensor may share memory, as after expand()."""
    reach = 0
    dimensions = sorted(zip(tensor.stride(), tensor.shape, strict=True))
    for stride, size in dimensions:
        if size > 1 and stride <= reach:
            return tensor.numel() > 0
        reach += stride * (size - 1)
    return False


def in_order(tensor: Tensor) -> Tensor:
    """Returns the numbers of a strided tensor in one row of memory, copied only if necessary."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)


@torch.no_grad()
def fingerprint(tensors: Mapping[Any, Tensor]) -> list[int]:
    """Returns one hash for each tensor.

    Changed bits, exchanged numbers and changes that cancel in a sum give another hash. So do
    writes through `.data`, which torch's own counts of writes do not see. For a tensor in shards
    each rank returns its share, and the shares of all ranks add up to the hash.
    """
    totals = []
    for name, tensor in tensors.items():
        require_comparable(name, tensor)
        # The hash is a sum over words of a function of the word and its place. The place of this
        # rank's first word is `first`.
        local, first = own_rows(tensor)
        words = in_order(local).view(WORDS[local.element_size()])
        device = local.device
        piece = PIECE[device.type]
        total = torch.zeros((), dtype=torch.int64, device=device)
        for start in range(first, first + len(words), piece):
            mixed = words[start - first :][:piece].to(torch.int64, copy=True)
            place = torch.arange(start + 1, start + 1 + len(mixed), device=device)
            mixed += place * ODD[0]
            mixed ^= mixed >> 30
            mixed *= ODD[1]
            mixed ^= mixed >> 27
            total += mixed.sum()
        totals.append(total)
    return torch.stack([total.cpu() for total in totals]).tolist() if totals else []
