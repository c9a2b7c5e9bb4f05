"""What one gets on held-out examples without looking at them: the losses that a model must beat to have learned anything.

Everything is counted on the held-out examples themselves, each scored by what the others say (leave-one-out), so that these
numbers are as public or as private as the held-out examples are, and training data are never asked. The units are those of the
task's own loss.

    >>> losses = caption_losses(Counter({(4, 5, 2): 3, (4, 6, 2): 1}), vocab_size=7)
    >>> min(losses.values()) == losses["whole_caption"]
    True
"""

import math
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from privacy.ranks import collectives

Tokens = tuple[int, ...]
"""The tokens of one caption that a model predicts: those after the start token, with the end token."""

ADDED = 0.1
"""Occurrences that every word has before counting begins. With few captions and many words, less than one fits better."""

BLIND_LINE = {
    "captioner": "the lowest of three tables of frequencies (words, pairs of words, whole captions), in nats per token",
    "masked_autoencoder": "the mean picture as the reconstruction of every picture",
    "classifier": "the frequencies of the classes as the likelihood of each",
}
"""By kind of task, what gives `blind_loss`; see the classes below."""

LOOKED_AT = {"captioner": "images_BCHW"}
"""By kind of task, the input that a model has to look at; replaced by another example's, it shows whether the model does."""


class BlindBaseline(Protocol):
    """Gathers what it needs from held-out examples, micro-batch by micro-batch."""

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        """Counts the rows that are no padding; the inputs are the model's own."""
        ...

    def values(self) -> dict[str, float]:
        """What it reaches, over the examples of all ranks (collective): `blind_loss`, and what else people want to know.

        Nothing, where there are too few examples to leave one out.
        """
        ...


def caption_losses(captions: Mapping[Tokens, int], vocab_size: int) -> dict[str, float]:
    """Caption losses of three tables of frequencies: nats per token, averaged within a caption first, as the model's loss.

    `unigram`: p(w) = (c(w) + ADDED) / (N + ADDED V). `bigram`: p(w | v) = (c(v, w) + p(w)) / (c(v) + 1), where the start token
    comes before the first word. `whole_caption`: p(x) = (c(x) + p_bigram(x)) / (n + 1). The last two fall back on the table
    before them, which counts as one occurrence; so each gives every caption a probability, and these sum to at most one.

    Args:
        captions: each with how many times it occurs. The tables are counted on them, each time without one occurrence of the
            caption that is scored.
        vocab_size: V.
    """
    words, pairs, num_captions = Counter[int](), Counter[tuple[int, int]](), sum(captions.values())
    for caption, times in captions.items():
        for before, word in zip((-1, *caption), caption, strict=False):
            words[word] += times
            pairs[before, word] += times
    starts = Counter[int]()
    for (before, _), times in pairs.items():
        starts[before] += times
    num_words = words.total()

    totals = dict.fromkeys(("unigram", "bigram", "whole_caption"), 0.0)
    for caption, times in captions.items():
        steps = list(zip((-1, *caption), caption, strict=False))
        own_words, own_starts = (
            Counter(word for _, word in steps),
            Counter(before for before, _ in steps),
        )
        own_pairs = Counter(steps)
        unigram = bigram = 0.0
        for before, word in steps:
            p_word = (words[word] - own_words[word] + ADDED) / (
                num_words - len(steps) + ADDED * vocab_size
            )
            p_pair = (pairs[before, word] - own_pairs[before, word] + p_word) / (
                starts[before] - own_starts[before] + 1
            )
            unigram, bigram = unigram - math.log(p_word), bigram - math.log(p_pair)
        log_whole = np.logaddexp(math.log(times - 1) if times > 1 else -math.inf, -bigram)
        whole = math.log(num_captions) - float(log_whole)
        for name, nats in zip(totals, (unigram, bigram, whole), strict=True):
            totals[name] += times * nats / max(len(caption), 1)
    return {name: total / num_captions for name, total in totals.items()}


class CaptionFrequencies:
    """Unigrams, bigrams and whole captions; see `caption_losses`."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._captions = Counter[Tokens]()

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        for row in (~is_padding_B).nonzero().flatten().tolist():
            tokens_L = inputs["tokens_BL"][row][inputs["token_mask_BL"][row]]
            self._captions[tuple(tokens_L[1:].tolist())] += 1

    def values(self) -> dict[str, float]:
        captions = sum(collectives.gather_objects(self._captions), Counter[Tokens]())
        if captions.total() < 2:
            return {}
        losses = caption_losses(captions, self._vocab_size)
        return {"blind_loss": min(losses.values())} | {
            f"blind_{name}_loss": loss for name, loss in losses.items()
        }


class ClassFrequencies:
    """The frequencies of the classes as the likelihood of each, and the largest class as the answer to everything."""

    def __init__(self, num_classes: int) -> None:
        self._counts_K = torch.zeros(num_classes, dtype=torch.float64)

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        labels = inputs["labels_B"][~is_padding_B]
        self._counts_K += torch.bincount(labels, minlength=len(self._counts_K))

    def values(self) -> dict[str, float]:
        """Cross-entropy with p(k) = (c(k) + ADDED) / (n + ADDED K), one's own label left out; accuracy of the majority."""
        counts_K = collectives.all_reduce_sum(self._counts_K.clone())
        count = float(counts_K.sum())
        if count < 2:
            return {}
        seen_K = counts_K[counts_K > 0]
        p_K = (seen_K - 1 + ADDED) / (count - 1 + ADDED * len(counts_K))
        return {
            "blind_loss": float(-(seen_K * p_K.log()).sum() / count),
            "blind_accuracy": float(counts_K.max() / count),
        }


class MeanPicture:
    """The mean of the other held-out pictures, place by place, as the reconstruction of each.

    One pass is enough: the squared error of a sum of pictures is a function of their first two moments. Leaving a picture out
    of its own mean makes its distance to the mean n / (n - 1) times as long.
    """

    def __init__(self, targets: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            targets: images (B, C, H, W) -> what the loss compares with, (B, P, Q): patches and their pixels.
        """
        self._targets = targets
        self._moments: dict[str, Tensor] = {}

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        mask_BP = inputs["mask_BP"] & ~is_padding_B[:, None]
        targets_BPQ = self._targets(inputs["images_BCHW"].float()).double()
        targets_BPQ = targets_BPQ.masked_fill(is_padding_B[:, None, None], 0)
        share_BP1 = (mask_BP / mask_BP.sum(dim=1, keepdim=True).clamp(min=1)).double()[:, :, None]
        moments = {
            "count": (~is_padding_B).double().sum().view(1),
            "sum": targets_BPQ.sum(dim=0),
            "share": share_BP1.sum(dim=0),
            "masked_sum": (share_BP1 * targets_BPQ).sum(dim=0),
            "masked_square": (share_BP1 * targets_BPQ.square()).sum(dim=0),
        }
        self._moments = {name: self._moments.get(name, 0) + part for name, part in moments.items()}

    def values(self) -> dict[str, float]:
        moments = {
            name: collectives.all_reduce_sum(part.clone()) for name, part in self._moments.items()
        }
        count = float(moments["count"])
        if count < 2:
            return {}
        mean_PQ = moments["sum"] / count
        square_PQ = (
            moments["masked_square"]
            - 2 * mean_PQ * moments["masked_sum"]
            + moments["share"] * mean_PQ.square()
        )
        return {
            "blind_loss": float(square_PQ.mean(dim=1).sum() / count) * (count / (count - 1)) ** 2
        }
