"""Images to caption, with reference captions where there are any.

images:a.jpg,b.png               these files
folder:DIR                       all images below a folder, in the order of their paths; the captions of `x.jpg` are the
                                 lines of `x.txt`
shards:train-{000..012}.tar      webdataset shards with their captions
hf:coco/validation               a split that Hugging Face's `datasets` saved with `save_to_disk`
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from data.errors import DataError, DecodeError
from data.examples.transforms import eval_image
from data.index.shards import find_shards
from data.reading.reader import TarReader
from evaluation.sources.hugging_face import HuggingFaceCaptions
from evaluation.sources.labelled import shard_table
from evaluation.sources.records import FOLDER_EXTENSIONS, CaptionedImage, CaptionedImages, bytes_of
from trainer.progress import track


@dataclass(frozen=True)
class ImageFiles:
    """Image files, each with the captions in the text file of its name."""

    name: str
    files: tuple[Path, ...]

    def __len__(self) -> int:
        return len(self.files)

    def read(self, ids: Sequence[int]) -> Iterator[CaptionedImage]:
        for i in ids:
            path = self.files[i]
            captions = path.with_suffix(".txt")
            text = bytes_of(captions).decode("utf-8", "replace") if captions.is_file() else ""
            lines = tuple(line.strip() for line in text.splitlines() if line.strip())
            yield CaptionedImage(str(path), bytes_of(path), lines)


class CaptionedShards:
    """Webdataset shards."""

    def __init__(self, pattern: str, cache: Path | None, caption_field: str | None = None) -> None:
        self.name = f"shards:{pattern}"
        self._table = shard_table(find_shards(pattern, Path.cwd()), cache)
        self._reader, self._field = TarReader(self._table), caption_field

    def __len__(self) -> int:
        return len(self._table)

    def read(self, ids: Sequence[int]) -> Iterator[CaptionedImage]:
        for i, raw in zip(ids, self._reader.read_all(list(ids)), strict=True):
            captions = tuple(caption for caption in raw.captions(self._field) if caption.strip())
            yield CaptionedImage(f"{self.name} #{i}", raw.image, captions)


def open_images(
    text: str,
    *,
    cache: Path | None = None,
    caption_field: str | None = None,
    image_column: str = "image",
    caption_column: str = "caption",
) -> CaptionedImages:
    """The images that a command line names; see the module.

    Args:
        cache, caption_field: of shards.
        image_column, caption_column: of Hugging Face data sets.

    Raises:
        DataError: an unknown kind, or nothing there.
    """
    kind, _, where = text.partition(":")
    if kind == "images" and where:
        files = tuple(Path(part).expanduser() for part in where.split(","))
        missing = [path for path in files if not path.is_file()]
        if missing:
            raise DataError(f"there is no file {missing[0]}")
        return ImageFiles(text, files)
    if kind == "folder" and where:
        root = Path(where).expanduser()
        files = tuple(sorted(path for path in root.rglob("*") if path.suffix.lower() in FOLDER_EXTENSIONS))
        if not files:
            raise DataError(f"{root} holds no images")
        return ImageFiles(text, files)
    if kind == "shards" and where:
        return CaptionedShards(where, cache, caption_field)
    if kind == "hf" and where:
        return HuggingFaceCaptions(Path(where).expanduser(), image_column, caption_column)
    raise DataError(f"{text!r} names no images; write images:FILE,..., folder:DIR, shards:PATTERN or hf:DIR")


class Decoded(NamedTuple):
    """
    Attributes:
        images_BCHW: normalised; of those that can be decoded.
        examples: the same, as read.
        num_undecodable: how many were left out.
    """

    images_BCHW: np.ndarray
    examples: list[CaptionedImage]
    num_undecodable: int


def decoded(
    source: CaptionedImages, *, image_size: int, batch_size: int, count: int | None = None
) -> Iterator[Decoded]:
    """Batches of the first `count` images in order (all by default); a batch may be empty."""
    total = min(len(source), count or len(source))
    starts = range(0, total, batch_size)
    for start in track(starts, "batches of held-out pictures", len(starts)):
        ids = range(start, min(start + batch_size, total))
        images, kept = [], []
        for example in source.read(ids):
            try:
                if example.image is not None:
                    images.append(eval_image(example.image, image_size))
                    kept.append(example)
            except DecodeError:
                continue
        stacked = np.stack(images) if images else np.zeros((0, 3, image_size, image_size), np.float32)
        yield Decoded(stacked, kept, len(ids) - len(kept))
