"""Labelled images from wherever they lie: encoded bytes and an integer label by number, and what identifies the data.

shards:train-{000..012}.tar      webdataset shards; the label is the member `.cls` or a field of `.json`
folder:imagenet/val              one folder per class, in the order of their names
hf:cifar10/train                 a data set that Hugging Face's `datasets` saved with `save_to_disk`
arrays:digits.npz                `images` (N, H, W) or (N, H, W, 3) uint8 and `labels` (N,)
"""

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.errors import DataError, DecodeError
from data.examples.examples import read_label
from data.index.build import build_index
from data.index.shards import ShardSet, find_shards
from data.index.tar_index import ExampleTable
from data.reading.reader import TarReader
from data.reading.storage import RemoteOptions
from evaluation.sources.hugging_face import HuggingFaceImages
from evaluation.sources.records import (
    FOLDER_EXTENSIONS,
    LabelledImage,
    LabelledImages,
    bytes_of,
    encode_png,
    files_digest,
    label_value,
)

_MOST_CLASSES = 10**9


class ShardImages:
    """Webdataset shards with a tar index; identified by the hashes of the shards."""

    class_names: tuple[str, ...] = ()

    def __init__(self, name: str, table: ExampleTable, label_field: str) -> None:
        self.name, self._table, self._label_field = name, table, label_field
        self._reader = TarReader(table)

    def identity(self) -> str:
        return f"shards {self._table.manifest_digest().hex()} {self._label_field}"

    def __len__(self) -> int:
        return len(self._table)

    def read(self, ids: Sequence[int]) -> list[LabelledImage]:
        images: list[LabelledImage] = []
        field = None if self._label_field == "cls" else self._label_field
        for raw in self._reader.read_all(ids):
            try:
                label = read_label(raw, _MOST_CLASSES, field)
            except DecodeError:
                label = None
            images.append(LabelledImage(raw.image, label))
        return images


@dataclass(frozen=True)
class FolderImages:
    """One folder per class; identified by names, sizes and times of the files."""

    root: Path
    class_names: tuple[str, ...]
    files: tuple[tuple[str, int], ...]

    @classmethod
    def find(cls, root: Path) -> "FolderImages":
        """
        Raises:
            DataError: no folders with images.
        """
        if not root.is_dir():
            raise DataError(f"{root} is no folder")
        names = tuple(sorted(path.name for path in root.iterdir() if path.is_dir()))
        files = tuple(
            (path.relative_to(root).as_posix(), label)
            for label, name in enumerate(names)
            for path in sorted((root / name).rglob("*"))
            if path.suffix.lower() in FOLDER_EXTENSIONS
        )
        if not files:
            raise DataError(f"{root} holds no folders with images; one folder per class is needed")
        return cls(root, names, files)

    @property
    def name(self) -> str:
        return f"folder:{self.root}"

    def identity(self) -> str:
        return f"folder {files_digest(self.root, [name for name, _ in self.files])}"

    def __len__(self) -> int:
        return len(self.files)

    def read(self, ids: Sequence[int]) -> list[LabelledImage]:
        return [LabelledImage(bytes_of(self.root / self.files[i][0]), self.files[i][1]) for i in ids]


class ArrayImages:
    """Images in memory. They are encoded without loss, so that they take the same way as every other image."""

    def __init__(self, name: str, images: np.ndarray, labels_N: np.ndarray, class_names: Sequence[str] = ()) -> None:
        """
        Args:
            images: uint8, (N, H, W) or (N, H, W, 3).
            labels_N: integers.

        Raises:
            DataError: other shapes or types.
        """
        fits = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        if images.dtype != np.uint8 or not fits or not len(images):
            raise DataError(
                f"{name}: images must be uint8 (N, H, W) or (N, H, W, 3), not {images.dtype} {images.shape}"
            )
        if labels_N.shape != (len(images),) or not np.issubdtype(labels_N.dtype, np.integer):
            raise DataError(f"{name}: labels must be {len(images)} integers, not {labels_N.dtype} {labels_N.shape}")
        self.name, self._images, self._labels_N = name, images, labels_N
        self.class_names = tuple(class_names)

    @classmethod
    def load(cls, path: Path) -> "ArrayImages":
        """An .npz file with `images` and `labels`.

        Raises:
            DataError: no such file, or other content.
        """
        try:
            with np.load(path, allow_pickle=False) as stored:
                return cls(f"arrays:{path}", stored["images"], stored["labels"])
        except (OSError, KeyError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(f"{path} is no .npz file with arrays `images` and `labels`: {error}") from error

    def identity(self) -> str:
        content = hashlib.sha256(self._images.tobytes())
        content.update(self._labels_N.astype(np.int64).tobytes())
        return f"arrays {self._images.shape} {content.hexdigest()}"

    def __len__(self) -> int:
        return len(self._images)

    def read(self, ids: Sequence[int]) -> list[LabelledImage]:
        return [LabelledImage(encode_png(self._images[i]), label_value(self._labels_N[i])) for i in ids]


@dataclass(frozen=True)
class ReadingOptions:
    """
    Attributes:
        label_field: of shards: "cls" for the member `.cls`, or a field of the `.json` member.
        image_column, label_column: of Hugging Face data sets.
        cache: folder for the indexes of shards; private.
    """

    label_field: str = "cls"
    image_column: str = "image"
    label_column: str = "label"
    cache: Path | None = None


def open_source(text: str, options: ReadingOptions) -> LabelledImages:
    """The source that a command line names; see the module.

    Raises:
        DataError: an unknown kind, or nothing there.
        ReadError: remote shards cannot be read.
    """
    kind, _, where = text.partition(":")
    if kind == "shards" and where:
        shards = find_shards(where, Path.cwd())
        table = shard_table(shards, options.cache)
        table.require_shards(shards)
        return ShardImages(text, table, options.label_field)
    if kind == "folder" and where:
        return FolderImages.find(Path(where).expanduser())
    if kind == "arrays" and where:
        return ArrayImages.load(Path(where).expanduser())
    if kind == "hf" and where:
        return HuggingFaceImages(Path(where).expanduser(), options.image_column, options.label_column)
    raise DataError(f"{text!r} names no images; write shards:PATTERN, folder:DIR, hf:DIR or arrays:FILE.npz")


def shard_table(shards: ShardSet, cache: Path | None) -> ExampleTable:
    """The index in the cache, which is made or brought up to date where it does not fit.

    Raises:
        DataError: there is no cache; or the shards are refused.
        ReadError: remote shards cannot be read.
    """
    if cache is None:
        raise DataError(f"shards at {shards.root} need a folder for their index: give --cache")
    folder = cache / f"index-{hashlib.sha256(' '.join(shards.locations()).encode()).hexdigest()[:16]}"
    try:
        return ExampleTable.open(folder, shards.root)
    except DataError:
        return build_index(shards, folder, remote=RemoteOptions(), progress=True)
