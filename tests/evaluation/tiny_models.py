"""A small opened model, as `trainer.open_model` gives it, and labelled pictures."""

from pathlib import Path

import numpy as np
import torch

from models.mae_config import masked_autoencoder_config
from models.masked_autoencoder import build_masked_autoencoder
from tests.models.tiny import tiny_captioner
from trainer.weights.open_model import OpenedModel

SIZE = 16


def opened_captioner(seed: int = 0) -> OpenedModel:
    """Two blocks of width 16, images of 16 pixels in patches of 8; learned positions would be zero, so they are fixed."""
    model = tiny_captioner(seed).eval()
    return OpenedModel(model, None, {"seal": f"captioner {seed}", "step": 3}, Path("nowhere"))  # type: ignore[arg-type]


def opened_autoencoder() -> OpenedModel:
    config = masked_autoencoder_config("pico", image_size=SIZE, patch_size=8, encoder_depth=3)
    model = build_masked_autoencoder(config, generator=torch.Generator().manual_seed(0)).eval()
    return OpenedModel(model, None, {"seal": "autoencoder", "step": 0}, Path("nowhere"))  # type: ignore[arg-type]


def pictures(count: int, *, num_classes: int = 3, side: int = 16, seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    """(N, side, side, 3) uint8 and labels: each class has a colour of its own, plus noise."""
    rng = np.random.default_rng(seed)
    labels_N = np.arange(count) % num_classes
    colours = np.random.default_rng(7).integers(40, 216, (num_classes, 3))
    noise = rng.integers(-40, 40, (count, side, side, 3))
    return np.clip(colours[labels_N][:, None, None] + noise, 0, 255).astype(np.uint8), labels_N
