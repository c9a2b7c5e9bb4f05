"""DP-SGD at scale, in the order in which it happens. Start here.

`train_step` is one logical step: clipped sums of all micro-batches, the intent in the ledger (before them, if sums are
communicated with every micro-batch), one reduction, noise by the owner of each shard, division by the public expected batch
size, the optimizer, `done`.
`fit` repeats it, watches the budget and requests to stop, and writes metrics and checkpoints.
"""

import itertools
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch
import torch.distributed as dist
from torch import Tensor

from data.batch import Batch
from privacy.clipping import MicroBatchStats
from privacy.noise import add_noise
from privacy.releases import Release
from trainer.checkpoints.read import newest_checkpoint
from trainer.engines.base import GradShard, ShardState, holds_whole_weights
from trainer.engines.reduction import reduce_to_owners
from trainer.errors import StepDropped
from trainer.loop.adaptive_bound import adapt_bound
from trainer.loop.reporting import StepReporter
from trainer.loop.schedule import learning_rate
from trainer.loop.stopping import STOPPED_EARLY, StopRequests
from trainer.ranks import distributed
from trainer.tasks.base import to_device

if TYPE_CHECKING:
    from trainer.run.run import Run

DONE, BUDGET_SPENT = 0, 3


@dataclass(frozen=True)
class StepRecord:
    """What one step leaves behind.

    `private` holds sums over all ranks, computed without noise: MicroBatchStats' fields and the number of undecodable
    examples. `noised_grad_norm` is post-processing of the noised gradient; `public` holds what else may be published.
    `communication_bytes` is what this rank sent for the sums; it follows from the number of micro-batches.
    """

    lr: float
    noised_grad_norm: float
    private: dict[str, float]
    public: dict[str, float]
    communication_bytes: int


def train_step(run: "Run", step: int, micro_batches: Iterator[Batch]) -> StepRecord:
    """One DP-SGD step on one logical batch. Every rank passes the same number of micro-batches."""
    run.clipped.zero_()
    distributed.traffic.reset()
    releases = run.clipped.releases(run.plan.noise_multiplier)
    noise_std = releases[0]["std"]
    stats: list[MicroBatchStats] = []
    num_undecodable = 0
    if run.clipped.leaves_process:  # sharded accumulation sums over ranks with every micro-batch
        _intend(run, step, releases)
    for batch in micro_batches:  # sum of clipped gradients: no noise, no division; locally also no communication
        is_padding_B = batch.is_padding_B.to(run.engine.device)
        stats.append(run.clipped.add_micro_batch(run.engine.module, to_device(batch.inputs, run.engine), is_padding_B))
        num_undecodable += batch.num_undecodable
    if not run.clipped.leaves_process:
        _intend(run, step, releases)

    shards = reduce_to_owners(run.clipped, run.engine.layout)
    for shard in shards:
        add_noise(shard.values, noise_std, run.noise)
        shard.values.div_(run.plan.expected_batch_size)  # the public constant, never the realised batch size
    lr = learning_rate(step, run.config.train.num_steps, run.config.optimizer.peak_lr, run.config.schedule)
    averaged_std = noise_std / run.plan.expected_batch_size if run.plan.noise_multiplier > 0 else 0.0
    noise_variance = run.noise_variance.after(step, averaged_std)
    run.engine.step(shards, lr=lr, noise_variance=noise_variance)
    public = adapt_bound(run, stats, releases)
    run.ledger.done(step)
    return StepRecord(lr, _norm(shards), _total(stats, num_undecodable), public, distributed.traffic.bytes.total())


def _intend(run: "Run", step: int, releases: list[Release]) -> None:
    """The charge: durable, and acknowledged by all ranks, before anything that depends on a gradient leaves its process."""
    distributed.note_progress(2 * step + 1)
    distributed.agree(ready=True)  # a rank that failed until here, or ran out of time to stop, costs no charge
    run.ledger.intent(step, releases=releases)


def _norm(shards: Sequence[GradShard]) -> float:
    squared = torch.stack([s.values.square().sum() for s in shards]).sum() if shards else torch.zeros(())
    return float(distributed.all_reduce_sum(squared.double().cpu().view(1)).sqrt())


def _total(stats: Sequence[MicroBatchStats], num_undecodable: int) -> dict[str, float]:
    """Sums of the micro-batch statistics over this step and all ranks; private."""
    mine: list[Tensor] = [
        torch.stack([value.double() for value in column]).sum().cpu() for column in zip(*stats, strict=True)
    ]
    totals = distributed.all_reduce_sum(torch.stack([*mine, torch.tensor(float(num_undecodable), dtype=torch.float64)]))
    return dict(zip((*MicroBatchStats._fields, "num_undecodable"), totals.tolist(), strict=True))


def fit(run: "Run") -> int:
    """Trains from the run's first step to its last; returns the exit code of design: 0, 3 (budget spent) or 7 (stopped)."""
    num_steps = run.config.train.num_steps
    reporter = StepReporter(run)
    requests = _stop_requests(run)
    may_drop = holds_whole_weights(run.engine) and not run.clipped.leaves_process  # no collective until the intent
    steps = run.loader.steps(run.batches.plans(run.first_step, num_steps))
    step = run.first_step - 1
    # A run that ends before its first step still leaves a model.
    saved = step if step > 0 or newest_checkpoint(run.folder.checkpoints) is not None else None
    outcome = DONE
    if step == 0 and run.heldout is not None:
        reporter.heldout(step)
    try:
        while step < num_steps:
            run.checkpoints.poll()
            outcome = _may_go_on(run, step, requests)
            if outcome != DONE:
                break
            started = time.monotonic()
            plan, micro_batches = next(steps)
            step = plan.step
            run.members.note(plan, run.batches.attempt(step))
            distributed.note_progress(2 * step)
            if run.sanity is not None:
                micro_batches = run.sanity.before_step(step, micro_batches, plan.num_micro_batches)
            try:
                with requests.step():
                    record = train_step(run, step, requests.droppable(micro_batches) if may_drop else micro_batches)
                    if run.sanity is not None:
                        run.sanity.after_step(step)
                    if run.average is not None:
                        run.average.update(step)
                    reporter.step(step, record, time.monotonic() - started)
            except StepDropped:
                step, outcome = step - 1, STOPPED_EARLY
                break
            if step % run.checkpoint_interval == 0 or step == num_steps:
                saved = save(run, step)
    finally:
        steps.close()
    if saved != step:
        save(run, step)
    run.checkpoints.finish()
    if outcome == DONE and run.heldout is not None:
        reporter.heldout(step)
    reporter.close()
    requests.close()
    return outcome


def _stop_requests(run: "Run") -> StopRequests:
    train = run.config.train
    words = (
        f"stopped: a step did not end within {train.grace_seconds:g} s of SIGTERM; it is abandoned, what the ledger "
        "charged for it stays charged, and the same command resumes from the newest checkpoint"
    )
    return StopRequests(
        run.folder.stop,
        grace_seconds=train.grace_seconds,
        max_minutes=train.max_minutes,
        abandon=lambda: distributed.abandon(words, STOPPED_EARLY),
    )


def _may_go_on(run: "Run", step: int, requests: StopRequests) -> int:
    """DONE, or the exit code to stop with after `step` steps; equal on all ranks."""
    codes = torch.tensor([run.ledger.budget_is_spent(step + 1), requests.pending()], dtype=torch.int64)
    dist.all_reduce(codes, op=dist.ReduceOp.MAX)
    if codes[0]:
        return BUDGET_SPENT
    return STOPPED_EARLY if codes[1] else DONE


def save(run: "Run", step: int) -> int:
    """Writes a checkpoint, or starts to; the ledger notes it when it is whole."""
    states: Iterable[ShardState] = run.average.states() if run.average is not None else run.engine.state()
    states = itertools.chain(states, run.frozen.states())
    run.checkpoints.save(step, states, {**run.engine.shapes, **run.frozen.shapes}, run.checkpoint_facts())
    return step
