"""Loops over the steps of a run, with requests to stop, traces, metrics and held-out evaluation."""

import contextlib

from privacy.errors import STOPPED_EARLY, StepDropped
from privacy.ranks import clock
from privacy.ranks.engine import holds_whole_weights
from trainer.loop.reporting import StepReporter, Training
from trainer.loop.stopping import StopRequests
from trainer.loop.trace import Trace
from trainer.ranks import distributed

ABANDONED = (
    "stopped: a step did not end within {:g} s of SIGTERM or SIGINT; it is abandoned, what the "
    "ledger charged for it stays charged, and the same command resumes from the newest checkpoint"
)


def fit(training: Training) -> int:
    """Takes the remaining steps and returns the exit code: 0, 3 (budget spent) or 7 (stopped)."""
    run = training.run
    train = training.config.train
    message = ABANDONED.format(train.grace_seconds)
    reporter = StepReporter(training)
    trace = Trace(train.profile, run.folder.private / "profile")
    requests = StopRequests(
        run.folder.stop,
        grace_seconds=train.grace_seconds,
        max_minutes=train.max_minutes,
        abandon=lambda: distributed.abandon(message, STOPPED_EARLY),
    )
    # A step may be dropped until its intent only where no collective comes before the intent:
    # the other ranks would wait in it for the rank that drops the step.
    may_drop = holds_whole_weights(run.engine) and not run.mechanism.clipped.leaves_process

    evaluates = training.heldout is not None
    # All steps are taken, but a crash came before the run's end.
    is_trained = run.step == train.num_steps
    if evaluates and (run.step == 0 or (is_trained and not reporter.has_heldout(run.step))):
        reporter.heldout(run.step)
    if requests.pending():
        run.stop()
    # Closing ends the workers that read ahead, also after an error.
    with contextlib.closing(run.steps()) as steps:
        for step in steps:
            trace.begin(step.number)
            distributed.note_progress(step.number)
            try:
                with requests.step():
                    record = run.take(step, requests.droppable if may_drop else None)
                    if training.average is not None:
                        training.average.update(step.number)
                    reporter.step(step.number, record, clock.since(step.began))
            except StepDropped:
                continue  # the run ends in its next turn
            run.keep(step)
            # The ledger has no end of the run yet, so a start after a crash evaluates again.
            if evaluates and step.number == train.num_steps:
                trace.end()
                reporter.heldout(step.number)
            if requests.pending():
                run.stop()
    trace.end()
    reporter.close()
    requests.close()
    assert run.outcome is not None
    return run.outcome
