"""The launcher's processes above this rank: once one of them is gone, nobody waits for the run any more, and it should stop.

A launcher that is killed cannot end its ranks, and `deepspeed` on one host does not even pass SIGTERM on. Such ranks would go
on for hours, charge every step, and be in the way of the next start. So each rank remembers the processes that started it
and asks for a stop, like a scheduler with SIGUSR1, when one of them ends. Shells, terminals, `nohup` and whatever else stands
above a launcher may end: only an unbroken line of launchers counts, from the rank upwards.

Processes are found in Linux' /proc; elsewhere none is found, and none is watched.
"""

import contextlib
import os
import re
import signal
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

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
    """A process; `started` (clock ticks since the system's start) differs in a later process with the same number."""

    pid: int
    started: int
    name: str


def launcher_processes() -> tuple[Process, ...]:
    """The launchers above this process, the nearest first; none if no launcher started it."""
    launchers: list[Process] = []
    pid = os.getppid()
    while (status := _status(pid)) is not None:
        try:
            command = Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace").rstrip("\0").split("\0")
        except OSError:  # it has ended, or hides its command line
            break
        name = launcher_name(command)
        if name is None:
            break
        launchers.append(Process(pid, status[2], name))
        pid = status[1]
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


def is_gone(process: Process) -> bool:
    """Whether a process has ended, even if nobody has asked for its exit code yet."""
    status = _status(process.pid)
    return status is None or status[0] in "ZX" or status[2] != process.started


def watch(processes: Sequence[Process], *, speaks: bool, stop: Callable[[], None] | None = None) -> None:
    """Starts a thread that asks this process to stop, once, when one of `processes` has gone.

    Args:
        speaks: whether to print that; not all ranks of a host need to.
        stop: by default this process gets SIGUSR1, see trainer/loop/stopping.py.
    """

    def look() -> None:
        while not any(map(is_gone, processes)):
            time.sleep(INTERVAL)
        gone = next(filter(is_gone, processes))
        (stop or (lambda: os.kill(os.getpid(), signal.SIGUSR1)))()
        if speaks:
            with contextlib.suppress(OSError):  # the console may have gone with the launcher
                os.write(2, f"the launcher is gone ({gone.name}, process {gone.pid}): the run stops\n".encode())

    if processes:
        threading.Thread(target=look, name="launcher", daemon=True).start()


def _status(pid: int) -> tuple[str, int, int] | None:
    """State, parent, and start in clock ticks; None where there is no such process to be seen."""
    try:
        text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    except OSError:
        return None
    fields = text.rpartition(")")[2].split()  # the name before it may hold spaces and brackets
    return fields[0], int(fields[1]), int(fields[19])
