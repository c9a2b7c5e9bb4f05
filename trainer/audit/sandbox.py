"""One rank of a sandbox run: the real steps, on canaries, with everything written down that an audit needs.

Started by `trainer/audit/mechanism.py`, one process per rank. Everything on the way of a gradient is what training uses:
sampling key and coins, loader, ledger, `train_step`, clipping, engine, reduction, noise. Only three things differ: the task
(trainer/audit/task.py), an AdamW whose settings make it w -= gradient exactly (betas 0; learning rate and epsilon equal
and enormous), and a noise source that is watched, and silent in the first steps. What reaches the model and the optimizer is
noted where it arrives, and the file layer and the entropy are watched (trainer/audit/watch.py).

    silent steps 1..S; step S is "killed" before its `done`, and tried again in a new session; then T noisy steps, with
    correlated noise in two sessions, of which the second must not use the noise of the first
"""

import itertools
import json
import math
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.reading.loader import Loader, StepPlan
from privacy.clipping.clipped_sum import Mode
from privacy.clipping.selfcheck import check_against_autograd
from privacy.correlated.strategy import Strategy
from privacy.ledger.ledger import Ledger
from privacy.ledger.run_state import open_run_state
from privacy.noise import NoiseSource
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import SENSITIVITY_SLACK, Release
from privacy.run.ledger import RunLedger
from privacy.sampling.keys import SamplingKey
from privacy.step.batches import Dealt, LogicalBatches
from privacy.step.engine import Engine, GradShard
from privacy.step.noise_variance import NoiseVariance
from privacy.step.step import Mechanism, train_step
from trainer.audit.rounding import sum_of_neighbours
from trainer.audit.task import UNREACHED, Canaries, CanaryExample, CanaryModel, make_canaries, write_shard
from trainer.audit.watch import Watch, replaced, watching
from trainer.config.machine import load_machine_settings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines import build_engine
from trainer.ranks import distributed
from trainer.ranks.discovery import discover_ranks

MICRO_BATCH_SIZE = 64
LEDGER, KEY = "ledger.jsonl", "sampling.key"

MOST_BANDS = 8
"""A sandbox takes few steps, so of more bands it audits the first."""
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
        """The audited run's sigma, C and slack, and its bands or the first of them; a sampling rate with more power."""
        run, num_examples = self.run_plan, len(self.present)
        bands, first = min(run.bands, MOST_BANDS), run.coefficients[:MOST_BANDS]
        adaptive = run.adaptive_clipping
        if adaptive is not None:
            # The run's releases, while C stays in its place: its update is post-processing, which the ledger's audit checks.
            adaptive = replace(adaptive, clipbound_learning_rate=1e-13 / adaptive.unclipped_num_std)
        return make_plan(
            PlanRequest(
                num_examples=num_examples,
                expected_batch_size=round(SAMPLE_RATE * num_examples / bands),
                num_steps=self.silent_steps + self.noisy_steps,
                noise_multiplier=run.noise_multiplier,
                target_delta=run.target_delta,
                max_grad_norm=run.max_grad_norm,
                clipping_function=run.clipping_function,
                arithmetic=run.arithmetic,
                sensitivity_slack=SENSITIVITY_SLACK if run.arithmetic == "floating" else 0.0,
                informal_reasons=("it is a sandbox of an audit",),
                adaptive_clipping=adaptive,
                bands=bands,
                strategy=run.strategy,
                coefficients=Strategy.of_unit_length(first).coefficients if first else (),
                allow_small_noise=True,
            )
        )

    @property
    def sessions(self) -> list[tuple[int, int]]:
        """(first, last) step of each session."""
        silent, last = self.silent_steps, self.silent_steps + self.noisy_steps
        middle = silent + self.noisy_steps // 2
        noisy = [(silent, last)] if self.run_plan.bands == 1 else [(silent, middle), (middle + 1, last)]
        return [(1, silent), *noisy]

    @property
    def session_starts(self) -> tuple[int, ...]:
        """Index of the first attempt of each session."""
        lengths = [last - first + 1 for first, last in self.sessions]
        return tuple(itertools.accumulate([0, *lengths[:-1]]))

    def to_json(self) -> str:
        return json.dumps(asdict(self))


class WatchedNoise:
    """Passes a source on and keeps what it gave; silent, it returns zeros."""

    def __init__(self, source: NoiseSource, watch: Watch) -> None:
        self._source, self._watch = source, watch
        self._step: list[Tensor] = []
        self._least_entropy = sys.maxsize
        self.silent = True

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        return self._kept(lambda: self._source.standard_normal(count, device), 1.0)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        return self._kept(lambda: self._source.rounded_normal(deviation, count, device), deviation)

    def _kept(self, draw: Callable[[], Tensor], standard_deviation: float) -> Tensor:
        """What it keeps is in units of the standard deviation."""
        self._watch.release()
        before = self._watch.entropy_bytes
        drawn = draw()
        self._least_entropy = min(self._least_entropy, self._watch.entropy_bytes - before)
        self._step.append(drawn.detach().cpu().double() / standard_deviation)
        return torch.zeros_like(drawn) if self.silent else drawn

    def take(self) -> tuple[np.ndarray, int]:
        """Everything drawn since the last call, and the fewest bytes of entropy that a draw took from the system."""
        drawn = torch.cat(self._step).numpy() if self._step else np.zeros(0)
        self._step, least, self._least_entropy = [], self._least_entropy, sys.maxsize
        return drawn, least


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

    def __init__(self, engine: Engine, noise: WatchedNoise, watch: Watch) -> None:
        self._engine, self._noise, self._watch = engine, noise, watch
        self._pieces = list(engine.layout.owned_by(distributed.rank()))
        self._count = sum(piece.length for piece in self._pieces)
        self._weights: list[np.ndarray] = [self._owned()]
        self._columns: dict[str, list[Any]] = {
            name: []
            for name in (
                "steps", "draws", "num_draws", "ids", "keys", "counts", "handed", "counts_of_unclipped",
                "released_at", "least_entropy",
            )
        }  # fmt: skip
        self._seen: list[tuple[Tensor, Tensor]] = []
        self._handed = np.zeros(0)

    def watch_batches(self, batches: Iterator[Batch], present_N: np.ndarray) -> Iterator[Batch]:
        """Notes who reaches the model, under which key; zeroes out, as the adjacency does, canaries that are not in the data."""
        for batch in batches:
            inputs = dict(batch.inputs)
            canaries_B, keys_B = inputs.pop("canaries_B"), inputs.pop("keys_B")
            self._seen.append((canaries_B[~batch.is_padding_B], keys_B[~batch.is_padding_B]))
            yield batch._replace(
                inputs=inputs, is_padding_B=batch.is_padding_B | ~torch.from_numpy(present_N)[canaries_B]
            )

    def watch_step(self, step: Callable[..., None]) -> Callable[..., None]:
        """Notes, in fp64, what the optimizer gets."""

        def noting(shards: Sequence[GradShard], **rates: Any) -> None:
            self._handed = (
                torch.cat([s.values.detach().cpu().double() for s in shards]).numpy() if shards else np.zeros(0)
            )
            step(shards, **rates)

        return noting

    def note(self, step: int, released_count: float | None) -> None:
        """After a step; `released_count` is the noised centred count of adaptive clipping."""
        drawn, least_entropy = self._noise.take()
        if released_count is not None and distributed.rank() == 0:  # its noise is the last number that rank 0 draws
            drawn, count_draws = drawn[: self._count], drawn[self._count :]
            self._columns["counts_of_unclipped"].append(
                (released_count, float(count_draws[0]) if len(count_draws) == 1 else np.nan)
            )
        ids, keys = (torch.cat(column) for column in zip(*self._seen, strict=True))
        noted = {
            "steps": step,
            "draws": drawn if len(drawn) == self._count else np.full(self._count, np.nan),
            "num_draws": len(drawn),
            "ids": ids.numpy(),
            "keys": keys.numpy(),
            "counts": len(ids),
            "handed": self._handed,
            "released_at": self._watch.first_release(),
            "least_entropy": least_entropy,
        }
        for name, value in noted.items():
            self._columns[name].append(value)
        self._weights.append(self._owned())
        self._seen = []

    def _owned(self) -> np.ndarray:
        parts = [state.tensors["param"].detach().cpu().double().numpy().copy() for state in self._engine.state()]
        return np.concatenate(parts) if parts else np.zeros(0)

    def save(self, folder: Path, neighbours: float) -> None:
        columns: dict[str, Any] = dict(self._columns)
        for name in ("ids", "keys"):
            columns[name] = np.concatenate(columns[name])
        columns["counts_of_unclipped"] = np.array(columns["counts_of_unclipped"]).reshape(-1, 2)
        np.savez(
            folder / f"rank-{distributed.rank()}.npz",
            pieces=json.dumps(self._pieces),
            shapes=json.dumps({name: list(shape) for name, shape in self._engine.shapes.items()}),
            weights=np.stack(self._weights),
            neighbours=neighbours,
            ledger_durable=self._watch.durable(folder / LEDGER),
            folder_durable=self._watch.durable(folder),
            **columns,
        )


def run_sandbox(settings: SandboxSettings, device: torch.device, folder: Path, source: NoiseSource) -> None:
    """All attempts of this rank; leaves rank-R.npz in `folder`. Collective."""
    plan, canaries = settings.plan(), settings.canaries()
    present_N = np.array(settings.present)
    model = CanaryModel()
    # Canaries that live in all layers at once. The check precedes the engine, which shards, so the clipper below asks for none.
    spread = np.flatnonzero((canaries.gains_NG != 0).all(1) & ~canaries.hostile_N)[:3]
    check_against_autograd(model, canaries.batch(spread, np.ones_like(present_N), 3).inputs, unreached=UNREACHED)
    table = distributed.on_main(lambda: write_shard(folder, len(canaries)))
    loader = Loader(table, CanaryExample(canaries), micro_batch_size=MICRO_BATCH_SIZE, num_workers=0)
    # A power of two above any gradient: then w -= lr * g / (|g| + eps) is w -= g up to rounding.
    enormous = 2.0 ** (30 + max(0, math.ceil(math.log2(plan.max_grad_norm))))
    optimizer = OptimizerSection.model_construct(peak_lr=enormous, betas=(0.0, 0.0), eps=enormous)  # above any recipe's
    machine = load_machine_settings(Path(settings.ds_config))
    engine = build_engine(settings.engine, model, optimizer, machine, device, MICRO_BATCH_SIZE)
    clipped = plan.clipped_sum(engine.module, shapes=engine.shapes, mode=settings.clipping_mode, self_check=False)
    neighbours = sum_of_neighbours(clipped, engine, plan.max_grad_norm)
    with watching() as watch:
        noise = WatchedNoise(source, watch)
        tape = _Tape(engine, noise, watch)
        with replaced(engine, "step", tape.watch_step):
            last_silent = settings.silent_steps
            for session, (first, last) in enumerate(settings.sessions):
                ledger = open_sandbox_ledger(folder, plan)
                nonce = ledger.start_session()
                batches = LogicalBatches(
                    plan.sampler, ledger.key, nonce, ledger.attempts, MICRO_BATCH_SIZE, charged=ledger.charged_before
                )
                mechanism = Mechanism(
                    plan=plan,
                    clipped=clipped,
                    engine=engine,
                    task=engine.module,
                    ledger=ledger,
                    noise=noise,
                    noise_variance=NoiseVariance(optimizer.betas[1]),
                    learning_rate=lambda step: optimizer.peak_lr,
                    note_charge=lambda step: None,
                    keep_noise_on=None,
                )
                for step_plan, micro_batches in loader.steps(itertools.starmap(StepPlan, batches.plans(first, last))):
                    step = step_plan.step
                    noise.silent = step <= last_silent
                    mechanism.ledger = _Killed(ledger) if (session, step) == (0, last_silent) else ledger
                    ledger.note(Dealt(*step_plan), MICRO_BATCH_SIZE)
                    record = train_step(mechanism, step, tape.watch_batches(micro_batches, present_N))
                    fraction = record.public.get("privacy/noised_unclipped_fraction")
                    tape.note(step, None if fraction is None else (fraction.value - 0.5) * plan.expected_batch_size)
                ledger.release()
        tape.save(folder, neighbours)


def open_sandbox_ledger(folder: Path, plan: PrivacyPlan) -> RunLedger:
    """Opens the sandbox's ledger and key as a start of a run does. Collective."""
    key, members = folder / KEY, folder / "members.jsonl"

    def open_on_main() -> tuple[Ledger, SamplingKey, PrivacyPlan]:
        return *open_run_state(folder / LEDGER, key, plan, data_manifest=b"canaries", members=members), plan

    return RunLedger.open(open_on_main, key, members=members)


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
