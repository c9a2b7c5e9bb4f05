"""The example of any index: picture, caption, and the scene behind both; and tests of relations.

An example depends on (seed, index) alone, whatever the number of workers, the batch or the order. The picture also
depends on the renderer: numpy's and a graphics driver's differ in roundings, captions do not.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from data.errors import DataError
from data.synthetic.compose import Composition, compose, compose_relation
from data.synthetic.plain import compose_shapes
from data.synthetic.render_glsl import GlslRenderer
from data.synthetic.render_numpy import NumpyRenderer
from data.synthetic.scene import BACKENDS, CONTENTS, Scene
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
    """Generates examples; holds a renderer, so one per process."""

    def __init__(self, seed: int, image_size: int, backend: str = "auto", content: str = "all"):
        """Opens a renderer.

        Args:
            seed: 0 <= seed < 2**63.
            image_size: side in pixels, 16 to 4096.
            backend: glsl, numpy, or auto: glsl where it works.
            content: all, or shapes: one to three plain shapes with plain captions.

        Raises:
            DataError: a number out of range, or no OpenGL for backend glsl.
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
        self.renderer, self.fallback_reason = _renderer(backend, image_size)

    def examples(self, indices: Sequence[int]) -> list[SyntheticExample]:
        """Examples by index (at least one), rendered together."""
        made = [self.composition(index) for index in indices]
        images = self.renderer.render([composition.scene for composition, _ in made])
        return [
            SyntheticExample(image, caption, composition.scene, composition.statement)
            for image, (composition, caption) in zip(images, made, strict=True)
        ]

    def example(self, index: int) -> SyntheticExample:
        """One example."""
        return self.examples([index])[0]

    def composition(self, index: int) -> tuple[Composition, str]:
        """Scene, statement and caption without the picture."""
        rng = _rng(self.seed, index)
        if self.content == "shapes":
            composition = compose_shapes(rng)
            return composition, composition.statement.plain_caption()
        composition = compose(rng)
        return composition, composition.statement.caption(rng)

    def relation_tests(self, indices: Sequence[int]) -> list[RelationTest]:
        """Relation tests by index (at least one), rendered together; none of their pictures is a training example."""
        rngs = [_rng(self.seed, _RELATION_STREAM + index) for index in indices]
        made = [compose_relation(rng) for rng in rngs]
        images = self.renderer.render([composition.scene for composition in made])
        return [
            RelationTest(image, said.plain_caption(), said.contradictions(rng, scene.textures[0].colours))
            for image, (scene, said), rng in zip(images, made, rngs, strict=True)
        ]

    def close(self) -> None:
        """Gives the renderer back."""
        self.renderer.close()


def _rng(seed: int, index: int) -> np.random.Generator:
    return np.random.Generator(np.random.Philox(key=np.array([seed, index], dtype=np.uint64)))


def _renderer(backend: str, image_size: int) -> tuple[GlslRenderer | NumpyRenderer, str | None]:
    if backend not in BACKENDS:
        raise DataError(f"unknown backend {backend}; choose one of {', '.join(BACKENDS)}")
    if backend == "numpy":
        return NumpyRenderer(image_size), None
    try:
        return GlslRenderer(image_size), None
    except DataError as error:
        if backend == "glsl":
            raise
        return NumpyRenderer(image_size), str(error)
