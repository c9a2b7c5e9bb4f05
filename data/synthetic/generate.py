"""Returns the example of any index: picture, caption, and their scene.

An example depends on (seed, index) alone, whatever the number of workers, the batch or the order.
"""

from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.synthetic.compose import Composition, compose, compose_shapes
from data.synthetic.render import draw
from data.synthetic.scene import CONTENTS, Scene, Statement

GENERATOR_VERSION = 2
"""Changes whenever any example of any seed changes."""
BLOCK = 250
"""Scenes rendered at once."""


class SyntheticExample(NamedTuple):
    """A picture with its true caption.

    Attributes:
        image_HWC: uint8.
        caption: true of the picture.
        scene: the drawn textures and shapes.
        statement: the structure of the caption.
    """

    image_HWC: np.ndarray
    caption: str
    scene: Scene
    statement: Statement


class SyntheticData:
    """A generator of examples."""

    def __init__(self, seed: int, image_size: int, content: str = "all"):
        """Checks the settings.

        Args:
            seed: 0 <= seed < 2**63.
            image_size: side in pixels, 16 to 4096.
            content: all, shapes (one to three plain shapes with plain captions), or scenes
                (`scenes.py`).

        Raises:
            DataError: a number out of range, or unknown content.
        """
        if not 0 <= seed < 1 << 63:
            raise DataError(f"the seed is {seed}; it must be at least 0 and below 2**63")
        if not 16 <= image_size <= 4096:
            raise DataError(f"the image size is {image_size}; it must be from 16 to 4096 pixels")
        if content not in CONTENTS:
            raise DataError(f"unknown content {content}; choose one of {', '.join(CONTENTS)}")
        self.seed = seed
        self.content = content
        self.image_size = image_size

    def example(self, index: int) -> SyntheticExample:
        """Returns the example of one index."""
        if self.content == "scenes":
            return next(self.examples([index]))
        (scene, statement), caption = self.composition(index)
        return SyntheticExample(draw(scene, self.image_size), caption, scene, statement)

    def examples(self, indices: Sequence[int]) -> Iterator[SyntheticExample]:
        """Yields examples in order.

        Content "scenes" is rendered in blocks; its examples have an empty `scene` and `statement`.
        """
        if self.content != "scenes":
            yield from map(self.example, indices)
            return
        # Imported here, since it imports torch.
        from data.synthetic.scenes import Scenes, caption

        scenes = Scenes(self.seed, self.image_size)
        for start in range(0, len(indices), BLOCK):
            block = np.array(indices[start : start + BLOCK])
            images_BCHW, tokens_BL = scenes.pairs(block)
            images_BHWC = images_BCHW.permute(0, 2, 3, 1).numpy()
            for image_HWC, tokens_L in zip(images_BHWC, tokens_BL.tolist(), strict=True):
                yield SyntheticExample(image_HWC, caption(tokens_L), Scene(()), Statement())

    def composition(self, index: int) -> tuple[Composition, str]:
        """Returns scene, statement and caption of one index without its picture."""
        philox_key = np.array([self.seed, index], dtype=np.uint64)
        rng = np.random.Generator(np.random.Philox(key=philox_key))
        if self.content == "shapes":
            composition = compose_shapes(rng)
            return composition, composition.statement.plain_caption()
        composition = compose(rng)
        return composition, composition.statement.caption(rng)
