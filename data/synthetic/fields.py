"""Texture programs: formulas that give every pixel a number in [0, 1], which picks its colour.

Each takes x (float32 (W,)) and y (float32 (H, 1)) in image sides, origin top left, y down; its
eight parameters; and the size of a pixel. It returns float32 (H, W), or an axis of length 1 where
that axis does not matter. Functions above `stripes` are parts of programs.
"""

from functools import cache

import numpy as np

TAU = np.float32(2 * np.pi)
Array = np.ndarray


@cache
def noise_table() -> Array:
    """Returns two independent uniform numbers per cell, float32 (2, 256 * 256), row by row.

    The numbers are part of the generator's version.
    """
    rng = np.random.Generator(np.random.Philox(key=20240229))
    return np.ascontiguousarray(rng.random((256 * 256, 2), dtype=np.float32).T)


def cell_index(column: Array, row: Array) -> Array:
    """Returns the place of an integer cell in the noise table, which repeats."""
    return (row.astype(np.intp) & 255) << 8 | column.astype(np.intp) & 255


def sin(angle: Array) -> Array:
    """Returns the sine, rounded from double precision; `cos` and `atan2` do the same.

    numpy's sine in float32 differs by kind of processor.
    """
    return np.sin(angle, dtype=np.float64).astype(np.float32)


def cos(angle: Array) -> Array:
    return np.cos(angle, dtype=np.float64).astype(np.float32)


def atan2(y: Array, x: Array) -> Array:
    return np.arctan2(y, x, dtype=np.float64).astype(np.float32)


def length(x: Array, y: Array) -> Array:
    """Returns the length of a vector by operations that every processor rounds correctly.

    `np.hypot` is only as good as the system's C library.
    """
    return np.sqrt(x * x + y * y)


def edge(distance: float | Array, width: float | Array) -> Array:
    return np.minimum(np.maximum(distance / width + 0.5, 0), 1)


def fract(u: Array) -> Array:
    return u - np.floor(u)


def rotate(x: Array, y: Array, angle: float) -> tuple[Array, Array]:
    cosine = cos(np.asarray(angle))
    sine = sin(np.asarray(angle))
    return cosine * x + sine * y, cosine * y - sine * x


def noise(x: Array, y: Array) -> Array:
    """Returns the noise table, interpolated smoothly between its cells."""
    cell_x = np.floor(x)
    cell_y = np.floor(y)
    u = x - cell_x
    v = y - cell_y
    right_share = u * u * (3 - 2 * u)
    lower_share = v * v * (3 - 2 * v)
    column = cell_x.astype(np.intp) & 255
    row = (cell_y.astype(np.intp) & 255) << 8
    right_column = (column + 1) & 255
    lower_row = (row + 256) & 0xFFFF
    table = noise_table()[0]
    upper_left = table.take(row | column)
    upper_right = table.take(row | right_column)
    lower_left = table.take(lower_row | column)
    lower_right = table.take(lower_row | right_column)
    upper = upper_left * (1 - right_share) + upper_right * right_share
    lower = lower_left * (1 - right_share) + lower_right * right_share
    return upper * (1 - lower_share) + lower * lower_share


def fbm(x: Array, y: Array) -> Array:
    """Returns fractal noise: five octaves, each turned, finer and half as strong."""
    total: Array = np.zeros((1, 1), dtype=np.float32)
    weight = 0.5
    for _ in range(5):
        total = total + weight * noise(x, y)
        x, y = 1.6 * x + 1.2 * y + 17, 1.6 * y - 1.2 * x + 17
        weight *= 0.5
    return total / 0.96875


def voronoi(x: Array, y: Array) -> tuple[Array, Array, Array]:
    """Returns distances to the two nearest feature points of jittered cells.

    The third array is the nearest point's place in the noise table.
    """
    cell_x = np.floor(x)
    cell_y = np.floor(y)
    first, second = np.full((2, len(y), len(x)), 9, dtype=np.float32)
    nearest = np.zeros(first.shape, dtype=np.intp)
    point_x, point_y = noise_table()
    for row_step in (-1, 0, 1):
        for column_step in (-1, 0, 1):
            column = cell_x + column_step
            row = cell_y + row_step
            cell = cell_index(column, row)
            x_distance = x - column - point_x.take(cell)
            y_distance = y - row - point_y.take(cell)
            distance = length(x_distance, y_distance)
            is_nearer = distance < first
            second = np.where(is_nearer, first, np.minimum(second, distance))
            np.copyto(nearest, cell, where=is_nearer)
            np.minimum(first, distance, out=first)
    return first, second, nearest


def bands(u: Array, width: float | Array) -> Array:
    return edge(np.abs(fract(u) - 0.5) - 0.25, width)


def smooth(low: float, high: float, u: Array) -> Array:
    share = np.clip((u - low) / (high - low), 0, 1)
    return share * share * (3 - 2 * share)


def stripes(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, angle, wave_height, wave_frequency, num_colours = parameters[:5]
    u, v = rotate(x, y, angle)
    u = (u + wave_height * sin(TAU * wave_frequency * v)) * frequency
    if num_colours < 2.5:
        return bands(u, frequency * pixel)
    return np.floor(fract(u) * 3) * 0.5


def checkerboard(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, angle = parameters[:2]
    u, v = rotate(x, y, angle)
    column_distance = np.abs(fract(u * frequency) - 0.5) - 0.25
    row_distance = np.abs(fract(v * frequency) - 0.5) - 0.25
    return edge(column_distance * row_distance, 0.25 * frequency * pixel)


def dots(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, radius, row_shift, angle = parameters[:4]
    u, v = rotate(x, y, angle)
    u = u * frequency
    v = v * frequency
    u = u + row_shift * (np.floor(v) % 2)
    distance = length(fract(u) - 0.5, fract(v) - 0.5)
    return edge(radius - distance, frequency * pixel)


def rings(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, centre_x, centre_y = parameters[:3]
    return bands(length(x - centre_x, y - centre_y) * frequency, frequency * pixel)


def spiral(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    arms, turns, centre_x, centre_y = parameters[:4]
    u = x - centre_x
    v = y - centre_y
    radius = np.maximum(length(u, v), 1e-4)
    phase = atan2(v, u) / TAU * arms + radius * turns
    return bands(phase, (arms / (TAU * radius) + abs(turns)) * pixel)


def rays(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    arms, turn, centre_x, centre_y = parameters[:4]
    u = x - centre_x
    v = y - centre_y
    radius = np.maximum(length(u, v), 1e-4)
    phase = atan2(v, u) / TAU * arms + turn
    return bands(phase, arms / (TAU * radius) * pixel)


def mosaic(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, num_colours = parameters[:2]
    offset_x, offset_y = parameters[6:]
    _, _, nearest = voronoi(x * frequency + offset_x, y * frequency + offset_y)
    # The number of a distant cell picks the colour, since the own number places the point.
    cell = cell_index((nearest & 255) + 101, (nearest >> 8) + 101)
    number = noise_table()[0].take(cell)
    return np.floor(np.minimum(number, 0.999) * num_colours) / (num_colours - 1)


def cracks(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, width = parameters[:2]
    offset_x, offset_y = parameters[6:]
    first, second, _ = voronoi(x * frequency + offset_x, y * frequency + offset_y)
    return edge(width - (second - first), 2 * frequency * pixel)


def clouds(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency = parameters[0]
    offset_x, offset_y = parameters[6:]
    return smooth(0.3, 0.7, fbm(x * frequency + offset_x, y * frequency + offset_y))


def marble(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, warp = parameters[:2]
    offset_x, offset_y = parameters[6:]
    u = x * frequency + offset_x
    v = y * frequency + offset_y
    warped_u = u + warp * fbm(u, v)
    warped_v = v + warp * fbm(u + 41, v + 83)
    return smooth(0.3, 0.7, fbm(warped_u, warped_v))


def swirls(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, strength, u_phase, v_phase = parameters[:4]
    u = x * frequency
    v = y * frequency
    for k in range(1, 5):
        u = u + strength / k * sin(k * v + u_phase)
        v = v + strength / k * sin(k * u + v_phase)
    return 0.5 + 0.5 * sin(u + v)


def kaleidoscope(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    mirrors, frequency, noise_cycles, radial_cycles = parameters[:4]
    offset_x, offset_y = parameters[6:]
    u = x - 0.5
    v = y - 0.5
    radius = length(u, v)
    wedge = TAU / mirrors
    angle = np.abs((atan2(v, u) + TAU) % wedge - 0.5 * wedge)
    mirrored_x = radius * frequency * cos(angle) + offset_x
    mirrored_y = radius * frequency * sin(angle) + offset_y
    pattern = fbm(mirrored_x, mirrored_y)
    return 0.5 + 0.5 * sin(TAU * (noise_cycles * pattern + radial_cycles * radius))


def julia(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    """Returns bands of the number of steps until a point leaves the circle of radius 4.

    A point that left the circle never returns.
    """
    constant_u, constant_v, extent, angle, band_frequency = parameters[:5]
    u, v = rotate(x - 0.5, y - 0.5, angle)
    u = u * extent
    v = v * extent
    steps = np.zeros(u.shape, dtype=np.uint8)
    # Points outside grow without limit.
    with np.errstate(over="ignore", invalid="ignore"):
        for _ in range(48):
            u, v = u * u - v * v + constant_u, 2 * u * v + constant_v
            steps += u * u + v * v <= 16
    step_counts = np.arange(49, dtype=np.float32)
    brightness = 0.5 - 0.5 * cos(band_frequency * np.sqrt(step_counts))
    brightness[48] = 1
    return brightness.take(steps)


def bricks(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, joint_width = parameters[:2]
    u = x * 0.5 * frequency
    v = y * frequency
    # Every second row is shifted by half a brick.
    u = u + 0.5 * (np.floor(v) % 2)
    side_distance = (0.5 - np.abs(fract(u) - 0.5)) * 2
    row_distance = 0.5 - np.abs(fract(v) - 0.5)
    joint_distance = np.minimum(side_distance, row_distance)
    return edge(joint_width - joint_distance, frequency * pixel)


def honeycomb(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, wall_width = parameters[:2]
    # Hexagons have their centres in the middles and the corners of rectangles of this size.
    width = 1.0
    height = 1.7320508
    u = x * frequency
    v = y * frequency
    middle_u = u % width - 0.5 * width
    middle_v = v % height - 0.5 * height
    corner_u = (u - 0.5 * width) % width - 0.5 * width
    corner_v = (v - 0.5 * height) % height - 0.5 * height
    is_middle_nearer = middle_u**2 + middle_v**2 < corner_u**2 + corner_v**2
    cell_u = np.abs(np.where(is_middle_nearer, middle_u, corner_u))
    cell_v = np.abs(np.where(is_middle_nearer, middle_v, corner_v))
    centre_distance = np.maximum(cell_u, 0.5 * cell_u + 0.8660254 * cell_v)
    return edge(wall_width - (0.5 - centre_distance), frequency * pixel)


def zigzag(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, tooth_height, tooth_frequency, angle = parameters[:4]
    u, v = rotate(x, y, angle)
    teeth = tooth_height * np.abs(fract(u * tooth_frequency) - 0.5)
    return bands((v + teeth) * frequency, 1.5 * frequency * pixel)


def gradient(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    angle, start, span = parameters[:3]
    # An angle above 8 means a radial gradient.
    if angle > 8:
        u = length(x - 0.5, y - 0.5) * 1.4
    else:
        u = rotate(x - 0.5, y - 0.5, angle)[0] + 0.5
    return np.clip((u - start) / span, 0, 1)


def grid(x: Array, y: Array, parameters: Array, pixel: float) -> Array:
    frequency, line_width, angle = parameters[:3]
    u, v = rotate(x, y, angle)
    column_distance = np.abs(fract(u * frequency) - 0.5)
    row_distance = np.abs(fract(v * frequency) - 0.5)
    line_distance = np.minimum(column_distance, row_distance)
    return edge(line_width - line_distance, frequency * pixel)
