"""Normalisation layers: y = normalised(x) * weight + bias, so their per-example gradients are sums over positions.

`normalised` is computed again from the layer's input, in fp32 at least, rather than stored.
"""

import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping.contributions import Contribution, Dense
from privacy.clipping.rules.registry import require_batch, rule, summed, wide


@rule(nn.LayerNorm)
def layer_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight, bias (*normalized_shape,) for x, g (B, ..., *normalized_shape)."""
    assert isinstance(module, nn.LayerNorm)
    require_batch(module, x, len(module.normalized_shape) + 1)
    dims, g = _middle(x, len(module.normalized_shape)), wide(g)
    normalised = F.layer_norm(wide(x), module.normalized_shape, eps=module.eps)
    out: dict[str, Contribution] = {"weight": Dense(summed(normalised * g, dims))}
    if module.bias is not None:
        out["bias"] = Dense(summed(g, dims))
    return out


@rule(nn.RMSNorm)
def rms_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight (*normalized_shape,) for x, g (B, ..., *normalized_shape)."""
    assert isinstance(module, nn.RMSNorm)
    require_batch(module, x, len(module.normalized_shape) + 1)
    # By default eps is that of the dtype that the layer itself computes in: fp32 for half-precision inputs.
    normalised = F.rms_norm(wide(x), list(module.normalized_shape), eps=module.eps)
    return {"weight": Dense(summed(normalised * wide(g), _middle(x, len(module.normalized_shape))))}


@rule(nn.GroupNorm)
def group_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight, bias (C,) for x, g (B, C, ...)."""
    assert isinstance(module, nn.GroupNorm)
    dims, g = tuple(range(2, x.dim())), wide(g)
    normalised = F.group_norm(wide(x), module.num_groups, eps=module.eps)
    return {"weight": Dense(summed(normalised * g, dims)), "bias": Dense(summed(g, dims))}


def _middle(x: Tensor, last: int) -> tuple[int, ...]:
    """The dimensions between the batch and the `last` ones."""
    return tuple(range(1, x.dim() - last))
