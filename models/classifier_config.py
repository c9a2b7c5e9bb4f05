"""Configurations of image classifiers: an encoder of another model, a linear head, and which part of them is trained.

>>> config = classifier_config("vip_base", num_classes=1000, trainable="adapters", adapter_rank=8)
>>> config.encoder.width, config.adapter_rank
(768, 8)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from models.config import SIZES, ModelConfigError, VitConfig, check_fields, named_size, with_overrides
from models.mae_config import MAE_SIZES

Features = Literal["class_token", "pooled"]
Trainable = Literal["all", "last_layer", "adapters"]
AdapterLayers = Literal["attention", "all"]

MAX_CLASSES = 2**24


@dataclass(frozen=True, kw_only=True)
class ClassifierConfig:
    """
    Attributes:
        encoder: as in the captioner or masked autoencoder that it comes from.
        num_classes: labels are 0 to num_classes - 1. Public.
        features: what the head sees: the class token, or the mean over the patch tokens.
        trainable: everything; the head alone; or low-rank adapters in the encoder and the head.
        adapter_rank, adapter_alpha: r and alpha of LoRA (Hu et al. 2022, https://arxiv.org/abs/2106.09685).
        adapter_layers: adapters for the attention's two layers of each block, or for the MLP's two as well.
        feature_norm: LayerNorm without parameters between features and head, so that all images weigh alike.
        label_smoothing: share of the target that is spread over all classes.
    """

    encoder: VitConfig
    num_classes: int
    features: Features = "class_token"
    trainable: Trainable = "all"
    adapter_rank: int = 8
    adapter_alpha: float = 16.0
    adapter_layers: AdapterLayers = "attention"
    feature_norm: bool = True
    label_smoothing: float = 0.0

    def __post_init__(self) -> None:
        check_fields(self)
        if not 2 <= self.num_classes <= MAX_CLASSES:
            raise ModelConfigError(
                f"num_classes must be at least 2 and at most {MAX_CLASSES:,}, got {self.num_classes}"
            )
        if self.adapter_rank > self.encoder.width:
            raise ModelConfigError(
                f"adapter_rank {self.adapter_rank} is more than the encoder's width {self.encoder.width}: train everything"
            )
        if not 0 <= self.label_smoothing < 1:
            raise ModelConfigError(f"label_smoothing must be at least 0 and below 1, got {self.label_smoothing}")


ENCODERS: Mapping[str, VitConfig] = {
    **{name: config.encoder for name, config in MAE_SIZES.items() if name.startswith("vip_")},
    **{name: config.encoder for name, config in SIZES.items()},
}
"""The encoders of the other models, by the name of their size; `pico` and `nano` are the captioners'."""


def classifier_config(size: str, **overrides: Any) -> ClassifierConfig:
    """An encoder of a named size under a head; overrides as `num_classes`, `trainable`, `image_size`, `encoder_width`, ...

    Raises:
        ModelConfigError: unknown size or field (the line lists the choices), no `num_classes`, or values that do not fit.
    """
    encoder = named_size(ENCODERS, size)
    if "num_classes" not in overrides:
        raise ModelConfigError(
            "num_classes is missing: a classifier's recipe says how many there are in model.overrides"
        )
    return with_overrides(ClassifierConfig(encoder=encoder, num_classes=overrides["num_classes"]), overrides)
