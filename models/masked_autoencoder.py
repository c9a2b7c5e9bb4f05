"""Masked autoencoder: an encoder sees some of an image's patches, a light decoder predicts all.

Shapes: B batch, C H W image, P patches, K visible patches, T tokens, E encoder width, D decoder
width, Q pixels of a patch.
Sources: He et al. 2021 (https://arxiv.org/abs/2111.06377), section 3; made differentially private
in ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842), with one mask and one mean squared error
per image.

    >>> from models.config import masked_autoencoder_config
    >>> config = masked_autoencoder_config("pico")
    >>> model = build_masked_autoencoder(config, generator=torch.Generator().manual_seed(0))
    >>> hidden_P = torch.arange(config.encoder.num_patches) >= config.num_visible
    >>> side = config.encoder.image_size
    >>> model(torch.zeros(2, 3, side, side), hidden_P.expand(2, -1)).shape  # one loss per example
    torch.Size([2])
"""

from functools import partial
from typing import Literal

import torch
from torch import Tensor, nn

from models.base import VisionModel
from models.config import MaskedAutoencoderConfig, VitConfig
from models.layers import PositionEmbedding, image_sincos_table
from models.vit import EncoderBlock, VisionTransformer


def to_patches(images_BCHW: Tensor, patch_size: int) -> Tensor:
    """Returns the patches (B, P, Q) in row order; the pixels of each row by row, colours last."""
    batch_size, channels, height, width = images_BCHW.shape
    grid = images_BCHW.view(
        batch_size, channels, height // patch_size, patch_size, width // patch_size, patch_size
    )
    return grid.permute(0, 2, 4, 3, 5, 1).reshape(batch_size, -1, patch_size**2 * channels)


def from_patches(patches_BPQ: Tensor, patch_size: int) -> Tensor:
    """Returns the square images (B, C, H, W) of patches; the inverse of `to_patches`."""
    batch_size, num_patches, pixels = patches_BPQ.shape
    grid = round(num_patches**0.5)
    side = grid * patch_size
    channels = pixels // patch_size**2
    tiles = patches_BPQ.view(batch_size, grid, grid, patch_size, patch_size, channels)
    return tiles.permute(0, 5, 1, 3, 2, 4).reshape(batch_size, -1, side, side)


def normalised(patches_BPQ: Tensor) -> Tensor:
    """Returns patches of mean 0 and (unbiased) variance 1, as in the release of He et al."""
    mean = patches_BPQ.mean(dim=-1, keepdim=True)
    variance = patches_BPQ.var(dim=-1, keepdim=True)
    return (patches_BPQ - mean) / (variance + 1e-6).sqrt()


def reconstruction_loss(predicted_BPQ: Tensor, target_BPQ: Tensor, mask_BP: Tensor) -> Tensor:
    """Returns the loss (B,) of each image, in float32 (or float64).

    It is the squared error, averaged over the image's own masked patches and their pixels.
    """
    wide = torch.float64 if predicted_BPQ.dtype == torch.float64 else torch.float32
    error_BP = (predicted_BPQ.to(wide) - target_BPQ.to(wide)).square().mean(dim=-1)
    num_masked_B = mask_BP.sum(dim=1).clamp(min=1)
    return error_BP.masked_fill(~mask_BP, 0).sum(dim=1) / num_masked_B


class PixelDecoder(nn.Module):
    """A decoder from visible tokens, and a learned token at every masked place, to all pixels.

    `mask_token` is a raw parameter, used by expansion only.
    """

    config: MaskedAutoencoderConfig

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__()
        encoder = config.encoder
        decoder = config.decoder
        width = decoder.width
        block = VitConfig(
            width=width,
            depth=decoder.depth,
            num_heads=decoder.num_heads,
            mlp_ratio=decoder.mlp_ratio,
            qkv_bias=True,
            norm_eps=decoder.norm_eps,
        )
        self.embedding = nn.Linear(encoder.width, width)
        self.mask_token = nn.Parameter(torch.zeros(1, 1, width))
        fixed_table = partial(image_sincos_table, encoder.grid_size, width)
        self.position = PositionEmbedding(
            decoder.position, encoder.num_image_tokens, width, fixed_table
        )
        self.blocks = nn.ModuleList([EncoderBlock(block) for _ in range(decoder.depth)])
        self.norm = nn.LayerNorm(width, eps=decoder.norm_eps)
        self.head = nn.Linear(width, encoder.patch_size**2 * encoder.num_channels)

    def forward(self, tokens_BTE: Tensor, order_BP: Tensor) -> Tensor:
        """Returns the predicted pixels of all patches.

        Args:
            tokens_BTE: the encoder's class token and visible tokens.
            order_BP: the patches' indices, visible ones first in the order of their tokens.

        Returns:
            (B, P, Q)
        """
        visible_BTD = self.embedding(tokens_BTE)
        class_token_B1D = visible_BTD[:, :1]
        patches_BKD = visible_BTD[:, 1:]
        num_masked = order_BP.shape[1] - patches_BKD.shape[1]
        masks_BMD = self.mask_token.expand(len(visible_BTD), num_masked, -1)
        patches_BPD = torch.cat([patches_BKD, masks_BMD], dim=1)
        place_BP1 = order_BP.argsort(dim=1)[:, :, None]
        patches_BPD = patches_BPD.gather(1, place_BP1.expand(-1, -1, patches_BPD.shape[2]))
        x_BTD = self.position(torch.cat([class_token_B1D, patches_BPD], dim=1))
        for block in self.blocks:
            x_BTD = block(x_BTD)
        return self.head(self.norm(x_BTD))[:, 1:]


class MaskedAutoencoder(VisionModel):
    """A masked autoencoder whose parameters live in `encoder` and `decoder`.

    Row i of every output depends on row i of the inputs alone.
    """

    def __init__(self, config: MaskedAutoencoderConfig) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer(config.encoder)
        self.decoder = PixelDecoder(config)
        self._init_unless_meta()

    def forward(
        self, images_BCHW: Tensor, mask_BP: Tensor, output: Literal["loss", "patches"] = "loss"
    ) -> Tensor:
        """Returns the loss of each image, or the predicted patches.

        Args:
            images_BCHW: normalised pixels, floating.
            mask_BP: bool, True for the patches that the encoder does not see; `num_visible` are
                False in every row.

        Returns:
            Loss (B,) in float32: mean squared error over the masked patches. Or "patches": the
            predicted pixels (B, P, Q).
        """
        order_BP = mask_BP.int().argsort(dim=1, stable=True)
        tokens_BTE = self.encoder(images_BCHW, order_BP[:, : self.config.num_visible])
        predicted_BPQ = self.decoder(tokens_BTE, order_BP)
        if output == "patches":
            return predicted_BPQ
        return reconstruction_loss(predicted_BPQ, self.targets(images_BCHW), mask_BP)

    def targets(self, images_BCHW: Tensor) -> Tensor:
        """Returns the patches (B, P, Q) that a perfect decoder predicts."""
        patches_BPQ = to_patches(images_BCHW, self.config.encoder.patch_size)
        return normalised(patches_BPQ) if self.config.normalise_pixels else patches_BPQ


build_masked_autoencoder = MaskedAutoencoder.build
