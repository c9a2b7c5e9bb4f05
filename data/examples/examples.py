"""What a task wants of one example: raw bytes in, named arrays out.

An example maker is a picklable callable, so that worker processes can run it. The names of its arrays carry their shape
(`images_CHW`); the loader stacks them and adds the B (`images_BCHW`). Shapes are the same for every example.
"""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

import numpy as np

from data.errors import DecodeError
from data.examples.tokenizer import CaptionTokenizer, load_tokenizer
from data.examples.transforms import eval_image, train_image
from data.reading.reader import RawExample, json_record, whole_number


def _own_stream(key: int, number: int) -> np.random.Generator:
    """Randomness from an example's key, apart from that of its other uses; the crop has number 0."""
    return np.random.Generator(np.random.Philox(key=np.array([key, number], dtype=np.uint64)))


class MakeExample(Protocol):
    """Turns one raw example into arrays of fixed names, shapes and types."""

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Raises DecodeError when the example's own bytes do not allow it; `key` is its only source of randomness."""

    def draws(self, raw: RawExample, /) -> bool:
        """Whether the key changes what is made of this example."""

    def padding(self) -> dict[str, np.ndarray]:
        """A harmless row of the same names, shapes and types, on which a loss is finite."""


@dataclass(frozen=True)
class ImageExample:
    """The image alone: images_CHW float32. What else a task wants of an example is added by the classes below.

    Attributes:
        image_size: side in pixels.
        train: random crop and flip from the example's key, and whatever else is drawn from it; otherwise the centre.
        augment: without it training sees the centre too, as where a caption says "left of", which a flip makes false.
    """

    image_size: int
    train: bool = field(default=True, kw_only=True)
    augment: bool = field(default=True, kw_only=True)

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Decodes the image.

        Raises:
            DecodeError: no image, one that cannot be decoded, or without what else is wanted of it.
        """
        if raw.image is None:
            raise DecodeError("the example has no image")
        if self.train and self.augment:
            return {"images_CHW": train_image(raw.image, self.image_size, key)}
        return {"images_CHW": eval_image(raw.image, self.image_size)}

    def draws(self, raw: RawExample, /) -> bool:
        return self.train and self.augment

    def padding(self) -> dict[str, np.ndarray]:
        """A black image."""
        return {"images_CHW": np.zeros((3, self.image_size, self.image_size), dtype=np.float32)}


@dataclass(frozen=True)
class CaptionExample(ImageExample):
    """Image and caption: also tokens_L int64, token_mask_L bool; with `parallel_share` also is_parallel bool.

    Training draws one of several captions; otherwise the first is meant.

    Attributes:
        num_tokens: L, start and end included.
        tokenizer_path: a Hugging Face tokenizer.json.
        caption_field: field of the `.json` member; see `RawExample.captions`.
        parallel_share: probability that a training example's caption is to be predicted in parallel (CapPa).
    """

    num_tokens: int
    tokenizer_path: Path | str
    caption_field: str | None = None
    parallel_share: float = 0.0

    @property
    def tokenizer(self) -> CaptionTokenizer:
        """Loaded once per process."""
        return load_tokenizer(str(self.tokenizer_path))

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        captions = self._captions(raw)
        if raw.image is not None and not captions:
            raise DecodeError("the example has no caption")
        image = super().__call__(raw, key)
        return {**image, **self._encoded(captions[key % len(captions) if self.train else 0], key)}

    def _captions(self, raw: RawExample) -> list[str]:
        return [caption for caption in raw.captions(self.caption_field) if caption.strip()]

    def _encoded(self, caption: str, key: int) -> dict[str, np.ndarray]:
        tokens_L, mask_L = self.tokenizer.encode(
            " ".join(caption[: 1 << 16].split()), self.num_tokens
        )
        return {"tokens_L": tokens_L, "token_mask_L": mask_L, **self.coin(key)}

    def draws(self, raw: RawExample, /) -> bool:
        return self.train and (
            self.augment or self.parallel_share > 0 or len(self._captions(raw)) > 1
        )

    def count_unknown(self, raw: RawExample) -> np.ndarray:
        """(2,) int64: how many words of all the example's captions the vocabulary does not know, and how many they have."""
        counts = [
            self.tokenizer.count_unknown(caption) for caption in raw.captions(self.caption_field)
        ]
        return np.array(counts, dtype=np.int64).reshape(-1, 2).sum(axis=0)

    def coin(self, key: int) -> dict[str, np.ndarray]:
        """is_parallel, a scalar; nothing where every example is causal, as in evaluation."""
        if not self.train or self.parallel_share == 0:
            return {}
        return {"is_parallel": np.array(_own_stream(key, 2).random() < self.parallel_share)}

    def padding(self) -> dict[str, np.ndarray]:
        """A black image with an empty caption."""
        return {**super().padding(), **self._encoded("", 0)}


@dataclass(frozen=True)
class MaskedImageExample(ImageExample):
    """Image and mask: also mask_P bool with the same number of visible patches in every example; one fixed mask in evaluation.

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
        """(P,) bool: every set of `num_visible` visible patches is equally likely."""
        mask_P = np.ones((self.image_size // self.patch_size) ** 2, dtype=bool)
        mask_P[_own_stream(key, 1).permutation(len(mask_P))[: self.num_visible]] = False
        return mask_P

    def padding(self) -> dict[str, np.ndarray]:
        """A black image with the fixed mask."""
        return {**super().padding(), "mask_P": self.mask(0)}


def read_label(raw: RawExample, num_classes: int, field: str | None = None) -> int:
    """The example's label, in [0, num_classes): the integer in the member `cls` (webdataset's convention) or in a JSON field.

    Args:
        num_classes: public, so that an example's fate depends on its own bytes alone.
        field: field of the `json` member, an integer or its digits; None means the member `cls`.

    Raises:
        DecodeError: there is none, or it is no integer in the range.
    """
    if field is None:
        label = whole_number(raw.fields.get("cls", b"")[:1000].decode("ascii", "replace"))
    else:
        label = whole_number(json_record(raw.fields.get("json", b"")).get(field))
    if label is None:
        raise DecodeError("the example has no integer as its label")
    if label >= num_classes:
        raise DecodeError(f"the example's label is outside of the {num_classes} classes")
    return label


@dataclass(frozen=True)
class LabelledImageExample(ImageExample):
    """Image and label: also labels int64 ().

    Attributes:
        num_classes: the recipe's.
        label_field: field of the `.json` member; None means the member `.cls`.
    """

    num_classes: int
    label_field: str | None = None

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        label = read_label(raw, self.num_classes, self.label_field)
        return {**super().__call__(raw, key), "labels": np.array(label, dtype=np.int64)}

    def padding(self) -> dict[str, np.ndarray]:
        """A black image of class 0."""
        return {**super().padding(), "labels": np.array(0, dtype=np.int64)}
