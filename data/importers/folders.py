"""A folder of images, each with its caption (.txt or .json) or label (.cls) in a file of the same name, or a table for all."""

import hashlib
import os
from pathlib import Path

from data.errors import DataError
from data.importers.items import Item, Source, in_parts
from data.importers.tables import Columns, label_of, table_source
from data.reading.reader import json_record

IMAGE_SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".gif", ".bmp")
TABLES = ("metadata.jsonl", "metadata.csv", "captions.jsonl", "captions.csv")
_MAX_SIDECAR = 1 << 20


def folder_source(folder: Path, columns: Columns) -> Source:
    """All images below a folder; where it has one of TABLES, that table says which.

    Symbolic links are never followed: linked images are counted as unsafe, linked folders passed over. Of several images
    of one name (a.jpg, a.png) the first counts.

    Raises:
        DataError: no such folder, or no image in it.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}")
    for name in TABLES:
        if (folder / name).is_file():
            return table_source(folder / name, columns, folder)
    root = folder.resolve()
    items, digest, seen = [], hashlib.sha256(), set[Path]()
    images = []
    for parent, folders, files in os.walk(root, followlinks=False):
        folders.sort()
        images += [Path(parent, name) for name in files if Path(name).suffix.lower() in IMAGE_SUFFIXES]
    for path in sorted(images):
        name = path.relative_to(root).as_posix()
        digest.update(f"{name} {path.lstat().st_size} {path.lstat().st_mtime_ns}\n".encode("utf-8", "surrogatepass"))
        if path.is_symlink():
            items.append(Item(name, None, (), None, "unsafe_path"))
        elif path.with_suffix("") in seen:
            items.append(Item(name, None, (), None, "duplicate_key"))
        else:
            seen.add(path.with_suffix(""))
            text = _text(path.with_suffix(".txt"))
            record = json_record((_text(path.with_suffix(".json")) or "").encode())
            captions = (text,) if text else columns.captions_in(record)
            label = columns.label_in(record) if columns.label else label_of(_text(path.with_suffix(".cls")))
            items.append(Item(name, path, captions, columns.owner_in(record), label=label))
    if not items:
        raise DataError(f"{folder} holds no images ({', '.join(IMAGE_SUFFIXES)}) and none of {', '.join(TABLES)}")
    return Source(in_parts(items), digest.hexdigest())


def _text(path: Path) -> str | None:
    """The text next to an image; what is no UTF-8, linked or too long counts as none."""
    if path.is_symlink() or not path.is_file() or path.stat().st_size > _MAX_SIDECAR:
        return None
    try:
        return path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
