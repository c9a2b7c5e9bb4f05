"""The Triton kernel of `per_example_gradients.blank_rows_`, which explains it.

Importing this file needs Triton.
"""

import triton
import triton.language as tl

ROW_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def zero_excluded_rows(  # type: ignore[no-untyped-def]
    x, y, is_excluded_B, x_row_size, y_row_size, BLOCK: tl.constexpr
):
    """Zeroes the excluded rows of x and y, (B, row size) each, contiguous; one program per row."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_excluded_B + row) != 0:
        for start in range(0, x_row_size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(
                x + row * x_row_size + place,
                tl.zeros((BLOCK,), dtype=x.dtype.element_ty),
                mask=place < x_row_size,
            )
        for start in range(0, y_row_size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(
                y + row * y_row_size + place,
                tl.zeros((BLOCK,), dtype=y.dtype.element_ty),
                mask=place < y_row_size,
            )
