"""Programs that start at the same moment: no coin twice, no charge forgotten, no ledger torn, no budget spent unseen."""

import contextlib
import json
import multiprocessing
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy import verify
from privacy.accounting.accountants import epsilon
from privacy.card.model import LedgerFile
from privacy.card.report import read_snapshot
from privacy.checkpoints.write import CheckpointWriter, Retention
from privacy.errors import BudgetSpent
from privacy.ledger.ledger import Ledger
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.ledger.shared import SharedLedger
from privacy.plan import make_plan
from privacy.plan_request import PlanRequest
from privacy.releases import step_releases
from privacy.step import folder as run_folder
from privacy.step.engine import Piece, ShardState
from privacy.step.folder import RunFolder
from tests.crashes import program
from tests.crashes.remembered import Remembered
from trainer.errors import in_one_line
from trainer.publish import publish

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
        events = [json.loads(line) for line in said.read_text().splitlines()] if said.exists() else []
        seen.update(kind for kind, _ in events)
        happened = [tuple(what) if isinstance(what, list) else what for kind, what in events if kind == "happened"]
        problems += [f"round {number}: {what}" for kind, what in events if kind == "defect"]
        wrong = program.problem(place, happened, Remembered())
        problems += [f"round {number}: {wrong}"] if wrong is not None else []
    return seen, problems


@pytest.mark.parametrize("count", [4, pytest.param(300, marks=pytest.mark.full)])
def test_programs_that_start_in_one_folder_at_once_charge_all_that_they_draw(tmp_path: Path, count: int) -> None:
    seen, problems = rounds_in_one_folder(tmp_path, count, seed=count)
    print(seen)
    assert not problems, problems[:3]
    assert seen["happened"] > count and seen["refused"] > 0


@pytest.mark.full
def test_without_the_lock_of_the_folder_they_would_not(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The attack finds something where there is something."""
    monkeypatch.setattr(RunFolder, "lock", lambda self: None)
    _, problems = rounds_in_one_folder(tmp_path, 40, seed=1)
    assert problems


PLAN = make_plan(
    PlanRequest(
        num_examples=3000, expected_batch_size=60, num_steps=60, noise_multiplier=1.0, target_delta=1e-5, cap=None
    )
)  # fmt: skip


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
def test_runs_that_join_one_shared_ledger_at_once_never_reserve_more_than_there_is(tmp_path: Path, count: int) -> None:
    group = PLAN.release_group(2 * PLAN.max_intents)
    total = 1.001 * epsilon([group], 1e-5)  # two fit, if they were fixed in advance
    for number in range(count):
        root = tmp_path / str(number)
        root.mkdir()
        owner = SharedLedger.create(root / "owner.jsonl", epsilon=total, delta=1e-5, mirror=root / "mirror.jsonl")
        runs = [root / f"run{n}" for n in range(4)]
        ended(at_once(join, *((owner.path, run, number % 2 == 0) for run in runs)))
        state = owner.read()
        inside = [run for run in runs if (run / "ledger.jsonl").exists()]
        refused = [run for run in runs if (run / "refused").exists()]
        assert state.epsilon() <= total and len(inside) == len(state.reservations) in (1, 2)
        assert len(refused) == 4 - len(inside) and not {*inside} & {*refused}
        assert owner.path.read_bytes() == (root / "mirror.jsonl").read_bytes()
        commitments = {Ledger.open(run / "ledger.jsonl", None).state.opened["key_commitment"] for run in inside}
        assert commitments == state.reservations.keys() == state.starts.keys()


LONG = make_plan(
    PlanRequest(
        num_examples=2000, expected_batch_size=100, num_steps=100_000, noise_multiplier=40.0, target_delta=1e-5, cap=None,
        sensitivity_slack=1e-3,
    )
)  # fmt: skip


def train(root: Path) -> None:
    """Steps with a checkpoint each, as fast as the disk is, until it is killed."""
    folder = RunFolder(root)
    folder.take()
    with program.quick(1):
        ledger, _ = open_run_state(folder.ledger, folder.key, LONG, data_manifest=b"x", members=folder.members)
        ledger.start_session({})
        writer = CheckpointWriter(folder.checkpoints, Retention(1), published=ledger.checkpoint)
        for step in range(1, LONG.num_steps):
            ledger.intent(step, 0, step_releases(LONG.noise_multiplier, LONG.max_grad_norm, None))
            ledger.done(step, 0)
            seq, line_hash = ledger.position()
            facts = {
                "ledger": {"seq": seq, "hash": line_hash}, "charged_attempts": step, "formal_guarantee": True,
                "initialisation": {"kind": "random"},
            }  # fmt: skip
            state = ShardState(Piece("weight", 0, 2), {"param": torch.full((2,), float(step))})
            writer.save(step, [state], {"weight": torch.Size([2])}, facts)
            (root / "metrics.jsonl").open("a").write(json.dumps({"step": step}) + "\n")
            time.sleep(random.random() * 0.05)


@contextlib.contextmanager
def training(root: Path) -> Iterator[None]:
    (process,) = at_once(train, (root,))
    try:
        deadline = time.monotonic() + 20
        while not (root / "checkpoints/LATEST").exists() and time.monotonic() < deadline:
            time.sleep(0.02)
        yield
    finally:
        os.kill(process.pid, signal.SIGKILL)
        ended([process])


@pytest.mark.parametrize("seconds", [0.6, pytest.param(30.0, marks=pytest.mark.full)])
def test_what_is_published_during_training_is_whole_or_nothing(tmp_path: Path, seconds: float) -> None:
    outcomes: Counter[str] = Counter()
    run, deadline = tmp_path / "run", time.monotonic() + seconds
    with training(run):
        for number in range(10_000):
            if time.monotonic() > deadline and outcomes["published"]:
                break
            assert time.monotonic() < deadline + 30, outcomes
            before, target, said = (run / "ledger.jsonl").stat().st_size, tmp_path / f"out{number}", None
            try:
                snapshot = read_snapshot(run / "ledger.jsonl")
                stated = LedgerFile(
                    format=1, lines=snapshot.state.num_lines, last_line_sha256=snapshot.last_hash, mirrored_sessions=0
                )
                publish(run, target, stated)
            except Exception as error:
                said = error
            assert said is None or in_one_line(said) is not None, repr(said)
            assert (said is None) == target.exists()
            outcomes["published" if said is None else str(said).partition(str(tmp_path))[2].partition(":")[2][:60]] += 1
            if said is None:
                ledger = verify.read_ledger(target / "ledger.jsonl")
                assert len(ledger.hashes) == stated.lines
                with contextlib.suppress(verify.Undecided):
                    verify.check_checkpoints(verify.Folder(target, ledger, None))
            assert (run / "ledger.jsonl").stat().st_size >= before
    print(outcomes)
    RunFolder(run).take()
    Ledger.open(run / "ledger.jsonl", None, mended=False).release()
