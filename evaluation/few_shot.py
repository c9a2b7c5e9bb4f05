"""Few-shot classification, without privacy: K examples per class, S random splits, mean and 95 % interval.

The probe follows DP-Cap's evaluation (Sander et al. 2024, https://arxiv.org/abs/2403.02506): every feature vector is centred and
brought to length 1, then multinomial regression without intercept, ridge 0.0025 / n.
"""

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from scipy import stats

from data.errors import DataError
from evaluation.features import device_of, load_inputs
from evaluation.linear_probe import regression
from evaluation.options import FewShotOptions
from evaluation.results import Results

DPCAP_RIDGE = 0.0025


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and half of the 95 % interval of the mean (Student's t); none for one value."""
    count = len(values)
    half = (
        stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count)
        if count > 1
        else None
    )
    return {"mean": float(np.mean(values)), "half_width": None if half is None else float(half)}


def split(labels_N: np.ndarray, shots: int, seed: int) -> np.ndarray:
    """Rows of `shots` random examples of every class that occurs, (K * classes,); more shots of a seed contain fewer ones.

    Raises:
        DataError: a class has fewer examples.
    """
    rng, chosen = np.random.default_rng(seed), []
    labels, counts = np.unique(labels_N, return_counts=True)
    if few := int((counts < shots).sum()):
        raise DataError(
            f"{few} of {len(labels)} classes have fewer than {shots} training examples: --shots {shots} needs as many of each"
        )
    for label in labels:
        rows = np.flatnonzero(labels_N == label)
        chosen.append(rng.permutation(rows)[:shots])
    return np.concatenate(chosen)


def unit_rows(x_ND: np.ndarray) -> np.ndarray:
    """Each row centred and of length 1; constant rows become zero."""
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
    """Test accuracies of DP-Cap's regression on features, one per split, by the number of shots.

    Args:
        train, test: (features (N, D), labels (N,)).
        shots: each K.
        seed: of the first split; the others follow.

    Raises:
        DataError: a class with too few examples.
    """
    x_ND, y_N = unit_rows(train[0]), train[1]
    x_test_ND = unit_rows(test[0])
    accuracies: dict[int, list[float]] = {count: [] for count in shots}
    for count, own in accuracies.items():
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
            own.append(head.accuracy(x_test_ND, test[1]))
    return accuracies


def few_shot(options: FewShotOptions) -> Results | None:
    """The command; see its options."""
    inputs = load_inputs(options, train=options.train, test=options.test)
    if inputs is None:
        return None
    measured = few_shot_probe(
        inputs.features["train"].usable(),
        inputs.features["test"].usable(),
        inputs.num_classes(),
        options.shots,
        num_splits=options.num_splits,
        seed=options.seed,
        device=device_of(options),
    )
    scalars: dict[str, float] = {}
    table: list[dict[str, Any]] = []
    for count, accuracies in measured.items():
        mean, half = interval(accuracies).values()  # the test set counts as fixed
        row: dict[str, Any] = {"shots": count, "test accuracy": mean}
        scalars[f"probe/{count}-shot/accuracy"] = float(np.mean(accuracies))
        if half:  # splits that take all examples are equal, and say nothing of others
            row["95 % interval"] = f"+- {half:.4f}"
            scalars[f"probe/{count}-shot/interval_half_width"] = half
        table.append(row)
    details = {
        "num_splits": options.num_splits,
        "seed": options.seed,
        "accuracies": {str(k): v for k, v in measured.items()},
    }
    return Results("few-shot", scalars, inputs.uses(), inputs.model, table, details)
