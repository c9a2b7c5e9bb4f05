"""Image captioning: DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506)."""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.examples.examples import CaptionExample
from data.examples.tokenizer import CaptionTokenizer
from models.captioner import Captioner
from models.config import CaptionerConfig
from models.generation import greedy_captions
from privacy.step.engine import Engine, to_device
from trainer.config.recipe import DataSection
from trainer.tasks.base import Samples, TrainingTask, pixels
from trainer.tasks.pictures import contact_sheet


class CaptioningTask(TrainingTask):
    """See `trainer.tasks.base.TrainingTask`."""

    kind = "captioner"
    loss_name = "caption loss"
    unit = "one image-text pair"
    model_class = Captioner

    def __init__(self, model_config: CaptionerConfig, size: str, data: DataSection, tokenizer_path: Path) -> None:
        super().__init__(model_config, size)
        self._data = data
        self.tokenizer_path = tokenizer_path

    def make_example(self, *, train: bool) -> CaptionExample:
        config, data = self.model_config, self._data
        return CaptionExample(
            config.encoder.image_size, config.num_tokens, self.tokenizer_path, train, data.caption_field, data.augment,
            parallel_share=config.parallel_share,
        )  # fmt: skip

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        config, size = self.model_config, self.model_config.encoder.image_size
        inputs = {
            "images_BCHW": torch.randn(count, 3, size, size, generator=generator),
            "tokens_BL": torch.randint(0, config.vocab_size, (count, config.num_tokens), generator=generator),
            "token_mask_BL": torch.ones(count, config.num_tokens, dtype=torch.bool),
        }
        if config.parallel_share > 0:
            inputs["is_parallel_B"] = torch.arange(count) % 2 == 1
        return inputs

    def facts(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.tokenizer_path.read_bytes()).hexdigest()
        return {**super().facts(), "tokenizer_sha256": digest}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Greedy captions."""
        tokenizer = CaptionTokenizer.from_file(self.tokenizer_path)
        images: list[np.ndarray] = []
        lines: list[tuple[str, str]] = []
        for batch in batches:
            shown = to_device(batch.inputs, engine)["images_BCHW"]
            tokens = greedy_captions(engine.module, shown, max_tokens=self.model_config.num_tokens - 1).cpu()
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                images.append(pixels(batch.inputs["images_BCHW"][row]))
                reference = tokenizer.decode(batch.inputs["tokens_BL"][row].tolist())
                lines.append((tokenizer.decode(tokens[row].tolist()), reference))
        return Samples(contact_sheet(images, lines), lines)
