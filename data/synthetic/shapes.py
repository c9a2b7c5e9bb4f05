"""The outlines of drawn shapes as signed distances: negative inside, in units of the shape's radius.

A shape is built from polygons and discs by union (min) and difference (max); it fits the unit circle, y points down.
`render` looks the distance up in one table.
"""

import math
from collections.abc import Callable, Sequence
from functools import cache

import numpy as np

TABLE_SIZE = 128
TABLE_EXTENT = 1.25
"""The table covers [-TABLE_EXTENT, TABLE_EXTENT] in both directions."""

Grid = tuple[np.ndarray, np.ndarray]
Outline = Callable[[Grid], np.ndarray]
Point = tuple[float, float]


def polygon(points: Sequence[Point]) -> Outline:
    """Distance to the nearest edge; even-odd rule for the sign."""

    def distance(grid: Grid) -> np.ndarray:
        x, y = grid
        nearest = np.full(x.shape, np.inf)
        inside = np.zeros(x.shape, dtype=bool)
        for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[0]], strict=True):
            ex, ey = x1 - x0, y1 - y0
            along = np.clip(((x - x0) * ex + (y - y0) * ey) / max(ex * ex + ey * ey, 1e-12), 0, 1)
            nearest = np.minimum(nearest, np.hypot(x - x0 - along * ex, y - y0 - along * ey))
            if y0 != y1:
                inside ^= ((y0 > y) != (y1 > y)) & (x < (y - y0) / (y1 - y0) * ex + x0)
        return np.where(inside, -nearest, nearest)

    return distance


def disc(x0: float, y0: float, radius: float) -> Outline:
    return lambda grid: np.hypot(grid[0] - x0, grid[1] - y0) - radius


def union(*parts: Outline) -> Outline:
    return lambda grid: np.min([part(grid) for part in parts], axis=0)


def difference(part: Outline, *holes: Outline) -> Outline:
    return lambda grid: np.max([part(grid), *(-hole(grid) for hole in holes)], axis=0)


def box(left: float, top: float, right: float, bottom: float) -> Outline:
    return polygon([(left, top), (right, top), (right, bottom), (left, bottom)])


def around(count: int, point: Callable[[float], Point], turn: float = 0.0) -> Outline:
    """A polygon whose corners follow angles in `count` equal steps of a whole turn; the first is `turn` of a step."""
    return polygon([point(2 * math.pi * (k + turn) / count) for k in range(count)])


def radial(
    count: int, radius: Callable[[float], float] = lambda angle: 1.0, turn: float = 0.0
) -> Outline:
    """A closed curve around the origin, a regular polygon by default; angle 0 points up and angles grow clockwise."""
    return around(count, lambda t: (radius(t) * math.sin(t), -radius(t) * math.cos(t)), turn)


OUTLINES: dict[str, Outline] = {
    "circle": disc(0, 0, 0.9),
    "square": box(-0.7, -0.7, 0.7, 0.7),
    "triangle": radial(3),
    "star": radial(10, lambda angle: 0.42 if round(angle * 5 / math.pi) % 2 else 1),
    "ring": difference(disc(0, 0, 0.92), disc(0, 0, 0.55)),
    "cross": union(box(-0.3, -0.92, 0.3, 0.92), box(-0.92, -0.3, 0.92, 0.3)),
    "diamond": polygon([(0, -1), (0.62, 0), (0, 1), (-0.62, 0)]),
    "heart": around(
        80,
        lambda t: (
            16 * math.sin(t) ** 3 / 18,
            -(13 * math.cos(t) - 5 * math.cos(2 * t) - 2 * math.cos(3 * t) - math.cos(4 * t) + 2)
            / 18,
        ),
    ),
    "hexagon": radial(6),
    "pentagon": radial(5),
    "octagon": radial(8, turn=0.5),
    "rectangle": box(-0.9, -0.42, 0.9, 0.42),
    "oval": lambda grid: (np.hypot(grid[0] / 0.95, grid[1] / 0.55) - 1) * 0.55,
    "crescent": difference(disc(0, 0, 0.9), disc(0.42, -0.1, 0.72)),
    "semicircle": lambda grid: np.maximum(disc(0, 0.35, 0.9)(grid), grid[1] - 0.35),
    "arrow": polygon(
        [
            (0, -0.95),
            (0.65, -0.15),
            (0.25, -0.15),
            (0.25, 0.9),
            (-0.25, 0.9),
            (-0.25, -0.15),
            (-0.65, -0.15),
        ]
    ),
    "trapezoid": polygon([(-0.45, -0.55), (0.45, -0.55), (0.85, 0.5), (-0.85, 0.5)]),
    "parallelogram": polygon([(-0.4, -0.5), (0.9, -0.5), (0.4, 0.5), (-0.9, 0.5)]),
    "teardrop": union(disc(0, 0.35, 0.58), polygon([(0, -0.98), (0.53, 0.12), (-0.53, 0.12)])),
    "flower": radial(96, lambda angle: 0.72 + 0.25 * math.cos(5 * angle)),
    "gear": radial(400, lambda angle: 0.92 if math.sin(10 * angle) > 0 else 0.7),
    "lightning bolt": polygon(
        [(0.25, -0.95), (-0.55, 0.12), (-0.08, 0.12), (-0.28, 0.95), (0.55, -0.2), (0.08, -0.2)]
    ),
    "house": union(box(-0.62, -0.15, 0.62, 0.75), polygon([(0, -0.95), (0.9, -0.1), (-0.9, -0.1)])),
    "tree": union(
        polygon([(0, -1), (0.5, -0.25), (-0.5, -0.25)]),
        polygon([(0, -0.6), (0.72, 0.5), (-0.72, 0.5)]),
        box(-0.15, 0.4, 0.15, 0.95),
    ),
    "fish": union(
        around(20, lambda t: (-0.25 + 0.7 * math.cos(t), 0.42 * math.sin(t))),
        polygon([(0.25, 0), (0.85, -0.5), (0.85, 0.5)]),
    ),
    "cloud": union(
        disc(-0.5, 0.15, 0.38),
        disc(0.0, -0.15, 0.5),
        disc(0.52, 0.13, 0.4),
        box(-0.5, 0.1, 0.52, 0.53),
    ),
    "mushroom": union(
        difference(disc(0, -0.05, 0.88), box(-1, 0.05, 1, 1)),
        polygon([(-0.22, 0), (0.22, 0), (0.32, 0.85), (-0.32, 0.85)]),
    ),
    "leaf": lambda grid: (
        np.maximum(np.hypot(grid[0] - 0.62, grid[1]), np.hypot(grid[0] + 0.62, grid[1])) - 1.1
    ),
    "crown": polygon(
        [(-0.8, 0.6), (-0.9, -0.5), (-0.4, 0.0), (0, -0.75), (0.4, 0.0), (0.9, -0.5), (0.8, 0.6)]
    ),
    "kite": polygon([(0, -0.75), (0.6, -0.2), (0, 1), (-0.6, -0.2)]),
    "balloon": union(
        radial(96, lambda a: 0.72 + 0.08 * math.cos(a)),
        polygon([(0, 0.6), (0.18, 0.98), (-0.18, 0.98)]),
    ),
    "cup": union(
        polygon([(-0.7, -0.6), (0.5, -0.6), (0.38, 0.7), (-0.58, 0.7)]),
        difference(disc(0.5, -0.05, 0.38), disc(0.5, -0.05, 0.2)),
    ),
}
NAMES = tuple(OUTLINES)
SIMPLE = (
    "circle",
    "square",
    "triangle",
    "star",
    "diamond",
    "heart",
    "hexagon",
    "pentagon",
    "rectangle",
    "oval",
)
"""Shapes that everybody names alike and that stay recognisable when small: content "shapes" has no others."""
HOLLOW = (
    *(
        "circle",
        "square",
        "triangle",
        "diamond",
        "heart",
        "hexagon",
        "pentagon",
        "octagon",
        "rectangle",
        "oval",
    ),
    *("semicircle", "trapezoid", "parallelogram", "arrow", "crescent", "kite"),
)
"""Shapes whose outline alone can be drawn: made of one piece, and roomy."""


@cache
def distance_table() -> np.ndarray:
    """Signed distances of all shapes in the order of NAMES, float32 (S, TABLE_SIZE, TABLE_SIZE), rows from top."""
    ticks = (np.arange(TABLE_SIZE) + 0.5) / TABLE_SIZE * 2 * TABLE_EXTENT - TABLE_EXTENT
    grid = tuple(np.meshgrid(ticks, ticks))
    return np.stack([outline(grid) for outline in OUTLINES.values()]).astype(np.float32)  # type: ignore[arg-type]


def plural(name: str) -> str:
    return {"cross": "crosses", "leaf": "leaves", "fish": "fish"}.get(name, name + "s")
