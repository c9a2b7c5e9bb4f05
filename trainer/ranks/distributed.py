"""Starts the process group of all ranks, reports progress to the heartbeat, and ends all ranks.

Interpreter shutdown after gloo traffic aborts now and then ("terminate called without an active
exception"), so a distributed program ends by barrier, destroy_process_group, flush and `os._exit`.
"""

import contextlib
import os
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from datetime import timedelta
from typing import NoReturn, TypeVar

import torch
import torch.distributed as dist

from privacy.ranks.collectives import gather_objects
from privacy.step.batches import StepBatch
from trainer.errors import ConfigError, ErrorLine, HostError, RemoteError, in_one_line
from trainer.ranks.discovery import HEARTBEAT_SECONDS, RENDEZVOUS_SECONDS, Ranks, launcher_processes
from trainer.ranks.heartbeat import Heartbeat, Timing, Wait, end_process
from trainer.ranks.rendezvous import RendezvousError, connect, find_store, meet

T = TypeVar("T")

COLLECTIVE_TIMEOUT = timedelta(days=30)
"""Ranks may wait for hours while one hashes its shards. The heartbeat, and not this timeout, finds
dead ranks, and ranks of which none moves."""
SPARE_THREADS = 8
"""More threads than the process group and its store start."""
_heartbeat: Heartbeat | None = None
_hosts: list[str] = []


def start(
    ranks: Ranks,
    rendezvous_seconds: float = RENDEZVOUS_SECONDS,
    settings: Mapping[str, str] | None = None,
    heartbeat_seconds: float = HEARTBEAT_SECONDS,
    may_differ: Sequence[str] = (),
) -> torch.device:
    """Joins the process group (nccl and gloo on GPUs, gloo on CPUs) and returns this rank's device.

    One process alone also gets a group, so that there is a single code path. From here on a rank
    that dies ends all ranks (trainer/ranks/heartbeat.py).

    Args:
        settings: settings of this rank, which must equal those of rank 0
            (trainer/ranks/rendezvous.py).
        may_differ: environment variables that are not compared.
        heartbeat_seconds: how long a rank may be silent (`Timing.dead_after`).

    Raises:
        RendezvousError: names the missing ranks, or the address, after `rendezvous_seconds`.
        ConfigError: DS_ACCELERATOR names no accelerator; the ranks differ (on rank 0, RemoteError
            elsewhere), or two of them have one GPU.
        RuntimeError: memory or a limit, as of a container, prevents the start of a thread.
    """
    device = choose_device(ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # Norms and sums are fp32 (contract 6) whatever the defaults of a container image are.
    torch.set_float32_matmul_precision("highest")
    global _heartbeat, _hosts
    settings = {**(settings or {}), "accelerator": device.type}
    try:
        store, place = find_store(
            ranks.address, ranks.port, ranks.rank, ranks.world_size, rendezvous_seconds
        )
        _hosts = [socket.gethostname()]
        if ranks.world_size > 1:
            _hosts = meet(
                store, ranks.rank, ranks.world_size, place, rendezvous_seconds, settings, may_differ
            )
    except RendezvousError as error:
        if ranks.variables and not launcher_processes():
            # The variables may be left over in a shell.
            raise RendezvousError(
                f"{error}; {ranks.variables}, and no launcher has started this process: "
                "to train alone, unset them"
            ) from error
        raise
    if ranks.world_size > 1:
        guest = place._replace(is_host=False)
        keys = [f"process/{rank}" for rank in range(ranks.world_size)]
        _heartbeat = Heartbeat(
            lambda: connect(guest, rendezvous_seconds),
            ranks.rank,
            _hosts,
            processes=[identity.decode() for identity in store.multi_get(keys)],
            speaks=ranks.rank == 1 or ranks.local_rank == 0,
            timing=Timing(dead_after=heartbeat_seconds, late_after=20 * heartbeat_seconds),
        )
        _heartbeat.start()
    export_ranks(ranks, device)
    # Starts as many threads at once as gloo could need: its constructor waits forever if one of its
    # own threads cannot start.
    release = threading.Event()
    threads: list[threading.Thread] = []
    try:
        for _ in range(SPARE_THREADS):
            threads.append(threading.Thread(target=release.wait, daemon=True))
            threads[-1].start()
    finally:
        release.set()
        for thread in threads:
            if thread.ident is not None:
                thread.join()
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=ranks.rank,
        world_size=ranks.world_size,
        timeout=COLLECTIVE_TIMEOUT,
    )
    if device.type == "cuda":
        uuid = str(torch.cuda.get_device_properties(device).uuid)
        refuse_shared_gpus(gather_objects((socket.gethostname(), uuid)))
    return device


def refuse_shared_gpus(gpus: Sequence[tuple[str, str]]) -> None:
    """Refuses two ranks on one GPU, which would later run out of memory or hang in NCCL.

    Args:
        gpus: each rank's host name and the UUID of its GPU; ranks may number GPUs differently.

    Raises:
        ConfigError: naming two ranks.
    """
    ranks: dict[str, int] = {}
    for number, (host, uuid) in enumerate(gpus):
        first = ranks.setdefault(uuid, number)
        if first != number:
            raise ConfigError(
                f"ranks {first} and {number} have the same GPU ({uuid} of host {host}): "
                "start one rank for each GPU, and look at CUDA_VISIBLE_DEVICES"
            )


def choose_device(local_rank: int) -> torch.device:
    """Returns this rank's GPU, or the CPU if torch is built without CUDA.

    DS_ACCELERATOR chooses as it does for DeepSpeed.

    Raises:
        ConfigError: DS_ACCELERATOR is neither cuda nor cpu, or is cuda and torch is built without
            it.
        HostError: torch is built for GPUs and finds none here; a run of weeks would be one of years
            on the CPU.
    """
    accelerator = os.environ.get("DS_ACCELERATOR")
    is_built = torch.backends.cuda.is_built()
    if accelerator not in (None, "cpu", "cuda"):
        raise ConfigError(
            f"DS_ACCELERATOR={accelerator}: training runs on cuda or cpu; "
            "name one of them, or unset it"
        )
    if accelerator == "cuda" and not is_built:
        raise ConfigError(
            f"DS_ACCELERATOR=cuda, but torch {torch.__version__} has no CUDA: "
            "install a build that has, or unset it to train on the CPU"
        )
    if accelerator == "cpu" or not is_built:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        devices = os.environ.get("CUDA_VISIBLE_DEVICES")
        shown_devices = "not set" if devices is None else repr(devices)
        raise HostError(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no usable "
            f"GPU on host {socket.gethostname()}: look at nvidia-smi (CUDA 13 needs a driver of "
            f"580 or newer) and CUDA_VISIBLE_DEVICES ({shown_devices}), "
            "or train on the CPU with DS_ACCELERATOR=cpu"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def where(world_size: int, device: torch.device) -> str:
    """Returns ranks, hosts and device in words: "2 ranks on 2 hosts (node1, node2), cpu"."""
    hosts = list(dict.fromkeys(_hosts))
    words = "1 rank" if world_size == 1 else f"{world_size} ranks"
    if len(hosts) > 1:
        names = ", ".join(hosts[:8])
        if len(hosts) > 8:
            names += " ..."
        words += f" on {len(hosts)} hosts ({names})"
    words += f", {device.type}"
    if device.type == "cuda":
        words += f" ({torch.cuda.get_device_name(device)})"
    return words


def export_ranks(ranks: Ranks, device: torch.device) -> None:
    """Sets the usual variables, which engines read under every launcher, and the chosen
    accelerator.

    DeepSpeed computes on the GPU whose number is LOCAL_RANK. That number is 0 on every rank if each
    rank sees one GPU alone.
    """
    local_rank = ranks.local_rank if device.index is None else device.index
    os.environ.update(
        RANK=str(ranks.rank),
        LOCAL_RANK=str(local_rank),
        WORLD_SIZE=str(ranks.world_size),
        MASTER_ADDR=ranks.address,
        MASTER_PORT=str(ranks.port),
        DS_ACCELERATOR=device.type,
    )
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:
        # DeepSpeed requires the two variables to be equal.
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(local_rank)
    if device.type == "cuda":
        # NCCL's watchdog would abort a healthy rank when a connection breaks, before the heartbeat
        # has named the dead rank and ended all. Without it a rank waits in its collective, whose
        # kernel does not end either, until the heartbeat sees that no rank moves; no step goes on
        # after an error (collectives.require_sound). A group that a loop of one's own makes keeps
        # its watchdog.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def note_progress(step: int, *, charged: bool = False) -> None:
    """Tells the heartbeat that this rank has come to `step`, or to the intent of `step`."""
    if _heartbeat is not None:
        _heartbeat.note(2 * step + charged)


def reading(items: Iterator[T], content: str) -> Iterator[T]:
    """Yields items, and tells the heartbeat of every wait for one.

    The rank counts as moving meanwhile, since staging or a slow store may take hours.

    Args:
        content: as "micro-batches of step 3"; after a minute the console says that a rank waits for
            them.
    """
    return _waiting(items, content, moves=True)


def dealing(plans: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """Yields the plans of steps, which all ranks draw together when they ask for the next one.

    A rank that waits here does not count as moving.
    """
    return _waiting(plans, "the examples of the next step are dealt", moves=False)


def _waiting(items: Iterator[T], content: str, *, moves: bool) -> Iterator[T]:
    """Yields items, and tells the heartbeat of every wait for one.

    Waits may be nested: a wait for data may contain a wait for a plan.
    """
    beat = _heartbeat
    if beat is None:
        yield from items
        return
    while True:
        outer_wait = beat.wait
        beat.wait = Wait(content, time.monotonic(), moves)
        try:
            next_item = next(items)
        except StopIteration:
            return
        finally:
            beat.wait = outer_wait
            beat.note()
        yield next_item


def finish(exit_code: int) -> NoReturn:
    """Ends the program on all ranks together, without the interpreter's shutdown."""
    if dist.is_initialized():
        if dist.get_world_size() > 1:
            dist.barrier()
        if _heartbeat is not None:
            _heartbeat.leave()
        dist.destroy_process_group()
    quit_now(exit_code)


def fail(error: BaseException, explain: Callable[[], bool]) -> NoReturn:
    """Ends this rank because of `error`, and with it all others, which learn the number of the
    rank.

    Args:
        explain: prints the error, or returns False if rank 0 should print it. It is not called if
            another rank is the cause: that rank has printed its error, or the heartbeat names it.
    """
    failure = in_one_line(error) or ErrorLine(" ".join(str(error).split()), 1)
    # gloo and NCCL raise several types when a collective fails because another rank has ended.
    is_broken_connection = isinstance(error, dist.DistError)
    if isinstance(error, RuntimeError):
        text = str(error)
        is_broken_connection |= any(word in text for word in ("gloo", "NCCL", "onnection"))
    if _heartbeat is not None and is_broken_connection:
        _heartbeat.wait_for_the_cause()
    is_printed = explain()
    if _heartbeat is not None and not isinstance(error, RemoteError):
        message = f"error on rank {_heartbeat.rank}: {failure.line}"
        _heartbeat.fail(message, failure.exit_code, is_printed=is_printed)
    quit_now(failure.exit_code)


def abandon(message: str, exit_code: int) -> NoReturn:
    """Ends all ranks from any thread at once, and prints the message once."""
    speaks = _heartbeat is None or _heartbeat.rank == 0
    if _heartbeat is not None:
        _heartbeat.fail(message, exit_code, is_printed=speaks)
    end_process(message if speaks else "", exit_code)


def quit_now(exit_code: int) -> NoReturn:
    """Ends this process without waiting for others, which notice the closed connections."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        # The disk may be full, or the reader gone.
        with contextlib.suppress(OSError):
            stream.flush()
    os._exit(exit_code)
