"""Token by token through a captioner's decoder, keys and values kept: a tree of tokens over each image.

A chain (one caption), the beams of a search and the prefix tree of many labels are all trees: each new token sees the tokens
on its own path to the root, and nothing else. Each token is computed once.

Shapes: B images, n new tokens per image, S tokens on the path before a new one, M tokens that fit, D width, V vocabulary.
"""

from functools import partial
from typing import cast

import torch
from torch import Tensor

from models.decoder import DecoderBlock, TextDecoder
from models.layers import SelfAttention


class IncrementalDecoder:
    """Decodes below one image memory; tokens are numbered 0, 1, ... in the order in which they came."""

    def __init__(self, decoder: TextDecoder, memory_BTD: Tensor, capacity: int) -> None:
        """
        Args:
            memory_BTD: output of `models.decoder.ImageMemory`.
            capacity: M, the most tokens that will ever be seen per image. Memory: 2 B M D numbers per block.
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
        """Hidden states (B, n, D) of n new tokens per image, from which `TextDecoder.head` scores what follows them.

        Args:
            tokens_Bn: int64; they get the numbers from `num_seen` on.
            path_BnS: numbers of the tokens before each, from the first on; S is the place in the caption.

        Raises:
            ValueError: no room left, or a place beyond the decoder's positions.
        """
        decoder, (count, place) = self._decoder, path_BnS.shape[1:]
        if self.num_seen + count > self._capacity:
            raise ValueError(f"{self.num_seen + count} tokens, but there is room for {self._capacity}")
        if place >= decoder.num_tokens:
            raise ValueError(f"a token at place {place}, but captions have at most {decoder.num_tokens}")
        positions_1LD = decoder.position(torch.zeros_like(decoder.type_embedding).expand(-1, place + 1, -1))
        x_BnD = decoder.token_embedding(tokens_Bn) + positions_1LD[:, place:] + decoder.type_embedding
        for block, image, text_BME in zip(self._blocks, self._image, self._text, strict=True):
            x_BnD = block.residuals(
                x_BnD,
                partial(self._to_text, block.self_attention, text_BME, path_BnS),
                partial(block.cross_attention.attend, key_BHSd=image[0], value_BHSd=image[1]),
            )
        self.num_seen += count
        return cast(Tensor, decoder.head_norm(x_BnD))

    def _to_text(self, attention: SelfAttention, text_BME: Tensor, path_BnS: Tensor, x_BnD: Tensor) -> Tensor:
        """Self-attention of new tokens to their paths and themselves; keeps their keys and values."""
        count, width = x_BnD.shape[1:]
        query_BnD, own_BnE = attention.qkv(x_BnD).split([width, 2 * width], dim=-1)
        text_BME[:, self.num_seen : self.num_seen + count] = own_BnE
        keys, values = torch.cat([_rows(text_BME, path_BnS), own_BnE[:, :, None]], dim=2).chunk(2, dim=-1)
        return attention.attend(query_BnD, keys, values)


def _rows(text_BME: Tensor, path_BnS: Tensor) -> Tensor:
    """The rows of each path, (B, n, S, E)."""
    batch = torch.arange(len(text_BME), device=text_BME.device)[:, None, None]
    return text_BME[batch, path_BnS]
