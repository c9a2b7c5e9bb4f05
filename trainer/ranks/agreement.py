"""What all ranks must have in common, compared before anything is trained.

Launchers carry little to other hosts (docs/running.md), so a rank may run with other code, another configuration, or without a
variable that was set where the job was started. That would hang, slow down or, worst, change what is computed. Each rank reports
its settings at the rendezvous; rank 0 compares. No secret takes part: only whether credentials are set is compared.
"""

import contextlib
import hashlib
import json
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from data.files import write_durably
from privacy.step.folder import RunFolder
from trainer.config.machine import MachineSettings
from trainer.config.recipe import RunConfig
from trainer.errors import ConfigError
from trainer.ranks import distributed
from trainer.ranks.heartbeat import named_ranks
from trainer.ranks.rendezvous import Introduction

Settings = Mapping[str, str]
"""Name -> value; environment variables are named `$NAME`, and are left out where they are not set."""

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
IS_SET = "set"
MOST_SHOWN = 4
VISIBLE_SECONDS = 10.0
"""A network file system may take so long to show what another host has just written."""


def introduction(
    environ: Mapping[str, str],
    root: Path,
    config: RunConfig,
    machine: MachineSettings,
    chosen: Mapping[str, str],
    *,
    may_differ: Iterable[str] = (),
) -> Introduction:
    """This rank's settings, and on rank 0 the judge of all.

    Args:
        root: the project's root.
        chosen: further options of the command, by name.
        may_differ: names of variables that nobody compares.
    """
    recipe = config.model_dump(mode="json")
    settings = {
        **{
            f"the code in {name}/": _digest(
                {path.relative_to(root).as_posix(): path.read_bytes().hex() for path in (root / name).rglob("*.py")}
            )
            for name in CODE
        },
        "Python": ".".join(map(str, sys.version_info[:3])),
        **{name: version(name) for name in PACKAGES},
        **{f"the recipe's {name}": _digest(section) for name, section in recipe.items()},
        "the ds_config": _digest(dict(machine.raw)),
        **chosen,
        **{f"${name}": value for name, value in compared_variables(environ).items()},
    }
    return Introduction(settings, partial(refuse_differences, may_differ=tuple(may_differ)))


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that ranks must agree on, with their value, or IS_SET where only that counts."""
    compared = {}
    for name, value in environ.items():
        if name in SET or name.startswith(SET_PREFIXES) or name.endswith(SET_SUFFIXES):
            compared[name] = IS_SET
        elif name in EQUAL or name.startswith(EQUAL_PREFIXES):
            compared[name] = value
    return compared


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def refuse_differences(ranks: Sequence[Settings], hosts: Sequence[str], *, may_differ: Iterable[str] = ()) -> None:
    """Compares all ranks with rank 0.

    Args:
        ranks, hosts: settings and host name of each rank.

    Raises:
        ConfigError: naming ranks, hosts, and what differs.
    """
    forward = False
    for rank, settings in enumerate(ranks[1:], start=1):
        lines = []
        for name in sorted({*ranks[0], *settings}):
            value, reference = settings.get(name), ranks[0].get(name)
            variable = name.removeprefix("$")
            if value == reference or variable in may_differ:
                continue
            if value is None:
                on_main = ", but is on rank 0" if reference == IS_SET else f" ({reference} on rank 0)"
                lines.append(f"{variable} is not set{on_main}")
            elif reference is None:
                lines.append(f"{variable} is set{'' if value == IS_SET else f' to {value}'}, but not on rank 0")
            else:
                is_digest = name.startswith("the ")
                lines.append(f"{name} differs" if is_digest else f"{variable} is {value} instead of {reference}")
            forward |= name.startswith("$")
        if lines:
            rest = f" and {len(lines) - MOST_SHOWN} more" if len(lines) > MOST_SHOWN else ""
            raise ConfigError(
                f"{named_ranks([rank], hosts)} differs from {named_ranks([0], hosts)}: {'; '.join(lines[:MOST_SHOWN])}{rest}; "
                f"{FORWARDING if forward else 'start all ranks alike'}"
            )


FORWARDING = (
    "launchers carry few variables to other hosts: put it in .deepspeed_env, or pass it as docs/running.md says for this "
    "launcher (--may_differ NAME takes a variable out of the comparison)"
)


def require_shared(folder: RunFolder, seconds: float = VISIBLE_SECONDS) -> None:
    """Refuses a run folder that rank 0 has just made and another rank does not see. Collective.

    Raises:
        ConfigError: on rank 0, naming who does not; RemoteError elsewhere.
    """
    if distributed.world_size() == 1:
        return
    sign = folder.private / "visible"

    def write_sign() -> str:
        token = secrets.token_hex(8)
        write_durably(sign, token)
        return token

    token, deadline, sees = distributed.on_main(write_sign), time.monotonic() + seconds, False
    while True:
        with contextlib.suppress(OSError):  # not there, or not yet
            sees = sign.read_text() == token
        if sees or time.monotonic() > deadline:
            break
        time.sleep(0.1)
    every = distributed.gather_objects((sees, distributed.host_name()))

    def judge() -> None:
        hosts = [host for _, host in every]
        blind = [rank for rank, (rank_sees, _) in enumerate(every) if not rank_sees]
        if blind:
            raise ConfigError(
                f"run folder {folder.root}: {named_ranks(blind, hosts)} did not see within {seconds:.0f} s what "
                f"{named_ranks([0], hosts)} wrote there; --run_dir must lie on a file system that all hosts share "
                "(docs/running.md)"
            )
        sign.unlink(missing_ok=True)

    distributed.on_main(judge)
