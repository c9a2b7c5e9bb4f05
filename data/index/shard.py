"""Indexes one shard: start and end of its examples, their checksums, and the hash of the file.

A row of the index is 11 bytes: the first block (512 bytes each), the CRC-32 of the extent, and in
24 bits the number of blocks. The first pass reads headers and the second all bytes, many of them
from the page cache.
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
    quoted_name,
    split_key,
)
from data.reading.records import ShardEntry

ROW = np.dtype([("first_block", "<u4"), ("crc32", "<u4"), ("low", "<u2"), ("high", "u1")])
MAX_BLOCKS = (1 << 24) - 1
"""Stored length of longer extents; such an example is never read (data/reading/reader.py)."""

_HASH_CHUNK = 4 << 20


class Extents(NamedTuple):
    """The examples of a shard, as its headers describe them.

    Attributes:
        bounds_K2: bytes [start, end) of each example.
        keys: of the examples, in order.
        extensions: of each example's members.
        skipped: members that belong to no example.
    """

    bounds_K2: np.ndarray
    keys: list[bytes]
    extensions: list[frozenset[str]]
    skipped: int


class IndexedShard(NamedTuple):
    """A shard in an index: its manifest entry and its rows, ROW (count,)."""

    entry: ShardEntry
    rows_K: np.ndarray


def index_file(path: Path, name: str, location: str, version: str) -> IndexedShard:
    """Indexes one shard, independently of all others, so that shards can be indexed in parallel.

    Args:
        path: a local file.
        name: the shard's name in the index.
        location: the shard's name in messages.
        version: its state; see `ShardEntry.version`.

    Raises:
        DataError: the shard cannot be read, is not a whole tar archive, has members of an example
            in two places, or changes meanwhile.
    """
    try:
        first_stat = path.stat()
        extents = walk_shard(path, location)
        crc32_K, sha256 = _checksums(path, extents.bounds_K2)
        last_stat = path.stat()
    except OSError as error:
        raise DataError(f"cannot read the shard {location}: {error.strerror or error}") from error
    has_new_size = first_stat.st_size != last_stat.st_size
    if has_new_size or first_stat.st_mtime_ns != last_stat.st_mtime_ns:
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
    rows_K["first_block"] = blocks_K2[:, 0]
    rows_K["crc32"] = crc32_K
    rows_K["low"] = num_blocks_K & 0xFFFF
    rows_K["high"] = num_blocks_K >> 16
    several = no_picture = no_text = 0
    for extensions, count in Counter(extents.extensions).items():
        pictures = sum(map(is_image, extensions))
        has_text = any(name in TEXTS or name.endswith(".txt") for name in extensions)
        several += count * (pictures > 1)
        no_picture += count * (pictures == 0)
        no_text += count * (pictures > 0 and not has_text)
    entry = ShardEntry(
        name=name,
        size=last_stat.st_size,
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
    """Returns the extents of all examples of a shard, from its headers alone.

    Raises:
        DataError: the shard is empty, compressed, not a tar archive or cut off, has more than
            padding behind its end marker, members of an example in two places, or several examples
            under one key. The message names the command that mends it.
        OSError: the shard cannot be read.
    """
    bounds: list[tuple[int, int]] = []
    keys: list[bytes] = []
    sets: list[frozenset[str]] = []
    skipped = 0
    last_member: Member | None = None
    # Equal sets are one object, so that the sets of a large shard take little memory.
    unique_sets: dict[frozenset[str], frozenset[str]] = {}
    with open(path, "rb") as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise DataError(f"missing or empty shards: {location} is empty; fetch it again")
        try:
            for member in iter_members(file, size, needs_end=True):
                last_member = member
                key_and_extension = split_key(member.name) if member.is_regular else None
                if key_and_extension is None:
                    skipped += 1
                    continue
                key, extension = key_and_extension
                if not keys or key != keys[-1]:
                    keys.append(key)
                    bounds.append((member.header_offset, 0))
                    sets.append(frozenset())
                # Bytes between two members of an example are part of its extent.
                start, _ = bounds[-1]
                bounds[-1] = (start, member.end_offset)
                extensions = sets[-1] | {extension}
                sets[-1] = unique_sets.setdefault(extensions, extensions)
        except TarFormatError as error:
            place = ""
            if last_member is not None:
                place = f" (behind the member {quoted_name(last_member.name)})"
            if isinstance(error, LongHeaderError):
                raise DataError(
                    f"{location} is not read: {error}{place}; unpack it into a folder, and write "
                    "that by tar --format=gnu --sort=name"
                ) from error
            file.seek(0)
            if file.read(len(MACOS_MAGIC)) == MACOS_MAGIC:
                raise DataError(
                    f"{location} holds attributes that macOS keeps beside a file; remove it"
                ) from error
            problem = "is damaged, compressed or not a tar archive"
            if isinstance(error, CutOffError):
                problem = "is cut off"
            raise DataError(
                f"{location} {problem}: {error}{place}; write or fetch it again"
            ) from error
    extensions_of: dict[bytes, frozenset[str]] = {}
    for key, extensions, (start, _) in zip(keys, sets, bounds, strict=True):
        first_extensions = extensions_of.setdefault(key, extensions)
        if first_extensions == extensions:
            continue
        problem = merged_pairs(location, key, first_extensions | extensions) or (
            f"{location} has members of the key {quoted_name(key)} in two places: others than "
            f"before come back at byte {start}; unpack it into a folder, and write that by tar "
            "--sort=name"
        )
        raise DataError(problem)
    merged_sets: set[frozenset[str]] = set()
    for extensions in set(sets):
        if merged_pairs(location, b"", extensions):
            merged_sets.add(extensions)
    if merged_sets:
        merged_examples = [
            (key, extensions)
            for key, extensions in zip(keys, sets, strict=True)
            if extensions in merged_sets
        ]
        first_key, first_extensions = merged_examples[0]
        summary = f"{location}: {len(merged_examples)} of {len(keys)} examples are several"
        raise DataError(merged_pairs(summary, first_key, first_extensions))
    bounds_K2 = np.array(bounds, dtype=np.int64).reshape(-1, 2)
    return Extents(bounds_K2, keys, sets, skipped)


def merged_pairs(summary: str, key: bytes, extensions: Collection[str]) -> str | None:
    """Returns the problem if the members of a key are several pairs, else None.

    A pair is a picture with a text of the same name.

    Args:
        summary: the start of the message.
        key: the key that the members share.
        extensions: of all its members.
    """
    parts = [(extension, *extension.rpartition(".")[::2]) for extension in extensions]
    # Names of the texts, of the first kind of text that the key has.
    texts: set[str] = set()
    for kind in TEXTS:
        texts = {stem for _, stem, suffix in parts if suffix == kind}
        if texts:
            break
    # a.1.0.txt and a.1.jpg.txt are texts of a.1.jpg.
    texts |= {text.rpartition(".")[0] for text in texts if "." in text}
    paired_stems: set[str] = set()
    for extension, stem, suffix in parts:
        is_picture = suffix in IMAGE_EXTENSIONS or suffix in OTHER_PICTURES
        if is_picture and (extension in texts or stem in texts):
            paired_stems.add(stem)
    if len(paired_stems) < 2:
        return None
    return (
        f"{summary}: the key {quoted_name(key)} joins {len(paired_stems)} pairs of picture and "
        "text, because a key ends at the first dot of a name; unpack it into a folder and import "
        "that by prepare.py import, where a name ends at its last dot, or rename them"
    )


def hash_file(path: Path) -> str:
    """Returns the SHA-256 of a file, in hex."""
    with open(path, "rb", buffering=0) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _checksums(path: Path, bounds_K2: np.ndarray) -> tuple[np.ndarray, str]:
    """Returns the CRC-32 of each extent and the SHA-256 of the file, from one pass over its bytes.

    The extents are in order and do not overlap.
    """
    digest = hashlib.sha256()
    crc32_K = np.zeros(len(bounds_K2), dtype=np.uint32)
    no_extent = (0, (0, 0))
    bounds = iter(enumerate(bounds_K2.tolist()))
    index, (start, end) = next(bounds, no_extent)
    crc = 0
    position = 0
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
            view = memoryview(chunk)
            limit = position + len(chunk)
            while start < end and start < limit:
                crc = zlib.crc32(view[max(start - position, 0) : end - position], crc)
                # The rest of this extent is in the next chunk.
                if end > limit:
                    break
                crc32_K[index] = crc
                crc = 0
                index, (start, end) = next(bounds, no_extent)
            position = limit
    return crc32_K, digest.hexdigest()
