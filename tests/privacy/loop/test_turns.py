"""The loop over the steps of a run belongs to its caller; a turn that does not take and keep its step is the last one."""

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from privacy.errors import DONE, STOPPED_EARLY
from privacy.run.run import Run, Step
from privacy.step import step as one_step
from tests.privacy.loop.own import ledger_of, make, quick

Body = Callable[[Run, Step], object]


def take_and_keep(run: Run, step: Step) -> None:
    run.take(step)
    run.keep(step)


def keep_twice(run: Run, step: Step) -> None:
    take_and_keep(run, step)
    run.keep(step)


def take_twice(run: Run, step: Step) -> None:
    run.take(step)
    run.take(step)


def save_before_it_keeps(run: Run, step: Step) -> None:
    run.take(step)
    run.save()


def go_on_after_a_failure(run: Run, step: Step) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_step, "reduce_to_owners", lambda *_: 1 / 0)
        with pytest.raises(ZeroDivisionError):
            run.take(step)
    run.keep(step)


def take_a_step_of_its_own(run: Run, step: Step) -> None:
    run.take(Step(step.batch, step.micro_batches, step.began))


MISTAKES: dict[str, tuple[Body, str, int]] = {
    "takes nothing": (lambda run, step: None, "step 2 is dealt and not kept", 1),
    "keeps nothing": (lambda run, step: run.take(step), "step 2 is taken and not kept", 2),
    "keeps what it did not take": (
        lambda run, step: run.keep(step),
        "step 2 is not taken in this turn",
        1,
    ),
    "keeps twice": (keep_twice, "step 2 is not taken in this turn", 2),
    "takes twice": (take_twice, "step 2 is not dealt in this turn", 2),
    "takes another step": (
        take_a_step_of_its_own,
        "step 2 is not dealt in this turn",
        1,
    ),
    "saves half a turn": (save_before_it_keeps, "step 2 is taken and not kept", 2),
    "keeps a step that failed": (
        go_on_after_a_failure,
        "step 2 is not taken in this turn",
        2,
    ),
}
"""A body of the second turn -> what it is told, and the attempts that are charged by then."""


@contextlib.contextmanager
def opened(folder: Path, **changes: Any) -> Iterator[Run]:
    """The run under a loop, for a caller that writes its own `for`."""
    with quick(), contextlib.closing(make(folder, **changes)) as loop:
        assert loop._run is not None
        yield loop._run


def second_turn(run: Run, body: Body) -> None:
    for step in run.steps():
        (body if step.number == 2 else take_and_keep)(run, step)


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_turn_that_forgets_its_step_is_refused_and_ends_nothing(
    mistake: str, tmp_path: Path
) -> None:
    """It is the last turn, behind which the run would end."""
    body, words, num_charged = MISTAKES[mistake]
    with (
        opened(tmp_path / "run", num_steps=2, save_every=1) as run,
        pytest.raises(RuntimeError, match=words),
    ):
        second_turn(run, body)
    state = ledger_of(tmp_path / "run")
    assert state.num_charged == num_charged and state.closed is None
    assert state.checkpointed_step == (2 if mistake == "keeps twice" else 1)


def test_a_turn_goes_from_the_step_to_its_checkpoint_in_the_hands_of_the_caller(
    tmp_path: Path,
) -> None:
    """The end of the run comes when a step is asked for after the last one."""
    folder = tmp_path / "run"
    with opened(folder, num_steps=3, save_every=1) as run:
        for step in run.steps():
            assert run.step == step.number - 1 and step.batch.step == step.number
            assert ledger_of(folder).num_charged == step.number - 1
            run.take(step)
            assert ledger_of(folder).num_charged == step.number and run.saved != step.number
            run.keep(step)
            assert run.step == run.saved == step.number
            assert ledger_of(folder).closed is None
        assert run.outcome == DONE
        with pytest.raises(RuntimeError, match="dealt once"):
            next(run.steps())
    assert ledger_of(folder).closed == "finished"


def test_a_run_that_is_asked_to_stop_saves_and_does_not_end(tmp_path: Path) -> None:
    with opened(tmp_path / "run", num_steps=3, save_every=3) as run:
        for step in run.steps():
            take_and_keep(run, step)
            run.stop()
        assert (run.step, run.saved, run.outcome) == (1, 1, STOPPED_EARLY)
    assert ledger_of(tmp_path / "run").closed is None
