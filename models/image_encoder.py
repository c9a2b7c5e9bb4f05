"""An image encoder alone: what other projects release without its decoder. For features; there is no loss to train it by."""

from dataclasses import dataclass

from torch import Tensor

from models.base import VisionModel
from models.config import VitConfig
from models.vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The configuration of a model that is an encoder and nothing else."""

    encoder: VitConfig


class ImageEncoder(VisionModel):
    """Parameters live in `encoder`, under the names that they have in every other model."""

    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer(config.encoder)
        self._init_unless_meta()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalised tokens (B, T, D), the class token first."""
        tokens_BTD: Tensor = self.encoder(images_BCHW)
        return tokens_BTD


build_image_encoder = ImageEncoder.build
