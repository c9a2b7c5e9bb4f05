"""Texture programs: formulas that give every pixel a number in [0, 1], which picks its colour.

Each takes x (float32 (W,)) and y (float32 (H, 1)) in image sides, origin top left, y down; its eight parameters; and the size of
a pixel. It returns float32 (H, W), or less where an axis does not matter. What stands above `stripes` they are made of.
"""

from functools import cache

import numpy as np

TAU = np.float32(2 * np.pi)
Array = np.ndarray


@cache
def noise_table() -> Array:
    """Two independent uniform numbers per cell, float32 (2, 256 * 256), row by row; part of the generator's version."""
    rng = np.random.Generator(np.random.Philox(key=20240229))
    return np.ascontiguousarray(rng.random((256 * 256, 2), dtype=np.float32).T)


def cell_index(i: Array, j: Array) -> Array:
    """Place of an integer cell (i across, j down) in the noise table, which repeats."""
    return (j.astype(np.intp) & 255) << 8 | i.astype(np.intp) & 255


def sin(u: Array) -> Array:
    """Rounded from double precision, because numpy's sine in float32 differs by kind of processor; so do `cos` and `atan2`."""
    return np.sin(u, dtype=np.float64).astype(np.float32)


def cos(u: Array) -> Array:
    return np.cos(u, dtype=np.float64).astype(np.float32)


def atan2(y: Array, x: Array) -> Array:
    return np.arctan2(y, x, dtype=np.float64).astype(np.float32)


def length(x: Array, y: Array) -> Array:
    """Square roots, sums and products are rounded correctly everywhere; `np.hypot` is as good as the system's C library."""
    return np.sqrt(x * x + y * y)


def edge(d: Array, width: float | Array) -> Array:
    return np.minimum(np.maximum(d / width + 0.5, 0), 1)


def fract(u: Array) -> Array:
    return u - np.floor(u)


def rotated(x: Array, y: Array, angle: float) -> tuple[Array, Array]:
    c, s = cos(np.asarray(angle)), sin(np.asarray(angle))
    return c * x + s * y, c * y - s * x


def noise(x: Array, y: Array) -> Array:
    i, j = np.floor(x), np.floor(y)
    u, v = x - i, y - j
    u, v = u * u * (3 - 2 * u), v * v * (3 - 2 * v)
    column, row = i.astype(np.intp) & 255, (j.astype(np.intp) & 255) << 8
    right, down = (column + 1) & 255, (row + 256) & 0xFFFF
    table = noise_table()[0]
    top = table.take(row | column) * (1 - u) + table.take(row | right) * u
    bottom = table.take(down | column) * (1 - u) + table.take(down | right) * u
    return top * (1 - v) + bottom * v


def fbm(x: Array, y: Array) -> Array:
    total: Array = np.zeros((1, 1), dtype=np.float32)
    weight = 0.5
    for _ in range(5):
        total = total + weight * noise(x, y)
        x, y = 1.6 * x + 1.2 * y + 17, 1.6 * y - 1.2 * x + 17
        weight *= 0.5
    return total / 0.96875


def voronoi(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Distances to the two nearest feature points of jittered cells, and the nearest one's place in the noise table."""
    i0, j0 = np.floor(x), np.floor(y)
    first, second = np.full((2, len(y), len(x)), 9, dtype=np.float32)
    nearest = np.zeros(first.shape, dtype=np.intp)
    across, down = noise_table()
    for dj in (-1, 0, 1):
        for di in (-1, 0, 1):
            i, j = i0 + di, j0 + dj
            cell = cell_index(i, j)
            d = length(x - i - across.take(cell), y - j - down.take(cell))
            nearer = d < first
            second = np.where(nearer, first, np.minimum(second, d))
            np.copyto(nearest, cell, where=nearer)
            np.minimum(first, d, out=first)
    return first, second, nearest


def bands(u: Array, width: float | Array) -> Array:
    return edge(np.abs(fract(u) - 0.5) - 0.25, width)


def smooth(low: float, high: float, u: Array) -> Array:
    t = np.clip((u - low) / (high - low), 0, 1)
    return t * t * (3 - 2 * t)


def stripes(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = rotated(x, y, a[1])
    u = (u + a[2] * sin(TAU * a[3] * v)) * a[0]
    return bands(u, a[0] * px) if a[4] < 2.5 else np.floor(fract(u) * 3) * 0.5


def checkerboard(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = rotated(x, y, a[1])
    return edge(
        (np.abs(fract(u * a[0]) - 0.5) - 0.25) * (np.abs(fract(v * a[0]) - 0.5) - 0.25),
        0.25 * a[0] * px,
    )


def dots(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = rotated(x, y, a[3])
    u, v = u * a[0], v * a[0]
    u = u + a[2] * (np.floor(v) % 2)
    return edge(a[1] - length(fract(u) - 0.5, fract(v) - 0.5), a[0] * px)


def rings(x: Array, y: Array, a: Array, px: float) -> Array:
    return bands(length(x - a[1], y - a[2]) * a[0], a[0] * px)


def spiral(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = x - a[2], y - a[3]
    r = np.maximum(length(u, v), 1e-4)
    return bands(atan2(v, u) / TAU * a[0] + r * a[1], (a[0] / (TAU * r) + abs(a[1])) * px)


def rays(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = x - a[2], y - a[3]
    r = np.maximum(length(u, v), 1e-4)
    return bands(atan2(v, u) / TAU * a[0] + a[1], a[0] / (TAU * r) * px)


def mosaic(x: Array, y: Array, a: Array, px: float) -> Array:
    nearest = voronoi(x * a[0] + a[6], y * a[0] + a[7])[2]
    number = noise_table()[0].take(cell_index((nearest & 255) + 101, (nearest >> 8) + 101))
    return np.floor(np.minimum(number, 0.999) * a[1]) / (a[1] - 1)


def cracks(x: Array, y: Array, a: Array, px: float) -> Array:
    first, second, _ = voronoi(x * a[0] + a[6], y * a[0] + a[7])
    return edge(a[1] - (second - first), 2 * a[0] * px)


def clouds(x: Array, y: Array, a: Array, px: float) -> Array:
    return smooth(0.3, 0.7, fbm(x * a[0] + a[6], y * a[0] + a[7]))


def marble(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = x * a[0] + a[6], y * a[0] + a[7]
    return smooth(0.3, 0.7, fbm(u + a[1] * fbm(u, v), v + a[1] * fbm(u + 41, v + 83)))


def swirls(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = x * a[0], y * a[0]
    for k in range(1, 5):
        u = u + a[1] / k * sin(k * v + a[2])
        v = v + a[1] / k * sin(k * u + a[3])
    return 0.5 + 0.5 * sin(u + v)


def kaleidoscope(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = x - 0.5, y - 0.5
    r, wedge = length(u, v), TAU / a[0]
    angle = np.abs((atan2(v, u) + TAU) % wedge - 0.5 * wedge)
    n = fbm(r * a[1] * cos(angle) + a[6], r * a[1] * sin(angle) + a[7])
    return 0.5 + 0.5 * sin(TAU * (a[2] * n + a[3] * r))


def julia(x: Array, y: Array, a: Array, px: float) -> Array:
    """Bands of the number of steps after which a point leaves the circle of radius 4, which it never enters again."""
    u, v = rotated(x - 0.5, y - 0.5, a[3])
    u, v = u * a[2], v * a[2]
    steps = np.zeros(u.shape, dtype=np.uint8)
    with np.errstate(over="ignore", invalid="ignore"):  # points outside grow without limit
        for _ in range(48):
            u, v = u * u - v * v + a[0], 2 * u * v + a[1]
            steps += u * u + v * v <= 16
    brightness = 0.5 - 0.5 * cos(a[4] * np.sqrt(np.arange(49, dtype=np.float32)))
    brightness[48] = 1
    return brightness.take(steps)


def bricks(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = x * 0.5 * a[0], y * a[0]
    u = u + 0.5 * (np.floor(v) % 2)
    gap = np.minimum((0.5 - np.abs(fract(u) - 0.5)) * 2, 0.5 - np.abs(fract(v) - 0.5))
    return edge(a[1] - gap, a[0] * px)


def honeycomb(x: Array, y: Array, a: Array, px: float) -> Array:
    w, h = 1.0, 1.7320508
    u, v = x * a[0], y * a[0]
    one = u % w - 0.5 * w, v % h - 0.5 * h
    two = (u - 0.5 * w) % w - 0.5 * w, (v - 0.5 * h) % h - 0.5 * h
    nearer = one[0] ** 2 + one[1] ** 2 < two[0] ** 2 + two[1] ** 2
    gx, gy = np.abs(np.where(nearer, one[0], two[0])), np.abs(np.where(nearer, one[1], two[1]))
    return edge(a[1] - (0.5 - np.maximum(gx, 0.5 * gx + 0.8660254 * gy)), a[0] * px)


def zigzag(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = rotated(x, y, a[3])
    return bands((v + a[1] * np.abs(fract(u * a[2]) - 0.5)) * a[0], 1.5 * a[0] * px)


def gradient(x: Array, y: Array, a: Array, px: float) -> Array:
    u = length(x - 0.5, y - 0.5) * 1.4 if a[0] > 8 else rotated(x - 0.5, y - 0.5, a[0])[0] + 0.5
    return np.clip((u - a[1]) / a[2], 0, 1)


def grid(x: Array, y: Array, a: Array, px: float) -> Array:
    u, v = rotated(x, y, a[2])
    return edge(
        a[1] - np.minimum(np.abs(fract(u * a[0]) - 0.5), np.abs(fract(v * a[0]) - 0.5)), a[0] * px
    )
