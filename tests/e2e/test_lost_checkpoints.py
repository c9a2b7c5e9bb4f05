"""Checkpoints that are gone, and ledgers that were cut behind them: refused, or begun again with a charge that shows."""

import shutil
from pathlib import Path

import pytest

from privacy.audit.run_audit import ledger_audit, schedule_audit
from tests.e2e.launch import PLANTED, alone, count, ledger_lines, train_arguments

RESTART = "--restart_from_step_0"


def arguments(run_dir: Path, *more: str) -> list[str]:
    return ["--engine", "local", *train_arguments(run_dir, "heldout.num_captions=0", *more)]


def refused(run_dir: Path, *words: str) -> None:
    """Exit 4 in one line, and nothing is charged."""
    before = (run_dir / "ledger.jsonl").read_bytes()
    done = alone(arguments(run_dir))
    assert done.returncode == 4, done.stderr
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1, done.stderr
    assert all(word in done.stderr for word in words), done.stderr
    assert (run_dir / "ledger.jsonl").read_bytes() == before


@pytest.fixture(scope="module")
def stopped(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run that was killed after three of its four steps, with a checkpoint of each."""
    run_dir = tmp_path_factory.mktemp("lost") / "run"
    done = alone(["before_intent:4", *arguments(run_dir)], script=PLANTED)
    assert done.returncode == -9, done.stderr
    assert [line["step"] for line in ledger_lines(run_dir) if line["type"] == "checkpoint"] == [
        1,
        2,
        3,
    ]
    return run_dir


def copied(stopped: Path, folder: Path) -> Path:
    return Path(shutil.copytree(stopped, folder / "run"))


@pytest.mark.parametrize("latest_stays", [pytest.param(False, marks=pytest.mark.full), True])
def test_lost_checkpoints_are_refused_or_charged_again(
    stopped: Path, tmp_path: Path, latest_stays: bool
) -> None:
    run_dir = copied(stopped, tmp_path)
    for path in (run_dir / "checkpoints").glob("step-*"):
        shutil.rmtree(path)
    if not latest_stays:
        shutil.rmtree(run_dir / "checkpoints")
    refused(run_dir, "checkpoint of step 3, and none is there", RESTART)
    if latest_stays:
        return
    # Killed before the first checkpoint of the new beginning: no loss, so the permission is not asked for again.
    done = alone(["before_done:1", *arguments(run_dir), RESTART], script=PLANTED)
    assert done.returncode == -9 and "starting again at step 1" in done.stdout, (
        done.stdout + done.stderr
    )
    done = alone(arguments(run_dir))
    assert done.returncode == 0, done.stderr
    sessions = [line for line in ledger_lines(run_dir) if line["type"] == "session"]
    assert [line.get("restarted_from_step_0", False) for line in sessions] == [False, True, False]
    assert count(run_dir, "intent") == 3 + 1 + 4
    for report in (ledger_audit(run_dir), schedule_audit(run_dir)):
        assert not report.failed(), report.to_text()


def test_the_newest_checkpoint_alone_is_lost(stopped: Path, tmp_path: Path) -> None:
    """LATEST points at nothing, older ones are there: said in a line, and the permission to restart changes nothing."""
    run_dir = copied(stopped, tmp_path)
    shutil.rmtree(run_dir / "checkpoints" / "step-00000003")
    done = alone([*arguments(run_dir), RESTART])
    assert done.returncode == 0, done.stderr
    assert "the ledger records a checkpoint of step 3, which is gone" in done.stdout
    assert f"{RESTART[2:]} changes nothing: there is a checkpoint of step 2" in done.stdout
    assert count(run_dir, "intent") == 3 + 2


@pytest.mark.full
def test_a_run_that_never_had_a_checkpoint_starts_again(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    done = alone(["in_checkpoint:1", *arguments(run_dir)], script=PLANTED)
    assert done.returncode == -9 and count(run_dir, "done") == 1
    done = alone(arguments(run_dir))
    assert done.returncode == 0 and "starting again at step 1" in done.stdout, (
        done.stdout + done.stderr
    )
    assert count(run_dir, "intent") == 1 + 4


def test_a_ledger_cut_by_a_third_is_refused_and_both_audits_find_it(
    stopped: Path, tmp_path: Path
) -> None:
    run_dir = copied(stopped, tmp_path)
    shutil.rmtree(run_dir / "checkpoints")
    ledger = run_dir / "ledger.jsonl"
    lines = ledger.read_bytes().splitlines(keepends=True)
    ledger.write_bytes(b"".join(lines[: len(lines) * 2 // 3]))
    assert count(run_dir, "intent") == 2
    (run_dir / "metrics.jsonl").unlink()  # the record of attempts finds it alone
    refused(run_dir, "members.jsonl contradict each other", "rolled back or replaced")
    assert ledger_audit(run_dir).failed() == ["attempts"] and schedule_audit(run_dir).failed() == [
        "attempts"
    ]
    (run_dir / "private" / "members.jsonl").unlink()
    refused(run_dir, "cannot read the record of attempts")
    assert ledger_audit(run_dir).failed() == ["attempts"] and schedule_audit(run_dir).failed() == [
        "attempts"
    ]
