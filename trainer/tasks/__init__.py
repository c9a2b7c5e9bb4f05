"""What is trained: a model, how an example becomes its inputs, and what held-out examples show of it.

One module per kind of model. The trainer, the clipping and the engines know none of them: they see a module that maps named
tensors to one loss per example.
"""

from pathlib import Path

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
    if config.model.kind == "masked_autoencoder":
        return MaskedAutoencodingTask(config)
    if config.model.kind == "classifier":
        return ClassificationTask(config)
    return CaptioningTask(config, root)
