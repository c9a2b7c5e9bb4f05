"""The launchers as a user calls them: every engine, no crash at exit, and no rank that is left behind by a lost launcher."""

import contextlib
import itertools
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from privacy.ledger.records import read_ledger
from tests.distributed.ranks import ROOT, free_port, quiet_environment
from tests.e2e.launch import (
    TRAIN,
    alone,
    count,
    kill_group,
    launch,
    ledger_lines,
    refused,
    start_ranks,
    train_arguments,
    train_together,
)

pytestmark = pytest.mark.timeout(1200)

ENGINES = [("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp", 3), ("fairscale", 1)]


@pytest.mark.full
@pytest.mark.parametrize(("engine", "stage"), ENGINES)
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "mpirun"])
def test_a_launch_of_each_engine(tmp_path: Path, launcher: Any, engine: str, stage: int) -> None:
    run_dir = tmp_path / "run"
    workers = f"data.num_workers={int(launcher == 'deepspeed')}"
    arguments = train_arguments(
        run_dir, "heldout.num_captions=1", workers, ds_config=f"ds_configs/zero{stage}.json"
    )
    result = launch(["--engine", engine, *arguments], launcher=launcher)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[-4000:]
    assert "terminate called" not in said
    assert "done: 4 steps, epsilon" in result.stdout
    said = " ".join(result.stdout.split())
    assert (
        said.count("noise-to-signal ") == 1
        and "accumulated over 4 steps: as runs that learned nothing" in said
    )
    kinds = [line["type"] for line in ledger_lines(run_dir)]
    assert kinds == ["open", "session", *["intent", "done", "checkpoint"] * 4, "close"]


def wait_for_steps(run_dir: Path, run: Sequence[Any], log: Path, number: int = 2) -> None:
    """Until a run has done this number of steps, or one of its processes has ended.

    On a busy machine that takes minutes, most of them in imports.
    """
    deadline = time.monotonic() + 600
    while count(run_dir, "done") < number and all(one.poll() is None for one in run):
        assert time.monotonic() < deadline, log.read_text(errors="replace")[-3000:]
        time.sleep(0.02)


def test_sigterm_to_everything_saves_and_exits_7(tmp_path: Path) -> None:
    """To every process of the sessions, data workers included, which must outlive it until the trainer has stopped."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    options = (
        "train.num_steps=400",
        "heldout.num_captions=0",
        "train.checkpoint_every=1000",
        "data.num_workers=1",
    )
    ranks = start_ranks(train_arguments(run_dir, *options), 2, log)
    try:
        wait_for_steps(run_dir, ranks, log, 1)
        listed = subprocess.run(
            ["ps", "-eo", "pid,sid"], capture_output=True, text=True, check=True
        ).stdout
        for pid, session in (map(int, line.split()) for line in listed.splitlines()[1:]):
            if session in {rank.pid for rank in ranks}:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(pid, signal.SIGTERM)
        assert [rank.wait(timeout=90) for rank in ranks] == [7, 7], log.read_text()[-3000:]
    finally:
        for rank in ranks:
            kill_group(rank)
    assert "stopped on request" in log.read_text(), log.read_text()[-3000:]
    assert (
        run_dir / "checkpoints" / f"step-{count(run_dir, 'done'):08d}" / "manifest.json"
    ).exists()


@pytest.mark.parametrize(
    "off",
    ["privacy.noise_multiplier=0", pytest.param("privacy.enabled=false", marks=pytest.mark.full)],
)
def test_contract_11_and_12_a_run_without_noise_says_so(tmp_path: Path, off: str) -> None:
    run_dir = tmp_path / "run"
    result = alone(["--engine", "local", *train_arguments(run_dir, off, "train.num_steps=2")])
    assert result.returncode == 0, result.stderr
    assert "formal_guarantee: false" in result.stdout and "noise-to-signal" not in result.stdout
    assert "epsilon" not in " ".join(result.stdout.split()).replace("no epsilon", "")
    manifest = json.loads((run_dir / "checkpoints" / "step-00000002" / "manifest.json").read_text())
    assert manifest["formal_guarantee"] is False and manifest["reasons"]
    assert "epsilon" not in (run_dir / "metrics.jsonl").read_text()


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, to be read only; quickstart and lost launchers start DeepSpeed's engine and FSDP2."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    arguments = [
        "--engine",
        "fairscale",
        *train_arguments(run_dir, ds_config="ds_configs/zero1.json"),
    ]
    train_together(arguments, run_dir.with_suffix(".log"))
    return run_dir


def test_contract_12_private_quantities_stay_private(finished: Path) -> None:
    run_dir = finished
    assert (run_dir / "private").stat().st_mode & 0o777 == 0o700
    assert (run_dir / "private" / "sampling.key").stat().st_mode & 0o777 == 0o600
    last = json.loads((run_dir / "private" / "metrics.jsonl").read_text().splitlines()[-1])
    private = last.keys() - {"step", "attempt", "time_unix"}
    public = "".join(
        p.read_text(errors="replace")
        for p in run_dir.rglob("*")
        if p.is_file() and "private" not in p.parts
    )
    assert {"train/loss", "train/clipped_fraction", "train/batch_size"} <= private
    assert not [name for name in private if name in public]
    key = (run_dir / "private" / "sampling.key").read_bytes()
    assert key.hex() not in public and str(key) not in public


def test_tensorboard_shows_what_matters(finished: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    events = EventAccumulator(
        str(finished / "tensorboard"), size_guidance={"images": 0, "tensors": 0}
    )
    events.Reload()
    tags = events.Tags()
    assert {"privacy/epsilon", "optimizer/lr", "heldout/loss"} <= set(tags["scalars"])
    epsilons = events.Scalars("privacy/epsilon")
    assert [point.step for point in epsilons] == [1, 2, 3, 4]
    assert all(0 < a.value < b.value for a, b in itertools.pairwise(epsilons))
    assert [point.step for point in events.Scalars("heldout/loss")] == [0, 4]
    assert "heldout/samples" in tags["images"]
    assert any("heldout/samples" in tag for tag in tags["tensors"])


def test_the_same_command_on_a_finished_run_says_so_and_another_one_is_refused(
    finished: Path, tmp_path: Path
) -> None:
    """Exit 4 for a foreign key; tests/trainer/test_refused_starts.py has the many ways."""
    run_dir = shutil.copytree(finished, tmp_path / "run")
    again = ["--engine", "fairscale", *train_arguments(run_dir, ds_config="ds_configs/zero1.json")]
    before = (run_dir / "ledger.jsonl").read_bytes()
    result = alone(again)
    assert result.returncode == 0 and "finished" in result.stdout
    key = run_dir / "private" / "sampling.key"
    secret = key.read_bytes()
    key.write_bytes(bytes(32))
    refused(again, 4, "key")
    key.write_bytes(secret)
    (
        run_dir / "private" / "index" / "manifest.json"
    ).unlink()  # an index that was cut short is made again
    assert alone(again).returncode == 0
    assert (run_dir / "ledger.jsonl").read_bytes() == before


# A launcher that is killed leaves no rank behind: the ranks finish their step, save, and end; the same command resumes.

BIN = Path(sys.executable).parent
TORCHRUN = "launch_scripts/cluster/torchrun.py"
WITHIN = 30
MORE_STEPS = 20
"""Steps of a tenth of a second that ranks may begin until they have looked for their launcher, every half second."""
SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


def arguments(run_dir: Path, *more: str, engine: str = "local") -> list[str]:
    settings = (
        "train.num_steps=4000",
        "train.checkpoint_every=1000",
        "heldout.num_captions=0",
        *more,
    )
    return train_arguments(
        run_dir, "--engine", engine, *settings, ds_config="ds_configs/zero2.json"
    )


def command(launcher: str, run_dir: Path) -> list[str]:
    two = ["--nproc_per_node", "2", "--master_port", str(free_port())]
    options = {
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", *two[1:]],
        "torchrun": [str(BIN / "torchrun"), *two],
        "torchrun.py": [sys.executable, TORCHRUN, *two],
    }
    engine = "fsdp" if launcher == "torchrun.py" else "local"
    return [*options[launcher], TRAIN, *arguments(run_dir, engine=engine)]


def processes(run_dir: Path) -> dict[int, list[str]]:
    """Command lines of all that has to do with this run, by process; those that have ended but were not waited for left out."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            words = (folder / "cmdline").read_bytes().decode(errors="replace").split("\0")
        except OSError:
            continue
        if str(run_dir) in words:
            found[int(folder.name)] = words
    return found


def ranks_of(run_dir: Path) -> set[int]:
    """Their scripts follow Python's own options; a launcher's arguments hold the script further behind."""
    return {pid for pid, words in processes(run_dir).items() if TRAIN in words[1:3]}


@contextmanager
def launched(run_dir: Path, started: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Until two steps are done; kills everything of it in the end."""
    environment = quiet_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with log_of(run_dir).open("ab") as log:
        process = subprocess.Popen(
            started, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True
        )
    try:
        wait_for_steps(run_dir, [process], log_of(run_dir))
        assert len(ranks_of(run_dir)) == 2, log_of(run_dir).read_text()[-3000:]
        yield process
    finally:
        kill_group(process)
        for pid in processes(run_dir):
            os.kill(pid, signal.SIGKILL)


def log_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def above(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


@pytest.mark.full
@pytest.mark.parametrize(
    ("launcher", "levels", "number"),
    [
        ("torchrun.py", 1, signal.SIGKILL),
        *(
            (launcher, levels, number)
            for launcher, levels in (("deepspeed", 2), ("deepspeed", 1), ("torchrun", 1))
            for number in SIGNALS
        ),
    ],
)
def test_a_lost_launcher(
    tmp_path: Path, launcher: str, levels: int, number: signal.Signals
) -> None:
    """DeepSpeed has two processes above a rank, torchrun one."""
    run_dir = tmp_path / "run"
    with launched(run_dir, command(launcher, run_dir)):
        victim = min(ranks_of(run_dir))
        for _ in range(levels):
            victim = above(victim)
        before = count(run_dir, "done")
        os.kill(victim, number)
        deadline = time.monotonic() + WITHIN
        while ranks_of(run_dir):
            assert time.monotonic() < deadline, log_of(run_dir).read_text()[-3000:]
            time.sleep(0.05)
        said = log_of(run_dir).read_text()
        assert (
            "stopped on request; the same command resumes" in said and "error on rank" not in said
        ), said[-3000:]
        done = count(run_dir, "done")
        assert before <= done <= before + MORE_STEPS
        assert count(run_dir, "intent") == done, "the running step was finished"
        assert read_ledger(run_dir / "ledger.jsonl").num_charged == done
        assert (run_dir / "checkpoints" / "LATEST").read_text() == f"step-{done:08d}\n", "and saved"
    again = alone(arguments(run_dir, "train.max_minutes=1e-6"))  # ends at its first step boundary
    assert again.returncode == 7, again.stderr
    assert f"resuming after step {done}; {done} attempts are charged" in again.stdout
