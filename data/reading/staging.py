"""Copies whole shards to a disk of the node, once each and in name order, and reads them there.

The server then sees requests for the node's shards in their order, whatever the sampling key is,
and learns nothing about the members of a batch. So a reader never requests a missing shard alone:
it waits for the shard's turn, or copies all shards if no process does. A lock lets one of the
processes and ranks that share a folder copy. A shard's file gets its name, the SHA-256 of the
index, when it is whole, checked and durable.
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
"""Limit, beyond that of its requests, in which a copying process may add no byte.

It may hash a large shard.
"""
_MARGIN_BYTES = 64 << 20
"""Bytes that stay free on a disk that is filled by whole shards."""


@dataclass(frozen=True)
class Staging:
    """The copies of one node: a folder, and the examples [start, stop) whose shards are copied."""

    folder: str
    start: int
    stop: int


def open_folder(folder: Path) -> str:
    """Makes a private folder for staged shards and returns the random name that it got at first.

    Ranks with equal names share the folder.

    Raises:
        DataError: the folder cannot be made or written.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.chmod(0o700)
        name_file = folder / "name"
        temporary = folder / f".name.{os.getpid()}.{secrets.token_hex(4)}"
        if not name_file.exists():
            temporary.write_text(secrets.token_hex(16))
            # Only the first of several processes can make the link, to a file that is whole.
            with suppress(FileExistsError):
                os.link(temporary, name_file)
            temporary.unlink()
        return name_file.read_text()
    except OSError as error:
        raise DataError(
            f"data.staging: cannot use the folder {folder}: {error.strerror or error}"
        ) from error


def require_room(folder: Path, shards: Sequence[ShardEntry]) -> None:
    """Refuses a disk without room for the shards that are still to be copied.

    Raises:
        DataError: there is too little room; the message states the missing bytes, and those of
            copies that these shards do not need.
    """
    node_sizes = {_staged_name(shard): shard.size for shard in shards}
    try:
        # A process that holds the lock has already removed partial copies.
        with suppress(BlockingIOError), _locked(folder):
            _remove_partial_copies(folder)
        copied_sizes = {path.name: path.stat().st_size for path in folder.glob("*.tar")}
        free = shutil.disk_usage(folder).free
    except OSError as error:
        raise DataError(
            f"data.staging: cannot use the folder {folder}: {error.strerror or error}"
        ) from error
    missing = sum(size for name, size in node_sizes.items() if name not in copied_sizes)
    if missing + _MARGIN_BYTES <= free:
        return
    unneeded = sum(size for name, size in copied_sizes.items() if name not in node_sizes)
    unneeded_text = ""
    if unneeded:
        unneeded_text = (
            f"; {unneeded / 1e9:.3g} GB there are of shards that this start does not need"
        )
    raise DataError(
        f"data.staging: {folder} has {free / 1e9:.3g} GB free, but the shards of this node take "
        f"{missing / 1e9:.3g} GB more{unneeded_text}; free the difference, use more nodes, or "
        "remove data.staging"
    )


class StagedStorage:
    """Reads examples from the copies, and all else from the source; see `storage.Storage`."""

    def __init__(
        self, source: Storage, folder: Path, shards: Sequence[ShardEntry], remote: RemoteOptions
    ):
        """
        Args:
            source: the storage that has the shards.
            folder: see `open_folder`.
            shards: the shards of this node, in the order in which they are copied.
            remote: options of the source; its `connections` is the number of copies at a time.
        """
        self.root = source.root
        self._source = source
        self._folder = folder
        self._shards = shards
        self._connections = remote.connections
        self._patience = _QUIET_SECONDS + 2 * remote.tries * remote.timeout_seconds
        self._local = LocalStorage(str(folder))

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        return self._source.status(names)

    def fetch(self, name: str, status: ShardStatus, path: Path) -> None:
        self._source.fetch(name, status, path)

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        shards = {request.shard.sha256: request.shard for request in requests}
        self._wait_for(shards.values())
        staged_requests: list[ReadRequest] = []
        for request in requests:
            staged_shard = replace(request.shard, name=_staged_name(request.shard))
            staged_requests.append(request._replace(shard=staged_shard))
        try:
            yield from self._local.read_all(staged_requests)
        except ReadError as error:
            raise ReadError(
                f"{error}; if it is a copy of data.staging that rotted, delete it and start again"
            ) from error

    def close(self) -> None:
        self._local.close()
        self._source.close()

    def stage_all(self) -> None:
        """Copies all missing shards of this node.

        Raises:
            ReadError: a shard cannot be read, or is not the shard that was indexed.
        """
        self._wait_for(self._shards)

    def _wait_for(self, shards: Iterable[ShardEntry]) -> None:
        """Returns when all shards are copied.

        Raises:
            ReadError: a shard cannot be read, its copy vanished, or the process that copies is
                silent.
        """
        for shard in shards:
            path = self._folder / _staged_name(shard)
            folder_size = -1
            last_growth = time.monotonic()
            next_look = 0.0
            while not path.exists():
                try:
                    with _locked(self._folder):
                        self._stage(shard)
                except BlockingIOError:
                    present = time.monotonic()
                    if present >= next_look:
                        last_size = folder_size
                        folder_size = _size_of(self._folder)
                        if folder_size != last_size:
                            last_growth = present
                        next_look = present + _LOOK_SECONDS
                    silence = present - last_growth
                    if silence > self._patience:
                        raise ReadError(
                            f"data.staging: another process has held {self._folder}/lock for "
                            f"{silence:.0f} s without copying a byte; end it and start again"
                        ) from None
                    time.sleep(_POLL_SECONDS)
                else:
                    if not path.exists():
                        raise ReadError(
                            f"data.staging: {path} was copied and is gone; nothing may clear that "
                            "folder"
                        )

    def _stage(self, shard: ShardEntry) -> None:
        """Copies all missing shards of the node, several at a time, begun in order.

        The caller holds the lock. A stop at the shard that is needed would show the server which
        shard that is.
        """

        def copy(shard: ShardEntry) -> None:
            path = self._folder / _staged_name(shard)
            part = path.with_suffix(".part")
            status = ShardStatus(shard.size, shard.version)
            try:
                self._source.fetch(shard.name, status, part)
                part.chmod(0o600)
                if hash_file(part) != shard.sha256:
                    raise ReadError(
                        f"{self.root}/{shard.name} is not what was indexed; verify the shards, "
                        "then restore it or index again"
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

        _remove_partial_copies(self._folder)
        # A shard of another node, which a batch far beyond its cap may need, is copied alone.
        shards = self._shards if shard in self._shards else [shard]
        # Shards of equal bytes have one copy.
        missing_shards: dict[str, ShardEntry] = {}
        for node_shard in shards:
            name = _staged_name(node_shard)
            if not (self._folder / name).exists():
                missing_shards[name] = node_shard
        with ThreadPoolExecutor(self._connections, "staging") as threads:
            list(threads.map(copy, missing_shards.values()))


def is_at_work(folder: Path) -> bool:
    """Returns whether a process copies to this folder."""
    try:
        with _locked(folder):
            return False
    except BlockingIOError:
        return True


def _size_of(folder: Path) -> int:
    """Returns the bytes of all shards, whole and in part."""
    total = 0
    for path in folder.iterdir():
        # A part may just have been renamed.
        with suppress(FileNotFoundError):
            total += path.stat().st_size
    return total


def _staged_name(shard: ShardEntry) -> str:
    return f"{shard.sha256}.tar"


def _remove_partial_copies(folder: Path) -> None:
    """Removes the partial copies that a kill left; the caller holds the lock.

    Raises:
        ReadError: a file cannot be removed.
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
    """Holds the lock of the process that copies; the lock ends with the process.

    Raises:
        BlockingIOError: another process holds it.
        ReadError: the folder cannot be locked.
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
