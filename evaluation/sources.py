"""Images from wherever they lie, with labels or with captions: encoded bytes by number, and batches of them, decoded.

                                 with labels                          with captions
shards:train-{000..012}.tar      member `.cls` or a field of `.json`  text members, or a field of `.json`
folder:imagenet/val              one folder per class, by name        all images below; lines of `x.txt` beside `x.jpg`
arrays:digits.npz                `images` and `labels`                -
images:a.jpg,b.png               -                                    these files
"""

import contextlib
import hashlib
import math
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from PIL import Image
from torch.utils.data import Dataset

from data.errors import DataError, DecodeError, ReadError
from data.examples.examples import read_label
from data.examples.transforms import decode, encode_image, eval_image, to_rgb, train_image
from data.importers.sources import IMAGE_SUFFIXES
from data.index.build import build_index
from data.index.shards import find_shards
from data.index.tar_index import ExampleTable
from data.reading.loader import Failure
from data.reading.reader import TarReader
from data.reading.storage import RemoteOptions
from data.reading.workers import data_loader
from evaluation.options import CaptionedOptions, ImageOptions, LabelledOptions
from privacy.errors import say
from privacy.ranks.collectives import first_on_main, rank
from trainer.progress import track

_MOST_CLASSES = 10**9


class Example(NamedTuple):
    """
    Attributes:
        image: encoded bytes, or None.
        label: 0, 1, ...; None where the example has no such label.
        captions: references; may be empty.
        name: what people read.
    """

    image: bytes | None
    label: int | None = None
    captions: tuple[str, ...] = ()
    name: str = ""


class Shards:
    """Webdataset shards with a tar index; identified by the hashes of the shards."""

    class_names: tuple[str, ...] = ()

    def __init__(self, name: str, table: ExampleTable, options: ImageOptions) -> None:
        self.name, self._table, self._options, self._reader = name, table, options, TarReader(table)
        self.is_labelled = isinstance(options, LabelledOptions)

    def identity(self) -> str:
        field = self._options.label_field if isinstance(self._options, LabelledOptions) else ""
        return f"shards {self._table.manifest_digest().hex()} {field}"

    def __len__(self) -> int:
        return len(self._table)

    def read(self, ids: Sequence[int]) -> list[Example]:
        found = []
        for i, raw in zip(ids, self._reader.read_all(list(ids)), strict=True):
            label: int | None = None
            captions: tuple[str, ...] = ()
            if isinstance(self._options, LabelledOptions):
                field = self._options.label_field
                with contextlib.suppress(DecodeError):
                    label = read_label(raw, _MOST_CLASSES, None if field == "cls" else field)
            elif isinstance(self._options, CaptionedOptions):
                captions = tuple(
                    text for text in raw.captions(self._options.caption_field) if text.strip()
                )
            found.append(Example(raw.image, label, captions, f"{self.name} #{i}"))
        return found


@dataclass(frozen=True)
class Files:
    """Image files below a folder, with labels or with captions beside them; identified by place, names, sizes and times.

    Attributes:
        labels: one for each file; none where captions are read.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    labels: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def is_labelled(self) -> bool:
        return bool(self.labels)

    def identity(self) -> str:
        digest = hashlib.sha256(str(self.root.resolve()).encode("utf-8", "surrogateescape"))
        for name in self.files:
            status = (self.root / name).stat()
            digest.update(
                f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogatepass")
            )
        return f"folder {digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self.files)

    def read(self, ids: Sequence[int]) -> list[Example]:
        found = []
        for i in ids:
            path = self.root / self.files[i]
            lines: list[str] = []
            if not self.labels and path.with_suffix(".txt").is_file():
                text = bytes_of(path.with_suffix(".txt")).decode("utf-8", "replace")
                lines = [line.strip() for line in text.splitlines() if line.strip()]
            label = self.labels[i] if self.labels else None
            found.append(Example(bytes_of(path), label, tuple(lines), str(path)))
        return found


class Arrays:
    """Images in memory. They are encoded without loss, so that they take the same way as every other image."""

    is_labelled = True

    def __init__(
        self, name: str, images: np.ndarray, labels_N: np.ndarray, class_names: Sequence[str] = ()
    ) -> None:
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
            raise DataError(
                f"{name}: labels must be {len(images)} integers, not {labels_N.dtype} {labels_N.shape}"
            )
        self.name, self._images, self._labels_N = name, images, labels_N
        self.class_names = tuple(class_names)

    def identity(self) -> str:
        content = hashlib.sha256(self._images.tobytes())
        content.update(self._labels_N.astype(np.int64).tobytes())
        return f"arrays {self._images.shape} {content.hexdigest()}"

    def __len__(self) -> int:
        return len(self._images)

    def read(self, ids: Sequence[int]) -> list[Example]:
        labels = [int(label) if label >= 0 else None for label in self._labels_N[list(ids)]]
        return [
            Example(encode_png(self._images[i]), label)
            for i, label in zip(ids, labels, strict=True)
        ]


Source = Shards | Files | Arrays
"""A source has a `name` for people, `class_names` (empty where it does not know them), says by `is_labelled` whether an example
without a label is of no use and by `identity()` when the data change (part of a cache's name), and reads examples by number. It
can be pickled, so that worker processes can read it."""


def open_source(text: str, options: ImageOptions) -> Source:
    """The source that a command line names; see the module. Collective under a launcher.

    Args:
        options: labels are read for LabelledOptions, captions for CaptionedOptions.

    Raises:
        DataError: an unknown kind, or nothing there.
        ReadError: remote shards cannot be read.
    """
    kind, _, where = text.partition(":")
    path, wants_labels = Path(where).expanduser(), isinstance(options, LabelledOptions)
    if kind == "shards" and where:
        if dist.is_initialized():  # rank 0 makes the index of shards, the others find it
            table = first_on_main(lambda: shard_table(where, options.cache_folder))
        else:
            table = shard_table(where, options.cache_folder)
        return Shards(text, table, options)
    if kind == "folder" and where:
        if not path.is_dir():
            raise DataError(f"{path} is no folder")
        names = (
            tuple(sorted(one.name for one in path.iterdir() if one.is_dir()))
            if wants_labels
            else ("",)
        )
        entries = [
            (entry, label)
            for label, name in enumerate(names)
            for entry in sorted((path / name).rglob("*"))
        ]
        files = [
            (entry.relative_to(path).as_posix(), label)
            for entry, label in entries
            if entry.suffix.lower() in IMAGE_SUFFIXES
        ]
        linked = [entry for entry, _ in entries if entry.is_symlink() and entry.is_dir()]
        if linked and rank() == 0:
            say(
                f"{text}: {len(linked)} linked folders are not followed, the first {linked[0]}",
                file=sys.stderr,
            )
        if not files:
            raise DataError(
                f"{path} holds no {'folders with images; one per class is needed' if wants_labels else 'images'}"
            )
        labels = tuple(label for _, label in files) if wants_labels else ()
        return Files(
            text, path, tuple(name for name, _ in files), labels, names if wants_labels else ()
        )
    if kind == "arrays" and where and wants_labels:
        try:
            with np.load(path, allow_pickle=False) as stored:
                return Arrays(text, stored["images"], stored["labels"])
        except (OSError, KeyError, ValueError) as error:
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{path} is no .npz file with `images` and `labels`: {error}"
            ) from error
    if kind == "images" and where and not wants_labels:
        given = [Path(part).expanduser() for part in where.split(",")]
        if missing := [one for one in given if not one.is_file()]:
            raise DataError(f"there is no file {missing[0]}")
        return Files(text, Path(), tuple(map(str, given)))
    last = "arrays:FILE.npz" if wants_labels else "images:FILE,..."
    raise DataError(f"{text!r} does not say what it is; write shards:PATTERN, folder:DIR or {last}")


def shard_table(pattern: str, cache: Path | None) -> ExampleTable:
    """The index in the cache, which is made or brought up to date where it does not fit.

    Raises:
        DataError: there is no cache; or the shards are refused, or one of them is named twice.
        ReadError: remote shards cannot be read.
    """
    shards = find_shards(pattern, Path.cwd())
    for line in shards.remarks() if rank() == 0 else ():
        say(f"{pattern}: {line}", file=sys.stderr)
    if cache is None:
        raise DataError(f"shards at {shards.root} need a folder for their index: give --cache")
    folder = (
        cache / f"index-{hashlib.sha256(' '.join(shards.locations()).encode()).hexdigest()[:16]}"
    )
    try:
        table = ExampleTable.open(folder, shards.root)
    except DataError:
        table = build_index(shards, folder, remote=RemoteOptions(), progress=True)
    table.require_shards(shards)
    table.require_distinct_shards()
    return table


class Augmentation(NamedTuple):
    """Random crops and flips, by a key of each image's own in each epoch."""

    seed: int
    epoch: int

    def key(self, row: int) -> int:
        return int(np.random.SeedSequence([*self, row]).generate_state(1, np.uint64)[0])


class Decoded(NamedTuple):
    """
    Attributes:
        images_BCHW: normalised; black where an example is of no use.
        examples: as read, without their bytes.
        is_usable_B: whether the image can be decoded, and has a label where labels are read.
    """

    images_BCHW: torch.Tensor
    examples: list[Example]
    is_usable_B: np.ndarray

    @property
    def labels_B(self) -> np.ndarray:
        """int64; 0 for examples of no use."""
        labels = [
            (e.label or 0) if ok else 0
            for e, ok in zip(self.examples, self.is_usable_B, strict=True)
        ]
        return np.array(labels, dtype=np.int64)


@dataclass
class _Batches(Dataset):
    """Number of a batch -> decoded images, in a worker. Errors that name an exit code come back as `Failure`."""

    source: Source
    rows: Sequence[int]
    batch_size: int
    image_size: int
    resize: int
    augmentation: Augmentation | None

    def __len__(self) -> int:
        return -(-len(self.rows) // self.batch_size)

    def __getitem__(self, number: int) -> Decoded | Failure:
        ids = self.rows[number * self.batch_size : (number + 1) * self.batch_size]
        size, edge = self.image_size, (self.resize - self.image_size) // 2
        images, usable = (
            np.zeros((len(ids), 3, size, size), dtype=np.float32),
            np.zeros(len(ids), dtype=bool),
        )
        examples: list[Example] = []
        try:
            for row, example in enumerate(self.source.read(ids)):
                examples.append(example._replace(image=None))
                if example.image is None or (self.source.is_labelled and example.label is None):
                    continue
                try:
                    if self.augmentation is not None:
                        images[row] = train_image(
                            example.image, size, self.augmentation.key(ids[row])
                        )
                    else:
                        whole_CHW = eval_image(example.image, self.resize)
                        images[row] = whole_CHW[:, edge : edge + size, edge : edge + size]
                except DecodeError:
                    continue
                usable[row] = True
        except (ReadError, DataError) as error:
            return Failure(type(error), str(error))
        return Decoded(torch.from_numpy(images), examples, usable)


def decoded_batches(
    source: Source,
    rows: Sequence[int],
    *,
    batch_size: int,
    image_size: int,
    num_workers: int = 0,
    resize: int | None = None,
    augmentation: Augmentation | None = None,
) -> Iterator[Decoded]:
    """Normalised images (B, 3, S, S), in order.

    Args:
        image_size: S.
        resize: to how many pixels the shorter side is brought before the centre is cut out (256 for 224 in the papers); None is
            `image_size`, which cuts nothing off a square. Not looked at where images are augmented.

    Raises:
        ReadError, DataError: of the source.
    """
    dataset = _Batches(source, rows, batch_size, image_size, resize or image_size, augmentation)
    loader = data_loader(dataset, None, num_workers, None, False)
    shows = not dist.is_initialized() or dist.get_rank() == 0
    shows = shows and augmentation is None  # whoever trains on these shows the epochs
    for batch in track(
        loader, f"batches of {source.name}", math.ceil(len(rows) / batch_size), shows=shows
    ):
        if isinstance(batch, Failure):
            raise batch.kind(batch.message)
        yield batch


def whole_image(
    data: bytes, side: int, box: tuple[float, float, float, float] | None = None
) -> tuple[np.ndarray, tuple[int, int]]:
    """The whole picture, squeezed to a square and normalised as in training, (3, S, S); and its own (width, height).

    Args:
        box: left, top, right, bottom in pixels of the part that is meant.

    Raises:
        DecodeError: no usable picture, or an empty box.
    """
    size: list[tuple[int, int]] = []

    def squeeze(image: Image.Image) -> Image.Image:
        size.append(image.size)
        part = to_rgb(image)
        if box is not None:
            left, top, right, bottom = (round(edge) for edge in box)
            part = part.crop((left, top, max(right, left + 1), max(bottom, top + 1)))
        return part.resize((side, side), Image.Resampling.BICUBIC)

    if box is not None and not (box[0] < box[2] and box[1] < box[3]):
        raise DecodeError("the box is empty")
    square = decode(data, squeeze)
    return eval_image(encode_png(np.asarray(square)), side), size[0]


def encode_png(image: np.ndarray) -> bytes:
    """Lossless bytes of a uint8 image, (H, W) or (H, W, 3)."""
    return encode_image(Image.fromarray(image), "png", compress_level=1)


def bytes_of(path: Path) -> bytes:
    """
    Raises:
        ReadError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReadError(f"cannot read {path}: {error.strerror or error}") from error
