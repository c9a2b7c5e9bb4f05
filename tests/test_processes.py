"""Forked programs are fresh processes: nothing of one reaches another, and their ends are seen."""

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import run_ranks
from tests.processes import ROOT, Forked, kill_group, run_python


@pytest.fixture
def program(tmp_path: Path) -> Path:
    return tmp_path / "program.py"


SHOW = """
import json, os, sys, threading, warnings
import torch
seen = {
    "argv": sys.argv, "path": sys.path[0], "folder": os.getcwd(), "name": __name__, "file": __file__,
    "environment": {name: os.environ.get(name) for name in ("COLOUR", "OMP_NUM_THREADS")},
    "stdin": sys.stdin.read(),
    "threads": threading.active_count(), "torch_threads": torch.get_num_threads(), "grad": torch.is_grad_enabled(),
    "builtins": hasattr(__builtins__, "left_behind"), "descriptors": len(os.listdir("/proc/self/fd")) - 4,
}
print(json.dumps(seen))
warnings.warn('seen')
"""
SPOIL = """
import builtins, os, sys, torch
import privacy.step.step
builtins.left_behind = privacy.step.step.train_step = 1
os.environ["COLOUR"] = "red"; os.chdir("/"); torch.manual_seed(5); torch.set_grad_enabled(False); sys.path.insert(0, "/nowhere")
"""


def test_a_forked_program_sees_what_a_fresh_python_shows_it(program: Path, tmp_path: Path) -> None:
    """Whatever another one did before."""
    spoiler = tmp_path / "spoiler.py"
    spoiler.write_text(SPOIL)
    program.write_text(SHOW)
    environment = {**os.environ, "COLOUR": "green", "OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}
    fresh = subprocess.run(
        [sys.executable, program, "a", "-b"], cwd=tmp_path, env=environment, capture_output=True, text=True,
        stdin=subprocess.DEVNULL, check=True,
    )  # fmt: skip
    spoiled = run_python([spoiler], cwd=tmp_path)
    assert spoiled.returncode == 0, spoiled.stderr
    forked = run_python([program, "a", "-b"], env=environment, cwd=tmp_path)
    assert forked.returncode == 0, forked.stderr
    assert (forked.stdout, forked.stderr) == (fresh.stdout, fresh.stderr)


def test_generators_that_the_system_seeds_differ(program: Path) -> None:
    program.write_text(
        "import random, numpy, torch; print(random.random(), numpy.random.random(), torch.rand(()).item())"
    )
    first, second = (run_python([program]).stdout.split() for _ in range(2))
    assert len(first) == 3 and not set(first) & set(second)


@pytest.mark.parametrize(
    ("code", "returncode", "stdout", "stderr"),
    [
        ("raise SystemExit(7)", 7, "", ""),
        ("raise SystemExit('one line')", 1, "", "one line\n"),
        ("import os; os._exit(4)", 4, "", ""),
        ("import atexit; atexit.register(print, 'last'); print('first')", 0, "first\nlast\n", ""),
        ("import os, signal; os.kill(os.getpid(), signal.SIGKILL)", -signal.SIGKILL, "", ""),
    ],
)
def test_how_a_program_ends(program: Path, code: str, returncode: int, stdout: str, stderr: str) -> None:
    program.write_text(code)
    done = run_python([program])
    assert (done.returncode, done.stdout, done.stderr) == (returncode, stdout, stderr)


def is_running(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except FileNotFoundError:
        return False


def ends(pid: int) -> bool:
    deadline = time.monotonic() + 60
    while is_running(pid) and time.monotonic() < deadline:
        time.sleep(0.02)
    return not is_running(pid)


def worker_of(note: Path) -> int:
    deadline = time.monotonic() + 60
    while not (note.exists() and note.read_text().endswith("\n")):
        assert time.monotonic() < deadline
        time.sleep(0.02)
    return int(note.read_text())


WITH_WORKER = """
import subprocess, sys, time
worker = subprocess.Popen(["sleep", "600"])
print(worker.pid, flush=True)
time.sleep(600)
"""


def test_signals_reach_a_program_and_kill_group_its_workers(program: Path, tmp_path: Path) -> None:
    program.write_text(WITH_WORKER)
    process = Forked([program], stdout=tmp_path / "out")
    worker = worker_of(tmp_path / "out")
    assert process.poll() is None
    process.terminate()
    assert process.wait(60) == -signal.SIGTERM
    assert is_running(worker)
    kill_group(process)
    assert ends(worker) and process.poll() == -signal.SIGTERM


def rank_patches(device: object, *, value: str | None) -> str:
    import privacy.step.step as module

    found = str(module.train_step)
    if value is not None:
        module.train_step = value  # type: ignore[assignment]
    return found.split(" at ")[0]


def test_what_a_rank_patches_stays_in_the_rank() -> None:
    first, second = (run_ranks(f"{__name__}:rank_patches", 1, value=value) for value in ("other", None))
    assert first == second == ["<function train_step"]
