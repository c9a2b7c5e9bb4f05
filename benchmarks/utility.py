"""This project next to Opacus and DP-SGD by hand: one network, data, epsilon, batch and number of steps.

    python benchmarks/utility.py --data digits fashion --epsilons 8 3 --output benchmarks/results/DATE-utility.json

Each system trains in a process of its own on one thread. In every round (one seed, which the starting weights come from) the
systems take turns, so that whatever else the machine does meets all of them. Every system calibrates sigma by its own
accountant. At the end one accountant (dp-accounting's PLD of the uncapped schedule) judges the (sigma, q, T) that each system
really used, and Opacus' PRV next to it. Time is processor time of the steps over that of training without privacy in the same
round; memory is the high-water mark of the process over that of the same. Sampling and noise are fresh in every run.

OUTPUT is written after every data set and epsilon (a cell); where it exists already, its cells are kept and the others are run.

Networks: one of 26,010 parameters, and in the cell `lora` adapters on 100 million frozen ones.
Data: scikit-learn's digits, drawn three times as large in a frame of 28 x 28 (1,200 to train on, 597 to test), and the embedded
Fashion-MNIST (10,000 and 1,000). The settings of the optimizer were chosen once, on 500 other pictures of clothes.
"""

import argparse
import contextlib
import datetime
import io
import json
import lzma
import math
import multiprocessing
import os
import platform
import sys
import tempfile
import time
import warnings
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, replace
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
os.environ.setdefault("OMP_NUM_THREADS", "1")

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

if TYPE_CHECKING:
    from privacy.plan.numbers import PrivacyPlan

DELTA, EPSILONS = 1e-5, (3.0, 8.0)
RATE, MOMENTUM = 0.5, 0.9
MICRO_BATCH = 256
"""The most examples whose gradients a system may hold at the same time."""


class Arrays(NamedTuple):
    """Pictures (N, 1, 28, 28) in float32 with labels (N,): to train on and to test."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def digits() -> Arrays:
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    large = np.pad(
        np.kron(x[order].reshape(-1, 8, 8) / 16, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2))
    )
    return _split(((large - 0.25) / 0.35)[:, None], y[order], slice(1200), slice(1200, None))


def fashion() -> Arrays:
    from data.embedded import FASHION_FILE, NUM_SHADES, PARTS

    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as held:
        x, y = (
            held["shades_NHW"] / (NUM_SHADES - 1),
            held["caption_N"] // 2,
        )  # two tones of each class
    return _split(
        ((x - 0.7) / 0.35)[:, None],
        y,
        slice(PARTS["train"]),
        slice(PARTS["train"] + PARTS["choice"], None),
    )


def _split(x: np.ndarray, y: np.ndarray, train: slice, test: slice) -> Arrays:
    images, labels = torch.from_numpy(x.astype(np.float32)), torch.from_numpy(y.astype(np.int64))
    return Arrays(images[train], labels[train], images[test], labels[test])


@dataclass(frozen=True)
class Job:
    """
    Attributes:
        num_examples, expected_batch_size: n and B; the sampling rate is B / n.
        noise_multiplier: sigma; None asks the system to calibrate it by its own accountant, and for nothing else.
    """

    system: str
    data: str
    seed: int
    epsilon: float
    num_examples: int
    expected_batch_size: int
    num_steps: int
    noise_multiplier: float | None = None
    max_grad_norm: float = 1.0


@dataclass(frozen=True)
class Outcome:
    """
    Attributes:
        sample_rate: as the system itself draws.
        accuracy: on the test pictures.
        seconds: processor time of the steps.
        start_seconds: processor time before the first step: checks and wrapping, and in a system's first run its imports.
        peak_mib: the high-water mark of the process during the run, interpreter and libraries included; `start_mib` before the
            first step.
    """

    version: str
    sample_rate: float
    accuracy: float
    seconds: float
    start_seconds: float
    start_mib: float
    peak_mib: float


def peak_mib() -> float:
    """The high-water mark of this process since `Clock` began to look."""
    status = Path("/proc/self/status").read_text()
    return (
        next(int(line.split()[1]) for line in status.splitlines() if line.startswith("VmHWM"))
        / 1024
    )


class Clock:
    """Processor time and memory of this process, of one job."""

    def __init__(self) -> None:
        Path("/proc/self/clear_refs").write_text(
            "5"
        )  # the high-water mark is that of now (proc(5))
        self.start_seconds = self.start_mib = 0.0
        self._began = time.process_time()

    def begin(self) -> None:
        """Before the first step."""
        self.start_seconds, self.start_mib = self.seconds(), peak_mib()
        self._began = time.process_time()

    def seconds(self) -> float:
        return time.process_time() - self._began


Train = Callable[[nn.Sequential, tuple[Tensor, Tensor], Job, Clock], float]
"""Trains the model, and returns the sampling rate."""


def network() -> nn.Sequential:
    """26,010 parameters: the small network of many tutorials of DP-SGD, with tanh (Papernot et al. 2021, arXiv 2007.14191)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2),
        nn.Tanh(),
        nn.MaxPool2d(2, 1),
        nn.Flatten(),
        nn.Linear(512, 32),
        nn.Tanh(),
        nn.Linear(32, 10),
    )


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter (Hu et al. 2021, arXiv 2106.09685), and a way around both."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted() -> nn.Sequential:
    """16 frozen layers of 2,500, 100 million parameters, with 650,010 that are trained."""
    first = nn.Linear(784, 2500).requires_grad_(False)
    return nn.Sequential(
        nn.Flatten(), first, *(Adapted(2500, 8) for _ in range(16)), nn.Linear(2500, 10)
    )


DATA: dict[str, tuple[Callable[[], Arrays], Callable[[], nn.Sequential], int, int]] = {
    "digits": (digits, network, 200, 36),
    "fashion": (fashion, network, 400, 45),
    "lora": (digits, adapted, 64, 6),
}
"""A data set with its network, expected batch and steps, the same for every system."""


def trained(model: nn.Module) -> list[nn.Parameter]:
    return [p for p in model.parameters() if p.requires_grad]


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    return torch.optim.SGD(trained(model), lr=RATE, momentum=MOMENTUM)


def poisson(job: Job) -> Iterator[Tensor]:
    """Members of each step, by numpy's generator: for the two systems that have no sampler of their own."""
    rng = np.random.default_rng()
    for _ in range(job.num_steps):
        yield torch.from_numpy(
            np.flatnonzero(
                rng.random(job.num_examples) < job.expected_batch_size / job.num_examples
            )
        )


def our_plan(job: Job) -> "PrivacyPlan":
    """Calibrated by PLD, with the cap of batches, the slack for rounding and the attempts in reserve charged."""
    from privacy.plan.numbers import make_plan
    from privacy.plan.releases import SENSITIVITY_SLACK
    from privacy.plan.request import PlanRequest

    request = PlanRequest(
        num_examples=job.num_examples,
        expected_batch_size=job.expected_batch_size,
        num_steps=job.num_steps,
        target_epsilon=job.epsilon if job.noise_multiplier is None else None,
        noise_multiplier=job.noise_multiplier,
        target_delta=DELTA,
        max_grad_norm=job.max_grad_norm,
        sensitivity_slack=SENSITIVITY_SLACK,
    )
    return make_plan(request)


def ours(model: nn.Sequential, train: tuple[Tensor, Tensor], job: Job, clock: Clock) -> float:
    """`PrivateLoop` with its ledger; one checkpoint, at the end."""
    from privacy.loop import PrivateLoop, floats, integers

    cap = our_plan(job).cap
    assert cap is not None
    rows = math.ceil(
        cap / math.ceil(cap / MICRO_BATCH)
    )  # every step runs the micro-batches of the largest batch

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateLoop(
            model,
            optimizer_of(model),
            TensorDataset(*train),
            example=(floats(1, 28, 28), integers(10)),
            loss=loss,
            run_dir=Path(folder) / "run",
            starts_from="public",
            expected_batch_size=job.expected_batch_size,
            num_steps=job.num_steps,
            noise_multiplier=job.noise_multiplier,
            target_delta=DELTA,
            max_grad_norm=job.max_grad_norm,
            micro_batch_size=rows,
            save_every=job.num_steps,
        ) as loop,
    ):
        clock.begin()
        for _ in loop:
            pass
        return loop.plan.sample_rate


def by_opacus(job: Job) -> float:
    from opacus.accountants.utils import get_noise_multiplier

    return get_noise_multiplier(
        target_epsilon=job.epsilon,
        target_delta=DELTA,
        sample_rate=job.expected_batch_size / job.num_examples,
        steps=job.num_steps,
        accountant="prv",
    )


def opacus(mode: str) -> Train:
    """`make_private` with Poisson sampling, and physical batches by its BatchMemoryManager."""

    def train_it(
        model: nn.Sequential, train: tuple[Tensor, Tensor], job: Job, clock: Clock
    ) -> float:
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        assert job.noise_multiplier is not None
        loader = DataLoader(TensorDataset(*train), batch_size=job.expected_batch_size)
        rate = 1 / len(loader)
        criterion: nn.Module = nn.CrossEntropyLoss()
        engine = PrivacyEngine(accountant="prv")
        made = engine.make_private(
            module=model,
            optimizer=optimizer_of(model),
            data_loader=loader,
            noise_multiplier=job.noise_multiplier,
            max_grad_norm=job.max_grad_norm,
            grad_sample_mode=mode,
            criterion=criterion,
        )
        wrapped, optimizer, loader = made[0], made[1], made[-1]
        criterion = made[2] if mode == "ghost" else criterion
        clock.begin()
        while True:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=MICRO_BATCH, optimizer=optimizer
            ) as batches:
                for x, y in batches:
                    optimizer.zero_grad()
                    criterion(wrapped(x), y).backward()
                    optimizer.step()
                    if sum(steps for _, _, steps in engine.accountant.history) == job.num_steps:
                        return rate

    return train_it


def by_hand(model: nn.Sequential, train: tuple[Tensor, Tensor], job: Job, clock: Clock) -> float:
    """Autograd for one example after the other, torch's Gaussian: what a reader of the paper would write first."""
    assert job.noise_multiplier is not None
    deviation = job.noise_multiplier * job.max_grad_norm
    parameters, optimizer = trained(model), optimizer_of(model)
    clock.begin()
    for ids in poisson(job):
        sums = [torch.zeros_like(p) for p in parameters]
        for i in ids.tolist():
            loss = F.cross_entropy(model(train[0][i : i + 1]), train[1][i : i + 1])
            gradients = torch.autograd.grad(loss, parameters)
            norm = torch.sqrt(torch.stack([g.square().sum() for g in gradients]).sum())
            factor = (job.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            for total, gradient in zip(sums, gradients, strict=True):
                total += factor * gradient
        for p, total in zip(parameters, sums, strict=True):
            p.grad = (total + deviation * torch.randn_like(p)) / job.expected_batch_size
        optimizer.step()
    return job.expected_batch_size / job.num_examples


def pld_epsilon(sigma: float, rate: float, steps: int) -> float:
    """By dp-accounting's PLD, of Poisson samples without a cap."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
    return float(accountant.get_epsilon(DELTA))


def by_dp_accounting(job: Job) -> float:
    """By bisection of the PLD accountant's epsilon."""
    low, high = 0.3, 100.0
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        epsilon = pld_epsilon(middle, job.expected_batch_size / job.num_examples, job.num_steps)
        low, high = (middle, high) if epsilon > job.epsilon else (low, middle)
    return high


def non_private(
    model: nn.Sequential, train: tuple[Tensor, Tensor], job: Job, clock: Clock
) -> float:
    """The same steps without clipping and noise."""
    optimizer = optimizer_of(model)
    clock.begin()
    for ids in poisson(job):
        optimizer.zero_grad()
        for rows in ids.split(MICRO_BATCH):
            loss = F.cross_entropy(model(train[0][rows]), train[1][rows], reduction="sum")
            (loss / job.expected_batch_size).backward()
        optimizer.step()
    return job.expected_batch_size / job.num_examples


SYSTEMS: dict[str, tuple[Callable[[Job], float], Train]] = {
    "ours": (lambda job: our_plan(job).noise_multiplier, ours),
    "opacus": (by_opacus, opacus("hooks")),
    "opacus_ghost": (by_opacus, opacus("ghost")),
    "by_hand": (by_dp_accounting, by_hand),
    "non_private": (lambda job: 0.0, non_private),
}
"""How each calibrates sigma, and how it trains."""


def calibrated(job: Job) -> float:
    """sigma; in a process whose memory nobody measures."""
    return SYSTEMS[job.system][0](job)


def run(job: Job) -> Outcome:
    """Trains once, in a process that does nothing else."""
    clock = Clock()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    arrays = DATA[job.data][0]()
    torch.manual_seed(job.seed)
    model = DATA[job.data][1]()
    torch.seed()  # the seed is that of the starting weights alone
    rate = SYSTEMS[job.system][1](model, arrays[:2], job, clock)
    seconds, peak = clock.seconds(), peak_mib()
    with torch.no_grad():
        accuracy = float((model(arrays.x_test).argmax(1) == arrays.y_test).double().mean())
    written = (
        f"opacus {version('opacus')}"
        if job.system.startswith("opacus")
        else f"torch {torch.__version__}"
    )
    return Outcome(written, rate, accuracy, seconds, clock.start_seconds, clock.start_mib, peak)


def alone() -> ProcessPoolExecutor:
    """A process that starts bare and takes one job after the other."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def judged(sigma: float, rate: float, steps: int) -> dict[str, float]:
    """Epsilon of what a system really used, by two accountants."""
    from opacus.accountants import PRVAccountant

    prv = PRVAccountant()
    prv.history = [(sigma, rate, steps)]
    return {"pld": pld_epsilon(sigma, rate, steps), "opacus_prv": float(prv.get_epsilon(DELTA))}


def summary(
    rounds: list[dict[str, Outcome]], system: str, sigma: float, num_steps: int
) -> dict[str, Any]:
    """One system's row."""
    from evaluation.few_shot import interval

    own, pairs = (
        [r[system] for r in rounds],
        [(r[system], r["non_private"]) for r in rounds if "non_private" in r],
    )
    row: dict[str, Any] = {
        "version": own[0].version,
        "noise_multiplier": sigma,
        "sample_rate": own[0].sample_rate,
        "accuracy": interval([o.accuracy for o in own]),
        "accuracies": [o.accuracy for o in own],
    }
    if sigma:
        row["epsilon_judged"] = judged(sigma, own[0].sample_rate, num_steps)
    for name, values in {
        "accuracy_minus_ours": [
            r[system].accuracy - r["ours"].accuracy for r in rounds if "ours" in r
        ],
        "time_ratio": [one.seconds / plain.seconds for one, plain in pairs],
        "memory_ratio": [one.peak_mib / plain.peak_mib for one, plain in pairs],
    }.items():
        row[name] = interval(values) if values else None
    row["seconds"] = [round(o.seconds, 2) for o in own]
    row["start_seconds"] = [round(o.start_seconds, 2) for o in own]
    row["peak_mib"] = [round(o.peak_mib) for o in own]
    row["mib_of_the_steps"] = [round(o.peak_mib - o.start_mib) for o in own]
    return row


def cell(name: str, epsilon: float, seeds: int) -> dict[str, Any]:
    """All rounds of a data set and an epsilon; a system that refuses is out from then on."""
    load, _, batch, num_steps = DATA[name]
    arrays, systems = load(), list(SYSTEMS)
    refused: dict[str, str] = {}
    sigmas: dict[str, float] = {}
    rounds: list[dict[str, Outcome]] = []
    with contextlib.ExitStack() as stack:
        workers = {system: stack.enter_context(alone()) for system in systems}
        for seed in range(seeds):
            rounds.append({})
            turn = [*systems[seed % len(systems) :], *systems[: seed % len(systems)]]
            for system in (s for s in turn if s not in refused):
                job = Job(system, name, seed, epsilon, len(arrays.y), batch, num_steps)
                print(
                    f"{name}, epsilon {epsilon:g}, seed {seed}: {system}",
                    file=sys.stderr,
                    flush=True,
                )
                try:
                    if system not in sigmas:
                        with alone() as other:
                            sigmas[system] = other.submit(calibrated, job).result()
                    job = replace(job, noise_multiplier=sigmas[system])
                    rounds[-1][system] = workers[system].submit(run, job).result()
                except Exception as error:  # whatever a system says no with
                    refused[system] = f"{type(error).__name__}: {error}"
    return {
        "data": name,
        "target_epsilon": epsilon,
        "delta": DELTA,
        "num_train": len(arrays.y),
        "num_test": len(arrays.y_test),
        "expected_batch_size": batch,
        "num_steps": num_steps,
        "refused": refused,
        "systems": {
            one: summary(rounds, one, sigmas[one], num_steps)
            for one in systems
            if one not in refused
        },
    }


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--output", type=Path, help="the JSON, written after every cell; cells there are kept"
    )
    arguments = parser.parse_args()
    optimizer = {"rate": RATE, "momentum": MOMENTUM, "max_grad_norm": Job.max_grad_norm}
    record: dict[str, Any] = {"benchmark": "utility", "optimizer": optimizer, "cells": []}
    if arguments.output is not None and arguments.output.exists():
        record |= json.loads(arguments.output.read_text())
    done = {(c["data"], c["target_epsilon"]) for c in record["cells"]}
    for name in arguments.data:
        for epsilon in (e for e in arguments.epsilons if (name, e) not in done):
            began = {
                "date": datetime.date.today().isoformat(),
                "command": " ".join(["python benchmarks/utility.py", *sys.argv[1:]]),
                "machine": {
                    "cpu": platform.processor() or platform.machine(),
                    "cores": os.cpu_count(),
                    "load": os.getloadavg()[0],
                },
            }
            record["cells"].append(began | cell(name, epsilon, arguments.seeds))
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
