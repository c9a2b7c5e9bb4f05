"""This project next to Opacus, JAX Privacy and DP-SGD by hand: one network, data, epsilon, batch and number of steps.

    python benchmarks/utility.py --jax /path/to/jax/bin/python --output benchmarks/results/DATE-utility.json

Each system trains in a process of its own on one thread. In every round (one seed, which the starting weights come from) the
systems take turns, so that whatever else the machine does meets all of them. Every system calibrates sigma by its own
accountant. At the end one accountant (dp-accounting's PLD of the uncapped schedule) judges the (sigma, q, T) that each system
really used, and Opacus' PRV next to it. Time is processor time of the steps over that of training without privacy in the same
round; memory is the high-water mark of the process over that of the same. Sampling and noise are fresh in every run.

OUTPUT is written after every data set and epsilon (a cell); where it exists already, its cells are kept and the others are run.

Networks: one of 26,010 parameters, and, in the cell `lora`, adapters on 100 million frozen ones.
Data: scikit-learn's digits, drawn three times as large in a frame of 28 x 28 (1,200 to train on, 597 to test), and the embedded
Fashion-MNIST (10,000 and 1,000). The settings of the optimizer were chosen once, on 500 other pictures of clothes.
"""

import argparse
import contextlib
import dataclasses
import datetime
import io
import json
import lzma
import math
import os
import platform
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))

import numpy as np

from benchmarks.peers.job import Job, Outcome

PEERS = Path(__file__).resolve().parent / "peers"
TORCH = ("ours", "opacus", "opacus_ghost", "by_hand", "non_private")
JAX = "jax_privacy"
DELTA = 1e-5
EPSILONS = (3.0, 8.0)


class Task(NamedTuple):
    """A data set with its batch and steps, the same for every system."""

    expected_batch_size: int
    num_steps: int
    network: str = "small"


TASKS = {"digits": Task(200, 36), "fashion": Task(400, 45), "lora": Task(64, 6, "lora")}
RATE, MOMENTUM, MAX_GRAD_NORM = 0.5, 0.9, 1.0


class Arrays(NamedTuple):
    """Pictures (N, 1, 28, 28) in float32 with labels (N,): to train on and to test."""

    x: np.ndarray
    y: np.ndarray
    x_test: np.ndarray
    y_test: np.ndarray


def digits() -> Arrays:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    large = np.pad(np.kron(x[order].reshape(-1, 8, 8) / 16, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    x, y = ((large - 0.25) / 0.35).astype(np.float32)[:, None], y[order].astype(np.int64)
    return Arrays(x[:1200], y[:1200], x[1200:], y[1200:])


def fashion() -> Arrays:
    from data.embedded import FASHION_FILE, NUM_SHADES, PARTS

    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as held:
        x, y = held["shades_NHW"] / (NUM_SHADES - 1), held["caption_N"].astype(np.int64) // 2  # two tones of each class
    x = ((x - 0.7) / 0.35).astype(np.float32)[:, None]
    train, first = PARTS["train"], PARTS["train"] + PARTS["choice"]
    return Arrays(x[:train], y[:train], x[first:], y[first:])


DATA = {"digits": digits, "fashion": fashion, "lora": digits}


def prepared(arrays: Arrays, seed: int, path: Path, network: str) -> None:
    """Writes the data and the starting weights of a seed, but for those that are frozen."""
    import torch

    from benchmarks.peers.torch_run import NETWORKS, trained

    torch.manual_seed(seed)
    weights: dict[str, Any] = {name: value.detach().numpy() for name, value in trained(NETWORKS[network]()).items()}
    np.savez(path, **arrays._asdict(), **weights)


class Refused(Exception):
    """The line by which a system refused."""


class Worker:
    """A process that trains by one system, one job after the other, on one thread."""

    def __init__(self, system: str, jax: Path | None) -> None:
        program = [jax, PEERS / "jax_run.py"] if system == JAX else [sys.executable, PEERS / "torch_run.py"]
        one_thread = {"OMP_NUM_THREADS": "1", "XLA_FLAGS": "--xla_cpu_multi_thread_eigen=false"}
        self._errors = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            [str(program[0]), "-W", "ignore", str(program[1])], env=os.environ | one_thread, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._errors,
        )  # fmt: skip

    def answer(self, job: Job) -> Any:
        """What the process printed.

        Raises:
            Refused: it ended instead.
        """
        assert self._process.stdin is not None and self._process.stdout is not None
        self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
        self._process.stdin.flush()
        line = self._process.stdout.readline()
        if not line:
            code = self._process.wait()
            self._errors.seek(0)
            said = self._errors.read().strip().splitlines()
            raise Refused(said[-1] if said else f"ended with {code} without a word")
        return json.loads(line)

    def close(self) -> None:
        self._process.kill()
        self._process.wait()


def judged(sigma: float, rate: float, steps: int) -> dict[str, float]:
    """Epsilon of a plain Poisson-sampled Gaussian by two accountants that this project did not write."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant
    from opacus.accountants import PRVAccountant

    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
    prv = PRVAccountant()
    prv.history = [(sigma, rate, steps)]
    return {"pld": float(accountant.get_epsilon(DELTA)), "opacus_prv": float(prv.get_epsilon(DELTA))}


def interval(values: Sequence[float]) -> dict[str, float | None]:
    """Mean and half of the 95 % interval of the mean (Student's t)."""
    from scipy import stats

    count = len(values)
    half = stats.t.ppf(0.975, count - 1) * np.std(values, ddof=1) / math.sqrt(count) if count > 1 else None
    return {"mean": float(np.mean(values)), "half_width": None if half is None else float(half)}


def summary(rounds: list[dict[str, Outcome]], system: str, sigma: float, num_steps: int) -> dict[str, Any]:
    """One system's row."""
    own = [r[system] for r in rounds]
    row: dict[str, Any] = {
        "version": own[0].version, "noise_multiplier": sigma, "sample_rate": own[0].sample_rate,
        "accuracy": interval([o.accuracy for o in own]), "accuracies": [o.accuracy for o in own],
    }  # fmt: skip
    if sigma:
        row["epsilon_judged"] = judged(sigma, own[0].sample_rate, num_steps)
    for name, values in {
        "accuracy_minus_ours": [r[system].accuracy - r["ours"].accuracy for r in rounds if "ours" in r],
        "time_ratio": [r[system].seconds / r["non_private"].seconds for r in rounds if "non_private" in r],
        "memory_ratio": [r[system].peak_mib / r["non_private"].peak_mib for r in rounds if "non_private" in r],
    }.items():
        row[name] = interval(values) if values else None
    row["seconds"] = [round(o.seconds, 2) for o in own]
    row["start_seconds"] = [round(o.start_seconds, 2) for o in own]
    row["peak_mib"] = [round(o.peak_mib) for o in own]
    row["mib_of_the_steps"] = [round(o.peak_mib - o.start_mib) for o in own]
    return row


def cell(name: str, epsilon: float, seeds: int, task: Task, workers: dict[str, Worker], jax: Path | None) -> Any:
    """All rounds of a data set and an epsilon; a worker that refuses is out from then on."""
    arrays, systems = DATA[name](), list(workers)
    refused: dict[str, str] = {}
    sigmas: dict[str, float] = {}
    rounds: list[dict[str, Outcome]] = []
    with tempfile.TemporaryDirectory() as folder:
        for seed in range(seeds):
            file = Path(folder) / f"{seed}.npz"
            prepared(arrays, seed, file, task.network)
            rounds.append({})
            turn = [*systems[seed % len(systems) :], *systems[: seed % len(systems)]]
            for system in (s for s in turn if s in workers):
                job = Job(
                    system, str(file), epsilon, DELTA, len(arrays.y), *task[:2], RATE, MOMENTUM, MAX_GRAD_NORM,
                    sigmas.get(system), task.network,
                )  # fmt: skip
                print(f"{name}, epsilon {epsilon:g}, seed {seed}: {system}", file=sys.stderr, flush=True)
                try:
                    if job.noise_multiplier is None:
                        # In a process whose memory nobody measures.
                        with contextlib.closing(Worker(system, jax)) as alone:
                            sigmas[system] = float(alone.answer(job))
                        job = dataclasses.replace(job, noise_multiplier=sigmas[system])
                    rounds[-1][system] = Outcome(**workers[system].answer(job))
                except Refused as error:
                    refused[system] = str(error)
                    del workers[system]
    return {
        "data": name, "target_epsilon": epsilon, "delta": DELTA, "num_train": len(arrays.y), "num_test": len(arrays.y_test),
        **task._asdict(), "refused": refused,
        "systems": {system: summary(rounds, system, sigmas[system], task.num_steps) for system in workers},
    }  # fmt: skip


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--jax", type=Path, help="a Python with jax_privacy 2; without one JAX Privacy is left out")
    parser.add_argument("--data", nargs="+", choices=TASKS, default=list(TASKS))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument("--output", type=Path, help="the JSON, written after every cell; cells there are kept")
    arguments = parser.parse_args()
    systems = TORCH if arguments.jax is None else (*TORCH, JAX)

    import warnings

    from benchmarks.peers.wirings import verdicts

    told = ["PYTHON" if a == str(arguments.jax) else a for a in sys.argv[1:]]
    warnings.simplefilter("ignore")  # of hooks on models of tokens
    record: dict[str, Any] = {
        "benchmark": "utility",
        "optimizer": {"rate": RATE, "momentum": MOMENTUM, "max_grad_norm": MAX_GRAD_NORM},
        "wirings": verdicts(),
        "cells": [],
    }  # fmt: skip
    if arguments.output is not None and arguments.output.exists():
        record["cells"] = json.loads(arguments.output.read_text())["cells"]
    done = {(c["data"], c["target_epsilon"]) for c in record["cells"]}
    workers = {system: Worker(system, arguments.jax) for system in systems}
    for name in arguments.data:
        for epsilon in (e for e in arguments.epsilons if (name, e) not in done):
            machine = platform.processor() or platform.machine()
            began = {
                "date": datetime.date.today().isoformat(),
                "command": " ".join(["python benchmarks/utility.py", *told]),
                "machine": {"cpu": machine, "cores": os.cpu_count(), "load": os.getloadavg()[0]},
            }
            record["cells"].append(began | cell(name, epsilon, arguments.seeds, TASKS[name], workers, arguments.jax))
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    for worker in workers.values():
        worker.close()
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
