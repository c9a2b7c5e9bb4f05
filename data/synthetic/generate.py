"""The example of any index: picture, caption, and the scene behind both; and tests of relations.

An example depends on (seed, index) alone, whatever the number of workers, the batch or the order.
"""

from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.synthetic.compose import Composition, compose, compose_relation, compose_shapes
from data.synthetic.render import draw
from data.synthetic.scene import CONTENTS, Scene
from data.synthetic.statement import Statement

GENERATOR_VERSION = 1
"""Changes whenever any example of any seed does."""
_RELATION_STREAM = 1 << 63
"""Relation tests have indices of their own, far from those of training examples."""


class SyntheticExample(NamedTuple):
    """One example.

    Attributes:
        image_HWC: uint8.
        caption: true of the picture.
        scene: what was drawn.
        statement: what is true, as structure.
    """

    image_HWC: np.ndarray
    caption: str
    scene: Scene
    statement: Statement


class RelationTest(NamedTuple):
    """A picture with its true caption and false ones in the same wording, by what is wrong with each.

    Attributes:
        image_HWC: uint8.
        caption: the true one.
        wrong: swapped_order, swapped_colours, swapped_shapes, opposite_relation, wrong_colour, wrong_shape, wrong_count; those
            that apply.
    """

    image_HWC: np.ndarray
    caption: str
    wrong: dict[str, str]


class SyntheticData:
    """Generates examples."""

    def __init__(self, seed: int, image_size: int, content: str = "all"):
        """Checks the settings.

        Args:
            seed: 0 <= seed < 2**63.
            image_size: side in pixels, 16 to 4096.
            content: all, or shapes: one to three plain shapes with plain captions.

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
        """One example."""
        (scene, statement), caption = self.composition(index)
        return SyntheticExample(draw(scene, self.image_size), caption, scene, statement)

    def composition(self, index: int) -> tuple[Composition, str]:
        """Scene, statement and caption without the picture."""
        rng = _rng(self.seed, index)
        if self.content == "shapes":
            composition = compose_shapes(rng)
            return composition, composition.statement.plain_caption()
        composition = compose(rng)
        return composition, composition.statement.caption(rng)

    def relation_test(self, index: int) -> RelationTest:
        """A relation test; its picture is never a training example."""
        rng = _rng(self.seed, _RELATION_STREAM + index)
        scene, statement = compose_relation(rng)
        wrong = statement.contradictions(rng, scene.textures[0].colours)
        return RelationTest(draw(scene, self.image_size), statement.plain_caption(), wrong)


def _rng(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))
