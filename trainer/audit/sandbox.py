"""`audit.py mechanism`: the real steps on canaries, on one process per rank, with everything written down that an audit needs.

Everything on the way of a gradient is what training uses: sampling key and coins, loader, ledger, `train_step`, clipping,
engine, reduction, noise. Only three things differ: the task (trainer/audit/task.py), an AdamW whose settings make it
w -= gradient exactly (betas 0; learning rate and epsilon equal and enormous), and a noise source that is watched, and silent in
the first steps. What reaches the model and the optimizer is noted where it arrives, and the file layer and the entropy are
watched. Rank 0 puts the ranks' tapes together and judges them (privacy/audit/mechanism.py).

    silent steps 1..S; step S is "killed" before its `done`, and tried again in a new session; then T noisy steps, with
    correlated noise in two sessions, of which the second must not use the noise of the first
"""

import itertools
import json
import math
import os
import pickle
import secrets
import socket
import tempfile
import time
import warnings
from contextlib import ExitStack, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from unittest import mock

import numpy as np
import torch
from torch.multiprocessing.spawn import ProcessException, spawn

from data.reading.loader import Loader, StepPlan
from privacy.audit.mechanism import RankTape, audit_mechanism
from privacy.audit.report import AuditReport
from privacy.clipping.clipped_sum import Mode
from privacy.clipping.functions import FUNCTIONS
from privacy.clipping.selfcheck import check_against_autograd
from privacy.correlated.strategy import Strategy
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.ledger.run_state import open_run_state
from privacy.noise import NoiseSource
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import SENSITIVITY_SLACK
from privacy.run.ledger import RunLedger
from privacy.sampling.keys import SamplingKey
from privacy.step import collectives
from privacy.step.batches import Dealt, LogicalBatches, most_rows
from privacy.step.noise_variance import NoiseVariance
from privacy.step.step import Mechanism, train_step
from trainer.audit.tape import Tape, beside, flat
from trainer.audit.task import (
    AMPLITUDE,
    NEIGHBOUR_ROWS,
    PARTIAL,
    UNREACHED,
    CanaryModel,
    make_canaries,
    sum_of_neighbours,
)
from trainer.config.machine import load_machine_settings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName, load_config
from trainer.engines import build_engine
from trainer.errors import ConfigError
from trainer.ranks import distributed
from trainer.ranks.discovery import Ranks

ROOT = Path(__file__).resolve().parents[2]
MICRO_BATCH_SIZE = 64
MOST_BANDS = 8
"""A sandbox takes few steps, so of more bands it audits the first."""
SAMPLE_RATE = 0.25
"""The sandbox samples at a high rate, so that few steps say much; sigma and C are the run's own."""


class SandboxFailed(RuntimeError):
    """The sandbox did not end well; nothing is known about the mechanism."""

    exit_code = 1


@dataclass(frozen=True)
class SandboxSettings:
    """What is audited, and at which size."""

    run: PrivacyPlan
    engine: EngineName
    ds_config: Path
    clipping_mode: Mode = "bookkeeping"
    num_single: int = 1024
    silent_steps: int = 8
    noisy_steps: int = 50

    def plan(self, num_examples: int) -> PrivacyPlan:
        """The audited run's sigma, C and slack, and its bands or the first of them; a sampling rate with more power."""
        run = self.run
        bands, first = min(run.bands, MOST_BANDS), run.coefficients[:MOST_BANDS]
        adaptive = run.adaptive_clipping
        if adaptive is not None:
            # The run's releases, while C stays in its place: its update is post-processing, which the ledger's audit checks.
            adaptive = replace(adaptive, clipbound_learning_rate=1e-13 / adaptive.unclipped_num_std)
        # The slack is what contract 4 states for floating point. A sandbox claims no epsilon, which its plan says, and little
        # noise is no reason to refuse it.
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


def mechanism_audit(
    run_dir: Path, *, engine: EngineName, ds_config: Path | None, ranks: int = 2, timeout: float = 600
) -> AuditReport:
    """Audits the mechanism with the privacy parameters of a run's ledger (about half a minute).

    Raises:
        ConfigError: no run there, or one without noise.
        SandboxFailed: a rank died.
    """
    if not (run_dir / "ledger.jsonl").exists():
        raise ConfigError(f"run folder {run_dir} has no ledger.jsonl: nothing was trained here")
    plan = read_ledger(run_dir / "ledger.jsonl").plan
    if not plan.enabled or plan.noise_multiplier == 0:
        raise ConfigError(f"run folder {run_dir}: trained without noise, so there is no mechanism to audit")
    # Engine and number of ranks are the caller's, since a run may go from one to another; the rest follows the folder.
    recipe, recorded, chosen = (run_dir / name for name in ("config.toml", "ds_config.json", "private/chosen.json"))
    machine = ds_config or (recorded if recorded.exists() else ROOT / "ds_configs" / "zero3.json")
    # The mode of the run's recipe, or what `auto` chose at the latest start; bookkeeping where the folder does not say.
    mode = load_config(recipe).privacy.clipping_mode if recipe.exists() else "bookkeeping"
    if mode == "auto" and chosen.exists():
        mode = json.loads(chosen.read_text()).get("clipping_mode", {}).get("mode", "bookkeeping")
    clipping: Mode = "two_pass" if mode == "two_pass" else "bookkeeping"
    if plan.arithmetic == "certified":
        clipping = "certified"
    settings = SandboxSettings(plan, engine, machine.resolve(), clipping)
    # Another program may take the port before rank 0 does. Then the ranks say so, and the audit is started again.
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with tempfile.TemporaryDirectory(prefix="audit-") as folder:
        # Fresh interpreters: threads of torch and locks of this process would not survive a fork.
        started = spawn(_rank, (ranks, port, settings, Path(folder)), ranks, join=False)
        try:
            deadline = time.monotonic() + timeout
            while not started.join(max(0.0, deadline - time.monotonic())):
                if time.monotonic() >= deadline:
                    raise SandboxFailed(f"the sandbox did not end within {timeout:.0f} s")
        except ProcessException as error:
            last = str(error).strip().splitlines()[-1]
            raise SandboxFailed(f"sandbox rank {error.error_index} did not end well: {last}") from error
        finally:
            # Ranks wait for one another, so that one that failed would leave the others waiting for hours.
            for process in started.processes:
                process.kill()
                process.join()
        report: AuditReport = pickle.loads((Path(folder) / "report").read_bytes())
    return report


def _rank(rank: int, world_size: int, port: int, settings: "SandboxSettings", folder: Path) -> None:
    """One process of the sandbox, on this machine's CPU; rank 0 leaves the report. Never returns."""
    for name in [name for name in os.environ if name.startswith(("TORCHELASTIC", "OMPI_"))]:
        del os.environ[name]  # the audit may itself run under a launcher, whose ranks are not the sandbox's
    os.environ |= {"DS_ACCELERATOR": "cpu", "CUDA_VISIBLE_DEVICES": ""}
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    device = distributed.start(Ranks(rank, rank, world_size, port=port))
    report = run_sandbox(settings, device, folder)
    if report is not None:
        (folder / "report").write_bytes(pickle.dumps(report))
    distributed.finish(0)


def run_sandbox(
    settings: SandboxSettings, device: torch.device, folder: Path, source: NoiseSource | None = None
) -> AuditReport | None:
    """All attempts of this rank; on rank 0 what follows from those of all. Collective."""
    run, canaries = settings.run, make_canaries(settings.num_single, settings.run.max_grad_norm)
    plan = settings.plan(len(canaries))
    coins = distributed.broadcast_object([bool(secrets.randbits(1)) for _ in range(len(canaries))])
    present_N = np.array(coins)
    # Everything up to the watch happens in a start of training too, in this order.
    model = CanaryModel()
    # Canaries that live in all layers at once. The check precedes the engine, which shards, so the clipper below asks for none.
    spread = np.flatnonzero((canaries.gains_NG != 0).all(1) & ~canaries.hostile_N)[:3]
    check_against_autograd(model, canaries.inputs(spread), unreached=UNREACHED)
    table = distributed.on_main(lambda: canaries.write_shard(folder))
    loader = Loader(table, canaries, micro_batch_size=MICRO_BATCH_SIZE, num_workers=0)
    # A power of two above any gradient: then w -= lr * g / (|g| + eps) is w -= g up to rounding.
    enormous = 2.0 ** (30 + max(0, math.ceil(math.log2(plan.max_grad_norm))))
    optimizer = OptimizerSection.model_construct(peak_lr=enormous, betas=(0.0, 0.0), eps=enormous)  # above any recipe's
    machine = load_machine_settings(settings.ds_config)
    engine = build_engine(settings.engine, model, optimizer, machine, device, MICRO_BATCH_SIZE)
    make = partial(plan.clipped_sum, engine.module, shapes=engine.shapes, mode=settings.clipping_mode, self_check=False)
    larger = make(rows=NEIGHBOUR_ROWS)
    neighbours = sum_of_neighbours(larger, engine, plan.max_grad_norm)
    larger.detach()
    clipped = make(rows=most_rows(plan, MICRO_BATCH_SIZE))

    # A copy, since an engine may hand out views of what it updates in place.
    def weights() -> np.ndarray:
        return flat([state.tensors["param"] for state in engine.state()]).copy()

    silent, last, tape, at_start = settings.silent_steps, plan.num_steps, Tape(source or run.noise()), weights()
    middle = silent + settings.noisy_steps // 2
    sessions = [(1, silent), *([(silent, last)] if run.bands == 1 else [(silent, middle), (middle + 1, last)])]
    # Step S is tried twice, and each session opens the ledger anew, so that retries and restarts are audited as well.
    # The watch begins after the sums of neighbours, which no ledger charges: they never leave this process.
    with ExitStack() as watched:
        for owner, name in ((os, "fsync"), (os, "urandom"), (engine, "step")):
            watch = partial(getattr(tape, name), getattr(owner, name))
            watched.enter_context(mock.patch.object(owner, name, watch))
        reduce = partial(tape.reduce, collectives.reduce_scatter_sum)
        watched.enter_context(mock.patch.object(collectives, "reduce_scatter_sum", reduce))
        for session, (first, stop) in enumerate(sessions):
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
                noise=tape,
                noise_variance=NoiseVariance(optimizer.betas[1]),
                learning_rate=lambda step: optimizer.peak_lr,
                note_charge=lambda step: None,
                keep_noise_on=None,
            )
            for step_plan, micro_batches in loader.steps(itertools.starmap(StepPlan, batches.plans(first, stop))):
                step = step_plan.step
                # Silent steps show the clipped sums exactly; the noise is drawn all the same, and its numbers are kept.
                tape.silent = step <= silent
                ledger.note(Dealt(*step_plan), MICRO_BATCH_SIZE)
                is_killed = (session, step) == (0, silent)  # between the update and its `done`
                with mock.patch.object(ledger, "done") if is_killed else nullcontext():
                    record = train_step(mechanism, step, tape.batches(micro_batches, present_N))
                fraction = record.public.get("privacy/noised_unclipped_fraction")
                # What was published is a fraction of the public batch size, centred at one half.
                count = None if fraction is None else (fraction.value - 0.5) * plan.expected_batch_size
                tape.end(step, session, weights(), count)
            ledger.release()
    # Each rank says what its own coordinates mean, so that nobody has to put shards together.
    shapes = {name: shape.numel() for name, shape in engine.shapes.items()}
    touching = {name: canaries.touching(name, size) for name, size in shapes.items()}
    pieces = engine.layout.owned_by(distributed.rank())
    owners = beside([touching[piece.name][piece.offset : piece.offset + piece.length] for piece in pieces])
    names = beside([np.full(piece.length, piece.name) for piece in pieces])
    rank_tape = RankTape(tape.attempts, tape.fsyncs, names, owners, at_start, neighbours)
    tapes = distributed.gather_objects(rank_tape)
    if distributed.rank() != 0:
        return None
    # The least that any canary contributes after clipping: the loudest and the quietest norm, through the function by which the
    # run clips. Where each layer has a bound of its own, a canary in one layer contributes the smallest of them.
    function = FUNCTIONS[run.clipping_function](list(shapes), run.max_grad_norm)
    bound = min(function.bounds)
    norms = torch.tensor([AMPLITUDE, 2 * PARTIAL], dtype=torch.float64) * run.max_grad_norm
    # The noise is judged by what the audited run states, never by what the sandbox says that it used.
    sigma, adaptive = run.noise_multiplier, run.adaptive_clipping
    if adaptive is not None:
        sigma = adaptive.gradient_noise_multiplier(sigma)
    size = f"{silent} silent and {settings.noisy_steps} noisy steps, q = {SAMPLE_RATE}"
    clipping = f"{run.clipping_function} clipping ({settings.clipping_mode})"
    return audit_mechanism(
        tapes,
        plan,
        *_paths(folder)[:2],
        noise_std=sigma * run.max_grad_norm,
        count_std=None if adaptive is None else adaptive.unclipped_num_std,
        smallest_norm=float((function.weight(norms, bound) * norms).clamp(max=bound).min()),
        rows_per_rank=MICRO_BATCH_SIZE * math.ceil(plan.max_batch_size / len(tapes) / MICRO_BATCH_SIZE),
        num_silent=silent + 1,  # the killed step has two attempts
        present_N=present_N,
        hostile_N=canaries.hostile_N,
        sandbox=f"{len(tapes)} ranks, engine {settings.engine}, {size}, {clipping}",
    )


def _paths(folder: Path) -> tuple[Path, Path, Path]:
    """The sandbox's ledger, sampling key, and record of attempts."""
    return folder / "ledger.jsonl", folder / "sampling.key", folder / "members.jsonl"


def open_sandbox_ledger(folder: Path, plan: PrivacyPlan) -> RunLedger:
    """Opens the sandbox's ledger and key as a start of a run does. Collective."""
    ledger, key, members = _paths(folder)

    def open_on_main() -> tuple[Ledger, SamplingKey, PrivacyPlan]:
        return *open_run_state(ledger, key, plan, data_manifest=b"canaries", members=members), plan

    return RunLedger.open(open_on_main, key, members=members)
