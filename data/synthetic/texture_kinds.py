"""Texture programs: which parameters they may have, and the phrases that these make true; random textures and their names."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi

import numpy as np

from data.synthetic.scene import Texture
from data.synthetic.vocabulary import COLOURS, COUNTS, colour_distance, enumeration

Rng = np.random.Generator
Words = Sequence[str]
Values = tuple[float, ...]


@dataclass(frozen=True)
class Kind:
    """A texture program's parameters and phrases.

    Attributes:
        values: draws its parameters.
        nouns: phrases in which {c} stands for all colours, {c0} for the first, {c1} for the last, {n} for its first
            parameter and {adj} for adjectives.
        max_colours: 2, or 3.
        adjectives: what its parameters allow to say.
    """

    values: Callable[[Rng], Values]
    nouns: Words
    max_colours: int = 2
    adjectives: Callable[[Values], Words] = lambda values: ()


def _pick(rng: Rng, *choices: float) -> float:
    return float(choices[int(rng.integers(len(choices)))])


def _whole(rng: Rng, low: int, high: int) -> float:
    return float(rng.integers(low, high))


def _band(value: float, low: float, high: float, below: str, above: str) -> Words:
    """The word for a value below `low` or above `high`."""
    return (below,) if value < low else (above,) if value > high else ()


def _scale(low: float, high: float, few: str, many: str) -> Callable[[Values], Words]:
    """An adjective for a frequency (the first parameter) below `low` or above `high`."""
    return lambda values: _band(values[0], low, high, few, many)


def _direction(angle: float) -> str:
    return {0: "vertical", 90: "horizontal"}.get(round(angle * 180 / pi), "diagonal")


def _stripes(rng: Rng) -> Values:
    wavy = rng.random() < 0.3
    angle = _pick(rng, 0, pi / 2, pi / 4, -pi / 4)
    return (rng.uniform(2.5, 14), angle, 0.04 if wavy else 0.0, rng.uniform(1.5, 3), 0.0)


def _centred(rng: Rng, first: float, second: float) -> Values:
    return (first, second, rng.uniform(0.4, 0.6), rng.uniform(0.4, 0.6))


def _offset(rng: Rng, *values: float) -> Values:
    """Parameters with a random place in the noise at their end."""
    return (*values, *[0.0] * (6 - len(values)), _whole(rng, 0, 256), _whole(rng, 0, 256))


_JULIA = (
    (-0.8, 0.156),
    (-0.4, 0.6),
    (0.285, 0.01),
    (-0.7018, -0.3842),
    (-0.835, -0.2321),
    (-0.7269, 0.1889),
    (0.355, 0.355),
)
KINDS: dict[str, Kind] = {
    "stripes": Kind(
        _stripes,
        (
            "{adj} {c} stripes",
            "{adj} stripes in {c}",
            "{adj} bands of {c}",
            "{c} {adj} lines side by side",
        ),
        3,
        lambda v: (
            *_band(v[0], 5, 9, "wide", "thin"),
            *(("wavy",) if v[2] else ()),
            _direction(v[1]),
        ),
    ),
    "checkerboard": Kind(
        lambda rng: (rng.uniform(2, 7), _pick(rng, 0, 0, pi / 4)),
        (
            "a {adj} {c} checkerboard",
            "a {adj} checkered pattern of {c}",
            "{adj} alternating {c} tiles",
            "a chessboard in {c}",
        ),
        adjectives=lambda v: (
            *_band(v[0], 3.2, 5.5, "coarse", "fine"),
            *(("tilted",) if v[1] else ()),
        ),
    ),
    "dots": Kind(
        lambda rng: (_whole(rng, 3, 11), rng.uniform(0.24, 0.38), _pick(rng, 0, 0.5), 0.0),
        (
            "{adj} {c1} dots on {c0}",
            "{adj} {c1} polka dots on a {c0} background",
            "{c0} fabric with {adj} {c1} spots",
        ),
        adjectives=_scale(4.5, 8.5, "large", "small"),
    ),
    "rings": Kind(
        lambda rng: (rng.uniform(4, 12), rng.uniform(0.35, 0.65), rng.uniform(0.35, 0.65)),
        (
            "{adj} concentric {c} rings",
            "a target of {c} circles",
            "{adj} {c} ripples around one point",
        ),
        adjectives=_scale(6, 10, "broad", "narrow"),
    ),
    "spiral": Kind(
        lambda rng: _centred(rng, _whole(rng, 1, 6), _pick(rng, -1, 1) * rng.uniform(2, 6)),
        (
            "a {c} spiral",
            "a spiral with {n} {c1} arms on {c0}",
            "a hypnotic {c} swirl",
            "a {c} whirl around the middle",
        ),
    ),
    "rays": Kind(
        lambda rng: _centred(rng, _whole(rng, 5, 11), rng.random()),
        (
            "a sunburst of {c} rays",
            "{c} rays from the middle",
            "{n} {c1} beams spreading over {c0}",
            "a pinwheel of {c}",
        ),
    ),
    "mosaic": Kind(
        lambda rng: _offset(rng, rng.uniform(5, 12), 2.0),
        (
            "a {adj} mosaic of {c} cells",
            "a {adj} Voronoi diagram in {c}",
            "{adj} stained glass in {c}",
            "{c} shards fitted together",
        ),
        3,
        _scale(6.5, 10, "coarse", "fine"),
    ),
    "cracks": Kind(
        lambda rng: _offset(rng, rng.uniform(3.5, 9), rng.uniform(0.1, 0.18)),
        (
            "a web of {c1} cracks on {c0}",
            "{c0} cobblestones with {c1} gaps",
            "{c0} cells with {c1} borders",
            "cracked {c0} ground with {c1} fissures",
        ),
    ),
    "clouds": Kind(
        lambda rng: _offset(rng, rng.uniform(2.5, 7)),
        (
            "{adj} {c} clouds",
            "{adj} fractal noise in {c}",
            "a foggy blend of {c}",
            "{adj} smoke in {c}",
        ),
        3,
        _scale(3.5, 5.5, "soft", "rough"),
    ),
    "marble": Kind(
        lambda rng: _offset(rng, rng.uniform(2.5, 4.5), rng.uniform(2.5, 5)),
        (
            "{c} marble",
            "swirling {c} marble",
            "turbulent {c} paint",
            "{c} liquids flowing into each other",
            "warped {c} noise",
        ),
        3,
    ),
    "swirls": Kind(
        lambda rng: (
            rng.uniform(5, 12),
            rng.uniform(0.8, 1.6),
            rng.uniform(0, 6),
            rng.uniform(0, 6),
        ),
        (
            "psychedelic {c} swirls",
            "smooth warped waves of {c}",
            "a lava lamp in {c}",
            "flowing {c} ribbons",
        ),
        3,
    ),
    "kaleidoscope": Kind(
        lambda rng: _offset(
            rng, _whole(rng, 3, 9), rng.uniform(3, 7), rng.uniform(1.5, 2.5), rng.uniform(1.5, 3)
        ),
        (
            "a {c} kaleidoscope",
            "a kaleidoscope with {n} mirrors in {c}",
            "a {c} mandala with {n}-fold symmetry",
            "a symmetric {c} ornament",
        ),
        3,
    ),
    "julia": Kind(
        lambda rng: (
            *_JULIA[rng.integers(len(_JULIA))],
            rng.uniform(1.8, 3.0),
            rng.uniform(0, 2 * pi),
            rng.uniform(2.5, 5),
        ),
        (
            "a {c} Julia set",
            "a {c} Julia fractal",
            "a swirling fractal in {c}",
            "a {c} fractal with curls",
        ),
    ),
    "bricks": Kind(
        lambda rng: (_whole(rng, 5, 13), rng.uniform(0.07, 0.12)),
        (
            "a {c0} brick wall with {c1} mortar",
            "{adj} {c0} bricks with {c1} joints",
            "rows of {adj} {c0} bricks on {c1}",
        ),
        adjectives=_scale(7, 10, "large", "small"),
    ),
    "honeycomb": Kind(
        lambda rng: (rng.uniform(3, 9), rng.uniform(0.07, 0.12)),
        (
            "a {c0} honeycomb with {c1} walls",
            "{adj} {c0} hexagonal tiles with {c1} edges",
            "a {adj} hexagon grid in {c0} with {c1} outlines",
        ),
        adjectives=_scale(4.5, 7, "large", "small"),
    ),
    "zigzag": Kind(
        lambda rng: (
            rng.uniform(4, 10),
            rng.uniform(0.15, 0.3),
            _whole(rng, 3, 7),
            _pick(rng, 0, pi / 2),
        ),
        (
            "{adj} {c} zigzag stripes",
            "{adj} {c} chevrons",
            "a herringbone of {c}",
            "{adj} jagged lines of {c}",
        ),
        adjectives=lambda v: (_direction(pi / 2 - v[3]),),
    ),
    "gradient": Kind(
        lambda rng: (_pick(rng, 0, pi / 2, pi / 4, 9), 0.1, 0.8),
        (
            "a {adj} gradient from {c0} to {c1}",
            "a smooth {adj} blend of {c0} into {c1}",
            "a {adj} fade between {c0} and {c1}",
        ),
        adjectives=lambda v: ("radial" if v[0] > 8 else _direction(pi / 2 - v[0]),),
    ),
    "grid": Kind(
        lambda rng: (_whole(rng, 4, 12), rng.uniform(0.06, 0.12), _pick(rng, 0, 0, pi / 4)),
        (
            "a {adj} grid of {c1} lines on {c0}",
            "a {adj} {c1} lattice over {c0}",
            "a {adj} {c1} net on a {c0} background",
        ),
        adjectives=lambda v: (*_band(v[0], 6, 9, "wide", "fine"), *(("diagonal",) if v[2] else ())),
    ),
}
_PLACE_OF_COLOURS = {"mosaic": 1, "stripes": 4}
"""Programs that have to know the number of colours, and its place among their parameters."""


def random_colours(
    rng: Rng, count: int, *, avoid: Sequence[str] = (), contrast: float = 0.27, among: Words = ()
) -> tuple[str, ...]:
    """Colour names that differ clearly from each other and from `avoid`; a little less clearly where many are taken.

    Raises:
        ValueError: fewer names than `count` are none of `avoid`.
    """
    names = list(among or COLOURS)
    if len(set(names) - set(avoid)) < count:
        raise ValueError(
            f"{count} colours are asked for, and {len(set(names) - set(avoid))} of {len(names)} can be taken"
        )
    order = [names[index] for index in rng.permutation(len(names))]
    while True:  # all that can be taken differ a little, so it ends
        chosen: list[str] = []
        for name in order:
            if len(chosen) < count and all(
                colour_distance(name, other) >= contrast for other in (*chosen, *avoid)
            ):
                chosen.append(name)
        if len(chosen) == count:
            return tuple(chosen)
        contrast *= 0.9


def random_texture(
    rng: Rng,
    *,
    avoid: Sequence[str] = (),
    contrast: float = 0.27,
    kinds: Words = (),
    box: tuple[float, float, float, float] = (0, 0, 1, 1),
) -> Texture:
    """Draws a program, its parameters and colours.

    Args:
        avoid: colours that none of the texture's may come near.
        contrast: how far they keep.
        kinds: among these programs; all by default.
        box: the part of the picture that it fills.
    """
    names = list(kinds or KINDS)
    name = names[rng.integers(len(names))]
    kind = KINDS[name]
    count = 3 if kind.max_colours == 3 and rng.random() < 0.4 else 2
    colours = random_colours(rng, count, avoid=avoid, contrast=contrast)
    values = list(kind.values(rng))
    if name in _PLACE_OF_COLOURS:
        values[_PLACE_OF_COLOURS[name]] = float(count)
    return Texture(name, colours, tuple(values), box)


def describe(texture: Texture, rng: Rng) -> str:
    """A noun phrase that is true of the texture."""
    kind = KINDS[texture.program]
    noun = kind.nouns[int(rng.integers(len(kind.nouns)))]
    adjectives = " ".join(kind.adjectives(texture.values)) if rng.random() < 0.85 else ""
    number = COUNTS[int(texture.values[0])] if "{n}" in noun else ""
    colours = list(texture.colours)
    words = noun.format(
        c=enumeration(colours), c0=colours[0], c1=colours[-1], n=number, adj=adjectives
    ).split()
    for place, word in enumerate(words[:-1]):
        if word in ("a", "an"):
            words[place] = "an" if words[place + 1][0] in "aeiou" else "a"
    return " ".join(words)
