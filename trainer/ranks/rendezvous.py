"""How ranks meet: rank 0 keeps a store, all come to it, and who does not come is named."""

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from typing import NamedTuple

import torch.distributed as dist

from trainer.errors import RemoteError
from trainer.ranks.launcher import process_identity

_POLL = 0.1
ANSWER_SECONDS = 10.0
"""A store answers within milliseconds, so after this what listens is none; longer where more runs than there are CPUs."""


class RendezvousError(RuntimeError):
    """The ranks did not meet; the message says who is missing, or which address does not answer."""

    exit_code = 2


class Introduction(NamedTuple):
    """What a rank reports of itself when all meet.

    Attributes:
        judge: called on rank 0 with the settings and host names of all ranks, in their order; what it raises ends them all.
    """

    settings: Mapping[str, str] = {}
    judge: Callable[[Sequence[Mapping[str, str]], Sequence[str]], None] = lambda settings, hosts: None


class Place(NamedTuple):
    """Where the store is.

    Attributes:
        is_host: this process keeps it.
        port: 0 lets the host choose, for a single process.
        prefix: differs between the attempts of a launcher that restarts ranks.
    """

    address: str
    port: int
    is_host: bool
    prefix: str = ""

    def __str__(self) -> str:
        return f"{self.address}:{self.port} (MASTER_ADDR, MASTER_PORT)"


def find_store(address: str, port: int, rank: int, world_size: int, seconds: float) -> tuple[dist.Store, Place]:
    """The store that rank 0 keeps for all, and where it is: at `address` and `port`, but under torchrun.

    There torchrun's agent keeps a store, which is gone with it. Ranks use it only to hear where that of rank 0 is, so that they
    can still agree on a last step and save when the agent is killed.

    Raises:
        RendezvousError: no store, or no rank 0, within `seconds`.
    """
    prefix = f"attempt-{os.environ.get('TORCHELASTIC_RESTART_COUNT', '0')}"
    if world_size == 1:  # wherever rank 0 is said to be
        place = Place("127.0.0.1", 0, True, prefix)
        return connect(place, seconds), place
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        place = Place(address, port, rank == 0, prefix)
        return connect(place, seconds), place
    agents_place = Place(address, port, False, prefix)
    agents = connect(agents_place, seconds)
    if rank == 0:
        try:  # this host's address, as others that reach the agent reach it
            with socket.create_connection((address, port), timeout=seconds) as probe:
                mine, theirs = str(probe.getsockname()[0]), probe.getpeername()[0]
        except OSError as error:
            raise RendezvousError(f"no rendezvous at {agents_place}: {error.strerror}") from error
        place = Place(address if mine == theirs else mine, 0, True, prefix)
        store = connect(place, seconds)
        inner = store.underlying_store
        assert isinstance(inner, dist.TCPStore)
        agents.set("store", json.dumps([place.address, inner.port]))
        return store, place._replace(port=inner.port)
    deadline = time.monotonic() + seconds
    while not agents.check(["store"]):
        if time.monotonic() > deadline:
            raise RendezvousError(f"rank 0 did not come to {agents_place} within {seconds:.0f} s; see its own output")
        time.sleep(_POLL)
    host, chosen = json.loads(agents.get("store"))
    place = Place(host, chosen, False, prefix)
    return connect(place, seconds), place


def connect(place: Place, seconds: float) -> dist.PrefixStore:
    """A new connection to the store.

    Raises:
        RendezvousError: the port is taken, or nothing that is a store answers within `seconds`; ANSWER_SECONDS after something
            else has answered there.
    """
    made: list[dist.TCPStore] = []
    failed: list[str] = []

    def attempt() -> None:
        try:
            made.append(
                dist.TCPStore(
                    place.address,
                    place.port,
                    is_master=place.is_host,
                    timeout=timedelta(seconds=seconds),
                    wait_for_workers=False,
                )
            )
        except Exception as error:  # of several kinds; one line below names it
            failed.append(str(error).split("\n")[0])

    deadline = time.monotonic() + seconds
    reason = "" if place.is_host else _wait_for_listener(place, deadline)
    patience = deadline - time.monotonic()
    if not place.is_host:  # a machine with too much to do answers late
        patience = min(ANSWER_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), patience)
    if not reason:
        # Its own timeouts are not kept where something else listens on that port, or where an address never answers.
        thread = threading.Thread(target=attempt, name="rendezvous", daemon=True)
        thread.start()
        thread.join(max(patience, 0.0))
    if made:
        return dist.PrefixStore(place.prefix, made[0])
    if not reason:
        reason = failed[0] if failed else f"no answer within {patience:.0f} s"
        taken = "EADDRINUSE" in reason if place.is_host else True
        reason = f"something else has that port; choose another MASTER_PORT ({reason})" if taken else reason
    raise RendezvousError(f"no rendezvous at {place}: {reason}")


def _wait_for_listener(place: Place, deadline: float) -> str:
    """Waits until something listens at the place; returns why nothing does, or nothing."""
    while True:
        try:
            remaining = max(_POLL, deadline - time.monotonic())
            socket.create_connection((place.address, place.port), timeout=remaining).close()
            return ""
        except (OSError, UnicodeError, OverflowError) as error:
            if time.monotonic() + _POLL > deadline:
                return str(error)
        time.sleep(_POLL)


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    place: Place,
    seconds: float,
    introduction: Introduction = Introduction(),  # noqa: B008 - never changed
) -> list[str]:
    """Waits until all ranks are here; returns their host names.

    Raises:
        RendezvousError: on rank 0, naming who is missing after `seconds`; on any rank, if the store's host is gone.
        RemoteError: rank 0 gave up, or refused somebody.
        Exception: on rank 0, what its judge raises.
    """
    deadline = time.monotonic() + seconds
    if store.check([f"here/{rank}"]):
        raise RendezvousError(f"another run is at {place}, and has a rank {rank} already; choose another MASTER_PORT")
    store.set(f"beat/{rank}", "[]")  # see trainer/ranks/heartbeat.py
    store.set(f"process/{rank}", process_identity(os.getpid()))
    store.set(f"settings/{rank}", json.dumps(dict(introduction.settings)))
    store.set(f"here/{rank}", socket.gethostname())
    ranks = [f"here/{r}" for r in range(world_size)]
    try:
        if rank == 0:
            try:
                while not store.check(ranks):
                    if time.monotonic() > deadline:
                        missing = [str(r) for r in range(world_size) if not store.check([ranks[r]])]
                        raise RendezvousError(
                            f"rank {', '.join(missing)} of {world_size} did not come to {place} within {seconds:.0f} s (load "
                            f"here: {os.getloadavg()[0]:.0f}); see its own output on its host, or give more "
                            "--rendezvous_seconds"
                        )
                    time.sleep(_POLL)
                settings = [json.loads(text) for text in store.multi_get([f"settings/{r}" for r in range(world_size)])]
                introduction.judge(settings, [host.decode() for host in store.multi_get(ranks)])
            except Exception as error:
                store.set("refused", str(error))
                time.sleep(1.0)  # for the others to read it
                raise
            store.set("everyone", "1")
        while not store.check(["everyone"]):
            if store.check(["refused"]):
                raise RemoteError(store.get("refused").decode(), 2)
            if time.monotonic() > deadline + 5:
                raise RendezvousError(f"rank 0 did not answer at {place} within {seconds + 5:.0f} s")
            time.sleep(_POLL)
        return [host.decode() for host in store.multi_get(ranks)]
    except dist.DistError as error:
        raise RendezvousError(f"rank 0 ended before all ranks were at {place}") from error
