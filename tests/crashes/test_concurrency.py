"""Programs that start at the same moment: no coin twice, no charge forgotten, no ledger torn, no budget spent unseen."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from privacy.accounting.accountants import epsilon
from privacy.errors import BudgetSpent
from privacy.ledger.ledger import Ledger
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from privacy.step import run_folder
from privacy.step.run_folder import RunFolder
from tests.crashes import program
from trainer.errors import in_one_line

FORK = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """What waits for another program waits a moment, so that a round has many refused starts."""
    monkeypatch.setattr(run_folder, "LOCK_PATIENCE", 0.02)
    monkeypatch.setattr("privacy.ledger.ledger.LOCK_PATIENCE", 0.02)


def at_once(function: Callable[..., None], *arguments: tuple[Any, ...]) -> list[Any]:
    """A process for each tuple of arguments, which begins with the others."""
    barrier = FORK.Barrier(len(arguments))

    def begin(*own: Any) -> None:
        barrier.wait(30)
        with contextlib.suppress(BaseException):
            function(*own)
        os._exit(0)

    processes = [FORK.Process(target=begin, args=own) for own in arguments]
    for process in processes:
        process.start()
    return processes


def ended(processes: list[Any]) -> None:
    for process in processes:
        process.join(60)
        assert process.exitcode is not None, "it hangs"


def starts(root: Path, number: int, said: Path) -> None:
    """Start after start of the run in `root`, until it is closed."""
    descriptor = os.open(said, os.O_WRONLY | os.O_APPEND | os.O_CREAT)

    def say(kind: str, what: Any) -> None:
        os.write(descriptor, json.dumps([kind, what]).encode() + b"\n")

    for again in range(40):
        try:
            RunFolder(root / program.RUN).take()
            program.start(root, 1000 * number + again, lambda what: say("happened", what))
            return
        except Exception as error:  # whatever ends the program
            known = in_one_line(error)
            say("refused" if known is not None else "defect", f"{type(error).__name__}: {error}")
            time.sleep(0.01)


def rounds_in_one_folder(root: Path, count: int, seed: int) -> tuple[Counter[str], list[str]]:
    """Three programs on one run folder at once; in every second round they are killed at some moment. Counts, and problems."""
    seen, problems, chosen = Counter[str](), list[str](), random.Random(seed)
    for number in range(count):
        place, said = root / str(number), root / f"{number}.said"
        place.mkdir()
        program.prepare(place)
        processes = at_once(starts, *((place, 10 * number + own, said) for own in range(3)))
        if number % 2:
            time.sleep(chosen.random() * 0.4)
            for process in processes:
                os.kill(process.pid, signal.SIGKILL)
        ended(processes)
        events = (
            [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
        )
        seen.update(kind for kind, _ in events)
        happened = [
            tuple(what) if isinstance(what, list) else what
            for kind, what in events
            if kind == "happened"
        ]
        problems += [f"round {number}: {what}" for kind, what in events if kind == "defect"]
        wrong = program.problem(place, happened, program.Remembered())
        problems += [f"round {number}: {wrong}"] if wrong is not None else []
    return seen, problems


@pytest.mark.parametrize("count", [4, pytest.param(300, marks=pytest.mark.full)])
def test_programs_that_start_in_one_folder_at_once_charge_all_that_they_draw(
    tmp_path: Path, count: int
) -> None:
    seen, problems = rounds_in_one_folder(tmp_path, count, seed=count)
    print(seen)
    assert not problems, problems[:3]
    assert seen["happened"] > count and seen["refused"] > 0


@pytest.mark.full
def test_without_the_lock_of_the_folder_they_would_not(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The attack finds something where there is something."""
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    _, problems = rounds_in_one_folder(tmp_path, 40, seed=1)
    assert problems


PLAN = make_plan(
    PlanRequest(
        num_examples=3000,
        expected_batch_size=60,
        num_steps=60,
        noise_multiplier=1.0,
        target_delta=1e-5,
        cap=None,
    )
)


def join(shared: Path, folder: Path, fixed: bool) -> None:
    folder.mkdir()
    terms = SharedTerms(shared, folder.name, fixed)
    try:
        ledger, _ = open_run_state(
            folder / "ledger.jsonl", folder / "sampling.key", PLAN, data_manifest=b"x", shared=terms
        )
        with ledger:
            ledger.start_session({})
    except BudgetSpent:
        (folder / "refused").touch()


@pytest.mark.parametrize("count", [1, pytest.param(60, marks=pytest.mark.full)])
def test_runs_that_join_one_shared_ledger_at_once_never_reserve_more_than_there_is(
    tmp_path: Path, count: int
) -> None:
    group = PLAN.release_group(2 * PLAN.max_intents)
    total = 1.001 * epsilon([group], 1e-5)  # two fit, if they were fixed in advance
    for number in range(count):
        root = tmp_path / str(number)
        root.mkdir()
        owner = SharedLedger.create(
            root / "owner.jsonl", epsilon=total, delta=1e-5, mirror=root / "mirror.jsonl"
        )
        runs = [root / f"run{n}" for n in range(4)]
        ended(at_once(join, *((owner.path, run, number % 2 == 0) for run in runs)))
        state = owner.read()
        inside = [run for run in runs if (run / "ledger.jsonl").exists()]
        refused = [run for run in runs if (run / "refused").exists()]
        assert state.epsilon() <= total and len(inside) == len(state.reservations) in (1, 2)
        assert len(refused) == 4 - len(inside) and not {*inside} & {*refused}
        assert owner.path.read_bytes() == (root / "mirror.jsonl").read_bytes()
        commitments = {
            Ledger.open(run / "ledger.jsonl", None).state.opened["key_commitment"] for run in inside
        }
        assert commitments == state.reservations.keys() == state.starts.keys()
