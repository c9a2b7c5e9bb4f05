"""Image classification: fine-tuning a trained encoder on labels (De et al. 2022, https://arxiv.org/abs/2204.13650)."""

from collections.abc import Iterable

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.examples.examples import LabelledImageExample
from models.classifier import Classifier, classification_loss
from models.classifier_config import ClassifierConfig
from privacy.step.engine import Engine, to_device
from trainer.config.recipe import DataSection
from trainer.tasks.base import Samples, TrainingTask, pixels
from trainer.tasks.pictures import contact_sheet


class ClassificationTask(TrainingTask):
    """See `trainer.tasks.base.TrainingTask`."""

    kind = "classifier"
    loss_name = "cross-entropy"
    unit = "one labelled image"
    model_class = Classifier

    def __init__(self, model_config: ClassifierConfig, size: str, data: DataSection) -> None:
        super().__init__(model_config, size)
        self._data = data

    def make_example(self, *, train: bool) -> LabelledImageExample:
        config, data = self.model_config, self._data
        return LabelledImageExample(
            config.encoder.image_size, config.num_classes, train, data.label_field, data.augment
        )

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size, num_classes = self.model_config.encoder.image_size, self.model_config.num_classes
        return {
            "images_BCHW": torch.randn(count, 3, size, size, generator=generator),
            "labels_B": torch.randint(0, num_classes, (count,), generator=generator),
        }

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cross-entropy (without smoothing) and accuracy."""
        logits_BK = engine.module(inputs["images_BCHW"], output="logits")
        correct_B = logits_BK.argmax(dim=1) == inputs["labels_B"]
        return {"loss": classification_loss(logits_BK, inputs["labels_B"]), "accuracy": correct_B.float()}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """The likeliest class of each image, and its label."""
        images: list[np.ndarray] = []
        lines: list[tuple[str, str]] = []
        for batch in batches:
            logits_BK = engine.module(to_device(batch.inputs, engine)["images_BCHW"], output="logits")
            predicted_B = logits_BK.argmax(dim=1).cpu()
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                images.append(pixels(batch.inputs["images_BCHW"][row]))
                lines.append((f"class {int(predicted_B[row])}", f"class {int(batch.inputs['labels_B'][row])}"))
        return Samples(contact_sheet(images, lines), lines)
