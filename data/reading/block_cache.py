"""A bounded local cache of examples that were read over the network.

What lies in it tells who was sampled lately, so it is private (0700). A block is used only if its bytes have the
checksum in the index, so a torn, rotten or planted file costs a request and nothing else. Many processes may share one.
"""

import hashlib
import os
import warnings
import zlib
from collections import Counter
from pathlib import Path

from data.errors import DataError
from data.reading.records import ReadRequest

_NUM_FOLDERS = 64
_SLACK = 8
"""A folder is measured again after every 1/8 of its part; what is above 7/8 of it then goes, oldest first."""


class BlockCache:
    """Files named by what they hold, in folders of which each is bounded by itself."""

    def __init__(self, folder: Path, max_bytes: int):
        """
        Raises:
            DataError: the folder cannot be made or is not ours.
        """
        self._folder = Path(folder).expanduser()
        self._max_bytes = max_bytes // _NUM_FOLDERS
        self._unmeasured: Counter[Path] = Counter()
        self._is_writable = True
        try:
            self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
            self._folder.chmod(0o700)
        except OSError as error:
            raise DataError(f"cannot use the cache folder {folder}: {error.strerror or error}") from error

    def get(self, request: ReadRequest) -> bytes | None:
        """The bytes of a request if they are here and whole."""
        try:
            data = self._path(request).read_bytes()
        except OSError:
            return None  # not here, or just evicted
        return data if len(data) == request.length and zlib.crc32(data) == request.crc32 else None

    def put(self, request: ReadRequest, data: bytes) -> None:
        """Keeps the bytes for later. A full or broken disk turns the cache off, with a warning; training goes on."""
        path = self._path(request)
        if not self._is_writable or len(data) > self._max_bytes // _SLACK:
            return
        try:
            path.parent.mkdir(mode=0o700, exist_ok=True)
            if path.parent not in self._unmeasured or self._unmeasured[path.parent] > self._max_bytes // _SLACK:
                _shrink(path.parent, self._max_bytes * (_SLACK - 1) // _SLACK - len(data))
                self._unmeasured[path.parent] = 0
            temporary = path.with_name(f".{path.name}.{os.getpid()}")
            with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            temporary.replace(path)
            self._unmeasured[path.parent] += len(data)
        except OSError as error:
            self._is_writable = False
            warnings.warn(
                f"the cache {self._folder} cannot be written ({error.strerror}); going on without", stacklevel=2
            )

    def _path(self, request: ReadRequest) -> Path:
        what = f"{request.shard.sha256}:{request.offset}:{request.length}"
        name = hashlib.sha256(what.encode()).hexdigest()
        return self._folder / f"{int(name[:4], 16) % _NUM_FOLDERS:02d}" / name[:40]


def _shrink(folder: Path, max_bytes: int) -> None:
    """Removes the oldest files until the rest fits; other processes may be doing the same."""
    files = []
    for entry in os.scandir(folder):
        try:
            status = entry.stat()
        except FileNotFoundError:
            continue
        files.append((status.st_mtime_ns, status.st_size, entry.path))
    total = sum(size for _, size, _ in files)
    for _, size, path in sorted(files):
        if total <= max_bytes:
            return
        Path(path).unlink(missing_ok=True)
        total -= size
