"""What a task wants of one example: raw bytes in, named arrays out.

An example maker is a picklable callable, so that worker processes can run it. The names of its arrays carry their shape
(`images_CHW`); the loader stacks them and adds the B (`images_BCHW`). Shapes are the same for every example.
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from data.errors import DecodeError
from data.examples.tokenizer import CaptionTokenizer, load_tokenizer
from data.examples.transforms import eval_image, train_image
from data.reading.reader import RawExample, json_record

_INTEGER = re.compile(r"\s*([0-9]{1,9})\s*", re.ASCII)
_MAX_LABEL_BYTES = 64


def _own_stream(key: int, number: int) -> np.random.Generator:
    """Randomness from an example's key, apart from that of its other uses; the crop has number 0."""
    return np.random.Generator(np.random.Philox(key=np.array([key, number], dtype=np.uint64)))


def _image(raw: RawExample, image_size: int, key: int, is_changed: bool) -> np.ndarray:
    """images_CHW: a random crop and flip where the image is changed, the centre otherwise.

    Raises:
        DecodeError: no image, or one that cannot be decoded.
    """
    if raw.image is None:
        raise DecodeError("the example has no image")
    return train_image(raw.image, image_size, key) if is_changed else eval_image(raw.image, image_size)


def _black(image_size: int) -> np.ndarray:
    return np.zeros((3, image_size, image_size), dtype=np.float32)


class MakeExample(Protocol):
    """Turns one raw example into arrays of fixed names, shapes and types."""

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Raises DecodeError when the example's own bytes do not allow it; `key` is its only source of randomness."""

    def draws(self, raw: RawExample, /) -> bool:
        """Whether the key changes what is made of this example."""

    def padding(self) -> dict[str, np.ndarray]:
        """A harmless row of the same names, shapes and types, on which a loss is finite."""


@dataclass(frozen=True)
class CaptionExample:
    """Image and caption: images_CHW float32, tokens_L int64, token_mask_L bool; with `parallel_share` also is_parallel bool.

    Attributes:
        image_size: side in pixels.
        num_tokens: L, start and end included.
        tokenizer_path: a Hugging Face tokenizer.json.
        train: random crop and flip, and one of several captions at random; otherwise the centre and the first.
        caption_field: field of the `.json` member; see `RawExample.captions`.
        augment: without it training sees the centre too, as where a caption says "left of", which a flip makes false.
        parallel_share: probability that a training example's caption is to be predicted in parallel (CapPa).
    """

    image_size: int
    num_tokens: int
    tokenizer_path: Path | str
    train: bool = True
    caption_field: str | None = None
    augment: bool = True
    parallel_share: float = 0.0

    @property
    def tokenizer(self) -> CaptionTokenizer:
        """Loaded once per process."""
        return load_tokenizer(str(self.tokenizer_path))

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Decodes the image and encodes the caption.

        Raises:
            DecodeError: no image, an image that cannot be decoded, no caption or an empty one.
        """
        if raw.image is None:
            raise DecodeError("the example has no image")
        captions = self._captions(raw)
        if not captions:
            raise DecodeError("the example has no caption")
        caption = captions[key % len(captions) if self.train else 0]
        image_CHW = _image(raw, self.image_size, key, self.train and self.augment)
        tokens_L, mask_L = self.tokenizer.encode(" ".join(caption[: 1 << 16].split()), self.num_tokens)
        return {"images_CHW": image_CHW, "tokens_L": tokens_L, "token_mask_L": mask_L, **self.coin(key)}

    def _captions(self, raw: RawExample) -> list[str]:
        return [caption for caption in raw.captions(self.caption_field) if caption.strip()]

    def draws(self, raw: RawExample, /) -> bool:
        return self.train and (self.augment or self.parallel_share > 0 or len(self._captions(raw)) > 1)

    def count_unknown(self, raw: RawExample) -> np.ndarray:
        """(2,) int64: how many words of all the example's captions the vocabulary does not know, and how many they have."""
        counts = [self.tokenizer.count_unknown(caption) for caption in raw.captions(self.caption_field)]
        return np.array(counts, dtype=np.int64).reshape(-1, 2).sum(axis=0)

    def coin(self, key: int) -> dict[str, np.ndarray]:
        """is_parallel, a scalar; nothing where every example is causal, as in evaluation."""
        if not self.train or self.parallel_share == 0:
            return {}
        return {"is_parallel": np.array(_own_stream(key, 2).random() < self.parallel_share)}

    def padding(self) -> dict[str, np.ndarray]:
        """A black image with an empty caption."""
        tokens_L, mask_L = self.tokenizer.encode("", self.num_tokens)
        return {"images_CHW": _black(self.image_size), "tokens_L": tokens_L, "token_mask_L": mask_L, **self.coin(0)}


@dataclass(frozen=True)
class MaskedImageExample:
    """Image and mask: images_CHW float32, mask_P bool with the same number of visible patches in every example.

    Attributes:
        image_size, patch_size: in pixels.
        num_visible: patches that stay visible.
        train: random crop, flip and mask from the example's key; otherwise the centre, with one fixed mask.
        augment: without it training sees the centre too, with random masks.
    """

    image_size: int
    patch_size: int
    num_visible: int
    train: bool = True
    caption_field: str | None = None
    augment: bool = True

    @property
    def num_patches(self) -> int:
        return (self.image_size // self.patch_size) ** 2

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Decodes the image; the caption is not looked at.

        Raises:
            DecodeError: no image, or one that cannot be decoded.
        """
        image_CHW = _image(raw, self.image_size, key, self.train and self.augment)
        return {"images_CHW": image_CHW, "mask_P": self.mask(key if self.train else 0)}

    def draws(self, raw: RawExample, /) -> bool:
        return self.train

    def mask(self, key: int) -> np.ndarray:
        """(P,) bool: every set of `num_visible` visible patches is equally likely."""
        rng = _own_stream(key, 1)
        mask_P = np.ones(self.num_patches, dtype=bool)
        mask_P[rng.permutation(self.num_patches)[: self.num_visible]] = False
        return mask_P

    def padding(self) -> dict[str, np.ndarray]:
        """A black image with the fixed mask."""
        return {"images_CHW": _black(self.image_size), "mask_P": self.mask(0)}


@dataclass(frozen=True)
class ImageExample:
    """The image alone: images_CHW float32.

    Attributes:
        image_size: side in pixels.
        train: random crop and flip from the example's key; otherwise the centre.
    """

    image_size: int
    train: bool = True

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Decodes the image; the caption is not looked at.

        Raises:
            DecodeError: no image, or one that cannot be decoded.
        """
        return {"images_CHW": _image(raw, self.image_size, key, self.train)}

    def draws(self, raw: RawExample, /) -> bool:
        return self.train

    def padding(self) -> dict[str, np.ndarray]:
        """A black image."""
        return {"images_CHW": _black(self.image_size)}


def read_label(raw: RawExample, num_classes: int, field: str | None = None) -> int:
    """The example's label, in [0, num_classes): the integer in the member `cls` (webdataset's convention) or in a JSON field.

    Args:
        num_classes: public, so that an example's fate depends on its own bytes alone.
        field: field of the `json` member, an integer or its digits; None means the member `cls`.

    Raises:
        DecodeError: there is none, or it is no integer in the range.
    """
    value: object
    if field is None:
        value = raw.fields.get("cls", b"")[: _MAX_LABEL_BYTES + 1].decode("ascii", "replace")
    else:
        value = json_record(raw.fields.get("json", b"")).get(field)
    if isinstance(value, str):
        digits = _INTEGER.fullmatch(value) if len(value) <= _MAX_LABEL_BYTES else None
        value = int(digits[1]) if digits else None
    if type(value) is not int:
        raise DecodeError("the example has no integer as its label")
    if not 0 <= value < num_classes:
        raise DecodeError(f"the example's label is outside of the {num_classes} classes")
    return value


@dataclass(frozen=True)
class LabelledImageExample:
    """Image and label: images_CHW float32, labels int64 ().

    Attributes:
        image_size: side in pixels.
        num_classes: the recipe's.
        train: random crop and flip from the example's key; otherwise the centre.
        label_field: field of the `.json` member; None means the member `.cls`.
        augment: without it training sees the centre too.
    """

    image_size: int
    num_classes: int
    train: bool = True
    label_field: str | None = None
    augment: bool = True

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Reads the label and decodes the image.

        Raises:
            DecodeError: no image, one that cannot be decoded, or a bad label.
        """
        label = read_label(raw, self.num_classes, self.label_field)
        image_CHW = _image(raw, self.image_size, key, self.train and self.augment)
        return {"images_CHW": image_CHW, "labels": np.array(label, dtype=np.int64)}

    def draws(self, raw: RawExample, /) -> bool:
        return self.train and self.augment

    def padding(self) -> dict[str, np.ndarray]:
        """A black image of class 0."""
        return {"images_CHW": _black(self.image_size), "labels": np.array(0, dtype=np.int64)}
