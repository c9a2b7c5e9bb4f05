"""Makes the arrays of a task from the raw bytes of one example.

An example maker is a picklable callable, so that worker processes can run it. The names of its
arrays end with their shape (`images_CHW`); the loader stacks them and adds the B (`images_BCHW`).
Every example has the same shapes.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from data.errors import DecodeError
from data.examples.tokenizer import CaptionTokenizer, load_tokenizer
from data.examples.transforms import eval_image, train_image
from data.reading.reader import RawExample, json_record, whole_number


def _stream_of(key: int, number: int) -> np.random.Generator:
    """Returns an independent random stream of an example's key; the crop has number 0."""
    philox_key = np.array([key, number], dtype=np.uint64)
    return np.random.Generator(np.random.Philox(key=philox_key))


class MakeExample(Protocol):
    """Turns one raw example into arrays of fixed names, shapes and types."""

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Returns the example's arrays; `key` is the only source of randomness.

        Raises:
            DecodeError: the example's own bytes have no usable picture, caption or label.
        """

    def draws(self, raw: RawExample, /) -> bool:
        """Returns whether the key changes the arrays of this example."""

    def padding(self) -> dict[str, np.ndarray]:
        """Returns a row of the same names, shapes and types, on which a loss is finite."""


@dataclass(frozen=True)
class ImageExample:
    """Makes the image alone: images_CHW float32. The classes below add arrays of other tasks.

    Attributes:
        image_size: side in pixels.
        train: draws from the example's key, such as a random crop and flip; otherwise the centre.
        augment: without it training has the centre too, for captions such as "left of", which a
            flip makes false.
    """

    image_size: int
    train: bool = field(default=True, kw_only=True)
    augment: bool = field(default=True, kw_only=True)

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Returns the arrays of the example; see `MakeExample`.

        Raises:
            DecodeError: the image is missing or cannot be decoded, or another part is missing.
        """
        if raw.image is None:
            raise DecodeError("the example has no image")
        if self.train and self.augment:
            return {"images_CHW": train_image(raw.image, self.image_size, key)}
        return {"images_CHW": eval_image(raw.image, self.image_size)}

    def draws(self, raw: RawExample, /) -> bool:
        return self.train and self.augment

    def padding(self) -> dict[str, np.ndarray]:
        """Returns a black image."""
        shape = (3, self.image_size, self.image_size)
        return {"images_CHW": np.zeros(shape, dtype=np.float32)}


@dataclass(frozen=True)
class CaptionExample(ImageExample):
    """Makes image and caption: also tokens_L int64, token_mask_L bool, and is_parallel bool.

    Training draws one of several captions; otherwise the first is used.

    Attributes:
        num_tokens: L, start and end included.
        tokenizer_path: a Hugging Face tokenizer.json.
        caption_field: field of the `.json` member; see `RawExample.captions`.
        parallel_share: probability that a training example's caption is predicted in parallel
            (CapPa); 0 leaves is_parallel out.
    """

    num_tokens: int
    tokenizer_path: Path | str
    caption_field: str | None = None
    parallel_share: float = 0.0

    @property
    def tokenizer(self) -> CaptionTokenizer:
        """Returns the tokenizer, which is loaded once per process."""
        return load_tokenizer(str(self.tokenizer_path))

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        captions = self._captions(raw)
        if raw.image is not None and not captions:
            raise DecodeError("the example has no caption")
        image = super().__call__(raw, key)
        number = key % len(captions) if self.train else 0
        return {**image, **self._encoded(captions[number], key)}

    def _captions(self, raw: RawExample) -> list[str]:
        return [caption for caption in raw.captions(self.caption_field) if caption.strip()]

    def _encoded(self, caption: str, key: int) -> dict[str, np.ndarray]:
        text = " ".join(caption[: 1 << 16].split())
        tokens_L, mask_L = self.tokenizer.encode(text, self.num_tokens)
        return {"tokens_L": tokens_L, "token_mask_L": mask_L, **self.coin(key)}

    def draws(self, raw: RawExample, /) -> bool:
        if not self.train:
            return False
        return self.augment or self.parallel_share > 0 or len(self._captions(raw)) > 1

    def count_unknown(self, raw: RawExample) -> np.ndarray:
        """Returns two int64, (2,): words of all the example's captions, unknown words first.

        A word is unknown if the vocabulary lacks it; the second number counts all words.
        """
        captions = raw.captions(self.caption_field)
        counts = [self.tokenizer.count_unknown(caption) for caption in captions]
        return np.array(counts, dtype=np.int64).reshape(-1, 2).sum(axis=0)

    def coin(self, key: int) -> dict[str, np.ndarray]:
        """Returns the scalar is_parallel, or {} if every example is causal, as in evaluation."""
        if not self.train or self.parallel_share == 0:
            return {}
        is_parallel = _stream_of(key, 2).random() < self.parallel_share
        return {"is_parallel": np.array(is_parallel)}

    def padding(self) -> dict[str, np.ndarray]:
        """Returns a black image with an empty caption."""
        return {**super().padding(), **self._encoded("", 0)}


@dataclass(frozen=True)
class MaskedImageExample(ImageExample):
    """Makes image and mask: also mask_P bool, True for hidden patches.

    Every example has the same number of visible patches; evaluation has one fixed mask.

    Attributes:
        patch_size: in pixels.
        num_visible: patches that stay visible.
    """

    patch_size: int
    num_visible: int

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        return {**super().__call__(raw, key), "mask_P": self.mask(key if self.train else 0)}

    def draws(self, raw: RawExample, /) -> bool:
        return self.train

    def mask(self, key: int) -> np.ndarray:
        """Returns a mask, bool (P,); all sets of `num_visible` patches are equally likely."""
        num_patches = (self.image_size // self.patch_size) ** 2
        mask_P = np.ones(num_patches, dtype=bool)
        patches = _stream_of(key, 1).permutation(num_patches)
        mask_P[patches[: self.num_visible]] = False
        return mask_P

    def padding(self) -> dict[str, np.ndarray]:
        """Returns a black image with the fixed mask."""
        return {**super().padding(), "mask_P": self.mask(0)}


def read_label(raw: RawExample, num_classes: int, field: str | None = None) -> int:
    """Returns the example's label, in [0, num_classes).

    Args:
        num_classes: public, so that the example's own bytes alone decide whether it is usable.
        field: field of the `json` member, an integer or its digits; None means the member `cls`
            (webdataset's convention).

    Raises:
        DecodeError: the label is missing, or not an integer in the range.
    """
    if field is None:
        digits = raw.fields.get("cls", b"")[:1000]
        label = whole_number(digits.decode("ascii", "replace"))
    else:
        record = json_record(raw.fields.get("json", b""))
        label = whole_number(record.get(field))
    if label is None:
        raise DecodeError("the example has no integer as its label")
    if label >= num_classes:
        raise DecodeError(f"the example's label is outside of the {num_classes} classes")
    return label


@dataclass(frozen=True)
class LabelledImageExample(ImageExample):
    """Makes image and label: also labels int64 ().

    Attributes:
        num_classes: of the recipe.
        label_field: field of the `.json` member; None means the member `.cls`.
    """

    num_classes: int
    label_field: str | None = None

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        label = read_label(raw, self.num_classes, self.label_field)
        return {**super().__call__(raw, key), "labels": np.array(label, dtype=np.int64)}

    def padding(self) -> dict[str, np.ndarray]:
        """Returns a black image of class 0."""
        return {**super().padding(), "labels": np.array(0, dtype=np.int64)}
