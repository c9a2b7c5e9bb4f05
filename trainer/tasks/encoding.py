"""An image encoder alone, as other projects release it: opened for its features, and to start other models from."""

from collections.abc import Callable, Iterable

import torch
from torch import Tensor, nn

from data.batch import Batch
from data.examples.examples import ImageExample
from models.base import VisionModel
from models.image_encoder import ImageEncoder
from trainer.engines.base import Engine
from trainer.errors import ConfigError
from trainer.tasks.base import Samples, TrainingTask


class EncodingTask(TrainingTask):
    """See `trainer.tasks.base.TrainingTask`. There is no loss: the model gives tokens, and no recipe trains it."""

    kind = "encoder"
    loss_name = "none"
    unit = "one image"
    model_class = ImageEncoder

    def build(
        self,
        generator: torch.Generator,
        *,
        after: Callable[[nn.Module], None] | None = None,
        one_block: bool = False,
    ) -> VisionModel:
        if one_block:
            raise _no_loss()
        return super().build(generator, after=after)

    def make_example(self, *, train: bool) -> ImageExample:
        return ImageExample(self.model_config.encoder.image_size, train)

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size = self.model_config.encoder.image_size
        return {"images_BCHW": torch.randn(count, 3, size, size, generator=generator)}

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        raise _no_loss()

    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        raise _no_loss()


def _no_loss() -> ConfigError:
    return ConfigError("this checkpoint is an encoder alone: it has features, but no loss to be trained or judged by")
