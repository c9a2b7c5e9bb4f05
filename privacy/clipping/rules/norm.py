"""Normalisation layers: y = normalised(x) * weight + bias, so their per-example gradients are sums over positions.

`normalised` is computed again from the layer's input, in fp32 at least, rather than stored.
"""

import math

import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping.contributions import Contribution, Dense, sum_over_tokens
from privacy.clipping.rules.registry import require_batch, rule, wide


@rule(nn.LayerNorm)
def layer_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight, bias (*normalized_shape,) for x, g (B, ..., *normalized_shape)."""
    assert isinstance(module, nn.LayerNorm)
    require_batch(module, x, len(module.normalized_shape) + 1)
    normalised = F.layer_norm(wide(x), module.normalized_shape, eps=module.eps)
    out: dict[str, Contribution] = {"weight": _summed(module, normalised.mul_(g))}
    if module.bias is not None:
        out["bias"] = _summed(module, g)
    return out


@rule(nn.RMSNorm)
def rms_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight (*normalized_shape,) for x, g (B, ..., *normalized_shape)."""
    assert isinstance(module, nn.RMSNorm)
    require_batch(module, x, len(module.normalized_shape) + 1)
    # By default eps is that of the dtype that the layer itself computes in: fp32 for half-precision inputs.
    normalised = F.rms_norm(wide(x), list(module.normalized_shape), eps=module.eps)
    return {"weight": _summed(module, normalised.mul_(g))}


@rule(nn.GroupNorm)
def group_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight, bias (C,) for x, g (B, C, ...)."""
    assert isinstance(module, nn.GroupNorm)
    normalised, g = F.group_norm(wide(x), module.num_groups, eps=module.eps), wide(g)
    weight, bias = normalised.mul_(g), g  # (B, C, ...)
    return {name: Dense(y.reshape(*x.shape[:2], -1).sum(2)) for name, y in (("weight", weight), ("bias", bias))}


def _summed(module: nn.LayerNorm | nn.RMSNorm, x: Tensor) -> Dense:
    """(B, ..., *normalized_shape) -> (B, *normalized_shape)."""
    shape = module.normalized_shape
    return Dense(sum_over_tokens(x.reshape(len(x), -1, math.prod(shape))).view(len(x), *shape))
