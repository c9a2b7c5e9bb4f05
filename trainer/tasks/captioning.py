"""Image captioning: DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506)."""

import hashlib
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.examples.examples import CaptionExample
from data.examples.tokenizer import CaptionTokenizer
from models.captioner import Captioner
from models.config import CaptionerConfig
from models.generation import greedy_captions
from privacy.step.engine import Engine, to_device
from trainer.config.recipe import DataSection
from trainer.tasks.base import TrainingTask


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
            config.encoder.image_size, config.num_tokens, self.tokenizer_path, data.caption_field,
            config.parallel_share, train=train, augment=data.augment,
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

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Greedy captions."""
        tokenizer = CaptionTokenizer.from_file(self.tokenizer_path)
        shown = to_device(inputs, engine)["images_BCHW"]
        tokens_BL = greedy_captions(engine.module, shown, max_tokens=self.model_config.num_tokens - 1)
        said, references = (
            [tokenizer.decode(row) for row in x_BL.tolist()] for x_BL in (tokens_BL, inputs["tokens_BL"])
        )
        return list(zip(said, references, strict=True))
