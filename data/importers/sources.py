"""Where image-text pairs come from: folders and tables (CSV, COCO, Parquet). Items come in parts that are read apart."""

import csv
import hashlib
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from data.errors import DataError
from data.reading.reader import json_record

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")
TEXT_SUFFIXES = (".txt", ".json", ".cls")
"""What stands next to an image of the same name: its caption, its fields, its label."""
TABLES = ("metadata.csv", "captions.csv")
_MAX_FIELD = 1 << 20
_BATCH_ROWS = 64


REASONS = {
    "unsafe_path": "the image's path leaves the folder, or goes through a symbolic link",
    "missing_image": "there is no image, or no such file",
    "undecodable_image": "the image cannot be decoded, or has more than 34 million pixels",
    "small_image": "the image's shorter side has fewer than 16 pixels",
    "no_caption": "no caption is left after cleaning, and there is no label",
    "duplicate_key": "an earlier item of the source has the same key",
    "exact_duplicate": "pixels and caption equal those of an earlier example",
    "near_duplicate": "the picture looks like that of an earlier example (--keep_near_duplicates)",
    "no_owner": "the owner is not given",
    "owner_limit": "its owner has reached the limit",
}
"""Why items are dropped, in the order in which it is looked at."""


class Item(NamedTuple):
    """One image with its captions.

    Attributes:
        key: its name in the source, for the report only.
        image: a file, bytes, or None where there is none.
        captions: all of them, uncleaned.
        owner: whose it is, where the source says.
        problem: a key of REASONS, where it cannot be used at all.
        label: number of its class, where the source says.
    """

    key: str
    image: Path | bytes | None
    captions: tuple[str, ...]
    owner: str | None = None
    problem: str | None = None
    label: int | None = None


@dataclass(frozen=True)
class ListedPart:
    """Items whose images are files."""

    listed: tuple[Item, ...]

    def items(self) -> Iterator[Item]:
        return iter(self.listed)


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


class Source(NamedTuple):
    """Everything to import.

    Attributes:
        parts: in order; each is picklable and its `items()` are always in the same order.
        fingerprint: changes when the source does; a resumed import insists on the same.
        other_files: how many files of a folder are neither pictures of a known format nor texts of one, by suffix.
    """

    parts: Sequence[ListedPart | RowGroupPart]
    fingerprint: str
    other_files: Mapping[str, int] = MappingProxyType({})


def in_parts(items: Sequence[Item], size: int = 500) -> list[ListedPart]:
    """Cuts a list of items."""
    return [ListedPart(tuple(items[start : start + size])) for start in range(0, len(items), size)]


def file_item(
    root: Path, name: str, captions: tuple[str, ...], owner: str | None = None, label: int | None = None
) -> Item:
    """An item whose image is a file below `root` (a resolved folder); a name that leads elsewhere is its problem."""
    path = root / name
    unsafe = not name or "\0" in name or os.path.isabs(name) or ".." in Path(name).parts
    if unsafe or os.path.realpath(path) != str(path):
        return Item(name, None, captions, owner, "unsafe_path" if name else "missing_image")
    return Item(name, path, captions, owner, label=label)


def open_source(
    name: str, source_format: str, columns: Columns, image_root: Path | None = None, *, lines_are_captions: bool = False
) -> Source:
    """The items of a folder or of a file.

    Args:
        name: a path.
        source_format: folder, csv, coco or parquet.
        columns: which columns or fields are used.
        image_root: folder that image paths start from; that of the file by default.
        lines_are_captions: each line of a text next to an image is a caption; otherwise the whole text is one.

    Raises:
        DataError: there is no such source, or it is malformed.
    """
    path = Path(name)
    if image_root is not None and not image_root.is_dir():
        raise DataError(f"there is no folder {image_root}")
    if source_format == "folder":
        return folder_source(path, columns, lines_are_captions=lines_are_captions)
    if not path.exists():
        raise DataError(f"there is no {path}")
    if source_format == "csv" and path.suffix.lower() not in (".csv", ".tsv"):
        raise DataError(f"{path} does not end in .csv or .tsv")
    read = {"csv": table_source, "coco": coco_source, "parquet": parquet_source}[source_format]
    return read(path, columns, image_root)


def label_of(value: Any) -> int | None:
    """A whole number from 0 on, or its digits; anything else is no label."""
    if isinstance(value, str):
        digits = value.strip()
        value = int(digits) if digits.isascii() and digits.isdecimal() and len(digits) <= 9 else None
    return value if type(value) is int and 0 <= value < 10**9 else None


def file_fingerprint(path: Path) -> str:
    """Name, size and time of a file."""
    status = path.stat()
    return f"{path.absolute()} {status.st_size} {status.st_mtime_ns}"


def require_columns(present: list[str], columns: Columns, where: Path) -> None:
    """Raises DataError when a column is missing; names those that are there. With labels captions are not needed."""
    for name in columns:
        is_needed = name is not None and (columns.label is None or name != columns.caption)
        if is_needed and name not in present:
            there = ", ".join(present[:20])
            raise DataError(
                f"{where} has no column {name}; it has {there}. See --image_column, --caption_column, --label_column, "
                "--owner_field"
            )


def table_source(path: Path, columns: Columns, image_root: Path | None) -> Source:
    """A .csv or .tsv file with a header, UTF-8.

    Args:
        path: the file.
        columns: which to use.
        image_root: what image paths are relative to; the file's folder by default.

    Raises:
        DataError: no such file or column, no UTF-8, or a malformed line, which it names.
    """
    root = (image_root or path.parent).resolve()
    items = []
    csv.field_size_limit(_MAX_FIELD)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            require_columns(list(reader.fieldnames or []), columns, path)
            for row in reader:
                if None in row:  # otherwise a caption with a comma and without quotes would be cut there
                    raise DataError(
                        f"{path}, line {reader.line_num} has more fields than the header; quote texts that hold the separator"
                    )
                name, texts = row[columns.image] or "", columns.captions_in(row)
                items.append(file_item(root, name, texts, columns.owner_in(row), columns.label_in(row)))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start} of a block); convert it first") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return Source(in_parts(items), file_fingerprint(path))


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
    if lines := next(folder.glob("*.jsonl"), None):
        raise DataError(
            f"{lines} is not read; make it Parquet (docs/data.md) and give --from parquet --image_root {folder}"
        )
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
    parts: list[RowGroupPart] = []
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
