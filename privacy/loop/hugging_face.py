"""Models of transformers: what their items are, and one loss per example in place of the mean that they return.

    PrivateLoop(model, optimizer, dataset, example=fields(model, length=128), ...)      # loss stays None

Labels never reach the model, whose own loss averages over the batch. Classification takes the cross-entropy of the logits;
causal language models the mean over an example's own tokens of the next-token cross-entropy, labels of -100 left out, as
transformers has it for a batch of one.
"""

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from .fields import Example, Field, floats, integers, mask

if TYPE_CHECKING:
    from transformers import PretrainedConfig

IGNORED = -100
"""The label that counts for nothing, in transformers as in torch."""
CLASSIFIES, PREDICTS = (
    ("ForImageClassification", "ForSequenceClassification"),
    ("ForCausalLM", "LMHeadModel"),
)


def fields(model: nn.Module, *, length: int | None = None) -> dict[str, Field]:
    """What one item of the model's inputs and labels is, by its configuration.

    Args:
        length: tokens of every text; shorter ones are padded to it, since a batch's shape must not follow its longest example.

    Raises:
        PrivacyConfigError: another kind of model, or no length for a text; then say it by `example`.
    """
    name, config = _known(model)
    if name.endswith("ForImageClassification"):
        size = config.image_size if isinstance(config.image_size, int) else max(config.image_size)
        return {
            "pixel_values": floats(config.num_channels, size, size),
            "labels": integers(config.num_labels),
        }
    if length is None:
        raise PrivacyConfigError(
            f"{name} reads texts: give length, the number of tokens that every item has"
        )
    tokens, predicts = integers(config.vocab_size, length), name.endswith(PREDICTS)
    labels = (
        integers(config.vocab_size, length, also=[IGNORED])
        if predicts
        else integers(config.num_labels)
    )
    return {"input_ids": tokens, "attention_mask": mask(length), "labels": labels}


def loss_of(model: nn.Module, example: Example) -> Callable[..., Tensor]:
    """The loss of each example, (B,), from the model's logits and `labels`.

    It is the cross-entropy of its class, or the mean of that of its own next tokens, and 0 for one without any.

    Raises:
        PrivacyConfigError: a model whose loss is not known here, or items without labels.
    """
    name, config = _known(model)
    if not example.is_named or "labels" not in example.fields:
        raise PrivacyConfigError(
            f"the loss of {name} needs items that are mappings with labels among their fields"
        )
    classifies, problem = name.endswith(CLASSIFIES), getattr(config, "problem_type", None)
    if classifies and (
        problem not in (None, "single_label_classification") or config.num_labels < 2
    ):
        raise PrivacyConfigError(
            f"{name} with problem_type {problem!r} and {config.num_labels} labels is no classification with one label: give loss="
        )
    if (
        classifies
    ):  # transformers writes it down at the first call with labels, and the model shall not change
        config.problem_type = "single_label_classification"

    def loss(labels: Tensor, **inputs: Tensor) -> Tensor:
        logits = model(**inputs).logits.float()
        if classifies:
            return F.cross_entropy(logits, labels, reduction="none")
        targets_BL, logits_BVL = labels[:, 1:], logits[:, :-1].transpose(1, 2)
        loss_BL = F.cross_entropy(logits_BVL, targets_BL, reduction="none", ignore_index=IGNORED)
        return loss_BL.sum(1) / (targets_BL != IGNORED).sum(1).clamp(min=1)

    return loss


def _known(model: Any) -> "tuple[str, PretrainedConfig | Any]":
    """The name of the model's class and its configuration; below the wrappers of peft those of the model that they adapt.

    Raises:
        PrivacyConfigError: no model of transformers, or one with another head.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(base).__name__
    if not hasattr(base, "config"):
        raise PrivacyConfigError(
            f"{name} is no model of transformers: give loss=, a function that returns one loss per example"
        )
    if not name.endswith((*CLASSIFIES, *PREDICTS)):
        raise PrivacyConfigError(
            f"the loss per example of {name} is not known here (known are models for image and sequence classification and "
            "causal language models): give example= and loss=, a function that returns one loss per example"
        )
    return name, base.config.get_text_config() if hasattr(
        base.config, "get_text_config"
    ) else base.config
