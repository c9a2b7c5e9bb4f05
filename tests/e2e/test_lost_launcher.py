"""A launcher that is killed leaves no rank behind: the ranks finish their step, save, and end; the same command resumes."""

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from privacy.ledger.records import read_ledger
from tests.distributed.ranks import ROOT, free_port, quiet_environment
from tests.e2e.launch import TRAIN, alone, count, kill_group, train_arguments

BIN = Path(sys.executable).parent
TORCHRUN = "launch_scripts/cluster/torchrun.py"
WITHIN = 30
HANGS_AFTER = 90
BUSY = 1.0
"""Seconds: a run that uses less processor time than this in HANGS_AFTER waits for something other than a processor."""
MORE_STEPS = 20
"""Steps of a tenth of a second that ranks may begin until they have looked for their launcher, every half second."""

pytestmark = pytest.mark.timeout(1200)


def arguments(run_dir: Path, *more: str, checkpoint_every: int = 1000, engine: str = "local") -> list[str]:
    settings = ("train.num_steps=4000", f"train.checkpoint_every={checkpoint_every}", "heldout.num_captions=0", *more)
    return train_arguments(run_dir, "--engine", engine, *settings, ds_config="ds_configs/zero2.json")


def command(launcher: str, run_dir: Path, checkpoint_every: int = 1000) -> list[str]:
    options = {
        "deepspeed": [str(BIN / "deepspeed"), "--num_gpus", "2", "--master_port", str(free_port())],
        "torchrun": [str(BIN / "torchrun"), "--nproc_per_node", "2", "--master_port", str(free_port())],
        "torchrun.py": [sys.executable, TORCHRUN, "--nproc_per_node", "2", "--master_port", str(free_port())],
        "mpirun": [str(BIN / "mpirun"), "-n", "2", sys.executable, "-u"],
    }
    engine = "fsdp" if launcher == "torchrun.py" else "local"
    return [*options[launcher], TRAIN, *arguments(run_dir, checkpoint_every=checkpoint_every, engine=engine)]


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


def ranks_of(run_dir: Path, script: str = TRAIN) -> set[int]:
    """Their scripts follow Python's own options; a launcher's arguments hold the script further behind."""
    return {pid for pid, words in processes(run_dir).items() if script in words[1:3]}


@contextmanager
def launched(run_dir: Path, started: list[str]) -> Iterator["subprocess.Popen[bytes]"]:
    """Until two steps are done; kills everything of it in the end."""
    environment = quiet_environment(MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()))
    with log_of(run_dir).open("ab") as log:
        process = subprocess.Popen(started, cwd=ROOT, env=environment, stdout=log, stderr=log, start_new_session=True)
    try:
        wait_for_steps(run_dir, process, log_of(run_dir))
        assert len(ranks_of(run_dir)) == 2, log_of(run_dir).read_text()[-3000:]
        yield process
    finally:
        kill_group(process)
        for pid in processes(run_dir):
            os.kill(pid, signal.SIGKILL)


def log_of(run_dir: Path) -> Path:
    return run_dir.with_suffix(".log")


def wait_for_steps(
    run_dir: Path, launcher: "subprocess.Popen[bytes] | subprocess.Popen[str]", log: Path, number: int = 2
) -> None:
    """Until a run has done this number of steps, or its launcher has ended.

    On a busy machine that takes minutes, most of them in imports. A run hangs when its processes wait although they could run.
    """
    start = since = looked = time.monotonic()
    used = 0.0
    while count(run_dir, "done") < number and launcher.poll() is None:
        time.sleep(0.05)
        if (now := time.monotonic()) < looked + 1:  # a look at all processes is work, too
            continue
        looked = now
        if abs(total := processor_seconds(processes(run_dir)) - used) > BUSY:  # less, once one of them has ended
            used, since = used + total, now
        said = log.read_text(errors="replace")[-3000:] if log.exists() else ""
        assert now < since + HANGS_AFTER, (
            f"the run waits: {used:.1f} s of processor time in {now - start:.0f} s\n{said}"
        )
        assert now < start + 10 * HANGS_AFTER, (
            f"no {number} steps in {now - start:.0f} s, {used:.1f} of processor time\n{said}"
        )


def processor_seconds(pids: Iterable[int]) -> float:
    """What these processes have used so far, in user and system mode."""
    ticks = 0
    for pid in pids:
        with contextlib.suppress(OSError):  # it has ended
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:13]))
    return ticks / os.sysconf("SC_CLK_TCK")


def wait_for(condition: object, run_dir: Path, within: float) -> None:
    deadline = time.monotonic() + within
    while not condition():  # type: ignore[operator]
        assert time.monotonic() < deadline, log_of(run_dir).read_text()[-3000:]
        time.sleep(0.05)


def stops_and_resumes(run_dir: Path, victim: int, number: signal.Signals) -> None:
    before = count(run_dir, "done")
    os.kill(victim, number)
    wait_for(lambda: not ranks_of(run_dir), run_dir, WITHIN)
    said = log_of(run_dir).read_text()
    assert "stopped on request; the same command resumes" in said and "error on rank" not in said, said[-3000:]
    done = count(run_dir, "done")
    assert before <= done <= before + MORE_STEPS
    assert count(run_dir, "intent") == done, "the running step was finished"
    assert read_ledger(run_dir / "ledger.jsonl").num_charged == done
    assert (run_dir / "checkpoints" / "LATEST").read_text() == f"step-{done:08d}\n", "and saved"


def above(pid: int) -> int:
    return int(Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[1])


SIGNALS = (signal.SIGKILL, signal.SIGTERM, signal.SIGINT)


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
def test_a_lost_launcher(tmp_path: Path, launcher: str, levels: int, number: signal.Signals) -> None:
    """DeepSpeed has two processes above a rank, torchrun one."""
    run_dir = tmp_path / "run"
    with launched(run_dir, command(launcher, run_dir)):
        victim = min(ranks_of(run_dir))
        for _ in range(levels):
            victim = above(victim)
        stops_and_resumes(run_dir, victim, number)
    done = count(run_dir, "done")
    again = alone(arguments(run_dir, "train.max_minutes=1e-6"))  # ends at its first step boundary
    assert again.returncode == 7, again.stderr
    assert f"resuming after step {done}; {done} attempts are charged" in again.stdout


@pytest.mark.full
@pytest.mark.parametrize(
    ("victim", "number", "code"),
    [
        ("rank", signal.SIGUSR1, 7),
        ("rank", signal.SIGKILL, 1),
        ("agent", signal.SIGTERM, 7),
        ("agent", signal.SIGINT, 7),
    ],
)
def test_torchrun_ends_as_its_ranks_end(tmp_path: Path, victim: str, number: signal.Signals, code: int) -> None:
    """Without a traceback; torch's own command ends with 1 and one."""
    run_dir = tmp_path / "run"
    with launched(run_dir, command("torchrun.py", run_dir, checkpoint_every=1)) as agent:
        os.kill(agent.pid if victim == "agent" else min(ranks_of(run_dir)), number)
        assert agent.wait(2 * WITHIN) == code
    said = log_of(run_dir).read_text()
    assert "Traceback" not in said, said[-3000:]
    assert code == 7 or "error: rank 0 was ended by SIGKILL; the same command resumes" in said, said[-3000:]


@pytest.mark.full
@pytest.mark.parametrize("number", SIGNALS)
def test_a_lost_mpirun(tmp_path: Path, number: signal.Signals) -> None:
    """Its proxies kill the ranks by themselves, perhaps within a step; what was charged stays charged."""
    run_dir = tmp_path / "run"
    with launched(run_dir, command("mpirun", run_dir, checkpoint_every=1)) as mpirun:
        mpirun.send_signal(number)
        wait_for(lambda: not ranks_of(run_dir), run_dir, WITHIN)
    assert read_ledger(run_dir / "ledger.jsonl").num_charged == count(run_dir, "intent") <= count(run_dir, "done") + 1


@pytest.mark.full
def test_a_shell_that_ends_is_no_launcher(tmp_path: Path) -> None:
    """`nohup deepspeed ... &`, and the terminal is closed."""
    run_dir = tmp_path / "run"
    background = ["bash", "-c", 'nohup "$@" & sleep 600', "bash", *command("deepspeed", run_dir)]
    with launched(run_dir, background) as shell:
        os.killpg(shell.pid, signal.SIGHUP)
        assert shell.wait(10) == -signal.SIGHUP
        done = count(run_dir, "done")
        time.sleep(5)
        wait_for(lambda: count(run_dir, "done") >= done + 5, run_dir, WITHIN)
        assert len(ranks_of(run_dir)) == 2 and "the launcher is gone" not in log_of(run_dir).read_text()
