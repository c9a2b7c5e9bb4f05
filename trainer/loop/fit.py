"""Repeats `train_step`, watches the budget and requests to stop, and writes metrics and checkpoints."""

import itertools
from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist

from data.reading.loader import StepPlan
from privacy.checkpoints.read import has_checkpoints
from privacy.checkpoints.write import require_finite
from privacy.step import clock
from privacy.step.engine import ShardState, holds_whole_weights
from privacy.step.step import train_step
from trainer.errors import StepDropped
from trainer.loop.profiling import StepProfiler
from trainer.loop.reporting import StepReporter
from trainer.loop.stopping import STOPPED_EARLY, StopRequests
from trainer.ranks import distributed

if TYPE_CHECKING:
    from trainer.run.run import Run

DONE, BUDGET_SPENT = 0, 3


def fit(run: "Run") -> int:
    """Trains from the run's first step to its last; returns the exit code of design: 0, 3 (budget spent) or 7 (stopped)."""
    num_steps = run.config.train.num_steps
    reporter = StepReporter(run)
    profiler = StepProfiler(run.folder.private / "profile", run.config.train.profile)
    grace = run.config.train.grace_seconds
    words = (
        f"stopped: a step did not end within {grace:g} s of SIGTERM or SIGINT; it is abandoned, what the ledger charged for it "
        "stays charged, and the same command resumes from the newest checkpoint"
    )
    requests = StopRequests(
        run.folder.stop,
        grace_seconds=grace,
        max_minutes=run.config.train.max_minutes,
        abandon=lambda: distributed.abandon(words, STOPPED_EARLY),
    )
    # A step may be dropped until its intent where no collective comes before it.
    may_drop = holds_whole_weights(run.mechanism.engine) and not run.mechanism.clipped.leaves_process
    steps = run.loader.steps(itertools.starmap(StepPlan, run.batches.plans(run.first_step, num_steps)))
    step = run.first_step - 1
    # By default a twentieth of the reserve lies between checkpoints, so that it lasts for twenty crashes.
    interval = run.config.train.checkpoint_every or max(1, run.mechanism.plan.reserved_attempts // 20)
    # A run that ends before its first step still leaves a model.
    saved = step if step > 0 or has_checkpoints(run.folder.checkpoints) else None
    outcome = DONE
    if step == 0 and run.heldout is not None:
        reporter.heldout(step)
    try:
        while step < num_steps:
            stops = torch.tensor([run.ledger.budget_is_spent(), requests.pending()], dtype=torch.int64)
            dist.all_reduce(stops, op=dist.ReduceOp.MAX)  # equal on all ranks
            if stops.any():
                outcome = BUDGET_SPENT if stops[0] else STOPPED_EARLY
                break
            profiler.before(step + 1)
            started = clock.now()
            plan, micro_batches = next(steps)
            step = plan.step
            run.ledger.note(plan, run.batches.micro_batch_size, run.batches.nodes)
            distributed.note_progress(step)
            if run.sanity is not None:
                micro_batches = run.sanity.before_step(step, micro_batches, plan.num_micro_batches)
            try:
                with requests.step():
                    record = train_step(
                        run.mechanism, step, requests.droppable(micro_batches) if may_drop else micro_batches
                    )
                    if run.sanity is not None:
                        run.sanity.after_step(step)
                    if run.average is not None:
                        run.average.update(step)
                    reporter.step(step, record, clock.since(started))
            except StepDropped:
                step, outcome = step - 1, STOPPED_EARLY
                break
            run.checkpoints.finish()  # one step after it began, whatever the clock: the ledger shows where (contract 12)
            if step % interval == 0 or step == num_steps:
                saved = save(run, step)
    finally:
        steps.close()
    profiler.close()
    if saved != step:
        save(run, step)
    run.checkpoints.finish()
    if outcome == DONE and run.heldout is not None:
        reporter.heldout(step)
    reporter.close()
    requests.close()
    return outcome


def save(run: "Run", step: int) -> int:
    """Writes a checkpoint, or starts to; the ledger notes it when it is whole.

    Raises:
        WeightsNotFinite: there is nothing to save (on rank 0, RemoteError elsewhere).
    """
    require_finite(run.mechanism.engine, step)
    states: Iterable[ShardState] = run.average.states() if run.average is not None else run.mechanism.engine.state()
    states = itertools.chain(states, run.frozen.states())
    run.checkpoints.save(step, states, {**run.mechanism.engine.shapes, **run.frozen.shapes}, run.checkpoint_facts())
    return step
