"""Scenes (texture programs in boxes, with shapes on top), statements about them, and captions."""

from dataclasses import dataclass, replace

import numpy as np

from data.synthetic import shapes
from data.synthetic.vocabulary import (
    ABSTRACT_INTRODUCTIONS,
    COUNTS,
    INTRODUCTIONS,
    RELATIONS,
    enumeration,
    with_article,
)

Rng = np.random.Generator
CONTENTS = ("all", "shapes", "scenes")


@dataclass(frozen=True)
class Texture:
    """A texture program.

    Attributes:
        program: its name in `fields.py`; "plain" for one colour.
        colours: one to three colour names; the program's number 0 means the first, 1 the last.
        values: parameters of the program, at most eight.
        box: left, top, right, bottom edge of the filled part, 0 to 1.
    """

    program: str
    colours: tuple[str, ...]
    values: tuple[float, ...] = ()
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Shape:
    """A drawn shape.

    Attributes:
        name: its name in `shapes.py`.
        colour: its name.
        x: centre in image sides from the left.
        y: centre in image sides from the top.
        radius: of the circle around it, in image sides.
        angle: radians, clockwise.
        fill: solid, hollow, striped, dotted or checkered.
        second: the other colour of a striped, dotted or checkered fill.
    """

    name: str
    colour: str
    x: float
    y: float
    radius: float
    angle: float = 0.0
    fill: str = "solid"
    second: str | None = None


@dataclass(frozen=True)
class Scene:
    """A picture's textures from back to front, then its shapes from back to front."""

    textures: tuple[Texture, ...]
    shapes: tuple[Shape, ...] = ()


@dataclass(frozen=True)
class Group:
    """Equal shapes: "three small red stars".

    Attributes:
        count: number of shapes.
        shape: name of the shape.
        colour: name of the colour.
        fill: see `Shape`.
        second: the other colour of a patterned fill.
        size: a word, or nothing.
    """

    count: int
    shape: str
    colour: str
    fill: str = "solid"
    second: str | None = None
    size: str = ""

    def phrase(self) -> str:
        """Returns the noun phrase, with article or number."""
        noun = self.shape if self.count == 1 else shapes.plural(self.shape)
        if self.fill == "hollow":
            noun = f"hollow {self.colour} {noun}"
        elif self.second is not None:
            noun = f"{self.fill} {enumeration([self.colour, self.second])} {noun}"
        else:
            noun = f"{self.colour} {noun}"
        if self.size:
            noun = f"{self.size} {noun}"
        return with_article(noun) if self.count == 1 else f"{COUNTS[self.count]} {noun}"

    def with_look_of(self, group: "Group") -> "Group":
        """Returns this number and shape in the colours of another group."""
        return replace(self, colour=group.colour, fill=group.fill, second=group.second)


@dataclass(frozen=True)
class Statement:
    """A statement of a caption about a picture.

    Attributes:
        groups: one group; two in a relation; three from left to right or from top to bottom.
        relation: a key of RELATIONS between two groups; "right" or "down" for three; else None.
        place: of one group, a phrase such as "in the center", or an arrangement such as "in a row".
        background: a phrase, or "".
        textures: instead of groups: one phrase, or two in a relation.
    """

    groups: tuple[Group, ...] = ()
    relation: str | None = None
    place: str = ""
    background: str = ""
    textures: tuple[str, ...] = ()

    def caption(self, rng: Rng) -> str:
        """Returns a true sentence, whose wording is drawn at random."""
        body = self._body(rng)
        if self.background and rng.random() < 0.75:
            body += rng.choice([" on ", " in front of ", " against "]) + self.background
        introductions = ABSTRACT_INTRODUCTIONS if self.textures else INTRODUCTIONS
        introduction = str(introductions[rng.integers(len(introductions))])
        # It would be "an image of from left to right" or "an abstract pattern of a checkerboard".
        has_article = body.startswith(("a ", "an ", "the "))
        is_texture_of = bool(self.textures) and introduction.endswith(" of ")
        if body.startswith("from ") or (is_texture_of and has_article):
            introduction = ""
        return introduction + body

    def plain_caption(self) -> str:
        """Returns the true caption of shapes in the plainest wording, without background."""
        return self._body(None)

    def _body(self, rng: Rng | None) -> str:
        phrases = self.textures or tuple(group.phrase() for group in self.groups)
        if len(phrases) == 3:
            orders = {"right": "from left to right", "down": "from top to bottom"}
            order = orders[str(self.relation)]
            if rng is not None and rng.random() < 0.3:
                return f"{phrases[1]} between {phrases[0]} and {phrases[2]}"
            if rng is not None and rng.random() < 0.5:
                return f"{order}: {enumeration(phrases)}"
            return f"{enumeration(phrases)} {order}"
        if len(phrases) == 2 and self.relation is not None:
            words = RELATIONS[self.relation]
            word = words[0 if rng is None else rng.integers(len(words))]
            return f"{phrases[0]} {word} {phrases[1]}"
        return f"{enumeration(phrases)} {self.place}".strip()
