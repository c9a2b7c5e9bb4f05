"""A contact sheet: pictures with their captions, to be looked at."""

import textwrap
from collections.abc import Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

_SIDE, _TEXT_LINES, _LINE = 200, 5, 15


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
