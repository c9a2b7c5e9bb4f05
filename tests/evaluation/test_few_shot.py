"""Splits, interval and probe against plain re-computations; fine-tuning learns what frozen random features do not show."""

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.errors import DataError
from data.examples.transforms import train_image
from evaluation.encoder import encoder_of, features
from evaluation.features import compute
from evaluation.few_shot import (
    Shots,
    classifier_accuracy,
    few_shot_probe,
    fine_tune,
    split,
    starting_classifier,
    unit_rows,
)
from evaluation.options import FeatureOptions
from evaluation.sources import Arrays, Augmentation
from models.adapters import adapters
from tests.evaluation.commands import evaluate
from tests.evaluation.digits import digits, save_digits
from tests.evaluation.tiny_models import opened_captioner, pictures
from tests.trainer.trained_runs import recipe, trained
from trainer.weights.open_model import open_model


def test_a_split_has_k_of_every_class_and_more_shots_contain_fewer() -> None:
    labels = digits()[1]
    chosen = {shots: split(labels, shots, 3) for shots in (2, 5)}
    for shots, rows in chosen.items():
        assert np.bincount(labels[rows]).tolist() == [shots] * 10 and len(set(rows)) == 10 * shots
    assert set(chosen[2]) < set(chosen[5])
    assert set(split(labels, 5, 4)) != set(chosen[5])
    with pytest.raises(DataError, match=r"class 1 has 2 training examples, fewer than 3 shots"):
        split(np.array([0, 0, 0, 1, 1]), 3, 0)


def test_the_interval_is_students() -> None:
    found = Shots(5, (0.5, 0.6, 0.7))
    assert found.mean == pytest.approx(0.6)
    assert found.half_width == pytest.approx(4.302652729911275 * 0.1 / 3**0.5)  # t with 2 degrees of freedom
    assert np.isnan(Shots(5, (0.5,)).half_width)


def test_the_probe_is_regression_on_unit_rows() -> None:
    """scikit-learn's, with DP-Cap's ridge, on rows that are centred and of length one."""
    from sklearn.linear_model import LogisticRegression

    x, y, x_test, y_test = digits()
    x, x_test = x * np.linspace(1, 50, len(x))[:, None] + 3, x_test - 1  # each row's own scale and offset do not matter
    [found] = few_shot_probe((x, y), (x_test, y_test), 10, [5], num_splits=2)
    for number, accuracy in enumerate(found.accuracies):
        rows = split(y, 5, number)
        z = unit_rows(x[rows])
        assert np.linalg.norm(z, axis=1) == pytest.approx(1) and z.mean(1) == pytest.approx(0)
        theirs = LogisticRegression(C=1 / 0.0025, fit_intercept=False, tol=1e-8, max_iter=5000).fit(z, y[rows])
        assert accuracy == pytest.approx(theirs.score(unit_rows(x_test), y_test), abs=0.004)


def test_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    train, test = save_digits(tmp_path)
    record = evaluate(monkeypatch, capsys, "few-shot", "--train", train, "--test", test, "--shots", "1", "10")
    one, ten = (record["scalars"][f"probe/{k}-shot/accuracy"] for k in (1, 10))
    assert 0.4 < one < ten and ten > 0.85 and record["scalars"]["probe/10-shot/interval_half_width"] > 0
    assert len(record["details"]["accuracies"]["10"]) == 3 and record["formal_guarantee"] is False
    with pytest.raises(ValueError, match="fine-tuning needs --checkpoint"):
        evaluate(monkeypatch, capsys, "few-shot", "--train", train, "--test", test, "--method", "finetune")


def test_whole_fine_tuning() -> None:
    """Every part moves, by less the deeper it lies; the encoder that was given stays; coloured pictures are told apart."""
    encoder = opened_captioner().model.encoder
    before = {name: value.clone() for name, value in encoder.state_dict().items()}
    images, labels = pictures(24)
    source = Arrays("here", images, labels)
    options: dict[str, Any] = {
        "epochs": 15, "batch_size": 8, "micro_batch_size": 3, "base_lr": 0.1, "layer_decay": 0.3, "warmup_epochs": 1,
        "weight_decay": 0.0,
    }  # fmt: skip
    model = fine_tune(encoder, source, np.arange(12), 3, **options)
    assert all(torch.equal(value, before[name]) for name, value in encoder.state_dict().items())
    moved = {
        name: float((value.detach() - before[name]).abs().mean())
        for name, value in model.encoder.named_parameters() if value.shape == before[name].shape
    }  # fmt: skip
    depth = ["patch_embedding.weight", "blocks.0.mlp.up.weight", "blocks.1.mlp.up.weight", "norm.weight"]
    assert all(0 < moved[a] < moved[b] for a, b in itertools.pairwise(depth))
    assert classifier_accuracy(model, source, None, FeatureOptions()) > 0.7
    again = fine_tune(encoder, source, np.arange(12), 3, **options)
    assert torch.equal(again.head.weight, model.head.weight)


def test_fine_tuning_names_an_image_that_it_cannot_use() -> None:
    images, labels = pictures(4)
    with pytest.raises(DataError, match="no label"):
        fine_tune(opened_captioner().model.encoder, Arrays("here", images, labels - 1), np.arange(4), 3, epochs=1)


def adapted(tmp_path: Path) -> Path:
    """A run of a classifier with low-rank adapters that do something, and its pictures."""
    shape = 'encoder_depth = 2, encoder_width = 32, patch_size = 4, num_classes = 3, trainable = "adapters", adapter_rank = 2'
    trained(tmp_path / "run", recipe("classifier", shape))
    images, labels = pictures(24)
    np.savez(tmp_path / "pictures.npz", images=images, labels=labels)
    return tmp_path / "run"


@torch.no_grad()
def test_fine_tuning_starts_from_what_adapters_made(tmp_path: Path) -> None:
    """Their correction is in the weights, all of which are trained: the start computes the same."""
    encoder = encoder_of(open_model(adapted(tmp_path)).model)
    assert any(adapters(encoder))
    start = starting_classifier(encoder, 3)
    images = torch.randn(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(start.encoder(images), encoder(images), atol=1e-5, rtol=1e-5)
    plain = {name: p for name, p in encoder.named_parameters() if "adapter" not in name}
    assert {name for name, _ in start.encoder.named_parameters()} == plain.keys()
    changed = [name for name, p in start.encoder.named_parameters() if not torch.equal(p, plain[name])]
    assert changed and all(name.startswith("blocks.") and ".attention." in name for name in changed)
    assert all(p.requires_grad for p in start.parameters())


def test_fine_tuning_an_encoder_with_adapters_by_command(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run, source = adapted(tmp_path), f"arrays:{tmp_path}/pictures.npz"
    told = ["few-shot", "--checkpoint", str(run), "--train", source, "--test", source, "--method", "finetune"]
    record = evaluate(monkeypatch, capsys, *told, "--shots", "2", "--num_splits", "2", "--epochs", "2")
    assert 0 <= record["scalars"]["finetune/2-shot/accuracy"] <= 1
    assert "fine-tuning at 2 shots has not converged" in record["notes"][0]  # two epochs of it
    with pytest.raises(ValueError, match="--image_size is for --method probe"):
        evaluate(monkeypatch, capsys, *told, "--image_size", "32")


def test_the_probe_on_random_crops(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Every epoch has features of its own, of the images' own crops."""
    run, source = adapted(tmp_path), f"arrays:{tmp_path}/pictures.npz"
    told = [
        "linear-probe",
        "--train",
        source,
        "--test",
        source,
        "--method",
        "lars",
        "--epochs",
        "3",
        "--checkpoint",
        str(run),
    ]
    plain, augmented, again = (
        evaluate(monkeypatch, capsys, *told, *more) for more in ([], ["--augment"], ["--augment"])
    )
    assert augmented["details"]["lars"]["augmented"] and not plain["details"]["lars"]["augmented"]
    assert augmented["scalars"] == again["scalars"]
    opened = open_model(run)
    images = Arrays("here", *pictures(24))
    how = FeatureOptions(features="pooled", num_blocks=1, image_size=None)
    first, second = (compute(opened.model, images, how, range(6), Augmentation(0, epoch)) for epoch in (0, 1))
    expected = [train_image(i.image, 16, Augmentation(0, 1).key(k)) for k, i in enumerate(images.read(range(6)))]
    by_hand = features(opened.model, torch.from_numpy(np.stack(expected)), how).detach()
    assert second.values_ND == pytest.approx(by_hand.numpy(), abs=1e-6) and not np.allclose(
        first.values_ND, second.values_ND
    )
    monkeypatch.chdir(tmp_path)
    train, test = save_digits(tmp_path)
    with pytest.raises(ValueError, match="--augment needs --checkpoint and images"):
        evaluate(monkeypatch, capsys, "linear-probe", "--train", train, "--test", test, "--method", "lars", "--augment")
