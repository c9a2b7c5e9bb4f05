"""Lets ranks meet at a store of rank 0, names missing ranks, and refuses ranks with other settings.

Launchers carry few variables to other hosts (docs/running.md), so a rank may run with other code or
another configuration, or lack a variable of the job's first host. That would hang, slow down or
change the results. Each rank reports its settings, and rank 0 compares them before the training.
Secrets take no
part: of credentials ranks compare only whether they are set.
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
from privacy.step.run_folder import RunFolder
from trainer.config.machine import MachineSettings
from trainer.config.recipe import RunConfig
from trainer.errors import ConfigError, RemoteError
from trainer.ranks.discovery import process_identity
from trainer.ranks.heartbeat import named_ranks

_POLL = 0.1
"""Seconds between two looks at the store."""
ANSWER_SECONDS = 10.0
"""The time for a store to answer, which takes milliseconds; longer on a busy host."""
CODE = ("trainer", "privacy", "models", "data", "launch_scripts")
PACKAGES = ("torch", "deepspeed", "numpy")
EQUAL_PREFIXES = ("NCCL_", "GLOO_", "TORCH_NCCL_", "CUBLAS_")
EQUAL = (
    "OMP_NUM_THREADS",
    "MKL_NUM_THREADS",
    "DS_ACCELERATOR",
    "NVIDIA_TF32_OVERRIDE",
    "PYTORCH_CUDA_ALLOC_CONF",
    "PYTORCH_ALLOC_CONF",
)
"""Variables with one value on all ranks, since they change how ranks compute or communicate."""
SET_SUFFIXES = ("_SOCKET_IFNAME", "_IB_HCA", "_NET_DEVICES", "_proxy", "_PROXY")
SET_PREFIXES = ("AWS_", "AZURE_", "GOOGLE_")
SET = ("HF_TOKEN",)
"""Variables that must be set on all ranks or none; hosts may differ in their values, and some are
secret."""
MOST_SHOWN = 4
"""The most differences that an error names."""
VISIBLE_SECONDS = 10.0
"""The time in which a network file system shows a file that another host has just written."""


class RendezvousError(RuntimeError):
    """A failed meeting of the ranks; the message names missing ranks or a silent address."""

    exit_code = 2


class Place(NamedTuple):
    """The place of the store.

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
    """Returns the store that rank 0 keeps for all ranks, and its place.

    The place is `address` and `port`, except under torchrun, whose agent keeps a store that ends
    with it. Ranks use the agent's store only to learn the place of rank 0's store, so that they can
    still agree on a last step and save when the agent is killed.

    Raises:
        RendezvousError: no store, or no rank 0, within `seconds`.
    """
    place = Place(address, port, rank == 0)
    if world_size == 1:
        # A single process needs no address.
        place = place._replace(address="127.0.0.1", port=0)
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        agents_place = place._replace(is_host=False)
        agents = connect(agents_place, seconds)
        if rank == 0:
            # This host's address towards the agent, by which other hosts can reach it, too.
            with socket.create_connection((address, port), timeout=seconds) as probe:
                local_address = str(probe.getsockname()[0])
                agent_address = probe.getpeername()[0]
            if local_address == agent_address:
                local_address = address
            place = place._replace(address=local_address, port=0)
            store = connect(place, seconds)
            tcp_store = store.underlying_store
            assert isinstance(tcp_store, dist.TCPStore)
            agents.set("store", json.dumps([place.address, tcp_store.port]))
            return store, place._replace(port=tcp_store.port)
        place = _place_of_rank_0(agents, agents_place, seconds)
    return connect(place, seconds), place


def _place_of_rank_0(agents: dist.Store, agents_place: Place, seconds: float) -> Place:
    """Returns the place that rank 0 states for its store, once the store answers.

    The agents' store holds the place of an ended attempt until rank 0 of the next attempt comes. No
    count distinguishes the two on all hosts: agents count their own restarts, and the agent of a
    host that came back begins at 0.
    """
    deadline = time.monotonic() + seconds
    while True:
        seconds_left = deadline - time.monotonic()
        if seconds_left <= 0:
            break
        # Rank 0 has written no place yet, or its store does not answer.
        with contextlib.suppress(dist.DistError, OSError):
            agents.wait(["store"], timedelta(seconds=seconds_left))
            address, port = json.loads(agents.get("store"))
            socket.create_connection((address, port), timeout=1).close()
            return agents_place._replace(address=address, port=port)
        time.sleep(_POLL)
    raise RendezvousError(
        f"rank 0 did not come to {agents_place} within {seconds:.0f} s; see its own output"
    )


def connect(place: Place, seconds: float) -> dist.PrefixStore:
    """Returns a new connection to the store.

    Raises:
        RendezvousError: the port is taken, or no store answers within `seconds`, or within
            ANSWER_SECONDS after another program has answered there.
    """
    deadline = time.monotonic() + seconds
    # Waits until a program listens at the port.
    while not place.is_host:
        timeout = max(_POLL, deadline - time.monotonic())
        try:
            socket.create_connection((place.address, place.port), timeout=timeout).close()
            break
        except (OSError, UnicodeError, OverflowError) as error:
            if time.monotonic() + _POLL > deadline:
                raise RendezvousError(f"no rendezvous at {place}: {error}") from error
        time.sleep(_POLL)
    # TCPStore does not keep its own timeout if another program listens on the port, or if an
    # address never answers, so a thread makes it.
    patience = max(deadline - time.monotonic(), 0.0)
    if not place.is_host:
        # A busy host answers late.
        load = os.getloadavg()[0] / (os.cpu_count() or 1)
        patience = min(ANSWER_SECONDS * max(1.0, load), patience)
    answers: list[dist.TCPStore | str] = []
    thread = threading.Thread(
        target=_make_store, args=(place, seconds, answers), name="rendezvous", daemon=True
    )
    thread.start()
    thread.join(patience)
    answer = answers[0] if answers else f"no answer within {patience:.0f} s"
    if isinstance(answer, dist.TCPStore):
        return dist.PrefixStore("train", answer)
    if not place.is_host or "EADDRINUSE" in answer:
        answer = f"something else has that port; choose another MASTER_PORT ({answer})"
    raise RendezvousError(f"no rendezvous at {place}: {answer}")


def _make_store(place: Place, seconds: float, answers: list[dist.TCPStore | str]) -> None:
    """Adds a store to `answers`, or the first line of the error, which may be of any type."""
    try:
        store = dist.TCPStore(
            place.address,
            place.port,
            is_master=place.is_host,
            timeout=timedelta(seconds=seconds),
            wait_for_workers=False,
        )
        answers.append(store)
    except Exception as error:
        answers.append(str(error).split("\n")[0])


def meet(
    store: dist.Store,
    rank: int,
    world_size: int,
    place: Place,
    seconds: float,
    settings: Mapping[str, str] | None = None,
    may_differ: Sequence[str] = (),
) -> list[str]:
    """Waits until all ranks are here with equal settings, and returns their host names.

    Raises:
        RendezvousError: on rank 0, naming the ranks that are missing after `seconds`; on any rank,
            if the store's host is gone.
        ConfigError: on rank 0, if the settings of ranks differ (`refuse_differences`).
        RemoteError: rank 0 gave up, or refused a rank.
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
    host_keys = [f"here/{number}" for number in range(world_size)]
    settings_keys = [f"settings/{number}" for number in range(world_size)]
    try:
        if rank == 0:
            try:
                while not store.check(host_keys):
                    if time.monotonic() > deadline:
                        missing = []
                        for number, key in enumerate(host_keys):
                            if not store.check([key]):
                                missing.append(str(number))
                        load = os.getloadavg()[0]
                        raise RendezvousError(
                            f"rank {', '.join(missing)} of {world_size} did not come to {place} "
                            f"within {seconds:.0f} s (load here: {load:.0f}); see its own output "
                            "on its host, or give more --rendezvous_seconds"
                        )
                    time.sleep(_POLL)
                settings_of_ranks = [json.loads(text) for text in store.multi_get(settings_keys)]
                hosts = [host.decode() for host in store.multi_get(host_keys)]
                refuse_differences(settings_of_ranks, hosts, may_differ)
            except Exception as error:
                store.set("refused", str(error))
                # The other ranks need a moment to read it.
                time.sleep(1.0)
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
        return [host.decode() for host in store.multi_get(host_keys)]
    except dist.DistError as error:
        raise RendezvousError(f"rank 0 ended before all ranks were at {place}") from error


def settings_of(
    environ: Mapping[str, str],
    root: Path,
    config: RunConfig,
    machine: MachineSettings,
    options: Mapping[str, str],
) -> dict[str, str]:
    """Returns this rank's settings by name; variables that are set are named `$NAME`.

    Args:
        root: the project's root.
        options: further options of the command, by name.
    """
    settings = {name: version(name) for name in PACKAGES}
    settings["Python"] = ".".join(map(str, sys.version_info[:3]))
    settings |= options
    for name in CODE:
        contents = []
        for file in sorted((root / name).rglob("*.py")):
            contents.append((str(file.relative_to(root)), file.read_bytes().hex()))
        settings[f"the code in {name}/"] = _digest(contents)
    for name, section in config.model_dump(mode="json").items():
        settings[f"the recipe's {name}"] = _digest(section)
    settings["the ds_config"] = _digest(dict(machine.raw))
    for name, text in environ.items():
        if name in SET or name.startswith(SET_PREFIXES) or name.endswith(SET_SUFFIXES):
            settings[f"${name}"] = "set"
        elif name in EQUAL or name.startswith(EQUAL_PREFIXES):
            settings[f"${name}"] = text
    return settings


def _digest(content: object) -> str:
    text = json.dumps(content, sort_keys=True, default=str)
    return hashlib.sha256(text.encode()).hexdigest()[:12]


def refuse_differences(
    ranks: Sequence[Mapping[str, str]], hosts: Sequence[str], may_differ: Sequence[str] = ()
) -> None:
    """Refuses ranks whose settings differ from those of rank 0.

    Args:
        ranks, hosts: settings and host name of each rank.
        may_differ: names of variables that are not compared.

    Raises:
        ConfigError: names the first rank that differs, its host, and the settings that differ.
    """
    main_settings = ranks[0]
    for rank, settings in enumerate(ranks):
        differences = []
        way_out = "start all ranks alike"
        for name in sorted({*main_settings, *settings}):
            variable = name.removeprefix("$")
            setting = settings.get(name, "not set")
            main_setting = main_settings.get(name, "not set")
            if setting == main_setting or variable in may_differ:
                continue
            if name.startswith("the "):
                # Its setting is a digest.
                differences.append(f"{name} differs")
            else:
                differences.append(f"{variable} is {setting}, but {main_setting} on rank 0")
            if variable != name:
                way_out = (
                    "launchers carry few variables to other hosts: put it in .deepspeed_env, or "
                    "pass it as docs/running.md says for this launcher (--may_differ NAME takes a "
                    "variable out of the comparison)"
                )
        if differences:
            sentence = "; ".join(differences[:MOST_SHOWN])
            if len(differences) > MOST_SHOWN:
                sentence += f" and {len(differences) - MOST_SHOWN} more"
            raise ConfigError(
                f"{named_ranks([rank], hosts)} differs from {named_ranks([0], hosts)}: "
                f"{sentence}; {way_out}"
            )


def require_shared(folder: RunFolder, seconds: float = VISIBLE_SECONDS) -> None:
    """Refuses a run folder that rank 0 has just made and another rank does not see. Collective.

    Raises:
        ConfigError: on all ranks, naming the ranks that do not see it.
    """
    if collectives.world_size() == 1:
        return
    sign = folder.private / "visible"
    token = broadcast_object(secrets.token_hex(8))
    on_main(lambda: write_durably(sign, token))
    sees_token = False
    deadline = time.monotonic() + seconds
    while not sees_token and time.monotonic() < deadline:
        # The file may not be visible yet.
        with contextlib.suppress(OSError):
            sees_token = sign.read_text() == token
        time.sleep(0 if sees_token else 0.1)
    reports = gather_objects((sees_token, socket.gethostname()))
    blind_ranks = [rank for rank, (rank_sees, _) in enumerate(reports) if not rank_sees]
    if blind_ranks:
        hosts = [host for _, host in reports]
        raise ConfigError(
            f"run folder {folder.root}: {named_ranks(blind_ranks, hosts)} did not see within "
            f"{seconds:.0f} s what {named_ranks([0], hosts)} wrote there; --run_dir must lie on a "
            "file system that all hosts share (docs/running.md)"
        )
    on_main(lambda: sign.unlink(missing_ok=True))
