"""The launcher's processes above this rank: once one of them is gone, nobody waits for the run any more, and it should stop.

A launcher that is killed cannot end its ranks, and `deepspeed` on one host does not even pass SIGTERM on. Such ranks would go
on for hours, charge every step, and be in the way of the next start. So each rank remembers the processes that started it
and asks for a stop, like a scheduler with SIGUSR1, when one of them ends. Shells, terminals, `nohup` and whatever else stands
above a launcher may end: only an unbroken line of launchers counts, from the rank upwards.

A launcher on another host (pdsh) is no process that a rank can see, but it carries what ranks print. So a rank also looks
whether anybody can still read its console, where that is a pipe.

Processes are found in Linux' /proc; elsewhere none is found, and none is watched.
"""

import contextlib
import io
import os
import re
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TextIO

PROGRAMS = frozenset(
    (
        *("deepspeed", "ds", "torchrun", "slurmstepd", "mpirun", "mpiexec", "orterun", "orted", "prterun", "prted"),
        *("hydra_pmi_proxy", "hydra_bstrap_proxy", "mpirun_rsh", "mpispawn"),
    )
)
MODULES = frozenset(
    ("deepspeed.launcher.runner", "deepspeed.launcher.launch", "torch.distributed.run", "torch.distributed.launch")
)
INTERVAL = 0.5
"""Seconds between two looks."""


class Process(NamedTuple):
    """A launcher that was found; see `process_identity`."""

    identity: str
    name: str


def launcher_processes() -> tuple[Process, ...]:
    """The launchers above this process, the nearest first; none if no launcher started it."""
    launchers: list[Process] = []
    pid = os.getppid()
    with contextlib.suppress(OSError):  # a process has ended, or hides its command
        while name := launcher_name(Path(f"/proc/{pid}/cmdline").read_text(errors="replace").rstrip("\0").split("\0")):
            if not (identity := process_identity(pid)):
                break
            launchers.append(Process(identity, name))
            pid = int(_fields(pid)[1])
    return tuple(launchers)


def launcher_name(command: Sequence[str]) -> str | None:
    """The launcher that a command line runs, if it runs one: a program, or one of Python's scripts and modules.

    >>> launcher_name(["/usr/bin/python3.11", "-u", "-m", "deepspeed.launcher.launch", "--node_rank=0", "train.py"])
    'deepspeed.launcher.launch'
    >>> launcher_name(["slurmstepd: [12.0]"])
    'slurmstepd'
    """
    words = iter(command)
    name = _program(next(words, ""))
    if name.startswith("python"):
        for word in words:
            if word in ("-W", "-X"):
                next(words, "")
            elif word.startswith("-") and word.endswith("m"):
                module = next(words, "")
                return module if module in MODULES else None
            elif not word.startswith("-"):
                name = _program(word)
                break
    return name if name in PROGRAMS else None


def _program(word: str) -> str:
    """A program's name without folder and endings: mpirun.openmpi, mpiexec.hydra and slurmstepd's title have some."""
    match = re.match(r"\w+", os.path.basename(word))
    return match[0] if match else ""


def process_identity(pid: int) -> str:
    """Tells a process from all others, on all hosts and in all containers; empty where the system does not say."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        return f"{boot} {os.readlink('/proc/self/ns/pid')} {pid} {_fields(pid)[19]}"  # where this process counts, and since when
    return ""


def process_state(identity: str) -> str:
    """Linux' letter for the state of a process that lives, "T" for a stopped one; empty where it has ended, even if nobody has
    asked for its exit code yet, or cannot be seen.
    """
    with contextlib.suppress(OSError):
        if identity and process_identity(pid := int(identity.split(" ")[2])) == identity:
            return _fields(pid)[0].strip("ZX")
    return ""


def _fields(pid: int) -> list[str]:
    """/proc/PID/stat from the state on; the name before it may hold anything."""
    return Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()


def watch(processes: Sequence[Process], *, speaks: bool, stop: Callable[[], None] | None = None) -> None:
    """Starts a thread that asks this process to stop, once, when one of `processes` or the console's reader has gone.

    From here on, what is printed to a reader that has gone is lost without an error: the run has to save first.

    Args:
        speaks: whether to print that; not all ranks of a host need to.
        stop: by default this process gets SIGUSR1, see trainer/loop/stopping.py.
    """
    consoles = [stream.fileno() for stream in (sys.stdout, sys.stderr) if _has_reader(stream)]

    def look() -> None:
        gone = None
        while gone is None:
            time.sleep(INTERVAL)
            ended = (one for one in processes if not process_state(one.identity))
            gone = next((f"{one.name}, process {one.identity.split(' ')[2]}" for one in ended), None)
            if gone is None and any(map(_reader_is_gone, consoles)):
                gone = "console"
        (stop or (lambda: os.kill(os.getpid(), signal.SIGUSR1)))()
        if speaks:
            with contextlib.suppress(OSError):  # the console may have gone with the launcher
                os.write(2, f"the launcher is gone ({gone}): the run stops\n".encode())

    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if _has_reader(stream):
            raw = io.BufferedWriter(_Console(stream.fileno(), "w", closefd=False))
            setattr(sys, name, io.TextIOWrapper(raw, stream.encoding, errors="backslashreplace", line_buffering=True))
    if processes or consoles:
        threading.Thread(target=look, name="launcher", daemon=True).start()


class _Console(io.FileIO):
    """A pipe whose reader may end: what nobody can read is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes


def _has_reader(stream: TextIO) -> bool:
    """Whether a stream goes to another process: launchers between hosts carry what ranks print."""
    try:
        mode = os.fstat(stream.fileno()).st_mode
    except (OSError, ValueError):  # it is closed, or a stand-in
        return False
    return stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode)


def _reader_is_gone(descriptor: int) -> bool:
    """Whether nobody can read any more what is written to a pipe or a socket; nothing is written to find out."""
    poll = select.poll()
    poll.register(descriptor, 0)  # errors are always reported
    return any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
