"""The smallest captioner."""

from typing import Any

import torch

from models.captioner import Captioner, build_captioner
from models.config import CaptionerConfig, captioner_config

VOCAB = 17


def tiny_config(**overrides: Any) -> CaptionerConfig:
    fields: dict[str, Any] = {
        "image_size": 16,
        "patch_size": 8,
        "encoder_width": 16,
        "encoder_depth": 2,
        "encoder_num_heads": 2,
        "decoder_width": 24,
        "decoder_depth": 2,
        "decoder_num_heads": 3,
        "vocab_size": VOCAB,
        "num_tokens": 9,
    }
    return captioner_config("pico", **(fields | overrides))


def tiny_captioner(seed: int = 0, **overrides: Any) -> Captioner:
    return build_captioner(tiny_config(**overrides), generator=torch.Generator().manual_seed(seed))
