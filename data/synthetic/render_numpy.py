"""Draws scenes with numpy: slower than `render_glsl`, needs nothing but numpy and scipy."""

from collections.abc import Sequence

import numpy as np
from scipy.ndimage import map_coordinates

from data.synthetic import shapes
from data.synthetic.fields import FIELD_BY_NAME, bands, edge
from data.synthetic.scene import Scene, Shape, Texture
from data.synthetic.vocabulary import rgb


class NumpyRenderer:
    """Draws scene after scene.

    Attributes:
        name: for provenance.
        description: what drew, in words.
    """

    name = "numpy"

    def __init__(self, image_size: int):
        self._size = image_size
        self.description = f"numpy {np.__version__}"

    def render(self, scenes: Sequence[Scene]) -> np.ndarray:
        """Pictures, uint8 (N, H, W, 3)."""
        return np.stack([self._draw(scene) for scene in scenes])

    def close(self) -> None:
        """Nothing to give back."""

    def _draw(self, scene: Scene) -> np.ndarray:
        canvas_HWC = np.zeros((self._size, self._size, 3), dtype=np.float32)
        for texture in scene.textures:
            _draw_texture(canvas_HWC, texture)
        for shape in scene.shapes:
            _draw_shape(canvas_HWC, shape)
        return np.rint(np.clip(canvas_HWC, 0, 1) * 255).astype(np.uint8)


def pixel_box(box: tuple[float, float, float, float], size: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom in whole pixels inside of the picture."""
    left, top, right, bottom = (min(max(round(value * size), 0), size) for value in box)
    return left, top, right, bottom


def shape_box(shape: Shape) -> tuple[float, float, float, float]:
    """The square that holds a shape and its soft edge."""
    reach = shape.radius * shapes.TABLE_EXTENT
    return shape.x - reach, shape.y - reach, shape.x + reach, shape.y + reach


def palette(colours: Sequence[str]) -> np.ndarray:
    """Three colours between which a number from 0 to 1 chooses, float32 (3, 3)."""
    first, last = rgb(colours[0]), rgb(colours[-1])
    return np.stack([first, rgb(colours[1]) if len(colours) == 3 else (first + last) / 2, last])


def _grid(box: tuple[int, int, int, int], size: int) -> tuple[np.ndarray, np.ndarray]:
    left, top, right, bottom = box
    xs = (np.arange(left, right, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    ys = (np.arange(top, bottom, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    x, y = np.meshgrid(xs, ys)
    return x, y


def _draw_texture(canvas_HWC: np.ndarray, texture: Texture) -> None:
    size = len(canvas_HWC)
    box = left, top, right, bottom = pixel_box(texture.box, size)
    if texture.program == "plain":
        canvas_HWC[top:bottom, left:right] = rgb(texture.colours[0])
        return
    values = np.zeros(8, dtype=np.float32)
    values[: len(texture.values)] = texture.values
    t_HW = FIELD_BY_NAME[texture.program](*_grid(box, size), values, 1 / size)
    colours = palette(texture.colours)
    low, high = np.clip(2 * t_HW, 0, 1)[..., None], np.clip(2 * t_HW - 1, 0, 1)[..., None]
    canvas_HWC[top:bottom, left:right] = colours[0] + (colours[1] - colours[0]) * low + (colours[2] - colours[1]) * high


def _draw_shape(canvas_HWC: np.ndarray, shape: Shape) -> None:
    size = len(canvas_HWC)
    box = left, top, right, bottom = pixel_box(shape_box(shape), size)
    if left >= right or top >= bottom:
        return
    x, y = _grid(box, size)
    c, s = np.cos(shape.angle), np.sin(shape.angle)
    dx, dy = (x - shape.x) / shape.radius, (y - shape.y) / shape.radius
    u, v = c * dx + s * dy, c * dy - s * dx
    pixel = 1 / (size * shape.radius)
    d = _distance(shape.name, u, v)
    if shape.fill == "hollow":
        d = np.abs(d + HOLLOW_WIDTH) - HOLLOW_WIDTH
    second = rgb(shape.second or shape.colour)
    colour_HWC = rgb(shape.colour) + (second - rgb(shape.colour)) * _pattern(shape.fill, u, v, pixel)[..., None]
    cover = edge(-d, pixel)[..., None]
    patch = canvas_HWC[top:bottom, left:right]
    patch += (colour_HWC - patch) * cover


HOLLOW_WIDTH = 0.08
PATTERN_FREQUENCY = {"striped": 2.5, "dotted": 3.5, "checkered": 1.75}


def _pattern(fill: str, u: np.ndarray, v: np.ndarray, pixel: float) -> np.ndarray:
    """How much of the second colour."""
    if fill not in PATTERN_FREQUENCY:
        return np.zeros_like(u)
    f = PATTERN_FREQUENCY[fill]
    if fill == "striped":
        return 1 - bands(v * f, f * pixel)
    p, q = u * f - np.floor(u * f) - 0.5, v * f - np.floor(v * f) - 0.5
    if fill == "dotted":
        return edge(0.3 - np.hypot(p, q), f * pixel)
    return edge((np.abs(p) - 0.25) * (np.abs(q) - 0.25), 0.25 * f * pixel)


def _distance(name: str, u: np.ndarray, v: np.ndarray) -> np.ndarray:
    """The table between its points, linearly."""
    scale = shapes.TABLE_SIZE / (2 * shapes.TABLE_EXTENT)
    columns, rows = (u + shapes.TABLE_EXTENT) * scale - 0.5, (v + shapes.TABLE_EXTENT) * scale - 0.5
    table = shapes.distance_table()[shapes.NAMES.index(name)]
    return map_coordinates(table, [rows, columns], order=1, mode="nearest")
