"""Few-shot classification, without privacy: K examples per class, S splits, mean and interval.

The probe follows DP-Cap's evaluation (Sander et al. 2024, https://arxiv.org/abs/2403.02506): every
feature vector is centred and brought to length 1, then multinomial regression without intercept,
ridge 0.0025 / n.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from data.errors import DataError
from evaluation.command_options import FewShotOptions
from evaluation.features import device_of, load_inputs
from evaluation.linear_probe import regression
from evaluation.results import Results

DPCAP_RIDGE = 0.0025


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Returns the mean and half of its 95 % interval (Student's t), None for one value."""
    count = len(values)
    half_width = None
    if count > 1:
        quantile = stats.t.ppf(0.975, count - 1)
        half_width = float(quantile * np.std(values, ddof=1) / math.sqrt(count))
    return {"mean": float(np.mean(values)), "half_width": half_width}


def split(labels_N: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Returns rows of `shots` random examples of every class that occurs, (K * classes,).

    With equal seeds a split of more shots contains the split of fewer.

    Raises:
        DataError: a class has fewer examples.
    """
    rng = np.random.default_rng(seed)
    labels, counts = np.unique(labels_N, return_counts=True)
    num_small = int((counts < shots).sum())
    if num_small:
        raise DataError(
            f"{num_small} of {len(labels)} classes have fewer than {shots} training examples: "
            f"--shots {shots} needs as many of each"
        )
    rows = []
    for label in labels:
        rows_of_label = np.flatnonzero(labels_N == label)
        rows.append(rng.permutation(rows_of_label)[:shots])
    return np.concatenate(rows)


def unit_rows(x_ND: np.ndarray) -> np.ndarray:
    """Returns each row centred and of length 1; constant rows become zero."""
    x_ND = x_ND.astype(np.float64) - x_ND.mean(axis=1, keepdims=True, dtype=np.float64)
    length_N1 = np.linalg.norm(x_ND, axis=1, keepdims=True)
    return np.divide(x_ND, length_N1, out=np.zeros_like(x_ND), where=length_N1 > 1e-12)


def few_shot_probe(
    train: tuple[np.ndarray, np.ndarray],
    test: tuple[np.ndarray, np.ndarray],
    num_classes: int,
    shots: Sequence[int],
    *,
    num_splits: int = 3,
    seed: int = 0,
    device: torch.device | str = "cpu",
) -> dict[int, list[float]]:
    """Returns test accuracies of DP-Cap's regression by the number of shots, one per split.

    Args:
        train, test: (features (N, D), labels (N,)).
        shots: every K.
        seed: of the first split; later splits count on from it.

    Raises:
        DataError: a class with too few examples.
    """
    features_ND, y_N = train
    test_features_ND, y_test_N = test
    x_ND = unit_rows(features_ND)
    x_test_ND = unit_rows(test_features_ND)
    accuracies: dict[int, list[float]] = {count: [] for count in shots}
    for count, accuracies_of_splits in accuracies.items():
        for number in range(num_splits):
            rows = split(y_N, count, seed + number)
            head = regression(
                x_ND[rows],
                y_N[rows],
                num_classes,
                ridge=DPCAP_RIDGE / len(rows),
                device=device,
                standardise=False,
                intercept=False,
            )
            accuracies_of_splits.append(head.accuracy(x_test_ND, y_test_N))
    return accuracies


def few_shot(options: FewShotOptions) -> Results | None:
    """Runs the command `few-shot`; see its options."""
    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    train = inputs.features["train"].usable()
    test = inputs.features["test"].usable()
    accuracies_by_shots = few_shot_probe(
        train,
        test,
        inputs.num_classes(),
        options.shots,
        num_splits=options.num_splits,
        seed=options.seed,
        device=device_of(options),
    )
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for count, accuracies in accuracies_by_shots.items():
        # The interval is over splits of the training examples; the test set counts as fixed.
        spread = interval(accuracies)
        half_width = spread["half_width"]
        row: dict[str, Any] = {"shots": count, "test accuracy": spread["mean"]}
        scalars[f"probe/{count}-shot/accuracy"] = float(np.mean(accuracies))
        # Splits that take all examples are equal: a width of zero would promise too much.
        if half_width:
            row["95 % interval"] = f"+- {half_width:.4f}"
            scalars[f"probe/{count}-shot/interval_half_width"] = half_width
        table.append(row)
    # A key of JSON is text.
    accuracies_of_record = {str(count): shares for count, shares in accuracies_by_shots.items()}
    details = {
        "num_splits": options.num_splits,
        "seed": options.seed,
        "accuracies": accuracies_of_record,
    }
    return Results("few-shot", scalars, inputs.uses(), inputs.model, table, details)
