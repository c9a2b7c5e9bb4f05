"""Defines the kinds of models, one class each: model, inputs of an example, held-out results.

The trainer, the clipping and the engines know none of them: they see a module that maps named
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
from trainer.tasks.baselines import CaptionFrequencies, ClassFrequencies, MeanPicture

__all__ = ["Samples", "TrainingTask", "make_task"]


class CaptioningTask(TrainingTask):
    """Image captioning: DP-Cap (Sander et al. 2024, https://arxiv.org/abs/2403.02506)."""

    kind = "captioner"
    loss_name = "caption loss"
    unit = "one image-text pair"
    model_class = Captioner

    def make_example(self, *, train: bool) -> CaptionExample:
        """Returns a function that turns raw examples into images and tokens."""
        config = self.model_config
        data = self._data
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
        shape = (count, config.num_tokens)
        targets = {
            "tokens_BL": torch.randint(0, config.vocab_size, shape, generator=generator),
            "token_mask_BL": torch.ones(shape, dtype=torch.bool),
        }
        if config.parallel_share > 0:
            targets["is_parallel_B"] = torch.arange(count) % 2 == 1
        return targets

    def facts(self) -> dict[str, Any]:
        """Returns the facts of the model, and the hash of its tokenizer."""
        digest = hashlib.sha256(self.tokenizer_path.read_bytes()).hexdigest()
        return {**super().facts(), "tokenizer_sha256": digest}

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Returns greedy captions and the references."""
        tokenizer = CaptionTokenizer.from_file(self.tokenizer_path)
        images_BCHW = to_device(inputs, engine)["images_BCHW"]
        max_tokens = self.model_config.num_tokens - 1
        tokens_BL = greedy_captions(engine.module, images_BCHW, max_tokens=max_tokens)
        captions = [tokenizer.decode(row) for row in tokens_BL.tolist()]
        references = [tokenizer.decode(row) for row in inputs["tokens_BL"].tolist()]
        return list(zip(captions, references, strict=True))

    def blind_baseline(self) -> CaptionFrequencies:
        """Returns tables of frequencies of words, pairs and captions."""
        return CaptionFrequencies(self.model_config.vocab_size)


class ClassificationTask(TrainingTask):
    """Image classification: fine-tuning a trained encoder on labels.

    De et al. 2022, https://arxiv.org/abs/2204.13650.
    """

    kind = "classifier"
    loss_name = "cross-entropy"
    unit = "one labelled image"
    model_class = Classifier

    def make_example(self, *, train: bool) -> LabelledImageExample:
        """Returns a function that turns raw examples into images and labels."""
        config = self.model_config
        data = self._data
        return LabelledImageExample(
            config.encoder.image_size,
            config.num_classes,
            data.label_field,
            train=train,
            augment=data.augment,
        )

    def _targets(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        num_classes = self.model_config.num_classes
        return {"labels_B": torch.randint(0, num_classes, (count,), generator=generator)}

    def heldout_values(self, engine: Engine, inputs: dict[str, Tensor]) -> dict[str, Tensor]:
        """Returns cross-entropy (without smoothing) and accuracy."""
        logits_BK = engine.module(inputs["images_BCHW"], output="logits")
        correct_B = logits_BK.argmax(dim=1) == inputs["labels_B"]
        return {
            "loss": classification_loss(logits_BK, inputs["labels_B"]),
            "accuracy": correct_B.float(),
        }

    def answers(self, engine: Engine, inputs: dict[str, Tensor]) -> list[tuple[str, str]]:
        """Returns the likeliest class of each image, and its label."""
        logits_BK = engine.module(to_device(inputs, engine)["images_BCHW"], output="logits")
        pairs = zip(logits_BK.argmax(dim=1).tolist(), inputs["labels_B"].tolist(), strict=True)
        return [(f"class {predicted}", f"class {label}") for predicted, label in pairs]

    def blind_baseline(self) -> ClassFrequencies:
        """Returns the frequencies of the classes."""
        return ClassFrequencies(self.model_config.num_classes)


class MaskedAutoencodingTask(TrainingTask):
    """Masked autoencoding: ViP (Yu et al. 2023, https://arxiv.org/abs/2306.08842)."""

    kind = "masked_autoencoder"
    loss_name = "reconstruction loss"
    unit = "one image"
    model_class = MaskedAutoencoder

    def make_example(self, *, train: bool) -> MaskedImageExample:
        """Returns a function that turns raw examples into images and masks."""
        encoder = self.model_config.encoder
        return MaskedImageExample(
            encoder.image_size,
            encoder.patch_size,
            self.model_config.num_visible,
            train=train,
            augment=self._data.augment,
        )

    def _targets(self, count: int, generator: torch.Generator) -> dict[str, Tensor]:
        make_example = self.make_example(train=True)
        mask_BP = np.stack([make_example.mask(key) for key in range(count)])
        return {"mask_BP": torch.from_numpy(mask_BP)}

    @torch.no_grad()
    def samples(self, engine: Engine, batches: Iterable[Batch]) -> Samples:
        """Shows masked, predicted (visible patches pasted in) and original images side by side."""
        patch_size = self.model_config.encoder.patch_size
        rows: list[list[np.ndarray]] = []
        for batch in batches:
            inputs = to_device(batch.inputs, engine)
            predicted_BPQ = engine.module(**inputs, output="patches").float().cpu()
            images_BCHW = batch.inputs["images_BCHW"].float()
            mask_BP1 = batch.inputs["mask_BP"][:, :, None]
            original_BPQ = to_patches(images_BCHW, patch_size)
            if self.model_config.normalise_pixels:
                # The prediction is in each patch's own units; it is shown in those of the original.
                std_BP1 = (original_BPQ.var(dim=-1, keepdim=True) + 1e-6).sqrt()
                predicted_BPQ = predicted_BPQ * std_BP1
                predicted_BPQ = predicted_BPQ + original_BPQ.mean(dim=-1, keepdim=True)
            masked_BPQ = torch.where(mask_BP1, torch.zeros(()), original_BPQ)
            masked_BCHW = from_patches(masked_BPQ, patch_size)
            filled_BPQ = torch.where(mask_BP1, predicted_BPQ, original_BPQ)
            filled_BCHW = from_patches(filled_BPQ, patch_size)
            for row in (~batch.is_padding_B).nonzero().flatten().tolist():
                pictures = (masked_BCHW[row], filled_BCHW[row], images_BCHW[row])
                rows.append([pixels(picture) for picture in pictures])
        return Samples(picture_grid(("masked", "predicted", "original"), rows), [])

    def blind_baseline(self) -> MeanPicture:
        """Returns the mean picture, in the units of the loss."""
        patch_size = self.model_config.encoder.patch_size
        normalise = self.model_config.normalise_pixels

        def targets(images_BCHW: Tensor) -> Tensor:
            patches_BPQ = to_patches(images_BCHW, patch_size)
            return normalised(patches_BPQ) if normalise else patches_BPQ

        return MeanPicture(targets)


class EncodingTask(TrainingTask):
    """An image encoder alone, as other projects release it.

    It is opened for its features, and to start other models from. It has no loss: the model returns
    tokens, and no recipe trains it.
    """

    kind = "encoder"
    loss_name = "none"
    unit = "one image"
    model_class = ImageEncoder

    def make_example(self, *, train: bool) -> ImageExample:
        """Returns a function that turns raw examples into images."""
        return ImageExample(self.model_config.encoder.image_size, train=train)


TASKS: dict[str, type[TrainingTask]] = {
    task.kind: task
    for task in (CaptioningTask, ClassificationTask, MaskedAutoencodingTask, EncodingTask)
}
"""Kind of model, as recipes and manifests name it -> its task."""


def make_task(config: RunConfig, root: Path) -> TrainingTask:
    """Returns the task that `model.kind` names.

    Args:
        root: the project's root; paths in recipes are relative to it.

    Raises:
        ModelConfigError, DataError: unknown size or field, no tokenizer, values that do not fit
            together.
    """
    size = config.model.size
    tokenizer_path = root / config.data.tokenizer
    overrides = {**config.model.overrides, "image_size": config.data.image_size}
    model_config: Any
    match config.model.kind:
        case "masked_autoencoder":
            model_config = masked_autoencoder_config(size, **overrides)
        case "classifier":
            model_config = classifier_config(size, **overrides)
        case "captioner":
            tokenizer = CaptionTokenizer.from_file(tokenizer_path)
            model_config = captioner_config(
                size,
                **overrides,
                vocab_size=tokenizer.vocab_size,
                pad_id=tokenizer.pad_id,
                bos_id=tokenizer.bos_id,
                eos_id=tokenizer.eos_id,
                num_tokens=config.data.num_tokens,
            )
    return TASKS[config.model.kind](model_config, size, config.data, tokenizer_path)
