"""Tests of what a captioner sees, from synthetic pictures whose programs know what is true. No download.

`shape_choices` and `shape_images` ask about plain shapes (`prepare.py synthetic --content shapes`): all false captions have as
many words as the true one, and in "relation" and "order" the very same words up to the name of the relation. Test pictures come
from seeds of their own: choose one that no training shard has.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import count as count_from
from itertools import islice, permutations
from pathlib import Path

import numpy as np

from data.synthetic import shapes
from data.synthetic.generate import SyntheticData, SyntheticExample
from data.synthetic.statement import Statement
from data.synthetic.vocabulary import BASIC, OPPOSITES
from data.synthetic.write import encode
from evaluation.sources import Arrays

Box = tuple[float, float, float, float]


@dataclass(frozen=True)
class Choice:
    """
    Attributes:
        image: encoded bytes, or a file.
        captions: the true one first.
        group: what is tested, e.g. a relation.
        box: left, top, right, bottom in pixels of the part that is shown; None is all.
    """

    image: bytes | Path
    captions: tuple[str, ...]
    group: str
    box: Box | None = None


SHAPE_GROUPS = ("colour", "shape", "relation", "order")
SHAPE_CLASSES = tuple(f"{colour} {shape}" for colour in BASIC for shape in shapes.SIMPLE)
"""Names of all single shapes: 12 colours times 10 shapes."""


def shape_images(data: SyntheticData, count: int) -> Arrays:
    """Pictures of single shapes; their classes are SHAPE_CLASSES."""
    examples = _with_number(data, 1, count)
    labels = [SHAPE_CLASSES.index(f"{e.statement.groups[0].colour} {e.statement.groups[0].shape}") for e in examples]
    images = np.stack([example.image_HWC for example in examples])
    return Arrays(f"{count} synthetic shapes, seed {data.seed}", images, np.array(labels), SHAPE_CLASSES)


def shape_choices(data: SyntheticData, count: int, groups: Sequence[str] = SHAPE_GROUPS) -> list[Choice]:
    """`count` tests of each group.

    colour, shape: one word of the caption of two shapes becomes each other one that neither shape has: 11 and 9 ways.
    relation: of two shapes, against the opposite relation, exchanged places, and exchanged colours with each of these: 7 ways.
    order: of three shapes, against all other orders: 6 ways.
    """
    choices = []
    for group in groups:
        examples = _with_number(data, 3 if group == "order" else 2, count)
        for number, example in enumerate(examples):
            captions = (example.statement.plain_caption(), *_wrong(example.statement, group, number))
            choices.append(Choice(encode(example, "png"), captions, group))
    return choices


def _with_number(data: SyntheticData, number: int, count: int) -> list[SyntheticExample]:
    """The first `count` examples that show `number` shapes."""
    numbers = (index for index in count_from() if len(data.composition(index)[0].statement.groups) == number)
    return [data.example(index) for index in islice(numbers, count)]


def _wrong(true: Statement, group: str, number: int) -> list[str]:
    """The false captions of a test."""
    false: list[Statement] = []
    if group == "order":
        false = [replace(true, groups=order) for order in permutations(true.groups) if order != true.groups]
    elif group == "relation":
        # For "A left of B": "A right of B" and "B left of A", and all three with exchanged colours.
        first, second = true.groups
        mixed = first.with_look_of(second), second.with_look_of(first)
        opposite = OPPOSITES[str(true.relation)]
        false = [replace(true, relation=opposite), replace(true, groups=(second, first))]
        for groups in (mixed, mixed[::-1]):
            false += [replace(true, groups=groups), replace(true, groups=groups, relation=opposite)]
    else:
        place, choices = number % 2, BASIC if group == "colour" else shapes.SIMPLE
        used = {getattr(other, group) for other in true.groups}
        for word in choices:
            if word not in used:
                shown = true.groups[place]
                shown = replace(shown, colour=word) if group == "colour" else replace(shown, shape=word)
                false.append(replace(true, groups=(*true.groups[:place], shown, *true.groups[place + 1 :])))
    return [statement.plain_caption() for statement in false]
