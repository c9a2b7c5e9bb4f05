"""Rows of non-finite examples become exactly zero before anything is summed: a zero weight would not do, 0 * NaN is NaN.

On CPU the host sees whether there are such rows, and does nothing if not. On CUDA it must not wait for that answer, nor may
its launches depend on the data: every micro-batch launches the same kernels. Writing every tensor again would cost 8 % of a
step (estimated from bytes, ViT-L in bf16), so a Triton kernel overwrites the bad rows where they stand, one program a row, and
a program whose row is good ends at once. What is overwritten belongs to the recorder: it copies a layer's input that comes
from the caller.
"""

import torch
from torch import Tensor

from . import triton_norm


def needs_blanking(is_finite_B: Tensor) -> bool:
    """Whether the rows have to be gone through. Waits for the device on CPU only; on CUDA the answer is always yes."""
    if is_finite_B.is_cuda:
        return True
    return not is_finite_B.is_meta and not bool(is_finite_B.all())


def blanked(x: Tensor, excluded_B: Tensor) -> Tensor:
    """x (B, ...) with the excluded rows exactly zero. On CUDA x itself may be overwritten."""
    if _in_place(x):
        return blank_rows_(x, excluded_B)
    return torch.where(excluded_B.view(-1, *[1] * (x.dim() - 1)), x.new_zeros(()), x)


def both_blanked(x: Tensor, y: Tensor, excluded_B: Tensor) -> tuple[Tensor, Tensor]:
    """As `blanked`, with one kernel for both."""
    if _in_place(x) and _in_place(y):
        return blank_rows_(x, excluded_B, y), y
    return blanked(x, excluded_B), blanked(y, excluded_B)


def _in_place(x: Tensor) -> bool:
    return x.is_cuda and x.is_contiguous() and triton_norm.is_installed()


def blank_rows_(x: Tensor, excluded_B: Tensor, y: Tensor | None = None) -> Tensor:
    """Zeroes the excluded rows of a contiguous x (B, ...) in place, and those of y, with Triton; returns x."""
    from .kernels import ROW_BLOCK, zero_excluded_rows

    y = x[:0] if y is None else y
    if x.numel() + y.numel() > 0:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            sizes = (x.numel() // len(x), y.numel() // len(x))
            zero_excluded_rows[(len(x),)](x, y, excluded_B.view(torch.uint8), *sizes, BLOCK=ROW_BLOCK)
    return x
