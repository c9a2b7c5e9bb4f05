"""What the trainer does around the steps of a run: requests to stop, checks, traces, metrics and held-out evaluation."""

from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from privacy.errors import STOPPED_EARLY
from privacy.ledger.durable import make_directory
from privacy.run.run import Watcher
from privacy.step import clock, collectives
from privacy.step.batches import Dealt
from privacy.step.engine import holds_whole_weights
from privacy.step.step import MicroBatch, StepRecord
from trainer.loop.reporting import StepReporter, Training
from trainer.loop.stopping import StopRequests
from trainer.ranks import distributed


def fit(training: Training) -> int:
    """Takes the steps that are left; returns the exit code of design: 0, 3 (budget spent) or 7 (stopped)."""
    run, train = training.run, training.config.train
    around = _Around(training)
    evaluates = training.heldout is not None
    if evaluates and run.step in (0, train.num_steps):  # the latter after a crash before the run's end
        around.reporter.heldout(run.step)
    for _ in run.steps(around):
        if evaluates and run.step == train.num_steps:  # saved already, and not yet ended in the ledger
            around.profiler.close()
            around.reporter.heldout(run.step)
    around.close()
    assert run.outcome is not None
    return run.outcome


class _Around(Watcher):
    """See `privacy.run.run.Watcher`."""

    def __init__(self, training: Training) -> None:
        run, train = training.run, training.config.train
        self._training, self._began = training, clock.now()
        self.reporter = StepReporter(training)
        self.profiler = StepProfiler(run.folder.private / "profile", train.profile)
        words = (
            f"stopped: a step did not end within {train.grace_seconds:g} s of SIGTERM or SIGINT; it is abandoned, what the "
            "ledger charged for it stays charged, and the same command resumes from the newest checkpoint"
        )
        self._requests = StopRequests(
            run.folder.stop,
            grace_seconds=train.grace_seconds,
            max_minutes=train.max_minutes,
            abandon=lambda: distributed.abandon(words, STOPPED_EARLY),
        )
        # A step may be dropped until its intent where no collective comes before it.
        self._may_drop = holds_whole_weights(run.parts.engine) and not run.parts.clipped.leaves_process

    def before(self, step: int) -> bool:
        self._began = clock.now()  # the wait for data is in a step's time
        return self._requests.pending()

    def take(
        self, plan: Dealt, batches: Iterator[MicroBatch], step: Callable[[Iterator[MicroBatch]], StepRecord]
    ) -> StepRecord:
        self.profiler.before(plan.step)
        distributed.note_progress(plan.step)
        average = self._training.average
        with self._requests.step():
            record = step(self._requests.droppable(batches) if self._may_drop else batches)
            if average is not None:
                average.update(plan.step)
            self.reporter.step(plan.step, record, clock.since(self._began))
        return record

    def close(self) -> None:
        """Writes what is still held, and gives the signals back."""
        self.profiler.close()
        self.reporter.close()
        self._requests.close()


class StepProfiler:
    """Takes a trace of torch's profiler, for chrome://tracing or Perfetto. A trace holds times, so it is private.

    Args:
        folder: inside the trust boundary; takes `steps-FIRST-LAST-rank-RANK.json`.
        steps: the first and the last step that it covers; None profiles nothing.
    """

    def __init__(self, folder: Path, steps: tuple[int, int] | None) -> None:
        self._folder, self._steps = folder, steps
        self._began_at = self._step = 0
        self._profile: profile | None = None

    def before(self, step: int) -> None:
        """`step` begins."""
        if self._steps is None or not self._steps[0] <= step <= self._steps[1]:
            self.close()
            return
        self._step = step
        if self._profile is None:
            activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if torch.cuda.is_available() else [])]
            self._profile = profile(activities=activities)
            self._profile.start()
            self._began_at = step

    def close(self) -> None:
        """Writes the trace, if one is being taken; also of fewer steps, where the run stops between."""
        if self._profile is None:
            return
        self._profile.stop()
        make_directory(self._folder, 0o700)
        name = f"steps-{self._began_at}-{self._step}-rank-{collectives.rank()}.json"
        self._profile.export_chrome_trace(str(self._folder / name))
        self._profile = None
