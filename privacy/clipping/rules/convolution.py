"""A convolution is a Linear on unfolded patches (Rochette et al. 2019, arXiv 1912.06015), in one, two or three dimensions."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping.contributions import Contribution, Dense, OuterProducts, dense_sum_over_tokens
from privacy.clipping.rules.registry import require_batch, rule, wide

Convolution = nn.Conv1d | nn.Conv2d | nn.Conv3d


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """weight (p, d / groups, *kernel) and bias (p,) for x (B, d, *size), g (B, p, *out size), any padding and dilation."""
    assert isinstance(module, Convolution)
    require_batch(module, x, len(module.kernel_size) + 2)
    patches_BTd, g_BTp = _patches(module, x), g.flatten(2).transpose(1, 2)
    out: dict[str, Contribution] = {
        "weight": OuterProducts(patches_BTd, g_BTp) if module.groups == 1 else _grouped(module, patches_BTd, g_BTp)
    }
    if module.bias is not None:
        out["bias"] = dense_sum_over_tokens(g_BTp)
    return out


def _patches(module: Convolution, x: Tensor) -> Tensor:
    """(B, T, d * kernel size): what each output position sees; the order within a patch is that of the weight."""
    x = _padded(module, x)
    n = len(module.kernel_size)
    for i, (size, step, gap) in enumerate(zip(module.kernel_size, module.stride, module.dilation, strict=True)):
        x = x.unfold(2 + i, (size - 1) * gap + 1, step)[..., ::gap]
    places, kernel = range(2, 2 + n), range(2 + n, 2 + 2 * n)
    return x.permute(0, *places, 1, *kernel).flatten(1 + n).flatten(1, n)


def _padded(module: Convolution, x: Tensor) -> Tensor:
    both_sides: list[int] = module._reversed_padding_repeated_twice
    if not any(both_sides):
        return x
    return F.pad(x, both_sides, "constant" if module.padding_mode == "zeros" else module.padding_mode)


def _grouped(module: Convolution, patches_BTd: Tensor, g_BTp: Tensor) -> Dense:
    """Each group of output channels sees its own group of input channels; written out, because it is that much smaller."""
    a = wide(patches_BTd).unflatten(2, (module.groups, -1))
    g = wide(g_BTp).unflatten(2, (module.groups, -1))
    return Dense(torch.einsum("btgp,btgd->bgpd", g, a).reshape(len(a), *module.weight.shape))
