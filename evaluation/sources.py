"""Sources of images with labels or captions: encoded bytes by number, and decoded batches.

                             with labels                    with captions
shards:train-{000..012}.tar  member `.cls`, or a field of   text members, or a field of `.json`
                             `.json`
folder:imagenet/val          one folder per class, by name  all images below; lines of `x.txt`
                                                            beside `x.jpg`
arrays:digits.npz            `images` and `labels`          -
images:a.jpg,b.png           -                              these files
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
from evaluation.command_options import CaptionedOptions, ImageOptions, LabelledOptions
from privacy.errors import say
from privacy.ranks.collectives import first_on_main, rank
from trainer.progress import track

_MOST_CLASSES = 10**9


class Example(NamedTuple):
    """An example of a source.

    Attributes:
        image: encoded bytes, or None.
        label: 0, 1, ...; None where the example has no such label.
        captions: references; may be empty.
        name: for people.
    """

    image: bytes | None
    label: int | None = None
    captions: tuple[str, ...] = ()
    name: str = ""


class Shards:
    """Webdataset shards with a tar index, identified by their hashes."""

    class_names: tuple[str, ...] = ()

    def __init__(self, name: str, table: ExampleTable, options: ImageOptions) -> None:
        self.name = name
        self._table = table
        self._options = options
        self._reader = TarReader(table)
        self.is_labelled = isinstance(options, LabelledOptions)

    def identity(self) -> str:
        """Returns hash and label field, by which a cache is named."""
        field = self._options.label_field if isinstance(self._options, LabelledOptions) else ""
        return f"shards {self._table.manifest_digest().hex()} {field}"

    def __len__(self) -> int:
        return len(self._table)

    def read(self, ids: Sequence[int]) -> list[Example]:
        """Returns the examples with these numbers."""
        examples = []
        for i, raw in zip(ids, self._reader.read_all(list(ids)), strict=True):
            label: int | None = None
            captions: tuple[str, ...] = ()
            if isinstance(self._options, LabelledOptions):
                field = self._options.label_field
                with contextlib.suppress(DecodeError):
                    label = read_label(raw, _MOST_CLASSES, None if field == "cls" else field)
            elif isinstance(self._options, CaptionedOptions):
                texts = raw.captions(self._options.caption_field)
                captions = tuple(text for text in texts if text.strip())
            examples.append(Example(raw.image, label, captions, f"{self.name} #{i}"))
        return examples


@dataclass(frozen=True)
class Files:
    """Image files below a folder, with labels or with captions beside them.

    The path of the folder, and names, sizes and times of the files, identify them.

    Attributes:
        labels: one for each file; empty where captions are read.
    """

    name: str
    root: Path
    files: tuple[str, ...]
    labels: tuple[int, ...] = ()
    class_names: tuple[str, ...] = ()

    @property
    def is_labelled(self) -> bool:
        """Returns whether an example without a label is unusable."""
        return bool(self.labels)

    def identity(self) -> str:
        """Returns a hash, by which a cache is named."""
        digest = hashlib.sha256(str(self.root.resolve()).encode("utf-8", "surrogateescape"))
        for name in self.files:
            status = (self.root / name).stat()
            line = f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n"
            digest.update(line.encode("utf-8", "surrogatepass"))
        return f"folder {digest.hexdigest()}"

    def __len__(self) -> int:
        return len(self.files)

    def read(self, ids: Sequence[int]) -> list[Example]:
        """Returns the examples with these numbers."""
        examples = []
        for i in ids:
            path = self.root / self.files[i]
            lines: list[str] = []
            if not self.labels and path.with_suffix(".txt").is_file():
                text = bytes_of(path.with_suffix(".txt")).decode("utf-8", "replace")
                lines = [line.strip() for line in text.splitlines() if line.strip()]
            label = self.labels[i] if self.labels else None
            examples.append(Example(bytes_of(path), label, tuple(lines), str(path)))
        return examples


class Arrays:
    """Images in memory, encoded without loss, so that they pass the transforms of all images."""

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
        has_image_shape = images.ndim == 3 or (images.ndim == 4 and images.shape[3] == 3)
        if images.dtype != np.uint8 or not has_image_shape or not len(images):
            raise DataError(
                f"{name}: images must be uint8 (N, H, W) or (N, H, W, 3), "
                f"not {images.dtype} {images.shape}"
            )
        if labels_N.shape != (len(images),) or not np.issubdtype(labels_N.dtype, np.integer):
            raise DataError(
                f"{name}: labels must be {len(images)} integers, "
                f"not {labels_N.dtype} {labels_N.shape}"
            )
        self.name = name
        self._images = images
        self._labels_N = labels_N
        self.class_names = tuple(class_names)

    def identity(self) -> str:
        """Returns a hash of images and labels, by which a cache is named."""
        content = hashlib.sha256(self._images.tobytes())
        content.update(self._labels_N.astype(np.int64).tobytes())
        return f"arrays {self._images.shape} {content.hexdigest()}"

    def __len__(self) -> int:
        return len(self._images)

    def read(self, ids: Sequence[int]) -> list[Example]:
        """Returns the examples with these numbers; a negative label counts as none."""
        labels = [int(label) if label >= 0 else None for label in self._labels_N[list(ids)]]
        return [
            Example(encode_png(self._images[i]), label)
            for i, label in zip(ids, labels, strict=True)
        ]


Source = Shards | Files | Arrays
"""A source reads examples by number. It has a `name` for people and `class_names` (empty where it
does not know them); `is_labelled` means that an example without a label is unusable, and
`identity()` changes with the data. It can be pickled, so that worker processes can read it."""


def open_source(text: str, options: ImageOptions) -> Source:
    """Opens the source that a command line names; see the module. Collective under a launcher.

    Args:
        options: labels are read for LabelledOptions, captions for CaptionedOptions.

    Raises:
        DataError: an unknown kind, or no such files.
        ReadError: remote shards cannot be read.
    """
    kind, _, location = text.partition(":")
    path = Path(location).expanduser()
    wants_labels = isinstance(options, LabelledOptions)
    if kind == "shards" and location:
        # Rank 0 writes the index of shards, and the other ranks read it.
        if dist.is_initialized():
            table = first_on_main(lambda: shard_table(location, options.cache_folder))
        else:
            table = shard_table(location, options.cache_folder)
        return Shards(text, table, options)
    if kind == "folder" and location:
        if not path.is_dir():
            raise DataError(f"{path} is no folder")
        class_names: tuple[str, ...] = ()
        folders = [path]
        if wants_labels:
            class_names = tuple(sorted(entry.name for entry in path.iterdir() if entry.is_dir()))
            folders = [path / name for name in class_names]
        files: list[str] = []
        labels: list[int] = []
        links: list[Path] = []
        for label, folder in enumerate(folders):
            for entry in sorted(folder.rglob("*")):
                if entry.suffix.lower() in IMAGE_SUFFIXES:
                    files.append(entry.relative_to(path).as_posix())
                    labels.append(label)
                if entry.is_symlink() and entry.is_dir():
                    links.append(entry)
        if links and rank() == 0:
            say(
                f"{text}: {len(links)} linked folders are not followed, the first {links[0]}",
                file=sys.stderr,
            )
        if not files:
            content = "folders with images; one per class is needed" if wants_labels else "images"
            raise DataError(f"{path} holds no {content}")
        return Files(text, path, tuple(files), tuple(labels) if wants_labels else (), class_names)
    if kind == "arrays" and location and wants_labels:
        try:
            with np.load(path, allow_pickle=False) as arrays:
                return Arrays(text, arrays["images"], arrays["labels"])
        except (OSError, KeyError, ValueError) as error:
            # A DataError is a ValueError, and has its own message.
            if isinstance(error, DataError):
                raise
            raise DataError(
                f"{path} is no .npz file with `images` and `labels`: {error}"
            ) from error
    if kind == "images" and location and not wants_labels:
        paths = [Path(part).expanduser() for part in location.split(",")]
        for image_path in paths:
            if not image_path.is_file():
                raise DataError(f"there is no file {image_path}")
        return Files(text, Path(), tuple(map(str, paths)))
    last_kind = "arrays:FILE.npz" if wants_labels else "images:FILE,..."
    raise DataError(f"{text!r} names no source; write shards:PATTERN, folder:DIR or {last_kind}")


def shard_table(pattern: str, cache: Path | None) -> ExampleTable:
    """Returns the index of shards, from the cache where it is up to date.

    Raises:
        DataError: there is no cache; or the shards are refused, or one of them is named twice.
        ReadError: remote shards cannot be read.
    """
    shards = find_shards(pattern, Path.cwd())
    for line in shards.remarks() if rank() == 0 else ():
        say(f"{pattern}: {line}", file=sys.stderr)
    if cache is None:
        raise DataError(f"shards at {shards.root} need a folder for their index: give --cache")
    locations = " ".join(shards.locations())
    folder = cache / f"index-{hashlib.sha256(locations.encode()).hexdigest()[:16]}"
    try:
        table = ExampleTable.open(folder, shards.root)
    except DataError:
        table = build_index(shards, folder, remote=RemoteOptions(), progress=True)
    table.require_shards(shards)
    table.require_distinct_shards()
    return table


class Augmentation(NamedTuple):
    """Random crops and flips, with a key for each image and epoch."""

    seed: int
    epoch: int

    def key(self, row: int) -> int:
        """Returns the 64-bit key of an image."""
        return int(np.random.SeedSequence([*self, row]).generate_state(1, np.uint64)[0])


class Decoded(NamedTuple):
    """A batch of decoded images.

    Attributes:
        images_BCHW: normalised; black where an example is unusable.
        examples: as read, without their bytes.
        is_usable_B: whether the image can be decoded, and has a label where labels are read.
    """

    images_BCHW: torch.Tensor
    examples: list[Example]
    is_usable_B: np.ndarray

    @property
    def labels_B(self) -> np.ndarray:
        """Returns int64 labels; 0 for unusable examples."""
        labels_B = np.zeros(len(self.examples), dtype=np.int64)
        for row, example in enumerate(self.examples):
            if self.is_usable_B[row] and example.label is not None:
                labels_B[row] = example.label
        return labels_B


@dataclass
class _Batches(Dataset):
    """Maps the number of a batch to decoded images, in a worker process.

    Errors that name an exit code come back as `Failure`.
    """

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
        size = self.image_size
        edge = (self.resize - size) // 2
        images = np.zeros((len(ids), 3, size, size), dtype=np.float32)
        is_usable_B = np.zeros(len(ids), dtype=bool)
        examples: list[Example] = []
        try:
            for row, example in enumerate(self.source.read(ids)):
                examples.append(example._replace(image=None))
                if example.image is None or (self.source.is_labelled and example.label is None):
                    continue
                try:
                    if self.augmentation is not None:
                        key = self.augmentation.key(ids[row])
                        images[row] = train_image(example.image, size, key)
                    else:
                        resized_CHW = eval_image(example.image, self.resize)
                        images[row] = resized_CHW[:, edge : edge + size, edge : edge + size]
                except DecodeError:
                    continue
                is_usable_B[row] = True
        except (ReadError, DataError) as error:
            return Failure(type(error), str(error))
        return Decoded(torch.from_numpy(images), examples, is_usable_B)


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
    """Yields batches of normalised images (B, 3, S, S), in order.

    Args:
        image_size: S.
        resize: pixels of the shorter side before the centre is cut out (256 for 224 in the papers);
            None is `image_size`, which cuts nothing off a square. Ignored for augmented images.

    Raises:
        ReadError, DataError: of the source.
    """
    dataset = _Batches(source, rows, batch_size, image_size, resize or image_size, augmentation)
    loader = data_loader(dataset, None, num_workers, None, False)
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    # Training on augmented images shows its epochs instead.
    shows = is_main and augmentation is None
    num_batches = math.ceil(len(rows) / batch_size)
    for batch in track(loader, f"batches of {source.name}", num_batches, shows=shows):
        if isinstance(batch, Failure):
            raise batch.kind(batch.message)
        yield batch


def whole_image(
    encoded_image: bytes, side: int, box: tuple[float, float, float, float] | None = None
) -> tuple[np.ndarray, tuple[int, int]]:
    """Returns the whole picture as a normalised square (3, S, S), and its original (width, height).

    The picture is squeezed, not cut.

    Args:
        side: S.
        box: left, top, right, bottom in pixels of a part, which is squeezed instead.

    Raises:
        DecodeError: no usable picture, or an empty box.
    """
    sizes: list[tuple[int, int]] = []

    def squeeze(image: Image.Image) -> Image.Image:
        sizes.append(image.size)
        part = to_rgb(image)
        if box is not None:
            x_min, y_min, x_max, y_max = (round(edge) for edge in box)
            # A thin box covers one pixel at least.
            x_max = max(x_max, x_min + 1)
            y_max = max(y_max, y_min + 1)
            part = part.crop((x_min, y_min, x_max, y_max))
        return part.resize((side, side), Image.Resampling.BICUBIC)

    if box is not None and not (box[0] < box[2] and box[1] < box[3]):
        raise DecodeError("the box is empty")
    square = decode(encoded_image, squeeze)
    return eval_image(encode_png(np.asarray(square)), side), sizes[0]


def encode_png(image: np.ndarray) -> bytes:
    """Returns lossless bytes of a uint8 image, (H, W) or (H, W, 3)."""
    return encode_image(Image.fromarray(image), "png", compress_level=1)


def bytes_of(path: Path) -> bytes:
    """Returns the content of a file.

    Raises:
        ReadError: the file cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReadError(f"cannot read {path}: {error.strerror or error}") from error
