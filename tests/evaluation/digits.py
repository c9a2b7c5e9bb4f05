"""scikit-learn's digits: 1,200 for training, 597 for tests."""

from functools import cache
from pathlib import Path

import numpy as np
from sklearn.datasets import load_digits


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
