"""What a picture consists of: texture programs in boxes, shapes on top."""

from dataclasses import dataclass

CONTENTS = ("all", "shapes", "scenes")
FILLS = ("solid", "hollow", "striped", "dotted", "checkered")


@dataclass(frozen=True)
class Texture:
    """A texture program.

    Attributes:
        program: its name in `fields.py`; "plain" for one colour.
        colours: one to three colour names; the program's number 0 is the first, 1 the last.
        values: the program's own parameters, at most eight.
        box: left, top, right, bottom of the part that it fills, 0 to 1.
    """

    program: str
    colours: tuple[str, ...]
    values: tuple[float, ...] = ()
    box: tuple[float, float, float, float] = (0.0, 0.0, 1.0, 1.0)


@dataclass(frozen=True)
class Shape:
    """One drawn shape.

    Attributes:
        name: its name in `shapes.py`.
        colour: its name.
        x: centre in image sides from the left.
        y: centre in image sides from the top.
        radius: that of the circle around it, in image sides.
        angle: radians, clockwise.
        fill: one of FILLS.
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
    """Textures from back to front, then shapes from back to front."""

    textures: tuple[Texture, ...]
    shapes: tuple[Shape, ...] = ()
