"""Private heads on scikit-learn's digits (pixels as features) against non-private ones, as a function of epsilon.

    python benchmarks/results/private_heads/private_heads.py --json

1,200 training and 597 test images. A public, data-independent scaling (middle grey subtracted) is all that the features see.
Options of the methods were chosen on these public data by hand; a private data set has to take them from elsewhere.
`dp-sgd` is the trainer's own mechanism on the same features (benchmarks/results/private_heads/dp_sgd_head.py).
"""

import argparse
import json
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[3]))

import numpy as np
from sklearn.datasets import load_digits

from benchmarks.results.private_heads.dp_sgd_head import SgdOptions, sgd_plan, train_sgd_head
from evaluation.linear_probe import cross_validated_regression, lars_probe
from evaluation.private_head.methods import accuracy
from evaluation.private_head.rows import Rows
from evaluation.private_head.run import spent_in, train_head, without_noise
from privacy.step.folder import environment

OPTIONS: dict[str, dict[str, Any]] = {
    "dp-ls": {},
    "dp-newton": {"ridge": 0.05},
    "dp-fc": {"max_grad_norm": 0.3, "num_steps": 5},
    "dp-fc-bce": {"max_grad_norm": 0.3, "num_steps": 5},
    "dp-gd": {},
}
SGD = SgdOptions()
DELTA = 1e-5
TRAIN = 1200
EPSILONS = (0.1, 0.2, 0.5, 1.0, 2.0, 5.0, 10.0)
LARS_TRUST = 0.03


class HeadData(NamedTuple):
    """Training examples, and test features with labels."""

    rows: Rows
    x_test_ND: np.ndarray
    y_test_N: np.ndarray
    num_classes: int


def digits() -> HeadData:
    """Rows of about unit length."""
    x_ND, y_N = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x_ND))
    x_ND, y_N = (x_ND[order] / 16 - 0.3) / 3, y_N[order]
    return HeadData(Rows(x_ND[:TRAIN], y_N[:TRAIN]), x_ND[TRAIN:], y_N[TRAIN:], 10)


def examples(data: HeadData) -> tuple[np.ndarray, np.ndarray]:
    """Features (N, D) and labels (N,) for training."""
    return data.rows.features_ND[:], data.rows.labels_N


def by_sgd(data: HeadData, repeats: int) -> tuple[list[dict[str, Any]], float]:
    """Rows as `measure` has them, with sigma; and the accuracy of the same without noise."""
    rows = []
    for epsilon in EPSILONS:
        plan = sgd_plan(data.rows.num_examples, SGD, epsilon, DELTA)
        assert plan.epsilon_planned is not None and plan.epsilon_planned <= epsilon
        weights = [train_sgd_head(*examples(data), data.num_classes, SGD, plan) for _ in range(repeats)]
        scores = [accuracy(weights_LD, data.x_test_ND, data.y_test_N) for weights_LD in weights]
        mean, std = float(np.mean(scores)), float(np.std(scores, ddof=1))
        rows.append({
            "method": "dp-sgd", "epsilon": epsilon, "accuracy": mean, "std": std,
            "noise_multiplier": plan.noise_multiplier, "epsilon_planned": plan.epsilon_planned,
        })  # fmt: skip
    clean_LD = train_sgd_head(*examples(data), data.num_classes, SGD, plan, noisy=False)
    return rows, accuracy(clean_LD, data.x_test_ND, data.y_test_N)


def measure(repeats: int, methods: Sequence[str]) -> dict[str, Any]:
    """The record."""
    start, data = time.perf_counter(), digits()
    test = data.x_test_ND, data.y_test_N
    rows: list[dict[str, Any]] = []
    over = 0.0
    chosen = {method: options for method, options in OPTIONS.items() if method in methods}
    with tempfile.TemporaryDirectory() as folder:
        for method, options in chosen.items():
            for epsilon in EPSILONS:
                heads = [
                    train_head(
                        data.rows,
                        data.num_classes,
                        method,
                        epsilon=epsilon,
                        delta=DELTA,
                        options=options,
                        output=Path(folder) / f"{method}-{epsilon:g}-{repeat}",
                    )
                    for repeat in range(repeats)
                ]
                scores = [accuracy(head.weights_LD, *test) for head in heads]
                mean, std = float(np.mean(scores)), float(np.std(scores, ddof=1))
                rows.append({"method": method, "epsilon": epsilon, "accuracy": mean, "std": std})
                over = max(over, *((head.epsilon or float("inf")) / epsilon for head in heads))
        num_heads, together, delta = spent_in(Path(folder))
    clean = {
        method: accuracy(without_noise(data.rows, data.num_classes, method, options), *test)
        for method, options in chosen.items()
    }
    if "dp-sgd" in methods:
        sgd_rows, clean["dp-sgd"] = by_sgd(data, repeats)
        rows += sgd_rows
    head, validation = cross_validated_regression(*examples(data), 10)
    lars = lars_probe(examples(data), test, 10, trust_coefficient=LARS_TRUST)
    regression = head.accuracy(data.x_test_ND, data.y_test_N)
    facts = environment()
    return {
        "benchmark": "private_heads",
        "data": "scikit-learn digits, public",
        "num_train": TRAIN,
        "num_test": len(data.y_test_N),
        "delta": DELTA,
        "repeats": repeats,
        "options": {method: chosen.get(method, asdict(SGD)) for method in methods},
        "accuracy": rows,
        "without_noise": clean,
        "without_privacy": {
            "regression_lbfgs": regression,
            "ridge": max(validation, key=lambda r: (round(validation[r], 12), r)),
            "lars_last_epoch": lars.last,
            "lars_best_epoch": lars.best,
            "lars_trust_coefficient": LARS_TRUST,
        },
        "largest_epsilon_over_target": over,
        "all_heads_together_but_dp_sgd": {
            "num_heads": num_heads,
            "epsilon": together,
            "delta": delta,
        },
        "seconds": round(time.perf_counter() - start, 1),
        "command": "python benchmarks/results/private_heads/private_heads.py " + " ".join(sys.argv[1:]),
        "commit": facts["commit"],
        "modified": facts["modified"],
        "packages": facts["packages"],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=10, help="heads per method and epsilon")
    parser.add_argument("--methods", nargs="+", choices=(*OPTIONS, "dp-sgd"), default=[*OPTIONS, "dp-sgd"])
    parser.add_argument("--json", action="store_true", help="print the whole record as one JSON object")
    options = parser.parse_args()
    record = measure(options.repeats, options.methods)
    if options.json:
        print(json.dumps(record))
        return
    for row in record["accuracy"]:
        print(f"{row['method']:10} epsilon {row['epsilon']:5g}: {row['accuracy']:.3f} +- {row['std']:.3f}")
    print(f"without privacy: {record['without_privacy']}")


if __name__ == "__main__":
    main()
