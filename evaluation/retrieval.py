"""Retrieval by likelihood: which caption belongs to the image, and which image to the caption?

A caption's own likelihood says little of whether it fits the image, so captions are compared by `prior` too: log p(caption |
image) minus the log of its mean probability over all images. Between the images of one caption that changes nothing.

Shapes: N images, C captions, Q queries, A answers.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.errors import DataError
from evaluation.captions import open_captioner, usable_batches
from evaluation.options import RetrievalOptions
from evaluation.results import DataUse, Results
from evaluation.scoring import PrefixTree, encoded_captions, fits, tree_log_probs
from evaluation.sources import open_source

RANKS = (1, 5, 10)


def recalls(log_probs_NC: Tensor, lengths_C: np.ndarray, true_NC: np.ndarray) -> dict[str, dict[str, dict[int, float]]]:
    """Recall at 1, 5 and 10: the share of queries with a right answer among that many best ones, by rule and way.

    Rules: `sum` (log-probability), `mean` (per token), `prior` (see the module).

    Equal scores count against the model.

    Args:
        log_probs_NC: from `tree_log_probs`.
        lengths_C: tokens of each caption.
        true_NC: bool, which caption is true of which image; at least one of each image.
    """
    prior_C = log_probs_NC.logsumexp(0) - math.log(len(log_probs_NC))
    by_rule = {"sum": log_probs_NC, "mean": log_probs_NC / torch.from_numpy(lengths_C), "prior": log_probs_NC - prior_C}
    return {
        rule: {
            "image_to_text": _recall(scores_NC.numpy(), true_NC),
            "text_to_image": _recall(scores_NC.numpy().T, true_NC.T),
        }
        for rule, scores_NC in by_rule.items()
    }


def _recall(scores_QA: np.ndarray, true_QA: np.ndarray) -> dict[int, float]:
    """Queries in rows, answers in columns."""
    best_Q1 = np.where(true_QA, scores_QA, -np.inf).max(axis=1, keepdims=True)
    before_Q = (~true_QA & (scores_QA >= best_Q1)).sum(axis=1)
    return {rank: float((before_Q < rank).mean()) for rank in RANKS}


def distinct_texts(captions: Sequence[str], owners_C: Sequence[int], num_images: int) -> tuple[list[str], np.ndarray]:
    """Each text once, in order of appearance, and (N, C) bool: of which images it is true.

    A text that many images share is one answer and one query: counted as often as it repeats, it would fill the ranks before a
    right answer, or be asked for again and again.
    """
    places = {text: place for place, text in enumerate(dict.fromkeys(captions))}
    true_NC = np.zeros((num_images, len(places)), dtype=bool)
    for text, owner in zip(captions, owners_C, strict=True):
        true_NC[owner, places[text]] = True
    return list(places), true_NC


def retrieval(options: RetrievalOptions) -> Results:
    """The command; see its options."""
    model, tokenizer, facts = open_captioner(options)
    source = open_source(options.data, options)
    longest, left_out, too_long = model.config.num_tokens, 0, 0
    images: list[Tensor] = []
    captions: list[str] = []
    owners: list[int] = []
    for images_BCHW, examples, undecodable in usable_batches(model, source, options, options.max_examples):
        left_out += undecodable
        for image_CHW, example in zip(images_BCHW, examples, strict=True):
            texts = [" ".join(caption.split()) for caption in example.captions]
            if options.too_long == "skip":
                kept = [text for text in texts if fits(tokenizer, text, longest)]
                too_long += len(texts) - len(kept)
                texts = kept
            if not texts:
                left_out += 1
                continue
            captions += texts
            owners += [len(images)] * len(texts)
            images.append(image_CHW)
    if len(images) < 2:
        raise DataError(f"{source.name}: retrieval needs at least two images with captions, found {len(images)}")
    texts, true_NC = distinct_texts(captions, owners, len(images))
    tree = PrefixTree.of(encoded_captions(tokenizer, texts, longest))
    parts = torch.stack(images).split(options.batch_size)
    log_probs_NC = torch.cat([tree_log_probs(model, part, tree) for part in parts])
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for rule, recall in recalls(log_probs_NC, tree.lengths_C, true_NC).items():
        for way, by_rank in recall.items():
            scalars |= {f"{way}_recall{rank}_{rule}": value for rank, value in by_rank.items()}
            table.append({"rule": rule, "way": way, **{f"recall@{rank}": value for rank, value in by_rank.items()}})
    uses = [DataUse("images with captions", source.name, len(images), left_out)]
    details = {
        "num_captions": len(captions), "num_distinct_captions": len(texts), "num_too_long": too_long,
        "num_tree_nodes": tree.num_nodes,
    }  # fmt: skip
    return Results("retrieval", scalars, uses, facts, table, details)
