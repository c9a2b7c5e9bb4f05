"""The index: example id -> shard, offset, length, checksum. Memory-mapped, 11 bytes per example.

Poisson sampling needs random access to any example of any shard, which tar lacks. An example is a
run of neighbouring members with one key (`tar_format.split_key`), so that one read fetches it
whole. An example without an image or a caption stays an example: the number of examples n is an
input of the privacy accounting and may not depend on decoding (docs/data.md). `build` writes it.
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
"""Changes with every stricter check of shards, so that an index of refused shards is not used."""
MANIFEST = "manifest.json"
"""Renamed into place last: it names the `extents-DIGEST.npy` of the index (rows of `shard.ROW`).

Both files are private (mode 0600): shard sizes, counts and hashes describe the data.
"""
_LOCAL = RemoteOptions()


class Extents(NamedTuple):
    """Places of examples, one row per id.

    Attributes:
        shards: number of the shard in the table.
        offsets: bytes from the shard's start.
        lengths: bytes.
        crc32s: CRC-32 of these bytes.
    """

    shards: np.ndarray
    offsets: np.ndarray
    lengths: np.ndarray
    crc32s: np.ndarray


class ExampleTable:
    """All examples of a data set.

    The id of an example is its place in the data set: shards sorted by name, then tar order.
    """

    def __init__(
        self,
        index_dir: Path,
        shard_root: str,
        entries: Sequence[ShardEntry],
        rows_N: np.ndarray,
        remote: RemoteOptions = _LOCAL,
    ):
        """Use `open` or `data.index.build.build_index`."""
        self.index_dir = index_dir
        self.shard_root = shard_root
        self.entries = tuple(entries)
        self.remote = remote
        self.staging: Staging | None = None
        self._rows_N = rows_N
        # First id behind each shard.
        self._stop_S = np.cumsum([entry.count for entry in self.entries], dtype=np.int64)

    @classmethod
    def open(
        cls,
        index_dir: Path,
        shard_root: Path | str,
        *,
        remote: RemoteOptions = _LOCAL,
        check_shards: bool = True,
    ) -> "ExampleTable":
        """Maps an index and checks its shards, as far as that costs no reading.

        Args:
            index_dir: the folder that `build_index` wrote.
            shard_root: folder or URL that the shard names of the manifest are relative to.
            remote: options for a root that is a URL.
            check_shards: compare existence, size and version of every shard with the manifest.

        Raises:
            DataError: the index is missing or damaged, or shards are missing, of another size or
                modified since.
            ReadError: a remote storage does not answer.
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
        num_examples = sum(entry.count for entry in entries)
        if rows_N.shape != (num_examples,) or rows_N.dtype != ROW:
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
        """Pickles the path of the index, since its rows may have gigabytes."""
        digest = self.manifest_digest()
        return _reopen, (self.index_dir, self.shard_root, self.remote, digest, self.staging)

    def extents(self, ids: np.ndarray | Sequence[int] | int) -> Extents:
        """Returns the places of examples.

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
        shards_K = np.searchsorted(self._stop_S, ids_K, side="right")
        offsets_K = rows_K["first_block"].astype(np.int64) * BLOCK
        high_bits_K = rows_K["high"].astype(np.int64) << 16
        num_blocks_K = rows_K["low"].astype(np.int64) | high_bits_K
        crc32s_K = rows_K["crc32"].astype(np.int64)
        return Extents(shards_K, offsets_K, num_blocks_K * BLOCK, crc32s_K)

    def count_shared_with(
        self, other_table: "ExampleTable", max_searched: int = 1_000_000
    ) -> tuple[int, float]:
        """Counts examples that another table has byte for byte, by length and CRC-32.

        Members' names and times in a tar are part of an example's bytes.

        Args:
            other_table: the table to search.
            max_searched: limit of the searched examples, which spread evenly over this table.

        Returns:
            (number of examples in both; upper bound of the number that chance puts there).
        """

        def fingerprints(table: ExampleTable, ids: np.ndarray) -> np.ndarray:
            extents = table.extents(ids)
            return extents.lengths << 32 | extents.crc32s

        num_searched = min(max_searched, len(self))
        spread = np.linspace(0, len(self) - 1, num_searched)
        ids = np.unique(spread.astype(np.int64))
        searched = fingerprints(self, ids)
        is_copy = np.zeros(len(searched), dtype=bool)
        for start in range(0, len(other_table), max_searched):
            other_ids = np.arange(start, min(start + max_searched, len(other_table)))
            is_copy |= np.isin(searched, fingerprints(other_table, other_ids))
        return int(is_copy.sum()), len(searched) * len(other_table) / 2**32

    def copies_in_other_shards(
        self, max_compared: int = 4_000_000
    ) -> tuple[int, float, tuple[str, str]]:
        """Counts examples that an earlier shard has byte for byte, by length and CRC-32.

        Members' names and times are part of an example's bytes.

        Args:
            max_compared: of more examples only those are compared whose CRC-32 is a multiple of
                some number; copies have equal CRC-32s.

        Returns:
            (number of copies, scaled up; upper bound of the number by chance, eight deviations
            included; two shards that share an example).
        """
        divisor = -(-len(self) // max_compared)
        parts: list[np.ndarray] = []
        for start in range(0, len(self), max_compared):
            crc32_K = self._rows_N["crc32"][start : start + max_compared]
            parts.append(start + np.flatnonzero(crc32_K % divisor == 0))
        ids = np.concatenate(parts)
        extents = self.extents(ids)
        fingerprints = extents.lengths << 32 | extents.crc32s
        order = np.lexsort((extents.shards, fingerprints))
        fingerprints = fingerprints[order]
        shards = extents.shards[order]
        is_same = fingerprints[1:] == fingerprints[:-1]
        is_copy = is_same & (shards[1:] != shards[:-1])
        _, num_of_length = np.unique(extents.lengths, return_counts=True)
        counts = num_of_length.astype(np.float64) * divisor
        by_chance = float((counts**2).sum()) / 2**33
        limit = by_chance + 8 * (divisor * by_chance) ** 0.5
        first = int(np.argmax(is_copy)) if is_copy.any() else 0
        second = min(first + 1, len(shards) - 1)
        first_name = self.entries[int(shards[first])].name
        second_name = self.entries[int(shards[second])].name
        return int(is_copy.sum()) * divisor, limit, (first_name, second_name)

    def requests(self, ids: np.ndarray | Sequence[int] | int) -> list[ReadRequest]:
        """Returns the requests to a storage, one per id; see `extents`."""
        columns = [column.tolist() for column in self.extents(ids)]
        return [
            ReadRequest(self.entries[shard], offset, length, crc32)
            for shard, offset, length, crc32 in zip(*columns, strict=True)
        ]

    def storage(self) -> Storage:
        """Returns the storage of the shards, or that of this node's copies."""
        source = open_storage(self.shard_root, self.remote)
        if self.staging is None:
            return source
        shards = self.shards_of(self.staging.start, self.staging.stop)
        return StagedStorage(source, Path(self.staging.folder), shards, self.remote)

    def shards_of(self, start: int, stop: int) -> Sequence[ShardEntry]:
        """Returns the shards that have the examples [start, stop), in order."""
        if start >= stop:
            return ()
        first, last = np.searchsorted(self._stop_S, (start, stop - 1), side="right").tolist()
        return [entry for entry in self.entries[first : last + 1] if entry.count]

    def require_distinct_shards(self) -> None:
        """Refuses shards of the same bytes: copies, or one file under two names.

        Raises:
            DataError: two shards have the same bytes.
        """
        first_names: dict[str, str] = {}
        for entry in self.entries:
            first_name = first_names.setdefault(entry.sha256, entry.name)
            if first_name != entry.name:
                raise DataError(
                    f"shards {first_name} and {entry.name} hold the same bytes, so each of their "
                    "examples would count twice and be protected as two are: name one of them only"
                )

    def require_shards(self, shards: ShardSet) -> None:
        """Refuses an index of other shards: a changed pattern must never train on the old files.

        Raises:
            DataError: only one of the index and `shards` has some shard.
        """
        indexed_names = {entry.name for entry in self.entries}
        difference = set(shards.names) ^ indexed_names
        if difference:
            raise DataError(
                f"the index {self.index_dir} is of other shards than those asked for (first "
                f"difference: {min(difference)}); build one for these shards with prepare.py "
                "index, or choose another run folder"
            )

    def check_shards(self) -> None:
        """Compares size and version of every shard with the manifest; see `open`."""
        storage = self.storage()
        statuses = require_present(storage.status([entry.name for entry in self.entries]))
        for entry, status in zip(self.entries, statuses, strict=True):
            location = f"{self.shard_root}/{entry.name}"
            if status.size != entry.size:
                raise DataError(
                    f"{location} has {status.size} bytes, its index says {entry.size}; restore the "
                    "shard or index again"
                )
            # Versions of different kinds (an index moved with a copy) cannot be compared; then the
            # checksum of every read finds a changed shard.
            kind, _, _ = status.version.partition(":")
            indexed_kind, _, _ = entry.version.partition(":")
            if kind and kind == indexed_kind and status.version != entry.version:
                raise DataError(
                    f"{location} was written after it was indexed; `prepare.py verify` accepts it "
                    "if its bytes are the same, else restore the shard or index again"
                )
        storage.close()

    def indexed_shards(self) -> Iterator[IndexedShard]:
        """Yields each shard with its entry and its rows."""
        for entry, stop in zip(self.entries, self._stop_S.tolist(), strict=True):
            yield IndexedShard(entry, self._rows_N[stop - entry.count : stop])

    def remarks(self) -> Iterator[str]:
        """Yields lines about members that are not used and examples that lack a part.

        The names of members alone decide, for nothing is decoded.
        """
        repeated = sum(entry.repeated_keys for entry in self.entries)
        skipped = sum(entry.skipped for entry in self.entries)
        several = sum(entry.several_pictures for entry in self.entries)
        no_picture = sum(entry.no_picture for entry in self.entries)
        no_text = sum(entry.no_text for entry in self.entries)
        lacking = [entry.name for entry in self.entries if entry.no_picture + entry.no_text]
        if repeated or skipped:
            yield (
                f"{repeated} examples repeat a key of their shard; {skipped} members belong to no "
                "example (links, folders, hidden or nameless files, PaxHeaders)"
            )
        if several:
            yield (
                f"{several} of {len(self)} examples hold more than one picture, of which the first "
                "is used: if dots in names joined pairs, unpack them into a folder and import that "
                "by prepare.py import"
            )
        copies, by_chance, (first_name, second_name) = self.copies_in_other_shards()
        if copies > by_chance:
            yield (
                f"{copies:,} of {len(self):,} examples are those of an earlier shard byte for "
                f"byte, as in {first_name} and {second_name}: k copies form a group of k, whose "
                "epsilon is larger; name shards that do not overlap"
            )
        if lacking:
            advice = ""
            if no_picture:
                advice = (
                    "; halves of a pair are two examples: they need one shard, and the same path "
                    "and name, letter by letter, up to the first dot; unpack shards that hold "
                    "halves into one folder, and write that by tar --sort=name"
                )
            yield (
                f"{no_text} of {len(self)} examples have a picture without caption or label, "
                f"{no_picture} have no picture, in {len(lacking)} of {len(self.entries)} shards, "
                f"first in {lacking[0]}{advice}"
            )

    def manifest_digest(self) -> bytes:
        """Returns a SHA-256 over all shards: 32 bytes, private, equal for equal data."""
        return manifest_digest(self.entries)


def manifest_digest(entries: Sequence[ShardEntry]) -> bytes:
    """Returns a SHA-256 over names, sizes, hashes and counts of all shards.

    Times, ETags and the format of the index are left out: a copy is the same data.
    """
    rows = [
        [entry.name, entry.size, entry.sha256, entry.count, entry.keys_sha256] for entry in entries
    ]
    text = json.dumps([1, rows], separators=(",", ":"))
    return hashlib.sha256(text.encode()).digest()


def write_manifest(index_dir: Path, extents: str, entries: Sequence[ShardEntry]) -> None:
    """Writes manifest.json, which makes an index whole.

    Args:
        index_dir: the folder of the index.
        extents: name of the file with the rows of all examples.
        entries: the shards of the index.

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
    """Returns the content of manifest.json.

    Raises:
        DataError: the manifest is missing, cannot be read or has another format.
    """
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
        raise DataError(f"{path} is not an index of format {FORMAT_VERSION}; build it again")
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
