"""Parquet files: a column of images (bytes, paths, or {bytes, path} as Hugging Face writes it) and one of captions."""

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from data.errors import DataError
from data.importers.items import Item, Part, Source, file_item
from data.importers.tables import Columns, file_fingerprint, require_columns

_BATCH_ROWS = 64


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
