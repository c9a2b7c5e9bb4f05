"""Every fault ends everybody within two minutes, with at most three lines; its ledger passes, and the same command goes on.

Ranks that are killed, stopped, late or alone are in tests/e2e/test_failures.py.
"""

import contextlib
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.e2e.launch import alone, count
from tests.faults.runs import Fault, Run, exit_codes

CGROUP = Path("/sys/fs/cgroup/memory/fault-test")
PATIENCE = 120.0
WORDS = ("error", "warning: rank", "stopped", "damaged", "the launcher is gone")
WORKER = ("data.num_workers=1",)
FAILED = (1,)
SAVED = (7, 7)
STOPPED = "stopped on request"


def signals(number: signal.Signals, who: str, rank: int = 1) -> Callable[[Run], None]:
    def send(run: Run) -> None:
        os.kill(run.worker(rank) if who == "worker" else run.rank(rank), number)

    return send


def signals_launcher(number: signal.Signals) -> Callable[[Run], None]:
    return lambda run: run.launcher.send_signal(number)


def little_memory(run: Run) -> None:
    """No more address space for a data worker than it has."""
    pid = run.worker(1)
    pages = int(Path(f"/proc/{pid}/statm").read_text().split()[0])
    resource.prlimit(pid, resource.RLIMIT_AS, (pages * resource.getpagesize(), resource.RLIM_INFINITY))


def out_of_memory(run: Run) -> None:
    """The kernel's own OOM killer, in a memory cgroup whose limit is what the rank may still take."""
    try:
        CGROUP.mkdir(exist_ok=True)
        (CGROUP / "memory.limit_in_bytes").write_text("1M")
        (CGROUP / "cgroup.procs").write_text(str(run.rank(1)))
    except OSError as error:
        pytest.skip(f"no memory cgroup can be made: {error.strerror}")


def no_cgroup(run: Run) -> None:
    CGROUP.rmdir()


def small_disk(run: Run) -> None:
    """A disk of its own for the mirror of the ledger."""
    disk = run.folder / "disk"
    disk.mkdir()
    if subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", str(disk)], check=False).returncode:
        pytest.skip("no file system can be mounted")


def without_disk(run: Run) -> None:
    subprocess.run(["umount", "--lazy", str(run.folder / "disk")], check=False)


def fill_disk(run: Run) -> None:
    with (run.folder / "disk" / "filler").open("wb", buffering=0) as file, contextlib.suppress(OSError):
        while True:
            file.write(bytes(512))


def room_again(run: Run) -> None:
    (run.folder / "disk" / "filler").unlink()


HURRIED = ("--heartbeat_seconds", "5")
FAULTS = [
    Fault("rank calls abort()", "deepspeed", None, (1, 250), "rank 1 (host", ("abort", "1", "3", "0")),
    Fault(
        "rank holds the interpreter lock", "torchrun.py", None, FAILED, "rank 1 (host", ("hold", "1", "3", "40"), settings=HURRIED
    ),
    Fault("rank killed by the kernel, out of memory", "torchrun.py", out_of_memory, FAILED, "rank 1", undo=no_cgroup),
    Fault(
        "rank out of address space (RLIMIT_AS)", "deepspeed", None, FAILED, "no more memory", ("memory", "1", "3", "0")
    ),
    Fault("data worker killed", "deepspeed", signals(signal.SIGKILL, "worker"), FAILED, "a data worker died", settings=WORKER),
    Fault("data worker out of memory", "deepspeed", little_memory, FAILED, "memory", settings=WORKER),
    Fault("a weight is NaN", "deepspeed", None, FAILED, "NaN or infinity", ("nan", "1", "3", "0")),
    Fault("SIGTERM to mpirun", "mpirun", signals_launcher(signal.SIGTERM), (7, 143, -15, 15), ""),
    Fault("SIGINT to mpirun", "mpirun", signals_launcher(signal.SIGINT), (7, 130, -2, 2), ""),
    Fault("SIGTERM to torchrun.py", "torchrun.py", signals_launcher(signal.SIGTERM), (7,), STOPPED, rank_codes=SAVED),
    Fault("SIGTERM to deepspeed", "deepspeed", signals_launcher(signal.SIGTERM), (-15,), STOPPED, rank_codes=SAVED),
    Fault("SIGINT to deepspeed", "deepspeed", signals_launcher(signal.SIGINT), (-2, 1, 130), STOPPED, rank_codes=SAVED),
    Fault(
        "mirror of the ledger on a full disk", "deepspeed", fill_disk, (4,), "cannot write the mirror",
        settings=("privacy.ledger_mirror={folder}/disk/mirror.jsonl",), prepare=small_disk, undo=room_again, clean=without_disk,
    ),
]  # fmt: skip


@pytest.mark.full
@pytest.mark.timeout(600)
@pytest.mark.parametrize("fault", FAULTS, ids=lambda fault: fault.name)
def test_a_fault(fault: Fault, tmp_path: Path) -> None:
    run = Run(fault, tmp_path)
    fault.prepare(run)
    try:
        run.start()
        try:
            deadline = time.monotonic() + 300
            while count(run.run_dir, "done") < 2 and run.launcher.poll() is None:
                assert time.monotonic() < deadline, run.log.read_text()[-3000:]
                time.sleep(0.05)
            begun = time.monotonic()
            if fault.inflict is not None:
                fault.inflict(run)
            while run.processes() and time.monotonic() < begun + PATIENCE:
                run.launcher.poll()
                time.sleep(0.05)
            left = run.processes()
        finally:
            for pid in run.processes():
                os.kill(pid, signal.SIGKILL)
            run.launcher.wait()
        rank_codes = exit_codes(run.run_dir)
        fault.undo(run)
        audit = alone(["ledger", "--run_dir", str(run.run_dir)], script="launch_scripts/audit.py").returncode
        again = alone([*run.arguments(), "train.max_minutes=1e-6"])  # it stops at its first step boundary
    finally:
        fault.clean(run)
    said = run.log.read_text(errors="replace")
    lines = [line for line in said.splitlines() if line.startswith(WORDS)]
    assert not left, said[-3000:]
    assert run.launcher.returncode in fault.codes, said[-3000:]
    assert fault.rank_codes in (None, rank_codes)
    assert any(fault.says in line for line in [*lines, ""]) and len(lines) <= 3, lines
    # DeepSpeed's command has no handler for SIGINT and ends with a traceback of its own.
    assert said.count("Traceback") == (fault.name == "SIGINT to deepspeed"), said[-3000:]
    assert audit in (0, 6), "the ledger fails its audit"
    assert again.returncode == 7, again.stderr[-1000:]
