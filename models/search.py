"""Captions by beam search and by sampling, with keys and values kept (models/incremental.py).

For models that lie whole in one process; `models.generation.greedy_captions` goes through `forward`, where a sharded model
gathers its weights. Shapes: B images, K beams, L tokens, V vocabulary.
"""

from typing import NamedTuple

import torch
from torch import Tensor

from models.captioner import Captioner
from models.incremental import IncrementalDecoder


class Generated(NamedTuple):
    """
    Attributes:
        tokens_BL: without the first token (`bos_id`); `pad_id` after `eos_id`.
        log_probs_B: of the caption as the model has it, float32.
    """

    tokens_BL: Tensor
    log_probs_B: Tensor


@torch.no_grad()
def beam_captions(
    model: Captioner, images_BCHW: Tensor, *, max_tokens: int, num_beams: int = 1, length_penalty: float = 0.0
) -> Generated:
    """The best caption of a beam search; greedy with one beam.

    Captions that have ended stay in the beam and compete with those that have not. Compared is the log-probability divided by
    (number of tokens, `eos_id` included) ** length_penalty: 0 asks for the most likely caption, 1 for the best mean per token
    (Wu et al. 2016, https://arxiv.org/abs/1609.08144, equation 14, without its constant 5).

    Raises:
        ValueError: max_tokens or num_beams out of range.
    """
    config = model.config
    _check(max_tokens, config.num_tokens)
    if num_beams < 1:
        raise ValueError(f"num_beams must be at least 1, got {num_beams}")
    decoder = IncrementalDecoder(model.decoder, model.encode(images_BCHW), num_beams * max_tokens)
    device, batch = images_BCHW.device, len(images_BCHW)
    last_BK = torch.full((batch, num_beams), config.bos_id, device=device)
    path_BKS = last_BK.new_empty(batch, num_beams, 0)
    tokens_BKL = last_BK.new_empty(batch, num_beams, 0)
    lengths_BK = torch.zeros_like(last_BK)
    log_probs_BK = torch.full(last_BK.shape, -torch.inf, device=device)
    log_probs_BK[:, 0] = 0  # all beams start alike: one of them is enough
    ended_BK = torch.zeros_like(last_BK, dtype=torch.bool)
    only_padding_V = torch.full((config.vocab_size,), -torch.inf, device=device)
    only_padding_V[config.pad_id] = 0
    for _ in range(max_tokens):
        numbers_K = torch.arange(num_beams, device=device) + decoder.num_seen
        hidden_BKD = decoder.step(last_BK, path_BKS)
        next_BKV = model.decoder.head(hidden_BKD).float().log_softmax(-1)
        next_BKV = torch.where(ended_BK[:, :, None], only_padding_V, next_BKV)
        total_BKV = log_probs_BK[:, :, None] + next_BKV
        longer_BK = lengths_BK + (~ended_BK).long()
        scores_BKV = total_BKV / longer_BK[:, :, None].float() ** length_penalty
        best_BK = scores_BKV.flatten(1).topk(num_beams).indices
        parent_BK, last_BK = best_BK // config.vocab_size, best_BK % config.vocab_size
        log_probs_BK = total_BKV.flatten(1).gather(1, best_BK)
        lengths_BK, ended_BK = longer_BK.gather(1, parent_BK), ended_BK.gather(1, parent_BK)
        ended_BK = ended_BK | (last_BK == config.eos_id)
        path_BKS = torch.cat([_picked(path_BKS, parent_BK), numbers_K[parent_BK][:, :, None]], dim=2)
        tokens_BKL = torch.cat([_picked(tokens_BKL, parent_BK), last_BK[:, :, None]], dim=2)
    return Generated(tokens_BKL[:, 0], log_probs_BK[:, 0])


@torch.no_grad()
def sampled_captions(
    model: Captioner,
    images_BCHW: Tensor,
    *,
    max_tokens: int,
    temperature: float = 1.0,
    top_p: float = 1.0,
    generator: torch.Generator | None = None,
) -> Generated:
    """Captions drawn token by token.

    Args:
        temperature: divides the scores; above 0.
        top_p: draws among the likeliest tokens whose probabilities, at this temperature, just reach top_p (Holtzman et al.
            2020, https://arxiv.org/abs/1904.09751).
        generator: on the CPU, so that a seed gives the same captions on every device.

    Raises:
        ValueError: a number out of range.
    """
    config = model.config
    _check(max_tokens, config.num_tokens)
    if not (temperature > 0 and 0 < top_p <= 1):
        raise ValueError(f"temperature must be above 0 and top_p in (0, 1], got {temperature} and {top_p}")
    decoder = IncrementalDecoder(model.decoder, model.encode(images_BCHW), max_tokens)
    device, batch = images_BCHW.device, len(images_BCHW)
    last_B1 = torch.full((batch, 1), config.bos_id, device=device)
    drawn: list[Tensor] = []
    log_probs_B = torch.zeros(batch, device=device)
    ended_B1 = torch.zeros_like(last_B1, dtype=torch.bool)
    for place in range(max_tokens):
        path_B1S = torch.arange(place, device=device).expand(batch, 1, -1)
        logits_BV = model.decoder.head(decoder.step(last_B1, path_B1S))[:, 0].float()
        chances_BV = nucleus((logits_BV / temperature).softmax(-1), top_p)
        last_B1 = torch.multinomial(chances_BV.cpu(), 1, generator=generator).to(device)
        last_B1 = last_B1.masked_fill(ended_B1, config.pad_id)
        own_B = logits_BV.log_softmax(-1).gather(1, last_B1)[:, 0]
        log_probs_B = log_probs_B + own_B.masked_fill(ended_B1[:, 0], 0)
        ended_B1 = ended_B1 | (last_B1 == config.eos_id)
        drawn.append(last_B1)
    return Generated(torch.cat(drawn, dim=1), log_probs_B)


def nucleus(chances_BV: Tensor, top_p: float) -> Tensor:
    """The smallest set of likeliest tokens that reaches top_p, renormalised (B, V); others get 0."""
    sorted_BV, order_BV = chances_BV.sort(dim=-1, descending=True)
    before_BV = sorted_BV.cumsum(-1) - sorted_BV
    kept_BV = sorted_BV.masked_fill(before_BV >= top_p, 0)
    kept_BV = kept_BV / kept_BV.sum(-1, keepdim=True)
    return torch.zeros_like(chances_BV).scatter(1, order_BV, kept_BV)


def _check(max_tokens: int, num_tokens: int) -> None:
    if not 1 <= max_tokens < num_tokens:
        raise ValueError(f"max_tokens must be between 1 and {num_tokens - 1}, got {max_tokens}")


def _picked(x_BKS: Tensor, parent_BK: Tensor) -> Tensor:
    """Row k of each image is its row parent_BK[k]."""
    return x_BKS.gather(1, parent_BK[:, :, None].expand(-1, -1, x_BKS.shape[2]))
