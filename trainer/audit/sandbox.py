"""One rank of a sandbox run: the real steps, on canaries, with everything written down that an audit needs.

Started by `trainer/audit/mechanism.py`, one process per rank. Everything on the way of a gradient is what training uses:
sampling key and coins, ledger, `train_step`, clipping, engine, reduction, noise. Only three things differ: the task
(trainer/audit/task.py), an AdamW whose settings make it w -= gradient exactly (betas 0; learning rate and epsilon equal
and enormous), and a noise source that is watched, and silent in the first steps.

    silent steps 1..S; step S is "killed" before its `done`, and tried again in a new session; then T noisy steps
"""

import hashlib
import json
import math
import os
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading.loader import StepPlan
from privacy.clipping.clipped_sum import Mode
from privacy.clipping.selfcheck import check_against_autograd
from privacy.ledger.ledger import Ledger
from privacy.ledger.run_state import open_run_state
from privacy.noise import NoiseSource
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import SENSITIVITY_SLACK, Release
from privacy.sampling.keys import SamplingKey
from trainer.audit.task import Canaries, CanaryModel, make_canaries
from trainer.config.machine import load_machine_settings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines import build_engine
from trainer.engines.base import Engine, holds_whole_weights
from trainer.loop.step import Mechanism, train_step
from trainer.optimizers.adam_bc import NoiseVariance
from trainer.ranks import distributed
from trainer.ranks.discovery import discover_ranks
from trainer.run.batches import LogicalBatches
from trainer.run.ledger import RunLedger

MICRO_BATCH_SIZE = 64


SAMPLE_RATE = 0.25
"""The sandbox samples at a high rate, so that few steps say much; sigma and C are the run's own."""


@dataclass(frozen=True)
class SandboxSettings:
    """What the parent process decides.

    Attributes:
        audited: the frozen fields of the audited run's plan.
        present: the secret coins, one per canary.
    """

    audited: dict[str, Any]
    num_single: int
    silent_steps: int
    noisy_steps: int
    engine: EngineName
    ds_config: str
    clipping_mode: Mode
    present: list[bool]

    @cached_property
    def run_plan(self) -> PrivacyPlan:
        """The plan of the audited run."""
        return PrivacyPlan.from_frozen(self.audited)

    def canaries(self) -> Canaries:
        return make_canaries(self.num_single, self.run_plan.max_grad_norm)

    def plan(self) -> PrivacyPlan:
        """The audited run's sigma, C and slack; a sampling rate with more power."""
        run, num_examples = self.run_plan, len(self.present)
        adaptive = run.adaptive_clipping
        if adaptive is not None:
            # The run's releases, while C stays in its place: its update is post-processing, which the ledger's audit checks.
            adaptive = replace(adaptive, clipbound_learning_rate=1e-13 / adaptive.unclipped_num_std)
        return make_plan(
            PlanRequest(
                num_examples=num_examples,
                expected_batch_size=round(SAMPLE_RATE * num_examples),
                num_steps=self.silent_steps + self.noisy_steps,
                noise_multiplier=run.noise_multiplier,
                target_delta=run.target_delta,
                max_grad_norm=run.max_grad_norm,
                clipping_function=run.clipping_function,
                sensitivity_slack=SENSITIVITY_SLACK,
                informal_reasons=("it is a sandbox of an audit",),
                noise_source=run.noise_source,
                adaptive_clipping=adaptive,
                allow_small_noise=True,
            )
        )

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class WatchedNoise:
    """Passes a source on and keeps what it gave; silent, it returns zeros."""

    def __init__(self, source: NoiseSource) -> None:
        self._source = source
        self._step: list[Tensor] = []
        self.silent = True

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        draw = self._source.standard_normal(count, device)
        self._step.append(draw.detach().cpu().double().clone())
        return torch.zeros_like(draw) if self.silent else draw

    def take(self) -> np.ndarray:
        """Everything drawn since the last call."""
        drawn = torch.cat(self._step).numpy() if self._step else np.zeros(0)
        self._step = []
        return drawn


class _Killed:
    """A ledger whose program dies between the update and its `done`."""

    def __init__(self, ledger: RunLedger) -> None:
        self._ledger = ledger

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        self._ledger.intent(step, releases=releases)

    def done(self, step: int) -> None:
        pass


class _Tape:
    """This rank's weights, draws and members, attempt by attempt."""

    def __init__(self, engine: Engine, noise: WatchedNoise) -> None:
        self._engine, self._noise = engine, noise
        self._pieces = list(engine.layout.owned_by(distributed.rank()))
        self._count = sum(piece.length for piece in self._pieces)
        self._weights: list[np.ndarray] = [self._owned()]
        self._draws: list[np.ndarray] = []
        self._num_draws: list[int] = []
        self._ids: list[np.ndarray] = []
        self._digests: list[str] = []
        self._counts: list[tuple[float, float]] = []

    def note(self, plan: StepPlan, released_count: float | None) -> None:
        """After a step; `released_count` is the noised centred count of adaptive clipping."""
        drawn = self._noise.take()
        if released_count is not None and distributed.rank() == 0:  # its noise is the last number that rank 0 draws
            drawn, count_draws = drawn[: self._count], drawn[self._count :]
            self._counts.append((released_count, float(count_draws[0]) if len(count_draws) == 1 else np.nan))
        self._num_draws.append(len(drawn))
        self._draws.append(drawn if len(drawn) == self._count else np.full(self._count, np.nan))
        self._weights.append(self._owned())
        self._ids.append(plan.example_ids)
        whole = hashlib.sha256()  # this rank's weights in compute precision
        for parameter in self._engine.module.parameters():
            whole.update(parameter.detach().cpu().float().numpy().tobytes())
        self._digests.append(whole.hexdigest() if holds_whole_weights(self._engine) else "")

    def _owned(self) -> np.ndarray:
        parts = [state.tensors["param"].detach().cpu().double().numpy().copy() for state in self._engine.state()]
        return np.concatenate(parts) if parts else np.zeros(0)

    def save(self, folder: Path) -> None:
        np.savez(
            folder / f"rank-{distributed.rank()}.npz",
            pieces=json.dumps(self._pieces),
            shapes=json.dumps({name: list(shape) for name, shape in self._engine.shapes.items()}),
            weights=np.stack(self._weights),
            draws=np.stack(self._draws),
            num_draws=np.array(self._num_draws),
            ids=np.concatenate(self._ids),
            counts=np.array([len(ids) for ids in self._ids]),
            digests=np.array(self._digests),
            counts_of_unclipped=np.array(self._counts).reshape(-1, 2),
        )


def run_sandbox(settings: SandboxSettings, device: torch.device, folder: Path, source: NoiseSource) -> None:
    """All attempts of this rank; leaves rank-R.npz in `folder`. Collective."""
    plan, canaries = settings.plan(), settings.canaries()
    present_N = np.array(settings.present)
    model = CanaryModel()
    check_against_autograd(model, canaries.batch(np.arange(16), np.ones_like(present_N), 16).inputs)
    # A power of two above any gradient: then w -= lr * g / (|g| + eps) is w -= g up to rounding.
    enormous = 2.0 ** (30 + max(0, math.ceil(math.log2(plan.max_grad_norm))))
    optimizer = OptimizerSection.model_construct(peak_lr=enormous, betas=(0.0, 0.0), eps=enormous)  # above any recipe's
    machine = load_machine_settings(Path(settings.ds_config))
    engine = build_engine(settings.engine, model, optimizer, machine, device, MICRO_BATCH_SIZE)
    noise = WatchedNoise(source)
    clipped = plan.clipped_sum(engine.module, shapes=engine.shapes, mode=settings.clipping_mode)
    tape = _Tape(engine, noise)

    last_silent = settings.silent_steps
    for first, last, killed_at in ((1, last_silent, last_silent), (last_silent, plan.num_steps, None)):
        ledger = open_sandbox_ledger(folder, plan)
        nonce = ledger.start_session()
        batches = LogicalBatches(
            plan.sampler, plan.expected_batch_size, ledger.key, nonce, ledger.attempts, MICRO_BATCH_SIZE
        )
        for step_plan in batches.plans(first, last):
            step, ids = step_plan.step, step_plan.example_ids
            noise.silent = step <= last_silent
            mechanism = Mechanism(
                plan=plan,
                clipped=clipped,
                engine=engine,
                ledger=_Killed(ledger) if step == killed_at else ledger,
                noise=noise,
                noise_variance=NoiseVariance(optimizer.betas[1]),
                learning_rate=lambda step: optimizer.peak_lr,
            )
            micro_batches = (
                canaries.batch(ids[start : start + MICRO_BATCH_SIZE], present_N, MICRO_BATCH_SIZE)
                for start in range(0, step_plan.num_micro_batches * MICRO_BATCH_SIZE, MICRO_BATCH_SIZE)
            )
            ledger.note(step_plan)
            record = train_step(mechanism, step, micro_batches)
            fraction = record.public.get("privacy/noised_unclipped_fraction")
            tape.note(step_plan, None if fraction is None else (fraction.value - 0.5) * plan.expected_batch_size)
        ledger.release()
    tape.save(folder)


def open_sandbox_ledger(folder: Path, plan: PrivacyPlan) -> RunLedger:
    """Opens the sandbox's ledger and key as a start of a run does. Collective."""
    key, members = folder / "sampling.key", folder / "members.jsonl"

    def open_on_main() -> tuple[Ledger, SamplingKey, PrivacyPlan]:
        path = folder / "ledger.jsonl"
        return *open_run_state(path, key, plan, data_manifest=b"canaries", members=members), plan

    # A sandbox claims nothing, so no epsilon table is made.
    return RunLedger.open(open_on_main, key, table=folder / "epsilon-table.json", members=members)


def main(arguments: list[str], source: NoiseSource | None = None) -> None:
    """`FOLDER`, with settings.json inside, in the environment of a launcher. Never returns."""
    folder = Path(arguments[0])
    torch.set_num_threads(1)
    settings = SandboxSettings(**json.loads((folder / "settings.json").read_text()))
    device = distributed.start(discover_ranks(os.environ))
    run_sandbox(settings, device, folder, source or settings.plan().noise())
    distributed.finish(0)


if __name__ == "__main__":
    main(sys.argv[1:])
