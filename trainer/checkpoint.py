"""Engine-neutral checkpoints: every rank writes the pieces that it owns; any engine at any world size reads them.

    checkpoints/step-00001000/
        manifest.json                     step, model, guarantee, position in the ledger, SHA-256 of each file
        rank-00000-of-00002.safetensors   "<tensor>|<parameter>|<offset>" -> fp32 values; no pickle
    checkpoints/LATEST                    name of the newest whole one

A checkpoint is written to a name with a leading dot, fsynced and renamed, and gets such a name again before it is
deleted, so a name without one is a whole checkpoint. It holds noised quantities only: weights and optimizer moments, never
a sum before noise.
"""

import hashlib
import json
import shutil
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from trainer import distributed
from trainer.engines.base import Engine, Piece, ShardState
from trainer.errors import ConfigError
from trainer.files import fsync_path, write_durably

FORMAT = 1
MANIFEST = "manifest.json"
LATEST = "LATEST"


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def save_checkpoint(folder: Path, engine: Engine, step: int, facts: Mapping[str, Any], *, keep: int) -> str:
    """Writes checkpoint `step` on all ranks and points LATEST at it; keeps the newest `keep`. Collective.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all ranks share.
        facts: what else the manifest states (model, guarantee, ledger position).

    Returns:
        SHA-256 of the manifest, for the ledger.
    """
    target, temporary = folder / checkpoint_name(step), folder / f".{checkpoint_name(step)}.tmp"
    distributed.on_main(lambda: _fresh(temporary))
    name = f"rank-{distributed.rank():05d}-of-{distributed.world_size():05d}.safetensors"
    files = dict(distributed.gather_objects((name, _write_pieces(temporary / name, engine.state()))))
    manifest = {
        "format": FORMAT,
        "step": step,
        **facts,
        "parameters": {name: list(shape) for name, shape in engine.shapes.items()},
        "files": files,
    }
    return distributed.on_main(lambda: _publish(temporary, target, manifest, keep))


def _fresh(temporary: Path) -> None:
    for leftover in temporary.parent.glob(".step-*"):  # of a crash
        shutil.rmtree(leftover)
    temporary.mkdir(parents=True)


def _write_pieces(path: Path, states: Iterable[ShardState]) -> str:
    tensors = {
        f"{kind}|{state.piece.name}|{state.piece.offset}": values.detach().to("cpu", torch.float32).contiguous().clone()
        for state in states
        for kind, values in state.tensors.items()
    }
    save_file(tensors, path)
    fsync_path(path)
    return _sha256(path)


def _publish(temporary: Path, target: Path, manifest: Mapping[str, Any], keep: int) -> str:
    text = json.dumps(manifest, indent=1, sort_keys=True)
    write_durably(temporary / MANIFEST, text)
    if target.exists():  # the same step, saved again after a rollback
        _remove(target)
    temporary.rename(target)
    fsync_path(target.parent)
    write_durably(target.parent / LATEST, target.name + "\n")
    for old in sorted(p for p in target.parent.glob("step-*") if p.name < target.name)[: -(keep - 1) or None]:
        _remove(old)
    return hashlib.sha256(text.encode()).hexdigest()


def _remove(checkpoint: Path) -> None:
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    checkpoint.rename(hidden)
    shutil.rmtree(hidden)


def _sha256(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def newest_checkpoint(folder: Path) -> Path | None:
    """The checkpoint that LATEST names, or None before the first one."""
    pointer = folder / LATEST
    if not pointer.exists():
        return None
    path = folder / pointer.read_text().strip()
    if not (path / MANIFEST).is_file():
        raise ConfigError(f"{pointer} names {path.name}, which is not there; point it at a whole checkpoint beside it")
    return path


def _read_manifest(path: Path) -> dict[str, Any]:
    try:
        manifest = json.loads((path / MANIFEST).read_text())
    except (OSError, ValueError) as error:  # ValueError: no JSON, no UTF-8
        raise ConfigError(f"{path} is no checkpoint: {error}") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ConfigError(f"{path} is no checkpoint: {MANIFEST} states no format")
    if manifest["format"] != FORMAT:
        raise ConfigError(f"{path}: checkpoint format {manifest['format']} is unknown; {FORMAT} was expected")
    for key in ("step", "parameters", "files"):
        if key not in manifest:
            raise ConfigError(f"{path} is no checkpoint: {MANIFEST} lacks {key}")
    return manifest


class Checkpoint:
    """A checkpoint on disk, checked against its manifest's hashes.

    Raises:
        ConfigError: missing or damaged file, unknown format.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.manifest = _read_manifest(path)
        self._where: dict[tuple[str, str], list[tuple[int, Path]]] = {}
        for name, digest in self.manifest["files"].items():
            self._index(path / name, digest)

    def _index(self, file: Path, digest: str) -> None:
        if not file.is_file() or _sha256(file) != digest:
            raise ConfigError(f"{file} is missing or damaged (its SHA-256 differs from the manifest's)")
        with safe_open(file, framework="pt") as tensors:
            for key in tensors.keys():  # noqa: SIM118  (not a dictionary)
                kind, name, offset = key.split("|")
                self._where.setdefault((kind, name), []).append((int(offset), file))

    @property
    def step(self) -> int:
        return int(self.manifest["step"])

    @property
    def shapes(self) -> dict[str, torch.Size]:
        return {name: torch.Size(shape) for name, shape in self.manifest["parameters"].items()}

    def full(self, kind: str, name: str) -> Tensor:
        """One whole tensor, e.g. ("param", "encoder.norm.weight"), in fp32."""
        shape = self.shapes[name]
        return self.part(kind, Piece(name, 0, shape.numel())).view(shape)

    def part(self, kind: str, piece: Piece) -> Tensor:
        """The coordinates of a piece, put together from whatever pieces were written."""
        out = torch.full((piece.length,), torch.nan)
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

    def load_weights(self, module: torch.nn.Module) -> None:
        """Sets the trainable weights of a module that no engine has wrapped yet."""
        wanted = {name: p for name, p in module.named_parameters() if p.requires_grad}
        if {n: p.shape for n, p in wanted.items()} != self.shapes:
            differing = sorted(
                n
                for n in wanted.keys() | self.shapes.keys()
                if n not in wanted or n not in self.shapes or wanted[n].shape != self.shapes[n]
            )
            raise ConfigError(f"{self.path} does not fit the model; the first difference is {differing[0]}")
        with torch.no_grad():
            for name, parameter in wanted.items():
                parameter.copy_(self.full("param", name))

    def restore(self, engine: Engine) -> None:
        """Sets master weights and moments of a wrapped engine, whose module has these weights already."""
        rank = distributed.rank()
        pieces = (
            engine.layout.owned_by(rank)
            if not engine.replicated
            else [Piece(name, 0, shape.numel()) for name, shape in engine.shapes.items()]
        )
        kinds = sorted({kind for kind, _ in self._where})
        engine.load_state({p: {k: self.part(k, p) for k in kinds} for p in pieces}, num_steps=self.step)
