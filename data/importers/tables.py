"""CSV and JSON lines: one row per image, with its path and its caption."""

import csv
import json
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
    items = [_item(root, row, columns, path) for row in _rows(path, columns)]
    return Source(in_parts(items), file_fingerprint(path))


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


def _item(root: Path, row: Mapping[str, Any], columns: Columns, path: Path) -> Item:
    name = row[columns.image]
    if not isinstance(name, str):
        return Item(str(name), None, (), None, "missing_image")
    owner = owner_of(row.get(columns.owner)) if columns.owner else None
    label = label_of(row.get(columns.label)) if columns.label else None
    return file_item(root, name, captions_of(row.get(columns.caption)), owner, label)


def captions_of(value: Any) -> tuple[str, ...]:
    """A text or a list of texts; anything else is no caption."""
    values = value if isinstance(value, list | tuple) else [value]
    return tuple(text for text in values if isinstance(text, str))


def owner_of(value: Any) -> str | None:
    """A non-empty text or a number as text."""
    if isinstance(value, bool) or not isinstance(value, str | int):
        return None
    return str(value).strip() or None


def label_of(value: Any) -> int | None:
    """A whole number from 0 on, or its digits; anything else is no label."""
    if isinstance(value, bytes):
        value = value[:64].decode("ascii", "replace")
    if isinstance(value, str):
        digits = value.strip()
        value = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 9 else None
    return value if type(value) is int and 0 <= value < 10**9 else None


def _rows(path: Path, columns: Columns) -> Iterator[Mapping[str, Any]]:
    reader = _json_rows if path.suffix.lower() in (".jsonl", ".ndjson") else _csv_rows
    try:
        yield from reader(path, columns)
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start} of a block); convert it first") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


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
