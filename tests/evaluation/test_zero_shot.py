"""Rules of zero-shot classification against their definitions, and prompts."""

import math

import numpy as np
import pytest
import torch

from data.errors import DataError
from evaluation.zero_shot import accuracy, prompts, scores_by_rule

NAMES = ("red circle", "orange star", "oval")


def test_rules_are_their_definitions() -> None:
    """Against loops over probabilities, not their logarithms."""
    assert prompts(("red circle", "egg"), ("{a}", "the {}")) == [
        "a red circle",
        "the red circle",
        "an egg",
        "the egg",
    ]
    log_probs, lengths = (
        -5 - 10 * torch.rand(7, 6, dtype=torch.float64),
        torch.tensor([3, 4, 5, 6, 7, 8]),
    )
    scores = scores_by_rule(log_probs, lengths, 2)
    for image in range(7):
        for k in range(3):
            p, q = (math.exp(log_probs[image, 2 * k + t]) for t in (0, 1))
            assert scores["sum"][image, k].item() == pytest.approx(math.log((p + q) / 2))
            prior = np.mean([math.exp(log_probs[m, 2 * k + t]) for m in range(7) for t in (0, 1)])
            assert scores["prior"][image, k].item() == pytest.approx(math.log((p + q) / 2 / prior))
            means = [log_probs[image, 2 * k + t].item() / lengths[2 * k + t].item() for t in (0, 1)]
            assert scores["mean"][image, k].item() == pytest.approx(np.mean(means))


def test_accuracy_counts_and_shares_ties() -> None:
    scores = torch.tensor([[3.0, 1, 2], [3, 1, 2], [1, 1, 1], [0, 2, 2]])
    found = accuracy(scores, np.array([0, 1, 2, 1]))
    assert found.top1 == pytest.approx((1 + 0 + 1 / 3 + 1 / 2) / 4) and found.top5 is None
    np.testing.assert_allclose(found.per_class_K, [1, 1 / 4, 1 / 3])
    many = torch.arange(10.0).repeat(10, 1)
    assert accuracy(many, np.arange(10)).top5 == pytest.approx(0.5)
    assert accuracy(torch.zeros(10, 10), np.arange(10)).top5 == pytest.approx(0.5)
    with pytest.raises(DataError, match="3 class names are of the labels 0 to 2"):
        accuracy(scores, np.array([0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("names", "templates", "message"),
    [
        (("one",), ("{}",), "at least two"),
        (("a", "b c", "b_c"), ("{}",), "'b c' comes more than once"),
        (NAMES, (), "no template"),
        (NAMES, ("a photo",), "no place for the class name"),
    ],
)
def test_prompts_that_cannot_be_are_refused(
    names: tuple[str, ...], templates: tuple[str, ...], message: str
) -> None:
    with pytest.raises(DataError, match=message):
        prompts(names, templates)
