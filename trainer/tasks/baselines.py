"""Computes the losses of guesses without looking, which a model must beat to have learned anything.

They are counted on the held-out examples, each scored by all others (leave-one-out). So they are as
public or as private as these examples, and use no training data. Units are those of the task's
loss.

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
"""The tokens of a caption that a model predicts: all after the start token, with the end token."""

ADDED = 0.1
"""Occurrences of every word before counting begins.

With few captions and many words, less than one fits better."""

BLIND_LINE = {
    "captioner": "the lowest of three tables of frequencies (words, pairs of words, whole "
    "captions), in nats per token",
    "masked_autoencoder": "the mean picture as the reconstruction of every picture",
    "classifier": "the frequencies of the classes as the likelihood of each",
}
"""Kind of task -> source of `blind_loss`; see the classes below."""

SWAPPED_INPUT = {"captioner": "images_BCHW"}
"""Kind of task -> input that a model has to look at.

With another example's input in its place, the loss shows whether the model does."""


class BlindBaseline(Protocol):
    """A baseline that counts held-out examples micro-batch by micro-batch."""

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        """Counts the rows that are no padding; the inputs are the model's own."""
        ...

    def values(self) -> dict[str, float]:
        """Returns `blind_loss` and further scores over the examples of all ranks. Collective.

        Empty where there are too few examples to leave one out.
        """
        ...


def caption_losses(captions: Mapping[Tokens, int], vocab_size: int) -> dict[str, float]:
    """Returns caption losses of three tables of frequencies.

    They are in nats per token, averaged within a caption first, as the model's loss.
    `unigram`: p(w) = (c(w) + ADDED) / (N + ADDED V). `bigram`: p(w | v) = (c(v, w) + p(w)) / (c(v)
    + 1), where the start token comes before the first word. `whole_caption`: p(x) = (c(x) +
    p_bigram(x)) / (n + 1). The last two fall back on the table before them, which counts as one
    occurrence; so each gives every caption a probability, and these sum to at most one.

    Args:
        captions: each with how many times it occurs. The tables are counted on them, each time
            without one occurrence of the caption that is scored.
        vocab_size: V.
    """
    num_captions = sum(captions.values())
    words = Counter[int]()
    pairs = Counter[tuple[int, int]]()
    for caption, times in captions.items():
        for first_word, word in zip((-1, *caption), caption, strict=False):
            words[word] += times
            pairs[first_word, word] += times
    first_words = Counter[int]()
    for (first_word, _), times in pairs.items():
        first_words[first_word] += times
    num_words = words.total()

    totals = dict.fromkeys(("unigram", "bigram", "whole_caption"), 0.0)
    for caption, times in captions.items():
        caption_pairs = list(zip((-1, *caption), caption, strict=False))
        # The counts of this caption, which its own score leaves out.
        own_words = Counter(word for _, word in caption_pairs)
        own_first_words = Counter(first_word for first_word, _ in caption_pairs)
        own_pairs = Counter(caption_pairs)
        unigram = 0.0
        bigram = 0.0
        for first_word, word in caption_pairs:
            word_count = words[word] - own_words[word] + ADDED
            p_word = word_count / (num_words - len(caption_pairs) + ADDED * vocab_size)
            pair_count = pairs[first_word, word] - own_pairs[first_word, word] + p_word
            p_pair = pair_count / (first_words[first_word] - own_first_words[first_word] + 1)
            unigram -= math.log(p_word)
            bigram -= math.log(p_pair)
        log_twins = math.log(times - 1) if times > 1 else -math.inf
        whole_caption = math.log(num_captions) - float(np.logaddexp(log_twins, -bigram))
        for name, nats in zip(totals, (unigram, bigram, whole_caption), strict=True):
            totals[name] += times * nats / max(len(caption), 1)
    return {name: total / num_captions for name, total in totals.items()}


class CaptionFrequencies:
    """Counts captions, and scores them by unigrams, bigrams and whole captions.

    See `caption_losses`.
    """

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        self._captions = Counter[Tokens]()

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        """Counts the captions of a micro-batch."""
        for row in (~is_padding_B).nonzero().flatten().tolist():
            tokens_L = inputs["tokens_BL"][row][inputs["token_mask_BL"][row]]
            self._captions[tuple(tokens_L[1:].tolist())] += 1

    def values(self) -> dict[str, float]:
        """Returns the loss of each table, and the lowest as `blind_loss`. Collective."""
        captions = sum(collectives.gather_objects(self._captions), Counter[Tokens]())
        if captions.total() < 2:
            return {}
        losses = caption_losses(captions, self._vocab_size)
        scores = {"blind_loss": min(losses.values())}
        for name, loss in losses.items():
            scores[f"blind_{name}_loss"] = loss
        return scores


class ClassFrequencies:
    """Counts classes: their frequencies are likelihoods, and the largest class is every answer."""

    def __init__(self, num_classes: int) -> None:
        self._counts_K = torch.zeros(num_classes, dtype=torch.float64)

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        """Counts the labels of a micro-batch."""
        labels = inputs["labels_B"][~is_padding_B]
        self._counts_K += torch.bincount(labels, minlength=len(self._counts_K))

    def values(self) -> dict[str, float]:
        """Returns the cross-entropy of the frequencies, and the accuracy of the largest class.

        p(k) = (c(k) + ADDED) / (n + ADDED K), without the label that is scored. Collective.
        """
        counts_K = collectives.all_reduce_sum(self._counts_K.clone())
        count = float(counts_K.sum())
        if count < 2:
            return {}
        positive_K = counts_K[counts_K > 0]
        p_K = (positive_K - 1 + ADDED) / (count - 1 + ADDED * len(counts_K))
        return {
            "blind_loss": float(-(positive_K * p_K.log()).sum() / count),
            "blind_accuracy": float(counts_K.max() / count),
        }


class MeanPicture:
    """Sums moments of pictures: each is reconstructed by the mean of the others, place by place.

    One pass is enough: the squared error of a sum of pictures is a function of their first two
    moments. Leaving a picture out of its own mean makes its distance to the mean n / (n - 1) times
    as long.
    """

    def __init__(self, targets: Callable[[Tensor], Tensor]) -> None:
        """
        Args:
            targets: images (B, C, H, W) -> targets of the loss (B, P, Q), patches and their
                pixels.
        """
        self._targets = targets
        self._moments: dict[str, Tensor] = {}

    def add(self, inputs: Mapping[str, Tensor], is_padding_B: Tensor) -> None:
        """Adds the moments of a micro-batch."""
        mask_BP = inputs["mask_BP"] & ~is_padding_B[:, None]
        targets_BPQ = self._targets(inputs["images_BCHW"].float()).double()
        targets_BPQ = targets_BPQ.masked_fill(is_padding_B[:, None, None], 0)
        num_masked_B1 = mask_BP.sum(dim=1, keepdim=True).clamp(min=1)
        share_BP1 = (mask_BP / num_masked_B1).double()[:, :, None]
        moments = {
            "count": (~is_padding_B).double().sum().view(1),
            "sum": targets_BPQ.sum(dim=0),
            "share": share_BP1.sum(dim=0),
            "masked_sum": (share_BP1 * targets_BPQ).sum(dim=0),
            "masked_square": (share_BP1 * targets_BPQ.square()).sum(dim=0),
        }
        self._moments = {name: self._moments.get(name, 0) + part for name, part in moments.items()}

    def values(self) -> dict[str, float]:
        """Returns the loss of the mean picture. Collective."""
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
        loss = float(square_PQ.mean(dim=1).sum() / count)
        return {"blind_loss": loss * (count / (count - 1)) ** 2}
