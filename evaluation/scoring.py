"""Log-likelihoods of captions under a captioner: many captions of every image, or a few per image.

log p(caption | image) is the sum over its tokens, the end token included, of their log-probability
given the image and the tokens before. Captions with a common beginning share its computation: keys
and values of every distinct beginning are computed once per image (models/generation.py).

Shapes: B images, C captions, E distinct beginnings, n nodes (beginnings that a token follows), e
edges (a node and a token after it), S tokens before a node, R rows (an image and a caption), L
tokens, V vocabulary.
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
"""The most floating-point numbers that scoring keeps at once, of keys and values, and of scores:
256 MiB each in fp32."""
Tokens = tuple[int, ...]
"""A caption, or the beginning of one."""


def encoded_captions(
    tokenizer: CaptionTokenizer, captions: Sequence[str], num_tokens: int
) -> list[Tokens]:
    """Returns the tokens of each caption from start to end, without padding.

    Args:
        num_tokens: the most that the model takes.

    Raises:
        DataError: there are no captions, or one does not fit: scoring would ignore its end.
    """
    if not captions:
        raise DataError("there are no captions to score")
    encoded = [tokens_of(tokenizer, caption, num_tokens) for caption in captions]
    for number, tokens in enumerate(encoded, start=1):
        if len(tokens) > num_tokens:
            raise DataError(
                f"caption {number} of {len(captions)} has {len(tokens)} tokens; "
                f"the model takes at most {num_tokens}; --too_long skip leaves such captions out"
            )
    return encoded


def tokens_of(tokenizer: CaptionTokenizer, caption: str, num_tokens: int) -> Tokens:
    """Returns the tokens of a caption.

    A caption is cut at eight times the `num_tokens` that the model takes, where it is too long
    anyway.
    """
    tokens_L, mask_L = tokenizer.encode(caption, 8 * num_tokens)
    return tuple(int(token) for token in tokens_L[mask_L])


def _require_finite(log_probs: Tensor) -> Tensor:
    """Returns the scores; refuses NaN, which would win or lose every comparison.

    Raises:
        DataError: a score is not finite.
    """
    if not bool(log_probs.isfinite().all()):
        raise DataError("the model returned non-finite scores, which cannot be compared")
    return log_probs


@torch.no_grad()
def tree_log_probs(
    model: Captioner,
    images_BCHW: Tensor,
    captions: Sequence[Tokens],
    *,
    max_numbers: int = MAX_NUMBERS,
) -> Tensor:
    """Returns log p(caption | image) of every caption for every image, (B, C) float64 on the CPU.

    Args:
        images_BCHW: on the model's device.
        captions: tokens from the start token to the end token.
        max_numbers: bounds the memory; images and nodes are split into parts.
    """
    config = model.config
    distinct = set()
    for caption in captions:
        for size in range(1, len(caption) + 1):
            distinct.add(caption[:size])
    beginnings = sorted(distinct, key=len)
    place_of = {beginning: place for place, beginning in enumerate(beginnings)}
    extensions_of: dict[Tokens, list[Tokens]] = defaultdict(list)
    for beginning in beginnings[1:]:
        extensions_of[beginning[:-1]].append(beginning)
    nodes = [beginning for beginning in beginnings if beginning in extensions_of]
    node_of = {beginning: node for node, beginning in enumerate(nodes)}

    def log_probs_of(images_BCHW: Tensor) -> Tensor:
        """Returns (B, C) for a part of the images.

        The sum of a beginning is its last log-probability and the sum of the beginning before it,
        so nodes are computed level by level.
        """
        batch = len(images_BCHW)
        device = images_BCHW.device
        decoder = IncrementalDecoder(model.decoder, model.encode(images_BCHW), len(node_of))
        sums_BE = torch.zeros(batch, len(beginnings), dtype=torch.float64)
        for size, nodes_of_size in groupby(node_of, key=len):
            level = list(nodes_of_size)
            numbers_per_node = batch * max(config.vocab_size, 2 * size * config.decoder.width)
            part_size = max(1, max_numbers // numbers_per_node)
            for start in range(0, len(level), part_size):
                part = level[start : start + part_size]
                tokens_n = torch.tensor([node[-1] for node in part], device=device)
                paths = [[node_of[node[:k]] for k in range(1, size)] for node in part]
                paths_nS = torch.tensor(paths, dtype=torch.int64, device=device)
                hidden_BnD = decoder.step(
                    tokens_n.expand(batch, -1), paths_nS.expand(batch, -1, -1)
                )
                logits_BnV = model.decoder.head(hidden_BnD)
                if logits_BnV.dtype != torch.float64:
                    logits_BnV = logits_BnV.float()
                extensions: list[Tokens] = []
                rows: list[int] = []
                for row, node in enumerate(part):
                    extensions += extensions_of[node]
                    rows += [row] * len(extensions_of[node])
                rows_e = torch.tensor(rows, device=device)
                targets = [extension[-1] for extension in extensions]
                targets_e = torch.tensor(targets, device=device)
                normaliser_Be = logits_BnV.logsumexp(-1)[:, rows_e]
                log_prob_Be = logits_BnV[:, rows_e, targets_e] - normaliser_Be
                parents_e = [place_of[extension[:-1]] for extension in extensions]
                extensions_e = [place_of[extension] for extension in extensions]
                sums_BE[:, extensions_e] = sums_BE[:, parents_e] + log_prob_Be.double().cpu()
        return sums_BE[:, [place_of[caption] for caption in captions]]

    numbers_per_image = 2 * len(node_of) * config.decoder.width * len(model.decoder.blocks)
    images_per_part = max(1, max_numbers // numbers_per_image)
    parts = [log_probs_of(images) for images in images_BCHW.split(images_per_part)]
    return _require_finite(torch.cat(parts))


@torch.no_grad()
def log_probs_per_image(
    model: Captioner,
    images_BCHW: Tensor,
    captions_B: Sequence[Sequence[Sequence[int]]],
    *,
    max_numbers: int = MAX_NUMBERS,
) -> list[Tensor]:
    """Returns log p(caption | image) of a few captions per image: a float64 tensor on the CPU each.

    Every image is encoded once; the captions of all images go through the decoder together.

    Args:
        captions_B: the captions of each image, tokens from the start token to the end token.
        max_numbers: bounds the memory.
    """
    config = model.config
    device = images_BCHW.device
    memory_BTD = model.encode(images_BCHW)
    rows: list[tuple[int, Sequence[int]]] = []
    for image, captions in enumerate(captions_B):
        rows += [(image, caption) for caption in captions]
    longest = max(len(caption) for _, caption in rows)
    part_size = max(1, max_numbers // (longest * config.vocab_size))
    scores: list[Tensor] = []
    for start in range(0, len(rows), part_size):
        part = rows[start : start + part_size]
        tokens_RL = torch.full((len(part), longest), config.pad_id, dtype=torch.int64)
        for row, (_, caption) in enumerate(part):
            tokens_RL[row, : len(caption)] = torch.tensor(caption)
        lengths_R = torch.tensor([len(caption) for _, caption in part])
        mask_RL = torch.arange(longest)[None, :] < lengths_R[:, None]
        images_R = torch.tensor([image for image, _ in part], device=device)
        tokens_RL = tokens_RL.to(device)
        loss_RL = model.decoder(tokens_RL[:, :-1], memory_BTD[images_R], tokens_RL[:, 1:])
        mean_R = caption_loss(loss_RL.double(), mask_RL[:, 1:].to(device))
        scores.append(-mean_R.cpu() * (lengths_R - 1))
    score_of_rows = _require_finite(torch.cat(scores))
    return list(score_of_rows.split([len(captions) for captions in captions_B]))
