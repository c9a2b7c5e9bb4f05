"""The Triton kernel behind blanking.py. Importing this file needs Triton."""

import triton
import triton.language as tl

BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def zero_excluded_row(x, is_excluded_B, row_size, BLOCK: tl.constexpr):  # type: ignore[no-untyped-def]
    """One program per row of x (B, row_size), contiguous."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_excluded_B + row) != 0:
        for start in range(0, row_size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(x + row * row_size + place, tl.zeros((BLOCK,), dtype=x.dtype.element_ty), mask=place < row_size)
