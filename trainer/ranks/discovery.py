"""Rank, world size and meeting point from the environment of whatever started this process. Needs no MPI library.

torchrun and DeepSpeed set RANK; Open MPI, MVAPICH, MPICH and Intel MPI have variables of their own, and so has Slurm's srun. They
are read in this order: a launcher may run inside of an allocation or an interactive step, whose variables its ranks inherit.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from trainer.errors import ConfigError

DEFAULT_PORT = 29500
RENDEZVOUS_SECONDS = 45.0
"""A rank that has not come is missed after so long: an unreachable rendezvous ends all ranks within a minute."""
HEARTBEAT_SECONDS = 30.0
"""A rank that is silent for so long is dead, or late where its process is seen to live (heartbeat.py)."""
LONGEST_RENDEZVOUS_SECONDS = 86_400.0


@dataclass(frozen=True)
class Ranks:
    """This process's place. `address` and `port` are the rendezvous of rank 0."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1"
    port: int = DEFAULT_PORT

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
    _Launcher("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", ("OMPI_COMM_WORLD_LOCAL_RANK",), "OMPI_COMM_WORLD_RANK"),
    _Launcher("MV2_COMM_WORLD_RANK", "MV2_COMM_WORLD_SIZE", ("MV2_COMM_WORLD_LOCAL_RANK",), "MV2_COMM_WORLD_RANK"),
    _Launcher("PMI_RANK", "PMI_SIZE", ("MPI_LOCALRANKID", "PALS_LOCAL_RANKID", "PMI_LOCAL_RANK"), "PMI_RANK"),
    _SLURM,
)


def discover_ranks(environ: Mapping[str, str]) -> Ranks:
    """Reads the launcher's environment; one process when there is none.

    Raises:
        ConfigError: several ranks but no meeting point, or a variable that is no number.
    """
    launchers = (one for one in _LAUNCHERS if {one.rank, one.world_size, one.marker} <= environ.keys())
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
        address = first_host(environ["SLURM_STEP_NODELIST"])
    if address is None:
        raise ConfigError(
            "several ranks were started, but MASTER_ADDR is not set: export the host name of rank 0, to all ranks (Open MPI: "
            "mpirun -x MASTER_ADDR=HOST, as launch_scripts/cluster/openmpi.sh does; others: docs/running.md)"
        )
    if not re.fullmatch(r"[\w.:%-]+", address):
        raise ConfigError(f"MASTER_ADDR is {address!r}: that is neither the name nor the address of a host")
    return Ranks(rank, local_rank, world_size, address, port)


def first_host(node_list: str) -> str:
    """The first name of a Slurm host list: that of rank 0.

    >>> first_host("rack[1-2]node[04-07,9],login")
    'rack1node04'
    """
    first = re.split(r",(?![^\[]*\])", node_list, maxsplit=1)[0]
    return re.sub(r"\[(\d+)[^\]]*\]", r"\1", first)
