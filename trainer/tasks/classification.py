"""Image classification: fine-tuning a trained encoder on labels (De et al. 2022, https://arxiv.org/abs/2204.13650)."""

from collections.abc import Callable, Iterable
from dataclasses import asdict, replace
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from data.batch import Batch
from data.labels import LabelledImageExample
from models.classifier import Classifier, build_classifier, classification_loss
from models.classifier_config import classifier_config
from trainer.config import RunConfig
from trainer.engines.base import Engine
from trainer.tasks.base import Samples, pixels, to_device
from trainer.tasks.captioning import contact_sheet


class ClassificationTask:
    """See `trainer.tasks.base.TrainingTask`."""

    kind = "classifier"
    loss_name = "cross-entropy"

    def __init__(self, config: RunConfig) -> None:
        self._size, self._data = config.model.size, config.data
        self.model_config = classifier_config(
            self._size, **{**config.model.overrides, "image_size": config.data.image_size}
        )

    def build(
        self,
        generator: torch.Generator,
        *,
        after: Callable[[nn.Module], None] | None = None,
        one_block: bool = False,
    ) -> Classifier:
        config = self.model_config
        if one_block:
            config = replace(config, encoder=replace(config.encoder, depth=1))
        return build_classifier(config, generator=generator, after=after)

    def skeleton(self) -> Classifier:
        with torch.device("meta"):
            return Classifier(self.model_config)

    def make_example(self, *, train: bool) -> LabelledImageExample:
        data = self._data
        return LabelledImageExample(
            data.image_size, self.model_config.num_classes, train, data.label_field, data.augment
        )

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        generator = torch.Generator().manual_seed(0)
        size, num_classes = self._data.image_size, self.model_config.num_classes
        return {
            "images_BCHW": torch.randn(count, 3, size, size, generator=generator),
            "labels_B": torch.randint(0, num_classes, (count,), generator=generator),
        }

    def facts(self) -> dict[str, Any]:
        return {"model": {"kind": self.kind, "size": self._size, **asdict(self.model_config)}}

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
