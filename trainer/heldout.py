"""Held-out caption loss and sample captions: what a run shows of its progress without touching training data."""

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image, ImageDraw

from data.batch import Batch
from data.examples import CaptionExample
from data.loader import eval_batches
from data.tar_index import ExampleTable
from data.transforms import IMAGENET_MEAN, IMAGENET_STD
from models.generation import greedy_captions
from trainer import distributed
from trainer.engines.base import Engine


@dataclass(frozen=True)
class SampleCaption:
    """A held-out image (H, W, 3 uint8), its own caption and the model's."""

    image_HWC: np.ndarray
    reference: str
    generated: str


class Heldout:
    """Evaluates a captioner on held-out pairs. Every method is collective: sharded engines gather weights in it."""

    def __init__(
        self, table: ExampleTable, make_example: CaptionExample, *, num_examples: int | None, micro_batch_size: int
    ) -> None:
        self._table = table
        self._make_example = make_example
        self._num_examples = min(num_examples or len(table), len(table))
        self._micro_batch_size = micro_batch_size

    def _batches(self, count: int, rank: int, world_size: int) -> Iterator[Batch]:
        return eval_batches(
            self._table, self._make_example, self._micro_batch_size, rank, world_size, num_examples=count
        )

    @torch.no_grad()
    def loss(self, engine: Engine) -> float:
        """Mean over held-out examples of the caption loss (nats per token, averaged within a caption first)."""
        was_training = engine.module.training
        engine.module.eval()
        total = torch.zeros(2, dtype=torch.float64)
        for batch in self._batches(self._num_examples, distributed.rank(), distributed.world_size()):
            loss_B = engine.module(**to_device(batch, engine)).double().cpu()
            total[0] += loss_B[~batch.is_padding_B].sum()
            total[1] += int((~batch.is_padding_B).sum())
        engine.module.train(was_training)
        distributed.all_reduce_sum(total)
        return float(total[0] / total[1])

    @torch.no_grad()
    def captions(self, engine: Engine, count: int) -> list[SampleCaption]:
        """Greedy captions of the first `count` held-out images, made by all ranks alike."""
        samples: list[SampleCaption] = []
        tokenizer = self._make_example.tokenizer
        for batch in self._batches(count, 0, 1):
            images = to_device(batch, engine)["images_BCHW"]
            tokens = greedy_captions(engine.module, images, max_tokens=self._make_example.num_tokens - 1).cpu()
            for row in range(len(tokens)):
                if not batch.is_padding_B[row]:
                    samples.append(
                        SampleCaption(
                            _pixels(batch.inputs["images_BCHW"][row].float()),
                            tokenizer.decode(batch.inputs["tokens_BL"][row].tolist()),
                            tokenizer.decode(tokens[row].tolist()),
                        )
                    )
        return samples[:count]


def to_device(batch: Batch, engine: Engine) -> dict[str, torch.Tensor]:
    """The task's inputs on the engine's device; floating point ones in its compute dtype."""
    return {
        name: value.to(engine.device, engine.compute_dtype if value.is_floating_point() else None, non_blocking=True)
        for name, value in batch.inputs.items()
    }


def _pixels(image_CHW: torch.Tensor) -> np.ndarray:
    mean, std = (torch.tensor(v).view(3, 1, 1) for v in (IMAGENET_MEAN, IMAGENET_STD))
    return ((image_CHW * std + mean).clamp(0, 1) * 255).round().byte().permute(1, 2, 0).numpy()


def contact_sheet(samples: list[SampleCaption], *, side: int = 160, text_width: int = 480) -> np.ndarray:
    """One picture (H, W, 3 uint8): a row per sample with the image, the model's caption and the reference."""
    sheet = Image.new("RGB", (side + text_width, (side + 8) * len(samples)), "white")
    draw = ImageDraw.Draw(sheet)
    wrap: Callable[[str], str] = lambda text: "\n".join(_wrapped(text, 56))  # noqa: E731
    for row, sample in enumerate(samples):
        top = row * (side + 8)
        sheet.paste(Image.fromarray(sample.image_HWC).resize((side, side), Image.Resampling.BICUBIC), (0, top))
        draw.text((side + 12, top + 8), "model:\n" + wrap(sample.generated or "(empty)"), fill="black")
        draw.text((side + 12, top + side // 2 + 8), "reference:\n" + wrap(sample.reference), fill="gray")
    return np.asarray(sheet)


def _wrapped(text: str, width: int) -> list[str]:
    import textwrap

    return textwrap.wrap(text, width)[:4]
