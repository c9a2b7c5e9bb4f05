"""Configurations and sizes of masked autoencoders.

`MAE_SIZES` holds ViP's shapes (Yu et al. 2023, https://arxiv.org/abs/2306.08842, from the released model definitions): the
names are not timm's, its "Tiny" is 384 wide, and all sizes share one decoder, 512 wide with four blocks.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from models.config import (
    ModelConfigError,
    PositionKind,
    VitConfig,
    check_fields,
    check_transformer,
    named_size,
    with_overrides,
)


@dataclass(frozen=True, kw_only=True)
class PixelDecoderConfig:
    """The light transformer that predicts pixels: pre-norm blocks as in the encoder. Its positions are fixed by default."""

    width: int = 512
    depth: int = 4
    num_heads: int = 16
    mlp_ratio: float = 4.0
    norm_eps: float = 1e-6
    position: PositionKind = "sincos"

    def __post_init__(self) -> None:
        check_transformer(self, "decoder")


@dataclass(frozen=True, kw_only=True)
class MaskedAutoencoderConfig:
    """
    Attributes:
        encoder, decoder: the two transformers.
        mask_ratio: share of the patches that the encoder does not see.
        normalise_pixels: predict each patch's pixels after subtracting their mean and dividing by their deviation.
    """

    encoder: VitConfig
    decoder: PixelDecoderConfig = PixelDecoderConfig()
    mask_ratio: float = 0.75
    normalise_pixels: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if not 0 < self.num_visible < self.encoder.num_patches:
            raise ModelConfigError(
                f"mask_ratio {self.mask_ratio} leaves {self.num_visible} of {self.encoder.num_patches} patches visible; "
                "at least one must be visible and one masked"
            )

    @property
    def num_visible(self) -> int:
        """Patches that the encoder sees; the same for every image."""
        return int(self.encoder.num_patches * (1 - self.mask_ratio))


def _vip(width: int, depth: int = 12, num_heads: int = 12) -> MaskedAutoencoderConfig:
    return MaskedAutoencoderConfig(encoder=VitConfig(width=width, depth=depth, num_heads=num_heads, qkv_bias=True))


def _small(width: int, depth: int) -> MaskedAutoencoderConfig:
    """The same architecture for images of 64 pixels."""
    return MaskedAutoencoderConfig(
        encoder=VitConfig(image_size=64, patch_size=8, width=width, depth=depth, num_heads=4, qkv_bias=True),
        decoder=PixelDecoderConfig(width=width, depth=2, num_heads=4),
    )


MAE_SIZES: Mapping[str, MaskedAutoencoderConfig] = {
    "pico": _small(64, 4),
    "nano": _small(128, 6),
    "vip_nano": _vip(192),
    "vip_tiny": _vip(384),
    "vip_small": _vip(576),
    "vip_base": _vip(768),
    "vip_large": _vip(1024, depth=24, num_heads=16),
}


def masked_autoencoder_config(size: str, **overrides: Any) -> MaskedAutoencoderConfig:
    """A named size with some fields replaced: `mask_ratio`, `normalise_pixels`, `image_size`, `patch_size`, `encoder_width`, ...

    Raises:
        ModelConfigError: unknown size or field (the line lists the choices), or values that do not fit together.
    """
    return with_overrides(named_size(MAE_SIZES, size), overrides)
