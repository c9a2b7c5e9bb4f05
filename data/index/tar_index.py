"""The index: example id -> shard, offset, length, checksum. Memory-mapped, 11 bytes per example.

Poisson sampling needs random access to any example of any shard, which tar lacks. An example is a run of neighbouring
members that share a key (`tar_format.split_key`); it is one contiguous extent, so one read fetches it whole. A key that
comes back later in the shard with the same extensions is a copy, and an example of its own; with others the shard is
refused, because an example was taken apart. An example without an image or a caption stays an example: the
number of examples n is an input of the privacy accounting and may not depend on what can be decoded.

A key that two shards have is an example in each of them.

On disk: `extents-DIGEST.npy` (rows of `shard.ROW`) and `manifest.json`, which names it and is renamed into place last: an
index is either whole or not there. Both are private (mode 0600): shard sizes, counts and hashes describe the data. `build`
writes them.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.errors import DataError
from data.files import private_file
from data.index.shard import ROW, IndexedShard
from data.index.shards import ShardSet
from data.index.tar_format import BLOCK
from data.reading.records import ReadRequest, RemoteOptions, ShardEntry
from data.reading.staging import StagedStorage, Staging
from data.reading.storage import Storage, open_storage, require_present

FORMAT_VERSION = 5
"""It changes whenever shards that were accepted are no longer, so that no index of such a shard is used."""
MANIFEST = "manifest.json"
_LOCAL = RemoteOptions()


class Extents(NamedTuple):
    """Where examples lie, one of each per id: place of the shard, bytes from its start, bytes, CRC-32."""

    shards: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    crc32s: np.ndarray


class ExampleTable:
    """All examples of a data set. The id of an example is its place in it: shards sorted by name, then tar order."""

    def __init__(
        self,
        index_dir: Path,
        shard_root: str,
        entries: Sequence[ShardEntry],
        rows_N: np.ndarray,
        remote: RemoteOptions = _LOCAL,
    ):
        """Use `open` or `data.index.build.build_index`."""
        self.index_dir, self.shard_root, self.entries = index_dir, shard_root, tuple(entries)
        self.remote = remote
        self.staging: Staging | None = None
        self._rows_N = rows_N
        self._last_S = np.cumsum([entry.count for entry in self.entries], dtype=np.int64)

    @classmethod
    def open(
        cls,
        index_dir: Path,
        shard_root: Path | str,
        *,
        remote: RemoteOptions = _LOCAL,
        check_shards: bool = True,
    ) -> "ExampleTable":
        """Maps an index and checks that its shards are what was indexed, as far as that costs no reading.

        Args:
            index_dir: what `build_index` wrote.
            shard_root: folder or URL that the shard names of the manifest are relative to.
            remote: how shards are read if the root is a URL.
            check_shards: compare existence, size and version of every shard with the manifest.

        Raises:
            DataError: no index, a damaged one, or shards that are missing, of another size or modified since.
            ReadError: a remote place does not answer.
        """
        index_dir = Path(index_dir)
        manifest = load_manifest(index_dir)
        try:
            entries = [ShardEntry(**entry) for entry in manifest["shards"]]
            rows_N = np.load(index_dir / manifest["extents"], mmap_mode="r", allow_pickle=False)
        except (KeyError, TypeError, OSError, ValueError) as error:
            raise DataError(
                f"the index {index_dir} is damaged ({error}); build it again"
            ) from error
        if rows_N.shape != (sum(entry.count for entry in entries),) or rows_N.dtype != ROW:
            raise DataError(
                f"the index {index_dir} is damaged (sizes do not fit its manifest); build it again"
            )
        table = cls(index_dir, str(shard_root), entries, rows_N, remote)
        if check_shards:
            table.check_shards()
        return table

    def __len__(self) -> int:
        return len(self._rows_N)

    def __reduce__(self) -> tuple[Any, ...]:
        """Travels to worker processes as a path, not as gigabytes."""
        return _reopen, (
            self.index_dir,
            self.shard_root,
            self.remote,
            self.manifest_digest(),
            self.staging,
        )

    def extents(self, ids: np.ndarray | Sequence[int] | int) -> Extents:
        """Where examples lie.

        Args:
            ids: int64 example ids, any order, repeats allowed.

        Returns:
            int64 arrays, one row per id.

        Raises:
            DataError: an id below 0 or not below len(self).
        """
        ids_K = np.atleast_1d(np.asarray(ids, dtype=np.int64))
        if ids_K.size and (ids_K.min() < 0 or ids_K.max() >= len(self)):
            raise DataError(
                f"example ids run from 0 to {len(self) - 1}; got {ids_K.min()} to {ids_K.max()}"
            )
        rows_K = self._rows_N[ids_K]
        return Extents(
            np.searchsorted(self._last_S, ids_K, side="right"),
            rows_K["first_block"].astype(np.int64) * BLOCK,
            (rows_K["low"].astype(np.int64) | rows_K["high"].astype(np.int64) << 16) * BLOCK,
            rows_K["crc32"].astype(np.int64),
        )

    def found_in(self, other: "ExampleTable", most: int = 1_000_000) -> tuple[int, float]:
        """(how many of up to `most` examples, spread over this table, are in another one byte for byte, by length and CRC-32;
        at most how many of them chance finds there). Members' names and times in a tar are part of an example's bytes."""

        def names(table: ExampleTable, ids: np.ndarray) -> np.ndarray:
            extents = table.extents(ids)
            return extents.lengths << 32 | extents.crc32s

        mine = names(
            self, np.unique(np.linspace(0, len(self) - 1, min(most, len(self))).astype(np.int64))
        )
        found = np.zeros(len(mine), dtype=bool)
        for start in range(0, len(other), most):
            found |= np.isin(mine, names(other, np.arange(start, min(start + most, len(other)))))
        return int(found.sum()), len(mine) * len(other) / 2**32

    def copies_in_other_shards(self, most: int = 4_000_000) -> tuple[int, float, tuple[str, str]]:
        """Counts examples that an earlier shard holds byte for byte, by length and CRC-32; names and times are part of the bytes.

        Of more than `most` examples those are compared whose CRC-32 is a multiple of some number, which copies have in common.

        Returns:
            (how many, scaled up; how many chance finds, at most, with eight deviations; two shards that share one).
        """
        every = -(-len(self) // most)
        starts = range(0, len(self), most)
        parts = [
            start + np.flatnonzero(self._rows_N["crc32"][start : start + most] % every == 0)
            for start in starts
        ]
        ids = np.concatenate(parts)
        extents = self.extents(ids)
        names = extents.lengths << 32 | extents.crc32s
        order = np.lexsort((extents.shards, names))
        names, shards = names[order], extents.shards[order]
        is_same = names[1:] == names[:-1]
        is_copy = is_same & (shards[1:] != shards[:-1])
        counts = np.unique(extents.lengths, return_counts=True)[1].astype(np.float64) * every
        by_chance = float((counts**2).sum()) / 2**33
        limit = by_chance + 8 * (every * by_chance) ** 0.5
        first = int(np.argmax(is_copy)) if is_copy.any() else 0
        pair = (
            self.entries[int(shards[first])].name,
            self.entries[int(shards[min(first + 1, len(shards) - 1)])].name,
        )
        return int(is_copy.sum()) * every, limit, pair

    def requests(self, ids: np.ndarray | Sequence[int] | int) -> list[ReadRequest]:
        """What a storage is asked for, one per id; see `extents`."""
        columns = [column.tolist() for column in self.extents(ids)]
        return [
            ReadRequest(self.entries[shard], offset, length, crc32)
            for shard, offset, length, crc32 in zip(*columns, strict=True)
        ]

    def storage(self) -> Storage:
        """The place that the shards are read from: the copies of this node, if there are any."""
        place = open_storage(self.shard_root, self.remote)
        if self.staging is None:
            return place
        shards = self.shards_of(self.staging.start, self.staging.stop)
        return StagedStorage(place, Path(self.staging.folder), shards, self.remote)

    def shards_of(self, start: int, stop: int) -> Sequence[ShardEntry]:
        """The shards that hold the examples [start, stop), in order."""
        if start >= stop:
            return ()
        first, last = np.searchsorted(self._last_S, (start, stop - 1), side="right").tolist()
        return [entry for entry in self.entries[first : last + 1] if entry.count]

    def require_distinct_shards(self) -> None:
        """
        Raises:
            DataError: two shards hold the same bytes: copies, or one file under two names.
        """
        first: dict[str, str] = {}
        for entry in self.entries:
            if (other := first.setdefault(entry.sha256, entry.name)) != entry.name:
                raise DataError(
                    f"shards {other} and {entry.name} hold the same bytes, so each of their examples would count twice and be "
                    "protected as two are: name one of them only"
                )

    def require_shards(self, shards: ShardSet) -> None:
        """Refuses an index of other shards: a changed pattern must never train on yesterday's files.

        Raises:
            DataError: the index has a shard that `shards` has not, or the other way round.
        """
        if difference := set(shards.names) ^ {entry.name for entry in self.entries}:
            raise DataError(
                f"the index {self.index_dir} is of other shards than those asked for (first difference: "
                f"{min(difference)}); build one for these shards with prepare.py index, or choose another run folder"
            )

    def check_shards(self) -> None:
        """Compares size and version of every shard with the manifest; see `open`."""
        storage = self.storage()
        statuses = require_present(storage.status([entry.name for entry in self.entries]))
        for entry, status in zip(self.entries, statuses, strict=True):
            location = f"{self.shard_root}/{entry.name}"
            if status.size != entry.size:
                raise DataError(
                    f"{location} has {status.size} bytes, its index says {entry.size}; restore the shard or index again"
                )
            # Versions of another kind (an index moved with a copy) say nothing; then only the checksum of every read tells.
            kind, old_kind = (
                version.partition(":")[0] for version in (status.version, entry.version)
            )
            if kind and kind == old_kind and status.version != entry.version:
                raise DataError(
                    f"{location} was written after it was indexed; `prepare.py verify` accepts it if its bytes are the "
                    "same, else restore the shard or index again"
                )
        storage.close()

    def indexed_shards(self) -> Iterator[IndexedShard]:
        """What is known of each shard."""
        for entry, last in zip(self.entries, self._last_S.tolist(), strict=True):
            yield IndexedShard(entry, self._rows_N[last - entry.count : last])

    def remarks(self) -> Iterator[str]:
        """Lines for whoever made the shards: what is not used, and which examples lack a part, by the names of members alone."""
        counted = ("repeated_keys", "skipped", "several_pictures", "no_picture", "no_text")
        sums = (sum(getattr(entry, what) for entry in self.entries) for what in counted)
        repeated, skipped, several, no_picture, no_text = sums
        lacking = [entry.name for entry in self.entries if entry.no_picture + entry.no_text]
        if repeated or skipped:
            yield (
                f"{repeated} examples repeat a key of their shard; {skipped} members belong to no example (links, folders, "
                "hidden or nameless files, PaxHeaders)"
            )
        if several:
            yield (
                f"{several} of {len(self)} examples hold more than one picture, of which the first is used: if dots in names "
                "joined pairs, unpack them into a folder and import that by prepare.py import"
            )
        copies, by_chance, shards = self.copies_in_other_shards()
        if copies > by_chance:
            yield (
                f"{copies:,} of {len(self):,} examples are those of an earlier shard byte for byte, as in {shards[0]} and "
                f"{shards[1]}: k copies form a group of k, whose epsilon is larger; name shards that do not overlap"
            )
        if lacking:
            halves = (
                "; halves of a pair are two examples: they need one shard, and the same path and name, letter by letter, up to "
                "the first dot; unpack shards that hold halves into one folder, and write that by tar --sort=name"
            ) * (no_picture > 0)
            yield (
                f"{no_text} of {len(self)} examples have a picture without caption or label, {no_picture} have no picture, in "
                f"{len(lacking)} of {len(self.entries)} shards, first in {lacking[0]}{halves}"
            )

    def manifest_digest(self) -> bytes:
        """SHA-256 over names, sizes, hashes and counts of all shards: 32 bytes, private, equal for equal data."""
        return manifest_digest(self.entries)


def manifest_digest(entries: Sequence[ShardEntry]) -> bytes:
    """See `ExampleTable.manifest_digest`. Times, ETags and the format of the index are left out: a copy is the same data."""
    rows = [
        [entry.name, entry.size, entry.sha256, entry.count, entry.keys_sha256] for entry in entries
    ]
    return hashlib.sha256(json.dumps([1, rows], separators=(",", ":")).encode()).digest()


def write_manifest(index_dir: Path, extents: str, entries: Sequence[ShardEntry]) -> None:
    """Writes manifest.json, which makes an index whole.

    Args:
        index_dir: the folder of the index.
        extents: name of the file with the rows of all examples.
        entries: the shards that are in the index.

    Raises:
        DataError: it cannot be written.
    """
    manifest = {
        "format_version": FORMAT_VERSION,
        "num_examples": sum(entry.count for entry in entries),
        "extents": extents,
        "shards": [asdict(entry) for entry in entries],
    }
    with private_file(index_dir / MANIFEST) as file:
        file.write(json.dumps(manifest, indent=1).encode())


def load_manifest(index_dir: Path) -> dict[str, Any]:
    """The content of manifest.json; a DataError where there is none, or one of another format."""
    path = index_dir / MANIFEST
    try:
        manifest = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError as error:
        raise DataError(
            f"there is no index in {index_dir}; build it: prepare.py index SHARDS --output DIR"
        ) from error
    except (OSError, ValueError) as error:
        raise DataError(f"cannot read {path} ({error}); build the index again") from error
    if not isinstance(manifest, dict) or manifest.get("format_version") != FORMAT_VERSION:
        raise DataError(f"{path} is no index of format {FORMAT_VERSION}; build it again")
    return manifest


def _reopen(
    index_dir: Path, shard_root: str, remote: RemoteOptions, digest: bytes, staging: Staging | None
) -> ExampleTable:
    table = ExampleTable.open(index_dir, shard_root, remote=remote, check_shards=False)
    if table.manifest_digest() != digest:
        raise DataError(
            f"the index {index_dir} was replaced while it was in use; ids now mean other examples"
        )
    table.staging = staging
    return table
