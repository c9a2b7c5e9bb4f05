"""Image classifier: an encoder and a linear head, for fine-tuning with or without adapters.

Shapes: B batch, C H W image, T image tokens, D encoder width, K classes.

The head and every adapter's second factor start at zero (the head: Mehta et al. 2022,
https://arxiv.org/abs/2205.02973, who find zeros best under differential privacy; the adapters:
LoRA), so that training starts from the encoder as it is and from the same loss, ln K, for every
image.

Low-rank adapters (LoRA, Hu et al. 2022, https://arxiv.org/abs/2106.09685, section 4.1) leave a
linear layer frozen and train a small correction that is added to it. Both factors are ordinary
`Linear` layers that are called as modules, so that per-example clipping needs nothing new for them.

    >>> from models.config import classifier_config
    >>> config = classifier_config("pico", num_classes=10, trainable="last_layer")
    >>> model = build_classifier(config, generator=torch.Generator().manual_seed(0))
    >>> side = config.encoder.image_size
    >>> model(torch.zeros(2, 3, side, side), torch.tensor([3, 7]))  # ln 10: the head is zero
    tensor([2.3026, 2.3026], grad_fn=...)
"""

import copy
from collections.abc import Iterator
from typing import Literal

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from models.base import VisionModel
from models.config import AdapterLayers, ClassifierConfig
from models.vit import VisionTransformer

_LAYERS: dict[AdapterLayers, tuple[str, ...]] = {
    "attention": ("attention.qkv", "attention.out"),
    "all": ("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
}
_PARTS = ("adapter_down", "adapter_up")


class AdaptedLinear(nn.Linear):
    """A linear layer with an adapter: y = W x + b + (alpha / r) U D x, D (r, in) and U (out, r).

    W and b keep the names that they have without adapters, so that weights of other models fit.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float) -> None:
        """Takes over the parameters of `linear`."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight = linear.weight
        self.bias = linear.bias
        self.scale = alpha / rank
        self.adapter_down = nn.Linear(linear.in_features, rank, bias=False)
        self.adapter_up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * self.adapter_up(self.adapter_down(x))


def add_adapters(
    encoder: VisionTransformer, *, rank: int, alpha: float, layers: AdapterLayers
) -> None:
    """Gives the named layers of every block an adapter, in place; the caller sets its values."""
    for block in encoder.blocks:
        for path in _LAYERS[layers]:
            part, _, name = path.rpartition(".")
            owner = block.get_submodule(part)
            linear = block.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            setattr(owner, name, AdaptedLinear(linear, rank=rank, alpha=alpha))


def adapters(module: nn.Module) -> Iterator[AdaptedLinear]:
    """Returns the layers of a module that have an adapter."""
    return (layer for layer in module.modules() if isinstance(layer, AdaptedLinear))


@torch.no_grad()
def without_adapters(encoder: VisionTransformer, *, merged: bool = True) -> VisionTransformer:
    """Returns the encoder without adapters; the same object if it has none.

    Args:
        merged: adds each adapter into the weight that it corrects, W + (alpha / r) U D; otherwise
            the adapters are dropped.
    """
    if not any(adapters(encoder)):
        return encoder
    plain_encoder = copy.deepcopy(encoder)
    for path, module in list(plain_encoder.named_modules()):
        if isinstance(module, AdaptedLinear):
            has_bias = module.bias is not None
            plain = nn.Linear(module.in_features, module.out_features, bias=has_bias)
            correction = module.scale * module.adapter_up.weight @ module.adapter_down.weight
            plain.weight.copy_(module.weight + correction if merged else module.weight)
            if has_bias:
                plain.bias.copy_(module.bias)
            owner, _, name = path.rpartition(".")
            setattr(plain_encoder.get_submodule(owner), name, plain.to(module.weight))
    return plain_encoder


def is_adapter(name: str) -> bool:
    """Returns whether the parameter of this name is an adapter's."""
    return any(part in _PARTS for part in name.split("."))


def classification_loss(
    logits_BK: Tensor, labels_B: Tensor, label_smoothing: float = 0.0
) -> Tensor:
    """Returns the loss (B,): cross-entropy in nats, in float32 (or float64)."""
    wide = torch.float64 if logits_BK.dtype == torch.float64 else torch.float32
    return F.cross_entropy(
        logits_BK.to(wide), labels_B, reduction="none", label_smoothing=label_smoothing
    )


class Classifier(VisionModel):
    """A classifier whose parameters live in `encoder` and `head`; frozen ones require no gradient.

    Row i of every output depends on row i of the inputs alone.
    """

    config: ClassifierConfig

    def __init__(self, config: ClassifierConfig) -> None:
        super().__init__(config)
        self.encoder = VisionTransformer(config.encoder)
        if config.trainable != "all":
            self.encoder.requires_grad_(False)
        if config.trainable == "adapters":
            add_adapters(
                self.encoder,
                rank=config.adapter_rank,
                alpha=config.adapter_alpha,
                layers=config.adapter_layers,
            )
        self.head = nn.Linear(config.encoder.width, config.num_classes)
        self._init_unless_meta()

    def start_at_zero(self) -> set[nn.Module]:
        return {self.head, *(layer.adapter_up for layer in adapters(self))}

    def forward(
        self,
        images_BCHW: Tensor,
        labels_B: Tensor | None = None,
        output: Literal["loss", "logits"] = "loss",
    ) -> Tensor:
        """Returns the loss of each image, or its scores.

        Args:
            images_BCHW: normalised pixels, floating.
            labels_B: int64 in [0, num_classes); for the loss.

        Returns:
            Loss (B,) in float32. Or "logits": scores (B, K) before the softmax.
        """
        logits_BK: Tensor = self.head(self.features(images_BCHW))
        if output == "logits":
            return logits_BK
        if labels_B is None:
            raise ValueError("the loss needs labels_B")
        return classification_loss(logits_BK, labels_B, self.config.label_smoothing)

    def features(self, images_BCHW: Tensor) -> Tensor:
        """Returns the head's input (B, D); a frozen encoder leaves no graph behind."""
        with_graph = torch.is_grad_enabled() and self.config.trainable != "last_layer"
        with torch.set_grad_enabled(with_graph):
            tokens_BTD = self.encoder(images_BCHW)
        if self.config.features == "class_token":
            features_BD = tokens_BTD[:, 0]
        else:
            features_BD = tokens_BTD[:, 1:].mean(dim=1)
        if not self.config.feature_norm:
            return features_BD
        return F.layer_norm(features_BD, features_BD.shape[-1:], eps=self.config.encoder.norm_eps)


build_classifier = Classifier.build
