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
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.reading.loader import StepPlan
from privacy.adaptive_clipping import AdaptiveClipping
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


@dataclass(frozen=True)
class SandboxSettings:
    """What the parent process decides. `present` are the secret coins, one per canary."""

    noise_multiplier: float
    max_grad_norm: float
    target_delta: float
    sample_rate: float
    num_single: int
    silent_steps: int
    noisy_steps: int
    engine: EngineName
    ds_config: str
    noise_source: str
    clipping_function: str
    clipping_mode: Mode
    present: list[bool]
    adaptive: dict[str, float] | None = None
    """The audited run's `AdaptiveClipping`."""

    def canaries(self) -> Canaries:
        return make_canaries(self.num_single, self.max_grad_norm)

    def plan(self) -> PrivacyPlan:
        """The audited run's sigma, C and slack; a sampling rate with more power."""
        num_examples = len(self.canaries())
        return make_plan(
            PlanRequest(
                num_examples=num_examples,
                expected_batch_size=round(self.sample_rate * num_examples),
                num_steps=self.silent_steps + self.noisy_steps,
                noise_multiplier=self.noise_multiplier,
                target_delta=self.target_delta,
                max_grad_norm=self.max_grad_norm,
                clipping_function=self.clipping_function,
                sensitivity_slack=SENSITIVITY_SLACK,
                informal_reasons=("it is a sandbox of an audit",),
                noise_source=self.noise_source,
                adaptive_clipping=None if self.adaptive is None else self._nearly_constant(),
                allow_small_noise=True,
            )
        )

    def _nearly_constant(self) -> AdaptiveClipping:
        """The run's releases, while C stays in its place: it is post-processing, which the ledger's audit looks at."""
        assert self.adaptive is not None
        return AdaptiveClipping(
            **self.adaptive | {"clipbound_learning_rate": 1e-13 / self.adaptive["unclipped_num_std"]}
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
            drawn, own = drawn[: self._count], drawn[self._count :]
            self._counts.append((released_count, float(own[0]) if len(own) == 1 else np.nan))
        self._num_draws.append(len(drawn))
        self._draws.append(drawn if len(drawn) == self._count else np.full(self._count, np.nan))
        self._weights.append(self._owned())
        self._ids.append(plan.example_ids)
        self._digests.append(_replica_digest(self._engine))

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


def _replica_digest(engine: Engine) -> str:
    """Of this rank's whole weights in compute precision; empty where it holds only parts."""
    if not holds_whole_weights(engine):
        return ""
    digest = hashlib.sha256()
    for parameter in engine.module.parameters():
        digest.update(parameter.detach().cpu().float().numpy().tobytes())
    return digest.hexdigest()


def run_sandbox(settings: SandboxSettings, device: torch.device, folder: Path, source: NoiseSource) -> None:
    """All attempts of this rank; leaves rank-R.npz in `folder`. Collective."""
    plan, canaries = settings.plan(), settings.canaries()
    present_N = np.array(settings.present)
    model = CanaryModel()
    check_against_autograd(model, canaries.batch(np.arange(16), np.ones_like(present_N), 16).inputs)
    # A power of two above any gradient: then w -= lr * g / (|g| + eps) is w -= g up to rounding.
    enormous = 2.0 ** (30 + max(0, math.ceil(math.log2(settings.max_grad_norm))))
    optimizer = OptimizerSection.model_construct(peak_lr=enormous, betas=(0.0, 0.0), eps=enormous)  # above any recipe's
    machine = load_machine_settings(Path(settings.ds_config))
    engine = build_engine(settings.engine, model, optimizer, machine, device, MICRO_BATCH_SIZE)
    noise = WatchedNoise(source)
    clipped = plan.clipped_sum(engine.module, shapes=engine.shapes, mode=settings.clipping_mode)
    tape = _Tape(engine, noise)

    def attempts(first: int, last: int, ledger: RunLedger, killed_at: int | None) -> None:
        nonce = ledger.start_session()
        batches = LogicalBatches(
            plan.sampler, plan.expected_batch_size, ledger.key, nonce, ledger.attempts, MICRO_BATCH_SIZE
        )
        for step_plan in batches.plans(first, last):
            step = step_plan.step
            noise.silent = step <= settings.silent_steps
            mechanism = Mechanism(
                plan=plan,
                clipped=clipped,
                engine=engine,
                ledger=_Killed(ledger) if step == killed_at else ledger,
                noise=noise,
                noise_variance=NoiseVariance(optimizer.betas[1]),
                learning_rate=lambda step: optimizer.peak_lr,
            )
            ledger.note(step_plan)
            record = train_step(mechanism, step, _micro_batches(step_plan, canaries, present_N))
            fraction = record.public.get("privacy/noised_unclipped_fraction")
            tape.note(step_plan, None if fraction is None else (fraction - 0.5) * plan.expected_batch_size)

    last_silent = settings.silent_steps
    with_ledger(folder, plan, lambda ledger: attempts(1, last_silent, ledger, killed_at=last_silent))
    with_ledger(folder, plan, lambda ledger: attempts(last_silent, plan.num_steps, ledger, killed_at=None))
    tape.save(folder)


def _micro_batches(plan: StepPlan, canaries: Canaries, present_N: np.ndarray) -> Any:
    for start in range(0, plan.num_micro_batches * MICRO_BATCH_SIZE, MICRO_BATCH_SIZE):
        yield canaries.batch(plan.example_ids[start : start + MICRO_BATCH_SIZE], present_N, MICRO_BATCH_SIZE)


def with_ledger(folder: Path, plan: PrivacyPlan, use: Callable[[RunLedger], None]) -> None:
    """Opens ledger and key as a start of the program does, and lets go of them afterwards. Collective."""
    opened: list[tuple[Ledger, SamplingKey]] = []

    members = folder / "members.jsonl"

    def open_on_main() -> str:
        ledger, key = open_run_state(
            folder / "ledger.jsonl", folder / "sampling.key", plan, data_manifest=b"canaries", members=members
        )
        opened.append((ledger, key))
        return key.commitment()

    commitment = distributed.on_main(open_on_main)
    ledger, key = opened[0] if opened else (None, SamplingKey.load(folder / "sampling.key", commitment))
    no_table = folder / "epsilon-table.json"  # a sandbox claims nothing, so none is made
    use(RunLedger(ledger, key, plan, table=no_table, members=members))
    if ledger is not None:
        ledger.release()


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
