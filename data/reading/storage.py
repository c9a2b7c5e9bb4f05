"""Storages of shards, local and remote, as the index and the reader use them.

A storage returns exact bytes or an error, and never interprets the bytes. Each block of bytes is
checked against the checksum in the index before any other code sees it.
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
    """A place with shards; files and connections open when they are first needed."""

    root: str

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        """Yields size and version of each shard, in this order.

        For a missing or empty shard it yields the error instead of raising it.

        Raises:
            ReadError: the storage does not answer.
        """

    def fetch(self, name: str, status: ShardStatus, path: Path) -> None:
        """Writes the whole shard, which should have this size and version, to a file.

        Raises:
            ReadError: the shard cannot be read, or the file cannot be written.
        """

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        """Yields the checked bytes of each request, in this order, and reads ahead.

        Raises:
            ReadError: bytes that the index promises cannot be read.
        """

    def close(self) -> None:
        """Releases files and connections; the next read opens them again."""


class LocalStorage:
    """Shards on a file system.

    One `pread` per example is announced ahead, so that the kernel reads while examples are decoded.
    A fork may share the descriptors, since `pread` does not use their position.
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
                    f"missing or empty shards: {path} is empty or not a file; fetch it again"
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
        # The call starts a read without waiting for it; some systems lack it.
        if hasattr(os, "posix_fadvise"):
            for request in requests:
                descriptor = self._descriptor(request.shard)
                os.posix_fadvise(descriptor, request.offset, request.length, os.POSIX_FADV_WILLNEED)
        for request in requests:
            path = Path(self.root, request.shard.name)
            descriptor = self._descriptor(request.shard)
            # A file system may return the bytes in pieces.
            pieces: list[bytes] = []
            end = request.offset + request.length
            missing = request.length
            while missing:
                try:
                    piece = os.pread(descriptor, missing, end - missing)
                except OSError as error:
                    raise ReadError(
                        f"cannot read {path} at byte {request.offset}: {error.strerror or error}"
                    ) from error
                if not piece:
                    raise ReadError(
                        f"short read of {path} at byte {request.offset}: {missing} of "
                        f"{request.length} bytes are missing"
                    )
                pieces.append(piece)
                missing -= len(piece)
            # One piece, the usual case, is passed on without a copy.
            extent = pieces[0] if len(pieces) == 1 else b"".join(pieces)
            yield check_crc(request, extent, str(path))

    def close(self) -> None:
        descriptors = self._descriptors
        self._descriptors = OrderedDict()
        for descriptor in descriptors.values():
            os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptors", None):
            self.close()

    def _descriptor(self, shard: ShardEntry) -> int:
        """Returns an open file of the shard; closes the least recently used file at the limit."""
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
                    f"{path} has {size} bytes, its index says {shard.size}; restore the shard or "
                    "index again"
                )
            if len(self._descriptors) >= MAX_OPEN_SHARDS:
                _, oldest_descriptor = self._descriptors.popitem(last=False)
                os.close(oldest_descriptor)
        self._descriptors[shard.name] = descriptor
        return descriptor


@contextmanager
def local_copy(root: str, remote: RemoteOptions, name: str) -> Iterator[Path]:
    """Yields the path of a whole shard as a local file.

    A remote shard is copied to a private temporary file, which the end of the context removes.

    Raises:
        DataError: the shard is missing or empty.
        ReadError: the shard cannot be read.
    """
    if not is_url(root):
        yield Path(root, name)
        return
    with closing(open_storage(root, remote)) as storage:
        [status] = require_present(storage.status([name]))
        # The disk must hold one shard per worker.
        with tempfile.TemporaryDirectory(prefix="shard-") as folder:
            path = Path(folder) / "shard.tar"
            storage.fetch(name, status, path)
            yield path


def require_present(statuses: Iterable[ShardStatus | DataError]) -> Iterator[ShardStatus]:
    """Yields the statuses of `Storage.status` and raises its errors.

    Raises:
        DataError: a shard is missing or empty.
    """
    for status in statuses:
        if isinstance(status, DataError):
            raise status
        yield status


def open_storage(root: str, remote: RemoteOptions) -> Storage:
    """Returns the storage that a root names, a folder or a URL.

    Raises:
        DataError: a scheme without a driver, or plain http to another host.
    """
    if is_url(root):
        # Network libraries are imported only for shards on the network.
        from data.reading.remote import RemoteStorage

        return RemoteStorage(root, remote)
    return LocalStorage(root)
