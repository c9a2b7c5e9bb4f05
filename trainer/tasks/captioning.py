"""Image captioning: DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506)."""

import hashlib
import textwrap
from collections.abc import Callable, Iterable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from PIL import Image, ImageDraw
from torch import Tensor, nn

from data.batch import Batch
from data.examples import CaptionExample
from data.tokenizer import CaptionTokenizer
from models.captioner import Captioner, build_captioner
from models.config import captioner_config
from models.generation import greedy_captions
from trainer.config import RunConfig
from trainer.engines.base import Engine
from trainer.errors import ConfigError
from trainer.tasks.base import Samples, pixels, to_device, with_one_block


class CaptioningTask:
    """See `trainer.tasks.base.TrainingTask`."""

    kind = "captioner"
    loss_name = "caption loss"

    def __init__(self, config: RunConfig, root: Path) -> None:
        self._size, self._data = config.model.size, config.data
        self.tokenizer_path = root / config.data.tokenizer
        self.tokenizer = CaptionTokenizer.from_file(self.tokenizer_path)
        from_data = {
            "image_size": config.data.image_size,
            "num_tokens": config.data.num_tokens,
            "vocab_size": self.tokenizer.vocab_size,
            "pad_id": self.tokenizer.pad_id,
            "bos_id": self.tokenizer.bos_id,
            "eos_id": self.tokenizer.eos_id,
        }
        self.model_config = captioner_config(self._size, **{**config.model.overrides, **from_data})
        if self.model_config.parallel_share > 0 and config.data.bucket_captions:
            raise ConfigError(
                "data.bucket_captions cuts captions to the longest of their micro-batch, which parallel prediction "
                "(model.overrides.parallel_share) would show to every example of it; remove one of the two"
            )

    def build(
        self,
        generator: torch.Generator,
        *,
        after: Callable[[nn.Module], None] | None = None,
        one_block: bool = False,
    ) -> Captioner:
        config = with_one_block(self.model_config) if one_block else self.model_config
        return build_captioner(config, generator=generator, after=after)

    def skeleton(self) -> Captioner:
        with torch.device("meta"):
            return Captioner(self.model_config)

    def make_example(self, *, train: bool) -> CaptionExample:
        data = self._data
        return CaptionExample(
            data.image_size, data.num_tokens, self.tokenizer_path, train, data.caption_field, data.augment,
            parallel_share=self.model_config.parallel_share,
        )  # fmt: skip

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        config, size = self.model_config, self._data.image_size
        inputs = {
            "images_BCHW": torch.randn(count, 3, size, size, generator=generator),
            "tokens_BL": torch.randint(0, config.vocab_size, (count, config.num_tokens), generator=generator),
            "token_mask_BL": torch.ones(count, config.num_tokens, dtype=torch.bool),
        }
        if config.parallel_share > 0:
            inputs["is_parallel_B"] = torch.arange(count) % 2 == 1
        return inputs

    def facts(self) -> dict[str, Any]:
        return {
            "model": {"kind": self.kind, "size": self._size, **asdict(self.model_config)},
            "tokenizer_sha256": hashlib.sha256(self.tokenizer_path.read_bytes()).hexdigest(),
        }

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": engine.module(**inputs)}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Greedy captions."""
        images: list[np.ndarray] = []
        lines: list[tuple[str, str]] = []
        for batch in batches:
            shown = to_device(batch.inputs, engine)["images_BCHW"]
            tokens = greedy_captions(engine.module, shown, max_tokens=self._data.num_tokens - 1).cpu()
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                images.append(pixels(batch.inputs["images_BCHW"][row]))
                reference = self.tokenizer.decode(batch.inputs["tokens_BL"][row].tolist())
                lines.append((self.tokenizer.decode(tokens[row].tolist()), reference))
        return Samples(contact_sheet(images, lines), lines)


def contact_sheet(
    images: list[np.ndarray], lines: list[tuple[str, str]], *, side: int = 160, text_width: int = 480
) -> np.ndarray:
    """One picture (H, W, 3 uint8): a row per (H, W, 3 uint8) image with the model's caption and the reference."""
    sheet = Image.new("RGB", (side + text_width, (side + 8) * len(images)), "white")
    draw = ImageDraw.Draw(sheet)
    for row, (image, (generated, reference)) in enumerate(zip(images, lines, strict=True)):
        top = row * (side + 8)
        sheet.paste(Image.fromarray(image).resize((side, side), Image.Resampling.BICUBIC), (0, top))
        draw.text((side + 12, top + 8), "model:\n" + _wrapped(generated or "(empty)"), fill="black")
        draw.text((side + 12, top + side // 2 + 8), "reference:\n" + _wrapped(reference), fill="gray")
    return np.asarray(sheet)


def _wrapped(text: str) -> str:
    return "\n".join(textwrap.wrap(text, 56)[:4])
