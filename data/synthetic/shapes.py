"""Outlines of drawn shapes as signed distances: negative inside, in units of the shape's radius.

A shape is built from polygons and discs by union (min) and difference (max); it fits the unit
circle, and y points down. `render` looks the distance up in one table.
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
    """Returns the distance to the nearest edge; the even-odd rule gives its sign."""

    def distance(grid: Grid) -> np.ndarray:
        x, y = grid
        nearest = np.full(x.shape, np.inf)
        is_inside = np.zeros(x.shape, dtype=bool)
        for (x0, y0), (x1, y1) in zip(points, [*points[1:], points[0]], strict=True):
            edge_x = x1 - x0
            edge_y = y1 - y0
            squared_length = max(edge_x * edge_x + edge_y * edge_y, 1e-12)
            projection = ((x - x0) * edge_x + (y - y0) * edge_y) / squared_length
            share = np.clip(projection, 0, 1)
            x_distance = x - x0 - share * edge_x
            y_distance = y - y0 - share * edge_y
            nearest = np.minimum(nearest, np.hypot(x_distance, y_distance))
            if y0 != y1:
                crosses_row = (y0 > y) != (y1 > y)
                crossing_x = (y - y0) / (y1 - y0) * edge_x + x0
                is_inside ^= crosses_row & (x < crossing_x)
        return np.where(is_inside, -nearest, nearest)

    return distance


def disc(x0: float, y0: float, radius: float) -> Outline:
    return lambda grid: np.hypot(grid[0] - x0, grid[1] - y0) - radius


def union(*parts: Outline) -> Outline:
    def distance(grid: Grid) -> np.ndarray:
        return np.min([part(grid) for part in parts], axis=0)

    return distance


def difference(part: Outline, *holes: Outline) -> Outline:
    def distance(grid: Grid) -> np.ndarray:
        outside_holes = [-hole(grid) for hole in holes]
        return np.max([part(grid), *outside_holes], axis=0)

    return distance


def box(left_edge: float, top_edge: float, right_edge: float, bottom_edge: float) -> Outline:
    return polygon(
        [
            (left_edge, top_edge),
            (right_edge, top_edge),
            (right_edge, bottom_edge),
            (left_edge, bottom_edge),
        ]
    )


def closed_curve(count: int, point: Callable[[float], Point], turn: float = 0.0) -> Outline:
    """Returns a polygon with corners at `count` equal steps of angle, the first at `turn` steps."""
    return polygon([point(2 * math.pi * (k + turn) / count) for k in range(count)])


def radial(
    count: int, radius: Callable[[float], float] = lambda angle: 1.0, turn: float = 0.0
) -> Outline:
    """Returns a closed curve around the origin, a regular polygon by default.

    Angle 0 points up and angles grow clockwise.
    """

    def point(angle: float) -> Point:
        return radius(angle) * math.sin(angle), -radius(angle) * math.cos(angle)

    return closed_curve(count, point, turn)


def _heart_point(angle: float) -> Point:
    x = 16 * math.sin(angle) ** 3 / 18
    cosine = math.cos(angle)
    y = 13 * cosine - 5 * math.cos(2 * angle) - 2 * math.cos(3 * angle) - math.cos(4 * angle) + 2
    return x, -y / 18


def _fish_point(angle: float) -> Point:
    return -0.25 + 0.7 * math.cos(angle), 0.42 * math.sin(angle)


def _semicircle(grid: Grid) -> np.ndarray:
    return np.maximum(disc(0, 0.35, 0.9)(grid), grid[1] - 0.35)


def _leaf(grid: Grid) -> np.ndarray:
    left_distance = np.hypot(grid[0] - 0.62, grid[1])
    right_distance = np.hypot(grid[0] + 0.62, grid[1])
    return np.maximum(left_distance, right_distance) - 1.1


OUTLINES: dict[str, Outline] = {
    "circle": disc(0, 0, 0.9),
    "square": box(-0.7, -0.7, 0.7, 0.7),
    "triangle": radial(3),
    "star": radial(10, lambda angle: 0.42 if round(angle * 5 / math.pi) % 2 else 1),
    "ring": difference(disc(0, 0, 0.92), disc(0, 0, 0.55)),
    "cross": union(box(-0.3, -0.92, 0.3, 0.92), box(-0.92, -0.3, 0.92, 0.3)),
    "diamond": polygon([(0, -1), (0.62, 0), (0, 1), (-0.62, 0)]),
    "heart": closed_curve(80, _heart_point),
    "hexagon": radial(6),
    "pentagon": radial(5),
    "octagon": radial(8, turn=0.5),
    "rectangle": box(-0.9, -0.42, 0.9, 0.42),
    "oval": lambda grid: (np.hypot(grid[0] / 0.95, grid[1] / 0.55) - 1) * 0.55,
    "crescent": difference(disc(0, 0, 0.9), disc(0.42, -0.1, 0.72)),
    "semicircle": _semicircle,
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
        closed_curve(20, _fish_point),
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
    "leaf": _leaf,
    "crown": polygon(
        [(-0.8, 0.6), (-0.9, -0.5), (-0.4, 0.0), (0, -0.75), (0.4, 0.0), (0.9, -0.5), (0.8, 0.6)]
    ),
    "kite": polygon([(0, -0.75), (0.6, -0.2), (0, 1), (-0.6, -0.2)]),
    "balloon": union(
        radial(96, lambda angle: 0.72 + 0.08 * math.cos(angle)),
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
"""Shapes whose names all people agree on, and which stay recognisable when small.

Content "shapes" has no others.
"""
HOLLOW = (
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
    "semicircle",
    "trapezoid",
    "parallelogram",
    "arrow",
    "crescent",
    "kite",
)
"""Shapes whose outline alone can be drawn: made of one piece, and roomy."""


@cache
def distance_table() -> np.ndarray:
    """Returns the signed distances of all shapes in the order of NAMES.

    They are float32 (S, TABLE_SIZE, TABLE_SIZE), rows from the top.
    """
    ticks = (np.arange(TABLE_SIZE) + 0.5) / TABLE_SIZE * 2 * TABLE_EXTENT - TABLE_EXTENT
    x, y = np.meshgrid(ticks, ticks)
    distances = [outline((x, y)) for outline in OUTLINES.values()]
    return np.stack(distances).astype(np.float32)


def plural(name: str) -> str:
    return {"cross": "crosses", "leaf": "leaves", "fish": "fish"}.get(name, name + "s")
