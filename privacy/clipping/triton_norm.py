"""Ghost norm of a Linear layer in one Triton kernel: two tiles of tokens at a time, no Gram matrix in memory.

For example b,   |sum_t g_t (x) a_t|^2 = sum_{s,t} (a_s . a_t) (g_s . g_t)   (Goodfellow 2015, arXiv 1510.01799; Li et al.
2022, section 4). A program takes the n-th pair of tiles i >= j, forms the two small blocks of Gram matrices in registers
and writes one partial sum, counted twice off the diagonal, where the blocks are each other's transposes. torch adds up the
partial sums: no atomic additions, so two passes agree to the last bit. The diagonal blocks also hold the lengths |a_t| and
|g_t|, for the gross norm and for what underflow may hide (precision.py).

Precision: products of fp32 are plain fp32 (never TF32), those of bf16 run on the matrix units, whose accumulators truncate
rather than round; a truncated sum of squares reads low, which is the unsafe side. So no sum in a matrix unit is longer than
one chunk of BLOCK_K products; chunks are added in ordinary rounded fp32. `roundings` counts for norms.py: two for each product of
a chunk, which cutting off is worth, one for each chunk, and the additions over a tile and over the tiles.
"""

import functools
import importlib.util
import os

import torch
from torch import Tensor

from .precision import Norm, hidden

BLOCK_T = 64
"""Tokens per tile. 197 tokens are 4 tiles, 10 of whose 16 pairs are computed."""
BLOCK_K = 64
"""Products per chunk of a dot product."""
DTYPES = (torch.float32, torch.bfloat16)


def can_run(a_BTd: Tensor, g_BTp: Tensor) -> bool:
    """Whether the kernel is there for these tensors: Triton is installed, fp32 or bf16 on CUDA (or in its interpreter)."""
    if not (a_BTd.is_cuda or _interpreted()) or not is_installed():
        return False
    return a_BTd.dtype in DTYPES and g_BTp.dtype in DTYPES and 0 not in (*a_BTd.shape, *g_BTp.shape)


def roundings(tokens: int, d: int, p: int) -> int:
    """How many roundings a term of the squared norm passes through at most."""
    num_tiles = -(-tokens // BLOCK_T)
    dot_products = sum(2 * BLOCK_K + -(-terms // BLOCK_K) for terms in (d, p))
    return dot_products + 2 * BLOCK_T + num_tiles * (num_tiles + 1) // 2 + 3


@functools.cache
def is_installed() -> bool:
    """Whether Triton can be imported."""
    return importlib.util.find_spec("triton") is not None


def _interpreted() -> bool:
    return os.environ.get("TRITON_INTERPRET") == "1"


def ghost_norm(a_BTd: Tensor, g_BTp: Tensor) -> Norm:
    """The norm of sum_t g_t (x) a_t, in fp32.

    Args:
        a_BTd, g_BTp: fp32 or bf16, any strides, any T, d and p; each in its own dtype.
    """
    from .kernels import pair_of_tiles

    batch_size, tokens, d = a_BTd.shape
    p = g_BTp.shape[2]
    num_tiles = -(-tokens // BLOCK_T)
    num_pairs = num_tiles * (num_tiles + 1) // 2
    # Three rows of one length, so that one operation adds them up; what the kernel does not write is there already.
    partial_3BN = _not_written(tokens, num_pairs, a_BTd.device).repeat(1, batch_size, 1)
    squared_BN, gross_BI, hidden_BI = partial_3BN.unbind()
    with torch.cuda.device_of(a_BTd):  # Triton launches on the current device
        pair_of_tiles[(num_pairs * batch_size,)](
            *(a_BTd, *a_BTd.stride()),
            *(g_BTp, *g_BTp.stride()),
            *(squared_BN, gross_BI, hidden_BI, 1.0, hidden(d, torch.float32), hidden(p, torch.float32)),
            *(tokens, d, p, num_pairs, num_pairs + 1),
            BLOCK_T=BLOCK_T,
            BLOCK_K=BLOCK_K,
            WIDEN=_interpreted(),
            num_warps=4,
            enable_fp_fusion=True,
        )
    return Norm(*partial_3BN.sum(2).unbind())


@functools.lru_cache(maxsize=64)
def _not_written(tokens: int, num_pairs: int, device: torch.device) -> Tensor:
    """(3, 1, num_pairs + 1): zeros, and at the end of the last row the T sqrt(eta) of what underflow hides (precision.py)."""
    row = torch.zeros(3, 1, num_pairs + 1, dtype=torch.float32, device=device)
    row[2, 0, -1] = tokens * hidden(1, torch.float32)
    return row


def blank_rows_(x: Tensor, excluded_B: Tensor, y: Tensor | None = None) -> Tensor:
    """Zeroes the excluded rows of a contiguous x (B, ...) in place, and those of y; returns x.

    On CUDA nothing may wait for the answer whether there are such rows, nor may launches depend on the data: every micro-batch
    launches the same kernels. Writing every tensor again would cost 8 % of a step (estimated from bytes, ViT-L in bf16), so one
    program a row overwrites it where it stands, and ends at once if the row is good.
    """
    from .kernels import ROW_BLOCK, zero_excluded_rows

    y = x[:0] if y is None else y
    if x.numel() + y.numel() > 0:
        with torch.cuda.device_of(x):  # Triton launches on the current device
            sizes = (x.numel() // len(x), y.numel() // len(x))
            zero_excluded_rows[(len(x),)](x, y, excluded_B.view(torch.uint8), *sizes, BLOCK=ROW_BLOCK)
    return x
