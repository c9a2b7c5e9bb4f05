"""Recalls against a plain count, and captions that several images share."""

import numpy as np
import pytest
import torch

from evaluation.retrieval import distinct_texts, recalls


def test_recalls_are_counts_over_sorted_answers() -> None:
    rng = np.random.default_rng(0)
    scores = rng.standard_normal((20, 30))
    owners = rng.permutation(np.concatenate([np.arange(20), rng.integers(0, 20, 10)]))
    texts, true = distinct_texts([f"caption {k}" for k in range(30)], owners.tolist(), 20)
    assert texts == [f"caption {k}" for k in range(30)]
    found = recalls(torch.from_numpy(scores), np.full(30, 4), true)
    for rank in (1, 5, 10):
        hits = [any(owners[c] == i for c in np.argsort(-scores[i])[:rank]) for i in range(20)]
        assert found["sum"]["image_to_text"][rank] == pytest.approx(np.mean(hits))
        hits = [owners[c] in np.argsort(-scores[:, c])[:rank] for c in range(30)]
        assert found["sum"]["text_to_image"][rank] == pytest.approx(np.mean(hits))
    assert found["mean"]["image_to_text"] == found["sum"]["image_to_text"]  # all are equally long


def test_the_prior_finds_the_image_behind_a_rare_caption() -> None:
    """Caption 0 is likeliest everywhere; what an image adds to its own caption decides after all."""
    log_probs = torch.full((4, 4), -9.0, dtype=torch.float64)
    log_probs[:, 0] = -1.0
    log_probs += 2 * torch.eye(4, dtype=torch.float64)
    found = recalls(log_probs, np.ones(4), np.eye(4, dtype=bool))
    assert found["sum"]["image_to_text"][1] == 0.25 and found["prior"]["image_to_text"][1] == 1.0
    assert found["prior"]["text_to_image"] == found["sum"]["text_to_image"] == {1: 1.0, 5: 1.0, 10: 1.0}


def test_length_counts_by_rule() -> None:
    log_probs = torch.tensor([[-4.0, -3.0], [-13.0, -3.0]], dtype=torch.float64)
    found = recalls(log_probs, np.array([4, 1]), np.eye(2, dtype=bool))
    assert found["sum"]["image_to_text"][1] == 0.5 and found["mean"]["image_to_text"][1] == 1.0


def test_a_text_that_repeats_is_one_answer_and_one_query() -> None:
    """Rankings of sets of texts, by the definition of recall, against scores that prefer a text that many images share."""
    rng = np.random.default_rng(1)
    vocabulary = [f"text {k}" for k in range(12)]
    captions = [vocabulary[k] for k in rng.choice(12, 40, p=[0.4, *[0.6 / 11] * 11])]
    owners = [*range(20), *range(20)]
    by_pair = {(i, text): rng.standard_normal() + (text == "text 0") for i in range(20) for text in vocabulary}
    texts, true = distinct_texts(captions, owners, 20)
    assert len(texts) == len(set(captions)) and set(texts) == set(captions)
    scores = torch.tensor([[by_pair[i, text] for text in texts] for i in range(20)], dtype=torch.float64)
    found = recalls(scores, np.ones(len(texts)), true)["sum"]
    own = {i: {c for c, o in zip(captions, owners, strict=True) if o == i} for i in range(20)}
    for rank in (1, 5, 10):
        first = {i: sorted(set(captions), key=lambda t, i=i: -by_pair[i, t])[:rank] for i in range(20)}
        assert found["image_to_text"][rank] == np.mean([bool(own[i] & set(first[i])) for i in range(20)])
        images = {t: sorted(range(20), key=lambda i, t=t: -by_pair[i, t])[:rank] for t in set(captions)}
        assert found["text_to_image"][rank] == pytest.approx(
            np.mean([any(t in own[i] for i in images[t]) for t in images])
        )


def test_equal_scores_count_against() -> None:
    constant = recalls(torch.zeros(12, 12, dtype=torch.float64), np.ones(12), np.eye(12, dtype=bool))
    assert constant["sum"]["image_to_text"] == {1: 0.0, 5: 0.0, 10: 0.0}
