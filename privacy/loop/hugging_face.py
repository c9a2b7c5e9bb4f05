"""Models of transformers: the fields of their items, and one loss per example in place of a mean.

    PrivateLoop(model, optimizer, data, example=fields(model, length=128), ...)  # loss stays None

Labels never reach the model, whose own loss averages over the batch. Classification takes the
cross-entropy of the logits. Causal language models take the mean over an example's own tokens of
the next-token cross-entropy, without labels of -100, as transformers does for a batch of one.
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
"""The label that a loss leaves out, in transformers as in torch."""
CLASSIFIES = ("ForImageClassification", "ForSequenceClassification")
"""Ends of the names of models that classify."""
PREDICTS = ("ForCausalLM", "LMHeadModel")
"""Ends of the names of models that predict the next token."""


def fields(model: nn.Module, *, length: int | None = None) -> dict[str, Field]:
    """Returns the fields of an item of the model's inputs and labels, by its configuration.

    Args:
        length: tokens of every text; shorter texts are padded to it, since a batch's shape must not
            follow its longest example.

    Raises:
        PrivacyConfigError: another kind of model, which needs `example`, or no length for a text.
    """
    name, config = _supported(model)
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
    if name.endswith(PREDICTS):
        labels = integers(config.vocab_size, length, also=[IGNORED])
    else:
        labels = integers(config.num_labels)
    tokens = integers(config.vocab_size, length)
    return {"input_ids": tokens, "attention_mask": mask(length), "labels": labels}


def loss_of(model: nn.Module, example: Example) -> Callable[..., Tensor]:
    """Returns a function of the model's inputs and `labels`: the loss of each example, (B,).

    The loss is the cross-entropy of the class, or the mean cross-entropy of the example's own next
    tokens, which is 0 for an example without any.

    Raises:
        PrivacyConfigError: a model that is not supported, or items without labels.
    """
    name, config = _supported(model)
    if not example.is_named or "labels" not in example.fields:
        raise PrivacyConfigError(
            f"the loss of {name} needs items that are mappings with labels among their fields"
        )
    classifies = name.endswith(CLASSIFIES)
    if classifies:
        problem = getattr(config, "problem_type", None)
        has_one_label = problem in (None, "single_label_classification")
        if not has_one_label or config.num_labels < 2:
            raise PrivacyConfigError(
                f"{name} with problem_type {problem!r} and {config.num_labels} labels does "
                "not classify with one label: give loss="
            )
        # Transformers sets it at the first call with labels, and the model must not change then.
        config.problem_type = "single_label_classification"

    def loss(labels: Tensor, **inputs: Tensor) -> Tensor:
        logits = model(**inputs).logits.float()
        if classifies:
            return F.cross_entropy(logits, labels, reduction="none")
        targets_BL = labels[:, 1:]
        logits_BVL = logits[:, :-1].transpose(1, 2)
        loss_BL = F.cross_entropy(logits_BVL, targets_BL, reduction="none", ignore_index=IGNORED)
        num_targets_B = (targets_BL != IGNORED).sum(1)
        return loss_BL.sum(1) / num_targets_B.clamp(min=1)

    return loss


def _supported(model: Any) -> "tuple[str, PretrainedConfig | Any]":
    """Returns the name of the model's class and its configuration.

    Below the wrappers of peft they are those of the adapted model.

    Raises:
        PrivacyConfigError: not a model of transformers, or one with another head.
    """
    base = model.get_base_model() if hasattr(model, "get_base_model") else model
    name = type(base).__name__
    if not hasattr(base, "config"):
        raise PrivacyConfigError(
            f"{name} is not a model of transformers: give loss=, a function that returns one loss "
            "per example"
        )
    if not name.endswith((*CLASSIFIES, *PREDICTS)):
        raise PrivacyConfigError(
            f"the loss per example of {name} is not known here (known are models for image and "
            "sequence classification and causal language models): give example= and loss=, a "
            "function that returns one loss per example"
        )
    config = base.config
    return name, config.get_text_config() if hasattr(config, "get_text_config") else config
