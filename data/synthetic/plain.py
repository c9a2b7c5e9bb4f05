"""Content "shapes": one, two or three plain shapes in basic colours, said in the plainest words.

Everything in such a caption can be asked for: colour, shape, which of two lies where, the order of three. A small captioner
learns it in minutes, which pictures of every kind (`compose`) do not allow. Shapes beside each other are level, those above
each other plumb, so that no other relation holds than the one that is said.
"""

from collections.abc import Sequence

import numpy as np

from data.synthetic import shapes
from data.synthetic.compose import Composition
from data.synthetic.scene import Scene, Shape, Texture
from data.synthetic.statement import Group, Statement
from data.synthetic.textures import random_colours
from data.synthetic.vocabulary import BASIC

Rng = np.random.Generator

NUMBERS = (0.4, 0.4, 0.2)
"""Chances of one, two and three shapes."""
BACKGROUNDS = ("white", "black", "light gray", "dark gray")
_CONTRAST = 0.3
_RELATIONS = ("left", "right", "above", "below")
_JITTER = 0.03


def compose_shapes(rng: Rng, number: int | None = None) -> Composition:
    """One picture of one to three different shapes in different colours, on one colour.

    Args:
        number: of shapes; drawn if None.
    """
    count = int(rng.choice(3, p=NUMBERS)) + 1 if number is None else number
    names = [str(name) for name in rng.permutation(shapes.SIMPLE)[:count]]
    colours = random_colours(rng, count, contrast=_CONTRAST, among=BASIC)
    background = random_colours(rng, 1, avoid=colours, contrast=_CONTRAST, among=BACKGROUNDS)
    relation, spots, radius = _layout(rng, count)
    groups = tuple(Group(1, name, colour) for name, colour in zip(names, colours, strict=True))
    drawn = tuple(Shape(name, colour, x, y, radius) for name, colour, (x, y) in zip(names, colours, spots, strict=True))
    return Composition(Scene((Texture("plain", background),), drawn), Statement(groups, relation))


def _layout(rng: Rng, count: int) -> tuple[str | None, Sequence[tuple[float, float]], float]:
    """Relation, centres in the order of the caption, and the common radius."""
    if count == 1:
        x, y = (float(value) for value in rng.uniform(0.3, 0.7, 2))
        return None, [(x, y)], float(rng.uniform(0.16, 0.28))
    level = float(rng.uniform(0.35, 0.65))
    if count == 2:
        relation, along, radius = _RELATIONS[rng.integers(4)], [0.26, 0.74], float(rng.uniform(0.15, 0.2))
        is_row = relation in ("left", "right")
        if relation in ("right", "below"):
            along = along[::-1]
    else:
        relation, along, radius = ("right", "down")[rng.integers(2)], [0.18, 0.5, 0.82], float(rng.uniform(0.1, 0.125))
        is_row = relation == "right"
    jitter = rng.uniform(-_JITTER, _JITTER, (count, 2))
    spots = [(float(at + move[0]), float(level + move[1])) for at, move in zip(along, jitter, strict=True)]
    return relation, spots if is_row else [(y, x) for x, y in spots], radius
