"""What is trained: a model, how an example becomes its inputs, and what held-out examples show of it.

One module per kind of model. The trainer, the clipping and the engines know none of them: they see a module that maps named
tensors to one loss per example.
"""

from pathlib import Path

from data.examples.tokenizer import CaptionTokenizer
from models.classifier_config import classifier_config
from models.config import captioner_config
from models.mae_config import masked_autoencoder_config
from trainer.config.recipe import RunConfig
from trainer.tasks.base import Samples, TrainingTask
from trainer.tasks.captioning import CaptioningTask
from trainer.tasks.classification import ClassificationTask
from trainer.tasks.masked_autoencoding import MaskedAutoencodingTask

__all__ = ["Samples", "TrainingTask", "make_task"]


def make_task(config: RunConfig, root: Path) -> TrainingTask:
    """The task that `model.kind` names; `root` is the project's root, which paths in recipes are relative to.

    Raises:
        ModelConfigError, DataError: unknown size or field, no tokenizer, values that do not fit together.
    """
    data, size = config.data, config.model.size
    overrides = {**config.model.overrides, "image_size": data.image_size}
    match config.model.kind:
        case "masked_autoencoder":
            return MaskedAutoencodingTask(masked_autoencoder_config(size, **overrides), size, data)
        case "classifier":
            return ClassificationTask(classifier_config(size, **overrides), size, data)
        case "captioner":
            tokenizer = CaptionTokenizer.from_file(root / data.tokenizer)
            overrides |= {
                "num_tokens": data.num_tokens,
                "vocab_size": tokenizer.vocab_size,
                "pad_id": tokenizer.pad_id,
                "bos_id": tokenizer.bos_id,
                "eos_id": tokenizer.eos_id,
            }
            return CaptioningTask(captioner_config(size, **overrides), size, data, root / data.tokenizer)
