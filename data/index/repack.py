"""Writes shards anew: every example whole and in one place, shards of the size that is asked for.

Headers are read first, from all shards; then members are copied. Memory holds the names of one shard, some 50 bytes per example
of all, and the names of what lies in several shards; of payloads it holds one at a time. A shard that has lost bytes is refused.
"""

import functools
import hashlib
import io
import itertools
import os
import tarfile
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

import numpy as np

from data.errors import DataError, ReadError
from data.files import named_when_whole, write_durably
from data.index.shard import index_file, merged_pairs, read_window
from data.index.tar_format import BLOCK, Member, ReadAt, TarFormatError, iter_members, shown, split_key

CHECKSUMS = "SHA256SUMS"
"""File next to the new shards, for `sha256sum -c`."""
_RECORD = 20 * BLOCK


class Run(NamedTuple):
    """Members of one example that follow each other: number of their shard, (new name, first byte, bytes) of each, extensions."""

    shard: int
    members: list[tuple[bytes, int, int]]
    extensions: set[str]


class Example(NamedTuple):
    """An example, and where its members lie."""

    key: bytes
    runs: list[Run]

    @property
    def extensions(self) -> frozenset[str]:
        return frozenset[str]().union(*(run.extensions for run in self.runs))


class Found(NamedTuple):
    """What one shard holds. The numbers are those of `Repacked`."""

    examples: list[Example]
    skipped: int
    joints: int


@dataclass
class Repacked:
    """What became of the members. All but `shards` and `examples` are zero where nothing was wrong.

    Attributes:
        shards, examples: written.
        joined: examples of these whose members lay in several places.
        skipped: members that belong to no example, and are not copied.
        joints: places where an archive ended and another began in one file.
    """

    shards: int = 0
    examples: int = 0
    joined: int = 0
    skipped: int = 0
    joints: int = 0


def repack(
    shards: Sequence[Path], output: Path, *, shard_bytes: int, prefix: str = "train", key_until_last_dot: bool = False
) -> Repacked:
    """Writes the examples of `shards`, in their order, to `output/PREFIX-00000.tar` and so on, with a file of checksums.

    Args:
        shards: local files, also such as an index refuses. Members of an example may lie in several of them.
        output: a folder that is new or empty.
        shard_bytes: the most that a new shard has; a longer example has a shard of its own.
        key_until_last_dot: a key ends at the last dot of a name, and is written without dots; see `tar_format.split_key`.

    Raises:
        DataError: a shard is damaged, a key joins several pairs, nobody can say which members are of one example, or the folder
            cannot be written.
        ReadError: a shard cannot be read.
    """
    if shard_bytes < _RECORD:
        raise DataError(f"a shard of {shard_bytes} bytes holds nothing; ask for at least {_RECORD}")
    try:
        output.mkdir(parents=True, exist_ok=True)
        if any(output.iterdir()):
            raise DataError(f"{output} is not empty; name a new folder for the shards")
        find = functools.partial(_find, shards, until_last_dot=key_until_last_dot)
        report = _write(shards, output, _split_over_shards(shards, find), shard_bytes, prefix, find)
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise DataError(f"cannot repack {shards[0]} into {output}: {error.strerror or error}") from error
    return report


def walk_joined(read_at: ReadAt, total_bytes: int) -> Iterator[Member | None]:
    """All members of archives that `cat` joined in one file; None between two of them.

    Where an archive ends before the file does, only the zeros that tar writes by itself are its end: two blocks, or padding to a
    whole record. A header and a payload of zeros may look like them.

    Raises:
        TarFormatError: bytes are lost.
    """
    archive = position = 0
    while True:
        try:
            for member in iter_members(read_at, total_bytes, needs_end=True, first=archive):
                yield member
                position = member.end_offset
            return
        except TarFormatError:
            following = position
            while following + BLOCK <= total_bytes and not any(read_at(following, BLOCK)):
                following += BLOCK
            is_end = following - position == 2 * BLOCK or (following - archive) % _RECORD == 0
            if not position < following < total_bytes or not is_end or position == archive:
                raise
        yield None
        archive = position = following


def _find(shards: Sequence[Path], number: int, until_last_dot: bool) -> Found:
    """The examples of one shard, in the order of their first members; see `repack` for what is refused."""
    path = shards[number]
    runs: dict[bytes, list[Run]] = {}
    skipped = joints = 0
    last: bytes | None = None
    try:
        with open(path, "rb", buffering=0) as file:
            for member in walk_joined(read_window(file.fileno()), os.fstat(file.fileno()).st_size):
                if member is None:
                    joints += 1
                    last = None  # What follows is another example, whatever its key.
                    continue
                split = split_key(member.name, until_last_dot) if member.is_regular else None
                if split is None:
                    skipped += 1
                    continue
                key, extension = split
                if key != last:
                    runs.setdefault(key, []).append(Run(number, [], set()))
                name = key + b"." + extension.encode() if until_last_dot else member.name
                runs[key][-1].members.append((name, member.payload_offset, member.size))
                runs[key][-1].extensions.add(extension)
                last = key
    except TarFormatError as error:
        behind = "its start" if last is None else f"a member of the key {shown(last)}"
        raise DataError(f"{path} is damaged behind {behind}: {error}; fetch it again, or leave it out") from error
    examples = []
    for key, places in runs.items():
        if merged := merged_pairs(str(path), key, Example(key, places).extensions):
            raise DataError(merged)
        if sum(len(run.extensions) for run in places) == len(Example(key, places).extensions):
            examples.append(Example(key, places))
        elif all(run.extensions == places[0].extensions for run in places):
            examples += [Example(key, [run]) for run in places]
        else:
            raise DataError(_ambiguous(key, [path]))
    return Found(examples, skipped, joints)


def _split_over_shards(shards: Sequence[Path], find: Callable[[int], Found]) -> dict[bytes, list[Run]]:
    """The members of all examples that lie in several shards, by their keys."""
    hashes: list[np.ndarray] = []
    sets: list[np.ndarray] = []
    counts: list[int] = []
    numbers: dict[frozenset[str], int] = {}
    for number in range(len(shards)):
        found = find(number)
        hashes.append(np.array([_key_hash(example.key) for example in found.examples], dtype=np.uint64))
        sets.append(
            np.array(
                [numbers.setdefault(example.extensions, len(numbers)) for example in found.examples], dtype=np.int32
            )
        )
        counts.append(len(found.examples))
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
    concerned = np.unique(shard_N[np.isin(hash_N, np.array(list(suspects), dtype=np.uint64))]).tolist()
    for number in concerned:
        for example in find(number).examples:
            if _key_hash(example.key) in suspects:
                apart.setdefault(example.key, []).extend(example.runs)
    for key, runs in apart.items():
        if merged := merged_pairs(str(shards[runs[0].shard]), key, Example(key, runs).extensions):
            raise DataError(merged)
        if sum(len(run.extensions) for run in runs) != len(Example(key, runs).extensions):
            raise DataError(_ambiguous(key, [shards[run.shard] for run in runs]))
    return apart


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
            for example in found.examples:
                if example.key not in apart:
                    yield example
                elif example.key not in written:
                    written.add(example.key)
                    yield Example(example.key, apart[example.key])

    examples = planned()
    waiting = next(examples, None)
    while waiting is not None:
        path = output / f"{prefix}-{report.shards:05d}.tar"
        extensions_of: dict[bytes, frozenset[str]] = {}
        last: bytes | None = None
        num_written = 0
        with (
            named_when_whole(path, 0o600) as temporary,
            tarfile.open(temporary, "w", encoding="utf-8", errors="surrogateescape") as tar,
        ):
            while waiting is not None:
                size = sum(_written_bytes(name, length) for run in waiting.runs for name, _, length in run.members)
                key, extensions = waiting.key, waiting.extensions
                is_full = -(-(tar.offset + size + 2 * BLOCK) // _RECORD) * _RECORD > shard_bytes
                # A key that comes back here would be taken for a part of the other example.
                if num_written and (is_full or key == last or extensions_of.get(key, extensions) != extensions):
                    break
                for run in waiting.runs:
                    with open(shards[run.shard], "rb") as file:
                        for name, start, length in run.members:
                            file.seek(start)
                            header, tar.format = _header(name, length)
                            tar.addfile(header, io.BytesIO(file.read(length)))
                extensions_of[key], last = extensions, key
                num_written += 1
                report.joined += len(waiting.runs) > 1
                waiting = next(examples, None)
        entry = index_file(path, path.name, str(path), "").entry
        if entry.count != num_written:
            raise ReadError(f"{path} does not hold what was written to it; look at the disk")
        sums.append(f"{entry.sha256}  {path.name}\n")
        report.shards += 1
        report.examples += entry.count
    if not report.shards:
        raise DataError(f"no example in {len(shards)} shards: {shards[0]} has no member with an extension")
    write_durably(output / CHECKSUMS, "".join(sums))
    return report


def _header(name: bytes, size: int) -> tuple[tarfile.TarInfo, Literal[0, 1]]:
    """A plain header and its format: as most writers of shards have it, so that equal examples stay equal bytes; GNU's for names
    that it cannot hold."""
    header = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    header.size = size
    try:
        header.tobuf(tarfile.USTAR_FORMAT, "utf-8", "surrogateescape")
    except ValueError:
        return header, 1  # tarfile.GNU_FORMAT
    return header, 0  # tarfile.USTAR_FORMAT


def _written_bytes(name: bytes, size: int) -> int:
    header, kind = _header(name, size)
    return len(header.tobuf(kind, "utf-8", "surrogateescape")) + -(-size // BLOCK) * BLOCK
