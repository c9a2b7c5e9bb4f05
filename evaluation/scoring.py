"""How likely a captioner finds captions: many captions of every image through one prefix tree, or a few of each image's own.

log p(caption | image) is the sum over its tokens, the end token included, of their log-probability given the image and the
tokens before. Captions that begin alike share that work: every distinct beginning is computed once per image, its keys and
values kept (models/generation.py), level by level for many images together.

Shapes: B images, C captions, N nodes (distinct beginnings that something follows), E edges (a token after a node), S tokens of a
beginning, V vocabulary.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from data.examples.tokenizer import CaptionTokenizer
from models.captioner import Captioner, caption_loss
from models.generation import IncrementalDecoder

MAX_NUMBERS = 2**26
"""Most floating-point numbers that scoring holds at once, of keys and values, and of scores: 256 MiB each in fp32."""


def encoded_captions(tokenizer: CaptionTokenizer, captions: Sequence[str], num_tokens: int) -> list[tuple[int, ...]]:
    """Tokens of each caption from start to end, without padding.

    Args:
        num_tokens: the longest that the model takes.

    Raises:
        DataError: there is none, or one does not fit: what is cut off would not be scored.
    """
    if not captions:
        raise DataError("there are no captions to score")
    encoded = []
    for caption in captions:
        tokens = _tokens(tokenizer, caption, num_tokens)
        if len(tokens) > num_tokens:
            raise DataError(
                f"{caption[:80]!r} has {len(tokens)} tokens; the model takes at most {num_tokens}; "
                "--too_long skip leaves such captions out"
            )
        encoded.append(tokens)
    return encoded


def fits(tokenizer: CaptionTokenizer, caption: str, num_tokens: int) -> bool:
    """Whether a model that takes `num_tokens` can score the whole caption."""
    return len(_tokens(tokenizer, caption, num_tokens)) <= num_tokens


def _tokens(tokenizer: CaptionTokenizer, caption: str, num_tokens: int) -> tuple[int, ...]:
    """Tokens of the caption, or of a beginning that is too long anyway."""
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


class Level(NamedTuple):
    """The nodes whose beginnings have S + 1 tokens, and the edges that leave them; nodes count through all levels.

    Attributes:
        tokens_n: last token of each node.
        paths_nS: nodes before it.
        sources_e: of each edge, the node's place in this level, in ascending order.
        targets_e: the token after it.
        reached_by_n: the edge (through all levels) that ends in each node; -1 for the root.
    """

    tokens_n: np.ndarray
    paths_nS: np.ndarray
    sources_e: np.ndarray
    targets_e: np.ndarray
    reached_by_n: np.ndarray


@dataclass(frozen=True)
class PrefixTree:
    """
    Attributes:
        levels: from the start token on.
        last_edge_C: the edge that ends each caption.
        lengths_C: tokens of each caption that are scored: all but the first.
    """

    levels: tuple[Level, ...]
    last_edge_C: np.ndarray
    lengths_C: np.ndarray

    @property
    def num_nodes(self) -> int:
        return sum(len(level.tokens_n) for level in self.levels)

    @property
    def num_edges(self) -> int:
        return sum(len(level.targets_e) for level in self.levels)

    @classmethod
    def of(cls, captions: Sequence[Sequence[int]]) -> "PrefixTree":
        """
        Args:
            captions: tokens from a common start token to the end token; equal ones share their edges.

        Raises:
            ValueError: none, one without a token to score, or different start tokens.
        """
        if not captions or any(len(caption) < 2 or caption[0] != captions[0][0] for caption in captions):
            raise ValueError("captions must begin with the same token and have at least one more")
        levels: list[Level] = []
        node_of: dict[tuple[int, ...], int] = {}
        edge_of: dict[tuple[int, ...], int] = {}
        for size in range(1, max(len(caption) for caption in captions)):
            longer = sorted({tuple(caption[: size + 1]) for caption in captions if len(caption) > size})
            here = list(dict.fromkeys(beginning[:-1] for beginning in longer))
            place = {beginning: k for k, beginning in enumerate(here)}
            node_of |= {beginning: len(node_of) + k for k, beginning in enumerate(here)}
            paths = [[node_of[beginning[:k]] for k in range(1, size)] for beginning in here]
            levels.append(
                Level(
                    np.array([beginning[-1] for beginning in here]),
                    np.array(paths, dtype=np.int64).reshape(len(here), size - 1),
                    np.array([place[beginning[:-1]] for beginning in longer]),
                    np.array([beginning[-1] for beginning in longer]),
                    np.array([edge_of.get(beginning, -1) for beginning in here]),
                )
            )
            edge_of |= {beginning: len(edge_of) + k for k, beginning in enumerate(longer)}
        last_edge_C = np.array([edge_of[tuple(caption)] for caption in captions])
        return cls(tuple(levels), last_edge_C, np.array([len(caption) - 1 for caption in captions]))


@torch.no_grad()
def tree_log_probs(
    model: Captioner, images_BCHW: Tensor, tree: PrefixTree, *, max_numbers: int = MAX_NUMBERS
) -> Tensor:
    """log p(caption | image) of every caption of the tree for every image, (B, C) float64 on the CPU.

    Args:
        images_BCHW: on the model's device.
        max_numbers: bounds the memory; images and nodes are taken in parts.
    """
    per_image = 2 * tree.num_nodes * model.config.decoder.width * len(model.decoder.blocks)
    part = max(1, max_numbers // max(1, per_image))
    parts = [_some_images(model, images, tree, max_numbers) for images in images_BCHW.split(part)]
    return _finite(torch.cat(parts))


def _some_images(model: Captioner, images_BCHW: Tensor, tree: PrefixTree, max_numbers: int) -> Tensor:
    """Level by level, and by parts of a level's nodes: the sum of an edge is its own log-probability and that before it."""
    batch, device, config = len(images_BCHW), images_BCHW.device, model.config
    decoder = IncrementalDecoder(model.decoder, model.encode(images_BCHW), tree.num_nodes)
    totals_BE = torch.zeros(batch, tree.num_edges, dtype=torch.float64)
    edge = 0
    for level in tree.levels:
        per_node = batch * max(config.vocab_size, 2 * (level.paths_nS.shape[1] + 1) * config.decoder.width)
        part = max(1, max_numbers // per_node)
        for start in range(0, len(level.tokens_n), part):
            nodes = slice(start, start + part)
            tokens_n = torch.from_numpy(level.tokens_n[nodes]).to(device)
            paths_nS = torch.from_numpy(level.paths_nS[nodes]).to(device)
            hidden_BnD = decoder.step(tokens_n.expand(batch, -1), paths_nS.expand(batch, -1, -1))
            logits_BnV = model.decoder.head(hidden_BnD)
            logits_BnV = logits_BnV if logits_BnV.dtype == torch.float64 else logits_BnV.float()
            here_e = (level.sources_e >= start) & (level.sources_e < start + part)
            sources_e = torch.from_numpy(level.sources_e[here_e] - start).to(device)
            targets_e = torch.from_numpy(level.targets_e[here_e]).to(device)
            own_Be = logits_BnV[:, sources_e, targets_e] - logits_BnV.logsumexp(-1)[:, sources_e]
            before_e = torch.from_numpy(level.reached_by_n[level.sources_e[here_e]])
            before_Be = totals_BE[:, before_e.clamp(min=0)].masked_fill(before_e < 0, 0)
            totals_BE[:, edge : edge + len(sources_e)] = before_Be + own_Be.double().cpu()
            edge += len(sources_e)
    return totals_BE[:, torch.from_numpy(tree.last_edge_C)]


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
        loss_RL = model.decoder(tokens_RL[:, :-1].to(device), memory_RTD, tokens_RL[:, 1:].to(device))
        mean_R = caption_loss(loss_RL.double(), mask_RL[:, 1:].to(device))
        parts.append(-mean_R.cpu() * (lengths_R - 1))
    joined = _finite(torch.cat(parts))
    return list(joined.split([len(captions) for captions in captions_B]))
