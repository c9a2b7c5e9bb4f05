"""Building blocks: attention, MLP, positions. Every trainable matrix is called as a module.

Shapes: B batch, L query tokens, S key tokens, T tokens of a position table, D width, H heads.
Sources: attention and sin-cos positions, Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762); the two-dimensional
form and its layout, He et al. 2021 (https://arxiv.org/abs/2111.06377).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import Activation, PositionKind


def _split_heads(x_BLD: Tensor, num_heads: int) -> Tensor:
    """(B, L, D) -> (B, H, L, D / H)."""
    return x_BLD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _merge_heads(x_BHLd: Tensor) -> Tensor:
    """(B, H, L, D / H) -> (B, L, D)."""
    return x_BHLd.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head self-attention; the rows of `qkv` are query, key and value, each split over the heads."""

    def __init__(
        self, width: int, num_heads: int, *, qkv_bias: bool, out_bias: bool, causal: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.out = nn.Linear(width, width, bias=out_bias)

    def forward(self, x_BLD: Tensor, visible_BLL: Tensor | None = None) -> Tensor:
        """
        Args:
            visible_BLL: bool, True where a query (second dimension) sees a key; takes the place of the causal mask.
        """
        query, key, value = (
            _split_heads(x, self.num_heads) for x in self.qkv(x_BLD).chunk(3, dim=-1)
        )
        mask = None if visible_BLL is None else visible_BLL[:, None]
        is_causal = self.causal and mask is None
        return self.out(
            _merge_heads(
                F.scaled_dot_product_attention(
                    query, key, value, attn_mask=mask, is_causal=is_causal
                )
            )
        )

    def attend(self, query_BLD: Tensor, key_BLSD: Tensor, value_BLSD: Tensor) -> Tensor:
        """Attention (B, L, D) of queries that each see their own keys and values (parts of `qkv`)."""
        heads = (self.num_heads, -1)
        query, key, value = (x.unflatten(-1, heads) for x in (query_BLD, key_BLSD, value_BLSD))
        scores_BLHS = torch.einsum("blhd,blshd->blhs", query, key) * query.shape[-1] ** -0.5
        return self.out(
            torch.einsum("blhs,blshd->blhd", scores_BLHS.softmax(-1), value).flatten(-2)
        )


class CrossAttention(nn.Module):
    """Multi-head attention from text tokens to image memory; the rows of `key_value` are key, then value."""

    def __init__(self, width: int, num_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key_value = nn.Linear(width, 2 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor) -> Tensor:
        return self.attend(x_BLD, *self.keys_values(memory_BSD))

    def keys_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """What `attend` needs of a memory, (B, H, S, D / H) each: computed once for many queries."""
        key, value = (
            _split_heads(m, self.num_heads) for m in self.key_value(memory_BSD).chunk(2, dim=-1)
        )
        return key, value

    def attend(self, x_BLD: Tensor, key_BHSd: Tensor, value_BHSd: Tensor) -> Tensor:
        query_BHLd = _split_heads(self.query(x_BLD), self.num_heads)
        return self.out(
            _merge_heads(F.scaled_dot_product_attention(query_BHLd, key_BHSd, value_BHSd))
        )


class Mlp(nn.Module):
    """Linear, exact GELU or ReLU, Linear."""

    def __init__(
        self, width: int, hidden_width: int, *, bias: bool, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden_width, bias=bias)
        self.down = nn.Linear(hidden_width, width, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        hidden_BLD = self.up(x_BLD)
        return self.down(F.gelu(hidden_BLD) if self.activation == "gelu" else F.relu(hidden_BLD))


class PositionEmbedding(nn.Module):
    """Adds a position table of shape (1, T, D): a fixed buffer ("sincos") or a raw parameter ("learned").

    The buffer is a pure function of the configuration, so it is not part of the state dict.
    """

    table: Tensor

    def __init__(
        self, kind: PositionKind, num_tokens: int, width: int, fixed_table: Callable[[], Tensor]
    ) -> None:
        """
        Args:
            fixed_table: returns the sin-cos table, (T, D); used by the kind "sincos" only.
        """
        super().__init__()
        self.num_tokens = num_tokens
        self._fixed_table = fixed_table if kind == "sincos" else None
        if self._fixed_table is None:
            self.table = nn.Parameter(torch.zeros(1, num_tokens, width))
        else:
            self.register_buffer("table", torch.zeros(1, num_tokens, width), persistent=False)
            self.reset_buffers()

    def reset_buffers(self) -> None:
        """Compute the fixed table (again); needed after a model built on the meta device gets its memory."""
        if self._fixed_table is not None:
            self.table.copy_(self._fixed_table()[None])

    def forward(self, x_BTD: Tensor) -> Tensor:
        """
        Args:
            x_BTD: at most as many tokens as the table has.

        Raises:
            ValueError: there are more tokens than positions.
        """
        num_tokens = x_BTD.shape[1]
        if num_tokens > self.num_tokens:
            raise ValueError(
                f"{num_tokens} tokens, but the model was built for at most {self.num_tokens}"
            )
        return x_BTD + self.table[:, :num_tokens].to(x_BTD.dtype)


def resized_positions(table_1TD: Tensor, old: tuple[int, int], new: tuple[int, int]) -> Tensor:
    """A position table for another grid of patches (rows, columns): the class token's is kept, the others are interpolated
    (bicubic); (1, 1 + new rows * new columns, D)."""
    patches = table_1TD[:, 1:].unflatten(1, old).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=new, mode="bicubic", align_corners=False)
    return torch.cat([table_1TD[:, :1], patches.permute(0, 2, 3, 1).flatten(1, 2)], dim=1)


def sincos_positions(positions_N: Tensor, width: int) -> Tensor:
    """Sines, then cosines, of the positions at width / 2 wavelengths from 2 pi to 10,000 * 2 pi; float64 (N, width)."""
    half = width // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    angles = positions_N.double()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def text_sincos_table(num_tokens: int, width: int) -> Tensor:
    """Positions of text, float64 (num_tokens, width)."""
    return sincos_positions(torch.arange(num_tokens, device="cpu"), width)


def image_sincos_table(grid_size: int, width: int) -> Tensor:
    """Positions of a class token (zeros) and of a square grid of patches in row order, float64 (1 + grid^2, width).

    The first half of the width encodes the column, the second half the row, as in the masked autoencoder's release.
    """
    index = torch.arange(grid_size, device="cpu")
    columns, rows = index.repeat(grid_size), index.repeat_interleave(grid_size)
    patches = torch.cat(
        [sincos_positions(columns, width // 2), sincos_positions(rows, width // 2)], dim=1
    )
    return torch.cat([patches.new_zeros(1, width), patches])
