"""Sources of image-text pairs: folders and tables (CSV, COCO, Parquet), read part by part.

Every source makes records, such as the rows of a table, and `Columns.example_of` makes an example
of each; `join_records` joins all records of a picture. The content of a cell is private: messages
name its place only.
"""

import csv
import itertools
import json
import os
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from operator import attrgetter
from pathlib import Path
from types import MappingProxyType
from typing import Any, NamedTuple

from data.errors import DataError, ReadError
from data.index.tar_format import MACOS_PREFIX
from data.reading.reader import whole_number

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp")
TEXT_SUFFIXES = (".txt", ".json", ".cls")
"""Files beside an image of the same name: its caption, its fields, its label."""
TABLES = ("metadata.csv", "captions.csv")
PARQUET = ".parquet"
_MAX_FIELD = 1 << 20
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_LATE_QUOTE = re.compile(r'\s+"')
_FILE_NAME = re.compile(r"\S+\.[^\W\d]\w{1,4}")
"""A text that may be a file's name, also that of a missing picture or of another kind of file."""
_PROBLEMS = {
    "unexpected": "a quote is never closed",
    "field": f"a text has more than {_MAX_FIELD:,} characters",
}
"""First word of the csv module's message about a malformed line -> plain words."""
_NAME_BYTES = 255
_PATH_BYTES = 4096
_ENCODED_PICTURE = re.compile(r"data:|/9j/|iVBORw0KGgo|R0lGOD|UklGR|[A-Za-z0-9+/=_\s-]{256,}\Z")
"""Base64 of a JPEG, PNG, GIF or WebP, or base64 that is longer than names without a dot."""
_PART = 500
"""Examples that one worker converts at a time."""
REASONS = {
    "unsafe_path": "the image's path leaves the folder, or goes through a symbolic link",
    "unusable_value": (
        "the label is not a whole number of at most nine digits, or a caption is not a text"
    ),
    "missing_image": "there is no image, or no such file",
    "undecodable_image": "the image cannot be decoded, or has more than 34 million pixels",
    "small_image": "the image's shorter side has fewer than 16 pixels",
    "no_caption": "no caption is left after cleaning, and there is no label",
    "duplicate_key": "an earlier example of the source has the same key",
    "exact_duplicate": "pixels and caption equal those of an earlier example",
    "same_picture": "the picture is that of an earlier example, with another caption or label",
    "near_duplicate": "the picture looks like that of an earlier example (--keep_near_duplicates)",
    "no_owner": "the owner is not given",
    "owner_limit": "its owner has reached the limit",
}
"""Reasons to drop an example, in the order in which they are checked."""


class SourceExample(NamedTuple):
    """One image of a source with its captions.

    Attributes:
        key: its place in the source: the name of a file, or of a table and a line.
        image: a file, bytes, or None for a missing image.
        captions: all captions, uncleaned.
        owner: the owner's name, if the source states it.
        problem: a key of REASONS if the example cannot be used at all.
        label: number of its class, if the source states it.
        records: number of the source's records that were joined.
    """

    key: str
    image: Path | bytes | None
    captions: tuple[str, ...]
    owner: str | None = None
    problem: str | None = None
    label: int | None = None
    records: int = 1


class Columns(NamedTuple):
    """Names of a table's columns, or of JSON fields."""

    image: str = "image"
    caption: str = "caption"
    owner: str | None = None
    label: str | None = None

    def example_of(self, record: Mapping[str, Any], root: Path, key: str) -> SourceExample:
        """Returns the example of a record.

        The image is the name of a file below `root` (a resolved folder), its bytes, or both in a
        dictionary. Problems are a name outside of `root`, a caption that is neither a text nor a
        list of texts, and a label that is neither empty nor a whole number. An owner is a non-empty
        text, or a number as text.

        Args:
            key: the place of the record.

        Raises:
            DataError: the column of the image holds neither names nor bytes.
        """
        texts = record.get(self.caption)
        if not isinstance(texts, list | tuple):
            texts = [texts]
        texts = [text for text in texts if text is not None]
        captions = tuple(text for text in texts if isinstance(text, str))
        owner_field = None if self.owner is None else record.get(self.owner)
        # True and False are integers to isinstance.
        has_owner = isinstance(owner_field, str | int) and not isinstance(owner_field, bool)
        owner = str(owner_field).strip() if has_owner else ""
        label_field = None if self.label is None else record.get(self.label)
        label = whole_number(label_field)
        is_bad_label = label is None and label_field is not None and bool(str(label_field).strip())
        has_bad_caption = len(captions) < len(texts)
        problem = "unusable_value" if is_bad_label or has_bad_caption else None
        image = record.get(self.image)
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if isinstance(image, list):
            raise DataError(
                f"{key}: column {self.image} holds a list; an example has one picture: give its "
                "name, its bytes, or {bytes, path}"
            )
        if not isinstance(image, str):
            image_bytes = image if isinstance(image, bytes) and not problem else None
            return SourceExample(key, image_bytes, captions, owner or None, problem, label)
        if _is_no_name(image) and not os.path.isfile(root / image):
            raise DataError(
                f"{key}: column {self.image} has no file names (base64?); write its pictures to "
                "files, or as bytes to Parquet"
            )
        path = root / image
        if not image:
            problem = "missing_image"
        elif "\0" in image or os.path.isabs(image) or ".." in Path(image).parts or _is_linked(path):
            problem = "unsafe_path"
        usable_path = None if problem else path
        return SourceExample(key, usable_path, captions, owner or None, problem, label)


def _is_no_name(text: str) -> bool:
    """Returns whether a file cannot have this name, or the text is an encoded picture."""
    sizes = [len(part.encode("utf-8", "surrogatepass")) for part in text.split("/")]
    if _ENCODED_PICTURE.match(text) and not text.lower().endswith(IMAGE_SUFFIXES):
        return True
    return max(sizes) > _NAME_BYTES or sum(sizes) + len(sizes) > _PATH_BYTES


def _is_linked(path: Path) -> bool:
    """Returns whether a path goes through a symbolic link, or cannot be a path at all."""
    try:
        return os.path.realpath(path) != str(path)
    # The path has letters that UTF-8 lacks.
    except ValueError:
        return True


def join_records(examples: Iterable[SourceExample]) -> list[SourceExample]:
    """Returns one example for all records of a picture, at the place of the first record.

    It has their captions in order. Records with an owner are never joined with records without one.

    Raises:
        DataError: records of a picture give it two owners or two labels.
    """
    first_places: dict[tuple[Path | bytes, bool], int] = {}
    joined: list[SourceExample] = []
    captions: list[list[str]] = []
    for example in examples:
        place = len(joined)
        if example.image is not None:
            picture = (example.image, example.owner is None)
            place = first_places.setdefault(picture, len(joined))
        if place == len(joined):
            joined.append(example)
            captions.append([*example.captions])
            continue
        earlier = joined[place]
        has_two_labels = (
            None not in (earlier.label, example.label) and earlier.label != example.label
        )
        if has_two_labels or earlier.owner != example.owner:
            field = "labels" if has_two_labels else "owners"
            raise DataError(
                f"{example.key}, and {earlier.key}, give one picture two {field}; an example has "
                "one: take one of them away"
            )
        captions[place] += example.captions
        label = example.label if earlier.label is None else earlier.label
        num_records = earlier.records + example.records
        joined[place] = earlier._replace(label=label, records=num_records)
    return [
        example._replace(captions=tuple(texts))
        for example, texts in zip(joined, captions, strict=True)
    ]


@dataclass(frozen=True)
class RowGroup:
    """The examples of one row group of a Parquet file."""

    path: Path
    number: int
    columns: Columns
    root: Path

    def __iter__(self) -> Iterator[SourceExample]:
        """Joins records of one picture that follow each other; `join_records` finds the others.

        Raises:
            DataError: the file is damaged, or its columns hold something else.
        """
        for _, records in itertools.groupby(self._records(), key=attrgetter("image")):
            yield from join_records(records)

    def _records(self) -> Iterator[SourceExample]:
        table = _open(self.path)
        names = [name for name in self.columns if name in table.schema_arrow.names]
        row_numbers = itertools.count()
        batches = table.iter_batches(64, row_groups=[self.number], columns=names)
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            # The texts of these errors may hold a value of the table.
            except (OSError, ValueError) as error:
                raise DataError(
                    f"cannot read {self.path}, row group {self.number}: {type(error).__name__}; "
                    "write the file again, with texts in UTF-8"
                ) from error
            for row in rows:
                key = f"{self.path.name}, row group {self.number}, row {next(row_numbers)}"
                yield self.columns.example_of(row, self.root, key)


class Source(NamedTuple):
    """The examples to import.

    Attributes:
        parts: in order; each is picklable and always has the same examples in the same order.
        other_files: number of a folder's files that are not read, by suffix.
        other_folders: folders that are not entered.
    """

    parts: Sequence[Iterable[SourceExample]]
    other_files: Mapping[str, int] = MappingProxyType({})
    other_folders: Sequence[str] = ()

    @classmethod
    def of(cls, examples: Sequence[SourceExample]) -> "Source":
        """Returns a source of examples whose images are files."""
        starts = range(0, len(examples), _PART)
        return cls([examples[start : start + _PART] for start in starts])


def open_source(
    name: str,
    source_format: str,
    columns: Columns,
    image_root: Path | None = None,
    *,
    lines_are_captions: bool = False,
) -> Source:
    """Returns the examples of a folder or of a file.

    Args:
        name: a path.
        source_format: folder, csv, coco or parquet.
        columns: columns or fields that are used.
        image_root: folder that image paths start from; that of the file by default.
        lines_are_captions: each line of a text next to an image is a caption; otherwise the whole
            text is one.

    Raises:
        DataError: the source does not exist, or it is malformed.
    """
    path = Path(name)
    for required_path, kind in ((path, source_format), (image_root, "folder")):
        if required_path is None:
            continue
        exists = required_path.is_dir() if kind == "folder" else required_path.exists()
        if not exists:
            raise DataError(f"there is no {kind} {required_path}")
    if source_format == "folder":
        return folder_source(path, columns, lines_are_captions=lines_are_captions)
    folder = path if path.is_dir() else path.parent
    root = (image_root or folder).resolve()
    readers = {"csv": table_source, "coco": coco_source, "parquet": parquet_source}
    return readers[source_format](path, columns, root)


def require_columns(present: Sequence[str], columns: Columns, path: Path) -> None:
    """Refuses a table that lacks a column, or has two of one name.

    With labels captions are not needed. The message does not list the columns of the table, since
    they are a row of the data if the file has no header.

    Args:
        present: columns of the table.
        columns: columns that are used.
        path: the table's name in messages.

    Raises:
        DataError: a column is missing, or two have one name.
    """
    for name in columns:
        is_needed = name is not None and (columns.label is None or name != columns.caption)
        if is_needed and name not in present:
            raise DataError(
                f"{path} has no column {name} among its {len(present)}; its header must name it "
                "so, or say its name: --image_column, --caption_column, --label_column, "
                "--owner_field"
            )
        if name is not None and present.count(name) > 1:
            raise DataError(f"{path} has two columns {name}; rename or remove one of them")


class _Row(NamedTuple):
    """A row of a table, and the numbers of its first and last line."""

    first: int
    last: int
    fields: list[str]


def _read_rows(path: Path, separator: str) -> Iterator[_Row]:
    """Yields the rows of a file in UTF-8, empty lines too.

    Raises:
        DataError: the file cannot be read, or a line is malformed; the message names the line.
    """
    csv.field_size_limit(_MAX_FIELD)
    first = 1
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            for fields in reader:
                if any("\0" in field for field in fields):
                    raise DataError(
                        f"{path}, line {first} holds zero bytes: it is damaged or not UTF-8; write "
                        "it again"
                    )
                yield _Row(first, reader.line_num, fields)
                first = reader.line_num + 1
    except csv.Error as error:
        first_word, _, _ = str(error).partition(" ")
        problem = _PROBLEMS.get(first_word, "text follows a closing quote")
        raise DataError(
            f"{path}, line {first}: {problem} (noticed in line {reader.line_num}); close each "
            "quote that opens a text, and write quotes inside of it twice"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start} of a block); convert it first"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def table_source(path: Path, columns: Columns, root: Path) -> Source:
    """Returns the examples of a .csv or .tsv file with a header, in UTF-8.

    The table is read strictly, since a stray quote makes one text of many rows.

    Raises:
        DataError: a missing column, a file that is not UTF-8, or a malformed line, which the
            message names.
    """
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = _read_rows(path, separator)
    header = next(rows, _Row(1, 1, []))
    names = header.fields
    width = len(names)

    def names_file(field: str) -> bool:
        text = field.strip()
        is_image = text.lower().endswith(IMAGE_SUFFIXES) or os.path.isfile(root / text)
        return is_image or _FILE_NAME.fullmatch(text) is not None

    require_columns(names, columns, path)
    min_fields = 1 + max(names.index(name) for name in columns if name in names)
    image_place = names.index(columns.image)

    def is_like_a_row(line: str) -> bool:
        """Returns whether a line has the fields of a row and a file's name at the image's place.

        The place counts from either end of the line.
        """
        fields = line.split(separator)
        if len(fields) < min_fields:
            return False
        for place in {image_place, image_place - width + len(fields)}:
            if 0 <= place < len(fields) and names_file(fields[place]):
                return True
        return False

    def examples() -> Iterator[SourceExample]:
        for row in itertools.chain([header], rows):
            if row.last > row.first:
                # The lines of the file, without quotes.
                lines = _LINE_BREAK.split(separator.join(row.fields))
                num_like_rows = sum(map(is_like_a_row, lines))
                num_images = sum(map(names_file, row.fields[image_place : image_place + 1]))
                holds_rows = num_like_rows > num_images
                if row is header:
                    # The width of a header with a stray quote counts the fields of other rows too.
                    holds_rows |= any(
                        separator in name and _LINE_BREAK.search(name) for name in names
                    )
                else:
                    # A text with line breaks in the first or last column leaves one line with the
                    # fields of a row.
                    num_wide_lines = sum(line.count(separator) + 1 >= width for line in lines)
                    holds_rows |= num_wide_lines > 1
                if holds_rows:
                    raise DataError(
                        f"{path}, line {row.first}: a quoted text that ends in line {row.last} "
                        "holds whole rows; correct its quotes, or replace its line breaks by blanks"
                    )
            is_blank = len(row.fields) <= 1 and not "".join(row.fields).strip()
            if is_blank:
                continue
            # Otherwise a caption with a comma and without quotes would be cut at the comma.
            if len(row.fields) > width:
                raise DataError(
                    f"{path}, line {row.first} has more fields than the header; quote texts that "
                    "hold the separator"
                )
            # Otherwise a caption with a line break would be cut at the line break.
            if len(row.fields) < width:
                raise DataError(
                    f"{path}, line {row.first} has fewer fields than the header; correct its "
                    "quotes, quote texts that hold line breaks, and write empty fields too"
                )
            if any(_LATE_QUOTE.match(field) and field.count('"') % 2 for field in row.fields):
                raise DataError(
                    f"{path}, line {row.first} has a blank before a quote: it does not count as "
                    "one, and the next separator would cut the text; remove the blank"
                )
            if row is header:
                continue
            record = dict(zip(names, row.fields, strict=True))
            yield columns.example_of(record, root, f"{path.name}, line {row.first}")

    return Source.of(join_records(examples()))


def coco_source(path: Path, columns: Columns, root: Path) -> Source:
    """Returns the examples of a file of COCO captions.

    The JSON has `images` (id, file_name) and `annotations` (image_id, caption). Each image is one
    example with all of its captions, in the order of the file. Of the columns only `owner` is used:
    a field of the entries in `images`.

    Raises:
        DataError: the file is not of this kind, an image id occurs twice, or an annotation names
            an image that the file lacks.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    # The texts of these errors may quote a letter of the file.
    except json.JSONDecodeError as error:
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: no JSON") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); convert it first") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not read as JSON: a number has too many digits, or lists are nested too "
            "deep"
        ) from error
    fields = tree if isinstance(tree, dict) else {}
    images: Any = fields.get("images")
    annotations: Any = fields.get("annotations")
    for entries in (images, annotations):
        is_list = isinstance(entries, list)
        if not is_list or any(not isinstance(entry, dict) for entry in entries):
            raise DataError(
                f"{path} is not a COCO captions file: it needs the lists images and annotations"
            )
    captions: defaultdict[Any, list[str]] = defaultdict(list)
    places: dict[Any, int] = {}
    for name, field, entries in (
        ("images", "id", images),
        ("annotations", "image_id", annotations),
    ):
        for place, entry in enumerate(entries):
            identity = entry.get(field)
            location = f"{path}: {name}[{place}]"
            # Otherwise True and 1.0 would equal 1, and two missing ids would be one.
            if type(identity) not in (int, str):
                raise DataError(f"{location} has no {field} that is a whole number or a text")
            if name == "images" and places.setdefault(identity, place) != place:
                raise DataError(
                    f"{location} has the id of images[{places[identity]}]: an image id occurs twice"
                )
            if name == "annotations":
                if identity not in places:
                    raise DataError(
                        f"{location} is of no image: no entry of images has its image_id"
                    )
                caption = entry.get("caption")
                if not isinstance(caption, str | None):
                    raise DataError(
                        f"{location} has a caption that is not a text; write one annotation for "
                        "each text"
                    )
                if caption is not None:
                    captions[identity].append(caption)
    coco_columns = Columns("file_name", "caption", columns.owner)
    records = ({**entry, "caption": captions[entry.get("id")]} for entry in images)
    examples = (
        coco_columns.example_of(record, root, f"{path.name}, images[{place}]")
        for place, record in enumerate(records)
    )
    return Source.of(join_records(examples))


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Returns an object of a JSON file.

    Raises:
        DataError: two of its values have one name, of which Python would take the last.
    """
    fields = dict(pairs)
    if len(fields) < len(pairs):
        raise DataError("an object in it has two values of one name")
    return fields


def folder_source(folder: Path, columns: Columns, *, lines_are_captions: bool = False) -> Source:
    """Returns all images below a folder, or those of its table, if it has one of TABLES.

    Unused files are counted by their suffix; a text beside a picture that cannot be read is unused,
    and so is JSON whose caption differs from that of the .txt. Symbolic links are never followed:
    linked images are counted as unsafe, linked texts by their suffix, linked folders named. Of
    several images of one name (a.jpg, a.png) the first counts. Suffixes are of any case, and of
    a.txt and a.TXT the first is read.

    Raises:
        DataError: the folder has no image.
        ReadError: a folder in it cannot be read.
    """
    root = folder.resolve()
    tables = [name for name in TABLES if (folder / name).is_file()]
    if tables:
        table = root / tables[0]
        source = table_source(folder / tables[0], columns, root)
        images = {example.image for part in source.parts for example in part}
        files, links = _walk(root)
        other_files = [path for path in files if path != table and path not in images]
        suffixes = Counter(path.suffix.lower() or "none" for path in other_files)
        return source._replace(other_files=suffixes, other_folders=links)
    json_lines = next(folder.glob("*.jsonl"), None)
    if json_lines:
        raise DataError(
            f"{json_lines} is not read; make it Parquet (docs/importing.md) and give --from "
            f"parquet --image_root {folder}"
        )

    files, links = _walk(root)
    image_files = [path for path in sorted(files) if path.suffix.lower() in IMAGE_SUFFIXES]
    image_stems = {path.with_suffix("") for path in image_files}
    texts: dict[Path, Path] = {}
    # Small letters come last when sorted, and are preferred.
    for path in sorted(files, reverse=True):
        suffix = path.suffix.lower()
        is_text = suffix in TEXT_SUFFIXES and path.with_suffix("") in image_stems
        if is_text and not path.is_symlink():
            texts.setdefault(path.with_suffix(suffix), path)

    def text_of(path: Path, suffix: str) -> str | None:
        text_file = texts.get(path.with_suffix(suffix))
        return None if text_file is None else _text(text_file)

    examples: list[SourceExample] = []
    used_stems: set[Path] = set()
    used_files: set[Path | None] = set()
    for path in image_files:
        name = path.relative_to(root).as_posix()
        stem = path.with_suffix("")
        used_files.add(path)
        if stem in used_stems and not path.is_symlink():
            examples.append(SourceExample(name, None, (), None, "duplicate_key"))
            continue
        record = _record(text_of(path, ".json") or "")
        text = text_of(path, ".txt")
        label = whole_number(text_of(path, ".cls")) if columns.label is None else None
        has_same_caption = not text or record.get(columns.caption) in (None, text, [text])
        if record and has_same_caption:
            used_files.add(texts.get(path.with_suffix(".json")))
        if text is not None:
            used_files.add(texts.get(path.with_suffix(".txt")))
        if label is not None:
            used_files.add(texts.get(path.with_suffix(".cls")))
        if text:
            record[columns.caption] = text.splitlines() if lines_are_captions else text
        example = columns.example_of({**record, columns.image: name}, root, name)
        if example.problem is None:
            used_stems.add(stem)
        if columns.label is None:
            example = example._replace(label=label)
        examples.append(example)
    if not image_files:
        raise DataError(
            f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}) and no {' or '.join(TABLES)}"
        )
    other_files = [path for path in files if path not in used_files]
    suffixes = Counter(path.suffix.lower() or "none" for path in other_files)
    return Source.of(examples)._replace(other_files=suffixes, other_folders=links)


def _walk(root: Path) -> tuple[list[Path], list[str]]:
    """Returns all files below a folder, and the linked folders, which are not entered.

    Raises:
        ReadError: a folder in it cannot be read.
    """
    files: list[Path] = []
    links: list[str] = []

    def refuse(error: OSError) -> None:
        raise ReadError(
            f"cannot read the folder {error.filename}: {error.strerror}; its pictures would be "
            "missing"
        )

    for parent, folders, names in os.walk(root, onerror=refuse, followlinks=False):
        files += [Path(parent, name) for name in names]
        for name in folders:
            path = Path(parent, name)
            if path.is_symlink():
                links.append(path.relative_to(root).as_posix())
    return files, sorted(links)


def _text(path: Path) -> str | None:
    """Returns the text next to an image, or None if it cannot be used.

    Unusable are files that are not UTF-8, have zero bytes, are too long or not regular.
    """
    if not path.is_file() or path.stat().st_size > _MAX_FIELD:
        return None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _record(text: str) -> dict[str, Any]:
    """Returns the object in the JSON next to an image.

    JSON that is broken, or has two values of one name, counts as empty.
    """
    try:
        record = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def parquet_source(path: Path, columns: Columns, root: Path) -> Source:
    """Returns the examples of a Parquet file, or of a folder of them without folders of its own.

    Raises:
        DataError: the file or a column is missing, or the file is not Parquet.
    """
    files = [path]
    other_files: list[Path] = []
    other_folders: list[str] = []
    if path.is_dir():
        entries = sorted(path.iterdir())
        tables = [
            entry for entry in entries if entry.suffix.lower() == PARQUET and not entry.is_dir()
        ]
        files = [table for table in tables if not table.name.startswith(MACOS_PREFIX)]
        for entry in entries:
            if entry.is_dir():
                if any(inner.suffix.lower() == PARQUET for inner in entry.rglob("*")):
                    other_folders.append(entry.name)
            elif entry not in files:
                other_files.append(entry)
    if not files:
        raise DataError(f"{path} has no .parquet files")
    groups: list[RowGroup] = []
    hold_names = True
    for file in files:
        table = _open(file)
        require_columns(table.schema_arrow.names, columns, file)
        hold_names &= _holds_names(table, columns.image)
        groups += [RowGroup(file, number, columns, root) for number in range(table.num_row_groups)]
    parts: Sequence[Iterable[SourceExample]] = groups
    images: set[Path | bytes | None] = set()
    # Rows that name one file are joined over all row groups; rows of bytes with neighbours alone.
    if hold_names:
        group_examples = [[*group] for group in groups]
        all_examples = list(itertools.chain.from_iterable(group_examples))
        images = {example.image for example in all_examples}
        joined = {example.key: example for example in join_records(all_examples)}
        # A joined example stays in the group of its first record.
        parts = [
            [joined[example.key] for example in examples if example.key in joined]
            for examples in group_examples
        ]
    unused_files = [file for file in other_files if file.resolve() not in images]
    suffixes = Counter(file.suffix.lower() or "none" for file in unused_files)
    return Source(parts, suffixes, other_folders)


def _holds_names(table: Any, column: str) -> bool:
    """Returns whether a column holds names of images and no bytes, by the file's own statistics."""
    kind = table.schema_arrow.field(column).type
    if not str(kind).startswith("struct<"):
        return str(getattr(kind, "value_type", kind)) in ("string", "large_string", "string_view")
    if all(str(part.type) == "null" for part in kind if part.name == "bytes"):
        return True
    for group_number in range(table.num_row_groups):
        group = table.metadata.row_group(group_number)
        for number in range(group.num_columns):
            chunk = group.column(number)
            if chunk.path_in_schema != f"{column}.bytes":
                continue
            statistics = chunk.statistics
            if statistics is None or not statistics.has_null_count:
                return False
            if statistics.null_count != chunk.num_values:
                return False
    return True


def _open(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    # The texts of these errors may hold bytes of the file.
    except (OSError, pyarrow.ArrowException) as error:
        raise DataError(f"cannot read {path} as Parquet: {type(error).__name__}") from error
