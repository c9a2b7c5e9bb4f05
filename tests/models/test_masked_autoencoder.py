"""Masked autoencoder: golden losses, masks from keys. (test_converters.py compares it with transformers.)"""

import numpy as np
import pytest
import torch
from torch import Tensor

from data.examples.examples import MaskedImageExample
from models.config import MaskedAutoencoderConfig, masked_autoencoder_config
from models.masked_autoencoder import (
    normalised,
    reconstruction_loss,
)


def tiny(**overrides: object) -> MaskedAutoencoderConfig:
    shape = {
        "image_size": 16,
        "patch_size": 4,
        "encoder_width": 24,
        "encoder_depth": 2,
        "decoder_width": 16,
    }
    return masked_autoencoder_config(
        "pico", **{**shape, "encoder_num_heads": 2, "decoder_num_heads": 2, **overrides}
    )


def masks(config: MaskedAutoencoderConfig, count: int) -> Tensor:
    make = MaskedImageExample(
        config.encoder.image_size, config.encoder.patch_size, config.num_visible
    )
    return torch.from_numpy(np.stack([make.mask(key) for key in range(count)]))


def test_golden_loss() -> None:
    """Two patches of two pixels; by hand: only the masked patch counts, (1 + 9) / 2 = 5."""
    predicted = torch.tensor([[[0.0, 0.0], [1.0, 2.0]]])
    target = torch.tensor([[[7.0, 7.0], [2.0, 5.0]]])
    assert reconstruction_loss(predicted, target, torch.tensor([[False, True]])).tolist() == [5.0]
    assert normalised(torch.tensor([[[1.0, 3.0]]]))[0, 0].tolist() == pytest.approx(
        [-(0.5**0.5), 0.5**0.5], rel=1e-5
    )


def test_masks() -> None:
    """Every example has as many visible patches; each patch is visible equally often; a key always gives the same mask."""
    config = tiny()
    drawn = masks(config, 4000)
    assert (~drawn).sum(1).eq(config.num_visible).all()
    visible = (~drawn).float().mean(0)
    expected = config.num_visible / config.encoder.num_patches
    assert (visible - expected).abs().max() < 5 * (expected * (1 - expected) / 4000) ** 0.5
    assert torch.equal(drawn[:10], masks(config, 10))
    make = MaskedImageExample(16, 4, 4)
    pairs = [tuple(np.flatnonzero(~make.mask(k))) for k in range(3000)]
    assert len(set(pairs)) > 1300, "of 1820 subsets most are seen"
