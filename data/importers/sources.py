"""Where image-text pairs come from: folders, tables (CSV, JSON lines, COCO, Parquet) and webdataset shards.

Names inside of an archive are keys, never paths: nothing is unpacked to the disk.
"""

import csv
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import DataError, ReadError
from data.importers.items import Item, Part, Source, file_item, in_parts
from data.index.shard import walk_shard
from data.index.shards import expand_shards
from data.reading.reader import MAX_EXAMPLE_BYTES, json_record, parse_example

FORMATS = ("folder", "csv", "jsonl", "coco", "parquet", "webdataset")
IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")
TEXT_SUFFIXES = (".txt", ".json", ".cls")
"""What stands next to an image of the same name: its caption, its fields, its label."""
TABLES = ("metadata.jsonl", "metadata.csv", "captions.jsonl", "captions.csv")
_MAX_FIELD = 1 << 20
_BATCH_ROWS = 64


class Columns(NamedTuple):
    """Names of columns, or of JSON fields."""

    image: str = "image"
    caption: str = "caption"
    owner: str | None = None
    label: str | None = None

    def captions_in(self, record: Mapping[str, Any]) -> tuple[str, ...]:
        """The texts in a record: the caption is a text or a list of texts; anything else is no caption."""
        value = record.get(self.caption)
        values = value if isinstance(value, list | tuple) else [value]
        return tuple(text for text in values if isinstance(text, str))

    def owner_in(self, record: Mapping[str, Any]) -> str | None:
        """The owner in a record, where a column is named for it: a non-empty text, or a number as text."""
        value = None if self.owner is None else record.get(self.owner)
        if isinstance(value, bool) or not isinstance(value, str | int):
            return None
        return str(value).strip() or None

    def label_in(self, record: Mapping[str, Any]) -> int | None:
        """The label in a record, where a column is named for it; see `label_of`."""
        return None if self.label is None else label_of(record.get(self.label))


def open_source(
    name: str, source_format: str, columns: Columns, image_root: Path | None = None, *, lines_are_captions: bool = False
) -> Source:
    """The items of a folder, of a file, or of shards.

    Args:
        name: a path, or for webdataset a pattern of shards.
        source_format: one of FORMATS.
        columns: which columns or fields are used.
        image_root: folder that image paths start from; that of the file by default.
        lines_are_captions: each line of a text next to an image is a caption; otherwise the whole text is one.

    Raises:
        DataError: there is no such source, or it is malformed.
    """
    path = Path(name)
    if image_root is not None and not image_root.is_dir():
        raise DataError(f"there is no folder {image_root}")
    if source_format == "webdataset":
        return shard_source(name, columns, None if columns.caption == "caption" else columns.caption)
    if not path.exists():
        raise DataError(f"there is no {path}")
    if source_format == "folder":
        return folder_source(path, columns, lines_are_captions=lines_are_captions)
    if source_format in ("parquet", "coco"):
        return (parquet_source if source_format == "parquet" else coco_source)(path, columns, image_root)
    suffixes = {"csv": (".csv", ".tsv"), "jsonl": (".jsonl", ".ndjson")}[source_format]
    if path.suffix.lower() not in suffixes:
        raise DataError(f"{path} does not end in {' or '.join(suffixes)}")
    return table_source(path, columns, image_root)


def label_of(value: Any) -> int | None:
    """A whole number from 0 on, or its digits; anything else is no label."""
    if isinstance(value, bytes):
        value = value[:64].decode("ascii", "replace")
    if isinstance(value, str):
        digits = value.strip()
        value = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 9 else None
    return value if type(value) is int and 0 <= value < 10**9 else None


def file_fingerprint(path: Path) -> str:
    """Name, size and time of a file."""
    status = path.stat()
    return f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"


def require_columns(present: Mapping[str, Any] | list[str], columns: Columns, where: Path | str) -> None:
    """Raises DataError when a column is missing; names those that are there. With labels captions are not needed."""
    for name in columns:
        is_needed = name is not None and (columns.label is None or name != columns.caption)
        if is_needed and name not in present:
            there = ", ".join(list(present)[:20])
            raise DataError(
                f"{where} has no column {name}; it has {there}. See --image_column, --caption_column, --label_column, "
                "--owner_field"
            )


def table_source(path: Path, columns: Columns, image_root: Path | None) -> Source:
    """A .csv, .tsv or .jsonl file.

    Args:
        path: the file, UTF-8.
        columns: which to use.
        image_root: what image paths are relative to; the file's folder by default.

    Raises:
        DataError: no such file or column, no UTF-8, or a malformed line, which it names.
    """
    root = (image_root or path.parent).resolve()
    read_rows = _json_rows if path.suffix.lower() in (".jsonl", ".ndjson") else _csv_rows
    items = []
    try:
        for row in read_rows(path, columns):
            name = row[columns.image]
            if isinstance(name, str):
                owner, label = columns.owner_in(row), columns.label_in(row)
                items.append(file_item(root, name, columns.captions_in(row), owner, label))
            else:
                items.append(Item(str(name), None, (), None, "missing_image"))
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start} of a block); convert it first") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return Source(in_parts(items), file_fingerprint(path))


def _csv_rows(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    csv.field_size_limit(_MAX_FIELD)
    with open(path, newline="", encoding="utf-8-sig") as file:
        reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
        try:
            require_columns(list(reader.fieldnames or []), columns, path)
            for row in reader:
                if None in row:  # otherwise a caption with a comma and without quotes would be cut there
                    raise DataError(
                        f"{path}, line {reader.line_num} has more fields than the header; quote texts that hold the separator"
                    )
                yield row
        except csv.Error as error:
            raise DataError(f"{path}, line {reader.line_num}: {error}") from error


def _json_rows(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    is_first = True
    with open(path, encoding="utf-8-sig") as file:
        for number, line in enumerate(file, 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except (ValueError, RecursionError) as error:
                raise DataError(f"{path}, line {number} is no JSON: {error}") from error
            if not isinstance(row, dict):
                raise DataError(f"{path}, line {number} is no JSON object")
            if is_first:
                require_columns(row, columns, path)
                is_first = False
            yield {columns.image: None, columns.caption: None} | row


def coco_source(path: Path, columns: Columns, image_root: Path | None) -> Source:
    """COCO captions, one JSON file with `images` (id, file_name) and `annotations` (image_id, caption).

    Each image is one item with all of its captions, in the order of the file.

    Args:
        path: captions_*.json.
        columns: only `owner` is used: a field of the entries in `images`.
        image_root: folder of the images; the file's folder by default.

    Raises:
        DataError: it is no such file, an image id occurs twice, or an annotation names no image of the file.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    lists: list[Any] = [tree.get(name) for name in ("images", "annotations")] if isinstance(tree, dict) else [None]
    if any(not isinstance(part, list) or any(not isinstance(entry, dict) for entry in part) for part in lists):
        raise DataError(f"{path} is no COCO captions file: it needs the lists images and annotations")
    images, annotations = lists
    captions: defaultdict[Any, list[str]] = defaultdict(list)
    for entry in annotations:
        if isinstance(entry.get("caption"), str):
            captions[entry.get("image_id")].append(entry["caption"])
    ids = [entry.get("id") for entry in images]
    if len(set(ids)) != len(ids):
        raise DataError(f"{path}: an image id occurs twice")
    if unknown := captions.keys() - set(ids):
        raise DataError(
            f"{path}: {len(unknown)} annotations are of no image, the first of image id {min(map(str, unknown))}"
        )
    root = (image_root or path.parent).resolve()
    items = []
    for entry in images:
        name, texts = entry.get("file_name"), tuple(captions[entry.get("id")])
        if isinstance(name, str):
            items.append(file_item(root, name, texts, columns.owner_in(entry)))
        else:
            items.append(Item(str(entry.get("id")), None, texts, None, "missing_image"))
    return Source(in_parts(items), file_fingerprint(path))


def folder_source(folder: Path, columns: Columns, *, lines_are_captions: bool = False) -> Source:
    """All images below a folder; where it has one of TABLES, that table says which.

    Files that are neither pictures nor texts of one are counted by their suffix. Symbolic links are never followed: linked images
    are counted as unsafe, linked folders passed over. Of several images of one name (a.jpg, a.png) the first counts.

    Raises:
        DataError: no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    for name in TABLES:
        if (folder / name).is_file():
            return table_source(folder / name, columns, folder)
    root = folder.resolve()
    items, digest, seen, others = [], hashlib.sha256(), set[Path](), Counter[str]()
    files = [Path(parent, name) for parent, _, names in os.walk(root, followlinks=False) for name in names]
    pictured = {path.with_suffix("") for path in files if path.suffix.lower() in IMAGE_SUFFIXES}
    for path in sorted(files):
        name = path.relative_to(root).as_posix()
        digest.update(f"{name} {path.lstat().st_size} {path.lstat().st_mtime_ns}\n".encode("utf-8", "surrogatepass"))
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            if path.suffix not in TEXT_SUFFIXES or path.with_suffix("") not in pictured:
                others[path.suffix.lower() or "none"] += 1
        elif path.is_symlink():
            items.append(Item(name, None, (), None, "unsafe_path"))
        elif path.with_suffix("") in seen:
            items.append(Item(name, None, (), None, "duplicate_key"))
        else:
            seen.add(path.with_suffix(""))
            text = _text(path.with_suffix(".txt"))
            record = json_record((_text(path.with_suffix(".json")) or "").encode())
            captions = (
                tuple(text.splitlines() if lines_are_captions else [text]) if text else columns.captions_in(record)
            )
            label = columns.label_in(record) if columns.label else label_of(_text(path.with_suffix(".cls")))
            items.append(Item(name, path, captions, columns.owner_in(record), label=label))
    if not pictured:
        raise DataError(f"{folder} holds no images ({', '.join(IMAGE_SUFFIXES)}) and none of {', '.join(TABLES)}")
    return Source(in_parts(items), digest.hexdigest(), others)


def _text(path: Path) -> str | None:
    """The text next to an image; what is no UTF-8, linked or too long counts as none."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_FIELD:
        return None
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


@dataclass(frozen=True)
class RowGroupPart:
    """One row group of one file."""

    path: Path
    row_group: int
    columns: Columns
    image_root: Path

    def items(self) -> Iterator[Item]:
        opened = _open(self.path)
        names = [name for name in self.columns if name in opened.schema_arrow.names]
        batches = opened.iter_batches(_BATCH_ROWS, row_groups=[self.row_group], columns=names)
        for number, batch in enumerate(batches):
            for place, row in enumerate(batch.to_pylist()):
                image, captions = row[self.columns.image], self.columns.captions_in(row)
                owner, label = self.columns.owner_in(row), self.columns.label_in(row)
                if isinstance(image, dict):
                    image = image.get("bytes") or image.get("path")
                if isinstance(image, str):
                    yield file_item(self.image_root, image, captions, owner, label)
                else:
                    key = f"{self.path.name}:{self.row_group}:{number * _BATCH_ROWS + place}"
                    yield Item(key, image if isinstance(image, bytes) else None, captions, owner, label=label)


def parquet_source(path: Path, columns: Columns, image_root: Path | None) -> Source:
    """A Parquet file, or a folder of them.

    Args:
        path: the file or the folder.
        columns: which to use.
        image_root: what paths are relative to; the file's folder by default.

    Raises:
        DataError: no such file or column, no Parquet, or pyarrow is missing.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no .parquet files")
    parts: list[Part] = []
    for file in files:
        opened = _open(file)
        require_columns(opened.schema_arrow.names, columns, file)
        root = (image_root or file.parent).resolve()
        parts += [RowGroupPart(file, group, columns, root) for group in range(opened.num_row_groups)]
    return Source(parts, "\n".join(map(file_fingerprint, files)))


def _open(path: Path) -> Any:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise DataError(f"reading Parquet needs pyarrow ({error}); pip install -r requirements.txt") from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path} as Parquet: {error}") from error


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
        caption_field: field of the .json member; None means the text member, or else the field `caption`.

    Raises:
        DataError: no such shards.
    """
    paths = expand_shards(pattern, Path.cwd())
    parts: list[Part] = [ShardPart(path.absolute(), columns, caption_field) for path in paths]
    return Source(parts, "\n".join(map(file_fingerprint, paths)))
