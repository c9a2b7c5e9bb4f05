"""COCO captions: one JSON file with `images` (id, file_name) and `annotations` (image_id, caption)."""

import json
from collections import defaultdict
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.importers.items import Item, Source, file_item, in_parts
from data.importers.tables import Columns, file_fingerprint, owner_of


def coco_source(path: Path, columns: Columns, image_root: Path | None) -> Source:
    """One item per image with all of its captions, in the order of the file.

    Args:
        path: captions_*.json.
        columns: only `owner` is used: a field of the entries in `images`.
        image_root: folder of the images; the file's folder by default.

    Raises:
        DataError: it is no such file, an image id occurs twice, or an annotation is of no image.
    """
    images, annotations = _load(path)
    captions: defaultdict[Any, list[str]] = defaultdict(list)
    for entry in annotations:
        if isinstance(entry.get("caption"), str):
            captions[entry.get("image_id")].append(entry["caption"])
    ids = [entry.get("id") for entry in images]
    if len(set(ids)) != len(ids):
        raise DataError(f"{path}: an image id occurs twice")
    unknown = captions.keys() - set(ids)
    if unknown:
        raise DataError(
            f"{path}: {len(unknown)} annotations are of no image, the first of image id {min(map(str, unknown))}"
        )
    root = (image_root or path.parent).resolve()
    items = [_item(root, entry, tuple(captions[entry.get("id")]), columns) for entry in images]
    return Source(in_parts(items), file_fingerprint(path))


def _item(root: Path, entry: dict[str, Any], captions: tuple[str, ...], columns: Columns) -> Item:
    name = entry.get("file_name")
    if not isinstance(name, str):
        return Item(str(entry.get("id")), None, captions, None, "missing_image")
    return file_item(root, name, captions, owner_of(entry.get(columns.owner)) if columns.owner else None)


def _load(path: Path) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    try:
        tree = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise DataError(f"cannot read {path}: {error.strerror or error}") from error
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is no JSON: {error}") from error
    lists = [tree.get(name) for name in ("images", "annotations")] if isinstance(tree, dict) else [None, None]
    if any(not isinstance(part, list) or any(not isinstance(entry, dict) for entry in part) for part in lists):
        raise DataError(f"{path} is no COCO captions file: it needs the lists images and annotations")
    return lists[0], lists[1]  # type: ignore[return-value]
