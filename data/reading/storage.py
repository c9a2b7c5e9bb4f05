"""Where shards lie: what the index and the reader ask of a place, local or remote.

A place hands out exact bytes or an error; it never decides what the bytes mean. Every block of bytes is checked against
the checksum in the index before anything else sees it, wherever it came from.
"""

import os
import shutil
import stat
import tempfile
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Protocol

from data.errors import DataError, ReadError
from data.index.shards import is_url
from data.reading.records import ReadRequest, RemoteOptions, ShardEntry, ShardStatus, check_crc

MAX_OPEN_SHARDS = 64


class Storage(Protocol):
    """A place with shards. Cheap to make; files and connections open when they are first needed."""

    root: str

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        """Size and version of each shard, in this order; an error that says so where a shard is missing or empty.

        Raises:
            ReadError: the place does not answer.
        """

    def fetch(self, name: str, status: ShardStatus, path: Path) -> None:
        """Writes the whole shard, which should have this size and version, to a file.

        Raises:
            ReadError: it cannot be had, or the file cannot be written.
        """

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        """The bytes of each request, in this order, checked; later ones are fetched while earlier ones are used.

        Raises:
            ReadError: bytes that the index promises cannot be had.
        """

    def close(self) -> None:
        """Releases files and connections; the next read opens them again."""


class LocalStorage:
    """Shards on a file system: one `pread` per example, announced ahead so that the kernel reads while we decode.

    It survives a fork: every read says where it begins.
    """

    def __init__(self, root: str):
        self.root = root
        self._descriptors: OrderedDict[str, int] = OrderedDict()

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        for name in names:
            path = Path(self.root, name)
            try:
                status = path.stat()
            except OSError as error:
                yield DataError(f"missing or empty shards: {path}: {error.strerror or error}")
                continue
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
                yield DataError(
                    f"missing or empty shards: {path} is empty or no file; fetch it again"
                )
            else:
                yield ShardStatus(status.st_size, f"mtime_ns:{status.st_mtime_ns}")

    def fetch(self, name: str, status: ShardStatus, path: Path) -> None:
        try:
            shutil.copyfile(Path(self.root, name), path)
        except OSError as error:
            raise ReadError(
                f"cannot copy {self.root}/{name} to {path}: {error.strerror or error}"
            ) from error

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        if hasattr(
            os, "posix_fadvise"
        ):  # It starts reading without waiting; some systems have no such call.
            for request in requests:
                descriptor = self._descriptor(request.shard)
                os.posix_fadvise(descriptor, request.offset, request.length, os.POSIX_FADV_WILLNEED)
        for request in requests:
            path, descriptor = Path(self.root, request.shard.name), self._descriptor(request.shard)
            pieces: list[bytes] = []  # A file system may return the bytes in pieces.
            missing = request.length
            while missing:
                try:
                    piece = os.pread(descriptor, missing, request.offset + request.length - missing)
                except OSError as error:
                    raise ReadError(
                        f"cannot read {path} at byte {request.offset}: {error.strerror or error}"
                    ) from error
                if not piece:
                    raise ReadError(
                        f"short read of {path} at byte {request.offset}: {missing} of {request.length} bytes are missing"
                    )
                pieces.append(piece)
                missing -= len(piece)
            yield check_crc(request, pieces[0] if len(pieces) == 1 else b"".join(pieces), str(path))

    def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, OrderedDict()
        for descriptor in descriptors.values():
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptors", None):
            self.close()

    def _descriptor(self, shard: ShardEntry) -> int:
        """An open file for the shard, the least recently used one closed first."""
        descriptor = self._descriptors.pop(shard.name, None)
        if descriptor is None:
            path = Path(self.root, shard.name)
            try:
                descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
            except OSError as error:
                raise ReadError(f"cannot read {path}: {error.strerror or error}") from error
            size = os.fstat(descriptor).st_size
            if size != shard.size:
                os.close(descriptor)
                raise ReadError(
                    f"{path} has {size} bytes, its index says {shard.size}; restore the shard or index again"
                )
            if len(self._descriptors) >= MAX_OPEN_SHARDS:
                os.close(self._descriptors.popitem(last=False)[1])
        self._descriptors[shard.name] = descriptor
        return descriptor


@contextmanager
def local_copy(root: str, remote: RemoteOptions, name: str) -> Iterator[Path]:
    """A whole shard of a root as a local file, for as long as the context lasts: of a remote one a private temporary copy.

    Raises:
        DataError: it is missing or empty.
        ReadError: it cannot be had.
    """
    if not is_url(root):
        yield Path(root, name)
        return
    with closing(open_storage(root, remote)) as storage:
        [status] = require_present(storage.status([name]))
        with tempfile.TemporaryDirectory(
            prefix="shard-"
        ) as folder:  # The disk must hold one shard per worker.
            path = Path(folder) / "shard.tar"
            storage.fetch(name, status, path)
            yield path


def require_present(statuses: Iterable[ShardStatus | DataError]) -> Iterator[ShardStatus]:
    """Passes on what `Storage.status` says.

    Raises:
        DataError: a shard is missing or empty.
    """
    for status in statuses:
        if isinstance(status, DataError):
            raise status
        yield status


def open_storage(root: str, remote: RemoteOptions) -> Storage:
    """The place that a root names.

    Raises:
        DataError: a scheme without a driver, or plain http to another host.
    """
    if is_url(root):
        from data.reading.remote import (
            RemoteStorage,
        )  # network libraries are imported only for network shards

        return RemoteStorage(root, remote)
    return LocalStorage(root)
