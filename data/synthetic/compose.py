"""Composes a scene and a true statement about it from a random generator.

`compose` draws pictures of every kind. `compose_shapes` draws content "shapes": one, two or three
plain shapes in basic colours, described in the plainest words. All facts of such a caption can be
asked for: colour, shape, the side of one of two shapes, the order of three. A small captioner
learns it in minutes, unlike pictures of every kind. Shapes next to each other are level, and shapes
above each other plumb, so that no relation holds but the stated one.
"""

from collections.abc import Callable
from dataclasses import replace
from math import cos, pi, sin
from typing import NamedTuple

import numpy as np

from data.synthetic import shapes
from data.synthetic.scene import Group, Scene, Shape, Statement, Texture
from data.synthetic.texture_kinds import describe, random_colours, random_texture
from data.synthetic.vocabulary import BASIC, OPPOSITES, PLACES, size_word, with_article

Rng = np.random.Generator
Box = tuple[float, float, float, float]
Spots = list[tuple[float, float, float]]
"""Places of a group's shapes: x, y and radius of each."""
Layout = tuple[tuple[Group, ...], list[Spots], Texture, Statement]
"""Groups, their spots, the background, and a statement about the places."""

_CALM = ("stripes", "checkerboard", "dots", "gradient", "grid", "clouds", "bricks", "zigzag")
"""Textures on which shapes are still seen."""
_BACKGROUND_CONTRAST = 0.3
_UPRIGHT = {
    "square",
    "diamond",
    "arrow",
    "house",
    "tree",
    "fish",
    "cloud",
    "mushroom",
    "crown",
    "balloon",
    "cup",
    "semicircle",
    "rectangle",
    "oval",
}
"""Shapes that are never turned."""
_HALVES = (
    "stripes",
    "checkerboard",
    "dots",
    "mosaic",
    "cracks",
    "clouds",
    "marble",
    "bricks",
    "honeycomb",
    "zigzag",
    "grid",
)
"""Textures that are recognised in one half of a picture."""
_ARROWS = (("up", 0.0), ("right", pi / 2), ("down", pi), ("left", -pi / 2))
_ARRANGEMENTS = (
    ("in a row", "in a horizontal line"),
    ("in a column", "in a vertical line"),
    ("in a circle", "arranged in a circle"),
    ("in a square grid", "arranged in rows and columns"),
)
_ROW = 0
_COLUMN = 1
_CIRCLE = 2
_RELATIONS = ("left", "right", "above", "below")
_PLAIN_BACKGROUNDS = ("white", "black", "light gray", "dark gray")
_PLAIN_JITTER = 0.03


class Composition(NamedTuple):
    """A scene and a true statement about it."""

    scene: Scene
    statement: Statement


def compose(rng: Rng) -> Composition:
    """Draws the composition of a picture of any kind."""
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
    groups, spots, background, statement = layouts[kind - 2](rng)
    # The groups are drawn at their places; size words and the background enter the statement.
    drawn_shapes: list[Shape] = []
    sized_groups: list[Group] = []
    for group, group_spots in zip(groups, spots, strict=True):
        _, _, first_radius = group_spots[0]
        word = size_word(first_radius) if rng.random() < 0.6 else ""
        angle = float(rng.uniform(-0.2, 0.2)) if group.shape not in _UPRIGHT else 0.0
        if group.shape == "arrow":
            direction, angle = _ARROWS[rng.integers(4)]
            word = f"{word} {direction}-pointing".strip()
        for x, y, radius in group_spots:
            drawn_shapes.append(
                Shape(group.shape, group.colour, x, y, radius, angle, group.fill, group.second)
            )
        sized_groups.append(replace(group, size=word))
    if background.program != "plain":
        phrase = describe(background, rng)
    else:
        colour = background.colours[0]
        tone = ""
        if colour == "white" and rng.random() < 0.2:
            tone = "bright "
        elif rng.random() < 0.2:
            tone = "plain "
        noun = rng.choice(["background", "background", "ground", "backdrop"])
        phrase = with_article(f"{tone}{colour} {noun}")
    statement = replace(statement, groups=tuple(sized_groups), background=phrase)
    # The outer shape lies behind the inner one.
    if statement.relation == "inside":
        drawn_shapes.reverse()
        if rng.random() < 0.4:
            statement = replace(statement, groups=statement.groups[::-1], relation="around")
    return Composition(Scene((background,), tuple(drawn_shapes)), statement)


def compose_shapes(rng: Rng) -> Composition:
    """Draws the composition of one to three plain shapes in different colours, on one colour."""
    count = int(rng.choice(3, p=(0.4, 0.4, 0.2))) + 1
    names = [str(name) for name in rng.permutation(shapes.SIMPLE)[:count]]
    colours = random_colours(rng, count, contrast=_BACKGROUND_CONTRAST, among=BASIC)
    background = random_colours(
        rng, 1, avoid=colours, contrast=_BACKGROUND_CONTRAST, among=_PLAIN_BACKGROUNDS
    )
    relation: str | None = None
    if count == 1:
        x, y = rng.uniform(0.3, 0.7, 2)
        centres = [(float(x), float(y))]
        radius = rng.uniform(0.16, 0.28)
    else:
        level = rng.uniform(0.35, 0.65)
        if count == 2:
            relation = _RELATIONS[rng.integers(4)]
            is_row = relation in ("left", "right")
            places = [0.26, 0.74]
            if relation in ("right", "below"):
                places = places[::-1]
            radius = rng.uniform(0.15, 0.2)
        else:
            relation = ("right", "down")[rng.integers(2)]
            is_row = relation == "right"
            places = [0.18, 0.5, 0.82]
            radius = rng.uniform(0.1, 0.125)
        jitter = rng.uniform(-_PLAIN_JITTER, _PLAIN_JITTER, (count, 2))
        centres = []
        for place, (place_jitter, level_jitter) in zip(places, jitter, strict=True):
            along = float(place + place_jitter)
            across = float(level + level_jitter)
            centres.append((along, across) if is_row else (across, along))
    groups: list[Group] = []
    drawn_shapes: list[Shape] = []
    for name, colour, (x, y) in zip(names, colours, centres, strict=True):
        groups.append(Group(1, name, colour))
        drawn_shapes.append(Shape(name, colour, x, y, radius))
    scene = Scene((Texture("plain", background),), tuple(drawn_shapes))
    return Composition(scene, Statement(tuple(groups), relation))


def _halves(rng: Rng) -> Composition:
    """Draws two textures side by side or one above the other."""
    is_side_by_side = rng.random() < 0.5
    first_box: Box = (0, 0, 0.5, 1) if is_side_by_side else (0, 0, 1, 0.5)
    second_box: Box = (0.5, 0, 1, 1) if is_side_by_side else (0, 0.5, 1, 1)
    first = random_texture(rng, kinds=_HALVES, box=first_box)
    other_kinds = [name for name in _HALVES if name != first.program]
    second = random_texture(rng, kinds=other_kinds, box=second_box)
    relation = "left" if is_side_by_side else "above"
    phrases = (describe(first, rng), describe(second, rng))
    if rng.random() < 0.5:
        relation = OPPOSITES[relation]
        phrases = phrases[::-1]
    return Composition(Scene((first, second)), Statement(textures=phrases, relation=relation))


def _scattered(rng: Rng) -> Layout:
    """Draws one group anywhere; a single shape has a place."""
    count = int(rng.choice(10, p=(0.28, 0.15, 0.13, 0.1, 0.09, 0.07, 0.06, 0.05, 0.04, 0.03))) + 1
    groups, background = _groups(rng, (count,))
    if count > 1:
        spots = _spread(rng, count, (0.03, 0.03, 0.97, 0.97))
        return groups, [spots], background, Statement(place="")
    (column, row), phrases = list(PLACES.items())[rng.integers(len(PLACES))]
    radius = float(rng.uniform(0.05, 0.15))
    x = 0.19 + 0.31 * column + float(rng.uniform(-0.02, 0.02))
    y = 0.19 + 0.31 * row + float(rng.uniform(-0.02, 0.02))
    if (column, row) == (1, 1):
        # The centre has room for a large shape.
        radius = float(rng.uniform(0.05, 0.4))
    phrase = str(phrases[rng.integers(2)])
    return groups, [[(x, y, radius)]], background, Statement(place=phrase)


def _arranged(rng: Rng) -> Layout:
    """Draws one group in a row, a column, a circle or a square grid."""
    kind = int(rng.integers(4))
    if kind in (_ROW, _COLUMN, _CIRCLE):
        count = int(rng.integers(3, 8))
    else:
        count = 4 if rng.random() < 0.4 else 9
    groups, background = _groups(rng, (count,))
    if kind in (_ROW, _COLUMN):
        radius = 0.36 / count
    elif kind == _CIRCLE:
        radius = 0.09
    else:
        radius = {4: 0.16, 9: 0.11}[count]
    radius *= float(rng.uniform(0.8, 1.1))
    if kind in (_ROW, _COLUMN):
        across = float(rng.uniform(0.35, 0.65))
        steps = [0.5 + (place - (count - 1) / 2) * 0.9 / count for place in range(count)]
        centres = [(step, across) if kind == _ROW else (across, step) for step in steps]
    elif kind == _CIRCLE:
        turn = float(rng.uniform(0, 2 * pi))
        angles = [turn + 2 * pi * k / count for k in range(count)]
        centres = [(0.5 + 0.34 * cos(angle), 0.5 + 0.34 * sin(angle)) for angle in angles]
    else:
        side = int(count**0.5)
        steps = [0.5 + (k - (side - 1) / 2) * 0.9 / side for k in range(side)]
        centres = [(x, y) for y in steps for x in steps]
    phrase = _ARRANGEMENTS[kind][rng.integers(2)]
    spots = [(x, y, radius) for x, y in centres]
    return groups, [spots], background, Statement(place=phrase)


def _two_groups(rng: Rng) -> Layout:
    """Draws one group left of, right of, above or below another."""
    sizes = rng.choice((1, 2, 3, 4, 5), size=2, p=(0.5, 0.2, 0.15, 0.1, 0.05))
    counts = tuple(int(size) for size in sizes)
    groups, background = _groups(rng, counts)
    gap = 0.02
    relation = _RELATIONS[rng.integers(4)]
    spans = [(0.03, 0.5 - gap), (0.5 + gap, 0.97)]
    if relation in ("right", "below"):
        spans = spans[::-1]
    spots = []
    for count, (start, stop) in zip(counts, spans, strict=True):
        low, high = (0.15, 0.85) if count == 1 else (0.05, 0.95)
        if relation in ("left", "right"):
            box = (start, low, stop, high)
        else:
            box = (low, start, high, stop)
        spots.append(_spread(rng, count, box))
    return groups, spots, background, Statement(relation=relation)


def _nested(rng: Rng) -> Layout:
    """Draws a small shape inside of a large roomy one."""
    roomy_names = ("circle", "square", "hexagon", "pentagon")
    [inner], background = _groups(rng, (1,))
    used_colours = [inner.colour, *background.colours]
    if inner.second:
        used_colours.append(inner.second)
    names = [name for name in roomy_names if name != inner.shape]
    [colour] = random_colours(rng, 1, avoid=used_colours, contrast=_BACKGROUND_CONTRAST)
    name = names[rng.integers(len(names))]
    fill = "hollow" if rng.random() < 0.3 else "solid"
    outer = Group(1, name, colour, fill)
    x, y = (float(centre) for centre in rng.uniform(0.42, 0.58, 2))
    inner_radius = float(rng.uniform(0.1, 0.19))
    outer_radius = float(rng.uniform(0.34, 0.4))
    spots = [[(x, y, inner_radius)], [(x, y, outer_radius)]]
    return (inner, outer), spots, background, Statement(relation="inside")


def _three_in_order(rng: Rng) -> Layout:
    """Draws three different shapes from left to right or from top to bottom."""
    groups, background = _groups(rng, (1, 1, 1))
    relation = "right" if rng.random() < 0.6 else "down"
    spots = []
    for place in range(3):
        along = 0.18 + 0.32 * place + float(rng.uniform(-0.02, 0.02))
        across = float(rng.uniform(0.4, 0.6))
        x, y = (along, across) if relation == "right" else (across, along)
        radius = float(rng.uniform(0.09, 0.13))
        spots.append([(x, y, radius)])
    return groups, spots, background, Statement(relation=relation)


def _groups(rng: Rng, counts: tuple[int, ...]) -> tuple[tuple[Group, ...], Texture]:
    """Draws groups of different shapes in clearly different colours, and a background.

    The background differs clearly from all of them.
    """
    names = rng.permutation(list(shapes.NAMES))[: len(counts)]
    colours = random_colours(rng, len(counts), contrast=_BACKGROUND_CONTRAST)
    groups = []
    used_colours = list(colours)
    for count, name, colour in zip(counts, names, colours, strict=True):
        fill = "solid"
        second = None
        if rng.random() < 0.25 and str(name) in shapes.HOLLOW:
            fill = "hollow"
        elif rng.random() < 0.25:
            fill = str(rng.choice(["striped", "dotted", "checkered"]))
            [second] = random_colours(rng, 1, avoid=used_colours, contrast=0.25)
            used_colours.append(second)
        groups.append(Group(count, str(name), colour, fill, second))
    if rng.random() < 0.7:
        background_colours = random_colours(
            rng, 1, avoid=used_colours, contrast=_BACKGROUND_CONTRAST
        )
        background = Texture("plain", background_colours)
    else:
        background = random_texture(
            rng, avoid=used_colours, contrast=_BACKGROUND_CONTRAST, kinds=_CALM
        )
    return tuple(groups), background


def _spread(rng: Rng, count: int, box: Box) -> Spots:
    """Draws places of equal circles that neither touch each other nor leave the box."""
    left_edge, top_edge, right_edge, bottom_edge = box
    width = right_edge - left_edge
    height = bottom_edge - top_edge
    columns = max(1, round((count * width / height) ** 0.5))
    rows = -(-count // columns)
    columns = -(-count // rows)
    cell = min(width / columns, height / rows)
    if count > 1:
        radius = float(cell * rng.uniform(0.32, 0.42))
    else:
        radius = float(min(cell * rng.uniform(0.2, 0.45), 0.3))
    slack_x = width / columns / 2 - radius - 0.012
    slack_y = height / rows / 2 - radius - 0.012
    spots = []
    for place in rng.permutation(columns * rows)[:count]:
        cell_x = left_edge + (place % columns + 0.5) * width / columns
        cell_y = top_edge + (place // columns + 0.5) * height / rows
        x = cell_x + float(rng.uniform(-1, 1)) * slack_x
        y = cell_y + float(rng.uniform(-1, 1)) * slack_y
        spots.append((float(x), float(y), radius))
    return spots
