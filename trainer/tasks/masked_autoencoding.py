"""Masked autoencoding: ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842)."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.examples.examples import MaskedImageExample
from models.mae_config import MaskedAutoencoderConfig
from models.masked_autoencoder import MaskedAutoencoder, from_patches, to_patches
from privacy.step.engine import Engine, to_device
from trainer.config.recipe import DataSection
from trainer.tasks.base import Samples, TrainingTask, picture_grid, pixels


class MaskedAutoencodingTask(TrainingTask):
    """See `trainer.tasks.base.TrainingTask`."""

    kind = "masked_autoencoder"
    loss_name = "reconstruction loss"
    unit = "one image"
    model_class = MaskedAutoencoder

    def __init__(self, model_config: MaskedAutoencoderConfig, size: str, data: DataSection) -> None:
        super().__init__(model_config, size)
        self._augment = data.augment

    def make_example(self, *, train: bool) -> MaskedImageExample:
        encoder, visible = self.model_config.encoder, self.model_config.num_visible
        return MaskedImageExample(encoder.image_size, encoder.patch_size, visible, train=train, augment=self._augment)

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        make, size = self.make_example(train=True), self.model_config.encoder.image_size
        return {
            "images_BCHW": torch.randn(count, 3, size, size, generator=generator),
            "mask_BP": torch.from_numpy(np.stack([make.mask(key) for key in range(count)])),
        }

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Masked, predicted (visible patches pasted in) and original images side by side."""
        patch = self.model_config.encoder.patch_size
        rows: list[list[np.ndarray]] = []
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
                rows.append([pixels(x[row]) for x in (masked, filled, images)])
        return Samples(picture_grid(("masked", "predicted", "original"), rows), [])
