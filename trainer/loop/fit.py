"""What the trainer does around the steps of a run: requests to stop, checks, traces, metrics and held-out evaluation."""

from collections.abc import Callable, Iterator

import torch
from torch.profiler import ProfilerActivity, profile

from privacy.errors import STOPPED_EARLY
from privacy.ledger.durable import make_directory
from privacy.run.run import Watcher
from privacy.step import clock, collectives
from privacy.step.batches import StepBatch
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
    is_trained = run.step == train.num_steps  # a crash came before the run's end
    if evaluates and (run.step == 0 or (is_trained and not around.reporter.has_heldout(run.step))):
        around.reporter.heldout(run.step)
    for _ in run.steps(around):
        if (
            evaluates and run.step == train.num_steps
        ):  # saved already, and not yet ended in the ledger
            around.end_trace()
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
        self._trace: profile | None = None
        self._traced: list[int] = []  # steps
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
        self._may_drop = (
            holds_whole_weights(run.parts.engine) and not run.parts.clipped.leaves_process
        )

    def before(self, step: int) -> bool:
        self._began = clock.now()  # the wait for data is in a step's time
        return self._requests.pending()

    def take(
        self,
        plan: StepBatch,
        batches: Iterator[MicroBatch],
        step: Callable[[Iterator[MicroBatch]], StepRecord],
    ) -> StepRecord:
        self._profile(plan.step)
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
        self.end_trace()
        self.reporter.close()
        self._requests.close()

    def _profile(self, step: int) -> None:
        """Takes a trace of torch's profiler of the steps of train.profile, for chrome://tracing or Perfetto."""
        steps = self._training.config.train.profile
        if steps is None or not steps[0] <= step <= steps[1]:
            self.end_trace()
            return
        self._traced.append(step)
        if self._trace is None:
            activities = [
                ProfilerActivity.CPU,
                *([ProfilerActivity.CUDA] if torch.cuda.is_available() else []),
            ]
            self._trace = profile(activities=activities)
            self._trace.start()

    def end_trace(self) -> None:
        """Writes the trace, if one is being taken; also of fewer steps, where the run stops between. Its times are private."""
        if self._trace is None:
            return
        self._trace.stop()
        folder = self._training.run.folder.private / "profile"
        make_directory(folder, 0o700)
        name = f"steps-{self._traced[0]}-{self._traced[-1]}-rank-{collectives.rank()}.json"
        self._trace.export_chrome_trace(str(folder / name))
        self._trace = None
