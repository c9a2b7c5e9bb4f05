"""Linear and few-shot probes against scikit-learn and a float64 loop of the published rule; digits; what the command writes."""

import json
import math
import stat
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression

from data.errors import DataError
from data.examples.transforms import train_image
from evaluation.command_options import FeatureOptions
from evaluation.encoder import features
from evaluation.features import compute
from evaluation.few_shot import few_shot_probe, interval, split, unit_rows
from evaluation.linear_probe import cross_validated_regression, fold_of, lars_probe, regression
from evaluation.sources import Arrays, Augmentation
from tests.evaluation.conftest import Evaluate
from tests.evaluation.support import digits, pictures, save_digits, save_pictures
from tests.trainer.trained_runs import recipe, trained
from trainer.weights.open_model import open_model

TRUST = 0.03


@pytest.mark.parametrize("ridge", [1e-1, 1e-3])
def test_regression_is_that_of_scikit_learn(ridge: float) -> None:
    x, y, x_test, _ = digits()
    x, y = x[:400], y[:400]
    head = regression(x, y, 10, ridge=ridge)
    assert head.converged and not regression(x, y, 10, ridge=ridge, max_iterations=2).converged
    scale = np.where(x.std(0) > 0, x.std(0), np.inf)
    theirs = LogisticRegression(C=1 / (ridge * len(x)), tol=1e-8, max_iter=2000).fit(
        (x - x.mean(0)) / scale, y
    )
    assert head.weight_LD.numpy() == pytest.approx(theirs.coef_, abs=2e-4)
    expected = theirs.decision_function((x_test - x.mean(0)) / scale)
    found = head.scores(x_test)
    assert found - found.mean(1, keepdims=True) == pytest.approx(
        expected - expected.mean(1, keepdims=True), abs=2e-3
    )


def test_the_ridge_is_chosen_on_held_out_folds() -> None:
    """Labels that are noise want all the ridge there is; validation accuracies are those of plain fits."""
    x, y, _, _ = digits()
    x, y = x[:200], y[:200]
    _, validation = cross_validated_regression(x, y, 10, ridges=(1.0, 1e-3), num_folds=4)
    fold = fold_of(y, 4, 0)
    for ridge, found in validation.items():
        right = [
            regression(x[fold != k], y[fold != k], 10, ridge=ridge).scores(x[fold == k]).argmax(1)
            == y[fold == k]
            for k in range(4)
        ]
        assert found == pytest.approx(
            np.concatenate(right).mean(), abs=0.011
        )  # a start from another fit: one of 200
    counts = np.array(
        [[np.sum((fold == k) & (y == label)) for k in range(4)] for label in range(10)]
    )
    assert (counts.max(1) - counts.min(1)).max() <= 1


def released_lars(
    x_of_epoch: list[np.ndarray],
    y: np.ndarray,
    x_test: np.ndarray,
    weight: np.ndarray,
    lr: float,
    warmup: int,
) -> np.ndarray:
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
        rate = (
            lr * epoch / warmup
            if epoch < warmup
            else lr * 0.5 * (1 + math.cos(math.pi * (epoch - warmup) / (epochs - warmup)))
        )
        momentum_w = (
            0.9 * momentum_w + TRUST * np.linalg.norm(weight) / np.linalg.norm(grad_w) * grad_w
        )
        momentum_b = 0.9 * momentum_b + grad_b
        weight, bias = weight - rate * momentum_w, bias - rate * momentum_b
        running_mean = 0.9 * running_mean + 0.1 * x.mean(0)
        running_var = 0.9 * running_var + 0.1 * x.var(0, ddof=1)
    return (x_test - running_mean) / np.sqrt(running_var + 1e-6) @ weight.T + bias


@pytest.mark.parametrize("augmented", [False, True])
def test_lars_follows_the_released_rule(augmented: bool) -> None:
    """Also with other features of the same examples in every epoch."""
    x, y, x_test, y_test = digits()
    rng = np.random.default_rng(0)
    x_of_epoch = [x + 0.02 * rng.standard_normal(x.shape) * augmented for _ in range(20)]
    options: dict[str, Any] = {
        "epochs": 20,
        "base_lr": 0.5,
        "warmup_epochs": 4,
        "trust_coefficient": TRUST,
    }
    epochs = (lambda epoch: (x_of_epoch[epoch], y)) if augmented else None
    found = lars_probe((x, y), (x_test, y_test), 10, **options, train_of=epochs)
    start = (
        torch.empty(10, 64).normal_(std=0.01, generator=torch.Generator().manual_seed(0)).numpy()
    )
    expected = released_lars(x_of_epoch, y, x_test, start, 0.5 * 1200 / 256, 4)
    assert (found.batch_size, found.peak_lr) == (1200, 0.5 * 1200 / 256)
    assert found.head.scores(x_test) == pytest.approx(expected, abs=2e-3)
    assert (
        found.accuracies[-1] == np.mean(expected.argmax(1) == y_test)
        and len(found.accuracies) == 20
    )


def test_lars_and_lbfgs_agree_on_digits(tmp_path: Path, run: Evaluate) -> None:
    train, test = save_digits(tmp_path)
    common = (
        "linear-probe",
        "--train",
        train,
        "--test",
        test,
        "--output",
        str(tmp_path / "out"),
        "--num_folds",
        "3",
    )
    record = run(*common, "--trust_coefficient", "0.03")
    scalars = record["scalars"]
    assert scalars["lbfgs_accuracy"] > 0.94
    assert abs(scalars["lars_accuracy_last_epoch"] - scalars["lbfgs_accuracy"]) <= 0.01
    assert (
        scalars["lars_accuracy_best_epoch"] >= scalars["lars_accuracy_last_epoch"]
        and not record["notes"]
    )
    assert (
        record["formal_guarantee"] is False and record["released_with_differential_privacy"] == []
    )
    assert [(use["role"], use["num_examples"]) for use in record["data"]] == [
        ("train", 1200),
        ("test", 597),
    ]
    folder = tmp_path / "out/private/evaluation"
    assert stat.S_IMODE((tmp_path / "out/private").stat().st_mode) == 0o700
    [file] = folder.glob("linear-probe-step-00000000-*.json")
    assert json.loads(file.read_text()) == record
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["private"]
    [line] = (folder / "metrics.jsonl").read_text().splitlines()
    assert json.loads(line)["linear-probe/lbfgs_accuracy"] == scalars["lbfgs_accuracy"]
    assert list((folder / "tensorboard").iterdir())


def test_public_data_leave_the_private_part_and_few_steps_are_named(
    tmp_path: Path, run: Evaluate
) -> None:
    train, test = save_digits(tmp_path, 300)
    told = (
        "linear-probe",
        "--train",
        train,
        "--test",
        test,
        "--output",
        str(tmp_path / "out"),
        "--num_folds",
        "3",
    )
    record = run(*told, "--epochs", "2", "--data_is_public")
    assert "LARS has hardly converged" in record["notes"][0]
    assert [path.name for path in (tmp_path / "out").iterdir()] == ["evaluation"] and record[
        "data_is_public"
    ]
    assert record["formal_guarantee"] is False


def test_the_probe_on_random_crops(tmp_path: Path, run: Evaluate) -> None:
    """Every epoch has features of its own, of the images' own crops."""
    trained(
        tmp_path / "run",
        recipe(
            "classifier", "encoder_depth = 1, encoder_width = 32, patch_size = 4, num_classes = 3"
        ),
    )
    source, (images, labels) = save_pictures(tmp_path, 24), pictures(24)
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
    ]
    told += ["--checkpoint", str(tmp_path / "run")]
    plain, augmented, again = (run(*told, *more) for more in ([], ["--augment"], ["--augment"]))
    assert augmented["details"]["lars"]["augmented"] and not plain["details"]["lars"]["augmented"]
    assert augmented["scalars"] == again["scalars"]
    opened, arrays, how = (
        open_model(tmp_path / "run"),
        Arrays("here", images, labels),
        FeatureOptions(),
    )
    first, second = (
        compute(opened.model, arrays, how, range(6), Augmentation(0, epoch)) for epoch in (0, 1)
    )
    expected = [
        train_image(i.image, 16, Augmentation(0, 1).key(k))
        for k, i in enumerate(arrays.read(range(6)))
    ]
    by_hand = features(opened.model, torch.from_numpy(np.stack(expected)), how).detach()
    assert second.values_ND == pytest.approx(by_hand.numpy(), abs=1e-6)
    assert not np.allclose(first.values_ND, second.values_ND)


def test_a_split_has_k_of_every_class_and_more_shots_contain_fewer() -> None:
    labels = digits()[1]
    chosen = {shots: split(labels, shots, 3) for shots in (2, 5)}
    for shots, rows in chosen.items():
        assert np.bincount(labels[rows]).tolist() == [shots] * 10 and len(set(rows)) == 10 * shots
    assert set(chosen[2]) < set(chosen[5])
    assert set(split(labels, 5, 4)) != set(chosen[5])
    with pytest.raises(DataError, match=r"1 of 2 classes have fewer than 3 .*: --shots 3 needs"):
        split(np.array([0, 0, 0, 1, 1]), 3, 0)


def test_the_probe_is_regression_on_unit_rows() -> None:
    """scikit-learn's, with DP-Cap's ridge, on rows that are centred and of length one."""
    x, y, x_test, y_test = digits()
    x, x_test = (
        x * np.linspace(1, 50, len(x))[:, None] + 3,
        x_test - 1,
    )  # each row's own scale and offset do not matter
    found = few_shot_probe((x, y), (x_test, y_test), 10, [5], num_splits=2)
    for number, accuracy in enumerate(found[5]):
        rows = split(y, 5, number)
        z = unit_rows(x[rows])
        assert np.linalg.norm(z, axis=1) == pytest.approx(1) and z.mean(1) == pytest.approx(0)
        theirs = LogisticRegression(C=1 / 0.0025, fit_intercept=False, tol=1e-8, max_iter=5000).fit(
            z, y[rows]
        )
        assert accuracy == pytest.approx(theirs.score(unit_rows(x_test), y_test), abs=0.004)
    three = interval([0.5, 0.6, 0.8])  # Student's t of two degrees of freedom: 4.303
    assert three["half_width"] == pytest.approx(
        4.3027 * np.std([0.5, 0.6, 0.8], ddof=1) / math.sqrt(3), rel=1e-4
    )
