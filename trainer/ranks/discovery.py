"""Rank, world size and meeting point from the environment of whatever started this process. Needs no MPI library.

torchrun and DeepSpeed set RANK; Open MPI, MVAPICH, MPICH and Intel MPI have variables of their own, and so has Slurm's srun. They
are read in this order: a launcher may run inside of an allocation or an interactive step, whose variables its ranks inherit.

A launcher that is killed cannot end its ranks, and `deepspeed` on one host does not even pass SIGTERM on. Such ranks would go on
for hours, charge every step, and be in the way of the next start. So each rank remembers the processes that started it and asks
for a stop, like a scheduler with SIGUSR1, when one of them ends. Shells, terminals, `nohup` and whatever else stands
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
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from trainer.errors import ConfigError

DEFAULT_PORT = 29500
RENDEZVOUS_SECONDS = 45.0
"""A rank that has not come is missed after so long: an unreachable rendezvous ends all ranks within a minute."""
HEARTBEAT_SECONDS = 30.0
"""A rank that is silent for so long is dead, or late where its process is seen to live (heartbeat.py)."""
LONGEST_RENDEZVOUS_SECONDS = 86_400.0


@dataclass(frozen=True)
class Ranks:
    """This process's place.

    Attributes:
        address, port: the rendezvous of rank 0.
        variables: those of the environment that say so, in words; empty where none does.
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
    """Names of a launcher's variables; `marker` must be set too. The first local rank that is set counts."""

    rank: str
    world_size: str
    local_ranks: tuple[str, ...]
    marker: str


# Slurm sets its ranks in the batch script's own shell too; only a process that srun started has a step.
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
    """Reads the launcher's environment; one process when there is none.

    Raises:
        ConfigError: several ranks but no meeting point, or a variable that is no number.
    """
    launchers = (
        one for one in _LAUNCHERS if {one.rank, one.world_size, one.marker} <= environ.keys()
    )
    launcher = next(launchers, None)
    if launcher is None:
        return Ranks()
    names = list(launcher.local_ranks)
    same_as_slurm = [(launcher.rank, _SLURM.rank), (launcher.world_size, _SLURM.world_size)]
    if all(environ[name] == environ.get(slurm) for name, slurm in same_as_slurm):  # srun --mpi=pmi2
        names += _SLURM.local_ranks
    # Without a local rank every rank is taken to be on one machine.
    local_name = next((name for name in names if name in environ), launcher.rank)
    is_slurm, port = _SLURM.marker in environ, DEFAULT_PORT
    try:
        rank, local_rank = int(environ[launcher.rank]), int(environ[local_name])
        world_size = int(environ[launcher.world_size])
        if "MASTER_PORT" in environ:
            port = int(environ["MASTER_PORT"])
        elif is_slurm and environ.get("SLURM_JOB_ID", "").isdigit():
            # Jobs may share a host, so each gets a port of its own, below those that systems hand out by themselves.
            port = 20000 + int(environ["SLURM_JOB_ID"]) % 10000
    except ValueError as error:
        raise ConfigError(
            f"launcher variables {launcher.rank}, {local_name}, {launcher.world_size}: {error}"
        ) from error
    if not 0 <= rank < world_size or local_rank < 0:
        raise ConfigError(
            f"launcher variables {launcher.rank}={rank}, {launcher.world_size}={world_size}: no such rank"
        )
    address = environ.get("MASTER_ADDR") or ("127.0.0.1" if world_size == 1 else None)
    if address is None and is_slurm and environ.get("SLURM_STEP_NODELIST"):
        # The first name of the host list, that of rank 0: rack1node04 of rack[1-2]node[04-07,9],login.
        first = re.split(r",(?![^\[]*\])", environ["SLURM_STEP_NODELIST"], maxsplit=1)[0]
        address = re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
    variables = f"{launcher.rank}={rank} and {launcher.world_size}={world_size}"
    if address is None:
        raise ConfigError(
            f"{variables}, but MASTER_ADDR is not set: to train alone, unset them; else export the host name of rank 0 to all "
            "ranks (Open MPI: mpirun -x MASTER_ADDR=HOST, as launch_scripts/cluster/openmpi.sh does; others: docs/running.md)"
        )
    if not re.fullmatch(r"[\w.:%-]+", address):
        raise ConfigError(
            f"MASTER_ADDR is {address!r}: that is neither the name nor the address of a host"
        )
    return Ranks(rank, local_rank, world_size, address, port, variables)


COMMAND = re.compile(
    r"(?:[^\0]*python[\d.]*\0(?:-[WX]\0[^\0]*\0|-[^\0]*\0)*)?(?:[^\0]*/)?"
    r"(?P<name>deepspeed\.launcher\.(?:runner|launch)|torch\.distributed\.(?:run|launch)|deepspeed|ds|torchrun|slurmstepd|mpirun|"
    r"mpiexec|orterun|orted|prterun|prted|hydra_pmi_proxy|hydra_bstrap_proxy|mpirun_rsh|mpispawn)\b"
)
"""Command lines of launchers; programs may have endings, as mpirun.openmpi, mpiexec.hydra and slurmstepd's title do."""
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
        while name := launcher_name(Path(f"/proc/{pid}/cmdline").read_text(errors="replace")):
            if not (identity := process_identity(pid)):
                break
            launchers.append(Process(identity, name))
            pid = int(_fields(pid)[1])
    return tuple(launchers)


def launcher_name(command: str) -> str | None:
    """The launcher that a command line, as /proc has it, runs: a program, or one of Python's scripts and modules.

    >>> launcher_name("\\0".join(["/usr/bin/python3.11", "-u", "-m", "deepspeed.launcher.launch", "train.py"]))
    'deepspeed.launcher.launch'
    """
    found = COMMAND.match(command)
    return found["name"] if found else None


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


def watch(
    processes: Sequence[Process], *, speaks: bool, stop: Callable[[], None] | None = None
) -> None:
    """Starts a thread that asks this process to stop, once, when one of `processes` or the console's reader has gone.

    From here on, what is printed to a reader that has gone is lost without an error: the run has to save first.

    Args:
        speaks: whether to print that; not all ranks of a host need to.
        stop: by default this process gets SIGUSR1, see trainer/loop/stopping.py.
    """
    consoles, watches = select.poll(), bool(processes)
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        try:
            mode = os.fstat(stream.fileno()).st_mode
        except (OSError, ValueError):  # it is closed, or a stand-in
            continue
        if stat.S_ISFIFO(mode) or stat.S_ISSOCK(
            mode
        ):  # launchers between hosts carry what ranks print
            watches = True
            consoles.register(
                stream.fileno(), 0
            )  # errors are always reported; nothing is written to find out
            raw = io.BufferedWriter(_Console(stream.fileno(), "w", closefd=False))
            setattr(
                sys,
                name,
                io.TextIOWrapper(
                    raw, stream.encoding, errors="backslashreplace", line_buffering=True
                ),
            )

    def look() -> None:
        gone = None
        while gone is None:
            time.sleep(INTERVAL)
            ended = (one for one in processes if not process_state(one.identity))
            gone = next(
                (f"{one.name}, process {one.identity.split(' ')[2]}" for one in ended), None
            )
            if gone is None and any(
                event & (select.POLLERR | select.POLLHUP) for _, event in consoles.poll(0)
            ):
                gone = "console"
        (stop or (lambda: os.kill(os.getpid(), signal.SIGUSR1)))()
        if speaks:
            with contextlib.suppress(OSError):  # the console may have gone with the launcher
                os.write(2, f"the launcher is gone ({gone}): the run stops\n".encode())

    if watches:
        threading.Thread(target=look, name="launcher", daemon=True).start()


class _Console(io.FileIO):
    """A pipe whose reader may end: what nobody can read is dropped."""

    def write(self, data: Any, /) -> int:
        try:
            return super().write(data)
        except BrokenPipeError:
            return memoryview(data).nbytes
