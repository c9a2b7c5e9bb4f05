"""Writes in place to tensors that clipping keeps: a norm must be that of what is summed."""

from torch import Tensor

from ..errors import PrivacyConfigError

Writes = list[tuple[str, Tensor, int]]
"""(name, tensor, how often it had been written to)."""


def writes_to(tensor: Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to in place, by the count of autograd's own check."""
    return 0 if tensor.is_inference() else int(tensor._version)


def require_unwritten(writes: Writes, who: str) -> None:
    """
    Raises:
        PrivacyConfigError: a tensor was written to since: the norm would not be that of what is summed.
    """
    for name, tensor, before in writes:
        if writes_to(tensor) != before:
            raise PrivacyConfigError(
                f"{who} writes in place to what clipping still needs of {name} (a gradient, an output, an input): write to a copy"
            )
