"""Retrieval by caption likelihood: which caption belongs to the image, and which image to the caption.

All captions of the set are scored for every image through one prefix tree. A caption's own likelihood says little of whether it
fits the image, so captions are compared by `prior` too: log p(caption | image) minus the log of its mean probability over all
images. Between the images of one caption that changes nothing.

Shapes: N images, C captions.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

RANKS = (1, 5, 10)


@dataclass(frozen=True)
class Recalls:
    """Recall at 1, 5 and 10: the share of queries with a right answer among so many best."""

    image_to_text: dict[int, float]
    text_to_image: dict[int, float]


def recalls(log_probs_NC: Tensor, lengths_C: np.ndarray, true_NC: np.ndarray) -> dict[str, Recalls]:
    """By rule: `sum` (log-probability), `mean` (per token), `prior` (see the module). Equal scores count against the model.

    Args:
        log_probs_NC: from `evaluation.scoring.tree_log_probs`.
        lengths_C: tokens of each caption.
        true_NC: bool, which caption is true of which image; at least one of each image.
    """
    prior_C = log_probs_NC.logsumexp(0) - math.log(len(log_probs_NC))
    by_rule = {"sum": log_probs_NC, "mean": log_probs_NC / torch.from_numpy(lengths_C), "prior": log_probs_NC - prior_C}
    return {
        rule: Recalls(_recall(scores_NC.numpy(), true_NC), _recall(scores_NC.numpy().T, true_NC.T))
        for rule, scores_NC in by_rule.items()
    }


def _recall(scores_QA: np.ndarray, true_QA: np.ndarray) -> dict[int, float]:
    """Queries in rows, answers in columns."""
    best_Q1 = np.where(true_QA, scores_QA, -np.inf).max(axis=1, keepdims=True)
    before_Q = (~true_QA & (scores_QA >= best_Q1)).sum(axis=1)
    return {rank: float((before_Q < rank).mean()) for rank in RANKS}


def same_texts(captions: Sequence[str], owners_C: Sequence[int], num_images: int) -> np.ndarray:
    """(N, C) bool: the captions that are true of each image, those of the same words under another image included."""
    true_NC = np.zeros((num_images, len(captions)), dtype=bool)
    by_text: dict[str, list[int]] = {}
    for caption, owner in zip(captions, owners_C, strict=True):
        by_text.setdefault(caption, []).append(owner)
    for number, caption in enumerate(captions):
        true_NC[by_text[caption], number] = True
    return true_NC
