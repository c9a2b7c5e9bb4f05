"""What a picture shows, as structure; its true captions and false ones that differ in one respect."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import permutations

import numpy as np

from data.synthetic import shapes
from data.synthetic.texture_kinds import random_colours
from data.synthetic.vocabulary import (
    ABSTRACT_INTRODUCTIONS,
    BASIC,
    COUNTS,
    INTRODUCTIONS,
    OPPOSITES,
    RELATIONS,
    a,
    listed,
)

Rng = np.random.Generator
_ARTICLES = ("a ", "an ", "the ")


@dataclass(frozen=True)
class Group:
    """Equal shapes: "three small red stars".

    Attributes:
        count: how many.
        shape: name.
        colour: name.
        fill: one of scene.FILLS.
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
        """With article or number."""
        noun = self.shape if self.count == 1 else shapes.plural(self.shape)
        if self.fill == "hollow":
            noun = f"hollow {self.colour} {noun}"
        elif self.second is not None:
            noun = f"{self.fill} {listed([self.colour, self.second])} {noun}"
        else:
            noun = f"{self.colour} {noun}"
        noun = f"{self.size} {noun}" if self.size else noun
        return a(noun) if self.count == 1 else f"{COUNTS[self.count]} {noun}"

    def with_look_of(self, other: "Group") -> "Group":
        """This number and shape in the colours of the other."""
        return replace(self, colour=other.colour, fill=other.fill, second=other.second)

    def with_shape_of(self, other: "Group") -> "Group":
        return replace(self, shape=other.shape)


@dataclass(frozen=True)
class Statement:
    """What a caption states about a picture.

    Attributes:
        groups: one group; two in a relation; three from left to right or from top to bottom.
        relation: a key of RELATIONS between two groups; "right" or "down" for three; else None.
        place: where one group is, a phrase such as "in the center", or an arrangement such as "in a row".
        background: a phrase, or nothing.
        textures: instead of groups: one phrase, or two in a relation.
    """

    groups: tuple[Group, ...] = ()
    relation: str | None = None
    place: str = ""
    background: str = ""
    textures: tuple[str, ...] = ()

    def caption(self, rng: Rng) -> str:
        """A true sentence, its wording drawn at random."""
        body = self._textures(rng) if self.textures else self._groups(rng)
        if self.background and rng.random() < 0.75:
            body += rng.choice([" on ", " in front of ", " against "]) + self.background
        introductions = ABSTRACT_INTRODUCTIONS if self.textures else INTRODUCTIONS
        introduction = str(introductions[rng.integers(len(introductions))])
        if body.startswith("from ") or (self.textures and introduction.endswith(" of ") and body.startswith(_ARTICLES)):
            introduction = ""  # "an image of from left to right", "an abstract pattern of a checkerboard"
        return introduction + body

    def contradictions(self, rng: Rng, avoid: Sequence[str] = ()) -> dict[str, str]:
        """False captions in the same wording as `plain_caption`, by what is wrong with them.

        swapped_order exchanges the two sides of the relation, swapped_colours and swapped_shapes only the colours or
        only the shapes; opposite_relation, wrong_colour, wrong_shape and wrong_count change one word.

        Args:
            avoid: further colours in the picture, of which none is a wrong colour.
        """
        wrong: dict[str, Statement] = {}
        if self.groups:
            place = int(rng.integers(len(self.groups)))
            group = self.groups[place]
            used = [g.colour for g in self.groups] + [g.second for g in self.groups if g.second]
            free = [name for name in BASIC if name not in avoid]
            colour = random_colours(rng, 1, avoid=used, among=free)[0]
            others = [name for name in shapes.SIMPLE if name not in {g.shape for g in self.groups}]
            counts = [count for count in range(1, 8) if count != group.count]
            changed = {
                "wrong_colour": replace(group, colour=colour),
                "wrong_shape": replace(group, shape=others[rng.integers(len(others))]),
                "wrong_count": replace(group, count=counts[rng.integers(len(counts))]),
            }
            for name, other in changed.items():
                wrong[name] = replace(self, groups=(*self.groups[:place], other, *self.groups[place + 1 :]))
        if len(self.groups) == 2 and self.relation is not None:
            first, second = self.groups
            pairs = {
                "swapped_order": (second, first),
                "swapped_colours": (first.with_look_of(second), second.with_look_of(first)),
                "swapped_shapes": (first.with_shape_of(second), second.with_shape_of(first)),
            }
            wrong |= {name: replace(self, groups=pair) for name, pair in pairs.items()}
            wrong["opposite_relation"] = replace(self, relation=OPPOSITES[self.relation])
        if len(self.groups) == 3:
            orders = [order for order in permutations(self.groups) if order != self.groups]
            wrong["swapped_order"] = replace(self, groups=orders[rng.integers(len(orders))])
        true = self.plain_caption()
        captions = {name: statement.plain_caption() for name, statement in wrong.items()}
        return {name: caption for name, caption in captions.items() if caption != true}

    def plain_caption(self) -> str:
        """The true caption in the plainest wording, without background."""
        return self._groups(None) if self.groups else self._textures(None)

    def _groups(self, rng: Rng | None) -> str:
        phrases = [group.phrase() for group in self.groups]
        if len(phrases) == 3:
            way = {"right": "from left to right", "down": "from top to bottom"}[str(self.relation)]
            if rng is not None and rng.random() < 0.3:
                return f"{phrases[1]} between {phrases[0]} and {phrases[2]}"
            return f"{way}: {listed(phrases)}" if rng is not None and rng.random() < 0.5 else f"{listed(phrases)} {way}"
        if len(phrases) == 2 and self.relation is not None:
            return f"{phrases[0]} {_relation_word(self.relation, rng)} {phrases[1]}"
        return f"{listed(phrases)} {self.place}".strip()

    def _textures(self, rng: Rng | None) -> str:
        if self.relation is None:
            return self.textures[0]
        return f"{self.textures[0]} {_relation_word(self.relation, rng)} {self.textures[1]}"


def _relation_word(relation: str, rng: Rng | None) -> str:
    words = RELATIONS[relation]
    return words[0] if rng is None else words[rng.integers(len(words))]
