"""Do greedy captions say what the true captions say, and a sheet on which to see it."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from data.examples.tokenizer import CaptionTokenizer
from data.examples.transforms import denormalize
from evaluation.captions import CaptionWriter, usable_batches
from evaluation.options import CaptionedOptions
from evaluation.sources import open_source
from models.captioner import Captioner

BATCH_SIZE = 250
_SIDE, _MARGIN, _LINE = 196, 10, 20
_RIGHT, _WRONG, _TRUTH = (0, 110, 50), (180, 30, 30), (70, 70, 70)


class Answer(NamedTuple):
    """
    Attributes:
        image_HWC: the picture as the model sees it, uint8.
        caption: the model's greedy caption.
        truth: the first true caption.
    """

    image_HWC: np.ndarray
    caption: str
    truth: str

    @property
    def is_right(self) -> bool:
        """The same words in the same order, whatever their case."""
        return self.caption.lower().split() == self.truth.lower().split()


def greedy_answers(model: Captioner, tokenizer: CaptionTokenizer, pattern: str, *, cache: Path) -> list[Answer]:
    """What the model says of every picture in the shards that has a caption and can be decoded.

    Args:
        pattern: as `data.index.shards.find_shards` takes it, relative to the working directory.
        cache: a folder for the shards' index.

    Raises:
        DataError, ReadError: the shards are not there, or cannot be read.
    """
    options = CaptionedOptions(cache=cache, batch_size=BATCH_SIZE)
    writer, source, found = CaptionWriter(model, tokenizer), open_source(f"shards:{pattern}", options), []
    for images_BCHW, examples, _ in usable_batches(model, source, options):
        for image_CHW, example, said in zip(images_BCHW.cpu().numpy(), examples, writer(images_BCHW), strict=True):
            if example.captions:
                found.append(Answer(denormalize(image_CHW), said.text, example.captions[0]))
    return found


def answer_sheet(answers: Sequence[Answer], title: str, *, columns: int = 6) -> Image.Image:
    """Pictures with the model's caption (green where it is right, red where it is not) and the truth below each."""
    cell = _SIDE + 2 * _MARGIN, _SIDE + 2 * _LINE + 2 * _MARGIN
    rows = -(-len(answers) // columns)
    sheet = Image.new("RGB", (columns * cell[0], rows * cell[1] + 2 * _LINE), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    draw.text((_MARGIN, _LINE // 2), title, fill="black", font=ImageFont.load_default(size=16))
    for place, answer in enumerate(answers):
        left, top = place % columns * cell[0] + _MARGIN, place // columns * cell[1] + 2 * _LINE
        picture = Image.fromarray(answer.image_HWC).resize((_SIDE, _SIDE), Image.Resampling.NEAREST)
        sheet.paste(picture, (left, top))
        for line, (text, colour) in enumerate(
            (("model: " + answer.caption, _RIGHT if answer.is_right else _WRONG), ("truth: " + answer.truth, _TRUTH))
        ):
            draw.text((left, top + _SIDE + 4 + line * _LINE), _shortened(text, font), fill=colour, font=font)
    return sheet


def _shortened(text: str, font: ImageFont.FreeTypeFont | ImageFont.ImageFont) -> str:
    """As much of a long caption as fits below its picture."""
    while font.getlength(text) > _SIDE + _MARGIN:
        text = text.removesuffix("...")[:-1] + "..."
    return text
