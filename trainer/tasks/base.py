"""Declares the methods that the trainer needs of a kind of model, and draws pictures of its work.

The pictures are for TensorBoard, the report and `evaluation/`.
"""

import textwrap
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from data.batch import Batch
from data.examples.examples import MakeExample
from data.examples.transforms import IMAGENET_MEAN, IMAGENET_STD
from data.reading.loader import stack_examples
from models.base import VisionModel
from models.converters.native import model_facts
from privacy.ranks.engine import Engine
from trainer.config.recipe import DataSection
from trainer.tasks.baselines import BlindBaseline

SIDE = 160
"""Pixels of a shown image, whatever the model sees."""
GAP = 8
_TITLE = 20


class Samples(NamedTuple):
    """Holds a model's work on some held-out examples.

    Attributes:
        picture_HWC: one uint8 picture, with a row per example.
        lines: (the model's text, the reference) per example; empty for a model without text.
    """

    picture_HWC: np.ndarray
    lines: list[tuple[str, str]]


class TrainingTask:
    """A kind of model, as a pure function of the recipe.

    Attributes:
        model_class: built from `model_config`.
        loss_name: names the loss on the console: "caption loss".
        unit: names one example, and so the unit of privacy: "one image-text pair".
    """

    kind: str
    loss_name: str
    unit: str
    model_class: type[VisionModel]

    def __init__(
        self,
        model_config: Any,
        size: str,
        data: DataSection | None = None,
        tokenizer_path: Path | None = None,
    ) -> None:
        """
        Args:
            size: names the model's size, for manifests.
            data: fields of examples, and whether they are augmented.
            tokenizer_path: of a model that reads text.
        """
        self.model_config = model_config
        self._size = size
        self._data = data or DataSection(shards="")
        self.tokenizer_path = tokenizer_path or Path()

    def build(
        self,
        generator: torch.Generator,
        *,
        module_hook: Callable[[nn.Module], None] | None = None,
        one_block: bool = False,
    ) -> VisionModel:
        """Returns the model with fresh weights.

        `model(**inputs)` is loss_B, and `model.blocks()` lists its repeated units.

        Args:
            module_hook: called with every module as soon as its own weights are set; shards models
                that do not fit one process.
            one_block: builds only one of the repeated units in each stack: a twin that fits
                anywhere, for checks.
        """
        config = self.model_config
        if one_block:
            stacks = {}
            for field in fields(config):
                part = getattr(config, field.name)
                if hasattr(part, "depth"):
                    stacks[field.name] = replace(part, depth=1)
            config = replace(config, **stacks)
        return self.model_class.build(config, generator=generator, module_hook=module_hook)

    def skeleton(self) -> VisionModel:
        """Returns the model on the meta device: shapes without weights, for planning."""
        with torch.device("meta"):
            return self.model_class(self.model_config)

    def flops_of_an_example(self) -> int:
        """Counts the floating-point operations of one example without privacy, for utilisation.

        Matrix products and attention of forward and backward are counted, on shapes alone; a
        product of two numbers and its sum are two operations.
        """
        inputs = {name: x.to("meta") for name, x in self.synthetic_inputs(1).items()}
        with FlopCounterMode(display=False) as counter:
            self.skeleton()(**inputs).sum().backward()
        return int(counter.get_total_flops())

    def make_example(self, *, train: bool) -> MakeExample:
        """Returns a function that turns raw examples into arrays.

        Augmentation and masks of training come from the example's own key.
        """
        raise NotImplementedError

    def padding(self) -> dict[str, Tensor]:
        """Returns the inputs of one row of padding, by name, (1, ...) each."""
        return dict(stack_examples([], self.make_example(train=True), 1).inputs)

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        """Returns `count` made-up examples as the model takes them, for checks without data."""
        generator = torch.Generator().manual_seed(0)
        side = self.model_config.encoder.image_size
        images_BCHW = torch.randn(count, 3, side, side, generator=generator)
        return {"images_BCHW": images_BCHW, **self._targets(count, generator)}

    def _targets(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """Returns all inputs of the model but the images, for `count` made-up images."""
        return {}

    def facts(self) -> dict[str, Any]:
        """Returns the facts of a checkpoint's manifest from which the model can be built again."""
        return {"model": model_facts(self.model_config, self._size)}

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns the values that held-out evaluation averages: (B,) by name, with "loss".

        Collective, as `samples`.
        """
        return {"loss": engine.module(**inputs)}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Shows the model's work on held-out examples.

        Collective, since sharded engines gather weights in every forward.
        """
        images: list[np.ndarray] = []
        lines: list[tuple[str, str]] = []
        for batch in batches:
            answers = self.answers(engine, batch.inputs)
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                images.append(pixels(batch.inputs["images_BCHW"][row]))
                lines.append(answers[row])
        return Samples(contact_sheet(images, lines), lines)

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Returns the model's text for each example, and the reference; `samples` shows them.

        A model without text overrides `samples`.
        """
        raise NotImplementedError

    def blind_baseline(self) -> BlindBaseline:
        """Returns a baseline that scores this task's held-out examples without a model."""
        raise TypeError(f"{self.kind} has no loss, and so nothing to compare one with")


def pixels(image_CHW: Tensor) -> np.ndarray:
    """Returns the (H, W, 3) uint8 pixels of a normalised image."""
    mean = torch.tensor(IMAGENET_MEAN).view(3, 1, 1)
    std = torch.tensor(IMAGENET_STD).view(3, 1, 1)
    brightness_CHW = (image_CHW.float() * std + mean).clamp(0, 1) * 255
    return brightness_CHW.round().byte().permute(1, 2, 0).numpy()


def contact_sheet(
    images: Sequence[np.ndarray],
    lines: Sequence[tuple[str, str]],
    *,
    side: int = SIDE,
    text_width: int = 480,
) -> np.ndarray:
    """Returns one picture with a row per image, beside the model's caption and the reference.

    Picture and images are (H, W, 3) uint8.
    """
    sheet = Image.new("RGB", (side + text_width, (side + GAP) * len(images)), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    text_left = side + 12
    top = 0
    for image, (generated, reference) in zip(images, lines, strict=True):
        sheet.paste(_shown(image, side), (0, top))
        caption = "model:\n" + _wrapped(generated or "(empty)")
        draw.text((text_left, top + 8), caption, fill="black", font=font)
        reference_text = "reference:\n" + _wrapped(reference)
        draw.text((text_left, top + side // 2 + 8), reference_text, fill="dimgray", font=font)
        top += side + GAP
    return np.asarray(sheet)


def picture_grid(
    titles: Sequence[str], rows: Sequence[Sequence[np.ndarray]], *, side: int = SIDE
) -> np.ndarray:
    """Returns one picture with rows of images under the titles of their columns.

    Picture and images are (H, W, 3) uint8; without rows the picture is (0, 0, 3).
    """
    if not rows:
        return np.zeros((0, 0, 3), np.uint8)
    cell = side + GAP
    width = cell * len(titles) + GAP
    height = cell * len(rows) + _TITLE + GAP
    sheet = Image.new("RGB", (width, height), "white")
    draw = ImageDraw.Draw(sheet)
    font = ImageFont.load_default(size=14)
    for column, title in enumerate(titles):
        draw.text((GAP + cell * column, GAP // 2), title, fill="black", font=font)
    for number, row in enumerate(rows):
        for column, image in enumerate(row):
            sheet.paste(_shown(image, side), (GAP + cell * column, _TITLE + GAP + cell * number))
    return np.asarray(sheet)


def _shown(image_HWC: np.ndarray, side: int) -> Image.Image:
    """Returns the image at (side, side) pixels.

    A small image is not interpolated: so a blur that a reader sees is the model's.
    """
    is_small = max(image_HWC.shape[:2]) <= side
    resampling = Image.Resampling.NEAREST if is_small else Image.Resampling.LANCZOS
    return Image.fromarray(image_HWC).resize((side, side), resampling)


def _wrapped(text: str) -> str:
    """Returns the first three lines of a text, wrapped at 48 letters."""
    return "\n".join(textwrap.wrap(text, 48)[:3])
