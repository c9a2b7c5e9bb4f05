"""Existing webdataset shards. Names inside of an archive are keys, never paths: nothing is unpacked to the disk."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError, ReadError
from data.importers.items import Item, Part, Source
from data.importers.tables import Columns, file_fingerprint, label_of, owner_of
from data.index.shard import walk_shard
from data.index.shards import expand_shards
from data.reading.reader import MAX_EXAMPLE_BYTES, RawExample, parse_example


@dataclass(frozen=True)
class ShardPart:
    """One shard."""

    path: Path
    columns: Columns
    caption_field: str | None

    def items(self) -> Iterator[Item]:
        extents = walk_shard(self.path, str(self.path))
        seen: set[bytes] = set()
        with open(self.path, "rb") as file:
            for key, (start, end) in zip(extents.keys, extents.bounds_K2.tolist(), strict=True):
                name = key.decode("utf-8", "replace")
                if key in seen:
                    yield Item(name, None, (), None, "duplicate_key")
                    continue
                seen.add(key)
                if end - start > MAX_EXAMPLE_BYTES:
                    yield Item(name, None, (), None, "undecodable_image")
                    continue
                extent = os.pread(file.fileno(), end - start, start)
                if len(extent) != end - start:
                    raise ReadError(f"{self.path} shrank while it was read")
                raw = parse_example(extent)
                captions = tuple(raw.captions(self.caption_field))
                yield Item(name, raw.image, captions, self._owner(raw), label=self._label(raw))

    def _owner(self, raw: RawExample) -> str | None:
        return None if self.columns.owner is None else owner_of(_record(raw).get(self.columns.owner))

    def _label(self, raw: RawExample) -> int | None:
        if self.columns.label is None:
            return label_of(raw.fields.get("cls"))
        return label_of(_record(raw).get(self.columns.label))


def _record(raw: RawExample) -> dict[str, Any]:
    try:
        record = json.loads(raw.fields.get("json", b"null"))
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def shard_source(pattern: str, columns: Columns, caption_field: str | None) -> Source:
    """Shards by pattern, folder or list, as for `prepare.py index`.

    Args:
        pattern: see `data.shards`.
        columns: only `owner` and `label` are used: fields of the .json member; without `label` it is the member .cls.
        caption_field: of the .json member; None means the text member, or else the field `caption`.

    Raises:
        DataError: no such shards.
    """
    paths = expand_shards(pattern, Path.cwd())
    if not paths:
        raise DataError(f"no shards match {pattern}")
    parts: list[Part] = [ShardPart(path.absolute(), columns, caption_field) for path in paths]
    return Source(parts, "\n".join(map(file_fingerprint, paths)))
