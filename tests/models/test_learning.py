"""The captioner learns from images: overfitted without privacy, it prefers the true image to another one."""

import pytest
import torch
from torch import Tensor

from models.captioner import Captioner
from models.generation import greedy_captions
from tests.models.tiny import tiny_captioner

NUM_PAIRS = 64


def colour_patches() -> tuple[Tensor, Tensor, Tensor]:
    """64 images: one of 16 colours in one of 4 corners of a noisy image; captions name both."""
    generator = torch.Generator().manual_seed(0)
    colour = torch.arange(NUM_PAIRS) % 16
    corner = torch.arange(NUM_PAIRS) // 16
    rgb = torch.stack([colour % 4 % 2, colour % 4 // 2, colour // 4], dim=1) * torch.tensor([2.0, 2.0, 1.0]) - 1
    images = 0.1 * torch.randn(NUM_PAIRS, 3, 16, 16, generator=generator)
    for i in range(NUM_PAIRS):
        top, left = 8 * (int(corner[i]) // 2), 8 * (int(corner[i]) % 2)
        images[i, :, top : top + 8, left : left + 8] += rgb[i, :, None, None]
    start, end = torch.full((NUM_PAIRS,), 1), torch.full((NUM_PAIRS,), 2)
    tokens = torch.stack([start, 3 + colour, 20 + corner, end, torch.zeros_like(end)], dim=1)
    return images, tokens, tokens != 0


def overfit(model: Captioner, batch: tuple[Tensor, Tensor, Tensor], num_steps: int) -> None:
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, weight_decay=0.0)
    for _ in range(num_steps):
        optimizer.zero_grad()
        model(*batch).mean().backward()
        optimizer.step()


@pytest.mark.full
def test_true_image_explains_the_caption_better_than_another() -> None:
    model = tiny_captioner(vocab_size=24, num_tokens=5, decoder_width=32, decoder_num_heads=4, encoder_width=32)
    images, tokens, mask = batch = colour_patches()
    overfit(model, batch, num_steps=200)
    with torch.no_grad():
        true_B = model(images, tokens, mask)
        shuffled_B = model(images.roll(17, dims=0), tokens, mask)
    assert true_B.mean() < 0.2
    assert (true_B < shuffled_B).float().mean() >= 0.95
    captions = greedy_captions(model, images, max_tokens=4)
    assert (captions == tokens[:, 1:]).all(1).float().mean() > 0.9
