"""Masked autoencoding: ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842)."""

from collections.abc import Callable, Iterable
from dataclasses import asdict
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import Batch
from data.examples import MaskedImageExample
from models.mae_config import masked_autoencoder_config
from models.masked_autoencoder import MaskedAutoencoder, build_masked_autoencoder, from_patches, to_patches
from trainer.config import RunConfig
from trainer.engines.base import Engine
from trainer.tasks.base import Samples, pixels, to_device, with_one_block


class MaskedAutoencodingTask:
    """See `trainer.tasks.base.TrainingTask`."""

    kind = "masked_autoencoder"
    loss_name = "reconstruction loss"

    def __init__(self, config: RunConfig) -> None:
        self._size, self._augment = config.model.size, config.data.augment
        self.model_config = masked_autoencoder_config(
            self._size, **{**config.model.overrides, "image_size": config.data.image_size}
        )

    def build(
        self,
        generator: torch.Generator,
        *,
        after: Callable[[nn.Module], None] | None = None,
        one_block: bool = False,
    ) -> MaskedAutoencoder:
        config = with_one_block(self.model_config) if one_block else self.model_config
        return build_masked_autoencoder(config, generator=generator, after=after)

    def skeleton(self) -> MaskedAutoencoder:
        with torch.device("meta"):
            return MaskedAutoencoder(self.model_config)

    def make_example(self, *, train: bool) -> MaskedImageExample:
        encoder, visible = self.model_config.encoder, self.model_config.num_visible
        return MaskedImageExample(encoder.image_size, encoder.patch_size, visible, train, augment=self._augment)

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        make, size = self.make_example(train=True), self.model_config.encoder.image_size
        return {
            "images_BCHW": torch.randn(count, 3, size, size, generator=generator),
            "mask_BP": torch.from_numpy(np.stack([make.mask(key) for key in range(count)])),
        }

    def facts(self) -> dict[str, Any]:
        return {"model": {"kind": self.kind, "size": self._size, **asdict(self.model_config)}}

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        return {"loss": engine.module(**inputs)}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Masked, predicted (visible patches pasted in) and original images side by side."""
        patch = self.model_config.encoder.patch_size
        rows: list[np.ndarray] = []
        for batch in batches:
            predicted = engine.module(**to_device(batch.inputs, engine), output="patches").float().cpu()
            images, mask = batch.inputs["images_BCHW"].float(), batch.inputs["mask_BP"][:, :, None]
            original = to_patches(images, patch)
            if self.model_config.normalise_pixels:  # in each patch's own units: show it in the original's
                predicted = predicted * (original.var(dim=-1, keepdim=True) + 1e-6).sqrt()
                predicted = predicted + original.mean(dim=-1, keepdim=True)
            masked = from_patches(torch.where(mask, torch.zeros(()), original), patch)
            filled = from_patches(torch.where(mask, predicted, original), patch)
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                rows.append(np.concatenate([pixels(x[row]) for x in (masked, filled, images)], axis=1))
        return Samples(np.concatenate(rows) if rows else np.zeros((0, 0, 3), np.uint8), [])
