"""What the trainer does around the steps of a run: requests to stop, checks, metrics and held-out evaluation."""

from collections.abc import Callable, Iterator

from privacy.errors import STOPPED_EARLY
from privacy.run.run import Watcher
from privacy.step import clock
from privacy.step.batches import Dealt
from privacy.step.engine import holds_whole_weights
from privacy.step.step import MicroBatch, StepRecord
from trainer.loop.profiling import StepProfiler
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
        sanity, average = self._training.sanity, self._training.average
        if sanity is not None:
            batches = sanity.before_step(plan.step, batches, plan.num_micro_batches)
        with self._requests.step():
            record = step(self._requests.droppable(batches) if self._may_drop else batches)
            if sanity is not None:
                sanity.after_step(plan.step)
            if average is not None:
                average.update(plan.step)
            self.reporter.step(plan.step, record, clock.since(self._began))
        return record

    def close(self) -> None:
        """Writes what is still held, and gives the signals back."""
        self.profiler.close()
        self.reporter.close()
        self._requests.close()
