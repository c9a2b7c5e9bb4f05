"""Fresh Python processes for tests, forked from one that has the heavy packages imported (tests/fork_server.py).

A started program has a session, an environment, a folder, arguments and streams of its own, and ends as Python ends.
"""

import atexit
import os
import select
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing.connection import Connection, Pipe
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]


def quiet_environment(**more: str) -> dict[str, str]:
    return {
        **os.environ,
        "OMP_NUM_THREADS": "1",
        "DS_ACCELERATOR": "cpu",
        "CUDA_VISIBLE_DEVICES": "",
        "PYTHONWARNINGS": "ignore",
        **more,
    }


@dataclass(frozen=True)
class Start:
    """A start of Python: SCRIPT ARGUMENT ... or -m MODULE ARGUMENT ..., with its streams as files to append to."""

    command: tuple[str, ...]
    environment: dict[str, str]
    folder: Path
    stdout: Path
    stderr: Path


class Forked:
    """A started process with the methods of subprocess.Popen that tests use."""

    def __init__(
        self,
        command: Sequence[str | Path],
        *,
        stdout: Path,
        stderr: Path | None = None,
        env: dict[str, str] | None = None,
        cwd: Path = ROOT,
    ) -> None:
        start = Start(
            tuple(map(str, command)), env or quiet_environment(), cwd, stdout, stderr or stdout
        )
        self.args = start.command
        self.stdout = stdout
        self.pid: int = _ask(start)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        if self.returncode is None:
            self.returncode = _ask(self.pid)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        if self.poll() is None:
            handle = os.pidfd_open(self.pid)  # the process may have ended, but only poll() reaps it
            try:
                select.select([handle], [], [], timeout)
            finally:
                os.close(handle)
        if self.poll() is None:
            raise subprocess.TimeoutExpired(list(self.args), timeout or 0)
        assert self.returncode is not None
        return self.returncode

    def wait_for_line(self, line: str, timeout: float = 60) -> None:
        """Waits until stdout has this line."""
        deadline = time.monotonic() + timeout
        while line not in (self.stdout.read_text() if self.stdout.exists() else "").splitlines():
            assert self.poll() is None and time.monotonic() < deadline, f"no line {line!r}"
            time.sleep(0.01)

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def kill_group(process: "Forked | subprocess.Popen[str] | subprocess.Popen[bytes]") -> None:
    """Kills the process with its workers."""
    try:
        os.killpg(process.pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    finally:
        process.wait()


def run_python(
    command: Sequence[str | Path],
    *,
    timeout: float = 240,
    env: dict[str, str] | None = None,
    cwd: Path = ROOT,
) -> subprocess.CompletedProcess[str]:
    """Runs a script or -m MODULE to its end and returns exit code and output; kills it with its workers at the timeout.

    Args:
        env: by default a quiet one in which warnings are shown, as users see them.
    """
    if env is None:
        env = quiet_environment()
        del env["PYTHONWARNINGS"]
    with tempfile.TemporaryDirectory() as folder:
        out, err = Path(folder) / "stdout", Path(folder) / "stderr"
        process = Forked(command, stdout=out, stderr=err, env=env, cwd=cwd)
        try:
            code = process.wait(timeout)
        finally:
            kill_group(process)
        return subprocess.CompletedProcess(process.args, code, out.read_text(), err.read_text())


_server: tuple[Connection, "subprocess.Popen[bytes]"] | None = None


def _ask(question: Start | int) -> int | None:
    global _server
    if _server is None:
        ours, theirs = Pipe()
        environment = quiet_environment(
            TORCH_CPP_LOG_LEVEL="ERROR"
        )  # as train.py sets it before it imports torch
        command = [sys.executable, "-m", "tests.fork_server", str(theirs.fileno())]
        _server = (
            ours,
            subprocess.Popen(command, cwd=ROOT, env=environment, pass_fds=[theirs.fileno()]),
        )
        theirs.close()
        atexit.register(end_server)
    connection, _ = _server
    connection.send(question)
    answer: int | None = connection.recv()
    return answer


def end_server() -> None:
    """Ends the server and, with it, what it started and what still runs."""
    global _server
    if _server is not None:
        connection, process = _server
        _server = None
        connection.close()
        process.wait()
