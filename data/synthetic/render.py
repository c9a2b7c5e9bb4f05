"""Draws scenes: textures from back to front, then shapes, each as one array operation per colour channel."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.synthetic import shapes
from data.synthetic.fields import FIELD_BY_NAME, bands, edge, fract, length, rotated
from data.synthetic.scene import Scene, Shape, Texture
from data.synthetic.vocabulary import rgb

_OUTLINE_REACH = 1.06
"""No outline goes farther from its centre than this, in units of the shape's radius."""
_HOLLOW_WIDTH = 0.08
_SIDE, _TEXT_LINES, _LINE = 200, 5, 15
"""Pixels of a picture on a contact sheet, lines of its caption, and pixels of a line."""
_PATTERN_FREQUENCY = {"striped": 2.5, "dotted": 3.5, "checkered": 1.75}


def draw(scene: Scene, image_size: int) -> np.ndarray:
    """The picture of a scene, uint8 (image_size, image_size, 3)."""
    canvas_CHW = np.zeros((3, image_size, image_size), dtype=np.float32)
    for texture in scene.textures:
        _draw_texture(canvas_CHW, texture)
    for shape in scene.shapes:
        _draw_shape(canvas_CHW, shape)
    return np.stack(list(np.rint(np.clip(canvas_CHW, 0, 1) * 255).astype(np.uint8)), axis=-1)


def _pixel_box(box: tuple[float, float, float, float], size: int) -> tuple[int, int, int, int]:
    """Left, top, right, bottom in whole pixels inside of the picture."""
    left, top, right, bottom = (min(max(round(value * size), 0), size) for value in box)
    return left, top, right, bottom


def _centres(start: int, stop: int, size: int) -> np.ndarray:
    """Centres of pixels along one side, in image sides, float32."""
    return (np.arange(start, stop, dtype=np.float32) + np.float32(0.5)) / np.float32(size)


def _draw_texture(canvas_CHW: np.ndarray, texture: Texture) -> None:
    size = canvas_CHW.shape[-1]
    left, top, right, bottom = _pixel_box(texture.box, size)
    if texture.program == "plain":
        canvas_CHW[:, top:bottom, left:right] = rgb(texture.colours[0])[:, None, None]
        return
    values = np.zeros(8, dtype=np.float32)
    values[: len(texture.values)] = texture.values
    x_W, y_H1 = _centres(left, right, size), _centres(top, bottom, size)[:, None]
    t_HW = FIELD_BY_NAME[texture.program](x_W, y_H1, values, 1 / size)
    low_HW, high_HW = np.clip(2 * t_HW, 0, 1), np.clip(2 * t_HW - 1, 0, 1)
    first_C, last_C = rgb(texture.colours[0]), rgb(texture.colours[-1])
    middle_C = rgb(texture.colours[1]) if len(texture.colours) == 3 else (first_C + last_C) / 2
    for channel_HW, first, middle, last in zip(canvas_CHW, first_C, middle_C, last_C, strict=True):
        channel_HW[top:bottom, left:right] = first + (middle - first) * low_HW + (last - middle) * high_HW


def _draw_shape(canvas_CHW: np.ndarray, shape: Shape) -> None:
    size = canvas_CHW.shape[-1]
    pixel = 1 / (size * shape.radius)
    reach = shape.radius * min(_OUTLINE_REACH + pixel, shapes.TABLE_EXTENT)
    left, top, right, bottom = _pixel_box((shape.x - reach, shape.y - reach, shape.x + reach, shape.y + reach), size)
    if left >= right or top >= bottom:
        return
    dx_W = (_centres(left, right, size) - shape.x) / shape.radius
    dy_H1 = (_centres(top, bottom, size)[:, None] - shape.y) / shape.radius
    u_HW, v_HW = rotated(dx_W, dy_H1, shape.angle)
    # The shape's table of distances, linearly between its points.
    x_HW, y_HW = (
        np.clip((at / shapes.TABLE_EXTENT + 1) * (shapes.TABLE_SIZE / 2) - 0.5, 0, shapes.TABLE_SIZE - 1.001)
        for at in (u_HW, v_HW)
    )
    column_HW, row_HW = x_HW.astype(np.intp), y_HW.astype(np.intp)
    x_HW, y_HW = x_HW - column_HW.astype(np.float32), y_HW - row_HW.astype(np.float32)
    cell_HW = row_HW * shapes.TABLE_SIZE + column_HW
    table = shapes.distance_table()[shapes.NAMES.index(shape.name)]
    above_HW, below_HW = (
        table.take(cell) * (1 - x_HW) + table.take(cell + 1) * x_HW for cell in (cell_HW, cell_HW + shapes.TABLE_SIZE)
    )
    d_HW = above_HW * (1 - y_HW) + below_HW * y_HW
    if shape.fill == "hollow":
        d_HW = np.abs(d_HW + _HOLLOW_WIDTH) - _HOLLOW_WIDTH
    cover_HW = edge(-d_HW, pixel)
    share_HW = _pattern(shape.fill, u_HW, v_HW, pixel)
    first, second = rgb(shape.colour), rgb(shape.second or shape.colour)
    for channel_HW, here, other in zip(canvas_CHW, first, second - first, strict=True):
        patch_HW = channel_HW[top:bottom, left:right]
        patch_HW += (here + other * share_HW - patch_HW) * cover_HW


def _pattern(fill: str, u: np.ndarray, v: np.ndarray, pixel: float) -> np.ndarray | float:
    """How much of the second colour."""
    if fill not in _PATTERN_FREQUENCY:
        return 0.0
    f = _PATTERN_FREQUENCY[fill]
    if fill == "striped":
        return 1 - bands(v * f, f * pixel)
    p, q = fract(u * f) - 0.5, fract(v * f) - 0.5
    if fill == "dotted":
        return edge(0.3 - length(p, q), f * pixel)
    return edge((np.abs(p) - 0.25) * (np.abs(q) - 0.25), 0.25 * f * pixel)


def contact_sheet(images: Sequence[np.ndarray], captions: Sequence[str], *, columns: int = 6) -> Image.Image:
    """Arranges pictures (uint8 (H, W, 3)) in columns, each with its caption below."""
    rows = -(-len(images) // columns)
    cell = (_SIDE + 10, _SIDE + _TEXT_LINES * _LINE + 10)
    sheet = Image.new("RGB", (columns * cell[0], rows * cell[1]), (255, 255, 255))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = place % columns * cell[0] + 5, place // columns * cell[1] + 5
        sheet.paste(Image.fromarray(image).resize((_SIDE, _SIDE), Image.Resampling.LANCZOS), (left, top))
        lines = textwrap.wrap(caption, 32)[:_TEXT_LINES]
        draw.multiline_text((left, top + _SIDE + 3), "\n".join(lines), fill=(0, 0, 0), font=font, spacing=1)
    return sheet
