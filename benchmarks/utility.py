"""This project next to Opacus and DP-SGD by hand: the same network, data, epsilon, batch and steps.

    python benchmarks/utility.py --data digits fashion --epsilons 8 3 --output OUTPUT.json

Each system trains in a process of its own on one thread. In every round (one seed, which the
starting weights come from) the systems take turns, so that other load on the machine meets all of
them. Every system calibrates sigma by its own accountant. At the end one accountant
(dp-accounting's PLD of the uncapped schedule) judges the (sigma, q, T) that each system really
used, and Opacus' PRV next to it. Time is processor time of the steps over that of training without
privacy in the same round; memory is the high-water mark of the process over that of the same.
Sampling and noise are fresh in every run.

OUTPUT is written after every data set and epsilon (a cell); if it exists already, its cells stay
and only the others are run.

Networks: one of 26,010 parameters, and in the cell `lora` adapters on 100 million frozen ones.
Data: scikit-learn's digits, drawn three times as large in a frame of 28 x 28 (1,200 to train on,
597 to test), and the embedded Fashion-MNIST (10,000 and 1,000). The settings of the optimizer were
chosen once, on 500 other pictures of clothes.
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

DELTA = 1e-5
EPSILONS = (3.0, 8.0)
RATE = 0.5
MOMENTUM = 0.9
MICRO_BATCH = 256
"""The most examples whose gradients a system may hold at the same time."""


class Arrays(NamedTuple):
    """Pictures (N, 1, 28, 28) in float32 with labels (N,): to train on and to test."""

    x: Tensor
    y: Tensor
    x_test: Tensor
    y_test: Tensor


def digits() -> Arrays:
    """Returns scikit-learn's digits, three times as large in a frame of 28 x 28."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    order = np.random.default_rng(0).permutation(len(x))
    enlarged = np.kron(x[order].reshape(-1, 8, 8) / 16, np.ones((1, 3, 3)))
    framed = np.pad(enlarged, ((0, 0), (2, 2), (2, 2)))
    images = ((framed - 0.25) / 0.35)[:, None]
    return _split(images, y[order], slice(1200), slice(1200, None))


def fashion() -> Arrays:
    """Returns the embedded Fashion-MNIST without its part for choices."""
    from data.embedded import FASHION_FILE, NUM_SHADES, PARTS

    with np.load(io.BytesIO(lzma.decompress(FASHION_FILE.read_bytes()))) as arrays:
        x = arrays["shades_NHW"] / (NUM_SHADES - 1)
        # Each class has captions in two tones.
        y = arrays["caption_N"] // 2
    images = ((x - 0.7) / 0.35)[:, None]
    train = slice(PARTS["train"])
    test = slice(PARTS["train"] + PARTS["choice"], None)
    return _split(images, y, train, test)


def _split(x: np.ndarray, y: np.ndarray, train: slice, test: slice) -> Arrays:
    images = torch.from_numpy(x.astype(np.float32))
    labels = torch.from_numpy(y.astype(np.int64))
    return Arrays(images[train], labels[train], images[test], labels[test])


@dataclass(frozen=True)
class Job:
    """One training of one system.

    Attributes:
        num_examples, expected_batch_size: n and B; the sampling rate is B / n.
        noise_multiplier: sigma; None for calibration, by the system's own accountant.
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
    """Measurements of one job.

    Attributes:
        sample_rate: of the system's own sampler.
        accuracy: on the test pictures.
        seconds: processor time of the steps.
        start_seconds: processor time before the first step: checks and wrapping, and in a system's
            first run its imports.
        peak_mib: the high-water mark of the process during the run, interpreter and libraries
            included; `start_mib` before the first step.
    """

    version: str
    sample_rate: float
    accuracy: float
    seconds: float
    start_seconds: float
    start_mib: float
    peak_mib: float


def peak_mib() -> float:
    """Returns the high-water mark of this process's memory since `Clock` was made."""
    status = Path("/proc/self/status").read_text().splitlines()
    line = next(line for line in status if line.startswith("VmHWM"))
    return int(line.split()[1]) / 1024


class Clock:
    """A meter of processor time and memory of this process, for one job."""

    def __init__(self) -> None:
        # The high-water mark becomes the present size (proc(5)).
        Path("/proc/self/clear_refs").write_text("5")
        self.start_seconds = 0.0
        self.start_mib = 0.0
        self._start = time.process_time()

    def begin(self) -> None:
        """Ends the start, and begins to count the steps."""
        self.start_seconds = self.seconds()
        self.start_mib = peak_mib()
        self._start = time.process_time()

    def seconds(self) -> float:
        """Returns the processor seconds since the start, or since `begin`."""
        return time.process_time() - self._start


Train = Callable[[nn.Sequential, tuple[Tensor, Tensor], Job, Clock], float]
"""Trains the model, and returns the sampling rate."""


def network() -> nn.Sequential:
    """Returns the small network of many tutorials of DP-SGD, of 26,010 parameters.

    Its activation is tanh (Papernot et al. 2021, arXiv 2007.14191).
    """
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
    """A frozen layer with a low-rank adapter (Hu et al. 2021, arXiv 2106.09685), and a bypass."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down = nn.Linear(width, rank, bias=False)
        self.up = nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted_network() -> nn.Sequential:
    """Returns 16 frozen layers of 2,500, 100 million parameters, with 650,010 that are trained."""
    first = nn.Linear(784, 2500).requires_grad_(False)
    layers = [Adapted(2500, 8) for _ in range(16)]
    return nn.Sequential(nn.Flatten(), first, *layers, nn.Linear(2500, 10))


DATA: dict[str, tuple[Callable[[], Arrays], Callable[[], nn.Sequential], int, int]] = {
    "digits": (digits, network, 200, 36),
    "fashion": (fashion, network, 400, 45),
    "lora": (digits, adapted_network, 64, 6),
}
"""Data sets with their network, expected batch and steps, the same for every system."""


def trainable_parameters(model: nn.Module) -> list[nn.Parameter]:
    """Returns the parameters that require a gradient."""
    return [parameter for parameter in model.parameters() if parameter.requires_grad]


def optimizer_of(model: nn.Module) -> torch.optim.SGD:
    """Returns the optimizer of every system."""
    return torch.optim.SGD(trainable_parameters(model), lr=RATE, momentum=MOMENTUM)


def poisson(job: Job) -> Iterator[Tensor]:
    """Yields the members of each step, for systems without a sampler of their own."""
    rng = np.random.default_rng()
    rate = job.expected_batch_size / job.num_examples
    for _ in range(job.num_steps):
        yield torch.from_numpy(np.flatnonzero(rng.random(job.num_examples) < rate))


def our_plan(job: Job) -> "PrivacyPlan":
    """Returns a plan by PLD that charges the cap of batches, rounding and reserved attempts."""
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
    """Trains by `PrivateLoop` with its ledger; one checkpoint, at the end."""
    from privacy.loop import PrivateLoop, floats, integers

    cap = our_plan(job).cap
    assert cap is not None
    # Every step runs the micro-batches of the largest batch.
    num_micro_batches = math.ceil(cap / MICRO_BATCH)
    rows = math.ceil(cap / num_micro_batches)

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


def opacus_sigma(job: Job) -> float:
    """Returns the sigma of Opacus' own accountant."""
    from opacus.accountants.utils import get_noise_multiplier

    return get_noise_multiplier(
        target_epsilon=job.epsilon,
        target_delta=DELTA,
        sample_rate=job.expected_batch_size / job.num_examples,
        steps=job.num_steps,
        accountant="prv",
    )


def opacus(mode: str) -> Train:
    """Returns a training by `make_private`, with Poisson sampling and a BatchMemoryManager."""

    def train_by_opacus(
        model: nn.Sequential, train: tuple[Tensor, Tensor], job: Job, clock: Clock
    ) -> float:
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager

        assert job.noise_multiplier is not None
        loader = DataLoader(TensorDataset(*train), batch_size=job.expected_batch_size)
        rate = 1 / len(loader)
        criterion: nn.Module = nn.CrossEntropyLoss()
        engine = PrivacyEngine(accountant="prv")
        parts = engine.make_private(
            module=model,
            optimizer=optimizer_of(model),
            data_loader=loader,
            noise_multiplier=job.noise_multiplier,
            max_grad_norm=job.max_grad_norm,
            grad_sample_mode=mode,
            criterion=criterion,
        )
        # (model, optimizer, [criterion,] loader)
        wrapped = parts[0]
        optimizer = parts[1]
        loader = parts[-1]
        if mode == "ghost":
            criterion = parts[2]
        clock.begin()
        while True:
            with BatchMemoryManager(
                data_loader=loader, max_physical_batch_size=MICRO_BATCH, optimizer=optimizer
            ) as batches:
                for x, y in batches:
                    optimizer.zero_grad()
                    criterion(wrapped(x), y).backward()
                    optimizer.step()
                    num_steps = sum(steps for _, _, steps in engine.accountant.history)
                    if num_steps == job.num_steps:
                        return rate

    return train_by_opacus


def by_hand(model: nn.Sequential, train: tuple[Tensor, Tensor], job: Job, clock: Clock) -> float:
    """Trains as the paper reads: autograd of one example after the other, torch's Gaussian."""
    assert job.noise_multiplier is not None
    deviation = job.noise_multiplier * job.max_grad_norm
    parameters = trainable_parameters(model)
    optimizer = optimizer_of(model)
    clock.begin()
    for ids in poisson(job):
        sums = [torch.zeros_like(parameter) for parameter in parameters]
        for i in ids.tolist():
            loss = F.cross_entropy(model(train[0][i : i + 1]), train[1][i : i + 1])
            gradients = torch.autograd.grad(loss, parameters)
            squares = [gradient.square().sum() for gradient in gradients]
            norm = torch.sqrt(torch.stack(squares).sum())
            factor = (job.max_grad_norm / (norm + 1e-6)).clamp(max=1)
            for total, gradient in zip(sums, gradients, strict=True):
                total += factor * gradient
        for parameter, total in zip(parameters, sums, strict=True):
            noise = torch.randn_like(parameter)
            parameter.grad = (total + deviation * noise) / job.expected_batch_size
        optimizer.step()
    return job.expected_batch_size / job.num_examples


def pld_epsilon(sigma: float, rate: float, steps: int) -> float:
    """Returns the epsilon of Poisson samples without a cap, by dp-accounting's PLD."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    accountant = PLDAccountant()
    accountant.compose(PoissonSampledDpEvent(rate, GaussianDpEvent(sigma)), steps)
    return float(accountant.get_epsilon(DELTA))


def dp_accounting_sigma(job: Job) -> float:
    """Returns the sigma by bisection of the PLD accountant's epsilon."""
    low = 0.3
    high = 100.0
    rate = job.expected_batch_size / job.num_examples
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        if pld_epsilon(middle, rate, job.num_steps) > job.epsilon:
            low = middle
        else:
            high = middle
    return high


def non_private(
    model: nn.Sequential, train: tuple[Tensor, Tensor], job: Job, clock: Clock
) -> float:
    """Trains by the same steps without clipping and noise."""
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
    "opacus": (opacus_sigma, opacus("hooks")),
    "opacus_ghost": (opacus_sigma, opacus("ghost")),
    "by_hand": (dp_accounting_sigma, by_hand),
    "non_private": (lambda job: 0.0, non_private),
}
"""The calibration of sigma and the training of each system."""


def calibrated_sigma(job: Job) -> float:
    """Returns sigma; for a process whose memory is not measured."""
    calibrate, _ = SYSTEMS[job.system]
    return calibrate(job)


def run(job: Job) -> Outcome:
    """Trains once, in a process of its own, and returns the measurements."""
    clock = Clock()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    load, make_network, _, _ = DATA[job.data]
    arrays = load()
    torch.manual_seed(job.seed)
    model = make_network()
    # The seed is that of the starting weights alone.
    torch.seed()
    _, train = SYSTEMS[job.system]
    rate = train(model, arrays[:2], job, clock)
    seconds = clock.seconds()
    peak = peak_mib()
    with torch.no_grad():
        predicted = model(arrays.x_test).argmax(1)
        accuracy = float((predicted == arrays.y_test).double().mean())
    return Outcome(
        version=(
            f"opacus {version('opacus')}"
            if job.system.startswith("opacus")
            else f"torch {torch.__version__}"
        ),
        sample_rate=rate,
        accuracy=accuracy,
        seconds=seconds,
        start_seconds=clock.start_seconds,
        start_mib=clock.start_mib,
        peak_mib=peak,
    )


def fresh_process() -> ProcessPoolExecutor:
    """Returns a process that starts without imports and takes one job after the other."""
    return ProcessPoolExecutor(1, mp_context=multiprocessing.get_context("spawn"))


def judge_epsilon(sigma: float, rate: float, steps: int) -> dict[str, float]:
    """Returns the epsilon of the parameters that a system really used, by two accountants."""
    from opacus.accountants import PRVAccountant

    prv = PRVAccountant()
    prv.history = [(sigma, rate, steps)]
    return {"pld": pld_epsilon(sigma, rate, steps), "opacus_prv": float(prv.get_epsilon(DELTA))}


def summary(
    rounds: list[dict[str, Outcome]], system: str, sigma: float, num_steps: int
) -> dict[str, Any]:
    """Returns the row of a system."""
    from evaluation.few_shot import interval

    outcomes = [outcome_of[system] for outcome_of in rounds]
    accuracies = [outcome.accuracy for outcome in outcomes]
    row: dict[str, Any] = {
        "version": outcomes[0].version,
        "noise_multiplier": sigma,
        "sample_rate": outcomes[0].sample_rate,
        "accuracy": interval(accuracies),
        "accuracies": accuracies,
    }
    if sigma:
        row["epsilon_judged"] = judge_epsilon(sigma, outcomes[0].sample_rate, num_steps)
    gains = []
    time_ratios = []
    memory_ratios = []
    for outcome_of in rounds:
        outcome = outcome_of[system]
        if "ours" in outcome_of:
            gains.append(outcome.accuracy - outcome_of["ours"].accuracy)
        if "non_private" in outcome_of:
            plain = outcome_of["non_private"]
            time_ratios.append(outcome.seconds / plain.seconds)
            memory_ratios.append(outcome.peak_mib / plain.peak_mib)
    row["accuracy_minus_ours"] = interval(gains) if gains else None
    row["time_ratio"] = interval(time_ratios) if time_ratios else None
    row["memory_ratio"] = interval(memory_ratios) if memory_ratios else None
    row["seconds"] = [round(outcome.seconds, 2) for outcome in outcomes]
    row["start_seconds"] = [round(outcome.start_seconds, 2) for outcome in outcomes]
    row["peak_mib"] = [round(outcome.peak_mib) for outcome in outcomes]
    row["mib_of_the_steps"] = [round(outcome.peak_mib - outcome.start_mib) for outcome in outcomes]
    return row


def cell(name: str, epsilon: float, seeds: int) -> dict[str, Any]:
    """Returns all rounds of a data set and an epsilon.

    A system that raises is left out of the later rounds, and of the rows.
    """
    load, _, batch, num_steps = DATA[name]
    arrays = load()
    systems = list(SYSTEMS)
    refused: dict[str, str] = {}
    sigmas: dict[str, float] = {}
    rounds: list[dict[str, Outcome]] = []
    with contextlib.ExitStack() as stack:
        workers = {system: stack.enter_context(fresh_process()) for system in systems}
        for seed in range(seeds):
            rounds.append({})
            first = seed % len(systems)
            for system in [*systems[first:], *systems[:first]]:
                if system in refused:
                    continue
                job = Job(system, name, seed, epsilon, len(arrays.y), batch, num_steps)
                message = f"{name}, epsilon {epsilon:g}, seed {seed}: {system}"
                print(message, file=sys.stderr, flush=True)
                try:
                    if system not in sigmas:
                        with fresh_process() as process:
                            sigmas[system] = process.submit(calibrated_sigma, job).result()
                    job = replace(job, noise_multiplier=sigmas[system])
                    rounds[-1][system] = workers[system].submit(run, job).result()
                # Systems refuse by exceptions of any type.
                except Exception as error:
                    refused[system] = f"{type(error).__name__}: {error}"
    rows = {}
    for system in systems:
        if system not in refused:
            rows[system] = summary(rounds, system, sigmas[system], num_steps)
    return {
        "data": name,
        "target_epsilon": epsilon,
        "delta": DELTA,
        "num_train": len(arrays.y),
        "num_test": len(arrays.y_test),
        "expected_batch_size": batch,
        "num_steps": num_steps,
        "refused": refused,
        "systems": rows,
    }


def main() -> None:
    """Runs the chosen cells and prints all cells as JSON."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--data", nargs="+", choices=DATA, default=list(DATA))
    parser.add_argument("--epsilons", nargs="+", type=float, default=list(EPSILONS))
    parser.add_argument("--seeds", type=int, default=5)
    parser.add_argument(
        "--output",
        type=Path,
        help="the JSON, written after every cell; cells in it are not run again",
    )
    arguments = parser.parse_args()
    optimizer = {"rate": RATE, "momentum": MOMENTUM, "max_grad_norm": Job.max_grad_norm}
    record: dict[str, Any] = {"benchmark": "utility", "optimizer": optimizer, "cells": []}
    if arguments.output is not None and arguments.output.exists():
        record |= json.loads(arguments.output.read_text())
    done = {(done_cell["data"], done_cell["target_epsilon"]) for done_cell in record["cells"]}
    for name in arguments.data:
        for epsilon in arguments.epsilons:
            if (name, epsilon) in done:
                continue
            # Before the cell, whose own processes load the machine.
            circumstances = {
                "date": datetime.date.today().isoformat(),
                "command": " ".join(["python benchmarks/utility.py", *sys.argv[1:]]),
                "machine": {
                    "cpu": platform.processor() or platform.machine(),
                    "cores": os.cpu_count(),
                    "load": os.getloadavg()[0],
                },
            }
            record["cells"].append(circumstances | cell(name, epsilon, arguments.seeds))
            if arguments.output is not None:
                arguments.output.write_text(json.dumps(record, indent=1) + "\n")
    print(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
