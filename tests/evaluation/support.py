"""Scikit-learn's digits, labelled pictures, and what ledgers say was spent."""

import json
import math
from functools import cache
from pathlib import Path

import numpy as np
from scipy import stats
from sklearn.datasets import load_digits

from privacy.plan.releases import SENSITIVITY_SLACK

ROOT = Path(__file__).resolve().parents[2]


@cache
def digits() -> tuple[np.ndarray, np.ndarray, np.ndarray, np.ndarray]:
    """Rows centred by the public middle grey and scaled to about unit length."""
    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    x, y = (x[order] / 16 - 0.3) / 3, y[order]
    return x[:1200], y[:1200], x[1200:], y[1200:]


def save_digits(folder: Path, count: int = 1200) -> tuple[str, str]:
    """As sources of features for --train (the first `count`) and --test."""
    x, y, x_test, y_test = digits()
    np.savez(folder / "train.npz", features=x[:count], labels=y[:count])
    np.savez(folder / "test.npz", features=x_test, labels=y_test)
    return f"features:{folder}/train.npz", f"features:{folder}/test.npz"


def pictures(
    count: int, *, num_classes: int = 3, side: int = 16, seed: int = 0
) -> tuple[np.ndarray, np.ndarray]:
    """(N, side, side, 3) uint8 and labels: each class has a colour of its own, plus noise."""
    rng = np.random.default_rng(seed)
    labels_N = np.arange(count) % num_classes
    colours = np.random.default_rng(7).integers(40, 216, (num_classes, 3))
    noise = rng.integers(-40, 40, (count, side, side, 3))
    return np.clip(colours[labels_N][:, None, None] + noise, 0, 255).astype(np.uint8), labels_N


def save_pictures(folder: Path, count: int) -> str:
    """As a source of labelled images."""
    images, labels = pictures(count)
    np.savez(folder / "pictures.npz", images=images, labels=labels)
    return f"arrays:{folder}/pictures.npz"


def exact_delta(mu: float, epsilon: float) -> float:
    return float(
        stats.norm.cdf(mu / 2 - epsilon / mu)
        - math.exp(epsilon) * stats.norm.cdf(-mu / 2 - epsilon / mu)
    )


def spent(ledger: Path) -> float:
    """mu of all releases of all intents, as it is charged: with what rounding may add to a sensitivity."""
    records = [json.loads(line) for line in ledger.read_text().splitlines()]
    releases = [
        release
        for record in records
        if record["type"] == "intent"
        for release in record["releases"]
    ]
    return (1 + SENSITIVITY_SLACK) * math.sqrt(
        sum((r["sensitivity"] / r["std"]) ** 2 for r in releases)
    )
