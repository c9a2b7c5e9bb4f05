"""Builds an index, in parallel, resumable and appendable, and verifies shards by their hashes.

Every finished shard is first stored as a part, so that a killed build continues. Shards that the
folder's present index has with the same name, size and version are not read again, so a longer list
of shards appends. The index depends on the shards alone, not on the order of reading.
"""

import fcntl
import hashlib
import json
import os
import shutil
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Executor
from contextlib import contextmanager, suppress
from dataclasses import asdict, replace
from pathlib import Path
from zipfile import BadZipFile

import numpy as np
from rich.console import Console
from rich.progress import Progress

from data.errors import DataError, ReadError
from data.files import private_file
from data.index.shard import ROW, IndexedShard, hash_file, index_file
from data.index.shards import ShardSet
from data.index.tar_index import (
    FORMAT_VERSION,
    ExampleTable,
    load_manifest,
    manifest_digest,
    write_manifest,
)
from data.reading.pool import run_all
from data.reading.records import RemoteOptions, ShardEntry, ShardStatus
from data.reading.storage import local_copy, open_storage, require_present

_PARTS = "parts"
_MAX_NAMES = 10
"""Bad shards that one error names."""


def build_index(
    shards: ShardSet | Sequence[Path],
    index_dir: Path,
    *,
    remote: RemoteOptions | None = None,
    executor: Executor | None = None,
    progress: bool = False,
) -> ExampleTable:
    """Writes the index of shards to a folder, replaces an older one in one step, and returns it.

    Args:
        shards: from `find_shards`, or local tar files; their order does not matter.
        index_dir: created when missing.
        remote: options for remote shards.
        executor: works on many shards at once (`data.reading.pool.worker_pool`); None works in this
            process.
        progress: show a bar on stderr.

    Raises:
        DataError: no shards, bad shards (after all are read), no example in any shard, or a folder
            that cannot be written or in which another build is at work.
        ReadError: remote shards cannot be read, or a worker died. Finished parts stay.
    """
    if not isinstance(shards, ShardSet):
        shards = ShardSet.of_files(shards)
    remote = remote or RemoteOptions()
    index_dir = Path(index_dir)
    with _working_in(index_dir) as parts:
        storage = open_storage(shards.root, remote)
        statuses: dict[str, ShardStatus] = {}
        bad: dict[str, str] = {}
        for name, status in zip(shards.names, storage.status(shards.names), strict=True):
            if isinstance(status, DataError):
                bad[name] = str(status)
            else:
                statuses[name] = status
        storage.close()
        # Without a usable index in the folder, every shard is read.
        with suppress(DataError):
            old_table = ExampleTable.open(index_dir, shards.root, check_shards=False)
            for shard in old_table.indexed_shards():
                path = parts / _part_name(shard.entry.name)
                present_status = statuses.get(shard.entry.name)
                if _is_of(shard.entry, present_status) and not path.exists():
                    _write_part(path, shard)
        missing = []
        for name, status in statuses.items():
            part = _read_part(parts / _part_name(name))
            if part is None or not _is_of(part.entry, status):
                missing.append(name)
        jobs = [(shards.root, name, statuses[name], remote) for name in missing]
        console = Console(stderr=True)
        # Elsewhere than on a terminal the bar would leave two empty lines.
        is_shown = progress and bool(missing) and console.is_terminal
        with Progress(console=console, transient=True, disable=not is_shown) as bar:
            num_bytes = sum(statuses[name].size for name in missing)
            task = bar.add_task(f"indexing {len(missing)} shards", total=num_bytes)
            for name, shard_or_problem in run_all(executor, index_one, jobs):
                if isinstance(shard_or_problem, str):
                    bad[name] = shard_or_problem
                else:
                    _write_part(parts / _part_name(name), shard_or_problem)
                bar.advance(task, statuses[name].size)
        if bad:
            first, *further = sorted(bad)
            if not further:
                raise DataError(bad[first])
            names = ", ".join(further[:_MAX_NAMES])
            if len(further) > _MAX_NAMES:
                names += ", ..."
            raise DataError(
                f"{bad[first]} (and {len(further)} more bad shards: {names}); mend them, or name "
                "the others alone: a-{000..003}.tar,a-{005..999}.tar"
            )

        def finished(name: str) -> IndexedShard:
            part = _read_part(parts / _part_name(name))
            if part is None:
                raise DataError(
                    f"a part of the index {index_dir} was damaged while it was built; build it "
                    "again"
                )
            return part

        # Joined in the order of the names; memory has the rows of one shard at a time.
        entries = [finished(name).entry for name in shards.names]
        count = sum(entry.count for entry in entries)
        if not count:
            for name in shards.names:
                (parts / _part_name(name)).unlink()
            raise DataError(
                f"no example in {len(entries)} shards: {shards.locations()[0]} has no member with "
                "an extension"
            )
        extents = f"extents-{manifest_digest(entries).hex()[:16]}.npy"
        with private_file(index_dir / extents) as file:
            header = {
                "descr": np.lib.format.dtype_to_descr(ROW),
                "fortran_order": False,
                "shape": (count,),
            }
            np.lib.format.write_array_header_1_0(file, header)
            for name in shards.names:
                file.write(finished(name).rows_K.tobytes())
        write_manifest(index_dir, extents, entries)
        for old_file in index_dir.glob("extents-*.npy"):
            if old_file.name != extents:
                old_file.unlink()
        shutil.rmtree(parts)
    return ExampleTable.open(index_dir, shards.root, remote=remote)


def index_one(
    root: str, name: str, status: ShardStatus, remote: RemoteOptions
) -> tuple[str, IndexedShard | str]:
    """Indexes one shard of a root, as one job.

    Returns:
        The shard's name; and the indexed shard, or one line that says why it cannot be indexed.
    """
    try:
        with local_copy(root, remote, name) as path:
            shard = index_file(path, name, f"{root}/{name}", status.version)
        if shard.entry.size != status.size:
            raise DataError(
                f"the shard {root}/{name} changed while it was indexed; try again when its writer "
                "is done"
            )
    except DataError as error:
        return name, str(error)
    return name, shard


@contextmanager
def _working_in(index_dir: Path) -> Iterator[Path]:
    """Yields the folder of parts, locked for one build at a time.

    It is made before hours of reading, to find a folder that cannot be written.
    """
    parts = index_dir / _PARTS
    try:
        parts.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(parts / "lock", os.O_RDWR | os.O_CREAT, 0o600)
    except OSError as error:
        raise DataError(
            f"cannot write the index to {index_dir}: {error.strerror or error}"
        ) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(descriptor)
        raise DataError(
            f"another build is at work in {index_dir}; wait for it or choose another folder"
        ) from error
    try:
        yield parts
    finally:
        # A build that is refused leaves no trace. Removing the folder needs the lock: before its
        # first part, another build's folder holds nothing but the lock, too.
        if parts.exists() and [path.name for path in parts.iterdir()] == ["lock"]:
            shutil.rmtree(parts)
            if not any(index_dir.iterdir()):
                index_dir.rmdir()
        os.close(descriptor)


def _part_name(name: str) -> str:
    return hashlib.sha256(name.encode()).hexdigest()[:32]


def _write_part(path: Path, shard: IndexedShard) -> None:
    facts = json.dumps([FORMAT_VERSION, asdict(shard.entry)])
    with private_file(path) as file:
        np.savez(file, facts=facts, rows=shard.rows_K)


def _read_part(path: Path) -> IndexedShard | None:
    """Returns a finished part; None if it is missing, damaged or of another format."""
    try:
        with np.load(path) as arrays:
            version, entry = json.loads(str(arrays["facts"]))
            if version != FORMAT_VERSION:
                return None
            return IndexedShard(ShardEntry(**entry), arrays["rows"])
    except (OSError, EOFError, ValueError, TypeError, KeyError, RuntimeError, BadZipFile):
        return None


def _is_of(entry: ShardEntry, status: ShardStatus | None) -> bool:
    """Returns whether an entry is of the shard's present state; False for one without a version."""
    return bool(entry.version) and status == (entry.size, entry.version)


def verify_hashes(
    table: ExampleTable, executor: Executor | None, track: Callable[[Iterable], Iterable]
) -> None:
    """Hashes every shard again; if all match, writes their present times or ETags to the index.

    Raises:
        DataError: a shard is missing or its bytes differ from those that were indexed.
        ReadError: remote shards cannot be read.
    """
    storage = table.storage()
    names = [entry.name for entry in table.entries]
    first_statuses = list(require_present(storage.status(names)))
    jobs = [(table.shard_root, entry.name, table.remote) for entry in table.entries]
    expected = {entry.name: entry.sha256 for entry in table.entries}
    for name, sha256 in track(run_all(executor, hash_one, jobs)):
        if sha256 != expected[name]:
            raise DataError(
                f"{table.shard_root}/{name} is not what was indexed; restore it or index again"
            )
    if list(storage.status(names)) != first_statuses:
        raise DataError(
            "shards changed while they were hashed; verify again when their writer is done"
        )
    storage.close()
    entries = [
        replace(entry, version=status.version)
        for entry, status in zip(table.entries, first_statuses, strict=True)
    ]
    if entries != list(table.entries):
        write_manifest(table.index_dir, load_manifest(table.index_dir)["extents"], entries)
        table.entries = tuple(entries)


def hash_one(root: str, name: str, remote: RemoteOptions) -> tuple[str, str]:
    """Hashes one shard of a root, as one job; returns its name and SHA-256 in hex."""
    try:
        with local_copy(root, remote, name) as path:
            return name, hash_file(path)
    except ReadError:
        raise
    except OSError as error:
        raise DataError(
            f"cannot read the shard {root}/{name}: {error.strerror or error}"
        ) from error
