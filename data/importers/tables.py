"""Tables of images: CSV, JSON lines, and COCO's JSON; each names images by their paths and gives captions."""

import csv
import json
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from data.errors import DataError
from data.importers.items import Item, Source, file_item, in_parts

_MAX_FIELD = 1 << 20


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
