"""What all sources of images share: an example, the interface of a source, and how bytes and labels are read."""

import hashlib
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple, Protocol

import numpy as np
from PIL import Image

from data.errors import ReadError

FOLDER_EXTENSIONS = frozenset({".jpg", ".jpeg", ".jpe", ".jfif", ".png", ".webp", ".gif", ".bmp"})


class LabelledImage(NamedTuple):
    """
    Attributes:
        image: encoded bytes, or None.
        label: 0, 1, ...; None where the example has no such label.
    """

    image: bytes | None
    label: int | None


class LabelledImages(Protocol):
    """A source: picklable, so that worker processes can read it."""

    @property
    def name(self) -> str:
        """What people read."""
        ...

    @property
    def class_names(self) -> tuple[str, ...]:
        """The names of the labels 0, 1, ...; empty where the source does not know them."""
        ...

    def identity(self) -> str:
        """Changes when the data do: part of a cache's name."""
        ...

    def __len__(self) -> int: ...

    def read(self, ids: Sequence[int]) -> list[LabelledImage]:
        """
        Raises:
            ReadError: bytes that were promised cannot be read.
        """
        ...


class CaptionedImage(NamedTuple):
    """
    Attributes:
        name: what people read.
        image: encoded bytes, or None.
        captions: references; may be empty.
    """

    name: str
    image: bytes | None
    captions: tuple[str, ...]


class CaptionedImages(Protocol):
    """A source."""

    @property
    def name(self) -> str:
        """What people read."""
        ...

    def __len__(self) -> int: ...

    def read(self, ids: Sequence[int]) -> Iterator[CaptionedImage]:
        """
        Raises:
            ReadError: bytes that were promised cannot be read.
        """
        ...


def encode_png(image: np.ndarray) -> bytes:
    """Lossless bytes of a uint8 image, (H, W) or (H, W, 3)."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, "PNG", compress_level=1)
    return buffer.getvalue()


def label_value(value: Any) -> int | None:
    """A whole number from 0 on; anything else is no label."""
    return int(value) if isinstance(value, int | np.integer) and value >= 0 else None


def bytes_of(path: Path) -> bytes:
    """
    Raises:
        ReadError: it cannot be read.
    """
    try:
        return path.read_bytes()
    except OSError as error:
        raise ReadError(f"cannot read {path}: {error.strerror or error}") from error


def files_digest(root: Path, names: Sequence[str]) -> str:
    """A digest over the names, sizes and times of files below a folder."""
    digest = hashlib.sha256()
    for name in names:
        status = (root / name).stat()
        digest.update(f"{name}\0{status.st_size}\0{status.st_mtime_ns}\n".encode("utf-8", "surrogatepass"))
    return digest.hexdigest()
