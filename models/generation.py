"""Captions from a captioner: greedy through `forward`, and by beams over cached keys and values.

`greedy_captions` calls the model as training does, so a sharded model gathers its weights.
`beam_captions` needs an unsharded model in one process: `IncrementalDecoder` computes each token
once and keeps its keys and values.

Shapes: B images, C H W image, K beams, L tokens so far, n new tokens per image, S tokens on the
path before a new one, M tokens that fit, D width, V vocabulary.
"""

from functools import partial
from typing import NamedTuple, cast

import torch
from torch import Tensor, nn

from models.captioner import Captioner
from models.config import CaptionerConfig
from models.decoder import DecoderBlock, TextDecoder
from models.layers import SelfAttention


def _check(max_tokens: int, num_tokens: int) -> None:
    if not 1 <= max_tokens < num_tokens:
        raise ValueError(f"max_tokens must be between 1 and {num_tokens - 1}, got {max_tokens}")


@torch.no_grad()
def greedy_captions(model: nn.Module, images_BCHW: Tensor, *, max_tokens: int) -> Tensor:
    """Returns captions of the most likely next token until `eos_id`; `pad_id` afterwards.

    `model` is called exactly `max_tokens` times whatever it predicts, because ranks that share a
    sharded model must call it equally often. No keys are cached: the whole prefix is computed each
    time.

    Args:
        model: a `Captioner`, or a wrapper that calls one and has its `config`.
        images_BCHW: normalised pixels.
        max_tokens: tokens to generate, at most `config.num_tokens - 1` (the first token is given).

    Returns:
        Tokens (B, max_tokens), int64, without the first token (`bos_id`).
    """
    config = cast(CaptionerConfig, model.config)
    _check(max_tokens, config.num_tokens)
    device = images_BCHW.device
    batch = images_BCHW.shape[0]
    tokens_BL = torch.full((batch, 1), config.bos_id, dtype=torch.int64, device=device)
    ended_B = torch.zeros(batch, dtype=torch.bool, device=device)
    for _ in range(max_tokens):
        logits_BLV = model(images_BCHW, tokens_BL, output="logits")
        next_B = logits_BLV[:, -1].argmax(dim=-1).masked_fill(ended_B, config.pad_id)
        ended_B = ended_B | (next_B == config.eos_id)
        tokens_BL = torch.cat([tokens_BL, next_B[:, None]], dim=1)
    return tokens_BL[:, 1:]


class IncrementalDecoder:
    """Decodes trees of tokens below one image memory, each token once.

    Tokens are numbered 0, 1, ... in the order in which they are added. A chain (one caption), the
    beams of a search and the prefix tree of many labels are all trees: each new token sees only the
    tokens on its own path to the root.
    """

    def __init__(self, decoder: TextDecoder, memory_BTD: Tensor, capacity: int) -> None:
        """
        Args:
            memory_BTD: output of `models.decoder.ImageMemory`.
            capacity: M, the most tokens per image. Memory: 2 B M D numbers per block.
        """
        self._decoder = decoder
        self._blocks = [cast(DecoderBlock, block) for block in decoder.blocks]
        self._image = [block.cross_attention.keys_values(memory_BTD) for block in self._blocks]
        batch, _, width = memory_BTD.shape
        self._text = [memory_BTD.new_empty(batch, capacity, 2 * width) for _ in self._blocks]
        self._capacity = capacity
        self.num_seen = 0

    @torch.no_grad()
    def step(self, tokens_Bn: Tensor, path_BnS: Tensor) -> Tensor:
        """Returns the hidden states (B, n, D) of n new tokens per image.

        `TextDecoder.head` scores their next tokens from them.

        Args:
            tokens_Bn: int64; they get the numbers from `num_seen` on.
            path_BnS: numbers of the tokens before each, from the first on; S is the place in the
                caption.

        Raises:
            ValueError: more tokens than the capacity, or a place beyond the decoder's positions.
        """
        decoder = self._decoder
        count, place = path_BnS.shape[1:]
        if self.num_seen + count > self._capacity:
            raise ValueError(
                f"{self.num_seen + count} tokens, but there is room for {self._capacity}"
            )
        if place >= decoder.num_tokens:
            raise ValueError(
                f"a token at place {place}, but captions have at most {decoder.num_tokens}"
            )
        zeros_1LD = torch.zeros_like(decoder.type_embedding).expand(-1, place + 1, -1)
        positions_1LD = decoder.position(zeros_1LD)
        embedded_BnD = decoder.token_embedding(tokens_Bn)
        x_BnD = embedded_BnD + positions_1LD[:, place:] + decoder.type_embedding
        for block, image, text_BME in zip(self._blocks, self._image, self._text, strict=True):
            key_BHSd, value_BHSd = image
            to_text = partial(self._to_text, block.self_attention, text_BME, path_BnS)
            to_image = partial(
                block.cross_attention.attend, key_BHSd=key_BHSd, value_BHSd=value_BHSd
            )
            x_BnD = block.residuals(x_BnD, to_text, to_image)
        self.num_seen += count
        return cast(Tensor, decoder.head_norm(x_BnD))

    def _to_text(
        self, attention: SelfAttention, text_BME: Tensor, path_BnS: Tensor, x_BnD: Tensor
    ) -> Tensor:
        """Returns the attention of new tokens to their paths and themselves.

        Keeps the keys and values of the new tokens in `text_BME`.
        """
        count, width = x_BnD.shape[1:]
        query_BnD, new_BnE = attention.qkv(x_BnD).split([width, 2 * width], dim=-1)
        text_BME[:, self.num_seen : self.num_seen + count] = new_BnE
        batch_B11 = torch.arange(len(text_BME), device=text_BME.device)[:, None, None]
        path_BnSE = text_BME[batch_B11, path_BnS]
        keys_values_BnSE = torch.cat([path_BnSE, new_BnE[:, :, None]], dim=2)
        return attention.attend(query_BnD, *keys_values_BnSE.chunk(2, dim=-1))


class Generated(NamedTuple):
    """Captions that were generated, one per image.

    Attributes:
        tokens_BL: without the first token (`bos_id`); `pad_id` after `eos_id`.
        log_probs_B: the model's log-probability of each caption, float32.
    """

    tokens_BL: Tensor
    log_probs_B: Tensor


@torch.no_grad()
def beam_captions(
    model: Captioner,
    images_BCHW: Tensor,
    *,
    max_tokens: int,
    num_beams: int = 1,
    length_penalty: float = 0.0,
) -> Generated:
    """Returns the best caption of a beam search; greedy with one beam.

    Captions that have ended stay in the beam and compete with those that have not. A caption's
    score is its log-probability divided by (number of tokens, `eos_id` included) ** length_penalty:
    0 finds the most likely caption, 1 the best mean per token (Wu et al. 2016,
    https://arxiv.org/abs/1609.08144, equation 14, without its constant 5).

    Raises:
        ValueError: max_tokens or num_beams out of range.
    """
    config = model.config
    _check(max_tokens, config.num_tokens)
    if num_beams < 1:
        raise ValueError(f"num_beams must be at least 1, got {num_beams}")
    decoder = IncrementalDecoder(model.decoder, model.encode(images_BCHW), num_beams * max_tokens)
    device = images_BCHW.device
    batch = len(images_BCHW)
    last_BK = torch.full((batch, num_beams), config.bos_id, device=device)
    path_BKS = last_BK.new_empty(batch, num_beams, 0)
    tokens_BKL = last_BK.new_empty(batch, num_beams, 0)
    lengths_BK = torch.zeros_like(last_BK)
    log_probs_BK = torch.full(last_BK.shape, -torch.inf, device=device)
    # All beams start alike: the others begin at -inf, so that the first step fills them from this
    # one.
    log_probs_BK[:, 0] = 0
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
        parent_BK = best_BK // config.vocab_size
        last_BK = best_BK % config.vocab_size
        log_probs_BK = total_BKV.flatten(1).gather(1, best_BK)
        lengths_BK = longer_BK.gather(1, parent_BK)
        ended_BK = ended_BK.gather(1, parent_BK) | (last_BK == config.eos_id)
        numbers_BK1 = numbers_K[parent_BK][:, :, None]
        path_BKS = torch.cat([_rows_of(path_BKS, parent_BK), numbers_BK1], dim=2)
        tokens_BKL = torch.cat([_rows_of(tokens_BKL, parent_BK), last_BK[:, :, None]], dim=2)
    return Generated(tokens_BKL[:, 0], log_probs_BK[:, 0])


def _rows_of(x_BKS: Tensor, parent_BK: Tensor) -> Tensor:
    """Returns the rows of the beams' parents: row k of an image is its row parent_BK[k]."""
    index_BKS = parent_BK[:, :, None].expand(-1, -1, x_BKS.shape[2])
    return x_BKS.gather(1, index_BKS)
