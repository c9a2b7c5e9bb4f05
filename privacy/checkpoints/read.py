"""Engine-neutral checkpoints: each rank writes its pieces; any engine at any world size reads them.

    checkpoints/step-00001000/
        manifest.json   step, model, guarantee, position in the ledger, SHA-256 of files and itself
        rank-00000-of-00002.safetensors   "<tensor>|<parameter>|<offset>" -> fp32 values; no pickle
    checkpoints/LATEST                    name of the newest whole checkpoint
    checkpoints/set-aside-step-00001100/  damaged, or newer than the one that a run resumed from

write.py writes them. A resume passes over damaged checkpoints to the one before them; the ledger
has charged the steps between, which are repeated with new coins and new noise.
"""

import contextlib
import hashlib
import json
import sys
from collections.abc import Callable, Iterable, Mapping
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
"""The moving average of the weights, a kind of tensor like "param" and the moments."""


def checkpoint_name(step: int) -> str:
    return f"step-{step:08d}"


def file_digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def with_seal(manifest: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the manifest with its own SHA-256 as `seal`."""
    content = {key: fact for key, fact in manifest.items() if key != "seal"}
    canonical = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return {**content, "seal": hashlib.sha256(canonical.encode()).hexdigest()}


def has_checkpoints(folder: Path) -> bool:
    """Returns whether the folder has a checkpoint that a run could resume from, whole or not."""
    return any(folder.glob("step-*"))


def read_manifest(path: Path) -> dict[str, Any]:
    """Returns the manifest of a checkpoint, checked against its seal.

    Raises:
        ConfigError: missing, damaged, or of another format.
    """
    try:
        # A pipe would block.
        if not (path / MANIFEST).is_file():
            raise FileNotFoundError(f"{MANIFEST} is missing, or no regular file")
        manifest = json.loads((path / MANIFEST).read_text())
    # ValueError: not JSON, or not UTF-8.
    except (OSError, ValueError) as error:
        raise ConfigError(f"{path} is not a checkpoint: {error}") from error
    if not isinstance(manifest, dict) or "format" not in manifest:
        raise ConfigError(f"{path} is not a checkpoint: {MANIFEST} states no format")
    if manifest["format"] != FORMAT:
        raise ConfigError(
            f"{path}: checkpoint format {manifest['format']} is unknown; {FORMAT} was expected"
        )
    for key in ("step", "parameters", "files"):
        if key not in manifest:
            raise ConfigError(f"{path} is not a checkpoint: {MANIFEST} has no {key}")
    if manifest != with_seal(manifest):
        raise ConfigError(f"{path} is damaged: {MANIFEST} differs from its own SHA-256")
    return manifest


class Checkpoint:
    """A checkpoint on disk, checked against its manifest's hashes.

    Args:
        share: (rank, world size): hash only this rank's share of the files; all ranks together hash
            each file once.

    Raises:
        ConfigError: missing or damaged file, unknown format.
    """

    def __init__(self, path: Path, share: tuple[int, int] = (0, 1)) -> None:
        self.path = path
        self.manifest = read_manifest(path)
        self._pieces: dict[tuple[str, str], list[tuple[int, Path]]] = {}
        rank, world_size = share
        for number, (name, digest) in enumerate(sorted(self.manifest["files"].items())):
            file = path / name
            is_in_share = number % world_size == rank
            if not file.is_file() or (is_in_share and file_digest(file) != digest):
                raise ConfigError(
                    f"{file} is missing or damaged (its SHA-256 differs from the manifest's)"
                )
            try:
                with safe_open(file, framework="pt") as tensors:
                    # Not a dictionary, so it cannot be iterated.
                    for key in tensors.keys():  # noqa: SIM118
                        kind, parameter, offset = key.split("|")
                        self._pieces.setdefault((kind, parameter), []).append((int(offset), file))
            except (SafetensorError, ValueError) as error:
                raise ConfigError(f"{file} is missing or damaged: {error}") from error
            except (OSError, RuntimeError) as error:
                # A missing file was removed meanwhile by a training that goes on.
                if file.exists():
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
        """Returns the parameters that the run did not train, without moments and average."""
        return frozenset(self.manifest.get("frozen", ()))

    @property
    def kinds(self) -> frozenset[str]:
        """Returns the kinds of tensors of a parameter: "param", names of moments, "average"."""
        return frozenset(kind for kind, _ in self._pieces)

    def full(self, kind: str, name: str) -> Tensor:
        """Returns one whole tensor, e.g. ("param", "encoder.norm.weight"), in fp32."""
        shape = self.shapes[name]
        return self.part(kind, Piece(name, 0, shape.numel())).view(shape)

    def part(self, kind: str, piece: Piece) -> Tensor:
        """Returns the coordinates of a piece, joined from the written pieces."""
        # The dtype of the file, whatever torch's default is.
        out = torch.full((piece.length,), torch.nan, dtype=torch.float32)
        end = piece.offset + piece.length
        num_filled = 0
        for offset, file in self._pieces.get((kind, piece.name), []):
            with safe_open(file, framework="pt") as tensors:
                stored_piece = tensors.get_slice(f"{kind}|{piece.name}|{offset}")
                start = max(offset, piece.offset)
                stop = min(offset + stored_piece.get_shape()[0], end)
                if start < stop:
                    coordinates = stored_piece[start - offset : stop - offset]
                    out[start - piece.offset : stop - piece.offset] = coordinates
                    num_filled += stop - start
        if num_filled != piece.length:
            raise ConfigError(f"{self.path} lacks a part of {kind} of {piece.name}")
        return out

    def load_weights(self, module: torch.nn.Module, *, average: bool = False) -> None:
        """Sets the weights of a module that no engine has wrapped yet, those not trained included.

        Args:
            average: sets trained weights to their moving average (train.ema_decay).

        Raises:
            ConfigError: another model, or the run had no average.
        """
        parameters = dict(module.named_parameters())
        self._require({name: p.shape for name, p in parameters.items()}, self.shapes)
        if average and AVERAGE not in self.kinds:
            raise ConfigError(
                f"{self.path} has no average of the weights, because the run had no train.ema_decay"
            )
        with torch.no_grad():
            for name, parameter in parameters.items():
                has_average = average and name not in self.frozen
                parameter.copy_(self.full(AVERAGE if has_average else "param", name))

    def _require(self, shapes: Mapping[str, torch.Size], stored: Mapping[str, torch.Size]) -> None:
        for name in sorted(shapes.keys() | stored.keys()):
            if shapes.get(name) != stored.get(name):
                raise ConfigError(
                    f"{self.path} does not fit the model; the first difference is {name}: give the "
                    "model of the run, or another run folder"
                )

    def restore(self, engine: Engine, moments: tuple[str, ...]) -> None:
        """Sets master weights and moments of a wrapped engine.

        Its module has these weights already, or takes them with the master weights
        (`trainer.engines.sharder`).

        Args:
            moments: of the given optimizer; a checkpoint of another optimizer is refused.
        """
        trained_shapes = {n: shape for n, shape in self.shapes.items() if n not in self.frozen}
        self._require(engine.shapes, trained_shapes)
        stored_moments = self.kinds - {"param", AVERAGE}
        if self.step > 0 and stored_moments != set(moments):
            raise ConfigError(
                f"{self.path} was written with another optimizer: it holds "
                f"{sorted(stored_moments) or 'no moments'}, and the one that is given needs "
                f"{sorted(moments) or 'none'}"
            )
        pieces: Iterable[Piece]
        if engine.replicated:
            pieces = [Piece(name, 0, shape.numel()) for name, shape in engine.shapes.items()]
        else:
            pieces = engine.layout.owned_by(collectives.rank())
        kinds = sorted(stored_moments | {"param"})
        states = {piece: {kind: self.part(kind, piece) for kind in kinds} for piece in pieces}
        engine.load_state(states, num_steps=self.step)


def newest_whole(
    folder: Path, check_position: Callable[[Mapping[str, Any]], None]
) -> Checkpoint | None:
    """Returns the checkpoint to resume from: LATEST's or, if that is damaged, the newest whole one.

    Only checkpoints before that of LATEST come in its place. Each damaged one is a line on the
    console; no file is changed (`set_aside_newer` does that). Collective.

    Args:
        check_position: called with the ledger position of every manifest that can be read, also of
            damaged checkpoints; refuses a ledger without that position. Collective.

    Raises:
        ConfigError: there are checkpoints, but none is whole.
    """
    names = collectives.on_main(lambda: usable_names(folder))
    for manifest in collectives.on_main(lambda: readable_manifests(folder)):
        if manifest.get("ledger"):
            check_position(manifest["ledger"])
    damages: list[str] = []
    for name in names:
        checkpoint = None
        failure = None
        try:
            checkpoint = Checkpoint(folder / name, (collectives.rank(), collectives.world_size()))
        except ConfigError as error:
            failure = " ".join(str(error).split())
        failures = [line for line in collectives.gather_objects(failure) if line is not None]
        if checkpoint is not None and not failures:
            for damage in damages:
                collectives.say(
                    f"damaged checkpoint: {damage}; resuming from {name}, the steps after it stay "
                    "charged"
                )
            return checkpoint
        damages.append(failures[0])
    if damages:
        raise ConfigError(
            f"none of the {len(damages)} checkpoints in {folder} is whole ({damages[0]}); put one "
            "back, or start a new run folder: the ledger of this one stays charged"
        )
    return None


def usable_names(folder: Path) -> list[str]:
    """Returns LATEST's checkpoint, then those before it, newest first.

    If LATEST names none, all checkpoints are returned.
    """
    names = sorted((path.name for path in folder.glob("step-*")), reverse=True)
    latest_file = folder / LATEST
    latest = latest_file.read_text(errors="replace").strip() if latest_file.exists() else ""
    if not names or not latest.startswith("step-"):
        return names
    return [latest, *(name for name in names if name < latest)]


def open_checkpoint(path: Path) -> Checkpoint:
    """Opens the checkpoint in this folder, or the newest whole one of this run folder.

    Warns on stderr of a damaged one that it passes over.

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
        f"none of the {len(names)} checkpoints in {folder} is whole ({failure}); restore one from "
        "a copy"
    )


def readable_manifests(folder: Path) -> list[dict[str, Any]]:
    """Returns the manifests of all checkpoints, also of those newer than LATEST or set aside.

    Each of them names a position that the ledger once had.
    """
    manifests = []
    for path in sorted([*folder.glob("step-*"), *folder.glob("set-aside-step-*")], reverse=True):
        # Damage is reported where the checkpoint is opened.
        with contextlib.suppress(ConfigError):
            manifests.append(read_manifest(path))
    return manifests


def set_aside_newer(folder: Path, name: str) -> None:
    """Renames all checkpoints newer than `name`, damaged ones among them, and points LATEST at it.

    So no later start meets them.
    """
    for path in sorted(folder.glob("step-*")):
        if path.name > name:
            target = folder / f"set-aside-{path.name}"
            number = 1
            while target.exists():
                number += 1
                target = folder / f"set-aside-{path.name}-{number}"
            durable.rename(path, target)
    durable.replace_file(folder / LATEST, f"{name}\n".encode())


def require_recorded(checkpoint: Path, state: LedgerState) -> None:
    """Refuses a manifest that the ledger has not recorded, unless a crash came before its record.

    Any program can seal a manifest anew, but the ledger's hash chain names one.

    Raises:
        NotRecorded: the ledger recorded another one: it was rolled back, or is of another run, or
            its folder was renamed.
        ConfigError: the manifest cannot be read.
    """
    manifest = read_manifest(checkpoint)
    step = manifest["step"]
    position = manifest.get("ledger")
    is_numbered = checkpoint.parent.name == "checkpoints" and checkpoint.name.startswith("step-")
    # A resume takes the newest checkpoint by its name.
    if is_numbered and isinstance(step, int) and checkpoint.name != checkpoint_name(step):
        raise NotRecorded(
            f"{checkpoint}: holds the checkpoint of step {step}, so it was renamed: call it "
            f"{checkpoint_name(step)} again, or take it away"
        )
    # Without privacy the ledger records no checkpoint.
    if not state.plan.enabled or (step, file_digest(checkpoint / MANIFEST)) in state.checkpoints:
        return
    position = position if isinstance(position, dict) else {}
    line = position.get("seq")
    is_in_ledger = (
        isinstance(line, int)
        and 0 <= line < state.num_lines
        and state.hashes[line] == position.get("hash")
    )
    if not (is_in_ledger and state.may_lack_record(step, position["seq"])):
        raise NotRecorded(
            f"{checkpoint}: its {MANIFEST} is not the one that the ledger recorded, so it was "
            "replaced or edited: restore it from a copy, or take it away, and the checkpoint "
            "before it is used"
        )
