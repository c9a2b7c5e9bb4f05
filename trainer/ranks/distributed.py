"""Ranks: find out who we are, start, talk about control matters, and end cleanly.

Who we are comes from the launcher's environment (discovery.py). Ending needs care: interpreter shutdown after gloo traffic
aborts now and then ("terminate called without an active exception"), so a distributed program ends by barrier,
destroy_process_group, flush and `os._exit`.
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
"""Ranks wait while one hashes its shards for hours; the heartbeat notices who is dead, and that nobody moves, not this."""
SPARE_THREADS = 8
"""More than the process group and its store start."""
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

    One process alone also gets a group, so that there is a single code path. From here on a rank that dies ends all ranks
    (trainer/ranks/heartbeat.py).

    Args:
        settings, may_differ: what ranks compare first, and what of it they do not (trainer/ranks/rendezvous.py).
        heartbeat_seconds: how long a rank may be silent (`Timing.dead_after`).

    Raises:
        RendezvousError: naming who or what is missing after `rendezvous_seconds`.
        ConfigError: there is no such accelerator as DS_ACCELERATOR names; the ranks do not fit together (on rank 0,
            RemoteError elsewhere), or two of them have one GPU.
        RuntimeError: a thread cannot be started, for want of memory or by a limit, such as a container's.
    """
    device = choose_device(ranks.local_rank)
    if device.type == "cuda":
        torch.cuda.set_device(device)
    # fp32 norms and sums are fp32 (contract 6), whatever the image's defaults.
    torch.set_float32_matmul_precision("highest")
    global _heartbeat, _hosts
    compared = {**(settings or {}), "accelerator": device.type}
    try:
        store, place = find_store(
            ranks.address, ranks.port, ranks.rank, ranks.world_size, rendezvous_seconds
        )
        _hosts = [socket.gethostname()]
        if ranks.world_size > 1:
            _hosts = meet(
                store, ranks.rank, ranks.world_size, place, rendezvous_seconds, compared, may_differ
            )
    except RendezvousError as error:
        if ranks.variables and not launcher_processes():  # left over in a shell, for example
            way_out = f"{ranks.variables}, and no launcher has started this process: to train alone, unset them"
            raise RendezvousError(f"{error}; {way_out}") from error
        raise
    if ranks.world_size > 1:
        guest = place._replace(is_host=False)
        _heartbeat = Heartbeat(
            lambda: connect(guest, rendezvous_seconds),
            ranks.rank,
            _hosts,
            processes=[
                found.decode()
                for found in store.multi_get([f"process/{r}" for r in range(ranks.world_size)])
            ],
            speaks=ranks.rank == 1 or ranks.local_rank == 0,
            timing=Timing(dead_after=heartbeat_seconds, late_after=20 * heartbeat_seconds),
        )
        _heartbeat.start()
    export_ranks(ranks, device)
    # As many threads at once as gloo could need, whose constructor waits forever where one of its own cannot start.
    release, threads = threading.Event(), list[threading.Thread]()
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
    """Refuses two ranks on one GPU: they would run out of memory or hang in NCCL, much later and without saying why.

    Args:
        gpus: each rank's host name and the UUID of its GPU, whatever number that has for the rank.

    Raises:
        ConfigError: naming two ranks.
    """
    ranks: dict[str, int] = {}
    for number, (host, uuid) in enumerate(gpus):
        first = ranks.setdefault(uuid, number)
        if first != number:
            raise ConfigError(
                f"ranks {first} and {number} have the same GPU ({uuid} of host {host}): start one rank for each GPU, and look at "
                "CUDA_VISIBLE_DEVICES"
            )


def choose_device(local_rank: int) -> torch.device:
    """This rank's GPU, or the CPU where torch is built without CUDA. DS_ACCELERATOR chooses for us as it does for DeepSpeed.

    Raises:
        ConfigError: DS_ACCELERATOR names another accelerator than cuda and cpu, or cuda where torch is built without it.
        HostError: torch is built for GPUs and finds none here; a run of weeks would be one of years on the CPU.
    """
    chosen, is_built = os.environ.get("DS_ACCELERATOR"), torch.backends.cuda.is_built()
    if chosen not in (None, "cpu", "cuda"):
        raise ConfigError(
            f"DS_ACCELERATOR={chosen}: training runs on cuda or cpu; name one of them, or unset it"
        )
    if chosen == "cuda" and not is_built:
        raise ConfigError(
            f"DS_ACCELERATOR=cuda, but torch {torch.__version__} has no CUDA: install a build that has, or unset it to train "
            "on the CPU"
        )
    if chosen == "cpu" or not is_built:
        return torch.device("cpu")
    if not torch.cuda.is_available():
        visible = os.environ.get("CUDA_VISIBLE_DEVICES")
        raise HostError(
            f"torch {torch.__version__} is built for CUDA {torch.version.cuda} and finds no usable GPU on host "
            f"{socket.gethostname()}: look at nvidia-smi (CUDA 13 needs a driver of 580 or newer) and CUDA_VISIBLE_DEVICES "
            f"({'not set' if visible is None else repr(visible)}), or train on the CPU with DS_ACCELERATOR=cpu"
        )
    return torch.device("cuda", local_rank % torch.cuda.device_count())


def where(world_size: int, device: torch.device) -> str:
    """What a run trains on, in words: "2 ranks on 2 hosts (node1, node2), cpu"."""
    hosts, words = list(dict.fromkeys(_hosts)), f"{world_size} rank{'s' if world_size > 1 else ''}"
    if len(hosts) > 1:
        words += (
            f" on {len(hosts)} hosts ({', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''})"
        )
    return f"{words}, {device.type}" + (
        f" ({torch.cuda.get_device_name(device)})" if device.type == "cuda" else ""
    )


def export_ranks(ranks: Ranks, device: torch.device) -> None:
    """Sets the usual variables, which engines read whatever the launcher was, and the accelerator that was chosen.

    DeepSpeed computes on the GPU whose number is LOCAL_RANK. Where a rank sees one GPU alone, that number is 0 on each of them.
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
    if "OMPI_COMM_WORLD_LOCAL_RANK" in os.environ:  # DeepSpeed wants the two to be equal
        os.environ["OMPI_COMM_WORLD_LOCAL_RANK"] = str(local_rank)
    if device.type == "cuda":
        # NCCL's watchdog would abort a healthy rank as soon as it sees a broken connection, before the heartbeat has named the
        # dead one and ended all. Without it a rank waits in its collective, whose kernel does not end either, until the heartbeat
        # sees that nobody moves, and no step goes on after an error (collectives.require_sound). A group that a loop of one's
        # own makes keeps its watchdog.
        os.environ.setdefault("TORCH_NCCL_ASYNC_ERROR_HANDLING", "0")


def note_progress(step: int, *, charged: bool = False) -> None:
    """This rank has come to `step`, or to the intent of `step`; see `Heartbeat.note`."""
    if _heartbeat is not None:
        _heartbeat.note(2 * step + charged)


def reading(items: Iterator[T], what: str) -> Iterator[T]:
    """Yields items that are read. A rank counts as moving while it waits for one: staging or a slow store may take hours.

    Args:
        what: such as "micro-batches of step 3"; the console says after a minute that a rank waits for them.
    """
    return _waiting(items, what, moves=True)


def dealing(plans: Iterator[StepBatch]) -> Iterator[StepBatch]:
    """Yields plans that are drawn when they are pulled, by all ranks together: a rank that stands still in it does not move."""
    return _waiting(plans, "the examples of the next step are dealt", moves=False)


def _waiting(items: Iterator[T], what: str, *, moves: bool) -> Iterator[T]:
    """Tells the heartbeat of every wait for an item. One wait may lie inside another: a plan is pulled while data are awaited."""
    beat = _heartbeat
    if beat is None:
        yield from items
        return
    while True:
        outer = beat.wait
        beat.wait = Wait(what, time.monotonic(), moves)
        try:
            item = next(items)
        except StopIteration:
            return
        finally:
            beat.wait = outer
            beat.note()
        yield item


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
        explain: prints what went wrong, or returns False where rank 0 should. Not called where the cause is another rank,
            which has printed it or is named by the heartbeat.
    """
    known = in_one_line(error) or ErrorLine(" ".join(str(error).split()), 1)
    # gloo and NCCL raise several types where a collective failed because another rank went away.
    is_broken_connection = isinstance(error, dist.DistError) or (
        isinstance(error, RuntimeError)
        and any(word in str(error) for word in ("gloo", "NCCL", "onnection"))
    )
    if _heartbeat is not None and is_broken_connection:
        _heartbeat.wait_for_the_cause()
    is_printed = explain()
    if _heartbeat is not None and not isinstance(error, RemoteError):
        _heartbeat.fail(
            f"error on rank {_heartbeat.rank}: {known.line}", known.exit_code, is_printed=is_printed
        )
    quit_now(known.exit_code)


def abandon(message: str, exit_code: int) -> NoReturn:
    """Ends all ranks from any thread, whatever they are doing; prints the message once."""
    speaks = _heartbeat is None or _heartbeat.rank == 0
    if _heartbeat is not None:
        _heartbeat.fail(message, exit_code, is_printed=speaks)
    end_process(message if speaks else "", exit_code)


def quit_now(exit_code: int) -> NoReturn:
    """Ends this process without waiting for others: they notice the closed connections."""
    mpi = sys.modules.get("mpi4py.MPI")
    if mpi is not None and mpi.Is_initialized() and not mpi.Is_finalized():
        mpi.Finalize()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(
            OSError
        ):  # a full disk, or a reader that is gone: nothing is left to print to
            stream.flush()
    os._exit(exit_code)
