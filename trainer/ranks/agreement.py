"""What all ranks must have in common, compared before anything is trained.

Launchers carry little to other hosts (docs/clusters.md), so a rank may run with other code, another configuration, or without a
variable that was set where the job was started. That would hang, slow down or, worst, change what is computed. Each rank tells
its settings at the rendezvous; rank 0 compares. No secret takes part: of credentials only whether they are set.
"""

import hashlib
import json
import secrets
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from importlib.metadata import version
from pathlib import Path

from trainer.config.machine import MachineSettings
from trainer.config.recipe import RunConfig
from trainer.errors import ConfigError
from trainer.ranks import distributed
from trainer.ranks.rendezvous import Introduction
from trainer.run.files import write_durably
from trainer.run.folder import RunFolder

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
"""For a network file system to show what another host has just written."""


def introduction(
    environ: Mapping[str, str],
    root: Path,
    config: RunConfig,
    machine: MachineSettings,
    chosen: Mapping[str, str],
    *,
    required: Iterable[str] = (),
    may_differ: Iterable[str] = (),
) -> Introduction:
    """This rank's settings, and on rank 0 the judge of all.

    Args:
        root: the project's root.
        chosen: further options of the command, by name.
        required: names of variables that must be set on every rank.
        may_differ: names of variables that nobody compares.
    """
    required, may_differ = tuple(required), tuple(may_differ)
    recipe = config.model_dump(mode="json")
    settings = {
        **{f"the code in {name}/": _digest_of_code(root / name) for name in CODE},
        "Python": ".".join(map(str, sys.version_info[:3])),
        **{name: version(name) for name in PACKAGES},
        **{f"the recipe's {name}": _digest(section) for name, section in recipe.items()},
        "the ds_config": _digest(dict(machine.raw)),
        **chosen,
        **{f"${name}": IS_SET for name in required if name in environ},
        **{f"${name}": value for name, value in compared_variables(environ).items()},
    }
    return Introduction(settings, partial(refuse_differences, required=required, may_differ=may_differ))


def compared_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """The environment variables that ranks must agree on, with their value, or IS_SET where only that counts."""
    found = {}
    for name, value in environ.items():
        if name in SET or name.startswith(SET_PREFIXES) or name.endswith(SET_SUFFIXES):
            found[name] = IS_SET
        elif name in EQUAL or name.startswith(EQUAL_PREFIXES):
            found[name] = value
    return found


def _digest_of_code(folder: Path) -> str:
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(f"{path.relative_to(folder)}\0".encode())
        digest.update(path.read_bytes())
    return digest.hexdigest()[:12]


def _digest(value: object) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True, default=str).encode()).hexdigest()[:12]


def refuse_differences(
    ranks: Sequence[Settings], hosts: Sequence[str], *, required: Iterable[str] = (), may_differ: Iterable[str] = ()
) -> None:
    """Compares all ranks with rank 0.

    Args:
        ranks, hosts: by rank.

    Raises:
        ConfigError: naming ranks, hosts, and what differs.
    """
    for name in required:
        lacking = [rank for rank, settings in enumerate(ranks) if f"${name}" not in settings]
        if lacking:
            raise ConfigError(
                f"{name} is required (--require_env), but not set on {_names(lacking, hosts)}; {FORWARDING}"
            )
    for rank, settings in enumerate(ranks[1:], start=1):
        found = [
            name
            for name in sorted({*ranks[0], *settings})
            if settings.get(name) != ranks[0].get(name) and name.removeprefix("$") not in may_differ
        ]
        if found:
            said = "; ".join(_difference(name, ranks[0].get(name), settings.get(name)) for name in found[:MOST_SHOWN])
            more = f" and {len(found) - MOST_SHOWN} more" if len(found) > MOST_SHOWN else ""
            mend = FORWARDING if any(name.startswith("$") for name in found) else "start all ranks alike"
            raise ConfigError(f"{_names([rank], hosts)} differs from {_names([0], hosts)}: {said}{more}; {mend}")


FORWARDING = (
    "launchers carry few variables to other hosts: put it in .deepspeed_env, or pass it as docs/clusters.md says for this "
    "launcher (--may_differ NAME compares a variable no more)"
)


def _difference(name: str, reference: str | None, value: str | None) -> str:
    """One of the two may be None: not set."""
    if not name.startswith("$"):
        is_digest = name.startswith("the ")
        return f"{name} is another" if is_digest else f"{name} is {value} instead of {reference}"
    name = name.removeprefix("$")
    if value is None:
        return f"{name} is not set" + (f" ({reference} on rank 0)" if reference != IS_SET else ", but is on rank 0")
    if reference is None:
        return f"{name} is set" + (f" to {value}" if value != IS_SET else "") + ", but not on rank 0"
    return f"{name} is {value} instead of {reference}"


def _names(ranks: Sequence[int], hosts: Sequence[str]) -> str:
    shown, several = list(ranks[:8]), "s" if len(ranks) > 1 else ""
    more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
    at = ", ".join(dict.fromkeys(hosts[rank] for rank in shown))
    return f"rank{several} {', '.join(map(str, shown))}{more} (host{'s' if ', ' in at else ''} {at})"


def require_shared(folder: RunFolder, seconds: float = VISIBLE_SECONDS) -> None:
    """Every rank sees the run folder that rank 0 has just made. Collective.

    Raises:
        ConfigError: on rank 0, naming who does not; RemoteError elsewhere.
    """
    if distributed.world_size() == 1:
        return
    sign = folder.private / "visible"
    token = distributed.on_main(lambda: _write_sign(sign))
    sees = _sees(sign, token, seconds)
    found = distributed.gather_objects((sees, distributed.host_name()))

    def judge() -> None:
        hosts = [host for _, host in found]
        blind = [rank for rank, (sees, _) in enumerate(found) if not sees]
        if blind:
            raise ConfigError(
                f"run folder {folder.root}: {_names(blind, hosts)} did not see within {seconds:.0f} s what {_names([0], hosts)} "
                "wrote there; --run_dir must lie on a file system that all hosts share (docs/clusters.md)"
            )
        sign.unlink(missing_ok=True)

    distributed.on_main(judge)


def _write_sign(sign: Path) -> str:
    token = secrets.token_hex(8)
    write_durably(sign, token)
    return token


def _sees(sign: Path, token: str, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while not _holds(sign, token):
        if time.monotonic() > deadline:
            return False
        time.sleep(0.1)
    return True


def _holds(sign: Path, token: str) -> bool:
    try:
        return sign.read_text() == token
    except OSError:  # not there, or not yet
        return False
