"""Engine-neutral checkpoints: every rank writes the pieces that it owns; any engine at any world size reads them.

    checkpoints/step-00001000/
        manifest.json                     step, model, guarantee, position in the ledger, SHA-256 of each file and of itself
        rank-00000-of-00002.safetensors   "<tensor>|<parameter>|<offset>" -> fp32 values; no pickle
    checkpoints/LATEST                    name of the newest whole one
    checkpoints/set-aside-step-00001100/  damaged, or newer than the one that a run was resumed from

This file reads; privacy/checkpoints/write.py writes. A resume that finds the newest damaged goes back to the one before it;
the ledger has charged the steps between, which are repeated with new coins and new noise.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from ..errors import ConfigError, NotRecorded, say
from ..files import durable
from ..ledger.records import LedgerState
from ..ranks import collectives
from ..ranks.engine import Engine, Piece

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "LATEST"
AVERAGE = "average"
"""Kind of tensor, like "param" and the optimizer's moments: the moving average of the weights."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def sealed(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """The manifest with its own SHA-256 as `seal`."""
    content = {key: value for key, value in manifest.items() if key != "seal"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "seal": hashlib.sha256(canonical.encode()).hexdigest()}


def has_checkpoints(folder: Path) -> bool:
    """Whether any checkpoint that a run could resume from is there, whole or not."""
    return any(folder.glob("step-*"))


def read_manifest(path: Path) -> dict[str, Any]:
    """The manifest of a checkpoint, if it is what was written.

    Raises:
        ConfigError: missing, damaged, or of another format.
    """
    try:
        if not (path / MANIFEST).is_file():  # a pipe would block
            raise FileNotFoundError(f"{MANIFEST} is missing, or no regular file")
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:  # ValueError: no JSON, no UTF-8
        raise ConfigError(f"{path} is no checkpoint: {error}") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ConfigError(f"{path} is no checkpoint: {MANIFEST} states no format")
    if manifest["format"] != FORMAT:
        raise ConfigError(
            f"{path}: checkpoint format {manifest['format']} is unknown; {FORMAT} was expected"
        )
    for key in ("step", "parameters", "files"):
        if key not in manifest:
            raise ConfigError(f"{path} is not a checkpoint: {MANIFEST} has no {key}")
    if manifest != sealed(manifest):
        raise ConfigError(f"{path} is damaged: {MANIFEST} differs from its own SHA-256")
    return manifest


class Checkpoint:
    """A checkpoint on disk, checked against its manifest's hashes.

    Args:
        share: (rank, world size): hash only this rank's share of the files; all ranks together hash each once.

    Raises:
        ConfigError: missing or damaged file, unknown format.
    """

    def __init__(self, path: Path, share: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._where: dict[tuple[str, str], list[tuple[int, Path]]] = {}
        rank, world_size = share
        for number, (name, digest) in enumerate(sorted(self.manifest["files"].items())):
            file = path / name
            mine = number % world_size == rank
            if not file.is_file() or (mine and file_digest(file) != digest):
                raise ConfigError(
                    f"{file} is missing or damaged (its SHA-256 differs from the manifest's)"
                )
            try:
                with safe_open(file, framework="pt") as tensors:
                    for key in tensors.keys():  # noqa: SIM118  (not a dictionary)
                        kind, parameter, offset = key.split("|")
                        self._where.setdefault((kind, parameter), []).append((int(offset), file))
            except (SafetensorError, ValueError) as error:
                raise ConfigError(f"{file} is missing or damaged: {error}") from error
            except (OSError, RuntimeError) as error:
                if file.exists():  # else a training that goes on has removed it meanwhile
                    raise
                raise ConfigError(f"{file} is missing: {error}") from error

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(shape) for name, shape in self.manifest["parameters"].items()}

    @property
    def frozen(self) -> frozenset[str]:
        """The parameters that the run did not train: a weight each, no moments and no average."""
        return frozenset(self.manifest.get("frozen", ()))

    @property
    def kinds(self) -> frozenset[str]:
        """Which tensors there are of each parameter: "param", moments by their name, "average"."""
        return frozenset(kind for kind, _ in self._where)

    def full(self, kind: str, name: str) -> Tensor:
        """One whole tensor, e.g. ("param", "encoder.norm.weight"), in fp32."""
        shape = self.shapes[name]
        return self.part(kind, Piece(name, 0, shape.numel())).view(shape)

    def part(self, kind: str, piece: Piece) -> Tensor:
        """The coordinates of a piece, put together from whatever pieces were written."""
        out = torch.full(
            (piece.length,), torch.nan, dtype=torch.float32
        )  # as it is written, whatever the default is
        end = piece.offset + piece.length
        filled = 0
        for offset, file in self._where.get((kind, piece.name), []):
            with safe_open(file, framework="pt") as tensors:
                stored = tensors.get_slice(f"{kind}|{piece.name}|{offset}")
                a, b = max(offset, piece.offset), min(offset + stored.get_shape()[0], end)
                if a < b:
                    out[a - piece.offset : b - piece.offset] = stored[a - offset : b - offset]
                    filled += b - a
        if filled != piece.length:
            raise ConfigError(f"{self.path} lacks a part of {kind} of {piece.name}")
        return out

    def load_weights(self, module: torch.nn.Module, *, average: bool = False) -> None:
        """Sets the weights of a module that no engine has wrapped yet, also those that its run did not train.

        Args:
            average: the moving average (train.ema_decay) of those that were trained.

        Raises:
            ConfigError: another model; no average was kept.
        """
        parameters = dict(module.named_parameters())
        self._require({name: p.shape for name, p in parameters.items()}, self.shapes)
        if average and AVERAGE not in self.kinds:
            raise ConfigError(
                f"{self.path} has no average of the weights, because the run had no train.ema_decay"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                parameter.copy_(
                    self.full(AVERAGE if average and name not in self.frozen else "param", name)
                )

    def _require(self, shapes: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
        differing = sorted(
            n for n in shapes.keys() | stored.keys() if shapes.get(n) != stored.get(n)
        )
        if differing:
            raise ConfigError(
                f"{self.path} does not fit the model; the first difference is {differing[0]}: give the model of the run, or "
                "another run folder"
            )

    def restore(self, engine: Engine, moments: tuple[str, ...]) -> None:
        """Sets master weights and moments of a wrapped engine, whose module has these weights already, or takes them with
        the master weights (`trainer.engines.sharder`).

        Args:
            moments: those of the recipe's optimizer; a checkpoint of another one is refused.
        """
        self._require(
            engine.shapes, {n: shape for n, shape in self.shapes.items() if n not in self.frozen}
        )
        kept = self.kinds - {"param", AVERAGE}
        if self.step > 0 and kept != set(moments):
            raise ConfigError(
                f"{self.path} was written with another optimizer: it holds {sorted(kept) or 'no moments'}, "
                f"and the one that is given needs {sorted(moments) or 'none'}"
            )
        rank = collectives.rank()
        pieces = (
            engine.layout.owned_by(rank)
            if not engine.replicated
            else [Piece(name, 0, shape.numel()) for name, shape in engine.shapes.items()]
        )
        kinds = sorted(kept | {"param"})
        engine.load_state(
            {p: {k: self.part(k, p) for k in kinds} for p in pieces}, num_steps=self.step
        )


def newest_whole(
    folder: Path, remembered: Callable[[Mapping[str, Any]], None]
) -> Checkpoint | None:
    """The checkpoint to resume from: the one that LATEST names or, if that is damaged, the newest whole one before it.

    Collective. Each damaged one is a line on the console; nothing is written (`set_aside_newer`).

    Args:
        remembered: called with the ledger position of every manifest that can be read, damaged checkpoint or not; refuses
            a ledger that lacks it. Collective.

    Raises:
        ConfigError: there are checkpoints, but none is whole.
    """
    names = collectives.on_main(lambda: usable_names(folder))
    for manifest in collectives.on_main(lambda: readable_manifests(folder)):
        if manifest.get("ledger"):
            remembered(manifest["ledger"])
    damaged: list[str] = []
    for name in names:
        checkpoint, failure = None, None
        try:
            checkpoint = Checkpoint(folder / name, (collectives.rank(), collectives.world_size()))
        except ConfigError as error:
            failure = " ".join(str(error).split())
        failures = [line for line in collectives.gather_objects(failure) if line is not None]
        if checkpoint is not None and not failures:
            for line in damaged:
                collectives.say(
                    f"damaged checkpoint: {line}; resuming from {name}, the steps after it stay charged"
                )
            return checkpoint
        damaged.append(failures[0])
    if damaged:
        raise ConfigError(
            f"none of the {len(damaged)} checkpoints in {folder} is whole ({damaged[0]}); put one back, or start a new "
            "run folder: the ledger of this one stays charged"
        )
    return None


def usable_names(folder: Path) -> list[str]:
    """The checkpoint that LATEST names, then those before it, newest first; all of them, if LATEST names none."""
    names = sorted((path.name for path in folder.glob("step-*")), reverse=True)
    latest = (
        (folder / LATEST).read_text(errors="replace").strip() if (folder / LATEST).exists() else ""
    )
    if not names or not latest.startswith("step-"):
        return names
    return [latest, *(name for name in names if name < latest)]


def open_checkpoint(path: Path) -> Checkpoint:
    """The checkpoint in this folder, or the newest whole one of this run folder; says on stderr which ones it passes over.

    Raises:
        ConfigError: there is none, or none is whole.
    """
    if (path / MANIFEST).is_file():
        return Checkpoint(path)
    folder = path / "checkpoints"
    names = usable_names(folder)
    if not names:
        raise ConfigError(f"{path} is neither a checkpoint nor a run folder with one")
    failure = None
    for name in names:
        try:
            checkpoint = Checkpoint(folder / name)
        except ConfigError as error:
            failure = failure or error
            continue
        if failure is not None:
            say(f"warning: {failure}; {name} is opened", file=sys.stderr)
        return checkpoint
    raise ConfigError(
        f"none of the {len(names)} checkpoints in {folder} is whole ({failure}); restore one from a copy"
    )


def readable_manifests(folder: Path) -> list[dict[str, Any]]:
    """Those of all checkpoints that are there, newer than LATEST or set aside: none of them remembers what never was."""
    manifests = []
    for path in sorted([*folder.glob("step-*"), *folder.glob("set-aside-step-*")], reverse=True):
        with contextlib.suppress(ConfigError):  # reported where the checkpoint is opened
            manifests.append(read_manifest(path))
    return manifests


def set_aside_newer(folder: Path, kept: str) -> None:
    """Renames what is newer than the one that is used, or damaged, and points LATEST at that: no later start meets them."""
    for path in sorted(folder.glob("step-*")):
        if path.name > kept:
            target = folder / f"set-aside-{path.name}"
            number = 1
            while target.exists():
                number += 1
                target = folder / f"set-aside-{path.name}-{number}"
            durable.rename(path, target)
    durable.replace_file(folder / LATEST, f"{kept}\n".encode())


def require_recorded(checkpoint: Path, state: LedgerState) -> None:
    """Demands that the ledger recorded exactly this manifest, or that a crash can have come before its record.

    Anybody can seal a manifest anew, but the ledger's hash chain names one.

    Raises:
        NotRecorded: the ledger recorded another one; it was rolled back, or is of another run, or its folder was renamed.
        ConfigError: the manifest cannot be read.
    """
    manifest = read_manifest(checkpoint)
    step, position = manifest["step"], manifest.get("ledger")
    is_numbered = checkpoint.parent.name == "checkpoints" and checkpoint.name.startswith("step-")
    # Names say which one is the newer.
    if is_numbered and isinstance(step, int) and checkpoint.name != checkpoint_name(step):
        raise NotRecorded(
            f"{checkpoint}: holds the checkpoint of step {step}, so it was renamed: call it {checkpoint_name(step)} again, "
            "or take it away"
        )
    if not state.plan.enabled or (step, file_digest(checkpoint / MANIFEST)) in state.checkpoints:
        return  # without privacy the ledger records no checkpoint
    position = position if isinstance(position, dict) else {}
    line = position.get("seq")
    is_known = (
        isinstance(line, int)
        and 0 <= line < state.num_lines
        and state.hashes[line] == position.get("hash")
    )
    if not (is_known and state.may_lack_record(step, position["seq"])):
        raise NotRecorded(
            f"{checkpoint}: its {MANIFEST} is not the one that the ledger recorded, so it was replaced or edited: restore it "
            "from a copy, or take it away, and the checkpoint before it is used"
        )
