"""What a task wants of one example: raw bytes in, named arrays out.

An example maker is a picklable callable, so that worker processes can run it. The names of its arrays carry their shape
(`images_CHW`); the loader stacks them and adds the B (`images_BCHW`). Shapes are the same for every example.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import numpy as np

from data.errors import DecodeError
from data.examples.tokenizer import CaptionTokenizer, load_tokenizer
from data.examples.transforms import eval_image, train_image
from data.reading.reader import RawExample


def _own_stream(key: int, number: int) -> np.random.Generator:
    """Randomness from an example's key, apart from that of its other uses; the crop has number 0."""
    return np.random.Generator(np.random.Philox(key=np.array([key, number], dtype=np.uint64)))


class MakeExample(Protocol):
    """Turns one raw example into arrays of fixed names, shapes and types."""

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Raises DecodeError when the example's own bytes do not allow it; `key` is its only source of randomness."""

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
        caption_field: of the `.json` member; see `RawExample.captions`.
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
        captions = [caption for caption in raw.captions(self.caption_field) if caption.strip()]
        if not captions:
            raise DecodeError("the example has no caption")
        caption = captions[key % len(captions) if self.train else 0]
        size, changed = self.image_size, self.train and self.augment
        image_CHW = train_image(raw.image, size, key) if changed else eval_image(raw.image, size)
        tokens_L, mask_L = self.tokenizer.encode(" ".join(caption[: 1 << 16].split()), self.num_tokens)
        return {"images_CHW": image_CHW, "tokens_L": tokens_L, "token_mask_L": mask_L, **self.coin(key)}

    def coin(self, key: int) -> dict[str, np.ndarray]:
        """is_parallel, a scalar; nothing where every example is causal, as in evaluation."""
        if not self.train or self.parallel_share == 0:
            return {}
        return {"is_parallel": np.array(_own_stream(key, 2).random() < self.parallel_share)}

    def padding(self) -> dict[str, np.ndarray]:
        """A black image with an empty caption."""
        tokens_L, mask_L = self.tokenizer.encode("", self.num_tokens)
        image_CHW = np.zeros((3, self.image_size, self.image_size), dtype=np.float32)
        return {"images_CHW": image_CHW, "tokens_L": tokens_L, "token_mask_L": mask_L, **self.coin(0)}


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
        if raw.image is None:
            raise DecodeError("the example has no image")
        size = self.image_size
        image_CHW = train_image(raw.image, size, key) if self.train and self.augment else eval_image(raw.image, size)
        return {"images_CHW": image_CHW, "mask_P": self.mask(key if self.train else 0)}

    def mask(self, key: int) -> np.ndarray:
        """(P,) bool: every set of `num_visible` visible patches is equally likely."""
        rng = _own_stream(key, 1)
        mask_P = np.ones(self.num_patches, dtype=bool)
        mask_P[rng.permutation(self.num_patches)[: self.num_visible]] = False
        return mask_P

    def padding(self) -> dict[str, np.ndarray]:
        """A black image with the fixed mask."""
        image_CHW = np.zeros((3, self.image_size, self.image_size), dtype=np.float32)
        return {"images_CHW": image_CHW, "mask_P": self.mask(0)}


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
        if raw.image is None:
            raise DecodeError("the example has no image")
        size = self.image_size
        return {"images_CHW": train_image(raw.image, size, key) if self.train else eval_image(raw.image, size)}

    def padding(self) -> dict[str, np.ndarray]:
        """A black image."""
        return {"images_CHW": np.zeros((3, self.image_size, self.image_size), dtype=np.float32)}
