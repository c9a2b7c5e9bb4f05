"""What all models around a vision transformer share: how their weights are drawn, on whatever device; and an encoder alone."""

from dataclasses import dataclass
from typing import Any, Self

import torch
from torch import Tensor, nn

from models.config import VitConfig
from models.initialization import EMBEDDING_STD, After, init_weights
from models.vit import VisionTransformer


class VisionModel(nn.Module):
    """Parameters live in `encoder` and in parts of the subclass, whose constructor ends with `_init_unless_meta`.

    Row i of every output depends on row i of the inputs alone.
    """

    encoder: VisionTransformer
    token_std = EMBEDDING_STD
    """Standard deviation of the token embedding's initial values, where there is one."""

    def __init__(self, config: Any) -> None:
        """
        Args:
            config: frozen; its `encoder` is a VitConfig.
        """
        super().__init__()
        self.config = config

    @classmethod
    def build(
        cls,
        config: Any,
        *,
        generator: torch.Generator | None = None,
        device: torch.device | str = "cpu",
        after: After | None = None,
    ) -> Self:
        """A model with initialised weights, drawn once (see `models.initialization`)."""
        with torch.device("meta"):
            model = cls(config)
        model.init_weights(generator, device=device, after=after)
        return model

    def init_weights(
        self,
        generator: torch.Generator | None = None,
        *,
        device: torch.device | str = "cpu",
        after: After | None = None,
    ) -> None:
        """Initialise all parameters and fixed buffers; see `models.initialization.init_weights`."""
        init_weights(self, generator, token_std=self.token_std, device=device, after=after)

    def _init_unless_meta(self) -> None:
        """Initialises the model, unless it is on the meta device, where there is nothing to set yet."""
        if not self.encoder.class_token.is_meta:
            self.init_weights()

    def blocks(self) -> list[nn.Module]:
        """The repeated units, in order of use, for activation checkpointing and sharding."""
        return [*self.encoder.blocks]


@dataclass(frozen=True, kw_only=True)
class EncoderConfig:
    """The configuration of an encoder and nothing else."""

    encoder: VitConfig


class ImageEncoder(VisionModel):
    """What other projects release without its decoder, for features; there is no loss to train it by.

    Parameters live in `encoder`, under the names that they have in every other model.
    """

    config: EncoderConfig

    def __init__(self, config: EncoderConfig) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer(config.encoder)
        self._init_unless_meta()

    def forward(self, images_BCHW: Tensor) -> Tensor:
        """Normalised tokens (B, T, D), the class token first."""
        tokens_BTD: Tensor = self.encoder(images_BCHW)
        return tokens_BTD
