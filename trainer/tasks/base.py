"""What the trainer asks of a kind of model; and pictures of its work, for TensorBoard, the report and `evaluation/`."""

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
from trainer.tasks.blind import BlindBaseline

SIDE = 160
"""Pixels of a shown image, whatever the model sees."""
GAP = 8
_TITLE = 20


class Samples(NamedTuple):
    """What a model makes of some held-out examples.

    Attributes:
        picture_HWC: one uint8 picture of all of them, a row each.
        lines: (the model's, the reference) as text, or empty where there is nothing to read.
    """

    picture_HWC: np.ndarray
    lines: list[tuple[str, str]]


class TrainingTask:
    """A kind of model. Everything is a pure function of the recipe.

    Attributes:
        model_class: built from `model_config`.
        loss_name: what the loss is, for people: "caption loss".
        unit: what one example is, and so the unit of privacy: "one image-text pair".
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
        """The model with fresh weights; `model(**inputs)` is loss_B and `model.blocks()` its repeated units.

        Args:
            module_hook: called with every module as soon as its own weights are set; shards models that do not fit one process.
            one_block: only one of the repeated units in each stack: a twin that fits anywhere, for checks.
        """
        config = self.model_config
        if one_block:
            parts = {part.name: getattr(config, part.name) for part in fields(config)}
            stacks = {
                name: replace(part, depth=1)
                for name, part in parts.items()
                if hasattr(part, "depth")
            }
            config = replace(config, **stacks)
        return self.model_class.build(config, generator=generator, module_hook=module_hook)

    def skeleton(self) -> VisionModel:
        """The model on the meta device: shapes without weights, for planning."""
        with torch.device("meta"):
            return self.model_class(self.model_config)

    def flops_of_an_example(self) -> int:
        """Counts floating-point operations of one example's forward and backward without privacy, for utilisation.

        Those of matrix products and attention are counted, on shapes alone; a product of two numbers and its sum are two.
        """
        inputs = {name: x.to("meta") for name, x in self.synthetic_inputs(1).items()}
        with FlopCounterMode(display=False) as counter:
            self.skeleton()(**inputs).sum().backward()
        return int(counter.get_total_flops())

    def make_example(self, *, train: bool) -> MakeExample:
        """Turns raw examples into arrays; with augmentation, masks and the like from the example's own key for training."""
        raise NotImplementedError

    def padding(self) -> dict[str, Tensor]:
        """Returns the row that stands where there is no example, (1, ...) by input."""
        return dict(stack_examples([], self.make_example(train=True), 1).inputs)

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        """`count` made-up examples as the model takes them, for checks before any data is touched."""
        generator, side = torch.Generator().manual_seed(0), self.model_config.encoder.image_size
        images_BCHW = torch.randn(count, 3, side, side, generator=generator)
        return {"images_BCHW": images_BCHW, **self._targets(count, generator)}

    def _targets(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        """What belongs to `count` made-up images: all other inputs of the model."""
        return {}

    def facts(self) -> dict[str, Any]:
        """What a checkpoint's manifest says about the model; enough to build it again."""
        return {"model": model_facts(self.model_config, self._size)}

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """What held-out evaluation averages over examples: (B,) by name, "loss" among them. Collective, as `samples`."""
        return {"loss": engine.module(**inputs)}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Shows the model's work on held-out examples. Collective: sharded engines gather weights in every forward."""
        images: list[np.ndarray] = []
        lines: list[tuple[str, str]] = []
        for batch in batches:
            answers = self.answers(engine, batch.inputs)
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                images.append(pixels(batch.inputs["images_BCHW"][row]))
                lines.append(answers[row])
        return Samples(contact_sheet(images, lines), lines)

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """What the model says of each example, and the reference; for `samples` of models that speak."""
        raise NotImplementedError

    def blind_baseline(self) -> BlindBaseline:
        """What one gets on this task's held-out examples without a model."""
        raise TypeError(f"{self.kind} has no loss, and so nothing to compare one with")


def pixels(image_CHW: Tensor) -> np.ndarray:
    """(H, W, 3) uint8 of a normalised image."""
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return (
        ((image_CHW.float() * std + mean).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()
    )


def contact_sheet(
    images: Sequence[np.ndarray],
    lines: Sequence[tuple[str, str]],
    *,
    side: int = SIDE,
    text_width: int = 480,
) -> np.ndarray:
    """One picture (H, W, 3 uint8): a row per (H, W, 3 uint8) image with the model's caption and the reference."""
    sheet = Image.new("RGB", (side + text_width, (side + GAP) * len(images)), "white")
    draw, font = ImageDraw.Draw(sheet), ImageFont.load_default(size=14)
    for row, (image, (generated, reference)) in enumerate(zip(images, lines, strict=True)):
        top = row * (side + GAP)
        sheet.paste(_shown(image, side), (0, top))
        draw.text(
            (side + 12, top + 8),
            "model:\n" + _wrapped(generated or "(empty)"),
            fill="black",
            font=font,
        )
        draw.text(
            (side + 12, top + side // 2 + 8),
            "reference:\n" + _wrapped(reference),
            fill="dimgray",
            font=font,
        )
    return np.asarray(sheet)


def picture_grid(
    titles: Sequence[str], rows: Sequence[Sequence[np.ndarray]], *, side: int = SIDE
) -> np.ndarray:
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
