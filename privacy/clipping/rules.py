"""From a layer call to contributions: one short function per kind of layer.

A rule receives the module, its first input and the gradient of the summed loss with respect to its output, and returns what
that call adds to each of the module's own parameters. Rules are found by exact type, because a subclass may compute
something else; add one with `@rule(MyLayer)`.
"""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping.contributions import Contribution, Dense, OuterProducts, Rows, dense_sum_over_tokens

Rule = Callable[[nn.Module, Tensor, Tensor], dict[str, Contribution]]

RULES: dict[type[nn.Module], Rule] = {}


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    def register(function: Rule) -> Rule:
        for kind in kinds:
            RULES[kind] = function
        return function

    return register


def _tokens(x: Tensor) -> Tensor:
    """(B, ..., d) -> (B, T, d)."""
    return x.reshape(len(x), -1, x.shape[-1])


@rule(nn.Linear)
def linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    a_BTd, g_BTp = _tokens(x), _tokens(g)
    out: dict[str, Contribution] = {"weight": OuterProducts(a_BTd, g_BTp)}
    if getattr(module, "bias", None) is not None:
        out["bias"] = dense_sum_over_tokens(g_BTp)
    return out


@rule(nn.Conv2d)
def conv2d(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """A convolution is a Linear on unfolded patches (Rochette et al. 2019, arXiv 1912.06015)."""
    assert isinstance(module, nn.Conv2d)
    padding: tuple[int, ...] = module.padding  # type: ignore[assignment]  # strings are refused by check_module
    patches_BdT = F.unfold(x, module.kernel_size, module.dilation, padding, module.stride)  # type: ignore[arg-type]
    g_BTp = g.flatten(2).transpose(1, 2)
    out: dict[str, Contribution] = {"weight": OuterProducts(patches_BdT.transpose(1, 2), g_BTp)}
    if module.bias is not None:
        out["bias"] = dense_sum_over_tokens(g_BTp)
    return out


@rule(nn.LayerNorm)
def layer_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.LayerNorm)
    wide = torch.float64 if x.dtype == torch.float64 else torch.float32
    dims = tuple(range(1, x.dim() - len(module.normalized_shape)))
    normalised = F.layer_norm(x.to(wide), module.normalized_shape, eps=module.eps)
    g = g.to(wide)
    out: dict[str, Contribution] = {"weight": Dense(_sum(normalised * g, dims))}
    if module.bias is not None:
        out["bias"] = Dense(_sum(g, dims))
    return out


def _sum(x: Tensor, dims: tuple[int, ...]) -> Tensor:
    return x.sum(dims) if dims else x


@rule(nn.Embedding)
def embedding(module: nn.Module, ids: Tensor, g: Tensor) -> dict[str, Contribution]:
    assert isinstance(module, nn.Embedding)
    ids_BT, g_BTp = ids.reshape(len(ids), -1), _tokens(g)
    if module.padding_idx is not None:
        g_BTp = g_BTp.masked_fill((ids_BT == module.padding_idx)[:, :, None], 0)
    return {"weight": Rows(ids_BT, g_BTp)}


def unsupported_reason(module: nn.Module) -> str | None:
    """Why this module cannot be trained with per-example clipping, or None; parameters are checked elsewhere."""
    match module:
        case nn.modules.batchnorm._BatchNorm():
            return "it mixes the examples of a batch (use LayerNorm or GroupNorm)"
        case nn.MultiheadAttention():
            return "it reads its weights without calling its layers (use separate Linear layers and SDPA)"
        case nn.Conv2d() if module.groups != 1 or isinstance(module.padding, str) or module.padding_mode != "zeros":
            return "only ungrouped convolutions with numeric zero padding are supported"
        case nn.Embedding() if module.max_norm is not None or module.scale_grad_by_freq or module.sparse:
            return "max_norm, scale_grad_by_freq and sparse embeddings are not supported"
        case nn.modules.dropout._DropoutNd() if module.p > 0:
            return "its mask depends on the place of an example in the batch (set p = 0)"
        case _:
            return None
