"""Vision transformer encoder: image -> class token and patch tokens.

Shapes: B batch, C H W image, T image tokens (the class token, then patches in row order), D width.
Sources: Dosovitskiy et al. 2021 (https://arxiv.org/abs/2010.11929), equations 1 to 4; without qkv
bias and with fixed sin-cos positions as in DP-Cap (Sander et al. 2024,
https://arxiv.org/abs/2403.02506).
"""

from functools import partial

import torch
from torch import Tensor, nn

from models.config import VitConfig
from models.layers import Mlp, PositionEmbedding, SelfAttention, image_sincos_table


class EncoderBlock(nn.Module):
    """A pre-norm block: x + attention(norm(x)), then x + mlp(norm(x))."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        width = config.width
        self.norm1 = nn.LayerNorm(width, eps=config.norm_eps)
        self.attention = SelfAttention(
            width, config.num_heads, qkv_bias=config.qkv_bias, out_bias=True
        )
        self.norm2 = nn.LayerNorm(width, eps=config.norm_eps)
        self.mlp = Mlp(width, int(width * config.mlp_ratio), bias=True)

    def forward(self, x_BTD: Tensor) -> Tensor:
        x_BTD = x_BTD + self.attention(self.norm1(x_BTD))
        return x_BTD + self.mlp(self.norm2(x_BTD))


class VisionTransformer(nn.Module):
    """The image encoder; `class_token` is a raw parameter, only expanded along the batch."""

    def __init__(self, config: VitConfig) -> None:
        super().__init__()
        self.config = config
        width = config.width
        patch = config.patch_size
        self.class_token = nn.Parameter(torch.zeros(1, 1, width))
        self.patch_embedding = nn.Conv2d(
            config.num_channels, width, kernel_size=patch, stride=patch
        )
        fixed_table = partial(image_sincos_table, config.grid_size, width)
        self.position = PositionEmbedding(
            config.position, config.num_image_tokens, width, fixed_table
        )
        self.blocks = nn.ModuleList([EncoderBlock(config) for _ in range(config.depth)])
        self.norm = nn.LayerNorm(width, eps=config.norm_eps)

    def forward(self, images_BCHW: Tensor, visible_BK: Tensor | None = None) -> Tensor:
        """Returns the tokens of images.

        Args:
            images_BCHW: normalised pixels of any floating dtype; converted to the parameters'
                dtype.
            visible_BK: int64 indices of the patches to look at, for masked autoencoders; all by
                default.

        Returns:
            Normalised tokens (B, T, D), the class token first; T = K + 1 with `visible_BK`.

        Raises:
            ValueError: the images have another shape than the configuration's.
        """
        config = self.config
        expected = (config.num_channels, config.image_size, config.image_size)
        if images_BCHW.dim() != 4 or tuple(images_BCHW.shape[1:]) != expected:
            sizes = ", ".join(map(str, expected))
            raise ValueError(f"images must have shape (B, {sizes}), got {images_BCHW.shape}")
        images_BCHW = images_BCHW.to(self.patch_embedding.weight.dtype)
        patches_BPD = self.patch_embedding(images_BCHW).flatten(2).transpose(1, 2)
        class_token_B1D = self.class_token.expand(patches_BPD.shape[0], -1, -1)
        x_BTD = self.position(torch.cat([class_token_B1D, patches_BPD], dim=1))
        if visible_BK is not None:
            visible_BT = torch.cat([torch.zeros_like(visible_BK[:, :1]), visible_BK + 1], dim=1)
            x_BTD = x_BTD.gather(1, visible_BT[:, :, None].expand(-1, -1, x_BTD.shape[2]))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.norm(x_BTD)
