"""Image classification: fine-tuning a trained encoder on labels (De et al. 2022, https://arxiv.org/abs/2204.13650)."""

import torch
from torch import Tensor

from data.examples.examples import LabelledImageExample
from models.classifier import Classifier, classification_loss
from models.classifier_config import ClassifierConfig
from privacy.step.engine import Engine, to_device
from trainer.config.recipe import DataSection
from trainer.tasks.base import TrainingTask


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
            config.encoder.image_size, config.num_classes, data.label_field, train=train, augment=data.augment
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

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """The likeliest class of each image, and its label."""
        logits_BK = engine.module(to_device(inputs, engine)["images_BCHW"], output="logits")
        pairs = zip(logits_BK.argmax(dim=1).tolist(), inputs["labels_B"].tolist(), strict=True)
        return [(f"class {predicted}", f"class {label}") for predicted, label in pairs]
