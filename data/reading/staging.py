"""Whole shards on a disk of the node: each is copied once, in the order of the names, and then every example is read from there.

What is asked for over the network is then the shards of the node, in their order, whatever the sampling key is: the place
that serves them learns nothing about who is in a batch. So a reader that needs a shard that has not come yet does not ask for it
alone: it waits for its turn, or copies all of them where nobody is at work. Several processes, and ranks, share one folder; a
lock lets one of them copy at a time.

A shard has its name, the SHA-256 that the index states, when it is whole, checked and on the disk. What a kill leaves has another
name and is thrown away. Nothing is ever evicted.
"""

import fcntl
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from pathlib import Path

from data.errors import DataError, ReadError
from data.files import fsync_path
from data.index.shard import hash_file
from data.reading.records import ReadRequest, RemoteOptions, ShardEntry, ShardStatus
from data.reading.storage import LocalStorage, Storage

_POLL_SECONDS = 0.05
_LOOK_SECONDS = 5.0
_QUIET_SECONDS = 1800.0
"""How long, beyond its own limits for requests, another process that copies may add no byte: it may hash a large shard."""
_MARGIN_BYTES = 64 << 20
"""Bytes that stay free on a disk that is filled by whole shards."""


@dataclass(frozen=True)
class Staging:
    """What one node has: the folder, and the examples [start, stop) whose shards are copied."""

    folder: str
    start: int
    stop: int


def open_folder(folder: Path) -> str:
    """Makes a folder for staged shards, private; returns the name that it got at first, by which ranks know that they share it.

    Raises:
        DataError: it cannot be made or written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        name, mine = folder / "name", folder / f".name.{os.getpid()}.{secrets.token_hex(4)}"
        if not name.exists():
            mine.write_text(secrets.token_hex(16))
            with suppress(FileExistsError):
                os.link(mine, name)  # the first of several processes makes it, whole
            mine.unlink()
        return name.read_text()
    except OSError as error:
        raise DataError(
            f"data.staging: cannot use the folder {folder}: {error.strerror or error}"
        ) from error


def require_room(folder: Path, shards: Sequence[ShardEntry]) -> None:
    """Refuses a disk that cannot hold what is still to be copied.

    Raises:
        DataError: it cannot; says how much is missing and how much lies there that these shards do not need.
    """
    wanted = {_staged_name(shard): shard.size for shard in shards}
    try:
        with suppress(BlockingIOError), _locked(folder):  # who copies right now has thrown it away
            _throw_away(folder)
        there = {path.name: path.stat().st_size for path in folder.glob("*.tar")}
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(
            f"data.staging: cannot use the folder {folder}: {error.strerror or error}"
        ) from error
    missing = sum(size for name, size in wanted.items() if name not in there)
    if missing + _MARGIN_BYTES > free:
        others = sum(size for name, size in there.items() if name not in wanted)
        more = (
            f"; {others / 1e9:.3g} GB there are of shards that this start does not need"
            if others
            else ""
        )
        raise DataError(
            f"data.staging: {folder} has {free / 1e9:.3g} GB free, but the shards of this node take {missing / 1e9:.3g} GB more"
            f"{more}; free the difference, use more nodes, or remove data.staging"
        )


class StagedStorage:
    """See `data.reading.storage.Storage`: reads examples from the copies, and everything else from the place itself."""

    def __init__(
        self, source: Storage, folder: Path, shards: Sequence[ShardEntry], remote: RemoteOptions
    ):
        """
        Args:
            source: the place that has the shards.
            folder: see `open_folder`.
            shards: those of this node, in the order in which they are copied.
            remote: how the place is read, with as many shards at a time as it has connections.
        """
        self.root = source.root
        self._source, self._folder, self._shards, self._connections = (
            source,
            folder,
            shards,
            remote.connections,
        )
        self._patience = _QUIET_SECONDS + 2 * remote.tries * remote.timeout_seconds
        self._local = LocalStorage(str(folder))

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        return self._source.status(names)

    def fetch(self, name: str, status: ShardStatus, path: Path) -> None:
        self._source.fetch(name, status, path)

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        self._wait_for({request.shard.sha256: request.shard for request in requests}.values())
        staged = [r._replace(shard=replace(r.shard, name=_staged_name(r.shard))) for r in requests]
        try:
            yield from self._local.read_all(staged)
        except ReadError as error:
            raise ReadError(
                f"{error}; if it is a copy of data.staging that rotted, delete it and start again"
            ) from error

    def close(self) -> None:
        self._local.close()
        self._source.close()

    def stage_all(self) -> None:
        """Copies all shards of this node that are not there.

        Raises:
            ReadError: one cannot be had, or is not what was indexed.
        """
        self._wait_for(self._shards)

    def _wait_for(self, shards: Iterable[ShardEntry]) -> None:
        """Returns when all shards are there.

        Raises:
            ReadError: one cannot be had, is gone when it was copied, or nothing comes from the process that copies.
        """
        for shard in shards:
            path = self._folder / _staged_name(shard)
            size, since, next_look = -1, time.monotonic(), 0.0
            while not path.exists():
                try:
                    with _locked(self._folder):
                        self._stage(shard)
                except BlockingIOError:
                    now = time.monotonic()
                    if now >= next_look:
                        size_before, size = size, _size_of(self._folder)
                        since = since if size == size_before else now
                        next_look = now + _LOOK_SECONDS
                    if now - since > self._patience:
                        raise ReadError(
                            f"data.staging: another process has held {self._folder}/lock for {now - since:.0f} s without copying "
                            "a byte; end it and start again"
                        ) from None
                    time.sleep(_POLL_SECONDS)
                else:
                    if not path.exists():
                        raise ReadError(
                            f"data.staging: {path} was copied and is gone; nothing may clear that folder"
                        )

    def _stage(self, shard: ShardEntry) -> None:
        """Copies all shards of the node that are missing, several at a time, begun in order; whoever calls it holds the lock.

        Where it stopped at the shard that is needed, the place of the shards would see which one that is.
        """

        def copy(shard: ShardEntry) -> None:
            path = self._folder / _staged_name(shard)
            part = path.with_suffix(".part")
            try:
                self._source.fetch(shard.name, ShardStatus(shard.size, shard.version), part)
                part.chmod(0o600)
                if hash_file(part) != shard.sha256:
                    raise ReadError(
                        f"{self.root}/{shard.name} is not what was indexed; verify the shards, then restore it or index again"
                    )
                fsync_path(part)
                part.replace(path)
                fsync_path(self._folder)
            except ReadError:
                part.unlink(missing_ok=True)
                raise
            except OSError as error:
                raise ReadError(
                    f"data.staging: cannot write {path}: {error.strerror or error}"
                ) from error

        _throw_away(self._folder)
        # A shard of another node, which a batch far beyond its cap may ask for, comes alone.
        shards = self._shards if shard in self._shards else [shard]
        missing = {
            _staged_name(shard): shard
            for shard in shards
            if not (self._folder / _staged_name(shard)).exists()
        }
        with ThreadPoolExecutor(self._connections, "staging") as threads:
            list(threads.map(copy, missing.values()))  # shards of equal bytes are one


def is_at_work(folder: Path) -> bool:
    """Whether a process copies to this folder."""
    try:
        with _locked(folder):
            return False
    except BlockingIOError:
        return True


def _size_of(folder: Path) -> int:
    """Bytes of all shards, whole and in part."""
    total = 0
    for path in folder.iterdir():
        with suppress(FileNotFoundError):  # it just got its name
            total += path.stat().st_size
    return total


def _staged_name(shard: ShardEntry) -> str:
    return f"{shard.sha256}.tar"


def _throw_away(folder: Path) -> None:
    """Removes what a kill left; whoever holds the lock may.

    Raises:
        ReadError: it cannot.
    """
    try:
        for path in folder.glob("*.part"):
            path.unlink(missing_ok=True)
    except OSError as error:
        raise ReadError(
            f"data.staging: cannot write {folder}: {error.strerror or error}"
        ) from error


@contextmanager
def _locked(folder: Path) -> Iterator[None]:
    """One process at a time copies; the lock ends with the process.

    Raises:
        BlockingIOError: another one does.
        ReadError: there is no folder to lock.
    """
    try:
        descriptor = os.open(folder / "lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise ReadError(f"data.staging: cannot lock {folder}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    finally:
        os.close(descriptor)
