"""Texture programs: their parameters, the phrases that these make true, and random textures."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import pi

import numpy as np

from data.synthetic.scene import Texture
from data.synthetic.vocabulary import COLOURS, COUNTS, colour_distance, enumeration

Rng = np.random.Generator
Words = Sequence[str]
Values = tuple[float, ...]
Draw = Callable[[Rng], Values]
"""Draws one or several parameters of a program."""
Adjective = Callable[[Values], Words]
"""Returns the adjectives that a program's parameters make true, one or none."""


@dataclass(frozen=True)
class Kind:
    """A texture program's parameters and phrases.

    Attributes:
        draws: draw its parameters, one after the other.
        nouns: phrases in which {c} stands for all colours, {c0} for the first, {c1} for the last,
            {n} for its first parameter and {adj} for adjectives.
        max_colours: 2, or 3.
        adjectives: in the order of the phrase.
    """

    draws: tuple[Draw, ...]
    nouns: Words
    max_colours: int = 2
    adjectives: tuple[Adjective, ...] = ()


def _uniform(low: float, high: float) -> Draw:
    return lambda rng: (rng.uniform(low, high),)


def _whole(low: int, high: int) -> Draw:
    def draw(rng: Rng) -> Values:
        return (float(rng.integers(low, high)),)

    return draw


def _fixed(*values: float) -> Draw:
    return lambda rng: values


def _choice(*choices: float) -> Draw:
    def draw(rng: Rng) -> Values:
        place = int(rng.integers(len(choices)))
        return (float(choices[place]),)

    return draw


def _band(value: float, low: float, high: float, below: str, above: str) -> Words:
    """Returns the word for a value below `low` or above `high`, if it is either."""
    if value < low:
        return (below,)
    return (above,) if value > high else ()


def _scale(low: float, high: float, few: str, many: str) -> Adjective:
    """Returns an adjective for a frequency (the first parameter) below `low` or above `high`."""
    return lambda values: _band(values[0], low, high, few, many)


def _if_set(place: int, word: str) -> Adjective:
    """Returns an adjective for a parameter that is not 0."""
    return lambda values: (word,) if values[place] else ()


def _direction(angle: float) -> str:
    degrees = round(angle * 180 / pi)
    return {0: "vertical", 90: "horizontal"}.get(degrees, "diagonal")


def _stripes_direction(values: Values) -> Words:
    return (_direction(values[1]),)


def _zigzag_direction(values: Values) -> Words:
    return (_direction(pi / 2 - values[3]),)


def _gradient_direction(values: Values) -> Words:
    return ("radial" if values[0] > 8 else _direction(pi / 2 - values[0]),)


def _draw_stripes(rng: Rng) -> Values:
    is_wavy = rng.random() < 0.3
    [angle] = _choice(0, pi / 2, pi / 4, -pi / 4)(rng)
    wave_height = 0.04 if is_wavy else 0.0
    frequency = rng.uniform(2.5, 14)
    wave_frequency = rng.uniform(1.5, 3)
    return frequency, angle, wave_height, wave_frequency, 0.0


def _draw_spiral_turns(rng: Rng) -> Values:
    [sign] = _choice(-1, 1)(rng)
    return (sign * rng.uniform(2, 6),)


def _draw_julia_point(rng: Rng) -> Values:
    return _JULIA[rng.integers(len(_JULIA))]


_CENTRE = (_uniform(0.4, 0.6), _uniform(0.4, 0.6))
_OFFSET = (_whole(0, 256), _whole(0, 256))
"""A random place in the noise, which programs expect behind six other parameters."""


_JULIA: tuple[Values, ...] = (
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
        (_draw_stripes,),
        (
            "{adj} {c} stripes",
            "{adj} stripes in {c}",
            "{adj} bands of {c}",
            "{c} {adj} lines side by side",
        ),
        3,
        (_scale(5, 9, "wide", "thin"), _if_set(2, "wavy"), _stripes_direction),
    ),
    "checkerboard": Kind(
        (_uniform(2, 7), _choice(0, 0, pi / 4)),
        (
            "a {adj} {c} checkerboard",
            "a {adj} checkered pattern of {c}",
            "{adj} alternating {c} tiles",
            "a chessboard in {c}",
        ),
        adjectives=(_scale(3.2, 5.5, "coarse", "fine"), _if_set(1, "tilted")),
    ),
    "dots": Kind(
        (_whole(3, 11), _uniform(0.24, 0.38), _choice(0, 0.5), _fixed(0.0)),
        (
            "{adj} {c1} dots on {c0}",
            "{adj} {c1} polka dots on a {c0} background",
            "{c0} fabric with {adj} {c1} spots",
        ),
        adjectives=(_scale(4.5, 8.5, "large", "small"),),
    ),
    "rings": Kind(
        (_uniform(4, 12), _uniform(0.35, 0.65), _uniform(0.35, 0.65)),
        (
            "{adj} concentric {c} rings",
            "a target of {c} circles",
            "{adj} {c} ripples around one point",
        ),
        adjectives=(_scale(6, 10, "broad", "narrow"),),
    ),
    "spiral": Kind(
        (_whole(1, 6), _draw_spiral_turns, *_CENTRE),
        (
            "a {c} spiral",
            "a spiral with {n} {c1} arms on {c0}",
            "a hypnotic {c} swirl",
            "a {c} whirl around the middle",
        ),
    ),
    "rays": Kind(
        (_whole(5, 11), _uniform(0, 1), *_CENTRE),
        (
            "a sunburst of {c} rays",
            "{c} rays from the middle",
            "{n} {c1} beams spreading over {c0}",
            "a pinwheel of {c}",
        ),
    ),
    "mosaic": Kind(
        (_uniform(5, 12), _fixed(2.0, 0.0, 0.0, 0.0, 0.0), *_OFFSET),
        (
            "a {adj} mosaic of {c} cells",
            "a {adj} Voronoi diagram in {c}",
            "{adj} stained glass in {c}",
            "{c} shards fitted together",
        ),
        3,
        (_scale(6.5, 10, "coarse", "fine"),),
    ),
    "cracks": Kind(
        (_uniform(3.5, 9), _uniform(0.1, 0.18), _fixed(0.0, 0.0, 0.0, 0.0), *_OFFSET),
        (
            "a web of {c1} cracks on {c0}",
            "{c0} cobblestones with {c1} gaps",
            "{c0} cells with {c1} borders",
            "cracked {c0} ground with {c1} fissures",
        ),
    ),
    "clouds": Kind(
        (_uniform(2.5, 7), _fixed(0.0, 0.0, 0.0, 0.0, 0.0), *_OFFSET),
        (
            "{adj} {c} clouds",
            "{adj} fractal noise in {c}",
            "a foggy blend of {c}",
            "{adj} smoke in {c}",
        ),
        3,
        (_scale(3.5, 5.5, "soft", "rough"),),
    ),
    "marble": Kind(
        (_uniform(2.5, 4.5), _uniform(2.5, 5), _fixed(0.0, 0.0, 0.0, 0.0), *_OFFSET),
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
        (_uniform(5, 12), _uniform(0.8, 1.6), _uniform(0, 6), _uniform(0, 6)),
        (
            "psychedelic {c} swirls",
            "smooth warped waves of {c}",
            "a lava lamp in {c}",
            "flowing {c} ribbons",
        ),
        3,
    ),
    "kaleidoscope": Kind(
        (
            _whole(3, 9),
            _uniform(3, 7),
            _uniform(1.5, 2.5),
            _uniform(1.5, 3),
            _fixed(0.0, 0.0),
            *_OFFSET,
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
        (_draw_julia_point, _uniform(1.8, 3.0), _uniform(0, 2 * pi), _uniform(2.5, 5)),
        (
            "a {c} Julia set",
            "a {c} Julia fractal",
            "a swirling fractal in {c}",
            "a {c} fractal with curls",
        ),
    ),
    "bricks": Kind(
        (_whole(5, 13), _uniform(0.07, 0.12)),
        (
            "a {c0} brick wall with {c1} mortar",
            "{adj} {c0} bricks with {c1} joints",
            "rows of {adj} {c0} bricks on {c1}",
        ),
        adjectives=(_scale(7, 10, "large", "small"),),
    ),
    "honeycomb": Kind(
        (_uniform(3, 9), _uniform(0.07, 0.12)),
        (
            "a {c0} honeycomb with {c1} walls",
            "{adj} {c0} hexagonal tiles with {c1} edges",
            "a {adj} hexagon grid in {c0} with {c1} outlines",
        ),
        adjectives=(_scale(4.5, 7, "large", "small"),),
    ),
    "zigzag": Kind(
        (_uniform(4, 10), _uniform(0.15, 0.3), _whole(3, 7), _choice(0, pi / 2)),
        (
            "{adj} {c} zigzag stripes",
            "{adj} {c} chevrons",
            "a herringbone of {c}",
            "{adj} jagged lines of {c}",
        ),
        adjectives=(_zigzag_direction,),
    ),
    "gradient": Kind(
        (_choice(0, pi / 2, pi / 4, 9), _fixed(0.1, 0.8)),
        (
            "a {adj} gradient from {c0} to {c1}",
            "a smooth {adj} blend of {c0} into {c1}",
            "a {adj} fade between {c0} and {c1}",
        ),
        adjectives=(_gradient_direction,),
    ),
    "grid": Kind(
        (_whole(4, 12), _uniform(0.06, 0.12), _choice(0, 0, pi / 4)),
        (
            "a {adj} grid of {c1} lines on {c0}",
            "a {adj} {c1} lattice over {c0}",
            "a {adj} {c1} net on a {c0} background",
        ),
        adjectives=(_scale(6, 9, "wide", "fine"), _if_set(2, "diagonal")),
    ),
}
_PLACE_OF_COLOURS = {"mosaic": 1, "stripes": 4}
"""Programs with the number of colours as a parameter, and its place among the parameters."""


def random_colours(
    rng: Rng, count: int, *, avoid: Sequence[str] = (), contrast: float = 0.27, among: Words = ()
) -> tuple[str, ...]:
    """Returns colour names that differ clearly from each other and from `avoid`.

    They differ a little less clearly if too few names do.

    Args:
        count: number of names.
        avoid: other colours of the picture.
        contrast: least difference of two colours.
        among: the names to choose from; all by default.

    Raises:
        ValueError: fewer than `count` names are left without `avoid`.
    """
    names = list(among or COLOURS)
    num_free = len(set(names) - set(avoid))
    if num_free < count:
        raise ValueError(
            f"{count} colours are asked for, and {num_free} of {len(names)} can be taken"
        )
    order = [names[index] for index in rng.permutation(len(names))]
    # It ends, since all free colours differ a little.
    while True:
        chosen: list[str] = []
        for name in order:
            if len(chosen) == count:
                break
            distances = [colour_distance(name, colour) for colour in (*chosen, *avoid)]
            if all(distance >= contrast for distance in distances):
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
        avoid: colours from which the texture's colours must differ.
        contrast: least difference of two colours.
        kinds: the programs to choose from; all by default.
        box: the filled part of the picture.
    """
    names = list(kinds or KINDS)
    name = names[rng.integers(len(names))]
    kind = KINDS[name]
    count = 3 if kind.max_colours == 3 and rng.random() < 0.4 else 2
    colours = random_colours(rng, count, avoid=avoid, contrast=contrast)
    parameters: list[float] = []
    for draw in kind.draws:
        parameters += draw(rng)
    if name in _PLACE_OF_COLOURS:
        parameters[_PLACE_OF_COLOURS[name]] = float(count)
    return Texture(name, colours, tuple(parameters), box)


def describe(texture: Texture, rng: Rng) -> str:
    """Returns a noun phrase that is true of the texture."""
    kind = KINDS[texture.program]
    noun = kind.nouns[int(rng.integers(len(kind.nouns)))]
    adjectives: list[str] = []
    if rng.random() < 0.85:
        for adjective in kind.adjectives:
            adjectives += adjective(texture.values)
    number = COUNTS[int(texture.values[0])] if "{n}" in noun else ""
    colours = list(texture.colours)
    phrase = noun.format(
        c=enumeration(colours),
        c0=colours[0],
        c1=colours[-1],
        n=number,
        adj=" ".join(adjectives),
    )
    # A missing adjective leaves two blanks, and may change the article before it.
    words = phrase.split()
    for place, word in enumerate(words[:-1]):
        if word in ("a", "an"):
            words[place] = "an" if words[place + 1][0] in "aeiou" else "a"
    return " ".join(words)
