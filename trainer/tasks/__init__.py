"""What is trained: a model, how an example becomes its inputs, and what held-out examples show of it.

One class per kind of model. The trainer, the clipping and the engines know none of them: they see a module that maps named
tensors to one loss per example.
"""

import hashlib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from data.batch import Batch
from data.examples.examples import (
    CaptionExample,
    ImageExample,
    LabelledImageExample,
    MaskedImageExample,
)
from data.examples.tokenizer import CaptionTokenizer
from models.base import ImageEncoder
from models.captioner import Captioner
from models.classifier import Classifier, classification_loss
from models.config import captioner_config, classifier_config, masked_autoencoder_config
from models.generation import greedy_captions
from models.masked_autoencoder import MaskedAutoencoder, from_patches, normalised, to_patches
from privacy.ranks.engine import Engine, to_device
from trainer.config.recipe import RunConfig
from trainer.tasks.base import Samples, TrainingTask, picture_grid, pixels
from trainer.tasks.blind import CaptionFrequencies, ClassFrequencies, MeanPicture

__all__ = ["Samples", "TrainingTask", "make_task"]


class CaptioningTask(TrainingTask):
    """Image captioning: DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506)."""

    kind = "captioner"
    loss_name = "caption loss"
    unit = "one image-text pair"
    model_class = Captioner

    def make_example(self, *, train: bool) -> CaptionExample:
        config, data = self.model_config, self._data
        return CaptionExample(
            config.encoder.image_size,
            config.num_tokens,
            self.tokenizer_path,
            data.caption_field,
            config.parallel_share,
            train=train,
            augment=data.augment,
        )

    def _targets(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        config = self.model_config
        targets = {
            "tokens_BL": torch.randint(
                0, config.vocab_size, (count, config.num_tokens), generator=generator
            ),
            "token_mask_BL": torch.ones(count, config.num_tokens, dtype=torch.bool),
        }
        return targets | (
            {"is_parallel_B": torch.arange(count) % 2 == 1} if config.parallel_share > 0 else {}
        )

    def facts(self) -> dict[str, Any]:
        digest = hashlib.sha256(self.tokenizer_path.read_bytes()).hexdigest()
        return {**super().facts(), "tokenizer_sha256": digest}

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Greedy captions."""
        tokenizer = CaptionTokenizer.from_file(self.tokenizer_path)
        shown = to_device(inputs, engine)["images_BCHW"]
        tokens_BL = greedy_captions(
            engine.module, shown, max_tokens=self.model_config.num_tokens - 1
        )
        said, references = (
            [tokenizer.decode(row) for row in x_BL.tolist()]
            for x_BL in (tokens_BL, inputs["tokens_BL"])
        )
        return list(zip(said, references, strict=True))

    def blind_baseline(self) -> CaptionFrequencies:
        return CaptionFrequencies(self.model_config.vocab_size)


class ClassificationTask(TrainingTask):
    """Image classification: fine-tuning a trained encoder on labels (De et al. 2022, https://arxiv.org/abs/2204.13650)."""

    kind = "classifier"
    loss_name = "cross-entropy"
    unit = "one labelled image"
    model_class = Classifier

    def make_example(self, *, train: bool) -> LabelledImageExample:
        config, data = self.model_config, self._data
        return LabelledImageExample(
            config.encoder.image_size,
            config.num_classes,
            data.label_field,
            train=train,
            augment=data.augment,
        )

    def _targets(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        return {
            "labels_B": torch.randint(
                0, self.model_config.num_classes, (count,), generator=generator
            )
        }

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Cross-entropy (without smoothing) and accuracy."""
        logits_BK = engine.module(inputs["images_BCHW"], output="logits")
        correct_B = logits_BK.argmax(dim=1) == inputs["labels_B"]
        return {
            "loss": classification_loss(logits_BK, inputs["labels_B"]),
            "accuracy": correct_B.float(),
        }

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """The likeliest class of each image, and its label."""
        logits_BK = engine.module(to_device(inputs, engine)["images_BCHW"], output="logits")
        pairs = zip(logits_BK.argmax(dim=1).tolist(), inputs["labels_B"].tolist(), strict=True)
        return [(f"class {predicted}", f"class {label}") for predicted, label in pairs]

    def blind_baseline(self) -> ClassFrequencies:
        return ClassFrequencies(self.model_config.num_classes)


class MaskedAutoencodingTask(TrainingTask):
    """Masked autoencoding: ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842)."""

    kind = "masked_autoencoder"
    loss_name = "reconstruction loss"
    unit = "one image"
    model_class = MaskedAutoencoder

    def make_example(self, *, train: bool) -> MaskedImageExample:
        encoder, visible = self.model_config.encoder, self.model_config.num_visible
        return MaskedImageExample(
            encoder.image_size, encoder.patch_size, visible, train=train, augment=self._data.augment
        )

    def _targets(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        make = self.make_example(train=True)
        return {"mask_BP": torch.from_numpy(np.stack([make.mask(key) for key in range(count)]))}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Masked, predicted (visible patches pasted in) and original images side by side."""
        patch = self.model_config.encoder.patch_size
        rows: list[list[np.ndarray]] = []
        for batch in batches:
            predicted = (
                engine.module(**to_device(batch.inputs, engine), output="patches").float().cpu()
            )
            images, mask = batch.inputs["images_BCHW"].float(), batch.inputs["mask_BP"][:, :, None]
            original = to_patches(images, patch)
            if (
                self.model_config.normalise_pixels
            ):  # in each patch's own units: show it in the original's
                predicted = predicted * (original.var(dim=-1, keepdim=True) + 1e-6).sqrt()
                predicted = predicted + original.mean(dim=-1, keepdim=True)
            masked = from_patches(torch.where(mask, torch.zeros(()), original), patch)
            filled = from_patches(torch.where(mask, predicted, original), patch)
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                rows.append([pixels(x[row]) for x in (masked, filled, images)])
        return Samples(picture_grid(("masked", "predicted", "original"), rows), [])

    def blind_baseline(self) -> MeanPicture:
        patch, normalise = self.model_config.encoder.patch_size, self.model_config.normalise_pixels

        def targets(images_BCHW: Tensor) -> Tensor:
            patches_BPQ = to_patches(images_BCHW, patch)
            return normalised(patches_BPQ) if normalise else patches_BPQ

        return MeanPicture(targets)


class EncodingTask(TrainingTask):
    """An image encoder alone, as other projects release it: opened for its features, and to start other models from.

    There is no loss: the model gives tokens, and no recipe trains it.
    """

    kind = "encoder"
    loss_name = "none"
    unit = "one image"
    model_class = ImageEncoder

    def make_example(self, *, train: bool) -> ImageExample:
        return ImageExample(self.model_config.encoder.image_size, train=train)


TASKS: dict[str, type[TrainingTask]] = {
    task.kind: task
    for task in (CaptioningTask, ClassificationTask, MaskedAutoencodingTask, EncodingTask)
}
"""By kind of model, as recipes and manifests name it."""


def make_task(config: RunConfig, root: Path) -> TrainingTask:
    """The task that `model.kind` names; `root` is the project's root, which paths in recipes are relative to.

    Raises:
        ModelConfigError, DataError: unknown size or field, no tokenizer, values that do not fit together.
    """
    data, size, path = config.data, config.model.size, root / config.data.tokenizer
    overrides = {**config.model.overrides, "image_size": data.image_size}
    model_config: Any
    match config.model.kind:
        case "masked_autoencoder":
            model_config = masked_autoencoder_config(size, **overrides)
        case "classifier":
            model_config = classifier_config(size, **overrides)
        case "captioner":
            tokenizer = CaptionTokenizer.from_file(path)
            special = {
                name: getattr(tokenizer, name)
                for name in ("vocab_size", "pad_id", "bos_id", "eos_id")
            }
            model_config = captioner_config(
                size, **overrides, **special, num_tokens=data.num_tokens
            )
    return TASKS[config.model.kind](model_config, size, data, path)
