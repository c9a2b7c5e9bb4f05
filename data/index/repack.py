"""Writes shards anew: every example whole and in one place, shards of the size that is asked for, and nothing lost in silence.

Headers are read first, from all shards; then members are copied as they are, with their headers. Memory holds the names of
one shard, some 50 bytes per example of all, and the names of what lies in several shards; it never holds a payload. Where keys
end at the last dot, every member gets a new header, and these are held as well.

What cannot be read as a member (a header of zeros, a cut-off tail) is lost, and so may be the members of the examples next to it.
Both are refused, or left out and counted where the caller accepts that.
"""

import functools
import hashlib
import itertools
import os
import tarfile
import zlib
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO, NamedTuple

import numpy as np

from data.errors import DataError, ReadError
from data.files import named_when_whole, write_durably
from data.index.shard import index_file, merged_pairs, read_window
from data.index.tar_format import (
    BLOCK,
    Member,
    ReadAt,
    TarFormatError,
    has_checksum,
    iter_members,
    require_padding,
    shown,
    split_key,
)

CHECKSUMS = "SHA256SUMS"
"""File next to the new shards, for `sha256sum -c`."""
_RECORD = 20 * BLOCK
_SCAN_BYTES = 1 << 16
_JOINED = "archives are joined"
_COPY_BYTES = 4 << 20


class Gap(NamedTuple):
    """Bytes [start, end) in which no member can be read, and why."""

    start: int
    end: int
    reason: str


class Run(NamedTuple):
    """Members of one example that follow each other: number of their shard, what is written of each, extensions.

    What is written of a member is a new header, or nothing, and then the bytes [start, end) of its shard.
    """

    shard: int
    spans: list[tuple[bytes, int, int]]
    extensions: set[str]


class Example(NamedTuple):
    """An example, and where its members lie."""

    key: bytes
    runs: list[Run]

    @property
    def extensions(self) -> frozenset[str]:
        return frozenset[str]().union(*(run.extensions for run in self.runs))


class Found(NamedTuple):
    """What one shard holds; its examples next to lost bytes are `unsure`. The numbers are those of `Repacked`."""

    examples: list[Example]
    unsure: list[Example]
    skipped: int
    joints: int
    lost_bytes: int


@dataclass
class Repacked:
    """What became of the members. All but `shards` and `examples` are zero where nothing was wrong.

    Attributes:
        shards, examples: written.
        joined: examples of these whose members lay in several places.
        skipped: members that belong to no example, and are not copied.
        joints: places where an archive ended and another began in one file. A header and a payload of zeros look like one.
        lost_bytes: bytes in which no member could be read.
        left_out: examples next to lost bytes, which may have lost members.
    """

    shards: int = 0
    examples: int = 0
    joined: int = 0
    skipped: int = 0
    joints: int = 0
    lost_bytes: int = 0
    left_out: int = 0


def repack(
    shards: Sequence[Path],
    output: Path,
    *,
    shard_bytes: int,
    prefix: str = "train",
    accept_loss: bool = False,
    key_until_last_dot: bool = False,
) -> Repacked:
    """Writes the examples of `shards`, in their order, to `output/PREFIX-00000.tar` and so on, with a file of checksums.

    Args:
        shards: local files, also such as an index refuses. Members of an example may lie in several of them.
        output: a folder that is new or empty.
        shard_bytes: the most that a new shard has; a longer example has a shard of its own.
        accept_loss: goes on where bytes are lost, and leaves the examples next to them out.
        key_until_last_dot: a key ends at the last dot of a name, and is written without dots; see `tar_format.split_key`.

    Raises:
        DataError: bytes are lost and that was not accepted, a key joins several pairs, nobody can say which members are of one
            example, or the folder cannot be written.
        ReadError: a shard cannot be read, or another one than was written lies on the disk.
    """
    if shard_bytes < _RECORD:
        raise DataError(f"a shard of {shard_bytes} bytes holds nothing; ask for at least {_RECORD}")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise DataError(f"{output} is not empty; name a new folder for the shards")
        find = functools.partial(_find, shards, accept_loss=accept_loss, until_last_dot=key_until_last_dot)
        report = _write(shards, output, _split_over_shards(shards, find), shard_bytes, prefix, find)
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise DataError(f"cannot repack {shards[0]} into {output}: {error.strerror or error}") from error
    return report


def walk_leniently(read_at: ReadAt, total_bytes: int) -> Iterator[Member | Gap]:
    """All members that can be read, and what lies between them; the last end marker with its padding is no gap.

    Behind bytes that are no member it goes on at the next block that is a header.
    """
    archive = position = 0
    while position < total_bytes:
        try:
            for member in iter_members(read_at, total_bytes, needs_end=False, first=position):
                yield member
                position = member.end_offset
            yield Gap(position, total_bytes, "there is no end marker")
            return
        except TarFormatError as error:
            reason = str(error)
        following = _next_header(read_at, position + BLOCK, total_bytes)
        is_end = position > 0
        try:
            require_padding(read_at, position, following, archive)
        except TarFormatError:
            is_end = False
        if following < total_bytes:  # where an archive is joined to another, only what tar writes by itself is an end
            is_end &= (following - position) == 2 * BLOCK or (following - archive) % _RECORD == 0
        if not is_end:
            yield Gap(position, following, reason)
        elif following < total_bytes:
            yield Gap(position, following, _JOINED)
            archive = following
        position = following


def _next_header(read_at: ReadAt, first: int, total_bytes: int) -> int:
    for at in range(first, total_bytes - BLOCK + 1, _SCAN_BYTES):
        piece = read_at(at, min(_SCAN_BYTES, total_bytes - at))
        for start in range(0, len(piece) - BLOCK + 1, BLOCK):
            block = piece[start : start + BLOCK]
            try:
                if any(block[148:156]) and has_checksum(block, at + start):
                    return at + start
            except TarFormatError:
                continue
    return total_bytes


def _find(shards: Sequence[Path], number: int, accept_loss: bool, until_last_dot: bool) -> Found:
    """The examples of one shard, in the order of their first members; see `repack` for what is refused."""
    path = shards[number]
    runs: dict[bytes, list[Run]] = {}
    unsure: set[bytes] = set()
    skipped = joints = lost_bytes = 0
    last: bytes | None = None
    is_behind_gap = False
    with open(path, "rb", buffering=0) as file:
        for item in walk_leniently(read_window(file.fileno()), os.fstat(file.fileno()).st_size):
            if isinstance(item, Gap) and item.reason == _JOINED:
                joints += 1
                last = None  # What follows is another example, whatever its key.
                continue
            if isinstance(item, Gap):
                if not accept_loss:
                    behind = "its start" if last is None else f"a member of the key {shown(last)}"
                    raise DataError(
                        f"{path}: no member can be read in bytes {item.start} to {item.end} ({item.reason}), behind {behind}; "
                        "fetch the shard again, or give --accept_loss, which leaves out what is lost and the examples next to it"
                    )
                lost_bytes += item.end - item.start
                unsure |= {last} if last is not None else set()
                is_behind_gap = True
                continue
            split = split_key(item.name, until_last_dot) if item.is_regular else None
            if split is None:
                skipped += 1
                continue
            key, extension = split
            if is_behind_gap:
                unsure.add(key)
            if key != last:
                runs.setdefault(key, []).append(Run(number, [], set()))
            header, start = b"", item.header_offset
            if until_last_dot:
                new = tarfile.TarInfo((key + b"." + extension.encode()).decode("utf-8", "surrogateescape"))
                new.size, start = item.size, item.payload_offset
                header = new.tobuf(tarfile.GNU_FORMAT, "utf-8", "surrogateescape")
            runs[key][-1].spans.append((header, start, item.end_offset))
            runs[key][-1].extensions.add(extension)
            last, is_behind_gap = key, False
    examples = []
    for key, places in runs.items():
        if key in unsure:
            continue
        if merged := merged_pairs(str(path), key, Example(key, places).extensions):
            raise DataError(merged)
        if sum(len(run.extensions) for run in places) == len(Example(key, places).extensions):
            examples.append(Example(key, places))
        elif all(run.extensions == places[0].extensions for run in places):
            examples += [Example(key, [run]) for run in places]
        else:
            raise DataError(_ambiguous(key, [path]))
    return Found(examples, [Example(key, runs[key]) for key in unsure], skipped, joints, lost_bytes)


def _split_over_shards(shards: Sequence[Path], find: Callable[[int], Found]) -> dict[bytes, list[Run]]:
    """The members of all examples that lie in several shards, by their keys; none of one that is next to lost bytes somewhere."""
    hashes: list[np.ndarray] = []
    sets: list[np.ndarray] = []
    counts: list[int] = []
    numbers: dict[frozenset[str], int] = {}
    for number in range(len(shards)):
        found = find(number)
        examples = found.examples + found.unsure
        hashes.append(np.array([_key_hash(example.key) for example in examples], dtype=np.uint64))
        sets.append(
            np.array([numbers.setdefault(example.extensions, len(numbers)) for example in examples], dtype=np.int32)
        )
        counts.append(len(examples))
    hash_N, set_N = np.concatenate(hashes), np.concatenate(sets)
    extensions = list(numbers)
    shard_N = np.repeat(np.arange(len(shards), dtype=np.int32), counts)
    order = np.argsort(hash_N, kind="stable")
    hash_N, set_N, shard_N = hash_N[order], set_N[order], shard_N[order]
    # A key that every shard counts anew comes back with extensions that it had before; parts have none in common.
    repeats = np.flatnonzero((hash_N[1:] == hash_N[:-1]) & (shard_N[1:] != shard_N[:-1]) & (set_N[1:] != set_N[:-1]))
    suspects: set[int] = set()
    for again in np.unique(hash_N[repeats]):
        first, stop = (int(np.searchsorted(hash_N, again, side=side)) for side in ("left", "right"))
        of_key = np.unique(set_N[first:stop]).tolist()
        if any(not extensions[one] & extensions[two] for one, two in itertools.combinations(of_key, 2)):
            suspects.add(int(again))
    apart: dict[bytes, list[Run]] = {}
    unsure: set[bytes] = set()
    concerned = np.unique(shard_N[np.isin(hash_N, np.array(list(suspects), dtype=np.uint64))]).tolist()
    for number in concerned:
        found = find(number)
        unsure |= {example.key for example in found.unsure}
        for example in found.examples + found.unsure:
            if _key_hash(example.key) in suspects:
                apart.setdefault(example.key, []).extend(example.runs)
    for key, runs in apart.items():
        if merged := merged_pairs(str(shards[runs[0].shard]), key, Example(key, runs).extensions):
            raise DataError(merged)
        if sum(len(run.extensions) for run in runs) != len(Example(key, runs).extensions):
            raise DataError(_ambiguous(key, [shards[run.shard] for run in runs]))
    return {key: [] if key in unsure else runs for key, runs in apart.items()}


def _key_hash(key: bytes) -> int:
    """64 bits."""
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def _ambiguous(key: bytes, paths: Sequence[Path]) -> str:
    names = ", ".join(map(str, dict.fromkeys(paths[:5])))
    return (
        f"{names}: the key {shown(key)} comes back with parts of an example, and nothing says which members belong together; "
        "give one command those shards that belong together, or rename members"
    )


def _write(
    shards: Sequence[Path],
    output: Path,
    apart: dict[bytes, list[Run]],
    shard_bytes: int,
    prefix: str,
    find: Callable[[int], Found],
) -> Repacked:
    report = Repacked()
    sums: list[str] = []

    def planned() -> Iterator[Example]:
        written: set[bytes] = set()
        for number in range(len(shards)):
            found = find(number)
            report.skipped += found.skipped
            report.joints += found.joints
            report.lost_bytes += found.lost_bytes
            report.left_out += len([example for example in found.unsure if example.key not in apart])
            for example in found.examples:
                if example.key not in apart:
                    yield example
                elif example.key not in written:
                    written.add(example.key)
                    if apart[example.key]:
                        yield Example(example.key, apart[example.key])
                    else:
                        report.left_out += 1

    examples = planned()
    waiting = next(examples, None)
    while waiting is not None:
        path = output / f"{prefix}-{report.shards:05d}.tar"
        crc32s: list[int] = []
        extensions_of: dict[bytes, frozenset[str]] = {}
        last: bytes | None = None
        with named_when_whole(path, 0o600) as temporary, open(temporary, "wb") as file:
            while waiting is not None:
                size = sum(len(header) + end - start for run in waiting.runs for header, start, end in run.spans)
                key, extensions = waiting.key, waiting.extensions
                is_full = file.tell() + size + 2 * BLOCK > shard_bytes
                # A key that comes back here would be taken for a part of the other example.
                if crc32s and (is_full or key == last or extensions_of.get(key, extensions) != extensions):
                    break
                crc32s.append(_copy(shards, waiting, file))
                extensions_of[key], last = extensions, key
                report.joined += len(waiting.runs) > 1
                waiting = next(examples, None)
            file.write(bytes(2 * BLOCK))
        entry, rows_K, *_ = index_file(path, path.name, str(path), "")
        if rows_K["crc32"].tolist() != crc32s:
            raise ReadError(f"{path} does not hold what was written to it; look at the disk")
        sums.append(f"{entry.sha256}  {path.name}\n")
        report.shards += 1
        report.examples += entry.count
    if not report.shards:
        raise DataError(f"no example in {len(shards)} shards: {shards[0]} has no member with an extension")
    write_durably(output / CHECKSUMS, "".join(sums))
    return report


def _copy(shards: Sequence[Path], example: Example, to: BinaryIO) -> int:
    """Copies the members of an example, with new headers where there are some; returns the CRC-32 of its bytes."""
    crc32 = 0
    for run in example.runs:
        with open(shards[run.shard], "rb", buffering=0) as file:
            for header, start, end in run.spans:
                crc32 = zlib.crc32(header, crc32)
                to.write(header)
                while start < end:
                    piece = os.pread(file.fileno(), min(_COPY_BYTES, end - start), start)
                    if not piece:
                        raise ReadError(f"{shards[run.shard]} shrank while it was read")
                    crc32 = zlib.crc32(piece, crc32)
                    to.write(piece)
                    start += len(piece)
    return crc32
