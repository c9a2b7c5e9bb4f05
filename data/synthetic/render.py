"""Draws scenes: textures from back to front, then shapes, each as one array operation per colour channel."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.synthetic import fields, shapes
from data.synthetic.fields import bands, edge, fract, length, rotated
from data.synthetic.scene import Scene, Shape, Texture
from data.synthetic.vocabulary import rgb

_OUTLINE_REACH = 1.06
"""No outline goes farther from its centre than this, in units of the shape's radius."""
_HOLLOW_WIDTH = 0.08


def draw(scene: Scene, image_size: int) -> np.ndarray:
    """The picture of a scene, uint8 (image_size, image_size, 3)."""
    canvas_CHW = np.zeros((3, image_size, image_size), dtype=np.float32)
    for texture in scene.textures:
        draw_texture(canvas_CHW, texture)
    for shape in scene.shapes:
        draw_shape(canvas_CHW, shape)
    return np.stack(list(np.rint(np.clip(canvas_CHW, 0, 1) * 255).astype(np.uint8)), axis=-1)


def part_of(
    canvas_CHW: np.ndarray, box: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """The pixels in a box (left, top, right, bottom); the x (W,) and y (H, 1) of their centres, in image sides, float32."""
    size = canvas_CHW.shape[-1]
    left, top, right, bottom = (min(max(round(value * size), 0), size) for value in box)
    centres = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    return canvas_CHW[:, top:bottom, left:right], centres[left:right], centres[top:bottom, None]


def draw_texture(canvas_CHW: np.ndarray, texture: Texture) -> None:
    part_CHW, x_W, y_H1 = part_of(canvas_CHW, texture.box)
    if texture.program == "plain":
        part_CHW[:] = rgb(texture.colours[0])[:, None, None]
        return
    values = np.zeros(8, dtype=np.float32)
    values[: len(texture.values)] = texture.values
    t_HW = getattr(fields, texture.program)(x_W, y_H1, values, 1 / canvas_CHW.shape[-1])
    low_HW, high_HW = np.clip(2 * t_HW, 0, 1), np.clip(2 * t_HW - 1, 0, 1)
    first_C, last_C = rgb(texture.colours[0]), rgb(texture.colours[-1])
    middle_C = rgb(texture.colours[1]) if len(texture.colours) == 3 else (first_C + last_C) / 2
    for channel_HW, first, middle, last in zip(part_CHW, first_C, middle_C, last_C, strict=True):
        channel_HW[:] = first + (middle - first) * low_HW + (last - middle) * high_HW


def draw_shape(canvas_CHW: np.ndarray, shape: Shape) -> None:
    pixel = 1 / (canvas_CHW.shape[-1] * shape.radius)
    reach = shape.radius * min(_OUTLINE_REACH + pixel, shapes.TABLE_EXTENT)
    box = (shape.x - reach, shape.y - reach, shape.x + reach, shape.y + reach)
    part_CHW, x_W, y_H1 = part_of(canvas_CHW, box)
    u_HW, v_HW = rotated(
        (x_W - shape.x) / shape.radius, (y_H1 - shape.y) / shape.radius, shape.angle
    )
    # The shape's table of distances, linearly between its points.
    x_HW, y_HW = (
        np.clip(
            (at / shapes.TABLE_EXTENT + 1) * (shapes.TABLE_SIZE / 2) - 0.5,
            0,
            shapes.TABLE_SIZE - 1.001,
        )
        for at in (u_HW, v_HW)
    )
    column_HW, row_HW = x_HW.astype(np.intp), y_HW.astype(np.intp)
    x_HW, y_HW = x_HW - column_HW.astype(np.float32), y_HW - row_HW.astype(np.float32)
    cell_HW = row_HW * shapes.TABLE_SIZE + column_HW
    table = shapes.distance_table()[shapes.NAMES.index(shape.name)]
    above_HW, below_HW = (
        table.take(cell) * (1 - x_HW) + table.take(cell + 1) * x_HW
        for cell in (cell_HW, cell_HW + shapes.TABLE_SIZE)
    )
    d_HW = above_HW * (1 - y_HW) + below_HW * y_HW
    if shape.fill == "hollow":
        d_HW = np.abs(d_HW + _HOLLOW_WIDTH) - _HOLLOW_WIDTH
    cover_HW = edge(-d_HW, pixel)
    f = {"striped": 2.5, "dotted": 3.5, "checkered": 1.75}.get(shape.fill, 0.0)
    share_HW: np.ndarray | float = 0.0  # how much of the second colour
    if shape.fill == "striped":
        share_HW = 1 - bands(v_HW * f, f * pixel)
    elif f:
        p_HW, q_HW = fract(u_HW * f) - 0.5, fract(v_HW * f) - 0.5
        is_dotted, squares_HW = (
            shape.fill == "dotted",
            (np.abs(p_HW) - 0.25) * (np.abs(q_HW) - 0.25),
        )
        share_HW = (
            edge(0.3 - length(p_HW, q_HW), f * pixel)
            if is_dotted
            else edge(squares_HW, 0.25 * f * pixel)
        )
    first, second = rgb(shape.colour), rgb(shape.second or shape.colour)
    for patch_HW, here, other in zip(part_CHW, first, second - first, strict=True):
        patch_HW += (here + other * share_HW - patch_HW) * cover_HW


def contact_sheet(
    images: Sequence[np.ndarray], captions: Sequence[str], *, columns: int = 6
) -> Image.Image:
    """Arranges pictures (uint8 (H, W, 3)) in columns, each with its caption below."""
    side, text_lines, line = (
        200,
        5,
        15,
    )  # pixels of a picture, lines of its caption, and pixels of a line
    rows = -(-len(images) // columns)
    cell = (side + 10, side + text_lines * line + 10)
    sheet = Image.new("RGB", (columns * cell[0], rows * cell[1]), (255, 255, 255))
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=12)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        left, top = place % columns * cell[0] + 5, place // columns * cell[1] + 5
        sheet.paste(
            Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS), (left, top)
        )
        lines = textwrap.wrap(caption, 32)[:text_lines]
        draw.multiline_text(
            (left, top + side + 3), "\n".join(lines), fill=(0, 0, 0), font=font, spacing=1
        )
    return sheet
