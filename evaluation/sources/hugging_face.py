"""Data sets on disk that Hugging Face's `datasets` saved with `save_to_disk`; the package is an extra.

    pip install -r requirements-evaluation.txt

A folder is one split: `hf:cifar10/train` of a data set with splits in `cifar10`. Images stay encoded until they are used, so that
they pass the same transform as all others.
"""

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from data.errors import DataError
from evaluation.sources.records import CaptionedImage, LabelledImage, bytes_of, files_digest, label_value


def _load(path: Path, columns: dict[str, str]) -> Any:
    """The rows of a split, images not decoded.

    Args:
        columns: option of the command line -> name of a column that must be there; "image_column" is the images'.

    Raises:
        DataError: the package is missing, nothing there, several splits, or no such columns.
    """
    try:
        import datasets
    except ImportError as error:
        raise DataError(
            "hf: needs the package `datasets`, an extra: pip install -r requirements-evaluation.txt"
        ) from error
    if not path.is_dir():
        raise DataError(f"there is no folder {path}")
    try:
        loaded = datasets.load_from_disk(str(path))
    except Exception as error:  # the package's own, and those of its readers
        raise DataError(f"{path} is no data set that `datasets` saved: {' '.join(str(error).split())}") from error
    if isinstance(loaded, dict):
        raise DataError(
            f"{path} holds the splits {', '.join(loaded)}; name one of them: hf:{path}/{next(iter(loaded))}"
        )
    for option, column in columns.items():
        if column not in loaded.features:
            raise DataError(f"{path} has no column {column!r}, but {', '.join(loaded.features)}: give --{option}")
    image_column = columns["image_column"]
    if not isinstance(loaded.features[image_column], datasets.Image):
        raise DataError(f"{path}: its column {image_column!r} holds no images; give --image_column")
    return loaded.select_columns(list(columns.values())).cast_column(image_column, datasets.Image(decode=False))


def _image(stored: dict[str, Any] | None) -> bytes | None:
    """Encoded bytes; a row without an image has none.

    Raises:
        ReadError: a file that the row names cannot be read.
    """
    stored = stored or {}
    data: bytes | None = stored.get("bytes")
    if data is None and stored.get("path"):
        data = bytes_of(Path(stored["path"]))
    return data


class HuggingFaceImages:
    """Labelled images; identified by names, sizes and times of the files."""

    def __init__(self, path: Path, image_column: str, label_column: str) -> None:
        """
        Raises:
            DataError: see `_load`; or labels that are no whole numbers.
        """
        self._arguments = (path, image_column, label_column)
        self.name = f"hf:{path}"
        self._rows = _load(path, {"image_column": image_column, "label_column": label_column})
        kind = self._rows.features[label_column]
        if "int" not in str(getattr(kind, "dtype", "")):
            raise DataError(f"{path}: its column {label_column!r} holds no whole numbers; give --label_column")
        self.class_names = tuple(getattr(kind, "names", None) or ())

    def __reduce__(self) -> tuple[type["HuggingFaceImages"], tuple[Path, str, str]]:
        return HuggingFaceImages, self._arguments

    def identity(self) -> str:
        root = self._arguments[0]
        names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*") if path.is_file())
        return f"hf {files_digest(root, names)} {self._arguments[1:]}"

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, ids: Sequence[int]) -> list[LabelledImage]:
        _, image_column, label_column = self._arguments
        rows = (self._rows[int(i)] for i in ids)
        return [LabelledImage(_image(row[image_column]), label_value(row[label_column])) for row in rows]


class HuggingFaceCaptions:
    """Images with captions: a text or a list of texts per row."""

    def __init__(self, path: Path, image_column: str, caption_column: str) -> None:
        """
        Raises:
            DataError: see `_load`.
        """
        self.name = f"hf:{path}"
        self._columns = image_column, caption_column
        self._rows = _load(path, {"image_column": image_column, "caption_column": caption_column})

    def __len__(self) -> int:
        return len(self._rows)

    def read(self, ids: Sequence[int]) -> Iterator[CaptionedImage]:
        image_column, caption_column = self._columns
        for i in ids:
            row = self._rows[int(i)]
            stored = row[caption_column]
            texts = stored if isinstance(stored, list) else [stored]
            captions = tuple(text.strip() for text in texts if isinstance(text, str) and text.strip())
            yield CaptionedImage(f"{self.name} #{i}", _image(row[image_column]), captions)
