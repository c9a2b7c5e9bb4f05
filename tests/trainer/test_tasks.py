"""Tasks: a recipe's options in examples and model, pictures of held-out examples, and baselines that look at nothing."""

from collections import Counter
from math import log
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batch import Batch
from models.captioner import Captioner
from models.masked_autoencoder import reconstruction_loss
from privacy.guards.selfcheck import check_against_autograd
from trainer.config.recipe import load_config
from trainer.loop.reporting import verdict_lines
from trainer.tasks import MaskedAutoencodingTask, make_task
from trainer.tasks.base import GAP, SIDE, pixels
from trainer.tasks.baselines import (
    ADDED,
    CaptionFrequencies,
    ClassFrequencies,
    MeanPicture,
    Tokens,
    caption_losses,
)

ROOT = Path(__file__).resolve().parents[2]
EOS = 0
TOP = 28
SMALL = [
    "data.image_size=32",
    "model.size=pico",
    "model.overrides={encoder_depth = 1, decoder_depth = 1}",
]

pytestmark = pytest.mark.usefixtures("one_rank")


def task(*overrides: str) -> Any:
    small = [
        "data.image_size=16",
        "data.num_tokens=8",
        "model.overrides={patch_size = 8, encoder_depth = 1, decoder_depth = 1}",
    ]
    return make_task(load_config(ROOT / "tests/trainer/clip_art.toml", [*small, *overrides]), ROOT)


def test_a_recipe_override_makes_cappa() -> None:
    """From one key on the command line to coins in the training examples, and none in evaluation."""
    cappa = task("model.overrides.parallel_share=0.75", "model.overrides.tied_head=true")
    make = cappa.make_example(train=True)
    assert make.padding()["is_parallel"].dtype == bool and make.parallel_share == 0.75
    assert "is_parallel" not in cappa.make_example(train=False).padding()
    inputs = cappa.synthetic_inputs(2)
    assert inputs["is_parallel_B"].tolist() == [False, True]
    model = cappa.build(torch.Generator().manual_seed(0))
    assert (
        isinstance(model, Captioner)
        and model.decoder.head.weight is model.decoder.token_embedding.weight
    )
    check_against_autograd(model, inputs)
    stated = cappa.facts()["model"]
    assert (stated["parallel_share"], stated["tied_head"]) == (0.75, True)


def cell(picture_HWC: np.ndarray, row: int, column: int) -> np.ndarray:
    top, left = TOP + row * (SIDE + GAP), GAP + column * (SIDE + GAP)
    return picture_HWC[top : top + SIDE, left : left + SIDE]


@pytest.mark.parametrize("normalise", [False, True])
def test_a_perfect_prediction_looks_like_the_original(normalise: bool) -> None:
    """In pixels, also where the model predicts normalised ones; masked patches are gray, visible ones the original's."""
    overrides = [*SMALL, f"model.overrides.normalise_pixels={str(normalise).lower()}"]
    task = make_task(load_config(ROOT / "recipes/synthetic_vip_base.toml", overrides), ROOT)
    assert isinstance(task, MaskedAutoencodingTask)
    model = task.build(torch.Generator().manual_seed(0))
    assert model.config.normalise_pixels is normalise
    inputs = task.synthetic_inputs(3)
    inputs["images_BCHW"] = inputs["images_BCHW"].clamp(-1.5, 1.5)

    def perfect(images_BCHW: Tensor, mask_BP: Tensor, output: str) -> Tensor:
        assert output == "patches"
        return torch.where(mask_BP[:, :, None], model.targets(images_BCHW), torch.tensor(99.0))

    engine: Any = SimpleNamespace(
        module=perfect, device=torch.device("cpu"), compute_dtype=torch.float32
    )
    batch = Batch(inputs, torch.tensor([False, True, False]))
    shown = task.samples(engine, [batch])
    assert shown.lines == [] and shown.picture_HWC.shape[0] == TOP + 2 * (SIDE + GAP), (
        "padding is not shown"
    )
    for row, index in enumerate((0, 2)):
        original = pixels(inputs["images_BCHW"][index]).repeat(5, 0).repeat(5, 1).astype(int)
        masked, predicted, last = (
            cell(shown.picture_HWC, row, column).astype(int) for column in range(3)
        )
        assert (last == original).all() and abs(predicted - original).max() <= 1
        is_masked = inputs["mask_BP"][index].view(4, 4).numpy().repeat(40, 0).repeat(40, 1)
        assert (masked[~is_masked] == original[~is_masked]).all()
        assert (masked[is_masked] == pixels(torch.zeros(3, 1, 1))[0, 0]).all()


def plain_probabilities(caption: Tokens, table: list[Tokens], vocab_size: int) -> tuple[float, ...]:
    """p(caption) by unigrams, bigrams and whole captions of `table`, counted anew."""
    words = [word for one in table for word in one]
    pairs = [pair for one in table for pair in zip(("start", *one), one, strict=False)]
    unigram = bigram = 1.0
    for before, word in zip(("start", *caption), caption, strict=False):
        p_word = (words.count(word) + ADDED) / (len(words) + ADDED * vocab_size)
        unigram *= p_word
        bigram *= (pairs.count((before, word)) + p_word) / (
            sum(pair[0] == before for pair in pairs) + 1
        )
    return unigram, bigram, (table.count(caption) + bigram) / (len(table) + 1)


def some_captions(seed: int, vocab_size: int) -> list[Tokens]:
    rng = np.random.default_rng(seed)
    return [
        (*rng.integers(1, vocab_size, rng.integers(0, 4)).tolist(), EOS)
        for _ in range(rng.integers(2, 12))
    ]


@pytest.mark.parametrize("seed", range(20))
def test_every_caption_is_scored_by_the_others(seed: int) -> None:
    captions = some_captions(seed, 5)
    nats = []
    for number, caption in enumerate(captions):
        others = captions[:number] + captions[number + 1 :]
        nats.append([-log(p) / len(caption) for p in plain_probabilities(caption, others, 5)])
    found = caption_losses(Counter(captions), 5)
    assert list(found.values()) == pytest.approx(np.mean(nats, axis=0).tolist(), rel=1e-12)


def test_captions_of_batches() -> None:
    """Start tokens and padding, of captions and of batches, do not count."""
    tokens_BL = torch.tensor([[1, 4, 2, 0], [1, 5, 4, 2], [1, 4, 2, 0], [1, 6, 6, 6]])
    mask_BL = torch.tensor(
        [[True, True, True, False], [True] * 4, [True, True, True, False], [True] * 4]
    )
    baseline = CaptionFrequencies(7)
    baseline.add(
        {"tokens_BL": tokens_BL, "token_mask_BL": mask_BL},
        torch.tensor([False, False, False, True]),
    )
    expected = caption_losses({(4, 2): 2, (5, 4, 2): 1}, 7)
    found = baseline.values()
    assert found["blind_loss"] == min(expected.values())
    assert [found[f"blind_{name}_loss"] for name in expected] == list(expected.values())


@pytest.mark.parametrize("seed", range(3))
def test_classes(seed: int) -> None:
    labels_N = np.random.default_rng(seed).integers(0, 4, 30)
    baseline = ClassFrequencies(6)
    for part in np.split(labels_N, 3):
        rows = torch.from_numpy(np.append(part, 5))
        baseline.add({"labels_B": rows}, torch.arange(len(rows)) == len(part))
    nats = []
    for number, label in enumerate(labels_N):
        others = np.delete(labels_N, number)
        nats.append(-log(((others == label).sum() + ADDED) / (len(others) + 6 * ADDED)))
    assert baseline.values()["blind_loss"] == pytest.approx(np.mean(nats), rel=1e-12)
    assert baseline.values()["blind_accuracy"] == np.bincount(labels_N).max() / 30


@pytest.mark.parametrize("seed", range(3))
def test_the_mean_picture(seed: int) -> None:
    """The task's own loss of the mean of all other pictures, with a mask of each picture's own; the padded row is NaN."""
    generator = torch.Generator().manual_seed(seed)
    pictures_NPQ = torch.randn(9, 4, 3, generator=generator)
    mask_NP = torch.rand(9, 4, generator=generator) < 0.6
    baseline = MeanPicture(lambda images_BCHW: images_BCHW.flatten(1).unflatten(1, (4, 3)))
    for rows in ([0, 1, 2, 3], [4, 5, 6, 7], [8, 8, 8, 8]):
        images = pictures_NPQ[rows].view(4, 3, 2, 2).clone()
        is_padding = torch.tensor([False] + [rows[0] == 8] * 3)
        images[is_padding] = torch.nan
        baseline.add({"images_BCHW": images, "mask_BP": mask_NP[rows]}, is_padding)
    losses = []
    for number in range(9):
        mean = pictures_NPQ[torch.arange(9) != number].double().mean(dim=0)
        one = slice(number, number + 1)
        losses.append(
            float(reconstruction_loss(mean[None], pictures_NPQ[one].double(), mask_NP[one]))
        )
    assert baseline.values()["blind_loss"] == pytest.approx(np.mean(losses), rel=1e-6)


@pytest.mark.parametrize("baseline", [CaptionFrequencies(7), ClassFrequencies(3)])
def test_nothing_is_said_of_too_few_examples(
    baseline: CaptionFrequencies | ClassFrequencies,
) -> None:
    assert baseline.values() == {}


def test_what_is_said() -> None:
    said = "\n".join(verdict_lines({"loss": 0.3}, {"blind_loss": 0.7, "shuffled_loss": 1.2}))
    assert (
        "is below that of" in said
        and "looks at its pictures" in said
        and "0.7000" in said
        and "1.2000" in said
    )
    said = "\n".join(verdict_lines({"loss": 6.124}, {"blind_loss": 5.782, "shuffled_loss": 6.126}))
    assert "the loss is not yet below that of fixed guesses" in said and "hardly looks" in said
    assert verdict_lines({"loss": 1.0}, {}) == []
    assert (
        "accuracy 0.4000"
        in verdict_lines({"loss": 1.0}, {"blind_loss": 2.0, "blind_accuracy": 0.4})[0]
    )
