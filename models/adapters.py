"""Low-rank adapters: a frozen linear layer and a small trained correction that is added to it.

Source: LoRA, Hu et al. 2022 (https://arxiv.org/abs/2106.09685), section 4.1. Both factors are ordinary `Linear` layers that
are called as modules, so that per-example clipping needs nothing new for them.
"""

import copy
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from models.config import AdapterLayers
from models.vit import VisionTransformer

_LAYERS: dict[AdapterLayers, tuple[str, ...]] = {
    "attention": ("attention.qkv", "attention.out"),
    "all": ("attention.qkv", "attention.out", "mlp.up", "mlp.down"),
}
_PARTS = ("adapter_down", "adapter_up")


class AdaptedLinear(nn.Linear):
    """y = W x + b + (alpha / r) U D x, with D (r, in) and U (out, r).

    W and b keep the names that they have without adapters, so that weights of other models fit.
    """

    def __init__(self, linear: nn.Linear, *, rank: int, alpha: float) -> None:
        """Takes over the parameters of `linear`."""
        super().__init__(linear.in_features, linear.out_features, bias=linear.bias is not None)
        self.weight, self.bias = linear.weight, linear.bias
        self.scale = alpha / rank
        self.adapter_down = nn.Linear(linear.in_features, rank, bias=False)
        self.adapter_up = nn.Linear(rank, linear.out_features, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + self.scale * self.adapter_up(self.adapter_down(x))


def add_adapters(encoder: VisionTransformer, *, rank: int, alpha: float, layers: AdapterLayers) -> None:
    """Gives the named layers of every block an adapter, in place. `models.classifier` sets its values."""
    for block in encoder.blocks:
        for path in _LAYERS[layers]:
            part, _, name = path.rpartition(".")
            owner, linear = block.get_submodule(part), block.get_submodule(path)
            assert isinstance(linear, nn.Linear)
            setattr(owner, name, AdaptedLinear(linear, rank=rank, alpha=alpha))


def adapters(module: nn.Module) -> Iterator[AdaptedLinear]:
    """The layers that have one."""
    return (m for m in module.modules() if isinstance(m, AdaptedLinear))


@torch.no_grad()
def without_adapters(encoder: VisionTransformer, *, merged: bool = True) -> VisionTransformer:
    """The encoder without adapters; itself if it has none.

    Args:
        merged: each is added into the weight that it corrects, W + (alpha / r) U D; otherwise they are taken away.
    """
    if not any(adapters(encoder)):
        return encoder
    plain_encoder = copy.deepcopy(encoder)
    for path, module in list(plain_encoder.named_modules()):
        if isinstance(module, AdaptedLinear):
            plain = nn.Linear(module.in_features, module.out_features, bias=module.bias is not None)
            added = module.scale * module.adapter_up.weight @ module.adapter_down.weight
            plain.weight.copy_(module.weight + added if merged else module.weight)
            if module.bias is not None:
                plain.bias.copy_(module.bias)
            owner, _, name = path.rpartition(".")
            setattr(plain_encoder.get_submodule(owner), name, plain.to(module.weight))
    return plain_encoder


def is_adapter(name: str) -> bool:
    """Whether the parameter of this name is an adapter's."""
    return any(part in _PARTS for part in name.split("."))
