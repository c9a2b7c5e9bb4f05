"""Builds an index, in parallel, resumable and appendable.

Every finished shard is first kept as a part of its own, so that a build that was killed goes on where it was. Shards that
the present index of the folder knows with the same name, size and version are not read again: naming more shards than
last time appends. The result depends on the shards alone, not on how or in what order they were read.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from typing import NamedTuple, NoReturn

import numpy as np
from rich.console import Console
from rich.progress import Progress

from data.errors import DataError
from data.files import private_file
from data.index.shard import ROW, IndexedShard, index_file
from data.index.shards import ShardSet
from data.index.tar_index import FORMAT_VERSION, ExampleTable, manifest_digest, write_manifest
from data.reading.pool import run_all
from data.reading.records import RemoteOptions, ShardEntry, ShardStatus
from data.reading.storage import local_copy, open_storage

BAD_SHARDS = "bad-shards.txt"
"""File in the folder of the index that lists what a build refused."""
_PARTS = "parts"
_NAMED = 10  # bad shards in one error; the list has them all


class BadShard(NamedTuple):
    """A shard that cannot be indexed, and why: one line that says how to mend it."""

    name: str
    reason: str


def build_index(
    shards: ShardSet | Sequence[Path],
    index_dir: Path,
    *,
    exclude: Collection[str] = (),
    remote: RemoteOptions | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> ExampleTable:
    """Indexes shards and writes the index to a folder; an older one there is replaced in one step.

    Args:
        shards: what `find_shards` returns, or local tar files; their order does not matter.
        index_dir: created when missing.
        exclude: names of shards that stay out of the index; it remembers them.
        remote: how remote shards are read.
        executor: works on many shards at once (`data.reading.pool.worker_pool`); None works in this process.
        progress: show a bar on stderr.

    Raises:
        DataError: no shards, bad ones (all are read first, and listed in `BAD_SHARDS`), none with an example, a folder
            that cannot be written or in which another build is at work.
        ReadError: remote shards cannot be read, or a worker died. What is done stays done.
    """
    shards = shards if isinstance(shards, ShardSet) else ShardSet.of_files(shards)
    shards = replace(shards, names=tuple(name for name in shards.names if name not in exclude))
    if not shards.names:
        raise DataError("every shard is excluded, so there is nothing to index; exclude fewer")
    remote = remote or RemoteOptions()
    index_dir = Path(index_dir)
    with _working_in(index_dir) as parts:
        storage = open_storage(shards.root, remote)
        statuses: dict[str, ShardStatus] = {}
        bad: dict[str, str] = {}
        for name, status in zip(shards.names, storage.status(shards.names), strict=True):
            if isinstance(status, DataError):
                bad[name] = f"{status}{shards.hint}"
            else:
                statuses[name] = status
        storage.close()
        with suppress(DataError):  # Where there is no index that can be used, every shard is read.
            old = ExampleTable.open(index_dir, shards.root, check_shards=False)
            for known in old.indexed_shards():
                part = parts / _part_name(known.entry.name)
                if _is_of(known.entry, statuses.get(known.entry.name)) and not part.exists():
                    _write_part(part, known)
        missing = []
        for name, status in statuses.items():
            try:
                is_whole = _is_of(_read_part(parts / _part_name(name)).entry, status)
            except (OSError, ValueError, TypeError, KeyError):
                is_whole = False  # There is no such part, or a damaged one.
            if not is_whole:
                missing.append(name)
        jobs = [(shards.root, name, statuses[name], remote) for name in missing]
        is_shown = progress and bool(missing)
        with Progress(console=Console(stderr=True), transient=True, disable=not is_shown) as bar:
            task = bar.add_task(f"indexing {len(missing)} shards", total=sum(statuses[name].size for name in missing))
            for result in run_all(executor, index_one, jobs):
                if isinstance(result, BadShard):
                    bad[result.name] = result.reason
                    bar.advance(task, statuses[result.name].size)
                    continue
                _write_part(parts / _part_name(result.entry.name), result)
                bar.advance(task, result.entry.size)
        if bad:
            _refuse(index_dir, shards, bad, exclude)
        _assemble(index_dir, shards, parts, exclude)
        shutil.rmtree(parts)
        if not exclude:
            (index_dir / BAD_SHARDS).unlink(missing_ok=True)
    return ExampleTable.open(index_dir, shards.root, remote=remote)


def index_one(root: str, name: str, status: ShardStatus, remote: RemoteOptions) -> IndexedShard | BadShard:
    """One job: what is known of a shard, or why it cannot be indexed."""
    storage = open_storage(root, remote)
    try:
        with local_copy(storage, name) as path:
            shard = index_file(path, name, f"{root}/{name}", status.version)
        if shard.entry.size != status.size:
            raise DataError(f"the shard {root}/{name} changed while it was indexed; try again when its writer is done")
    except DataError as error:
        return BadShard(name, str(error))
    finally:
        storage.close()
    return shard


def _refuse(index_dir: Path, shards: ShardSet, bad: dict[str, str], exclude: Collection[str]) -> NoReturn:
    """Says why the first bad shard is refused and names the others.

    Where good ones are left, it writes a list that excludes all bad ones, and those that were excluded already.
    """
    first, *others = sorted(bad)
    message = bad[first]
    if others:
        names = ", ".join(others[:_NAMED]) + (", ..." if len(others) > _NAMED else "")
        message += f" (and {len(others)} more bad shards: {names})"
    if len(bad) < len(shards.names):
        reasons = dict.fromkeys(exclude, "This shard was excluded already.") | bad
        lines = [f"# {' '.join(reasons[name].split())}\n{name}\n" for name in sorted(reasons)]
        with private_file(index_dir / BAD_SHARDS) as file:
            file.write("".join(lines).encode("utf-8", "surrogateescape"))
        message += f"; {index_dir / BAD_SHARDS} lists every bad shard: mend them, or exclude them by prepare.py index --exclude"
    raise DataError(message)


@contextmanager
def _working_in(index_dir: Path) -> Iterator[Path]:
    """The folder of parts, for one build at a time; that it can be written is known before hours of reading."""
    parts = index_dir / _PARTS
    try:
        parts.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(parts / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DataError(f"cannot write the index to {index_dir}: {error.strerror or error}") from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield parts
    except BlockingIOError as error:
        raise DataError(f"another build is at work in {index_dir}; wait for it or choose another folder") from error
    finally:
        os.close(descriptor)
        if parts.exists() and [path.name for path in parts.iterdir()] == ["lock"]:  # a refused build leaves no trace
            shutil.rmtree(parts)
            if not any(index_dir.iterdir()):
                index_dir.rmdir()


def _part_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _write_part(path: Path, shard: IndexedShard) -> None:
    facts = {"format_version": FORMAT_VERSION, "entry": asdict(shard.entry)}
    with private_file(path) as file:
        file.write(json.dumps(facts).encode() + b"\n" + shard.rows_K.tobytes())


def _read_part(path: Path) -> IndexedShard:
    header, _, content = path.read_bytes().partition(b"\n")
    facts = json.loads(header)
    if facts.get("format_version") != FORMAT_VERSION:
        raise ValueError(f"{path} is of another format")
    entry = ShardEntry(**facts["entry"])
    if len(content) != entry.count * ROW.itemsize:
        raise ValueError(f"{path} has lost bytes")
    return IndexedShard(entry, np.frombuffer(content, dtype=ROW))


def _is_of(entry: ShardEntry, status: ShardStatus | None) -> bool:
    """Whether an entry is of the shard as it is now. A shard without a version is always read."""
    return bool(entry.version) and status == (entry.size, entry.version)


def _assemble(index_dir: Path, shards: ShardSet, parts: Path, exclude: Collection[str]) -> None:
    """Joins the parts in the order of the names, one in memory at a time.

    Raises:
        DataError: there is no example.
    """
    entries = [_read_part(parts / _part_name(name)).entry for name in shards.names]
    count = sum(entry.count for entry in entries)
    if not count:
        for name in shards.names:
            (parts / _part_name(name)).unlink()
        raise DataError(f"no example in {len(entries)} shards: {shards.locations()[0]} has no member with an extension")
    extents = f"extents-{manifest_digest(entries).hex()[:16]}.npy"
    with private_file(index_dir / extents) as file:
        header = {"descr": np.lib.format.dtype_to_descr(ROW), "fortran_order": False, "shape": (count,)}
        np.lib.format.write_array_header_1_0(file, header)
        for name in shards.names:
            file.write(_read_part(parts / _part_name(name)).rows_K.tobytes())
    write_manifest(index_dir, extents, entries, sorted(exclude))
    for old in index_dir.glob("extents-*.npy"):
        if old.name != extents:
            old.unlink()
