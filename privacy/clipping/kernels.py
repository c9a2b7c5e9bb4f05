"""The Triton kernels behind triton_norm.py, which explains them. Importing this file needs Triton."""

import triton
import triton.language as tl


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def _gram_block(  # type: ignore[no-untyped-def]
    x, stride_t, stride_k, rows, columns, tokens, width, one,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """x[rows] @ x[columns].T of one example, (BLOCK_T, BLOCK_T), zero beyond the last token."""
    block = tl.zeros((BLOCK_T, BLOCK_T), dtype=tl.float32)
    for start in range(0, width, BLOCK_K):
        k = start + tl.arange(0, BLOCK_K)
        left = tl.load(
            x + rows[:, None] * stride_t + k[None, :] * stride_k,
            mask=(rows[:, None] < tokens) & (k[None, :] < width),
            other=0.0,
        )
        right = tl.load(
            x + k[:, None] * stride_k + columns[None, :] * stride_t,
            mask=(k[:, None] < width) & (columns[None, :] < tokens),
            other=0.0,
        )
        if WIDEN:  # the interpreter knows no products of bf16; in fp32 they are the same
            left, right = left.to(tl.float32), right.to(tl.float32)
        # Times a one that the compiler does not know: else it would go on adding in the matrix unit's accumulator.
        block += tl.dot(left, right, input_precision="ieee") * one
    return block


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def pair_of_tiles(  # type: ignore[no-untyped-def]
    a, a_stride_b, a_stride_t, a_stride_k,
    g, g_stride_b, g_stride_t, g_stride_k,
    squared_BN, gross_BI, hidden_BI, one, hidden_a, hidden_g, tokens, d, p, num_pairs, row_size,
    BLOCK_T: tl.constexpr, BLOCK_K: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    pair, example = tl.program_id(0) % num_pairs, (tl.program_id(0) // num_pairs).to(tl.int64)
    # pair = i (i + 1) / 2 + j with j <= i; the square root may be off by one.
    i = ((tl.sqrt(8.0 * pair + 1.0) - 1.0) / 2.0).to(tl.int32)
    i = tl.where(i * (i + 1) // 2 > pair, i - 1, i)
    i = tl.where((i + 1) * (i + 2) // 2 <= pair, i + 1, i)
    j = pair - i * (i + 1) // 2
    rows = i * BLOCK_T + tl.arange(0, BLOCK_T)
    columns = j * BLOCK_T + tl.arange(0, BLOCK_T)
    gram_a = _gram_block(
        a + example * a_stride_b, a_stride_t, a_stride_k, rows, columns, tokens, d, one, BLOCK_T, BLOCK_K, WIDEN
    )
    gram_g = _gram_block(
        g + example * g_stride_b, g_stride_t, g_stride_k, rows, columns, tokens, p, one, BLOCK_T, BLOCK_K, WIDEN
    )
    products = gram_a * gram_g
    times = tl.where(i == j, 1.0, 2.0)
    tl.store(squared_BN + example * row_size + pair, times * tl.sum(tl.sum(products, 1), 0))
    if i == j:
        is_token = (rows[:, None] == columns[None, :]) & (rows[:, None] < tokens)
        length_a = tl.where(is_token, tl.sqrt(gram_a + hidden_a * hidden_a), 0.0)
        length_g = tl.where(is_token, tl.sqrt(gram_g + hidden_g * hidden_g), 0.0)
        tl.store(gross_BI + example * row_size + i, tl.sum(tl.sum(length_a * length_g, 1), 0))
        tl.store(hidden_BI + example * row_size + i, tl.sum(tl.sum(hidden_g * length_a + hidden_a * length_g, 1), 0))


ROW_BLOCK = 1024


@triton.jit  # type: ignore[untyped-decorator]  # Triton has no types
def zero_excluded_rows(  # type: ignore[no-untyped-def]
    x, y, is_excluded_B, x_row_size, y_row_size, BLOCK: tl.constexpr
):  # fmt: skip
    """One program per row of x and y, (B, row size) each, contiguous."""
    row = tl.program_id(0).to(tl.int64)
    if tl.load(is_excluded_B + row) != 0:
        for start in range(0, x_row_size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(
                x + row * x_row_size + place, tl.zeros((BLOCK,), dtype=x.dtype.element_ty), mask=place < x_row_size
            )
        for start in range(0, y_row_size, BLOCK):
            place = start + tl.arange(0, BLOCK)
            tl.store(
                y + row * y_row_size + place, tl.zeros((BLOCK,), dtype=y.dtype.element_ty), mask=place < y_row_size
            )
