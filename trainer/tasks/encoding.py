"""An image encoder alone, as other projects release it: opened for its features, and to start other models from."""

import torch
from torch import Tensor

from data.examples.examples import ImageExample
from models.base import ImageEncoder
from trainer.tasks.base import TrainingTask


class EncodingTask(TrainingTask):
    """See `trainer.tasks.base.TrainingTask`. There is no loss: the model gives tokens, and no recipe trains it."""

    kind = "encoder"
    loss_name = "none"
    unit = "one image"
    model_class = ImageEncoder

    def make_example(self, *, train: bool) -> ImageExample:
        return ImageExample(self.model_config.encoder.image_size, train=train)

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size = self.model_config.encoder.image_size
        return {"images_BCHW": torch.randn(count, 3, size, size, generator=generator)}
