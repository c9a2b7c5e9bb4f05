"""Private heads at the size of ImageNet: 1,281,167 examples, 768 features, 1,000 classes, random features.

    python benchmarks/heads.py --json      # six minutes on one core

* `whole`: DP-LS over all examples, which lie in memory in fp32.
* `fiftieth`: every method over a fiftieth of the examples; the time that they take is extrapolated, the rest is not. DP-Newton
  has 56 classes there (two chunks: a chunk's work is the same for all), and its Hessians' part is scaled to all of them.
* `newton_all_classes`: a DP-Newton step for all classes over 1,024 examples: its memory, and its time for noise and
  projection, which the number of examples does not change.
* `dense`: the largest difference from a dense computation for 2,000 examples and 12 classes, relative to the largest weight.
* `digits`: both kinds of DP-FC at equal epsilon on scikit-learn's digits (benchmarks/results/private_heads/private_heads.py).

Peak memory is that of the process so far, features included. SHARED_WITH says what else the machine did.
With --json one JSON object on stdout, everything else on stderr.
"""

import argparse
import json
import os
import platform
import resource
import sys
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

import numpy as np  # noqa: E402
from scipy.special import expit  # noqa: E402

from benchmarks.results.private_heads.private_heads import DELTA, digits  # noqa: E402
from evaluation.private_head.budget import Budget, Piece  # noqa: E402
from evaluation.private_head.methods import accuracy  # noqa: E402
from evaluation.private_head.rows import Rows  # noqa: E402
from evaluation.private_head.run import head_plan, make_method, without_noise  # noqa: E402
from privacy.noise import SystemNoise  # noqa: E402

N, D, L = 1_281_167, 768, 1000
SOME_CLASSES = 56
EPSILONS = (0.5, 1.0, 2.0, 8.0)
FC_OPTIONS: dict[str, dict[str, Any]] = {
    "dp-fc": {"max_grad_norm": 0.3, "num_steps": 5},
    "dp-fc-bce": {"max_grad_norm": 0.3, "num_steps": 5},
    "dp-fc-bce, lr 10": {"max_grad_norm": 0.3, "num_steps": 5, "lr": 10.0},
}


class Timed(Budget):
    """Notes how long noise and projections take, which do not depend on the number of examples."""

    seconds = 0.0

    def release_symmetric(self, name: str, matrices_KDD: np.ndarray, piece: Piece = Piece()) -> np.ndarray:  # noqa: B008
        start = time.perf_counter()
        released = super().release_symmetric(name, matrices_KDD, piece)
        self.seconds += time.perf_counter() - start
        return released


def peak_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def timed(rows: Rows, num_classes: int, method: str, **options: Any) -> dict[str, Any]:
    """One head with the noise of epsilon 8."""
    head = make_method(method, options)
    mu = 1 / head_plan(rows.num_examples, 8.0, None).noise_multiplier
    budget = Timed(head.statistics(num_classes), mu, SystemNoise())
    start = time.perf_counter()
    head.fit(rows, num_classes, budget)
    found = {
        "method": method, "options": options, "examples": rows.num_examples, "classes": num_classes,
        "seconds": time.perf_counter() - start, "noise_and_projection_seconds": budget.seconds, "peak_gib": peak_gib(),
    }  # fmt: skip
    print(found, os.getloadavg(), file=sys.stderr, flush=True)
    return found


def dense_newton(x_ND: np.ndarray, labels_N: np.ndarray, num_classes: int, num_steps: int) -> np.ndarray:
    """All at once, by the formulas of the publication."""
    x_ND = x_ND / np.maximum(1, np.linalg.norm(x_ND, axis=1))[:, None]
    weights_LD = np.zeros((num_classes, x_ND.shape[1]))
    for _ in range(num_steps):
        p_NL = expit(x_ND @ weights_LD.T)
        gradient_LD = (p_NL - np.eye(num_classes)[labels_N]).T @ x_ND
        for label in range(num_classes):
            hessian_DD = (x_ND * (p_NL * (1 - p_NL))[:, label, None]).T @ x_ND
            ridge_DD = 1e-3 * len(x_ND) * np.eye(x_ND.shape[1])
            weights_LD[label] -= np.linalg.solve(hessian_DD + ridge_DD, gradient_LD[label])
    return weights_LD


def measure() -> dict[str, Any]:
    """The record."""
    began, load = time.time(), os.getloadavg()
    rng = np.random.default_rng(0)
    features_ND = np.empty((N, D), dtype=np.float32)
    for start in range(0, N, 65536):
        rng.standard_normal(out=features_ND[start : start + 65536], dtype=np.float32)
    labels_N = rng.integers(0, L, N)

    part, own = features_ND[:2000].astype(np.float64), labels_N[:2000] % 12
    dense_LD = dense_newton(part, own, 12, 2)
    streamed_LD = without_noise(Rows(features_ND[:2000], own), 12, "dp-newton", {"num_steps": 2})
    difference = float(np.abs(streamed_LD - dense_LD).max() / np.abs(dense_LD).max())

    data, table = digits(), []
    for name, options in FC_OPTIONS.items():
        for epsilon in EPSILONS:
            scores = []
            for _ in range(20):
                head = make_method(name.partition(",")[0], options)
                mu = 1 / head_plan(data.rows.num_examples, epsilon, DELTA).noise_multiplier
                weights_LD = head.fit(data.rows, 10, Budget(head.statistics(10), mu, SystemNoise()))
                scores.append(accuracy(weights_LD, data.x_test_ND, data.y_test_N))
            mean, std = float(np.mean(scores)), float(np.std(scores, ddof=1))
            table.append({"head": name, "epsilon": epsilon, "accuracy": mean, "std": std, "repeats": len(scores)})
    count = N // 50
    fiftieth = Rows(features_ND[:count], labels_N[:count])
    few = Rows(features_ND[:count], labels_N[:count] % SOME_CLASSES)
    runs = [
        timed(few, SOME_CLASSES, "dp-newton"), timed(fiftieth, L, "dp-fc", num_steps=2),
        timed(fiftieth, L, "dp-fc-bce", num_steps=2), timed(fiftieth, L, "dp-gd"), timed(fiftieth, L, "dp-ls"),
    ]  # fmt: skip
    whole = timed(Rows(features_ND, labels_N), L, "dp-ls")
    all_classes = timed(Rows(features_ND[:1024], labels_N[:1024]), L, "dp-newton")

    summing = (runs[0]["seconds"] - runs[0]["noise_and_projection_seconds"]) * (N / count) * (L / SOME_CLASSES)
    extrapolated = {
        "newton_step_seconds": summing + all_classes["noise_and_projection_seconds"],
        "newton_step_flop_of_hessians": 2 * N * D**2 * L,
        "fc_step_seconds": runs[1]["seconds"] * (N / count) / 2,
        "fc_bce_step_seconds": runs[2]["seconds"] * (N / count) / 2,
        "gd_seconds": runs[3]["seconds"] * (N / count),
        "ls_seconds": runs[4]["seconds"] * (N / count),
    }

    return {
        "date": time.strftime("%Y-%m-%d", time.localtime()), "command": " ".join(["python", *sys.argv]),
        "sizes": {"examples": N, "features": D, "classes": L}, "whole": whole, "fiftieth": runs,
        "newton_all_classes": all_classes, "extrapolated": extrapolated, "dense": difference, "digits": table,
        "peak_gib": peak_gib(), "seconds": time.time() - began,
        "machine": {
            "cores": os.cpu_count(), "threads": os.environ.get("OMP_NUM_THREADS"), "cpu": platform.processor(),
            "load_before": load, "load_after": os.getloadavg(),
            "shared_with": os.environ.get("SHARED_WITH", "not stated"),
        },
        "python": platform.python_version(), "numpy": np.__version__,
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--json", action="store_true", help="one JSON object on stdout")
    arguments = parser.parse_args()
    record = measure()
    print(json.dumps(record, indent=None if arguments.json else 1))


if __name__ == "__main__":
    main()
