"""The index: example id -> shard, offset, length. Built once, memory-mapped, 8 bytes per example.

Poisson sampling needs random access to any example of any shard, which tar lacks. An example is a run of neighbouring
members that share a key (`tar_format.split_key`); it is one contiguous extent, so one read fetches it whole. A key that
comes back later in the shard starts a new example. An example without an image or a caption stays an example: the
number of examples n is an input of the privacy accounting and may not depend on what can be decoded.

On disk: `extents-DIGEST.npy`, uint32 (n, 2) = first block and number of blocks of 512 bytes, and `manifest.json`, which
names it and is renamed into place last: an index is either whole or not there. Both are private (mode 0600): shard
sizes, counts and hashes describe the data.
"""

import hashlib
import json
import os
import stat
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
from rich.progress import Progress

from data.errors import DataError
from data.shards import common_root
from data.tar_format import BLOCK, TarFormatError, iter_members, split_key

FORMAT_VERSION = 1
MANIFEST = "manifest.json"
_HASH_CHUNK = 4 << 20


@dataclass(frozen=True)
class ShardEntry:
    """What the manifest keeps of one shard: name relative to the shard root, bytes, SHA-256 in hex, examples, time."""

    name: str
    size: int
    sha256: str
    count: int
    mtime_ns: int


class ExampleTable:
    """All examples of a data set. The id of an example is its place in it: shards sorted by name, then tar order."""

    def __init__(self, index_dir: Path, shard_root: Path, entries: Sequence[ShardEntry], extents_N2: np.ndarray):
        """Use `open` or `build_index`."""
        self.index_dir, self.shard_root, self.entries = index_dir, shard_root, tuple(entries)
        self._extents_N2 = extents_N2
        self._last_S = np.cumsum([entry.count for entry in self.entries], dtype=np.int64)

    @classmethod
    def open(cls, index_dir: Path, shard_root: Path, *, check_shards: bool = True) -> "ExampleTable":
        """Maps an index and checks that its shards are there.

        Args:
            index_dir: what `build_index` wrote.
            shard_root: folder that the shard names of the manifest are relative to.
            check_shards: compare existence and size of every shard with the manifest.

        Raises:
            DataError: no index, a damaged one, or shards that are missing or of another size.
        """
        index_dir, shard_root = Path(index_dir), Path(shard_root)
        manifest = _load_manifest(index_dir)
        try:
            entries = [ShardEntry(**entry) for entry in manifest["shards"]]
            extents = np.load(index_dir / manifest["extents"], mmap_mode="r")
        except (KeyError, TypeError, OSError, ValueError) as error:
            raise DataError(f"the index {index_dir} is damaged ({error}); build it again") from error
        if extents.shape != (sum(entry.count for entry in entries), 2) or extents.dtype != np.dtype("<u4"):
            raise DataError(f"the index {index_dir} is damaged (sizes do not fit its manifest); build it again")
        if check_shards:
            _check_sizes(entries, shard_root)
        return cls(index_dir, shard_root, entries, extents)

    def __len__(self) -> int:
        return len(self._extents_N2)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels to worker processes as a path, not as gigabytes."""
        return _reopen, (self.index_dir, self.shard_root)

    def extent(self, ids: np.ndarray | Sequence[int] | int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Where examples lie.

        Args:
            ids: int64 example ids, any order, repeats allowed.

        Returns:
            (shard_ordinals, offsets_bytes, lengths_bytes), int64, one per id.

        Raises:
            DataError: an id below 0 or not below len(self).
        """
        ids_K = np.atleast_1d(np.asarray(ids, dtype=np.int64))
        if ids_K.size and (ids_K.min() < 0 or ids_K.max() >= len(self)):
            raise DataError(f"example ids run from 0 to {len(self) - 1}; got {ids_K.min()} to {ids_K.max()}")
        blocks_K2 = self._extents_N2[ids_K].astype(np.int64)
        shards_K = np.searchsorted(self._last_S, ids_K, side="right")
        return shards_K, blocks_K2[:, 0] * BLOCK, blocks_K2[:, 1] * BLOCK

    def shard_path(self, ordinal: int) -> Path:
        """File of a shard ordinal."""
        return self.shard_root / self.entries[ordinal].name

    def changed_since_indexed(self) -> list[str]:
        """Names of shards whose modification time differs from the manifest's (a copy differs too: then verify)."""
        return [
            entry.name
            for ordinal, entry in enumerate(self.entries)
            if self.shard_path(ordinal).stat().st_mtime_ns != entry.mtime_ns
        ]

    def manifest_digest(self) -> bytes:
        """SHA-256 over names, sizes, hashes and counts of all shards: 32 bytes, private, equal for equal data."""
        return _digest(self.entries)


def build_index(
    shards: Sequence[Path], index_dir: Path, *, shard_root: Path | None = None, progress: bool = False
) -> ExampleTable:
    """Indexes shards and writes the index to a folder; an older one there is replaced in one step.

    Args:
        shards: tar files; their order does not matter.
        index_dir: created when missing.
        shard_root: what names are relative to; the deepest common folder by default.
        progress: show a bar on stderr.

    Raises:
        DataError: no shards, one that is no whole tar archive, none with an example, a folder that cannot be written.
    """
    if not shards:
        raise DataError("no shards to index")
    root = Path(shard_root).absolute() if shard_root is not None else common_root(shards)
    named = sorted((path.absolute().relative_to(root).as_posix(), path.absolute()) for path in shards)
    if len({name for name, _ in named}) != len(named):
        raise DataError("a shard is listed twice")
    entries: list[ShardEntry] = []
    extents: list[np.ndarray] = []
    for name, path in _with_progress(named, progress):
        entry, extents_K2 = index_shard(path, name)
        entries.append(entry)
        extents.append(extents_K2)
    if not sum(entry.count for entry in entries):
        raise DataError(f"no example in {len(named)} shards: {named[0][1]} has no member with an extension")
    _write_index(Path(index_dir), entries, np.concatenate(extents))
    return ExampleTable.open(index_dir, root)


def index_shard(path: Path, name: str) -> tuple[ShardEntry, np.ndarray]:
    """Indexes one shard, independently of all others (so that shards can be done in parallel).

    Returns:
        Its manifest entry and its extents, uint32 (count, 2): first block and number of blocks.

    Raises:
        DataError: it cannot be read, is no tar archive, or is cut off.
    """
    try:
        before = path.stat()
        extents_K2 = scan_shard(path)
        digest = hash_shard(path)
        after = path.stat()
    except OSError as error:
        raise DataError(f"cannot read the shard {path}: {error.strerror or error}") from error
    if (before.st_size, before.st_mtime_ns) != (after.st_size, after.st_mtime_ns):
        raise DataError(f"the shard {path} changed while it was indexed; try again when its writer is done")
    return ShardEntry(name, after.st_size, digest, len(extents_K2), after.st_mtime_ns), extents_K2


def scan_shard(path: Path) -> np.ndarray:
    """Extents of all examples of a shard, uint32 (count, 2), from its headers alone.

    Raises:
        DataError: no tar archive, cut off, or over 2 TiB.
        OSError: it cannot be read.
    """
    with open(path, "rb", buffering=0) as file:
        size = os.fstat(file.fileno()).st_size
        if size == 0:
            raise DataError(f"missing or empty shards: {path} is empty; fetch it again")
        descriptor = file.fileno()
        _refuse_compressed(os.pread(descriptor, 6, 0), path)
        try:
            bounds = list(_example_bounds(descriptor, size))
        except TarFormatError as error:
            raise DataError(f"{path} is no tar archive or is damaged: {error}; write or fetch it again") from error
    if bounds and bounds[-1][1] // BLOCK >= 1 << 32:
        raise DataError(f"{path} is larger than 2 TiB; split it")
    bounds_K2 = np.array(bounds, dtype=np.int64).reshape(-1, 2) // BLOCK
    return np.stack([bounds_K2[:, 0], bounds_K2[:, 1] - bounds_K2[:, 0]], axis=1).astype("<u4")


def hash_shard(path: Path) -> str:
    """SHA-256 of a file, in hex."""
    digest = hashlib.sha256()
    with open(path, "rb", buffering=0) as file:
        while chunk := file.read(_HASH_CHUNK):
            digest.update(chunk)
    return digest.hexdigest()


def _example_bounds(descriptor: int, size: int) -> Iterator[tuple[int, int]]:
    """(first byte, byte after the last) of each run of members with one key."""
    current: bytes | None = None
    start = end = 0

    def read_at(offset: int, length: int) -> bytes:
        piece = os.pread(descriptor, length, offset)
        if len(piece) != length:
            raise TarFormatError("it shrank while it was read")
        return piece

    for member in iter_members(read_at, size, needs_end=True):
        split = split_key(member.name)
        if split is None:
            continue
        if split[0] != current:
            if current is not None:
                yield start, end
            current, start = split[0], member.header_offset
        end = member.end_offset
    if current is not None:
        yield start, end


def _refuse_compressed(magic: bytes, path: Path) -> None:
    for prefix, tool in ((b"\x1f\x8b", "gunzip"), (b"\x28\xb5\x2f\xfd", "unzstd"), (b"\xfd7zXZ", "unxz")):
        if magic.startswith(prefix):
            raise DataError(f"{path} is compressed, which allows no random access; unpack it with {tool}")


def _load_manifest(index_dir: Path) -> dict[str, Any]:
    path = index_dir / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(f"there is no index in {index_dir}; build it: prepare.py index SHARDS --output DIR") from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} ({error}); build the index again") from error
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path} is no index of format {FORMAT_VERSION}; build it again")
    return manifest


def _check_sizes(entries: Sequence[ShardEntry], shard_root: Path) -> None:
    for entry in entries:
        path = shard_root / entry.name
        try:
            status = path.stat()
        except OSError as error:
            raise DataError(f"missing or empty shards: {path} of the index: {error.strerror or error}") from error
        if not stat.S_ISREG(status.st_mode) or status.st_size != entry.size:
            raise DataError(
                f"{path} has {status.st_size} bytes, its index says {entry.size}; restore the shard or index again"
            )


def _write_index(index_dir: Path, entries: Sequence[ShardEntry], extents_N2: np.ndarray) -> None:
    name = f"extents-{_digest(entries).hex()[:16]}.npy"
    manifest = {
        "format_version": FORMAT_VERSION,
        "num_examples": len(extents_N2),
        "extents": name,
        "shards": [asdict(entry) for entry in entries],
    }
    try:
        index_dir.mkdir(parents=True, exist_ok=True)
        _write_durably(index_dir / name, lambda file: np.save(file, extents_N2))
        _write_durably(index_dir / MANIFEST, lambda file: file.write(json.dumps(manifest, indent=1).encode()))
        for old in index_dir.glob("extents-*.npy"):
            if old.name != name:
                old.unlink()
    except OSError as error:
        raise DataError(f"cannot write the index to {index_dir}: {error.strerror or error}") from error


def _write_durably(path: Path, write: Any) -> None:
    """Temporary name, mode 0600, fsync, rename, fsync of the folder."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
    with open(descriptor, "wb") as file:
        write(file)
        file.flush()
        os.fsync(file.fileno())
    os.replace(temporary, path)
    folder = os.open(path.parent, os.O_RDONLY)
    try:
        os.fsync(folder)
    finally:
        os.close(folder)


def _digest(entries: Sequence[ShardEntry]) -> bytes:
    rows = [[entry.name, entry.size, entry.sha256, entry.count] for entry in entries]
    return hashlib.sha256(json.dumps([FORMAT_VERSION, rows], separators=(",", ":")).encode()).digest()


def _reopen(index_dir: Path, shard_root: Path) -> ExampleTable:
    return ExampleTable.open(index_dir, shard_root, check_shards=False)


def _with_progress(named: Sequence[tuple[str, Path]], progress: bool) -> Iterator[tuple[str, Path]]:
    """The shards, with a bar that counts their bytes."""
    if not progress:
        yield from named
        return
    from rich.console import Console

    with Progress(console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task("indexing", total=sum(path.stat().st_size for _, path in named if path.exists()))
        for name, path in named:
            yield name, path
            bar.advance(task, path.stat().st_size)
