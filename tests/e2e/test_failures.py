"""Failures with real ranks: all end within a minute, with one readable error that names the rank; the same command resumes."""

import os
import random
import re
import signal
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from tests.e2e.launch import PLANTED, count, kill_group, start_ranks, train_arguments
from tests.processes import Forked

WITHIN = 60

Ranks = list[Forked]


def arguments(run_dir: Path, *more: str, engine: str) -> list[str]:
    settings = ("train.num_steps=400", "heldout.num_captions=0", "train.checkpoint_every=2", *more)
    return train_arguments(
        run_dir, "--engine", engine, *settings, ds_config="ds_configs/zero1.json"
    )


@contextmanager
def running(
    run_dir: Path, plant: str = "patience", *, more: tuple[str, ...] = (), engine: str = "local"
) -> Iterator[Ranks]:
    ranks = start_ranks(
        [plant, *arguments(run_dir, *more, engine=engine)], 2, log_of(run_dir), script=PLANTED
    )
    try:
        yield ranks
    finally:
        for rank in ranks:
            kill_group(rank)


def log_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def wait_for(
    run_dir: Path, condition: Callable[[], bool], ranks: Ranks, within: float = 180
) -> None:
    deadline = time.monotonic() + within
    while not condition():
        assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline, log_of(
            run_dir
        ).read_text()
        time.sleep(0.01)


def ends(ranks: Ranks, run_dir: Path, within: float = WITHIN) -> list[int]:
    """Exit codes; each must come within this number of seconds from now."""
    deadline = time.monotonic() + within
    try:
        return [rank.wait(timeout=max(0.01, deadline - time.monotonic())) for rank in ranks]
    except subprocess.TimeoutExpired:
        raise AssertionError(
            f"a rank still runs after {within} s:\n{log_of(run_dir).read_text()[-3000:]}"
        ) from None


def errors(run_dir: Path) -> list[str]:
    return [line for line in log_of(run_dir).read_text().splitlines() if line.startswith("error")]


def resumes(run_dir: Path) -> None:
    """The same command goes on after the newest whole checkpoint, and every charge is still there."""
    charged, done = count(run_dir, "intent"), count(run_dir, "done")
    with running(run_dir) as ranks:
        wait_for(run_dir, lambda: count(run_dir, "done") >= done + 2, ranks)
        os.kill(ranks[1].pid, signal.SIGUSR1)
        assert ends(ranks, run_dir) == [7, 7], log_of(run_dir).read_text()[-3000:]
    assert count(run_dir, "intent") >= charged + 2


@pytest.mark.parametrize(
    ("victim", "engine"),
    [
        (1, "local"),
        *(
            pytest.param(victim, engine, marks=pytest.mark.full)
            for victim, engine in [
                (0, "local"),
                (1, "deepspeed"),
                (0, "deepspeed"),
                (0, "fsdp"),
                (1, "fairscale"),
            ]
        ),
    ],
)
def test_a_killed_rank(tmp_path: Path, victim: int, engine: str) -> None:
    """SIGKILL to each rank in turn at a random point of a step, while data workers read ahead."""
    run_dir = tmp_path / "run"
    with running(run_dir, more=("data.num_workers=1",), engine=engine) as ranks:
        wait_for(run_dir, lambda: count(run_dir, "done") >= 2, ranks)
        time.sleep(random.random() * 0.3)
        os.kill(ranks[victim].pid, signal.SIGKILL)
        codes = ends(ranks, run_dir)
    assert codes[victim] == -9 and codes[1 - victim] == 1
    said = errors(run_dir)
    assert len(said) == 1 and f"rank {victim} (host" in said[0] and "dead" in said[0], said


@pytest.mark.parametrize("victim", [1, pytest.param(0, marks=pytest.mark.full)])
def test_a_raising_rank(tmp_path: Path, victim: int) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir, f"raise:{victim}:3") as ranks:
        wait_for(run_dir, lambda: count(run_dir, "done") >= 2, ranks)
        assert ends(ranks, run_dir) == [1, 1]
    said = log_of(run_dir).read_text()
    assert (
        errors(run_dir) == [f"error on rank {victim}:"]
        and said.count("ArithmeticError: made to fail") == 1
    )
    assert said.count("Traceback") == 1, said
    assert count(run_dir, "intent") == 2, "the step had not been charged"


@pytest.mark.full
@pytest.mark.parametrize("victim", [0, 1])
def test_a_full_disk_in_a_checkpoint(tmp_path: Path, victim: int) -> None:
    run_dir = tmp_path / "run"
    with running(run_dir, f"disk:{victim}:4", more=("train.async_checkpoints=true",)) as ranks:
        wait_for(run_dir, lambda: count(run_dir, "done") >= 4, ranks)
        assert ends(ranks, run_dir) == [1, 1]
    said = errors(run_dir)
    assert len(said) == 1 and said[0].startswith(
        f"error on rank {victim}: checkpoint step-00000004 could not be"
    )
    assert "No space left on device" in said[0]
    assert (run_dir / "checkpoints" / "LATEST").read_text() == "step-00000002\n"
    resumes(run_dir)


@pytest.mark.full
@pytest.mark.parametrize("signalled", [1, 0])
def test_a_step_after_its_intent_is_abandoned_and_stays_charged(
    tmp_path: Path, signalled: int
) -> None:
    """One rank sleeps between intent and noise; the other is blocked in a collective, where no handler runs."""
    run_dir = tmp_path / "run"
    with running(run_dir, "after_intent:0:3:600", more=("train.grace_seconds=2",)) as ranks:
        wait_for(run_dir, lambda: count(run_dir, "intent") >= 3, ranks)
        os.kill(ranks[signalled].pid, signal.SIGTERM)
        assert ends(ranks, run_dir, within=30) == [7, 7], log_of(run_dir).read_text()[-3000:]
    said = log_of(run_dir).read_text()
    assert (
        said.count("stopped: a step did not end within 2 s of SIGTERM or SIGINT") == 1
        and "error" not in said
    )
    assert count(run_dir, "intent") == 3 and count(run_dir, "done") == 2
    assert (run_dir / "checkpoints" / "LATEST").read_text() == "step-00000002\n"


@pytest.mark.full
@pytest.mark.parametrize("step", [2, 0])
def test_a_collective_that_one_rank_never_joins(
    tmp_path: Path, step: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In a step, after one of many slow micro-batches that is not ended, and in the start; everybody lives and beats."""
    run_dir = tmp_path / "run"
    monkeypatch.setenv("STILL_AFTER", "4")
    more = ("privacy.expected_batch_size=24", "train.micro_batch_size=4")
    with running(run_dir, f"stuck:1:{step}:0.5", more=more) as ranks:
        assert ends(ranks, run_dir, within=120) == [1, 1]
    (said,) = errors(run_dir)
    assert re.match(
        rf"error: no rank has moved for \d+ s {'in step 2' if step else 'before the first step'} \(",
        said,
    ), said
    assert re.search(r"rank 0 \(host \S+\) in \w+ \(privacy/ranks/collectives\.py:\d+\)", said), (
        said
    )
    assert count(run_dir, "done") == max(0, step - 1), "the step is neither charged nor taken"
