"""Random textures and what to call them. Every phrase follows from the parameters that are drawn."""

from collections.abc import Sequence

from data.synthetic.scene import Texture
from data.synthetic.texture_kinds import KINDS, Rng, Words
from data.synthetic.vocabulary import COLOURS, COUNTS, colour_distance, listed

_COUNTS_COLOURS = {"mosaic": 1, "stripes": 4}
"""Where the program itself has to know the number of colours: place among its parameters."""


def random_colours(
    rng: Rng, count: int, *, avoid: Sequence[str] = (), contrast: float = 0.27, among: Words = ()
) -> tuple[str, ...]:
    """Colour names that differ clearly from each other and from `avoid`; a little less clearly where many are taken."""
    names = list(among or COLOURS)
    order = [names[index] for index in rng.permutation(len(names))]
    while True:
        chosen: list[str] = []
        for name in order:
            if len(chosen) < count and all(colour_distance(name, other) >= contrast for other in (*chosen, *avoid)):
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
        avoid: colours that none of its own may come near.
        contrast: how far they keep.
        kinds: among these programs; all by default.
        box: the part of the picture that it fills.
    """
    names = list(kinds or KINDS)
    name = names[rng.integers(len(names))]
    kind = KINDS[name]
    count = 3 if kind.max_colours == 3 and (name == "plaid" or rng.random() < 0.4) else 2
    if count == 3:
        colours = random_colours(rng, 3, avoid=avoid, contrast=contrast)
    else:
        colours = random_colours(rng, 2, avoid=avoid, contrast=contrast)
    values = list(kind.values(rng))
    if name in _COUNTS_COLOURS:
        values[_COUNTS_COLOURS[name]] = float(count)
    return Texture(name, colours, tuple(values), box)


def describe(texture: Texture, rng: Rng) -> str:
    """A noun phrase that is true of the texture."""
    kind = KINDS[texture.program]
    noun = kind.nouns[int(rng.integers(len(kind.nouns)))]
    adjectives = " ".join(kind.adjectives(texture.values)) if rng.random() < 0.85 else ""
    number = "" if kind.number is None else COUNTS[kind.number(texture.values)]
    colours = list(texture.colours)
    text = noun.format(c=listed(colours), c0=colours[0], c1=colours[-1], n=number, adj=adjectives)
    return _tidy(text)


def _tidy(text: str) -> str:
    """Single spaces, and `an` where a vowel follows."""
    words = text.split()
    for place, word in enumerate(words[:-1]):
        if word in ("a", "an"):
            words[place] = "an" if words[place + 1][0] in "aeiou" else "a"
    return " ".join(words)
