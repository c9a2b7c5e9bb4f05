"""Writing checkpoints: every rank the pieces that it owns, at a step boundary or in the background; read.py reads them.

A checkpoint is written to a name with a leading dot, fsynced and renamed, and gets such a name again before it is deleted, so
a name without one is a whole checkpoint. It holds noised quantities only: weights and optimizer moments, never a sum before
noise.
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
from .read import FORMAT, LATEST, MANIFEST, checkpoint_name, file_digest, sealed

T = TypeVar("T")


class CheckpointWriteError(OSError):
    """A checkpoint could not be written; the ones before it are whole."""

    exit_code = 1


class Retention(NamedTuple):
    """Which checkpoints stay: the newest `keep`, and every one whose step is a multiple of `keep_every`."""

    keep: int
    keep_every: int | None = None

    def superseded(self, steps: Iterable[int]) -> list[int]:
        """The steps that may go."""
        newest_first = sorted(steps, reverse=True)
        return [s for s in newest_first[self.keep :] if not self.keep_every or s % self.keep_every]


class _InFlight(NamedTuple):
    """A snapshot on its way to the disk."""

    step: int
    path: Path
    manifest: dict[str, Any]
    digest: Future[str]
    """Of the file, or what went wrong."""


class CheckpointWriter:
    """All methods are collective: every rank calls them at the same step boundaries. At most one checkpoint is in flight.

    Args:
        folder: the run's `checkpoints` folder, on a file system that all ranks share.
        in_background: `save` returns after a copy to CPU memory; the checkpoint becomes visible at `finish`, and a crash until
            then leaves the previous one.
        published: called with (step, name, digest of the manifest) when a checkpoint is whole and durable.
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
            states: what this rank owns (`Engine.state`).
            facts: what else the manifest states (model, guarantee, ledger position).

        Raises:
            CheckpointWriteError: this one, or the one before it, could not be written.
        """
        self.finish()
        temporary = self._folder / f".{checkpoint_name(step)}.tmp"

        def make_folder() -> None:
            for leftover in self._folder.glob(".step-*"):  # of a crash
                durable.remove_tree(leftover)
            durable.make_directory(temporary)

        collectives.on_main(lambda: _readable(step, make_folder))
        tensors = {  # a copy: the next step changes the originals
            f"{kind}|{state.piece.name}|{state.piece.offset}": values.detach()
            .to("cpu", torch.float32, copy=True)
            .contiguous()
            for state in states
            for kind, values in state.tensors.items()
        }
        manifest = {
            "format": FORMAT,
            "step": step,
            **facts,
            "parameters": {name: list(shape) for name, shape in shapes.items()},
        }
        name = f"rank-{collectives.rank():05d}-of-{collectives.world_size():05d}.safetensors"
        path, written = temporary / name, Future[str]()
        self._in_flight = _InFlight(step, path, manifest, written)

        def write() -> None:
            try:
                save_file(tensors, path)
                durable.fsync_path(path)
                written.set_result(file_digest(path))
            except Exception as error:  # also what the library makes of a full disk; raised at the next step boundary
                written.set_exception(error)

        if self._in_background:
            threading.Thread(target=write, name="checkpoint", daemon=True).start()
        else:
            write()
            self.finish()

    def finish(self) -> None:
        """Waits for the checkpoint in flight and publishes it; raises if a rank could not write its part."""
        if self._in_flight is None:
            return
        step, path, manifest, written = self._in_flight
        error = written.exception()
        digest = None if error is not None else written.result()
        parts = collectives.gather_objects((path.name, digest, error and str(error)))
        self._in_flight = None
        if error is not None:
            raise _explained(step, error)
        for rank, (_, _, reason) in enumerate(parts):
            if reason is not None:
                raise RemoteError(f"rank {rank} could not write its part: {reason}", 1)
        name, manifest = (
            checkpoint_name(step),
            manifest | {"files": {file: sha256 for file, sha256, _ in parts}},
        )
        publish = functools.partial(
            _publish, path.parent, self._folder / name, manifest, self._retention
        )
        self._published(step, name, collectives.on_main(lambda: _readable(step, publish)))


def _readable(step: int, write: Callable[[], T]) -> T:
    """The result of `write`; what the disk refuses becomes one line."""
    try:
        return write()
    except OSError as error:
        raise _explained(step, error) from error


def _explained(step: int, error: BaseException) -> CheckpointWriteError:
    return CheckpointWriteError(
        f"checkpoint {checkpoint_name(step)} could not be written: {error}; those before it are whole; make room, "
        "and the same command resumes"
    )


def _publish(
    temporary: Path, target: Path, manifest: Mapping[str, Any], retention: Retention
) -> str:
    """Gives a whole checkpoint its name, points LATEST at it and removes superseded ones; returns the manifest's digest."""
    text = json.dumps(sealed(manifest), indent=1, sort_keys=True)
    durable.replace_file(temporary / MANIFEST, text.encode())
    if target.exists():  # the same step, saved again after a rollback
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
    """Collective.

    Raises:
        WeightsNotFinite: there is nothing to save (on rank 0, RemoteError elsewhere).
    """
    broken = [s.piece.name for s in engine.state() if not bool(s.tensors["param"].isfinite().all())]
    names = [name for names in collectives.gather_objects(broken) for name in names]
    if names:  # of noised weights, so it may be said
        error = (
            f"after step {step} the weights hold NaN or infinity ({names[0]}, {len(names)} parts in all); they are not saved, "
            "and the same command resumes from the newest checkpoint: lower the learning rate, or look at the memory of the host"
        )
        raise (
            WeightsNotFinite(error)
            if collectives.rank() == 0
            else RemoteError(error, WeightsNotFinite.exit_code)
        )
