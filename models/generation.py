"""Captions from a captioner.

Shapes: B batch, C H W image, L tokens so far, V vocabulary.
"""

from typing import cast

import torch
from torch import Tensor, nn

from models.config import CaptionerConfig


@torch.no_grad()
def greedy_captions(
    model: nn.Module, images_BCHW: Tensor, *, max_tokens: int, config: CaptionerConfig | None = None
) -> Tensor:
    """The most likely next token, again and again, until `eos_id`; `pad_id` afterwards.

    `model` is called exactly `max_tokens` times whatever it says, because ranks that share a sharded model must call
    it equally often. No keys are cached: the whole prefix is computed each time.

    Args:
        model: a `Captioner`, or a wrapper that calls one.
        images_BCHW: normalised pixels.
        max_tokens: tokens to generate, at most `config.num_tokens - 1` (the first token is given).
        config: the captioner's configuration; default `model.config`. Needed where a wrapper hides it.

    Returns:
        Tokens (B, max_tokens), int64, without the first token (`bos_id`).
    """
    config = cast(CaptionerConfig, model.config) if config is None else config
    if not 1 <= max_tokens < config.num_tokens:
        raise ValueError(f"max_tokens must be between 1 and {config.num_tokens - 1}, got {max_tokens}")
    device = images_BCHW.device
    tokens_BL = torch.full((images_BCHW.shape[0], 1), config.bos_id, dtype=torch.int64, device=device)
    ended_B = torch.zeros(images_BCHW.shape[0], dtype=torch.bool, device=device)
    for _ in range(max_tokens):
        logits_BLV = model(images_BCHW, tokens_BL, output="logits")
        next_B = logits_BLV[:, -1].argmax(dim=-1).masked_fill(ended_B, config.pad_id)
        ended_B = ended_B | (next_B == config.eos_id)
        tokens_BL = torch.cat([tokens_BL, next_B[:, None]], dim=1)
    return tokens_BL[:, 1:]
