"""Ranks: find out who we are, start, talk about control matters, and end cleanly.

Rank discovery reads the environment of torchrun, DeepSpeed, Open MPI, MPICH/PMI and Slurm, in this order, and needs no MPI
library. Ending needs care: interpreter shutdown after gloo traffic aborts now and then ("terminate called without an active
exception"), so a distributed program ends by barrier, destroy_process_group, flush and `os._exit`.
"""

import os
import pickle
import sys
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor

from trainer.errors import ConfigError, RemoteError, StepDropped
from trainer.heartbeat import Heartbeat, end_process
from trainer.rendezvous import RENDEZVOUS_SECONDS, connect, meet, place_of

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(hours=2)
"""A logical batch may be silent for long; dead ranks are noticed by closed connections and the heartbeat, not by this."""

_heartbeat: Heartbeat | None = None


@dataclass(frozen=True)
class Ranks:
    """This process's place. `address` and `port` are the rendezvous of rank 0."""

    rank: int = 0
    local_rank: int = 0
    world_size: int = 1
    address: str = "127.0.0.1"
    port: int = 29500

    @property
    def is_main(self) -> bool:
        return self.rank == 0


# (rank, local rank, world size, marker) by launcher; the first whose rank, size and marker are set decides. Slurm sets its
# ranks in the batch script's own shell too; only a process that srun started has a step.
_LAUNCHERS = (
    ("RANK", "LOCAL_RANK", "WORLD_SIZE", "RANK"),
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK"),
    ("PMI_RANK", "MPI_LOCALRANKID", "PMI_SIZE", "PMI_RANK"),
    ("SLURM_PROCID", "SLURM_LOCALID", "SLURM_NTASKS", "SLURM_STEP_ID"),
)


def discover_ranks(environ: Mapping[str, str]) -> Ranks:
    """Reads the launcher's environment; one process when there is none.

    Raises:
        ConfigError: several ranks but no MASTER_ADDR, or a variable that is no number.
    """
    for rank, local_rank, world_size, marker in _LAUNCHERS:
        if rank in environ and world_size in environ and marker in environ:
            return _ranks(environ, rank, local_rank, world_size)
    return Ranks()


def _ranks(environ: Mapping[str, str], rank: str, local_rank: str, world_size: str) -> Ranks:
    try:
        size = int(environ[world_size])
        found = Ranks(
            rank=int(environ[rank]),
            local_rank=int(environ.get(local_rank, environ[rank])),
            world_size=size,
            address=_address(environ, size),
            port=int(environ.get("MASTER_PORT", "29500")),
        )
    except ConfigError:
        raise
    except ValueError as error:
        raise ConfigError(f"launcher variables {rank}, {local_rank}, {world_size}: {error}") from error
    if not 0 <= found.rank < found.world_size or found.local_rank < 0:
        raise ConfigError(f"launcher variables {rank}={found.rank}, {world_size}={found.world_size}: no such rank")
    return found


def _address(environ: Mapping[str, str], world_size: int) -> str:
    if environ.get("MASTER_ADDR"):
        return environ["MASTER_ADDR"]
    if world_size > 1:
        raise ConfigError("several ranks were started, but MASTER_ADDR is not set: export the host name of rank 0")
    return "127.0.0.1"


def start(ranks: Ranks, rendezvous_seconds: float = RENDEZVOUS_SECONDS) -> torch.device:
    """Joins the process group (nccl beside gloo with GPUs, gloo without) and returns this rank's device.

    One process alone also gets a group, so that there is a single code path. From here on a rank that dies ends all ranks
    (trainer/heartbeat.py).

    Raises:
        RendezvousError: naming who or what is missing after `rendezvous_seconds`.
    """
    use_cuda = torch.cuda.is_available()
    device = torch.device("cuda", ranks.local_rank % max(torch.cuda.device_count(), 1)) if use_cuda else None
    if device is not None:
        torch.cuda.set_device(device)
    torch.set_float32_matmul_precision(
        "highest"
    )  # fp32 norms and sums are fp32 (contract 6), whatever the image's defaults
    store = _meet(ranks, rendezvous_seconds)
    _export(ranks)
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if use_cuda else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    return device or torch.device("cpu")


def _meet(ranks: Ranks, seconds: float) -> dist.Store:
    """The store, once all ranks are at it; starts the heartbeat where there is more than one."""
    global _heartbeat
    place = place_of(ranks.address, ranks.port if ranks.world_size > 1 else 0, ranks.rank)
    store = connect(place, seconds)
    if ranks.world_size > 1:
        hosts = meet(store, ranks.rank, ranks.world_size, place, seconds)
        guest = place._replace(is_host=False)
        _heartbeat = Heartbeat(
            lambda: connect(guest, seconds), ranks.rank, hosts, speaks=ranks.rank == 1 or ranks.local_rank == 0
        )
        _heartbeat.start()
    return store


def _export(ranks: Ranks) -> None:
    """Engines look for the usual variables, whatever launcher there was."""
    os.environ.update(
        RANK=str(ranks.rank),
        LOCAL_RANK=str(ranks.local_rank),
        WORLD_SIZE=str(ranks.world_size),
        MASTER_ADDR=ranks.address,
        MASTER_PORT=str(ranks.port),
    )


def note_progress(position: int) -> None:
    """How far this rank has come; see `Heartbeat.note`."""
    if _heartbeat is not None:
        _heartbeat.note(position)


def finish(exit_code: int) -> NoReturn:
    """Ends the program on all ranks together; see the module docstring for why it does not simply return."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            dist.barrier()
        if _heartbeat is not None:
            _heartbeat.leave()
        dist.destroy_process_group()
    quit_now(exit_code)


def fail(error: BaseException, explain: Callable[[], bool]) -> NoReturn:
    """Ends this rank because of `error`, and with it all others, which learn that it was this one.

    Args:
        explain: says what went wrong, or returns False to leave that to rank 0. Not called where the cause is another rank,
            which has said it or is named by the heartbeat.
    """
    exit_code = int(getattr(error, "exit_code", 1))
    if _heartbeat is not None and _is_broken_connection(error):
        _heartbeat.wait_for_the_cause()
    said = explain()
    if _heartbeat is not None and not isinstance(error, RemoteError):
        message = f"error on rank {_heartbeat.rank}: {' '.join(str(error).split())}"
        _heartbeat.fail(message, exit_code, said=said)
    quit_now(exit_code)


def abandon(message: str, exit_code: int) -> NoReturn:
    """Ends all ranks from any thread, whatever they are doing; says so once."""
    speaks = _heartbeat is None or _heartbeat.rank == 0
    if _heartbeat is not None:
        _heartbeat.fail(message, exit_code, said=speaks)
    end_process(message if speaks else "", exit_code)


def _is_broken_connection(error: BaseException) -> bool:
    """Whether a collective failed because another rank went away: gloo and NCCL raise several types for that."""
    said = str(error)
    return isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError) and any(word in said for word in ("gloo", "NCCL", "onnection"))
    )


def quit_now(exit_code: int) -> NoReturn:
    """Ends this process without waiting for others: they notice the closed connections."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(exit_code)


def rank() -> int:
    return dist.get_rank()


def world_size() -> int:
    return dist.get_world_size()


def broadcast_object(value: T) -> T:
    """Rank 0's value on every rank."""
    payload = _broadcast_bytes(pickle.dumps(value) if rank() == 0 else b"")
    return pickle.loads(payload) if rank() != 0 else value


def _broadcast_bytes(payload: bytes) -> bytes:
    size = torch.tensor([len(payload)])
    dist.broadcast(size, 0)
    buffer = (
        torch.frombuffer(bytearray(payload), dtype=torch.uint8)
        if payload
        else torch.empty(int(size), dtype=torch.uint8)
    )
    dist.broadcast(buffer, 0)
    return buffer.numpy().tobytes()


def on_main(function: Callable[[], T]) -> T:
    """Runs `function` on rank 0 and returns its result everywhere; an error is raised everywhere.

    The acknowledgement of contract 9: no rank goes on before rank 0's write is durable.
    """
    if rank() == 0:
        try:
            result = function()
        except Exception as error:
            broadcast_object((False, (str(error), getattr(error, "exit_code", 1))))
            raise
        broadcast_object((True, result))
        return result
    ok, value = broadcast_object((True, None))
    if not ok:
        assert isinstance(value, tuple)
        raise RemoteError(*value)
    return value  # type: ignore[return-value]


def first_on_main(function: Callable[[], T]) -> T:
    """Runs `function` everywhere, but elsewhere only after it succeeded on rank 0.

    What is wrong for all ranks is then said once, and what is wrong on another host is said there.
    """
    if rank() == 0:
        result: list[T] = []
        on_main(lambda: result.append(function()))
        return result[0]
    on_main(lambda: None)
    return function()


def agree(*, ready: bool) -> None:
    """Waits until all ranks are here, without using a device.

    Raises:
        StepDropped: on all ranks, if one is not ready.
    """
    unready = torch.tensor([0.0 if ready else 1.0])
    dist.all_reduce(unready)
    if unready:
        raise StepDropped("a rank dropped the step before its intent")


def gather_objects(value: T) -> list[T]:
    """Every rank's value, in rank order, on every rank. For small public objects."""
    gathered: list[T | None] = [None] * world_size()
    dist.all_gather_object(gathered, value)
    return gathered  # type: ignore[return-value]


def all_reduce_sum(values: Tensor) -> Tensor:
    dist.all_reduce(values)
    return values


class Traffic:
    """Counts the collectives that carry clipped sums or noised gradients, and the bytes that this rank sends in them.

    Bytes are those of an algorithm that sends nothing twice: all but a rank's own part. They follow from shapes alone, so they
    are public. What an engine moves by itself (gathering weights) is not seen here; benchmarks/scaling.py counts that too.
    """

    def __init__(self) -> None:
        self.collectives: Counter[str] = Counter()
        self.bytes: Counter[str] = Counter()

    def note(self, kind: str, num_bytes: int) -> None:
        self.collectives[kind] += 1
        self.bytes[kind] += num_bytes

    def reset(self) -> None:
        self.collectives.clear()
        self.bytes.clear()


traffic = Traffic()
"""Of this process, since the last reset: a logical step resets it at its start."""


def reduce_scatter_sum(out: Tensor, rows: Tensor) -> None:
    """out (K,) = sum over ranks of their rows[this rank], rows (world_size, K)."""
    function = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    traffic.note("reduce_scatter", rows.nbytes - out.nbytes)
    function(out, rows.view(-1))


def exchange(values: Tensor, *, send_counts: Sequence[int], receive_counts: Sequence[int]) -> Tensor:
    """Sends the r-th run of `values` (of length send_counts[r]) to rank r; returns what all ranks sent here, in rank order."""
    received = values.new_empty(sum(receive_counts))
    traffic.note("exchange", (len(values) - send_counts[rank()]) * values.element_size())
    dist.all_to_all_single(received, values, list(receive_counts), list(send_counts))
    return received


def all_gather_rows(out: Tensor, row: Tensor, group: dist.ProcessGroup | None = None) -> None:
    """out (ranks of the group, K) = every rank's row (K,); the group of all ranks by default."""
    function = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    traffic.note("all_gather", out.nbytes - row.nbytes)
    function(out.view(-1), row, group=group)
