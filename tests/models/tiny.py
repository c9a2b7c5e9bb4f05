"""The smallest captioner, and captions for it."""

from typing import Any

import torch
from torch import Tensor

from models.captioner import Captioner, build_captioner
from models.config import CaptionerConfig, captioner_config

VOCAB = 17


def tiny_config(**overrides: Any) -> CaptionerConfig:
    fields: dict[str, Any] = {
        "image_size": 16, "patch_size": 8, "encoder_width": 16, "encoder_depth": 2, "encoder_num_heads": 2,
        "decoder_width": 24, "decoder_depth": 2, "decoder_num_heads": 3, "vocab_size": VOCAB, "num_tokens": 9,
    }  # fmt: skip
    return captioner_config("pico", **(fields | overrides))


def tiny_captioner(seed: int = 0, **overrides: Any) -> Captioner:
    return build_captioner(tiny_config(**overrides), generator=torch.Generator().manual_seed(seed))


def tiny_batch(batch: int = 4, length: int = 7, seed: int = 1, image_size: int = 16) -> tuple[Tensor, Tensor, Tensor]:
    """Images, tokens and mask; caption i has 2 to `length` tokens."""
    generator = torch.Generator().manual_seed(seed)
    images_BCHW = torch.randn(batch, 3, image_size, image_size, generator=generator)
    lengths_B = torch.randint(2, length + 1, (batch,), generator=generator)
    mask_BL = torch.arange(length) < lengths_B[:, None]
    tokens_BL = torch.randint(3, VOCAB, (batch, length), generator=generator).masked_fill(~mask_BL, 0)
    tokens_BL[:, 0] = 1
    return images_BCHW, tokens_BL, mask_BL
