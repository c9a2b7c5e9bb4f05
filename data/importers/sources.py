"""Where image-text pairs come from: folders and tables (CSV, COCO, Parquet). Items come in parts that are read apart.

Every source makes records, which are a table's rows or the like of them, and `Columns.item` makes an item of each.
"""

import csv
import itertools
import json
import os
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from data.errors import DataError
from data.reading.reader import json_record, whole_number

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")
TEXT_SUFFIXES = (".txt", ".json", ".cls")
"""What stands next to an image of the same name: its caption, its fields, its label."""
TABLES = ("metadata.csv", "captions.csv")
_MAX_FIELD = 1 << 20
_PART = 500
"""Items that one worker converts at a time."""
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


class Columns(NamedTuple):
    """Names of columns, or of JSON fields."""

    image: str = "image"
    caption: str = "caption"
    owner: str | None = None
    label: str | None = None

    def item(self, record: Mapping[str, Any], root: Path, key: str = "") -> Item:
        """The item of a record.

        The image is the name of a file below `root` (a resolved folder), its bytes, or both in a dictionary; a name that leads
        elsewhere is a problem. The caption is a text or a list of texts, anything else is none; an owner is a non-empty text, or
        a number as text.

        Args:
            key: where the image has no name.
        """
        texts, image = record.get(self.caption), record.get(self.image)
        owner = None if self.owner is None else record.get(self.owner)
        captions = tuple(
            text for text in (texts if isinstance(texts, list | tuple) else [texts]) if isinstance(text, str)
        )
        named = str(owner).strip() if isinstance(owner, str | int) and not isinstance(owner, bool) else ""
        label = None if self.label is None else whole_number(record.get(self.label))
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if not isinstance(image, str):
            return Item(key, image if isinstance(image, bytes) else None, captions, named or None, label=label)
        path = root / image
        unsafe = (
            "\0" in image or os.path.isabs(image) or ".." in Path(image).parts or os.path.realpath(path) != str(path)
        )
        problem = ("unsafe_path" if unsafe else None) if image else "missing_image"
        return Item(image, None if problem else path, captions, named or None, problem, label)


@dataclass(frozen=True)
class RowGroup:
    """The items in one row group of a Parquet file."""

    path: Path
    number: int
    columns: Columns
    root: Path

    def __iter__(self) -> Iterator[Item]:
        opened = _open(self.path)
        names = [name for name in self.columns if name in opened.schema_arrow.names]
        place = itertools.count()
        for batch in opened.iter_batches(64, row_groups=[self.number], columns=names):
            for row in batch.to_pylist():
                yield self.columns.item(row, self.root, f"{self.path.name}:{self.number}:{next(place)}")


class Source(NamedTuple):
    """Everything to import.

    Attributes:
        parts: in order; each is picklable and always has the same items in the same order.
        other_files: how many files of a folder are neither pictures of a known format nor texts of one, by suffix.
    """

    parts: Sequence[Iterable[Item]]
    other_files: Mapping[str, int] = MappingProxyType({})

    @classmethod
    def of(cls, items: Sequence[Item], other_files: Mapping[str, int] = MappingProxyType({})) -> "Source":
        """Items whose images are files."""
        return cls([items[start : start + _PART] for start in range(0, len(items), _PART)], other_files)


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
    for there, kind in ((path, source_format), (image_root, "folder")):
        if there is not None and not (there.is_dir() if kind == "folder" else there.exists()):
            raise DataError(f"there is no {kind} {there}")
    if source_format == "folder":
        return folder_source(path, columns, lines_are_captions=lines_are_captions)
    root = (image_root or (path if path.is_dir() else path.parent)).resolve()
    return {"csv": table_source, "coco": coco_source, "parquet": parquet_source}[source_format](path, columns, root)


def require_columns(present: Sequence[str], columns: Columns, where: Path) -> None:
    """Raises DataError when a column is missing; names those that are there. With labels captions are not needed."""
    for name in columns:
        is_needed = name is not None and (columns.label is None or name != columns.caption)
        if is_needed and name not in present:
            there = ", ".join(present[:20])
            raise DataError(
                f"{where} has no column {name}; it has {there}. See --image_column, --caption_column, --label_column, "
                "--owner_field"
            )


def table_source(path: Path, columns: Columns, root: Path) -> Source:
    """A .csv or .tsv file with a header, UTF-8.

    Raises:
        DataError: no such column, no UTF-8, or a malformed line, which it names.
    """
    items = []
    csv.field_size_limit(_MAX_FIELD)
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file, delimiter="\t" if path.suffix.lower() == ".tsv" else ",")
            require_columns(reader.fieldnames or [], columns, path)
            for row in reader:
                if None in row:  # otherwise a caption with a comma and without quotes would be cut there
                    raise DataError(
                        f"{path}, line {reader.line_num} has more fields than the header; quote texts that hold the separator"
                    )
                items.append(columns.item(row, root))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num}: {error}") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start} of a block); convert it first") from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    return Source.of(items)


def coco_source(path: Path, columns: Columns, root: Path) -> Source:
    """COCO captions, one JSON file with `images` (id, file_name) and `annotations` (image_id, caption).

    Each image is one item with all of its captions, in the order of the file. Of the columns only `owner` is used: a field of the
    entries in `images`.

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
    used = Columns("file_name", "caption", columns.owner)
    return Source.of(
        [used.item({**one, "caption": captions[one.get("id")]}, root, str(one.get("id"))) for one in images]
    )


def folder_source(folder: Path, columns: Columns, *, lines_are_captions: bool = False) -> Source:
    """All images below a folder; where it has one of TABLES, that table says which.

    Files that are neither pictures nor texts of one are counted by their suffix. Symbolic links are never followed: linked images
    are counted as unsafe, linked folders passed over. Of several images of one name (a.jpg, a.png) the first counts.

    Raises:
        DataError: no image in it.
    """
    root = folder.resolve()
    for name in TABLES:
        if (folder / name).is_file():
            return table_source(folder / name, columns, root)
    if lines := next(folder.glob("*.jsonl"), None):
        raise DataError(
            f"{lines} is not read; make it Parquet (docs/data.md) and give --from parquet --image_root {folder}"
        )
    items, seen, others = [], set[Path](), Counter[str]()
    files = [Path(parent, name) for parent, _, names in os.walk(root, followlinks=False) for name in names]
    pictured = {path.with_suffix("") for path in files if path.suffix.lower() in IMAGE_SUFFIXES}
    for path in sorted(files):
        name, stem = path.relative_to(root).as_posix(), path.with_suffix("")
        if path.suffix.lower() not in IMAGE_SUFFIXES:
            if path.suffix not in TEXT_SUFFIXES or stem not in pictured:
                others[path.suffix.lower() or "none"] += 1
        elif stem in seen and not path.is_symlink():
            items.append(Item(name, None, (), None, "duplicate_key"))
        else:
            record = json_record((_text(path.with_suffix(".json")) or "").encode())
            if text := _text(path.with_suffix(".txt")):
                record[columns.caption] = text.splitlines() if lines_are_captions else text
            item = columns.item({**record, columns.image: name}, root)
            if item.problem is None:
                seen.add(stem)
            if columns.label is None:
                item = item._replace(label=whole_number(_text(path.with_suffix(".cls"))))
            items.append(item)
    if not pictured:
        raise DataError(f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}) and no {' or '.join(TABLES)}")
    return Source.of(items, others)


def _text(path: Path) -> str | None:
    """The text next to an image; what is no UTF-8, linked or too long counts as none."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_FIELD:
        return None
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None


def parquet_source(path: Path, columns: Columns, root: Path) -> Source:
    """A Parquet file, or a folder of them.

    Raises:
        DataError: no such file or column, or no Parquet.
    """
    files = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
    if not files:
        raise DataError(f"{path} holds no .parquet files")
    parts: list[RowGroup] = []
    for file in files:
        opened = _open(file)
        require_columns(opened.schema_arrow.names, columns, file)
        parts += [RowGroup(file, number, columns, root) for number in range(opened.num_row_groups)]
    return Source(parts)


def _open(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path} as Parquet: {error}") from error
