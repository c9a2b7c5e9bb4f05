"""An image encoder alone: what other projects release without its decoder. For features; there is no loss to train it by."""

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from models.config import VitConfig
from models.initialization import After, init_weights
from models.vit import VisionTransformer


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The configuration of a model that is an encoder and nothing else."""

    encoder: VitConfig


class ImageEncoder(nn.Module):
    """Parameters live in `encoder`, under the names that they have in every other model."""

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__()
        self.config = config
        self.encoder = VisionTransformer(config.encoder)
        if not self.encoder.class_token.is_meta:
            self.init_weights()

    def init_weights(
        self,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str = "cpu",
        after: After | None = None,
    ) -> None:
        """Initialise all parameters and fixed buffers; see `models.initialization.init_weights`."""
        init_weights(self, generator, device=device, after=after)

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalised tokens (B, T, D), the class token first."""
        tokens_BTD: Tensor = self.encoder(images_BCHW)
        return tokens_BTD

    def blocks(self) -> list[nn.Module]:
        """The repeated units, in order of use."""
        return [*self.encoder.blocks]


def build_image_encoder(
    config: EncoderConfig,
    *,
    generator: torch.Generator | None = None,
    device: torch.device | str = "cpu",
    after: After | None = None,
) -> ImageEncoder:
    """An encoder with initialised weights, drawn once (see `models.initialization`)."""
    with torch.device("meta"):
        model = ImageEncoder(config)
    model.init_weights(generator, device=device, after=after)
    return model
