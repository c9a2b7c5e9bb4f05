"""Seed and index -> a scene and what is true of it. Each example has its own generator and knows of no other.

`compose` draws pictures of every kind. `compose_shapes` draws content "shapes": one, two or three plain
shapes in basic colours, described in the plainest words. Everything in such a caption can be asked for: colour, shape, which
of two lies where, the order of three. A small captioner learns it in minutes, which pictures of every kind do not allow.
Shapes next to each other are level, those above each other plumb, so that no relation holds but the stated one.
"""

from collections.abc import Callable
from dataclasses import replace
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np

from data.synthetic import shapes
from data.synthetic.scene import Group, Scene, Shape, Statement, Texture
from data.synthetic.texture_kinds import describe, random_colours, random_texture
from data.synthetic.vocabulary import BASIC, PLACES, a, size_word

Rng = np.random.Generator
Box = tuple[float, float, float, float]
Spots = list[tuple[float, float, float]]
"""Where the shapes of a group lie: x, y and radius."""
Layout = tuple[tuple[Group, ...], list[Spots], Texture, Statement]
"""Groups, their places, the background, and what is true of the places."""

_CALM = ("stripes", "checkerboard", "dots", "gradient", "grid", "clouds", "bricks", "zigzag")
"""Textures on which shapes are still seen."""
_BACKGROUND_CONTRAST = 0.3
_UPRIGHT = {
    *("square", "diamond", "arrow", "house", "tree", "fish", "cloud"),
    *("mushroom", "crown", "balloon", "cup", "semicircle", "rectangle", "oval"),
}
_HALVES = (
    *("stripes", "checkerboard", "dots", "mosaic", "cracks", "clouds", "marble", "bricks"),
    *("honeycomb", "zigzag", "grid"),
)
"""Textures that are recognised in one half of a picture."""
_ARROWS = (("up", 0.0), ("right", pi / 2), ("down", pi), ("left", -pi / 2))
_ARRANGEMENTS = (
    *(("in a row", "in a horizontal line"), ("in a column", "in a vertical line")),
    *(
        ("in a circle", "arranged in a circle"),
        ("in a square grid", "arranged in rows and columns"),
    ),
)
_RELATIONS = ("left", "right", "above", "below")
_PLAIN_BACKGROUNDS = ("white", "black", "light gray", "dark gray")
_PLAIN_JITTER = 0.03


class Composition(NamedTuple):
    """A scene and a true statement about it."""

    scene: Scene
    statement: Statement


def compose(rng: Rng) -> Composition:
    """One picture of any kind."""
    kind = int(rng.choice(7, p=(0.3, 0.06, 0.17, 0.08, 0.22, 0.07, 0.1)))
    if kind == 0:
        texture = random_texture(rng)
        return Composition(Scene((texture,)), Statement(textures=(describe(texture, rng),)))
    if kind == 1:
        return _halves(rng)
    layouts: tuple[Callable[[Rng], Layout], ...] = (
        _scattered,
        _arranged,
        _two_groups,
        _nested,
        _three_in_order,
    )
    groups, spots, background, said = layouts[kind - 2](rng)
    # The groups are drawn at their places; size words and the background are added to the statement.
    drawn: list[Shape] = []
    named: list[Group] = []
    for group, places in zip(groups, spots, strict=True):
        word = size_word(places[0][2]) if rng.random() < 0.6 else ""
        name, angle = (
            group.shape,
            float(rng.uniform(-0.2, 0.2)) if group.shape not in _UPRIGHT else 0.0,
        )
        if name == "arrow":
            direction, angle = _ARROWS[rng.integers(4)]
            word = f"{word} {direction}-pointing".strip()
        drawn += [
            Shape(name, group.colour, x, y, radius, angle, group.fill, group.second)
            for x, y, radius in places
        ]
        named.append(replace(group, size=word))
    if background.program != "plain":
        phrase = describe(background, rng)
    else:
        colour, tone = background.colours[0], ""
        if colour == "white" and rng.random() < 0.2:
            tone = "bright "
        elif rng.random() < 0.2:
            tone = "plain "
        phrase = a(
            f"{tone}{colour} {rng.choice(['background', 'background', 'ground', 'backdrop'])}"
        )
    statement = replace(said, groups=tuple(named), background=phrase)
    if said.relation == "inside":  # the outer shape lies behind the inner one
        drawn.reverse()
        if rng.random() < 0.4:
            statement = replace(statement, groups=statement.groups[::-1], relation="around")
    return Composition(Scene((background,), tuple(drawn)), statement)


def compose_shapes(rng: Rng) -> Composition:
    """One picture of one to three different plain shapes in different colours, on one colour."""
    count = int(rng.choice(3, p=(0.4, 0.4, 0.2))) + 1
    names = [str(name) for name in rng.permutation(shapes.SIMPLE)[:count]]
    colours = random_colours(rng, count, contrast=_BACKGROUND_CONTRAST, among=BASIC)
    background = random_colours(
        rng, 1, avoid=colours, contrast=_BACKGROUND_CONTRAST, among=_PLAIN_BACKGROUNDS
    )
    relation: str | None = None
    if count == 1:
        x, y = (float(value) for value in rng.uniform(0.3, 0.7, 2))
        spots, radius = [(x, y)], rng.uniform(0.16, 0.28)
    else:
        level = rng.uniform(0.35, 0.65)
        if count == 2:
            relation, along, radius = (
                _RELATIONS[rng.integers(4)],
                [0.26, 0.74],
                rng.uniform(0.15, 0.2),
            )
            is_row = relation in ("left", "right")
            if relation in ("right", "below"):
                along = along[::-1]
        else:
            relation, along, radius = (
                ("right", "down")[rng.integers(2)],
                [0.18, 0.5, 0.82],
                rng.uniform(0.1, 0.125),
            )
            is_row = relation == "right"
        jitter = rng.uniform(-_PLAIN_JITTER, _PLAIN_JITTER, (count, 2))
        spots = [
            (float(at + move[0]), float(level + move[1]))
            for at, move in zip(along, jitter, strict=True)
        ]
        spots = spots if is_row else [(y, x) for x, y in spots]
    groups = tuple(Group(1, name, colour) for name, colour in zip(names, colours, strict=True))
    drawn = tuple(
        Shape(name, colour, x, y, radius)
        for name, colour, (x, y) in zip(names, colours, spots, strict=True)
    )
    return Composition(Scene((Texture("plain", background),), drawn), Statement(groups, relation))


def _halves(rng: Rng) -> Composition:
    side_by_side = rng.random() < 0.5
    boxes: tuple[Box, Box] = (
        ((0, 0, 0.5, 1), (0.5, 0, 1, 1)) if side_by_side else ((0, 0, 1, 0.5), (0, 0.5, 1, 1))
    )
    first = random_texture(rng, kinds=_HALVES, box=boxes[0])
    second = random_texture(
        rng, kinds=[name for name in _HALVES if name != first.program], box=boxes[1]
    )
    relation = "left" if side_by_side else "above"
    phrases = (describe(first, rng), describe(second, rng))
    if rng.random() < 0.5:
        relation, phrases = {"left": "right", "above": "below"}[relation], phrases[::-1]
    return Composition(Scene((first, second)), Statement(textures=phrases, relation=relation))


def _scattered(rng: Rng) -> Layout:
    """One group anywhere; a single shape has a place."""
    count = int(rng.choice(10, p=(0.28, 0.15, 0.13, 0.1, 0.09, 0.07, 0.06, 0.05, 0.04, 0.03))) + 1
    groups, background = _groups(rng, (count,))
    if count == 1:
        place, phrases = list(PLACES.items())[rng.integers(len(PLACES))]
        radius = float(rng.uniform(0.05, 0.15))
        at = [0.19 + 0.31 * step + float(rng.uniform(-0.02, 0.02)) for step in place]
        if place == (1, 1):
            radius = float(rng.uniform(0.05, 0.4))
        spots, where = [(at[0], at[1], radius)], str(phrases[rng.integers(2)])
    else:
        spots, where = _spread(rng, count, (0.03, 0.03, 0.97, 0.97)), ""
    return groups, [spots], background, Statement(place=where)


def _arranged(rng: Rng) -> Layout:
    """One group in a row, a column, a circle or a square grid."""
    kind = int(rng.integers(4))
    count = int(rng.integers(3, 8)) if kind < 3 else 4 if rng.random() < 0.4 else 9
    groups, background = _groups(rng, (count,))
    radius = 0.36 / count if kind < 2 else {4: 0.16, 9: 0.11}[count] if kind == 3 else 0.09
    radius *= float(rng.uniform(0.8, 1.1))
    steps = [0.5 + (place - (count - 1) / 2) * 0.9 / count for place in range(count)]
    if kind < 2:
        across = float(rng.uniform(0.35, 0.65))
        points = [(step, across) if kind == 0 else (across, step) for step in steps]
    elif kind == 2:
        turn = float(rng.uniform(0, 2 * pi))
        angles = [turn + 2 * pi * k / count for k in range(count)]
        points = [(0.5 + 0.34 * cos(angle), 0.5 + 0.34 * sin(angle)) for angle in angles]
    else:
        side = int(count**0.5)
        lines = [0.5 + (k - (side - 1) / 2) * 0.9 / side for k in range(side)]
        points = [(x, y) for y in lines for x in lines]
    where = _ARRANGEMENTS[kind][rng.integers(2)]
    return groups, [[(x, y, radius) for x, y in points]], background, Statement(place=where)


def _two_groups(rng: Rng) -> Layout:
    """One group left of, right of, above or below another."""
    counts = tuple(
        int(value) for value in rng.choice((1, 2, 3, 4, 5), size=2, p=(0.5, 0.2, 0.15, 0.1, 0.05))
    )
    groups, background = _groups(rng, counts)
    gap = 0.02
    relation = _RELATIONS[rng.integers(4)]
    low, high = (0.03, 0.5 - gap), (0.5 + gap, 0.97)
    spans = (low, high) if relation in ("left", "above") else (high, low)
    spots = []
    for count, span in zip(counts, spans, strict=True):
        sides = (0.15, 0.85) if count == 1 else (0.05, 0.95)
        (left, right), (top, bottom) = (
            (span, sides) if relation in ("left", "right") else (sides, span)
        )
        spots.append(_spread(rng, count, (left, top, right, bottom)))
    return groups, spots, background, Statement(relation=relation)


def _nested(rng: Rng) -> Layout:
    """A small shape inside of a large roomy one."""
    roomy = ("circle", "square", "hexagon", "pentagon")
    inner, background = _groups(rng, (1,))
    used = [inner[0].colour, *([inner[0].second] if inner[0].second else []), *background.colours]
    names = [name for name in roomy if name != inner[0].shape]
    colour = random_colours(rng, 1, avoid=used, contrast=_BACKGROUND_CONTRAST)[0]
    outer = Group(
        1, names[rng.integers(len(names))], colour, "hollow" if rng.random() < 0.3 else "solid"
    )
    x, y = (float(value) for value in rng.uniform(0.42, 0.58, 2))
    spots = [[(x, y, float(rng.uniform(0.1, 0.19)))], [(x, y, float(rng.uniform(0.34, 0.4)))]]
    return (inner[0], outer), spots, background, Statement(relation="inside")


def _three_in_order(rng: Rng) -> Layout:
    """Three different shapes from left to right or from top to bottom."""
    groups, background = _groups(rng, (1, 1, 1))
    relation = "right" if rng.random() < 0.6 else "down"
    spots = []
    for place in range(3):
        along, across = (
            0.18 + 0.32 * place + float(rng.uniform(-0.02, 0.02)),
            float(rng.uniform(0.4, 0.6)),
        )
        x, y = (along, across) if relation == "right" else (across, along)
        spots.append([(x, y, float(rng.uniform(0.09, 0.13)))])
    return groups, spots, background, Statement(relation=relation)


def _groups(rng: Rng, counts: tuple[int, ...]) -> tuple[tuple[Group, ...], Texture]:
    """Groups of different shapes in clearly different colours, and a background clearly different from all of them."""
    names = rng.permutation(list(shapes.NAMES))[: len(counts)]
    colours = list(random_colours(rng, len(counts), contrast=_BACKGROUND_CONTRAST))
    groups, used = [], list(colours)
    for count, name, colour in zip(counts, names, colours, strict=True):
        fill, second = "solid", None
        if rng.random() < 0.25 and str(name) in shapes.HOLLOW:
            fill = "hollow"
        elif rng.random() < 0.25:
            fill = str(rng.choice(["striped", "dotted", "checkered"]))
            second = random_colours(rng, 1, avoid=used, contrast=0.25)[0]
            used.append(second)
        groups.append(Group(count, str(name), colour, fill, second))
    if rng.random() < 0.7:
        background = Texture(
            "plain", random_colours(rng, 1, avoid=used, contrast=_BACKGROUND_CONTRAST)
        )
    else:
        background = random_texture(rng, avoid=used, contrast=_BACKGROUND_CONTRAST, kinds=_CALM)
    return tuple(groups), background


def _spread(rng: Rng, count: int, box: Box) -> Spots:
    """Places (x, y, radius) of equal circles that neither touch each other nor leave the box."""
    left, top, right, bottom = box
    width, height = right - left, bottom - top
    columns = max(1, round((count * width / height) ** 0.5))
    rows = -(-count // columns)
    columns = -(-count // rows)
    cell = min(width / columns, height / rows)
    radius = (
        float(cell * rng.uniform(0.32, 0.42))
        if count > 1
        else float(min(cell * rng.uniform(0.2, 0.45), 0.3))
    )
    slack_x, slack_y = width / columns / 2 - radius - 0.012, height / rows / 2 - radius - 0.012
    spots = []
    for place in rng.permutation(columns * rows)[:count]:
        x = left + (place % columns + 0.5) * width / columns + float(rng.uniform(-1, 1)) * slack_x
        y = top + (place // columns + 0.5) * height / rows + float(rng.uniform(-1, 1)) * slack_y
        spots.append((float(x), float(y), radius))
    return spots
