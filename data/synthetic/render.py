"""Draws scenes: textures from back to front, then shapes, with one array operation a channel."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.synthetic import fields, shapes
from data.synthetic.fields import bands, edge, fract, length, rotate
from data.synthetic.scene import Scene, Shape, Texture
from data.synthetic.vocabulary import rgb

_OUTLINE_REACH = 1.06
"""Limit of an outline's distance from its centre, in units of the shape's radius."""
_HOLLOW_WIDTH = 0.08


def draw(scene: Scene, image_size: int) -> np.ndarray:
    """Returns the picture of a scene, uint8 (image_size, image_size, 3)."""
    canvas_CHW = np.zeros((3, image_size, image_size), dtype=np.float32)
    for texture in scene.textures:
        draw_texture(canvas_CHW, texture)
    for shape in scene.shapes:
        draw_shape(canvas_CHW, shape)
    picture_CHW = np.rint(np.clip(canvas_CHW, 0, 1) * 255).astype(np.uint8)
    return np.stack(list(picture_CHW), axis=-1)


def part_of(
    canvas_CHW: np.ndarray, box: Sequence[float]
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Returns the pixels in a box, and the x (W,) and y (H, 1) of their centres.

    Args:
        box: left, top, right and bottom edge, in image sides, as x and y are.
    """
    size = canvas_CHW.shape[-1]
    edges = [min(max(round(share * size), 0), size) for share in box]
    left_edge, top_edge, right_edge, bottom_edge = edges
    centres = (np.arange(size, dtype=np.float32) + np.float32(0.5)) / np.float32(size)
    part_CHW = canvas_CHW[:, top_edge:bottom_edge, left_edge:right_edge]
    x_W = centres[left_edge:right_edge]
    y_H1 = centres[top_edge:bottom_edge, None]
    return part_CHW, x_W, y_H1


def draw_texture(canvas_CHW: np.ndarray, texture: Texture) -> None:
    part_CHW, x_W, y_H1 = part_of(canvas_CHW, texture.box)
    if texture.program == "plain":
        part_CHW[:] = rgb(texture.colours[0])[:, None, None]
        return
    parameters = np.zeros(8, dtype=np.float32)
    parameters[: len(texture.values)] = texture.values
    program = getattr(fields, texture.program)
    number_HW = program(x_W, y_H1, parameters, 1 / canvas_CHW.shape[-1])
    # Numbers up to 1/2 lead from the first colour to the middle, those above it to the last.
    low_HW = np.clip(2 * number_HW, 0, 1)
    high_HW = np.clip(2 * number_HW - 1, 0, 1)
    first_C = rgb(texture.colours[0])
    last_C = rgb(texture.colours[-1])
    middle_C = rgb(texture.colours[1]) if len(texture.colours) == 3 else (first_C + last_C) / 2
    for channel_HW, first, middle, last in zip(part_CHW, first_C, middle_C, last_C, strict=True):
        channel_HW[:] = first + (middle - first) * low_HW + (last - middle) * high_HW


def draw_shape(canvas_CHW: np.ndarray, shape: Shape) -> None:
    # The size of a pixel in units of the shape's radius.
    pixel = 1 / (canvas_CHW.shape[-1] * shape.radius)
    reach = shape.radius * min(_OUTLINE_REACH + pixel, shapes.TABLE_EXTENT)
    box = (shape.x - reach, shape.y - reach, shape.x + reach, shape.y + reach)
    part_CHW, x_W, y_H1 = part_of(canvas_CHW, box)
    shape_x_W = (x_W - shape.x) / shape.radius
    shape_y_H1 = (y_H1 - shape.y) / shape.radius
    u_HW, v_HW = rotate(shape_x_W, shape_y_H1, shape.angle)
    # The shape's table of distances is interpolated linearly between its points.
    last_place = shapes.TABLE_SIZE - 1.001
    half_size = shapes.TABLE_SIZE / 2
    x_HW = np.clip((u_HW / shapes.TABLE_EXTENT + 1) * half_size - 0.5, 0, last_place)
    y_HW = np.clip((v_HW / shapes.TABLE_EXTENT + 1) * half_size - 0.5, 0, last_place)
    column_HW = x_HW.astype(np.intp)
    row_HW = y_HW.astype(np.intp)
    right_share_HW = x_HW - column_HW.astype(np.float32)
    lower_share_HW = y_HW - row_HW.astype(np.float32)
    upper_cell_HW = row_HW * shapes.TABLE_SIZE + column_HW
    lower_cell_HW = upper_cell_HW + shapes.TABLE_SIZE
    table = shapes.distance_table()[shapes.NAMES.index(shape.name)]
    rows = []
    for cell_HW in (upper_cell_HW, lower_cell_HW):
        left_part_HW = table.take(cell_HW) * (1 - right_share_HW)
        right_part_HW = table.take(cell_HW + 1) * right_share_HW
        rows.append(left_part_HW + right_part_HW)
    upper_HW, lower_HW = rows
    distance_HW = upper_HW * (1 - lower_share_HW) + lower_HW * lower_share_HW
    if shape.fill == "hollow":
        distance_HW = np.abs(distance_HW + _HOLLOW_WIDTH) - _HOLLOW_WIDTH
    cover_HW = edge(-distance_HW, pixel)
    frequency = {"striped": 2.5, "dotted": 3.5, "checkered": 1.75}.get(shape.fill, 0.0)
    # The share of the second colour.
    share_HW: np.ndarray | float = 0.0
    if shape.fill == "striped":
        share_HW = 1 - bands(v_HW * frequency, frequency * pixel)
    elif frequency:
        cell_u_HW = fract(u_HW * frequency) - 0.5
        cell_v_HW = fract(v_HW * frequency) - 0.5
        if shape.fill == "dotted":
            share_HW = edge(0.3 - length(cell_u_HW, cell_v_HW), frequency * pixel)
        else:
            squares_HW = (np.abs(cell_u_HW) - 0.25) * (np.abs(cell_v_HW) - 0.25)
            share_HW = edge(squares_HW, 0.25 * frequency * pixel)
    first_C = rgb(shape.colour)
    second_C = rgb(shape.second or shape.colour)
    for patch_HW, first, change in zip(part_CHW, first_C, second_C - first_C, strict=True):
        patch_HW += (first + change * share_HW - patch_HW) * cover_HW


def contact_sheet(
    images: Sequence[np.ndarray], captions: Sequence[str], *, columns: int = 6
) -> Image.Image:
    """Arranges pictures (uint8 (H, W, 3)) in columns, each with its caption below."""
    side = 200
    text_lines = 5
    line_height = 15
    margin = 5
    rows = -(-len(images) // columns)
    cell_width = side + 2 * margin
    cell_height = side + text_lines * line_height + 2 * margin
    sheet = Image.new("RGB", (columns * cell_width, rows * cell_height), (255, 255, 255))
    drawing = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=12)
    for place, (image, caption) in enumerate(zip(images, captions, strict=True)):
        x = place % columns * cell_width + margin
        y = place // columns * cell_height + margin
        picture = Image.fromarray(image).resize((side, side), Image.Resampling.LANCZOS)
        sheet.paste(picture, (x, y))
        text = "\n".join(textwrap.wrap(caption, 32)[:text_lines])
        drawing.multiline_text((x, y + side + 3), text, fill=(0, 0, 0), font=font, spacing=1)
    return sheet
