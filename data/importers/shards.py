"""Existing webdataset shards. Names inside of an archive are keys, never paths: nothing is unpacked to the disk."""

import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from data.errors import ReadError
from data.importers.items import Item, Part, Source
from data.importers.tables import Columns, file_fingerprint, label_of
from data.index.shard import walk_shard
from data.index.shards import expand_shards
from data.reading.reader import MAX_EXAMPLE_BYTES, json_record, parse_example


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
                if key in seen or end - start > MAX_EXAMPLE_BYTES:
                    yield Item(name, None, (), None, "duplicate_key" if key in seen else "undecodable_image")
                    seen.add(key)
                    continue
                seen.add(key)
                extent = os.pread(file.fileno(), end - start, start)
                if len(extent) != end - start:
                    raise ReadError(f"{self.path} shrank while it was read")
                raw = parse_example(extent)
                record = json_record(raw.fields.get("json", b""))
                label = self.columns.label_in(record) if self.columns.label else label_of(raw.fields.get("cls"))
                captions = tuple(raw.captions(self.caption_field))
                yield Item(name, raw.image, captions, self.columns.owner_in(record), label=label)


def shard_source(pattern: str, columns: Columns, caption_field: str | None) -> Source:
    """Shards by pattern, folder or list, as for `prepare.py index`.

    Args:
        pattern: see `data.index.shards`.
        columns: only `owner` and `label` are used: fields of the .json member; without `label` it is the member .cls.
        caption_field: of the .json member; None means the text member, or else the field `caption`.

    Raises:
        DataError: no such shards.
    """
    paths = expand_shards(pattern, Path.cwd())
    parts: list[Part] = [ShardPart(path.absolute(), columns, caption_field) for path in paths]
    return Source(parts, "\n".join(map(file_fingerprint, paths)))
