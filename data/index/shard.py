"""Indexes one shard: where its examples start and end, what their bytes add up to, and what the whole file hashes to.

A row of the index is 11 bytes: the first block (512 bytes each), CRC-32 of the extent, and in 24 bits the number of
blocks. Two passes, headers and then bytes; the second finds much of the file in the page cache.
"""

import hashlib
import os
import zlib
from collections import Counter
from collections.abc import Collection
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.index.tar_format import (
    BLOCK,
    IMAGE_EXTENSIONS,
    MACOS_MAGIC,
    OTHER_PICTURES,
    TEXTS,
    CutOffError,
    LongHeaderError,
    Member,
    TarFormatError,
    is_image,
    iter_members,
    shown,
    split_key,
)
from data.reading.records import ShardEntry

ROW = np.dtype([("first_block", "<u4"), ("crc32", "<u4"), ("low", "<u2"), ("high", "u1")])
MAX_BLOCKS = (1 << 24) - 1
"""Longer extents are stored with this length; no such example is ever read (data/reading/reader.py)."""

_HASH_CHUNK = 4 << 20


class Extents(NamedTuple):
    """What the headers say.

    Attributes:
        bounds_K2: bytes [start, end) of each example.
        keys: of the examples, in order.
        extensions: of their members.
        skipped: members that belong to no example.
    """

    bounds_K2: np.ndarray
    keys: list[bytes]
    extensions: list[frozenset[str]]
    skipped: int


class IndexedShard(NamedTuple):
    """One shard in an index: its manifest entry and its rows, ROW (count,)."""

    entry: ShardEntry
    rows_K: np.ndarray


def index_file(path: Path, name: str, location: str, version: str) -> IndexedShard:
    """Indexes one shard, independently of all others (so that shards can be done in parallel).

    Args:
        path: a local file.
        name: the shard's name in the index.
        location: what messages call it.
        version: what the storage says about its state.

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
        raise DataError(
            f"the shard {location} changed while it was indexed; try again when its writer is done"
        )
    keys = hashlib.sha256()
    for key in extents.keys:
        keys.update(len(key).to_bytes(8, "little") + key)
    blocks_K2 = extents.bounds_K2 // BLOCK
    if len(blocks_K2) and blocks_K2[-1, 0] >= 1 << 32:
        raise DataError(f"{location} is larger than 2 TiB; split it")
    num_blocks_K = np.minimum(blocks_K2[:, 1] - blocks_K2[:, 0], MAX_BLOCKS)
    rows_K = np.empty(len(blocks_K2), dtype=ROW)
    rows_K["first_block"], rows_K["crc32"] = blocks_K2[:, 0], crc32_K
    rows_K["low"], rows_K["high"] = num_blocks_K & 0xFFFF, num_blocks_K >> 16
    several = no_picture = no_text = 0
    for one, count in Counter(extents.extensions).items():
        pictures = sum(map(is_image, one))
        several += count * (pictures > 1)
        no_picture += count * (pictures == 0)
        no_text += count * (
            pictures > 0 and not any(name in TEXTS or name.endswith(".txt") for name in one)
        )
    entry = ShardEntry(
        name=name,
        size=after.st_size,
        sha256=sha256,
        count=len(extents.keys),
        keys_sha256=keys.hexdigest(),
        repeated_keys=len(extents.keys) - len(set(extents.keys)),
        skipped=extents.skipped,
        several_pictures=several,
        no_picture=no_picture,
        no_text=no_text,
        version=version,
    )
    return IndexedShard(entry, rows_K)


def walk_shard(path: Path, location: str) -> Extents:
    """Extents of all examples of a shard, from its headers alone.

    Raises:
        DataError: empty, compressed, no tar archive, cut off, with more than padding behind its end marker, or with the
            members of an example in two places, or of several under one key. The message names the command that mends it.
        OSError: it cannot be read.
    """
    bounds: list[tuple[int, int]] = []
    keys: list[bytes] = []
    sets: list[frozenset[str]] = []
    skipped = 0
    last: Member | None = None
    # Equal sets are one object, so that a shard's keys stay small.
    known_sets: dict[frozenset[str], frozenset[str]] = {}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise DataError(f"missing or empty shards: {location} is empty; fetch it again")
        try:
            for member in iter_members(file, size, needs_end=True):
                last = member
                split = split_key(member.name) if member.is_regular else None
                if split is None:
                    skipped += 1
                    continue
                key, extension = split
                if not keys or key != keys[-1]:
                    keys.append(key)
                    bounds.append((member.header_offset, 0))
                    sets.append(frozenset())
                bounds[-1] = (
                    bounds[-1][0],
                    member.end_offset,
                )  # What lies between members of one example belongs to it.
                grown = sets[-1] | {extension}
                sets[-1] = known_sets.setdefault(grown, grown)
        except TarFormatError as error:
            behind = f" (behind the member {shown(last.name)})" if last is not None else ""
            if isinstance(error, LongHeaderError):
                raise DataError(
                    f"{location} is not read: {error}{behind}; unpack it into a folder, and write that by tar --format=gnu "
                    "--sort=name"
                ) from error
            file.seek(0)
            if file.read(len(MACOS_MAGIC)) == MACOS_MAGIC:
                raise DataError(
                    f"{location} holds attributes that macOS keeps beside a file; remove it"
                ) from error
            is_cut = isinstance(error, CutOffError)
            problem = (
                "is cut off" if is_cut else "is no tar archive (or a compressed one) or damaged"
            )
            raise DataError(
                f"{location} {problem}: {error}{behind}; write or fetch it again"
            ) from error
    extensions_of: dict[bytes, frozenset[str]] = {}
    for key, one, (start, _) in zip(keys, sets, bounds, strict=True):
        if (before := extensions_of.setdefault(key, one)) != one:
            raise DataError(
                merged_pairs(location, key, before | one)
                or f"{location} has members of the key {shown(key)} in two places: others than before come back at byte "
                f"{start}; unpack it into a folder, and write that by tar --sort=name"
            )
    if merged := {one for one in set(sets) if merged_pairs(location, b"", one)}:
        those = [(key, one) for key, one in zip(keys, sets, strict=True) if one in merged]
        raise DataError(
            merged_pairs(f"{location}: {len(those)} of {len(keys)} examples are several", *those[0])
        )
    bounds_K2 = np.array(bounds, dtype=np.int64).reshape(-1, 2)
    return Extents(bounds_K2, keys, sets, skipped)


def merged_pairs(where: str, key: bytes, extensions: Collection[str]) -> str | None:
    """Says why the members of a key are several pairs: two pictures, each with a text of the same name.

    Args:
        where: what the message begins with.
        key: which key.
        extensions: of all its members.
    """
    split = [(extension, *extension.rpartition(".")[::2]) for extension in extensions]
    texts = next(
        (found for kind in TEXTS if (found := {stem for _, stem, last in split if last == kind})),
        set(),
    )
    texts |= {
        text.rpartition(".")[0] for text in texts if "." in text
    }  # a.1.0.txt and a.1.jpg.txt are of a.1.jpg
    pictures = IMAGE_EXTENSIONS | OTHER_PICTURES
    paired = {
        stem
        for name, stem, last in split
        if last in pictures and not texts.isdisjoint((name, stem))
    }
    if len(paired) < 2:
        return None
    return (
        f"{where}: the key {shown(key)} joins {len(paired)} pairs of picture and text, because a key ends at the first dot of a "
        "name; unpack it into a folder and import that by prepare.py import, where a name ends at its last dot, or rename them"
    )


def hash_file(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


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
