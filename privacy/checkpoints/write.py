"""Writes checkpoints: every rank its pieces, at a step boundary or in the background.

A checkpoint is written to a name with a leading dot, fsynced and renamed, and gets such a name
again before it is deleted, so a name without a dot is a whole checkpoint. It holds only noised
quantities: weights and optimizer moments, never a sum before noise. read.py reads them.
"""

import functools
import json
import threading
from collections.abc import Callable, Iterable, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from safetensors.torch import save_file

from ..errors import RemoteError, WeightsNotFinite
from ..files import durable
from ..ranks import collectives
from ..ranks.engine import Engine, ShardState
from .read import FORMAT, LATEST, MANIFEST, checkpoint_name, file_digest, with_seal

T = TypeVar("T")


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the checkpoints before it are whole."""

    exit_code = 1


class Retention(NamedTuple):
    """The rule by which checkpoints stay: the newest `keep`, and every `keep_every`-th step."""

    keep: int
    keep_every: int | None = None

    def superseded(self, steps: Iterable[int]) -> list[int]:
        """Returns the steps whose checkpoints are to be deleted."""
        older_steps = sorted(steps, reverse=True)[self.keep :]
        return [step for step in older_steps if not self.keep_every or step % self.keep_every]


class _InFlight(NamedTuple):
    """A snapshot on its way to the disk."""

    step: int
    path: Path
    manifest: dict[str, Any]
    digest: Future[str]
    """SHA-256 of the file, or the error of its writing."""


class CheckpointWriter:
    """Writes the checkpoints of a run, with at most one in flight.

    All methods are collective: every rank calls them at the same step boundaries.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all ranks share.
        in_background: `save` returns after a copy to CPU memory; the checkpoint becomes visible at
            `finish`, and a crash until then leaves the previous one.
        published: called with (step, name, digest of the manifest) when a checkpoint is whole and
            durable.
    """

    def __init__(
        self,
        folder: Path,
        retention: Retention,
        *,
        in_background: bool = False,
        published: Callable[[int, str, str], None] = lambda step, name, digest: None,
    ) -> None:
        self._folder = folder
        self._retention = retention
        self._in_background = in_background
        self._published = published
        self._in_flight: _InFlight | None = None

    def save(
        self,
        step: int,
        states: Iterable[ShardState],
        shapes: Mapping[str, torch.Size],
        facts: Mapping[str, Any],
    ) -> None:
        """Writes checkpoint `step`, or starts to.

        Args:
            states: of the pieces that this rank owns (`Engine.state`).
            facts: further entries of the manifest (model, guarantee, ledger position).

        Raises:
            CheckpointWriteError: this checkpoint, or the one before it, could not be written.
        """
        self.finish()
        temporary = self._folder / f".{checkpoint_name(step)}.tmp"

        def make_folder() -> None:
            # A crash may have left such folders.
            for leftover in self._folder.glob(".step-*"):
                durable.remove_tree(leftover)
            durable.make_directory(temporary)

        collectives.on_main(lambda: _with_readable_error(step, make_folder))
        # Copies, since the next step changes the originals.
        tensors = {}
        for state in states:
            for kind, values in state.tensors.items():
                key = f"{kind}|{state.piece.name}|{state.piece.offset}"
                copy = values.detach().to("cpu", torch.float32, copy=True)
                tensors[key] = copy.contiguous()
        manifest = {
            "format": FORMAT,
            "step": step,
            **facts,
            "parameters": {name: list(shape) for name, shape in shapes.items()},
        }
        name = f"rank-{collectives.rank():05d}-of-{collectives.world_size():05d}.safetensors"
        path = temporary / name
        digest = Future[str]()
        self._in_flight = _InFlight(step, path, manifest, digest)

        def write() -> None:
            try:
                save_file(tensors, path)
                durable.fsync_path(path)
                digest.set_result(file_digest(path))
            # The library has an error of its own for a full disk. `finish` raises it.
            except Exception as error:
                digest.set_exception(error)

        if self._in_background:
            threading.Thread(target=write, name="checkpoint", daemon=True).start()
        else:
            write()
            self.finish()

    def finish(self) -> None:
        """Publishes the checkpoint in flight, once it is written.

        Raises:
            CheckpointWriteError: this rank could not write its part.
            RemoteError: another rank could not.
        """
        if self._in_flight is None:
            return
        step, path, manifest, future_digest = self._in_flight
        error = future_digest.exception()
        digest = None if error is not None else future_digest.result()
        parts = collectives.gather_objects((path.name, digest, error and str(error)))
        self._in_flight = None
        if error is not None:
            raise _write_error(step, error)
        for rank, (_, _, reason) in enumerate(parts):
            if reason is not None:
                raise RemoteError(f"rank {rank} could not write its part: {reason}", 1)
        manifest = manifest | {"files": {file: sha256 for file, sha256, _ in parts}}
        name = checkpoint_name(step)
        publish = functools.partial(
            _publish, path.parent, self._folder / name, manifest, self._retention
        )
        manifest_digest = collectives.on_main(lambda: _with_readable_error(step, publish))
        self._published(step, name, manifest_digest)


def _with_readable_error(step: int, write: Callable[[], T]) -> T:
    """Calls `write`, and turns a refusal of the disk into one line."""
    try:
        return write()
    except OSError as error:
        raise _write_error(step, error) from error


def _write_error(step: int, error: BaseException) -> CheckpointWriteError:
    return CheckpointWriteError(
        f"checkpoint {checkpoint_name(step)} could not be written: {error}; those before it are "
        "whole; make room, and the same command resumes"
    )


def _publish(
    temporary: Path, target: Path, manifest: Mapping[str, Any], retention: Retention
) -> str:
    """Gives a whole checkpoint its name, points LATEST at it and removes superseded ones.

    Returns:
        The manifest's digest.
    """
    text = json.dumps(with_seal(manifest), indent=1, sort_keys=True)
    durable.replace_file(temporary / MANIFEST, text.encode())
    # A run that went back has saved the same step before.
    if target.exists():
        _remove(target)
    durable.rename(temporary, target)
    durable.fsync_directory(target.parent)
    durable.replace_file(target.parent / LATEST, f"{target.name}\n".encode())
    steps = [int(path.name.removeprefix("step-")) for path in target.parent.glob("step-*")]
    for step in retention.superseded(steps):
        _remove(target.parent / checkpoint_name(step))
    return file_digest(target / MANIFEST)


def _remove(checkpoint: Path) -> None:
    hidden = checkpoint.with_name(f".{checkpoint.name}.old")
    durable.rename(checkpoint, hidden)
    durable.remove_tree(hidden)


def require_finite(engine: Engine, step: int) -> None:
    """Refuses to save weights that hold NaN or infinity. Collective.

    Raises:
        WeightsNotFinite: on rank 0; RemoteError on other ranks.
    """
    broken_names = []
    for state in engine.state():
        if not bool(state.tensors["param"].isfinite().all()):
            broken_names.append(state.piece.name)
    all_names: list[str] = []
    for rank_names in collectives.gather_objects(broken_names):
        all_names += rank_names
    if not all_names:
        return
    # Weights are noised, so the names are public.
    message = (
        f"after step {step} the weights hold NaN or infinity ({all_names[0]}, {len(all_names)} "
        "parts in all); they are not saved, and the same command resumes from the newest "
        "checkpoint: lower the learning rate, or look at the memory of the host"
    )
    if collectives.rank() == 0:
        raise WeightsNotFinite(message)
    raise RemoteError(message, WeightsNotFinite.exit_code)
