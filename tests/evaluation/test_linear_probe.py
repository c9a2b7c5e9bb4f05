"""Probes against scikit-learn and against a float64 loop of the published rule; digits; what the command writes."""

import json
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from evaluation.linear_probe import cross_validated_regression, fold_of, lars_probe, regression
from tests.evaluation.commands import evaluate
from tests.evaluation.digits import digits, save_digits

TRUST = 0.03


@pytest.mark.parametrize("ridge", [1e-1, 1e-3])
def test_regression_is_that_of_scikit_learn(ridge: float) -> None:
    from sklearn.linear_model import LogisticRegression

    x, y, x_test, _ = digits()
    x, y = x[:400], y[:400]
    head = regression(x, y, 10, ridge=ridge)
    scale = np.where(x.std(0) > 0, x.std(0), np.inf)
    theirs = LogisticRegression(C=1 / (ridge * len(x)), tol=1e-8, max_iter=2000).fit((x - x.mean(0)) / scale, y)
    assert head.weight_LD.numpy() == pytest.approx(theirs.coef_, abs=2e-4)
    expected = theirs.decision_function((x_test - x.mean(0)) / scale)
    found = head.scores(x_test)
    assert found - found.mean(1, keepdims=True) == pytest.approx(expected - expected.mean(1, keepdims=True), abs=2e-3)


def test_the_ridge_is_chosen_on_held_out_folds() -> None:
    """Labels that are noise want all the ridge there is; validation accuracies are those of plain fits."""
    x, y, _, _ = digits()
    x, y = x[:200], y[:200]
    _, validation = cross_validated_regression(x, y, 10, ridges=(1.0, 1e-3), num_folds=4)
    fold = fold_of(y, 4, 0)
    for ridge, found in validation.items():
        right = [regression(x[fold != k], y[fold != k], 10, ridge=ridge).scores(x[fold == k]).argmax(1) == y[fold == k]
                 for k in range(4)]  # fmt: skip
        assert found == pytest.approx(np.concatenate(right).mean(), abs=0.011)  # a start from another fit: one of 200
    counts = np.array([[np.sum((fold == k) & (y == label)) for k in range(4)] for label in range(10)])
    assert (counts.max(1) - counts.min(1)).max() <= 1


def released_lars(x_of_epoch: list[np.ndarray], y: np.ndarray, x_test: np.ndarray, weight: np.ndarray, lr: float,
                  warmup: int) -> np.ndarray:  # fmt: skip
    """Scores of the test set after full-batch epochs, in float64, by what the masked autoencoder's released probe does.

    BatchNorm without affine; its LARS, which scales the gradient of the weight by trust |w| / |g| and not that of the bias, adds
    both to momenta and takes the rate times the momentum off; its schedule, which is set before each step from the epochs past.
    """
    weight, bias, num_classes = weight.astype(float), np.zeros(len(weight)), len(weight)
    momentum_w, momentum_b, epochs = np.zeros_like(weight), np.zeros_like(bias), len(x_of_epoch)
    running_mean, running_var = np.zeros(x_test.shape[1]), np.ones(x_test.shape[1])
    for epoch, x in enumerate(x_of_epoch):
        z = (x - x.mean(0)) / np.sqrt(x.var(0) + 1e-6)
        scores = z @ weight.T + bias
        p = np.exp(scores - scores.max(1, keepdims=True))
        error = (p / p.sum(1, keepdims=True) - np.eye(num_classes)[y]) / len(x)
        grad_w, grad_b = error.T @ z, error.sum(0)
        rate = lr * epoch / warmup if epoch < warmup else lr * 0.5 * (
            1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))  # fmt: skip
        momentum_w = 0.9 * momentum_w + TRUST * np.linalg.norm(weight) / np.linalg.norm(grad_w) * grad_w
        momentum_b = 0.9 * momentum_b + grad_b
        weight, bias = weight - rate * momentum_w, bias - rate * momentum_b
        running_mean = 0.9 * running_mean + 0.1 * x.mean(0)
        running_var = 0.9 * running_var + 0.1 * x.var(0, ddof=1)
    return (x_test - running_mean) / np.sqrt(running_var + 1e-6) @ weight.T + bias


@pytest.mark.parametrize("augmented", [False, True])
def test_lars_follows_the_released_rule(augmented: bool) -> None:
    """Also with other features of the same examples in every epoch."""
    import torch

    x, y, x_test, y_test = digits()
    rng = np.random.default_rng(0)
    x_of_epoch = [x + 0.02 * rng.standard_normal(x.shape) * augmented for _ in range(20)]
    options: dict[str, Any] = {"epochs": 20, "base_lr": 0.5, "warmup_epochs": 4, "trust_coefficient": TRUST}
    epochs = (lambda epoch: (x_of_epoch[epoch], y)) if augmented else None
    found = lars_probe((x, y), (x_test, y_test), 10, **options, train_of=epochs)
    start = torch.empty(10, 64).normal_(std=0.01, generator=torch.Generator().manual_seed(0)).numpy()
    expected = released_lars(x_of_epoch, y, x_test, start, 0.5 * 1200 / 256, 4)
    assert (found.batch_size, found.peak_lr) == (1200, 0.5 * 1200 / 256)
    assert found.head.scores(x_test) == pytest.approx(expected, abs=2e-3)
    assert found.last == np.mean(expected.argmax(1) == y_test) and len(found.accuracies) == 20
    assert found.best == found.accuracies[found.best_epoch - 1] == max(found.accuracies)


def test_a_regression_says_when_it_has_not_converged() -> None:
    x, y, _, _ = digits()
    assert regression(x, y, 10, ridge=1e-3).converged
    assert not regression(x, y, 10, ridge=1e-3, max_iterations=2).converged


def test_lars_and_lbfgs_agree_on_digits(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = save_digits(tmp_path)
    common = ("linear-probe", "--train", train, "--test", test, "--output", str(tmp_path / "out"), "--num_folds", "3")
    record = evaluate(monkeypatch, capsys, *common, "--trust_coefficient", "0.03")
    scalars = record["scalars"]
    assert scalars["lbfgs_accuracy"] > 0.94
    assert abs(scalars["lars_accuracy_last_epoch"] - scalars["lbfgs_accuracy"]) <= 0.01
    assert scalars["lars_accuracy_best_epoch"] >= scalars["lars_accuracy_last_epoch"] and not record["notes"]
    assert record["formal_guarantee"] is False and record["released_with_differential_privacy"] == []
    assert [(use["role"], use["num_examples"]) for use in record["data"]] == [("train", 1200), ("test", 597)]
    folder = tmp_path / "out/private/evaluation"
    assert stat.S_IMODE((tmp_path / "out/private").stat().st_mode) == 0o700
    [file] = folder.glob("linear-probe-step-00000000-*.json")
    assert json.loads(file.read_text()) == record
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["private"]
    [line] = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["linear-probe/lbfgs_accuracy"] == scalars["lbfgs_accuracy"]
    assert list((folder / "tensorboard").iterdir())


def test_public_data_leave_the_private_part_and_few_steps_are_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    train, test = save_digits(tmp_path, 300)
    told = ("linear-probe", "--train", train, "--test", test, "--output", str(tmp_path / "out"), "--num_folds", "2")
    record = evaluate(monkeypatch, capsys, *told, "--epochs", "2", "--data_is_public")
    assert "LARS has hardly converged" in record["notes"][0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["evaluation"] and record["data_is_public"]
    assert record["formal_guarantee"] is False


@pytest.mark.parametrize(
    ("arguments", "match"),
    [
        (["--train", "folder:x", "--test", "features:y"], "--train names images: give --checkpoint"),
        (["--train", "features:/nowhere", "--test", "features:y"], "neither a cache of features nor"),
        (["--train", "features:x"], "arguments are required: --test"),
        (["--train", "folder:x", "--test", "folder:y", "--checkpoint", "/nowhere"], "neither a checkpoint nor a run"),
    ],
)
def test_refused(
    arguments: list[str], match: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[Any]
) -> None:
    with pytest.raises(ValueError, match=match) as caught:
        evaluate(monkeypatch, capsys, "linear-probe", *arguments)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]
