"""Shards on a file system: one `pread` per example, announced ahead so that the kernel reads while we decode."""

import os
import stat
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

from data.errors import DataError, ReadError
from data.reading.records import ReadRequest, ShardEntry, ShardStatus, check_crc

MAX_OPEN_SHARDS = 64


class LocalStorage:
    """See `data.reading.storage.Storage`. Survives a fork: another process opens its own files."""

    def __init__(self, root: str, *, max_open_shards: int = MAX_OPEN_SHARDS):
        self.root = root
        self._max_open = max_open_shards
        self._descriptors: OrderedDict[str, int] = OrderedDict()
        self._owner = os.getpid()

    def status(self, names: Sequence[str]) -> Iterator[ShardStatus | DataError]:
        for name in names:
            path = self._path(name)
            try:
                status = path.stat()
            except OSError as error:
                yield DataError(f"missing or empty shards: {path}: {error.strerror or error}")
                continue
            if not stat.S_ISREG(status.st_mode) or status.st_size == 0:
                yield DataError(f"missing or empty shards: {path} is empty or no file; fetch it again")
            else:
                yield ShardStatus(status.st_size, f"mtime_ns:{status.st_mtime_ns}")

    @contextmanager
    def local_copy(self, name: str) -> Iterator[Path]:
        yield self._path(name)

    def read_all(self, requests: Sequence[ReadRequest]) -> Iterator[bytes]:
        for request in requests:
            self._announce(request)
        for request in requests:
            yield check_crc(request, self._pread(request), str(self._path(request.shard.name)))

    def close(self) -> None:
        descriptors, self._descriptors = self._descriptors, OrderedDict()
        if self._owner == os.getpid():
            for descriptor in descriptors.values():
                os.close(descriptor)

    def __del__(self) -> None:
        if getattr(self, "_descriptors", None):
            self.close()

    def _path(self, name: str) -> Path:
        return Path(self.root) / name

    def _announce(self, request: ReadRequest) -> None:
        """Starts reading without waiting; some systems have no such call."""
        if hasattr(os, "posix_fadvise"):
            descriptor = self._descriptor(request.shard)
            os.posix_fadvise(descriptor, request.offset, request.length, os.POSIX_FADV_WILLNEED)

    def _pread(self, request: ReadRequest) -> bytes:
        """Exactly `length` bytes; a file system may return them in pieces."""
        pieces: list[bytes] = []
        missing = request.length
        path = self._path(request.shard.name)
        descriptor = self._descriptor(request.shard)
        while missing:
            try:
                piece = os.pread(descriptor, missing, request.offset + request.length - missing)
            except OSError as error:
                raise ReadError(f"cannot read {path} at byte {request.offset}: {error.strerror or error}") from error
            if not piece:
                raise ReadError(
                    f"short read of {path} at byte {request.offset}: {missing} of {request.length} bytes are missing"
                )
            pieces.append(piece)
            missing -= len(piece)
        return pieces[0] if len(pieces) == 1 else b"".join(pieces)

    def _descriptor(self, shard: ShardEntry) -> int:
        """An open file for the shard, the least recently used one closed first."""
        if self._owner != os.getpid():
            self._descriptors, self._owner = OrderedDict(), os.getpid()
        descriptor = self._descriptors.pop(shard.name, None)
        if descriptor is None:
            descriptor = self._open(shard)
            if len(self._descriptors) >= self._max_open:
                os.close(self._descriptors.popitem(last=False)[1])
        self._descriptors[shard.name] = descriptor
        return descriptor

    def _open(self, shard: ShardEntry) -> int:
        path = self._path(shard.name)
        try:
            descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        except OSError as error:
            raise ReadError(f"cannot read {path}: {error.strerror or error}") from error
        size = os.fstat(descriptor).st_size
        if size != shard.size:
            os.close(descriptor)
            raise ReadError(f"{path} has {size} bytes, its index says {shard.size}; restore the shard or index again")
        return descriptor
