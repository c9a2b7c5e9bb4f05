"""How likely a captioner finds captions: many captions of every image through one prefix tree, or a few of each image's own.

log p(caption | image) is the sum over its tokens, the end token included, of their log-probability given the image and the
tokens before. Captions that begin alike share that work: every distinct beginning is computed once per image, its keys and
values kept (models/generation.py), level by level for many images together.

Shapes: B images, C captions, E distinct beginnings, n nodes (those that something follows), e edges (a token after a node), S
tokens before a node, V vocabulary.
"""

from collections import defaultdict
from collections.abc import Sequence
from itertools import groupby

import torch
from torch import Tensor

from data.errors import DataError
from data.examples.tokenizer import CaptionTokenizer
from models.captioner import Captioner, caption_loss
from models.generation import IncrementalDecoder

MAX_NUMBERS = 2**26
"""Most floating-point numbers that scoring holds at once, of keys and values, and of scores: 256 MiB each in fp32."""


def encoded_captions(
    tokenizer: CaptionTokenizer, captions: Sequence[str], num_tokens: int
) -> list[tuple[int, ...]]:
    """Tokens of each caption from start to end, without padding.

    Args:
        num_tokens: the longest that the model takes.

    Raises:
        DataError: there is none, or one does not fit: what is cut off would not be scored.
    """
    if not captions:
        raise DataError("there are no captions to score")
    encoded = [tokens_of(tokenizer, caption, num_tokens) for caption in captions]
    for number, tokens in enumerate(encoded, start=1):
        if len(tokens) > num_tokens:
            raise DataError(
                f"caption {number} of {len(captions)} has {len(tokens)} tokens; the model takes at most {num_tokens}; "
                "--too_long skip leaves such captions out"
            )
    return encoded


def tokens_of(tokenizer: CaptionTokenizer, caption: str, num_tokens: int) -> tuple[int, ...]:
    """Tokens of the caption, or of a beginning that is too long anyway for a model that takes `num_tokens`."""
    tokens_L, mask_L = tokenizer.encode(caption, 8 * num_tokens)
    return tuple(int(token) for token in tokens_L[mask_L])


def _finite(log_probs: Tensor) -> Tensor:
    """The same; NaN would win or lose every comparison, whatever the captions say.

    Raises:
        DataError: scores that are not finite.
    """
    if not bool(log_probs.isfinite().all()):
        raise DataError("the model's scores are not finite numbers: it cannot be judged by them")
    return log_probs


@torch.no_grad()
def tree_log_probs(
    model: Captioner,
    images_BCHW: Tensor,
    captions: Sequence[tuple[int, ...]],
    *,
    max_numbers: int = MAX_NUMBERS,
) -> Tensor:
    """log p(caption | image) of every caption for every image, (B, C) float64 on the CPU.

    Args:
        images_BCHW: on the model's device.
        captions: tokens from the start token to the end token.
        max_numbers: bounds the memory; images and nodes are taken in parts.
    """
    config = model.config
    beginnings = sorted(
        {caption[:size] for caption in captions for size in range(1, len(caption) + 1)}, key=len
    )
    place_of = {beginning: place for place, beginning in enumerate(beginnings)}
    next_of: dict[tuple[int, ...], list[tuple[int, ...]]] = defaultdict(list)
    for beginning in beginnings[1:]:
        next_of[beginning[:-1]].append(beginning)
    node_of = {beginning: node for node, beginning in enumerate(filter(next_of.get, beginnings))}

    def of_some(images_BCHW: Tensor) -> Tensor:
        """Level by level, and by parts of a level's nodes: a beginning's sum is its last log-probability and that before it."""
        batch, device = len(images_BCHW), images_BCHW.device
        decoder = IncrementalDecoder(model.decoder, model.encode(images_BCHW), len(node_of))
        totals_BE = torch.zeros(batch, len(beginnings), dtype=torch.float64)
        for size, level in groupby(node_of, key=len):
            nodes = list(level)
            part = max(
                1, max_numbers // (batch * max(config.vocab_size, 2 * size * config.decoder.width))
            )
            for some in (nodes[start : start + part] for start in range(0, len(nodes), part)):
                tokens_n = torch.tensor([one[-1] for one in some], device=device)
                paths = [[node_of[one[:k]] for k in range(1, size)] for one in some]
                paths_nS = torch.tensor(paths, dtype=torch.int64, device=device)
                hidden_BnD = decoder.step(
                    tokens_n.expand(batch, -1), paths_nS.expand(batch, -1, -1)
                )
                logits_BnV = model.decoder.head(hidden_BnD)
                logits_BnV = logits_BnV if logits_BnV.dtype == torch.float64 else logits_BnV.float()
                edges = [(row, one) for row, node in enumerate(some) for one in next_of[node]]
                rows_e = torch.tensor([row for row, _ in edges], device=device)
                targets_e = torch.tensor([one[-1] for _, one in edges], device=device)
                own_Be = logits_BnV[:, rows_e, targets_e] - logits_BnV.logsumexp(-1)[:, rows_e]
                before_e = [place_of[one[:-1]] for _, one in edges]
                totals_BE[:, [place_of[one] for _, one in edges]] = (
                    totals_BE[:, before_e] + own_Be.double().cpu()
                )
        return totals_BE[:, [place_of[caption] for caption in captions]]

    per_image = 2 * len(node_of) * config.decoder.width * len(model.decoder.blocks)
    return _finite(
        torch.cat(
            [of_some(images) for images in images_BCHW.split(max(1, max_numbers // per_image))]
        )
    )


@torch.no_grad()
def own_log_probs(
    model: Captioner,
    images_BCHW: Tensor,
    captions_B: Sequence[Sequence[Sequence[int]]],
    *,
    max_numbers: int = MAX_NUMBERS,
) -> list[Tensor]:
    """log p(caption | image) of a few captions of each image's own: float64 tensors on the CPU, one per image.

    Every image is encoded once; its captions go through the decoder in one batch.
    """
    config, device = model.config, images_BCHW.device
    memory_BTD = model.encode(images_BCHW)
    rows = [(image, caption) for image, captions in enumerate(captions_B) for caption in captions]
    longest = max(len(caption) for _, caption in rows)
    part = max(1, max_numbers // (longest * config.vocab_size))
    parts: list[Tensor] = []
    for start in range(0, len(rows), part):
        some = rows[start : start + part]
        tokens_RL = torch.full((len(some), longest), config.pad_id, dtype=torch.int64)
        for row, (_, caption) in enumerate(some):
            tokens_RL[row, : len(caption)] = torch.tensor(caption)
        lengths_R = torch.tensor([len(caption) for _, caption in some])
        mask_RL = torch.arange(longest)[None, :] < lengths_R[:, None]
        memory_RTD = memory_BTD[torch.tensor([image for image, _ in some], device=device)]
        loss_RL = model.decoder(
            tokens_RL[:, :-1].to(device), memory_RTD, tokens_RL[:, 1:].to(device)
        )
        mean_R = caption_loss(loss_RL.double(), mask_RL[:, 1:].to(device))
        parts.append(-mean_R.cpu() * (lengths_R - 1))
    joined = _finite(torch.cat(parts))
    return list(joined.split([len(captions) for captions in captions_B]))
