"""Reads rank, world size and rendezvous from the environment of the launcher, without an MPI
library.

torchrun and DeepSpeed set RANK; Open MPI, MVAPICH, MPICH, Intel MPI and Slurm's srun have variables
of their own. They are read in this order: a launcher may run inside an allocation or an interactive
step, whose variables its ranks inherit.

A killed launcher cannot end its ranks, and `deepspeed` on one host does not even pass SIGTERM on.
Such ranks would run for hours, charge every step, and block the next start. So each rank remembers
the processes that started it and asks for a stop when one of them ends, like a scheduler with
SIGUSR1. Only an unbroken line of launchers counts, from the rank upwards: shells, terminals and
`nohup` may end.

A rank cannot see a launcher on another host (pdsh), but that launcher carries its output. So a rank
also watches the reader of its console, if the console is a pipe. Processes are found in Linux'
/proc; elsewhere no process is watched.
"""

import contextlib
import functools
import io
import os
import re
import select
import signal
import stat
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import ConfigError

DEFAULT_PORT = 29500
RENDEZVOUS_SECONDS = 45.0
"""The time for all ranks to come: an unreachable rendezvous ends all ranks within a minute."""
HEARTBEAT_SECONDS = 30.0
"""The silence after which a rank is dead, or late if its process is seen to live (heartbeat.py)."""
LONGEST_RENDEZVOUS_SECONDS = 86_400.0


@dataclass(frozen=True)
class Ranks:
    """The rank of this process among all.

    Attributes:
        address, port: the rendezvous of rank 0.
        variables: the variables of the environment that state the rank, in words; empty without
            any.
    """

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT
    variables: str = field(default="", compare=False)

    @property
    def is_main(self) -> bool:
        return self.rank == 0


class _Launcher(NamedTuple):
    """The names of a launcher's variables; `marker` must be set, too.

    The first variable of `local_ranks` that is set counts.
    """

    rank: str
    world_size: str
    local_ranks: tuple[str, ...]
    marker: str


# Slurm sets its ranks in the batch script's own shell too; only a process that srun started has a
# step.
_SLURM = _Launcher("SLURM_PROCID", "SLURM_NTASKS", ("SLURM_LOCALID",), "SLURM_STEP_ID")
_LAUNCHERS = (
    _Launcher("RANK", "WORLD_SIZE", ("LOCAL_RANK",), "RANK"),
    _Launcher(
        "OMPI_COMM_WORLD_RANK",
        "OMPI_COMM_WORLD_SIZE",
        ("OMPI_COMM_WORLD_LOCAL_RANK",),
        "OMPI_COMM_WORLD_RANK",
    ),
    _Launcher(
        "MV2_COMM_WORLD_RANK",
        "MV2_COMM_WORLD_SIZE",
        ("MV2_COMM_WORLD_LOCAL_RANK",),
        "MV2_COMM_WORLD_RANK",
    ),
    _Launcher(
        "PMI_RANK",
        "PMI_SIZE",
        ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"),
        "PMI_RANK",
    ),
    _SLURM,
)


def discover_ranks(environ: Mapping[str, str]) -> Ranks:
    """Returns the rank that the launcher's environment states, or one process without a launcher.

    Raises:
        ConfigError: several ranks but no rendezvous, or a variable that is not a number.
    """
    launcher = None
    for candidate in _LAUNCHERS:
        if {candidate.rank, candidate.world_size, candidate.marker} <= environ.keys():
            launcher = candidate
            break
    if launcher is None:
        return Ranks()
    local_names = list(launcher.local_ranks)
    has_slurm_rank = environ[launcher.rank] == environ.get(_SLURM.rank)
    if has_slurm_rank and environ[launcher.world_size] == environ.get(_SLURM.world_size):
        # srun --mpi=pmi2 sets both.
        local_names += _SLURM.local_ranks
    # Without a local rank every rank is taken to be on one machine.
    local_name = next((name for name in local_names if name in environ), launcher.rank)
    is_slurm = _SLURM.marker in environ
    port = DEFAULT_PORT
    try:
        rank = int(environ[launcher.rank])
        local_rank = int(environ[local_name])
        world_size = int(environ[launcher.world_size])
        if "MASTER_PORT" in environ:
            port = int(environ["MASTER_PORT"])
        elif is_slurm and environ.get("SLURM_JOB_ID", "").isdigit():
            # Jobs may share a host, so each gets a port of its own, below the ports that systems
            # assign.
            port = 20000 + int(environ["SLURM_JOB_ID"]) % 10000
    except ValueError as error:
        raise ConfigError(
            f"launcher variables {launcher.rank}, {local_name}, {launcher.world_size}: {error}"
        ) from error
    if not 0 <= rank < world_size or local_rank < 0:
        raise ConfigError(
            f"launcher variables {launcher.rank}={rank}, {launcher.world_size}={world_size}: "
            "no such rank"
        )
    address = environ.get("MASTER_ADDR")
    if not address and world_size == 1:
        address = "127.0.0.1"
    host_list = environ.get("SLURM_STEP_NODELIST")
    if not address and is_slurm and host_list:
        # The first host is that of rank 0: rack1node04 of rack[1-2]node[04-07,9],login.
        first_host = re.split(r",(?![^\[]*\])", host_list, maxsplit=1)[0]
        address = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first_host)
    variables = f"{launcher.rank}={rank} and {launcher.world_size}={world_size}"
    if not address:
        raise ConfigError(
            f"{variables}, but MASTER_ADDR is not set: to train alone, unset them; else export the "
            "host name of rank 0 to all ranks (Open MPI: mpirun -x MASTER_ADDR=HOST, as "
            "launch_scripts/cluster/openmpi.sh does; others: docs/running.md)"
        )
    if not re.fullmatch(r"[\w.:%-]+", address):
        raise ConfigError(
            f"MASTER_ADDR is {address!r}: that is neither the name nor the address of a host"
        )
    return Ranks(rank, local_rank, world_size, address, port, variables)


COMMAND = re.compile(
    r"(?:[^\0]*python[\d.]*\0(?:-[WX]\0[^\0]*\0|-[^\0]*\0)*)?(?:[^\0]*/)?"
    r"(?P<name>deepspeed\.launcher\.(?:runner|launch)|torch\.distributed\.(?:run|launch)|"
    r"deepspeed|ds|torchrun|slurmstepd|mpirun|mpiexec|orterun|orted|prterun|prted|"
    r"hydra_pmi_proxy|hydra_bstrap_proxy|mpirun_rsh|mpispawn)\b"
)
"""Matches command lines of launchers; programs may have endings, as mpirun.openmpi, mpiexec.hydra
and slurmstepd's title do."""
INTERVAL = 0.5
"""Seconds between two checks of the launchers."""


class Process(NamedTuple):
    """A launcher above this process; see `process_identity`."""

    identity: str
    name: str


def launcher_processes() -> tuple[Process, ...]:
    """Returns the launchers above this process, the nearest first, or none."""
    launchers: list[Process] = []
    pid = os.getppid()
    # OSError: a process has ended, or hides its command.
    with contextlib.suppress(OSError):
        while True:
            command = Path(f"/proc/{pid}/cmdline").read_text(errors="replace")
            name = launcher_name(command)
            identity = process_identity(pid) if name else ""
            if not name or not identity:
                break
            launchers.append(Process(identity, name))
            pid = int(_fields(pid)[1])
    return tuple(launchers)


def launcher_name(command: str) -> str | None:
    """Returns the launcher that a command line of /proc runs, or None.

    A launcher is a program, or a script or module of Python.

    >>> words = ["/usr/bin/python3.11", "-u", "-m", "deepspeed.launcher.launch", "train.py"]
    >>> launcher_name("\\0".join(words))
    'deepspeed.launcher.launch'
    """
    match = COMMAND.match(command)
    return match["name"] if match else None


def process_identity(pid: int) -> str:
    """Returns text that no other process of any host or container has, or "" if it is unknown."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text().strip()
        namespace = os.readlink("/proc/self/ns/pid")
        start_time = _fields(pid)[19]
        return f"{boot} {namespace} {pid} {start_time}"
    return ""


def process_state(identity: str) -> str:
    """Returns Linux' letter for the state of a live process, "T" for a stopped one.

    Returns "" if the process cannot be seen or has ended, also as a zombie.
    """
    if not identity:
        return ""
    with contextlib.suppress(OSError):
        pid = int(identity.split(" ")[2])
        if process_identity(pid) == identity:
            return _fields(pid)[0].strip("ZX")
    return ""


def _fields(pid: int) -> list[str]:
    """Returns the fields of /proc/PID/stat from the state on.

    The name of the process, in brackets before them, may hold any text.
    """
    text = Path(f"/proc/{pid}/stat").read_text(errors="replace")
    return text.rpartition(")")[2].split()


def watch(
    processes: Sequence[Process], *, speaks: bool, stop: Callable[[], None] | None = None
) -> None:
    """Starts a thread that asks this process to stop when a launcher or the console's reader ends.

    Output to a reader that has ended is lost without an error, since the run has to save first.

    Args:
        processes: the launchers.
        speaks: whether to print the reason; not all ranks of a host need to.
        stop: by default this process gets SIGUSR1, see trainer/loop/stopping.py.
    """
    consoles = select.poll()
    has_console = False
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            mode = os.fstat(stream.fileno()).st_mode
        except (OSError, ValueError):
            # The stream is closed, or is not a file.
            continue
        # Launchers between hosts carry the output of ranks.
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(mode):
            has_console = True
            # A poll reports errors without a write.
            consoles.register(stream.fileno(), 0)
            raw = io.BufferedWriter(_Console(stream.fileno(), "w", closefd=False))
            console = io.TextIOWrapper(
                raw, stream.encoding, errors="backslashreplace", line_buffering=True
            )
            setattr(sys, name, console)
    if processes or has_console:
        watcher = functools.partial(_watch_launcher, processes, consoles, speaks, stop)
        threading.Thread(target=watcher, name="launcher", daemon=True).start()


def _watch_launcher(
    processes: Sequence[Process],
    consoles: select.poll,
    speaks: bool,
    stop: Callable[[], None] | None,
) -> None:
    """Waits for the end of a launcher or of the console's reader, and then asks for a stop."""
    reason = ""
    while not reason:
        time.sleep(INTERVAL)
        ended_launchers = [process for process in processes if not process_state(process.identity)]
        events = [event for _, event in consoles.poll(0)]
        if ended_launchers:
            launcher = ended_launchers[0]
            reason = f"{launcher.name}, process {launcher.identity.split(' ')[2]}"
        elif any(event & (select.POLLERR | select.POLLHUP) for event in events):
            reason = "console"
    if stop is None:
        os.kill(os.getpid(), signal.SIGUSR1)
    else:
        stop()
    if speaks:
        # The console may have gone with the launcher.
        with contextlib.suppress(OSError):
            os.write(2, f"the launcher is gone ({reason}): the run stops\n".encode())


class _Console(io.FileIO):
    """A pipe whose reader may end; output that no reader can get is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes
