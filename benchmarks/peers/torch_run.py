"""One run of a torch system: this project, Opacus (per-example gradients or ghost clipping), DP-SGD by hand, or no privacy."""

import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from importlib.metadata import version
from pathlib import Path
from typing import TYPE_CHECKING

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.peers.job import MICRO_BATCH, Clock, Job, Outcome, peak_mib, serve

if TYPE_CHECKING:
    from privacy.plan import PrivacyPlan

Arrays = tuple[Tensor, Tensor]
Train = Callable[[nn.Sequential, Arrays, Job, Clock], float]
"""Trains the model, and returns the sampling rate."""


def network() -> nn.Sequential:
    """26,010 parameters: the small network of many tutorials of DP-SGD, with tanh (Papernot et al. 2021, arXiv 2007.14191)."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 8, stride=2, padding=3), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Conv2d(16, 32, 4, stride=2), nn.Tanh(), nn.MaxPool2d(2, 1),
        nn.Flatten(), nn.Linear(512, 32), nn.Tanh(), nn.Linear(32, 10),
    )  # fmt: skip


class Adapted(nn.Module):
    """A frozen layer with a low-rank adapter (Hu et al. 2021, arXiv 2106.09685), and a way around both."""

    def __init__(self, width: int, rank: int) -> None:
        super().__init__()
        self.base = nn.Linear(width, width).requires_grad_(False)
        self.down, self.up = nn.Linear(width, rank, bias=False), nn.Linear(rank, width, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.base(x) + self.up(self.down(x)))


def adapted() -> nn.Sequential:
    """16 frozen layers of 2,500, 100 million parameters, with 650,010 that are trained. The frozen ones are always the same."""
    torch.manual_seed(0)
    first = nn.Linear(784, 2500).requires_grad_(False)
    return nn.Sequential(nn.Flatten(), first, *(Adapted(2500, 8) for _ in range(16)), nn.Linear(2500, 10))


NETWORKS: dict[str, Callable[[], nn.Sequential]] = {"small": network, "lora": adapted}


def trained(model: nn.Module) -> dict[str, nn.Parameter]:
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def optimizer_of(model: nn.Module, job: Job) -> torch.optim.SGD:
    return torch.optim.SGD(trained(model).values(), lr=job.rate, momentum=job.momentum)


def poisson(job: Job) -> Iterator[Tensor]:
    """Members of each step, by numpy's generator: for the two systems that have no sampler of their own."""
    rng = np.random.default_rng()
    for _ in range(job.num_steps):
        yield torch.from_numpy(
            np.flatnonzero(rng.random(job.num_examples) < job.expected_batch_size / job.num_examples)
        )


def our_plan(job: Job) -> "PrivacyPlan":
    """Calibrated by PLD, with the cap of batches, the slack for rounding and the attempts in reserve charged."""
    from privacy.plan import make_plan
    from privacy.plan_request import PlanRequest
    from privacy.releases import SENSITIVITY_SLACK

    request = PlanRequest(
        num_examples=job.num_examples, expected_batch_size=job.expected_batch_size, num_steps=job.num_steps,
        target_epsilon=job.epsilon if job.noise_multiplier is None else None, noise_multiplier=job.noise_multiplier,
        target_delta=job.delta, max_grad_norm=job.max_grad_norm, sensitivity_slack=SENSITIVITY_SLACK,
    )  # fmt: skip
    return make_plan(request)


def ours(model: nn.Sequential, train: Arrays, job: Job, clock: Clock) -> float:
    """`PrivateLoop` with its ledger; one checkpoint, at the end."""
    from torch.utils.data import TensorDataset

    from privacy.loop import PrivateLoop, floats, integers

    cap = our_plan(job).cap
    assert cap is not None
    rows = math.ceil(cap / math.ceil(cap / MICRO_BATCH))  # every step runs the micro-batches of the largest batch

    def loss(x: Tensor, y: Tensor) -> Tensor:
        return F.cross_entropy(model(x), y, reduction="none")

    with (
        tempfile.TemporaryDirectory() as folder,
        PrivateLoop(
            model,
            optimizer_of(model, job),
            TensorDataset(*train),
            example=(floats(1, 28, 28), integers(10)),
            loss=loss,
            run_dir=Path(folder) / "run",
            starts_from="public",
            expected_batch_size=job.expected_batch_size,
            num_steps=job.num_steps,
            noise_multiplier=job.noise_multiplier,
            target_delta=job.delta,
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
        target_epsilon=job.epsilon, target_delta=job.delta, sample_rate=job.expected_batch_size / job.num_examples,
        steps=job.num_steps, accountant="prv",
    )  # fmt: skip


def opacus(mode: str) -> Train:
    """`make_private` with Poisson sampling, and physical batches by its BatchMemoryManager."""

    def train_it(model: nn.Sequential, train: Arrays, job: Job, clock: Clock) -> float:
        from opacus import PrivacyEngine
        from opacus.utils.batch_memory_manager import BatchMemoryManager
        from torch.utils.data import DataLoader, TensorDataset

        assert job.noise_multiplier is not None
        loader = DataLoader(TensorDataset(*train), batch_size=job.expected_batch_size)
        rate = 1 / len(loader)
        criterion: nn.Module = nn.CrossEntropyLoss()
        engine = PrivacyEngine(accountant="prv")
        made = engine.make_private(
            module=model, optimizer=optimizer_of(model, job), data_loader=loader,
            noise_multiplier=job.noise_multiplier, max_grad_norm=job.max_grad_norm, grad_sample_mode=mode,
            criterion=criterion,
        )  # fmt: skip
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


def by_hand(model: nn.Sequential, train: Arrays, job: Job, clock: Clock) -> float:
    """Autograd for one example after the other, torch's Gaussian: what a reader of the paper would write first."""
    assert job.noise_multiplier is not None
    deviation = job.noise_multiplier * job.max_grad_norm
    parameters, optimizer = list(trained(model).values()), optimizer_of(model, job)
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


def by_dp_accounting(job: Job) -> float:
    """By bisection of the PLD accountant's epsilon."""
    from dp_accounting import GaussianDpEvent, PoissonSampledDpEvent
    from dp_accounting.pld import PLDAccountant

    low, high = 0.3, 100.0
    while high / low > 1.0005:
        middle = math.sqrt(low * high)
        accountant = PLDAccountant()
        event = PoissonSampledDpEvent(job.expected_batch_size / job.num_examples, GaussianDpEvent(middle))
        accountant.compose(event, job.num_steps)
        low, high = (middle, high) if accountant.get_epsilon(job.delta) > job.epsilon else (low, middle)
    return high


def non_private(model: nn.Sequential, train: Arrays, job: Job, clock: Clock) -> float:
    """The same steps without clipping and noise."""
    optimizer = optimizer_of(model, job)
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


def run(job: Job, clock: Clock) -> Outcome:
    with np.load(job.data) as held:
        data = {name: torch.from_numpy(held[name]) for name in held.files}
    x, y, x_test, y_test = (data.pop(name) for name in ("x", "y", "x_test", "y_test"))
    model = NETWORKS[job.network]()
    model.load_state_dict(data, strict=False)  # those that are trained
    rate = SYSTEMS[job.system][1](model, (x, y), job, clock)
    seconds, peak = clock.seconds(), peak_mib()
    with torch.no_grad():
        right = int((model(x_test).argmax(1) == y_test).sum())
    written = f"opacus {version('opacus')}" if job.system.startswith("opacus") else f"torch {torch.__version__}"
    return Outcome(job.system, written, rate, right / len(y_test), seconds, clock.start_seconds, clock.start_mib, peak)


if __name__ == "__main__":
    torch.set_num_threads(1)
    serve(lambda job: SYSTEMS[job.system][0](job), run)
