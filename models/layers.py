"""Building blocks: attention, MLP, positions. Every trainable matrix is called as a module.

Shapes: B batch, L query tokens, S key tokens, T tokens of a position table, D width, H heads.
Sources: attention and sin-cos positions, Vaswani et al. 2017 (https://arxiv.org/abs/1706.03762);
the two-dimensional form and its layout, He et al. 2021 (https://arxiv.org/abs/2111.06377).
"""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.config import Activation, PositionKind


def _split_heads(x_BLD: Tensor, num_heads: int) -> Tensor:
    """Returns (B, H, L, D / H) of (B, L, D)."""
    return x_BLD.unflatten(-1, (num_heads, -1)).transpose(1, 2)


def _merge_heads(x_BHLd: Tensor) -> Tensor:
    """Returns (B, L, D) of (B, H, L, D / H)."""
    return x_BHLd.transpose(1, 2).flatten(2)


class SelfAttention(nn.Module):
    """Multi-head self-attention; the rows of `qkv` are query, key and value, heads in each."""

    def __init__(
        self, width: int, num_heads: int, *, qkv_bias: bool, out_bias: bool, causal: bool = False
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.causal = causal
        self.qkv = nn.Linear(width, 3 * width, bias=qkv_bias)
        self.out = nn.Linear(width, width, bias=out_bias)

    def forward(self, x_BLD: Tensor, visible_BLL: Tensor | None = None) -> Tensor:
        """Returns each token's attention (B, L, D) to the tokens that it sees.

        Args:
            visible_BLL: bool, True where a query (second dimension) sees a key; takes the place of
                the causal mask.
        """
        query, key, value = (
            _split_heads(x, self.num_heads) for x in self.qkv(x_BLD).chunk(3, dim=-1)
        )
        mask = None if visible_BLL is None else visible_BLL[:, None]
        is_causal = self.causal and mask is None
        attention_BHLd = F.scaled_dot_product_attention(
            query, key, value, attn_mask=mask, is_causal=is_causal
        )
        return self.out(_merge_heads(attention_BHLd))

    def attend(self, query_BLD: Tensor, key_BLSD: Tensor, value_BLSD: Tensor) -> Tensor:
        """Returns the attention (B, L, D) of queries that see keys and values of their own.

        Keys and values are parts of the output of `qkv`.
        """
        heads = (self.num_heads, -1)
        query = query_BLD.unflatten(-1, heads)
        key = key_BLSD.unflatten(-1, heads)
        value = value_BLSD.unflatten(-1, heads)
        scores_BLHS = torch.einsum("blhd,blshd->blhs", query, key) * query.shape[-1] ** -0.5
        attention_BLHd = torch.einsum("blhs,blshd->blhd", scores_BLHS.softmax(-1), value)
        return self.out(attention_BLHd.flatten(-2))


class CrossAttention(nn.Module):
    """Multi-head attention from text tokens to image memory.

    The rows of `key_value` are key, then value.
    """

    def __init__(self, width: int, num_heads: int, *, bias: bool) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.query = nn.Linear(width, width, bias=bias)
        self.key_value = nn.Linear(width, 2 * width, bias=bias)
        self.out = nn.Linear(width, width, bias=bias)

    def forward(self, x_BLD: Tensor, memory_BSD: Tensor) -> Tensor:
        return self.attend(x_BLD, *self.keys_values(memory_BSD))

    def keys_values(self, memory_BSD: Tensor) -> tuple[Tensor, Tensor]:
        """Returns keys and values of a memory, (B, H, S, D / H) each, for calls of `attend`."""
        key_BSD, value_BSD = self.key_value(memory_BSD).chunk(2, dim=-1)
        return _split_heads(key_BSD, self.num_heads), _split_heads(value_BSD, self.num_heads)

    def attend(self, x_BLD: Tensor, key_BHSd: Tensor, value_BHSd: Tensor) -> Tensor:
        """Returns the attention (B, L, D) of text tokens to keys and values of a memory."""
        query_BHLd = _split_heads(self.query(x_BLD), self.num_heads)
        attention_BHLd = F.scaled_dot_product_attention(query_BHLd, key_BHSd, value_BHSd)
        return self.out(_merge_heads(attention_BHLd))


class Mlp(nn.Module):
    """A linear layer, exact GELU or ReLU, and a linear layer back."""

    def __init__(
        self, width: int, hidden_width: int, *, bias: bool, activation: Activation = "gelu"
    ) -> None:
        super().__init__()
        self.activation = activation
        self.up = nn.Linear(width, hidden_width, bias=bias)
        self.down = nn.Linear(hidden_width, width, bias=bias)

    def forward(self, x_BLD: Tensor) -> Tensor:
        hidden_BLD = self.up(x_BLD)
        activated_BLD = F.gelu(hidden_BLD) if self.activation == "gelu" else F.relu(hidden_BLD)
        return self.down(activated_BLD)


class PositionEmbedding(nn.Module):
    """Adds a position table (1, T, D): a fixed buffer ("sincos") or a raw parameter ("learned").

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
        """Computes the fixed table again: a buffer moved from the meta device has no values."""
        if self._fixed_table is not None:
            self.table.copy_(self._fixed_table()[None])

    def forward(self, x_BTD: Tensor) -> Tensor:
        """Returns the tokens plus their positions.

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
    """Returns a position table for another grid of patches (rows, columns).

    The class token's position stays, the others are interpolated (bicubic).

    Returns:
        (1, 1 + new rows * new columns, D)
    """
    patches = table_1TD[:, 1:].unflatten(1, old).permute(0, 3, 1, 2)
    patches = F.interpolate(patches, size=new, mode="bicubic", align_corners=False)
    patches_1PD = patches.permute(0, 2, 3, 1).flatten(1, 2)
    return torch.cat([table_1TD[:, :1], patches_1PD], dim=1)


def sincos_positions(positions_N: Tensor, width: int) -> Tensor:
    """Returns sines, then cosines, of the positions, float64 (N, width).

    The width / 2 wavelengths go from 2 pi to 10,000 * 2 pi.
    """
    half = width // 2
    frequencies = 10000.0 ** (-torch.arange(half, dtype=torch.float64, device="cpu") / half)
    angles = positions_N.double()[:, None] * frequencies
    return torch.cat([angles.sin(), angles.cos()], dim=1)


def text_sincos_table(num_tokens: int, width: int) -> Tensor:
    """Returns the positions of text tokens, float64 (num_tokens, width)."""
    return sincos_positions(torch.arange(num_tokens, device="cpu"), width)


def image_sincos_table(grid_size: int, width: int) -> Tensor:
    """Returns the positions of a class token and a square grid of patches.

    The class token's row is zero; patches follow in row order: float64 (1 + grid^2, width).


    The first half of the width encodes the column, the second half the row, as in the masked
    autoencoder's release.
    """
    index = torch.arange(grid_size, device="cpu")
    columns = sincos_positions(index.repeat(grid_size), width // 2)
    rows = sincos_positions(index.repeat_interleave(grid_size), width // 2)
    patches = torch.cat([columns, rows], dim=1)
    return torch.cat([patches.new_zeros(1, width), patches])
