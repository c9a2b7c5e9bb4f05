"""Writes shards anew: every example whole and in one place, shards of the size that is asked for.

Headers are read first, from all shards; then members are copied. Memory holds the names of one shard; of payloads it holds one at
a time. A shard that has lost bytes is refused. Halves of a pair in two shards stay two examples: keys are compared within a shard
alone, since many writers count them anew in every shard.
"""

import io
import os
import tarfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal, NamedTuple

from data.errors import DataError, ReadError
from data.files import named_when_whole, write_durably
from data.index.shard import index_file, merged_pairs
from data.index.tar_format import BLOCK, TarFormatError, iter_members, shown, split_key

CHECKSUMS = "SHA256SUMS"
"""File next to the new shards, for `sha256sum -c`."""
_RECORD = 20 * BLOCK


class Run(NamedTuple):
    """Members of one key that follow each other: (new name, first byte, bytes) of each, and their extensions."""

    members: list[tuple[bytes, int, int]]
    extensions: set[str]


class Example(NamedTuple):
    """An example of a shard: its key, the runs of members that it is made of, and the extensions of all."""

    path: Path
    key: bytes
    runs: list[Run]
    extensions: frozenset[str]


@dataclass
class Repacked:
    """What became of the members. All but `shards` and `examples` are zero where nothing was wrong.

    Attributes:
        shards, examples: written.
        joined: examples of these whose members lay in several places.
        skipped: members that belong to no example, and are not copied.
    """

    shards: int = 0
    examples: int = 0
    joined: int = 0
    skipped: int = 0


def repack(shards: Sequence[Path], output: Path, *, shard_bytes: int, key_until_last_dot: bool = False) -> Repacked:
    """Writes the examples of `shards`, in their order, to `output/train-00000.tar` and so on, with a file of checksums.

    Args:
        shards: local files, also such as an index refuses.
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
        report = Repacked()
        for path in shards:  # A bad shard is refused here, before anything is written.
            report.skipped += _examples_of(path, key_until_last_dot)[1]
        sums: list[str] = []
        examples = (example for path in shards for example in _examples_of(path, key_until_last_dot)[0])
        waiting = next(examples, None)
        while waiting is not None:
            target = output / f"train-{report.shards:05d}.tar"
            extensions_of: dict[bytes, frozenset[str]] = {}
            last: bytes | None = None
            num_written = 0
            with (
                named_when_whole(target, 0o600) as temporary,
                tarfile.open(temporary, "w", encoding="utf-8", errors="surrogateescape") as tar,
            ):
                while waiting is not None:
                    path, key, runs, extensions = waiting
                    size = sum(_header(name, length)[2] for run in runs for name, _, length in run.members)
                    is_full = -(-(tar.offset + size + 2 * BLOCK) // _RECORD) * _RECORD > shard_bytes
                    # A key that comes back here would be taken for a part of the other example.
                    if num_written and (is_full or key == last or extensions_of.get(key, extensions) != extensions):
                        break
                    with open(path, "rb") as file:
                        for name, start, length in (member for run in runs for member in run.members):
                            file.seek(start)
                            header, tar.format, _ = _header(name, length)
                            tar.addfile(header, io.BytesIO(file.read(length)))
                    extensions_of[key], last = extensions, key
                    num_written += 1
                    report.joined += len(runs) > 1
                    waiting = next(examples, None)
            entry = index_file(target, target.name, str(target), "").entry  # read again as an index does
            if entry.count != num_written:
                raise ReadError(f"{target} does not hold what was written to it; look at the disk")
            sums.append(f"{entry.sha256}  {target.name}\n")
            report.shards += 1
            report.examples += entry.count
        if not report.shards:
            raise DataError(f"no example in {len(shards)} shards: {shards[0]} has no member with an extension")
        write_durably(output / CHECKSUMS, "".join(sums))
    except OSError as error:
        if isinstance(error, ReadError):
            raise
        raise DataError(f"cannot repack {shards[0]} into {output}: {error.strerror or error}") from error
    return report


def _examples_of(path: Path, until_last_dot: bool) -> tuple[list[Example], int]:
    """The examples of one shard in the order of their first members, and the number `skipped` of `Repacked`.

    Raises:
        DataError: see `repack`.
    """
    runs: dict[bytes, list[Run]] = {}
    skipped = 0
    last: bytes | None = None
    try:
        with open(path, "rb") as file:
            for member in iter_members(file, os.fstat(file.fileno()).st_size, needs_end=True):
                split = split_key(member.name, until_last_dot) if member.is_regular else None
                if split is None:
                    skipped += 1
                    continue
                key, extension = split
                if key != last:
                    runs.setdefault(key, []).append(Run([], set()))
                name = key + b"." + extension.encode() if until_last_dot else member.name
                runs[key][-1].members.append((name, member.payload_offset, member.size))
                runs[key][-1].extensions.add(extension)
                last = key
    except TarFormatError as error:
        behind = "its start" if last is None else f"a member of the key {shown(last)}"
        raise DataError(f"{path} is damaged behind {behind}: {error}; fetch it again, or leave it out") from error
    examples = []
    for key, places in runs.items():
        whole = frozenset[str]().union(*(run.extensions for run in places))
        if merged := merged_pairs(str(path), key, whole):
            raise DataError(merged)
        if sum(len(run.extensions) for run in places) == len(whole):
            examples.append(Example(path, key, places, whole))  # Parts of one example have no extension in common,
        elif all(run.extensions == whole for run in places):
            examples += [Example(path, key, [run], whole) for run in places]  # and copies have all of them.
        else:
            raise DataError(
                f"{path}: the key {shown(key)} comes back with parts of an example, and nothing says which members belong "
                "together; rename members, so that each example has a key of its own"
            )
    return examples, skipped


def _header(name: bytes, size: int) -> tuple[tarfile.TarInfo, Literal[0, 1], int]:
    """A plain header, its format, and the bytes of the member: as most writers of shards have it, so that equal examples stay
    equal bytes; GNU's for names that it cannot hold."""
    kind: Literal[0, 1] = tarfile.USTAR_FORMAT
    header = tarfile.TarInfo(name.decode("utf-8", "surrogateescape"))
    header.size = size
    try:
        length = len(header.tobuf(kind, "utf-8", "surrogateescape"))
    except ValueError:
        kind = tarfile.GNU_FORMAT
        length = len(header.tobuf(kind, "utf-8", "surrogateescape"))
    return header, kind, length + -(-size // BLOCK) * BLOCK
