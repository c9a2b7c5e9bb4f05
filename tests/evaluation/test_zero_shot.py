"""Rules of zero-shot classification against their definitions, and prompts."""

import math

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.examples.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer
from evaluation.zero_shot import Prompts, accuracy, fill

TOKENIZER = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER)
NAMES = ("red circle", "orange star", "oval")
TEMPLATES = ("{a}", "a photo of the {}")


def test_prompts_are_templates_times_names() -> None:
    prompts = Prompts.of(NAMES, TEMPLATES, TOKENIZER, 20)
    assert prompts.captions[:4] == (
        "a red circle",
        "a photo of the red circle",
        "an orange star",
        "a photo of the orange star",
    )
    assert prompts.num_classes == 3 and fill("{a} {}", "egg") == "an egg egg"


def test_rules_are_their_definitions() -> None:
    """Against loops over probabilities, not their logarithms."""
    prompts = Prompts.of(NAMES, TEMPLATES, TOKENIZER, 20)
    log_probs = -5 - 10 * torch.rand(7, 6, dtype=torch.float64)
    scores = prompts.by_rule(log_probs)
    lengths = prompts.tree.lengths_C
    for image in range(7):
        for k in range(3):
            p, q = (math.exp(log_probs[image, 2 * k + t]) for t in (0, 1))
            assert scores["sum"][image, k].item() == pytest.approx(math.log((p + q) / 2))
            prior = np.mean([math.exp(log_probs[m, 2 * k + t]) for m in range(7) for t in (0, 1)])
            assert scores["prior"][image, k].item() == pytest.approx(math.log((p + q) / 2 / prior))
            means = [log_probs[image, 2 * k + t].item() / lengths[2 * k + t] for t in (0, 1)]
            assert scores["mean"][image, k].item() == pytest.approx(np.mean(means))


def test_accuracy_counts_and_shares_ties() -> None:
    scores = torch.tensor([[3.0, 1, 2], [3, 1, 2], [1, 1, 1], [0, 2, 2]])
    found = accuracy(scores, np.array([0, 1, 2, 1]))
    assert found.top1 == pytest.approx((1 + 0 + 1 / 3 + 1 / 2) / 4) and found.top5 is None
    np.testing.assert_allclose(found.per_class_K, [1, 1 / 4, 1 / 3])
    many = torch.arange(10.0).repeat(10, 1)
    assert accuracy(many, np.arange(10)).top5 == pytest.approx(0.5)
    assert accuracy(torch.zeros(10, 10), np.arange(10)).top5 == pytest.approx(0.5)
    with pytest.raises(DataError, match="label 3 has no name"):
        accuracy(scores, np.array([0, 1, 2, 3]))


@pytest.mark.parametrize(
    ("names", "templates", "message"),
    [
        (("one",), ("{}",), "at least two"),
        (("a", "b c", "b_c"), ("{}",), "'b c' comes more than once"),
        (NAMES, (), "no template"),
        (NAMES, ("a photo",), "no place for the class name"),
        (NAMES, ("a very long " * 9 + "{}",), "at most 20"),
    ],
)
def test_prompts_that_cannot_be_are_refused(names: tuple[str, ...], templates: tuple[str, ...], message: str) -> None:
    with pytest.raises(DataError, match=message):
        Prompts.of(names, templates, TOKENIZER, 20)
