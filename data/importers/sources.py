"""Where image-text pairs come from: folders and tables (CSV, COCO, Parquet). Items come in parts that are read apart.

Every source makes records, which are a table's rows or the like of them, and `Columns.item` makes an item of each;
`join_records` makes one item of all records of a picture. What a cell holds is private: a message names its place.
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
"""What stands next to an image of the same name: its caption, its fields, its label."""
TABLES = ("metadata.csv", "captions.csv")
PARQUET = ".parquet"
_MAX_FIELD = 1 << 20
_LINE_BREAK = re.compile(r"\r\n|\r|\n")
_LATE_QUOTE = re.compile(r'\s+"')
_FILE_NAME = re.compile(r"\S+\.[^\W\d]\w{1,4}")
"""A text that may be the name of a file, of a picture that is not there or is of another kind too."""
_PROBLEMS = {
    "unexpected": "a quote is never closed",
    "field": f"a text has more than {_MAX_FIELD:,} characters",
}
"""The first word of what the csv module says of a malformed line, in plain words."""
_NAME_BYTES = 255
_PATH_BYTES = 4096
_ENCODED_PICTURE = re.compile(r"data:|/9j/|iVBORw0KGgo|R0lGOD|UklGR|[A-Za-z0-9+/=_\s-]{256,}\Z")
"""How the base64 of a JPEG, PNG, GIF or WebP begins; and any base64 that is longer than names without a dot are."""
_PART = 500
"""Items that one worker converts at a time."""
REASONS = {
    "unsafe_path": "the image's path leaves the folder, or goes through a symbolic link",
    "unusable_value": "the label is no whole number of at most nine digits, or a caption is no text",
    "missing_image": "there is no image, or no such file",
    "undecodable_image": "the image cannot be decoded, or has more than 34 million pixels",
    "small_image": "the image's shorter side has fewer than 16 pixels",
    "no_caption": "no caption is left after cleaning, and there is no label",
    "duplicate_key": "an earlier item of the source has the same key",
    "exact_duplicate": "pixels and caption equal those of an earlier example",
    "same_picture": "the picture is that of an earlier example, with another caption or label",
    "near_duplicate": "the picture looks like that of an earlier example (--keep_near_duplicates)",
    "no_owner": "the owner is not given",
    "owner_limit": "its owner has reached the limit",
}
"""Why items are dropped, in the order in which it is looked at."""


class Item(NamedTuple):
    """One image with its captions.

    Attributes:
        key: its place in the source: the name of a file, or of a table and a line.
        image: a file, bytes, or None where there is none.
        captions: all of them, uncleaned.
        owner: whose it is, where the source says.
        problem: a key of REASONS, where it cannot be used at all.
        label: number of its class, where the source says.
        records: how many records of the source it was made of.
    """

    key: str
    image: Path | bytes | None
    captions: tuple[str, ...]
    owner: str | None = None
    problem: str | None = None
    label: int | None = None
    records: int = 1


class Columns(NamedTuple):
    """Names of columns, or of JSON fields."""

    image: str = "image"
    caption: str = "caption"
    owner: str | None = None
    label: str | None = None

    def item(self, record: Mapping[str, Any], root: Path, key: str) -> Item:
        """The item of a record.

        The image is the name of a file below `root` (a resolved folder), its bytes, or both in a dictionary; a name that leads
        elsewhere is a problem, and so is a caption that is neither a text nor a list of texts, and a label that is neither empty
        nor a whole number. An owner is a non-empty text, or a number as text.

        Args:
            key: the place of the record.

        Raises:
            DataError: the column of the image holds neither names nor bytes.
        """
        texts, image = record.get(self.caption), record.get(self.image)
        owner = None if self.owner is None else record.get(self.owner)
        texts = [
            text
            for text in (texts if isinstance(texts, list | tuple) else [texts])
            if text is not None
        ]
        captions = tuple(text for text in texts if isinstance(text, str))
        named = (
            str(owner).strip()
            if isinstance(owner, str | int) and not isinstance(owner, bool)
            else ""
        )
        written = None if self.label is None else record.get(self.label)
        label = whole_number(written)
        is_lost = label is None and written is not None and bool(str(written).strip())
        unusable = "unusable_value" if is_lost or len(captions) < len(texts) else None
        if isinstance(image, dict):
            image = image.get("bytes") or image.get("path")
        if isinstance(image, list):
            raise DataError(
                f"{key}: column {self.image} holds a list; an example has one picture: give its name, its bytes, or "
                "{bytes, path}"
            )
        if not isinstance(image, str):
            stored = image if isinstance(image, bytes) and not unusable else None
            return Item(key, stored, captions, named or None, unusable, label)
        if _is_no_name(image) and not os.path.isfile(root / image):
            raise DataError(
                f"{key}: column {self.image} holds no file names (base64?); write its pictures to files, or as bytes to "
                "Parquet"
            )
        path = root / image
        unsafe = (
            "\0" in image or os.path.isabs(image) or ".." in Path(image).parts or _is_linked(path)
        )
        problem = ("unsafe_path" if unsafe else unusable) if image else "missing_image"
        return Item(key, None if problem else path, captions, named or None, problem, label)


def _is_no_name(text: str) -> bool:
    """Whether no file can have this name, or the text is a picture itself, encoded."""
    parts = [len(part.encode("utf-8", "surrogatepass")) for part in text.split("/")]
    is_picture = _ENCODED_PICTURE.match(text) and not text.lower().endswith(IMAGE_SUFFIXES)
    return bool(is_picture) or max(parts) > _NAME_BYTES or sum(parts) + len(parts) > _PATH_BYTES


def _is_linked(path: Path) -> bool:
    """Whether a path goes through a symbolic link; one that no file system takes counts as such."""
    try:
        return os.path.realpath(path) != str(path)
    except ValueError:  # letters that UTF-8 does not know
        return True


def join_records(items: Iterable[Item]) -> list[Item]:
    """Returns one item for all records of a picture, where the first stood, with their captions in order.

    A record whose owner is not given joins none that has one.

    Raises:
        DataError: records of a picture give it two owners or two labels.
    """
    first: dict[tuple[Path | bytes, bool], int] = {}
    made: list[Item] = []
    captions: list[list[str]] = []
    for item in items:
        place = (
            len(made)
            if item.image is None
            else first.setdefault((item.image, item.owner is None), len(made))
        )
        if place == len(made):
            made.append(item)
            captions.append([*item.captions])
            continue
        earlier = made[place]
        has_two_labels = None not in (earlier.label, item.label) and earlier.label != item.label
        if has_two_labels or earlier.owner != item.owner:
            raise DataError(
                f"{item.key}, and {earlier.key}, give one picture two {'labels' if has_two_labels else 'owners'}; an example has "
                "one: take one of them away"
            )
        captions[place] += item.captions
        label = item.label if earlier.label is None else earlier.label
        made[place] = earlier._replace(label=label, records=earlier.records + item.records)
    return [
        item._replace(captions=tuple(texts)) for item, texts in zip(made, captions, strict=True)
    ]


@dataclass(frozen=True)
class RowGroup:
    """The items in one row group of a Parquet file."""

    path: Path
    number: int
    columns: Columns
    root: Path

    def __iter__(self) -> Iterator[Item]:
        """Records of one picture that follow each other are joined; those of other places are for `join_records` to find.

        Raises:
            DataError: the file is damaged, or its columns hold something else.
        """
        for _, records in itertools.groupby(self._records(), key=attrgetter("image")):
            yield from join_records(records)

    def _records(self) -> Iterator[Item]:
        opened = _open(self.path)
        names = [name for name in self.columns if name in opened.schema_arrow.names]
        place = itertools.count()
        batches = opened.iter_batches(64, row_groups=[self.number], columns=names)
        while True:
            try:
                rows = next(batches).to_pylist()
            except StopIteration:
                return
            except (OSError, ValueError) as error:  # their words may hold a value
                raise DataError(
                    f"cannot read {self.path}, row group {self.number}: {type(error).__name__}; write the file again, with "
                    "texts in UTF-8"
                ) from error
            for row in rows:
                where = f"{self.path.name}, row group {self.number}, row {next(place)}"
                yield self.columns.item(row, self.root, where)


class Source(NamedTuple):
    """Everything to import.

    Attributes:
        parts: in order; each is picklable and always has the same items in the same order.
        other_files: how many files of a folder are not read, by suffix.
        other_folders: folders that are not entered.
    """

    parts: Sequence[Iterable[Item]]
    other_files: Mapping[str, int] = MappingProxyType({})
    other_folders: Sequence[str] = ()

    @classmethod
    def of(cls, items: Sequence[Item]) -> "Source":
        """Items whose images are files."""
        return cls([items[start : start + _PART] for start in range(0, len(items), _PART)])


def open_source(
    name: str,
    source_format: str,
    columns: Columns,
    image_root: Path | None = None,
    *,
    lines_are_captions: bool = False,
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
    return {"csv": table_source, "coco": coco_source, "parquet": parquet_source}[source_format](
        path, columns, root
    )


def require_columns(present: Sequence[str], columns: Columns, where: Path) -> None:
    """Refuses a table without the columns that are asked for, or with two of one name. With labels captions are not needed.

    Raises:
        DataError: a column is missing, or two have one name. It does not say which columns there are, since they are a row of
            the data where a file has no header.
    """
    for name in columns:
        is_needed = name is not None and (columns.label is None or name != columns.caption)
        if is_needed and name not in present:
            raise DataError(
                f"{where} has no column {name} among its {len(present)}; its header must name it so, or say its name: "
                "--image_column, --caption_column, --label_column, --owner_field"
            )
        if name is not None and present.count(name) > 1:
            raise DataError(f"{where} has two columns {name}; rename or remove one of them")


class _Row(NamedTuple):
    """A row of a table, and the numbers of its first and last line."""

    first: int
    last: int
    fields: list[str]


def _read_rows(path: Path, separator: str) -> Iterator[_Row]:
    """Yields the rows of a file in UTF-8, empty lines too.

    Raises:
        DataError: it cannot be read, or a line is malformed, which it names.
    """
    csv.field_size_limit(_MAX_FIELD)
    first = 1
    try:
        with open(path, newline="", encoding="utf-8-sig") as file:
            reader = csv.reader(file, delimiter=separator, strict=True)
            for fields in reader:
                if any("\0" in field for field in fields):
                    raise DataError(
                        f"{path}, line {first} holds zero bytes: it is damaged, or no UTF-8; write it again"
                    )
                yield _Row(first, reader.line_num, fields)
                first = reader.line_num + 1
    except csv.Error as error:
        problem = _PROBLEMS.get(str(error).partition(" ")[0], "text follows a closing quote")
        raise DataError(
            f"{path}, line {first}: {problem} (noticed in line {reader.line_num}); close each quote that opens a text, and write "
            "quotes inside of it twice"
        ) from error
    except UnicodeDecodeError as error:
        raise DataError(
            f"{path} is not UTF-8 (byte {error.start} of a block); convert it first"
        ) from error
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error


def table_source(path: Path, columns: Columns, root: Path) -> Source:
    """A .csv or .tsv file with a header, UTF-8. It is read strictly, since a stray quote makes one text of many rows.

    Raises:
        DataError: no such column, no UTF-8, or a malformed line, which it names.
    """
    separator = "\t" if path.suffix.lower() == ".tsv" else ","
    rows = _read_rows(path, separator)
    header = next(rows, _Row(1, 1, []))
    names, width = header.fields, len(header.fields)

    def names_image(field: str) -> bool:
        return field.strip().lower().endswith(IMAGE_SUFFIXES) or os.path.isfile(
            root / field.strip()
        )

    def names_file(field: str) -> bool:
        return names_image(field) or _FILE_NAME.fullmatch(field.strip()) is not None

    def is_like_a_row(line: str) -> bool:
        """Whether a line has the fields of a row and names a file where a row does, counted from either end."""
        fields = line.split(separator)
        places = {place, place - width + len(fields)}
        return len(fields) >= least and any(
            0 <= at < len(fields) and names_file(fields[at]) for at in places
        )

    require_columns(names, columns, path)
    least = 1 + max(names.index(name) for name in columns if name in names)
    place = names.index(columns.image)

    def items() -> Iterator[Item]:
        for row in itertools.chain([header], rows):
            if row.last > row.first:
                lines = _LINE_BREAK.split(
                    separator.join(row.fields)
                )  # as they stand in the file, without quotes
                is_swallower = sum(map(is_like_a_row, lines)) > sum(
                    map(names_file, row.fields[place : place + 1])
                )
                if row is header:  # its own width counts what it swallowed
                    is_swallower |= any(
                        separator in name and _LINE_BREAK.search(name) for name in names
                    )
                else:  # one line has the fields of a row where a text with line breaks is in the first or last column
                    is_swallower |= sum(line.count(separator) + 1 >= width for line in lines) > 1
                if is_swallower:
                    raise DataError(
                        f"{path}, line {row.first}: a quoted text that ends in line {row.last} holds whole rows; correct its "
                        "quotes, or replace its line breaks by blanks"
                    )
            is_blank = len(row.fields) <= 1 and not "".join(row.fields).strip()
            if is_blank:
                continue
            if (
                len(row.fields) > width
            ):  # otherwise a caption with a comma and without quotes would be cut there
                raise DataError(
                    f"{path}, line {row.first} has more fields than the header; quote texts that hold the separator"
                )
            if len(row.fields) < width:  # and a caption with a line break at it
                raise DataError(
                    f"{path}, line {row.first} has fewer fields than the header; correct its quotes, quote texts that hold line "
                    "breaks, and write empty fields too"
                )
            if any(_LATE_QUOTE.match(field) and field.count('"') % 2 for field in row.fields):
                raise DataError(
                    f"{path}, line {row.first} has a blank before a quote: it does not count as one, and the next separator "
                    "would cut the text; remove the blank"
                )
            if row is header:
                continue
            yield columns.item(
                dict(zip(names, row.fields, strict=True)), root, f"{path.name}, line {row.first}"
            )

    return Source.of(join_records(items()))


def coco_source(path: Path, columns: Columns, root: Path) -> Source:
    """COCO captions, one JSON file with `images` (id, file_name) and `annotations` (image_id, caption).

    Each image is one item with all of its captions, in the order of the file. Of the columns only `owner` is used: a field of the
    entries in `images`.

    Raises:
        DataError: it is no such file, an image id occurs twice, or an annotation names no image of the file.
    """
    try:
        tree = json.loads(path.read_text(encoding="utf-8-sig"), object_pairs_hook=_object)
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    except (
        json.JSONDecodeError
    ) as error:  # its words, and those of the others, may hold a letter of the file
        raise DataError(f"{path}, line {error.lineno}, column {error.colno}: no JSON") from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 (byte {error.start}); convert it first") from error
    except (ValueError, RecursionError) as error:
        raise DataError(
            f"{path} is not read as JSON: a number has too many digits, or lists are nested too deep"
        ) from error
    lists: list[Any] = (
        [tree.get(name) for name in ("images", "annotations")] if isinstance(tree, dict) else [None]
    )
    if any(
        not isinstance(part, list) or any(not isinstance(entry, dict) for entry in part)
        for part in lists
    ):
        raise DataError(
            f"{path} is no COCO captions file: it needs the lists images and annotations"
        )
    images, annotations = lists
    captions: defaultdict[Any, list[str]] = defaultdict(list)
    places: dict[Any, int] = {}
    for name, field, entries in (
        ("images", "id", images),
        ("annotations", "image_id", annotations),
    ):
        for place, entry in enumerate(entries):
            identity, where = entry.get(field), f"{path}: {name}[{place}]"
            if type(identity) not in (
                int,
                str,
            ):  # True and 1.0 would be taken for 1, and two that are missing for one
                raise DataError(f"{where} has no {field} that is a whole number or a text")
            if name == "images" and places.setdefault(identity, place) != place:
                raise DataError(
                    f"{where} has the id of images[{places[identity]}]: an image id occurs twice"
                )
            if name == "annotations":
                if identity not in places:
                    raise DataError(f"{where} is of no image: no entry of images has its image_id")
                caption = entry.get("caption")
                if not isinstance(caption, str | None):
                    raise DataError(
                        f"{where} has a caption that is no text; write one annotation for each text"
                    )
                captions[identity] += [] if caption is None else [caption]
    used = Columns("file_name", "caption", columns.owner)
    return Source.of(
        join_records(
            used.item(
                {**entry, "caption": captions[entry.get("id")]},
                root,
                f"{path.name}, images[{place}]",
            )
            for place, entry in enumerate(images)
        )
    )


def _object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """An object of a JSON file.

    Raises:
        DataError: two of its values have one name, of which Python would take the last.
    """
    made = dict(pairs)
    if len(made) < len(pairs):
        raise DataError("an object in it has two values of one name")
    return made


def folder_source(folder: Path, columns: Columns, *, lines_are_captions: bool = False) -> Source:
    """All images below a folder; where it has one of TABLES, that table says which.

    Files of which nothing is used are counted by their suffix, also a text beside a picture that cannot be read, and JSON whose
    caption is another than that of the .txt. Symbolic links are never followed: linked images
    are counted as unsafe, linked texts by their suffix, linked folders named. Of several images of one name (a.jpg, a.png) the
    first counts; suffixes are of any case, and of a.txt and a.TXT the first is read.

    Raises:
        DataError: no image in it.
        ReadError: a folder in it cannot be read.
    """
    root = folder.resolve()
    if tables := [name for name in TABLES if (folder / name).is_file()]:
        source = table_source(folder / tables[0], columns, root)
        listed = {root / tables[0], *(item.image for part in source.parts for item in part)}
        files, links = _walk(root)
        others = Counter(path.suffix.lower() or "none" for path in files if path not in listed)
        return source._replace(other_files=others, other_folders=links)
    if lines := next(folder.glob("*.jsonl"), None):
        raise DataError(
            f"{lines} is not read; make it Parquet (docs/importing.md) and give --from parquet --image_root {folder}"
        )

    files, links = _walk(root)
    pictured = {path.with_suffix("") for path in files if path.suffix.lower() in IMAGE_SUFFIXES}
    texts: dict[Path, Path] = {}
    for path in sorted(
        files, reverse=True
    ):  # small letters come last when sorted, and are preferred
        if (
            path.suffix.lower() in TEXT_SUFFIXES
            and path.with_suffix("") in pictured
            and not path.is_symlink()
        ):
            texts.setdefault(path.with_suffix(path.suffix.lower()), path)

    def text_of(path: Path, suffix: str) -> str | None:
        text = texts.get(path.with_suffix(suffix))
        return None if text is None else _text(text)

    items, seen, used = list[Item](), set[Path](), set[Path | None]()
    for path in (path for path in sorted(files) if path.suffix.lower() in IMAGE_SUFFIXES):
        name, stem = path.relative_to(root).as_posix(), path.with_suffix("")
        used.add(path)
        if stem in seen and not path.is_symlink():
            items.append(Item(name, None, (), None, "duplicate_key"))
            continue
        record, text = _record(text_of(path, ".json") or ""), text_of(path, ".txt")
        label = whole_number(text_of(path, ".cls")) if columns.label is None else None
        is_record_used = bool(record) and (
            not text or record.get(columns.caption) in (None, text, [text])
        )
        for suffix, is_used in (
            (".json", is_record_used),
            (".txt", text is not None),
            (".cls", label is not None),
        ):
            used.add(texts.get(path.with_suffix(suffix)) if is_used else None)
        if text:
            record[columns.caption] = text.splitlines() if lines_are_captions else text
        item = columns.item({**record, columns.image: name}, root, name)
        if item.problem is None:
            seen.add(stem)
        items.append(item if columns.label is not None else item._replace(label=label))
    if not pictured:
        raise DataError(
            f"{folder} has no images ({', '.join(IMAGE_SUFFIXES)}) and no {' or '.join(TABLES)}"
        )
    others = Counter(path.suffix.lower() or "none" for path in files if path not in used)
    return Source.of(items)._replace(other_files=others, other_folders=links)


def _walk(root: Path) -> tuple[list[Path], list[str]]:
    """All files below a folder, and the linked folders, which are not entered.

    Raises:
        ReadError: a folder in it cannot be read.
    """
    files, links = list[Path](), list[str]()

    def refuse(error: OSError) -> None:
        raise ReadError(
            f"cannot read the folder {error.filename}: {error.strerror}; its pictures would be missing"
        )

    for parent, folders, names in os.walk(root, onerror=refuse, followlinks=False):
        files += [Path(parent, name) for name in names]
        folders_here = [Path(parent, name) for name in folders]
        links += [path.relative_to(root).as_posix() for path in folders_here if path.is_symlink()]
    return files, sorted(links)


def _text(path: Path) -> str | None:
    """The text next to an image; what is no UTF-8, has zero bytes, is no file or too long counts as none."""
    if not path.is_file() or path.stat().st_size > _MAX_FIELD:
        return None
    try:
        text = path.read_bytes().decode("utf-8-sig")
    except UnicodeDecodeError:
        return None
    return None if "\0" in text else text


def _record(text: str) -> dict[str, Any]:
    """The object in the JSON next to an image; one that is broken, or has two values of one name, counts as empty."""
    try:
        record = json.loads(text, object_pairs_hook=_object)
    except (ValueError, RecursionError):
        return {}
    return record if isinstance(record, dict) else {}


def parquet_source(path: Path, columns: Columns, root: Path) -> Source:
    """A Parquet file, or a folder of them, which has no folders of its own.

    Raises:
        DataError: no such file or column, or no Parquet.
    """
    files, others, folders = [path], list[Path](), list[str]()
    if path.is_dir():
        entries = sorted(path.iterdir())
        tables = [
            entry for entry in entries if entry.suffix.lower() == PARQUET and not entry.is_dir()
        ]
        files = [table for table in tables if not table.name.startswith(MACOS_PREFIX)]
        for entry in entries:
            if entry.is_dir():
                folders += [entry.name] * any(
                    inner.suffix.lower() == PARQUET for inner in entry.rglob("*")
                )
            elif entry not in files:
                others.append(entry)
    if not files:
        raise DataError(f"{path} holds no .parquet files")
    groups, hold_names = list[RowGroup](), True
    for file in files:
        opened = _open(file)
        require_columns(opened.schema_arrow.names, columns, file)
        hold_names &= _holds_names(opened, columns.image)
        groups += [RowGroup(file, number, columns, root) for number in range(opened.num_row_groups)]
    parts: Sequence[Iterable[Item]] = groups
    pictures = set[Path | bytes | None]()
    if hold_names:
        listed = [[*group] for group in groups]
        pictures = {item.image for items in listed for item in items}
        by_place = {item.key: item for item in join_records(itertools.chain.from_iterable(listed))}
        parts = [[by_place[item.key] for item in items if item.key in by_place] for items in listed]
    suffixes = Counter(
        entry.suffix.lower() or "none" for entry in others if entry.resolve() not in pictures
    )
    return Source(parts, suffixes, folders)


def _holds_names(table: Any, column: str) -> bool:
    """Whether a column holds names of images, and no bytes, as far as the file's own statistics say."""
    kind = table.schema_arrow.field(column).type
    if not str(kind).startswith("struct<"):
        return str(getattr(kind, "value_type", kind)) in ("string", "large_string", "string_view")
    if all(str(part.type) == "null" for part in kind if part.name == "bytes"):
        return True
    groups = map(table.metadata.row_group, range(table.num_row_groups))
    chunks = [group.column(number) for group in groups for number in range(group.num_columns)]
    counts = [
        (chunk.statistics, chunk.num_values)
        for chunk in chunks
        if chunk.path_in_schema == f"{column}.bytes"
    ]
    return all(
        known is not None and known.has_null_count and known.null_count == count
        for known, count in counts
    )


def _open(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (OSError, pyarrow.ArrowException) as error:  # their words may hold bytes of the file
        raise DataError(f"cannot read {path} as Parquet: {type(error).__name__}") from error
