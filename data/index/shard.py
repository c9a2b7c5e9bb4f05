"""Indexes one shard: where its examples start and end, what their bytes add up to, and what the whole file hashes to.

A row of the index is 11 bytes: the first block (512 bytes each), CRC-32 of the extent, and in 24 bits the number of
blocks (20) and the length class of the caption (4). Two passes, headers and then bytes; the second finds much of the file
in the page cache.
"""

import hashlib
import os
import zlib
from collections.abc import Callable, Iterator
from itertools import groupby
from operator import itemgetter
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.index.tar_format import BLOCK, CutOffError, Member, TarFormatError, iter_members, split_key
from data.reading.records import ShardEntry

ROW = np.dtype([("first_block", "<u4"), ("crc32", "<u4"), ("low", "<u2"), ("high", "u1")])
MAX_BLOCKS = (1 << 20) - 1
"""Longer extents are stored with this length; no such example is ever read (data/reading/reader.py)."""
CAPTION_CLASS_BYTES = 16
MAX_CAPTION_CLASS = 15

_HASH_CHUNK = 4 << 20
_WINDOW = 1 << 16


class Extents(NamedTuple):
    """What the headers say: bytes [start, end) and caption bytes of each example, the keys in order, members passed over."""

    bounds_K2: np.ndarray
    caption_bytes_K: np.ndarray
    keys: list[bytes]
    skipped: int


def index_file(path: Path, name: str, location: str, version: str) -> tuple[ShardEntry, np.ndarray]:
    """Indexes one shard, independently of all others (so that shards can be done in parallel).

    Args:
        path: a local file.
        name: the shard's name in the index.
        location: what messages call it.
        version: what the storage says about its state.

    Returns:
        Its manifest entry and its rows, ROW (count,).

    Raises:
        DataError: it cannot be read, is no whole tar archive, keeps members of an example apart, or changes meanwhile.
    """
    try:
        before = path.stat()
        extents = walk_shard(path, location)
        crc32_K, sha256 = _checksums(path, extents.bounds_K2)
        after = path.stat()
    except OSError as error:
        raise DataError(f"cannot read the shard {location}: {error.strerror or error}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"the shard {location} changed while it was indexed; try again when its writer is done")
    keys = hashlib.sha256()
    for key in extents.keys:
        keys.update(len(key).to_bytes(8, "little") + key)
    blocks_K2 = extents.bounds_K2 // BLOCK
    if len(blocks_K2) and blocks_K2[-1, 0] >= 1 << 32:
        raise DataError(f"{location} is larger than 2 TiB; split it")
    num_blocks_K = np.minimum(blocks_K2[:, 1] - blocks_K2[:, 0], MAX_BLOCKS)
    class_K = np.minimum(-(-extents.caption_bytes_K // CAPTION_CLASS_BYTES), MAX_CAPTION_CLASS)
    packed_K = num_blocks_K | class_K << 20
    rows_K = np.empty(len(blocks_K2), dtype=ROW)
    rows_K["first_block"], rows_K["crc32"] = blocks_K2[:, 0], crc32_K
    rows_K["low"], rows_K["high"] = packed_K & 0xFFFF, packed_K >> 16
    entry = ShardEntry(
        name=name,
        size=after.st_size,
        sha256=sha256,
        count=len(extents.keys),
        keys_sha256=keys.hexdigest(),
        repeated_keys=len(extents.keys) - len(set(extents.keys)),
        skipped=extents.skipped,
        version=version,
    )
    return entry, rows_K


def walk_shard(path: Path, location: str) -> Extents:
    """Extents of all examples of a shard, from its headers alone.

    Raises:
        DataError: empty, compressed, no tar archive, cut off, with more than padding behind its end marker, or with the
            members of an example in two places.
        OSError: it cannot be read.
    """
    bounds: list[tuple[int, int]] = []
    caption_bytes: list[int] = []
    keys: list[bytes] = []
    skipped = 0
    extensions_of: dict[bytes, frozenset[str]] = {}
    known_sets: dict[
        frozenset[str], frozenset[str]
    ] = {}  # equal sets are one object, so that a shard's keys stay small

    def parts(descriptor: int, size: int) -> Iterator[tuple[bytes, str, Member]]:
        nonlocal skipped
        for member in iter_members(_windowed(descriptor), size, needs_end=True):
            split = split_key(member.name) if member.is_regular else None
            if split is None:
                skipped += 1
            else:
                yield *split, member

    with open(path, "rb", buffering=0) as file:
        descriptor, size = file.fileno(), os.fstat(file.fileno()).st_size
        if size == 0:
            raise DataError(f"missing or empty shards: {location} is empty; fetch it again")
        for prefix, tool in ((b"\x1f\x8b", "gunzip"), (b"\x28\xb5\x2f\xfd", "unzstd"), (b"\xfd7zXZ", "unxz")):
            if os.pread(descriptor, 6, 0).startswith(prefix):
                raise DataError(f"{location} is compressed, which allows no random access; unpack it with {tool}")
        try:
            for key, run in groupby(parts(descriptor, size), key=itemgetter(0)):
                extensions: set[str] = set()
                start = end = caption = 0
                for _, extension, member in run:
                    start, end = start if extensions else member.header_offset, member.end_offset
                    extensions.add(extension)
                    if caption == 0 and (extension.endswith("txt") or extension.endswith("json")):
                        caption = member.size
                same = known_sets.setdefault(frozenset(extensions), frozenset(extensions))
                if extensions_of.setdefault(key, same) != same:
                    raise DataError(
                        f"{location} has members of the key {key.decode('utf-8', 'backslashreplace')[:100]!r} in two places: "
                        f"others than before come back at byte {start}; unpack it and write it with each key's members "
                        "together, as tar --sort=name does"
                    )
                keys.append(key)
                bounds.append((start, end))
                caption_bytes.append(caption)
        except TarFormatError as error:
            problem = "is cut off" if isinstance(error, CutOffError) else "is no tar archive or is damaged"
            raise DataError(f"{location} {problem}: {error}; write or fetch it again") from error
    bounds_K2 = np.array(bounds, dtype=np.int64).reshape(-1, 2)
    return Extents(bounds_K2, np.array(caption_bytes, dtype=np.int64), keys, skipped)


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    return _checksums(path, np.empty((0, 2), dtype=np.int64))[1]


def _windowed(descriptor: int) -> Callable[[int, int], bytes]:
    """Reads small neighbouring pieces through one larger window."""
    window, start = b"", 0

    def read_at(offset: int, length: int) -> bytes:
        nonlocal window, start
        if not start <= offset <= offset + length <= start + len(window):
            window, start = os.pread(descriptor, max(length, _WINDOW), offset), offset
        piece = window[offset - start : offset - start + length]
        if len(piece) != length:
            raise TarFormatError("it shrank while it was read")
        return piece

    return read_at


def _checksums(path: Path, bounds_K2: np.ndarray) -> tuple[np.ndarray, str]:
    """CRC-32 of each extent (in order, not overlapping) and SHA-256 of the file, in one pass over its bytes."""
    digest = hashlib.sha256()
    crc32_K = np.zeros(len(bounds_K2), dtype=np.uint32)
    bounds = iter(enumerate(bounds_K2.tolist()))
    index, (start, end) = next(bounds, (0, (0, 0)))
    crc = position = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
            view, limit = memoryview(chunk), position + len(chunk)
            while start < end and start < limit:
                crc = zlib.crc32(view[max(start - position, 0) : end - position], crc)
                if end > limit:
                    break
                crc32_K[index] = crc
                crc, (index, (start, end)) = 0, next(bounds, (0, (0, 0)))
            position = limit
    return crc32_K, digest.hexdigest()
