"""Pictures of what a model makes of held-out examples, for TensorBoard, the report and `evaluation/`."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

SIDE = 160
"""Pixels of a shown image, whatever the model sees."""
GAP = 8
_TITLE = 20


def contact_sheet(
    images: Sequence[np.ndarray], lines: Sequence[tuple[str, str]], *, side: int = SIDE, text_width: int = 480
) -> np.ndarray:
    """One picture (H, W, 3 uint8): a row per (H, W, 3 uint8) image with the model's caption and the reference."""
    sheet = Image.new("RGB", (side + text_width, (side + GAP) * len(images)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for row, (image, (generated, reference)) in enumerate(zip(images, lines, strict=True)):
        top = row * (side + GAP)
        sheet.paste(_shown(image, side), (0, top))
        draw.text((side + 12, top + 8), "model:\n" + _wrapped(generated or "(empty)"), fill="black", font=font)
        draw.text((side + 12, top + side // 2 + 8), "reference:\n" + _wrapped(reference), fill="dimgray", font=font)
    return np.asarray(sheet)


def picture_grid(titles: Sequence[str], rows: Sequence[Sequence[np.ndarray]], *, side: int = SIDE) -> np.ndarray:
    """One picture (H, W, 3 uint8): rows of (H, W, 3 uint8) images under the titles of their columns; (0, 0, 3) for none."""
    if not rows:
        return np.zeros((0, 0, 3), np.uint8)
    cell = side + GAP
    sheet = Image.new("RGB", (cell * len(titles) + GAP, cell * len(rows) + _TITLE + GAP), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for column, title in enumerate(titles):
        draw.text((GAP + cell * column, GAP // 2), title, fill="black", font=font)
    for number, row in enumerate(rows):
        for column, image in enumerate(row):
            sheet.paste(_shown(image, side), (GAP + cell * column, _TITLE + GAP + cell * number))
    return np.asarray(sheet)


def _shown(image_HWC: np.ndarray, side: int) -> Image.Image:
    """Small images keep their pixels: what is blurred is then the model's doing."""
    smaller = max(image_HWC.shape[:2]) <= side
    how = Image.Resampling.NEAREST if smaller else Image.Resampling.LANCZOS
    return Image.fromarray(image_HWC).resize((side, side), how)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 48)[:3])
