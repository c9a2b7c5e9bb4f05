"""How ranks meet: rank 0 keeps a store, all come to it, who does not come is named, and so is who differs.

Launchers carry little to other hosts (docs/running.md), so a rank may run with other code, another configuration, or without a
variable that was set where the job was started. That would hang, slow down or, worst, change what is computed. Each rank reports
its settings; rank 0 compares, before anything is trained. No secret takes part: only whether credentials are set is compared.
"""

import contextlib
import hashlib
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Mapping, Sequence
from datetime import timedelta
from importlib.metadata import version
from pathlib import Path
from typing import NamedTuple

import torch.distributed as dist

from data.files import write_durably
from privacy.ranks import collectives
from privacy.ranks.collectives import broadcast_object, gather_objects, on_main
from privacy.step.folder import RunFolder
from trainer.config.machine import MachineSettings
from trainer.config.recipe import RunConfig
from trainer.errors import ConfigError, RemoteError
from trainer.ranks.discovery import process_identity
from trainer.ranks.heartbeat import named_ranks

_POLL = 0.1
ANSWER_SECONDS = 10.0
"""A store answers within milliseconds, so after this what listens is none; longer where more runs than there are CPUs."""
CODE = ("trainer", "privacy", "models", "data", "launch_scripts")
PACKAGES = ("torch", "deepspeed", "numpy")
EQUAL_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUBLAS_")
EQUAL = (
    *("OMP_NUM_THREADS", "MKL_NUM_THREADS", "DS_ACCELERATOR", "NVIDIA_TF32_OVERRIDE"),
    *("PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF"),
)
"""Variables whose value must be the same on all ranks: they change how ranks compute or talk."""
SET_SUFFIXES = ("_SOCKET_IFNAME", "_IB_HCA", "_NET_DEVICES", "_proxy", "_PROXY")
SET_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
SET = ("HF_TOKEN",)
"""Variables that must be set on all ranks or none; hosts may differ in their values, and some are secret."""
MOST_SHOWN = 4
VISIBLE_SECONDS = 10.0
"""A network file system may take so long to show what another host has just written."""


class RendezvousError(RuntimeError):
    """The ranks did not meet; the message says who is missing, or which address does not answer."""

    exit_code = 2


class Place(NamedTuple):
    """Where the store is.

    Attributes:
        is_host: this process keeps it.
        port: 0 lets the host choose, for a single process.
    """

    address: str
    port: int
    is_host: bool

    def __str__(self) -> str:
        return f"{self.address}:{self.port} (MASTER_ADDR, MASTER_PORT)"


def find_store(
    address: str, port: int, rank: int, world_size: int, seconds: float
) -> tuple[dist.Store, Place]:
    """The store that rank 0 keeps for all, and where it is: at `address` and `port`, but under torchrun.

    There torchrun's agent keeps a store, which is gone with it. Ranks use it only to hear where that of rank 0 is, so that they
    can still agree on a last step and save when the agent is killed.

    Raises:
        RendezvousError: no store, or no rank 0, within `seconds`.
    """
    place = Place(address, port, rank == 0)
    if world_size == 1:  # wherever rank 0 is said to be
        place = place._replace(address="127.0.0.1", port=0)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents_place = place._replace(is_host=False)
        agents = connect(agents_place, seconds)
        if rank == 0:
            with socket.create_connection((address, port), timeout=seconds) as probe:
                mine, theirs = str(probe.getsockname()[0]), probe.getpeername()[0]
            # This host's address, as others that reach the agent reach it.
            place = place._replace(address=address if mine == theirs else mine, port=0)
            store = connect(place, seconds)
            inner = store.underlying_store
            assert isinstance(inner, dist.TCPStore)
            agents.set("store", json.dumps([place.address, inner.port]))
            return store, place._replace(port=inner.port)
        place = _place_of_rank_0(agents, agents_place, seconds)
    return connect(place, seconds), place


def _place_of_rank_0(agents: dist.Store, agents_place: Place, seconds: float) -> Place:
    """Where rank 0 says that it keeps its store, when it answers there.

    The word of an attempt that has ended stands in the agents' store until rank 0 of the next one comes. Nothing tells the two
    apart on all hosts: agents count their own restarts, and that of a host that came back begins at 0.
    """
    deadline = time.monotonic() + seconds
    while (left := deadline - time.monotonic()) > 0:
        with contextlib.suppress(
            dist.DistError, OSError
        ):  # nobody has written, or nobody is left there
            agents.wait(["store"], timedelta(seconds=left))
            address, port = json.loads(agents.get("store"))
            socket.create_connection((address, port), timeout=1).close()
            return agents_place._replace(address=address, port=port)
        time.sleep(_POLL)
    raise RendezvousError(
        f"rank 0 did not come to {agents_place} within {seconds:.0f} s; see its own output"
    )


def connect(place: Place, seconds: float) -> dist.PrefixStore:
    """A new connection to the store.

    Raises:
        RendezvousError: the port is taken, or nothing that is a store answers within `seconds`; ANSWER_SECONDS after something
            else has answered there.
    """
    deadline, answers = time.monotonic() + seconds, list[dist.TCPStore | str]()
    while not place.is_host:  # until something listens there
        try:
            socket.create_connection(
                (place.address, place.port), timeout=max(_POLL, deadline - time.monotonic())
            ).close()
            break
        except (OSError, UnicodeError, OverflowError) as error:
            if time.monotonic() + _POLL > deadline:
                raise RendezvousError(f"no rendezvous at {place}: {error}") from error
        time.sleep(_POLL)

    def attempt() -> None:
        limit = timedelta(seconds=seconds)
        try:
            store = dist.TCPStore(
                place.address,
                place.port,
                is_master=place.is_host,
                timeout=limit,
                wait_for_workers=False,
            )
            answers.append(store)
        except Exception as error:  # of several kinds; one line below names it
            answers.append(str(error).split("\n")[0])

    # Its own timeouts are not kept where something else listens on that port, or where an address never answers.
    patience = max(deadline - time.monotonic(), 0.0)
    if not place.is_host:  # a machine with too much to do answers late
        patience = min(
            ANSWER_SECONDS * max(1.0, os.getloadavg()[0] / (os.cpu_count() or 1)), patience
        )
    thread = threading.Thread(target=attempt, name="rendezvous", daemon=True)
    thread.start()
    thread.join(patience)
    found = answers[0] if answers else f"no answer within {patience:.0f} s"
    if isinstance(found, dist.TCPStore):
        return dist.PrefixStore("train", found)
    if not place.is_host or "EADDRINUSE" in found:
        found = f"something else has that port; choose another MASTER_PORT ({found})"
    raise RendezvousError(f"no rendezvous at {place}: {found}")


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    place: Place,
    seconds: float,
    settings: Mapping[str, str] | None = None,
    may_differ: Sequence[str] = (),
) -> list[str]:
    """Waits until all ranks are here and have compared their settings (`refuse_differences`); returns their host names.

    Raises:
        RendezvousError: on rank 0, naming who is missing after `seconds`; on any rank, if the store's host is gone.
        ConfigError: on rank 0, since the ranks do not fit together.
        RemoteError: rank 0 gave up, or refused somebody.
    """
    deadline = time.monotonic() + seconds
    if store.check([f"here/{rank}"]):
        raise RendezvousError(
            f"another run is at {place}, and has a rank {rank} already; choose another MASTER_PORT"
        )
    store.set(f"beat/{rank}", "[]")  # see trainer/ranks/heartbeat.py
    store.set(f"process/{rank}", process_identity(os.getpid()))
    store.set(f"settings/{rank}", json.dumps(dict(settings or {})))
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
                every = [
                    json.loads(text)
                    for text in store.multi_get([f"settings/{r}" for r in range(world_size)])
                ]
                refuse_differences(
                    every, [host.decode() for host in store.multi_get(ranks)], may_differ
                )
            except Exception as error:
                store.set("refused", str(error))
                time.sleep(1.0)  # for the others to read it
                raise
            store.set("everyone", "1")
        while not store.check(["everyone"]):
            if store.check(["refused"]):
                raise RemoteError(store.get("refused").decode(), 2)
            if time.monotonic() > deadline + 5:
                raise RendezvousError(
                    f"rank 0 did not answer at {place} within {seconds + 5:.0f} s"
                )
            time.sleep(_POLL)
        return [host.decode() for host in store.multi_get(ranks)]
    except dist.DistError as error:
        raise RendezvousError(f"rank 0 ended before all ranks were at {place}") from error


def settings_of(
    environ: Mapping[str, str],
    root: Path,
    config: RunConfig,
    machine: MachineSettings,
    chosen: Mapping[str, str],
) -> dict[str, str]:
    """This rank's settings by name. Variables are named `$NAME`, and are left out where they are not set.

    Args:
        root: the project's root.
        chosen: further options of the command, by name.
    """

    def digest(value: object) -> str:
        return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[
            :12
        ]

    settings = {name: version(name) for name in PACKAGES} | {
        "Python": ".".join(map(str, sys.version_info[:3])),
        **chosen,
    }
    for name in CODE:
        files = sorted((root / name).rglob("*.py"))
        settings[f"the code in {name}/"] = digest(
            [(str(f.relative_to(root)), f.read_bytes().hex()) for f in files]
        )
    settings |= {
        f"the recipe's {name}": digest(section)
        for name, section in config.model_dump(mode="json").items()
    }
    settings["the ds_config"] = digest(dict(machine.raw))
    for name, value in environ.items():
        if name in SET or name.startswith(SET_PREFIXES) or name.endswith(SET_SUFFIXES):
            settings[f"${name}"] = "set"
        elif name in EQUAL or name.startswith(EQUAL_PREFIXES):
            settings[f"${name}"] = value
    return settings


def refuse_differences(
    ranks: Sequence[Mapping[str, str]], hosts: Sequence[str], may_differ: Sequence[str] = ()
) -> None:
    """Compares all ranks with rank 0.

    Args:
        ranks, hosts: settings and host name of each rank.
        may_differ: names of variables that nobody compares.

    Raises:
        ConfigError: naming the first rank that differs, its host, and what differs.
    """
    for rank, settings in enumerate(ranks):
        lines, way_out = [], "start all ranks alike"
        for name in sorted({*ranks[0], *settings}):
            variable = name.removeprefix("$")
            mine, main = (one.get(name, "not set") for one in (settings, ranks[0]))
            if mine == main or variable in may_differ:
                continue
            is_digest = name.startswith("the ")
            lines.append(
                f"{name} differs" if is_digest else f"{variable} is {mine}, but {main} on rank 0"
            )
            if variable != name:
                way_out = (
                    "launchers carry few variables to other hosts: put it in .deepspeed_env, or pass it as docs/running.md says "
                    "for this launcher (--may_differ NAME takes a variable out of the comparison)"
                )
        if lines:
            rest = f" and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
            raise ConfigError(
                f"{named_ranks([rank], hosts)} differs from {named_ranks([0], hosts)}: {'; '.join(lines[:MOST_SHOWN])}{rest}; "
                f"{way_out}"
            )


def require_shared(folder: RunFolder, seconds: float = VISIBLE_SECONDS) -> None:
    """Refuses a run folder that rank 0 has just made and another rank does not see. Collective.

    Raises:
        ConfigError: on all ranks, naming who does not.
    """
    if collectives.world_size() == 1:
        return
    sign, token, sees = folder.private / "visible", broadcast_object(secrets.token_hex(8)), False
    on_main(lambda: write_durably(sign, token))
    deadline = time.monotonic() + seconds
    while not sees and time.monotonic() < deadline:
        with contextlib.suppress(OSError):  # not there, or not yet
            sees = sign.read_text() == token
        time.sleep(0 if sees else 0.1)
    every = gather_objects((sees, socket.gethostname()))
    blind = [rank for rank, (rank_sees, _) in enumerate(every) if not rank_sees]
    if blind:
        hosts = [host for _, host in every]
        raise ConfigError(
            f"run folder {folder.root}: {named_ranks(blind, hosts)} did not see within {seconds:.0f} s what "
            f"{named_ranks([0], hosts)} wrote there; --run_dir must lie on a file system that all hosts share (docs/running.md)"
        )
    on_main(lambda: sign.unlink(missing_ok=True))
