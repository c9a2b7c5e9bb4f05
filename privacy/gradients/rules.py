"""Clipping rules: one short function per kind of layer, from a layer call to contributions.

A rule receives the module, its first input and the gradient of the summed loss with respect to its
output, and returns what that call adds to each of the module's own parameters. Rules go by exact
type, because a subclass may compute something else; add one with `@rule(MyLayer)`
(docs/extending.md).

Sizes: B examples, T of any number of middle dimensions, d input width, p output width, V rows of a
table.
"""

import math
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..numerics.fused import fused
from ..numerics.precision import wide
from .per_example_gradients import (
    ChunkedOuterProducts,
    Contribution,
    Dense,
    EmbeddingGradient,
    OuterProducts,
    gram,
    sum_over_tokens,
)

Rule = Callable[..., dict[str, Contribution]]
"""`function(module, x, g)`, and one more argument for each tensor of a `Keep`."""
Keep = Callable[[nn.Module, Sequence[Any], Tensor], tuple[Tensor, ...]]
"""`function(module, inputs of the call, its output)`: returns tensors that a rule needs besides x
and g; called at most once per call."""

RULES: dict[type[nn.Module], Rule] = {}
KEEPS: dict[type[nn.Module], Keep] = {}

_LAZY: dict[str, tuple[Rule, Keep | None]] = {}


def rule(*kinds: type[nn.Module] | str, keep: Keep | None = None) -> Callable[[Rule], Rule]:
    """Registers a rule for these types, not their subclasses.

    The rule is `function(module, x, g) -> {local parameter name: contribution}`: x is the first
    input of the call, (B, ...), and g the gradient with respect to its output, (B, ...). The rule
    may name parameters that are frozen: they are left out.

    Args:
        kinds: classes; "module:Class" for a class that is not imported here, whose rule counts as
            soon as the program has imported it.
        keep: for a rule that needs more than x and g.
    """

    def register(function: Rule) -> Rule:
        for kind in kinds:
            if isinstance(kind, str):
                _LAZY[kind] = function, keep
            else:
                RULES[kind] = function
                if keep is not None:
                    KEEPS[kind] = keep
        return function

    return register


def register_lazily() -> None:
    """Registers the rules whose classes were named and are imported by now.

    A rule for the class itself stays.
    """
    for name, (function, keep) in _LAZY.items():
        module_name, _, class_name = name.partition(":")
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if kind is not None and kind not in RULES:
            rule(kind, keep=keep)(function)


def require_batch(module: nn.Module, x: Tensor, dims: int) -> None:
    """Refuses an input without a batch dimension: its first dimension would pass for examples."""
    if x.dim() < dims:
        raise PrivacyConfigError(
            f"{type(module).__name__} was called on a tensor of shape {tuple(x.shape)} without a "
            "batch dimension; per-example clipping needs the examples in the first dimension"
        )


def tokens(x: Tensor) -> Tensor:
    """Returns (B, ..., d) as (B, T, d)."""
    if not x.numel():
        return x.new_zeros(len(x), 0, x.shape[-1])
    return x.reshape(len(x), -1, x.shape[-1])


@rule(nn.Linear)
def linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contributions of y_t = W a_t + b, for x (B, ..., d) and g (B, ..., p).

    weight (p, d): sum_t g_t (x) a_t; bias (p,): sum_t g_t.
    """
    require_batch(module, x, 2)
    a_BTd = tokens(x)
    g_BTp = tokens(g)
    return _with_bias(module, OuterProducts(a_BTd, g_BTp), g_BTp)


def _with_bias(module: nn.Module, weight: Contribution, g_BTp: Tensor) -> dict[str, Contribution]:
    """Returns the weight's contribution, and sum_t g_t for a layer that has a bias."""
    if getattr(module, "bias", None) is None:
        return {"weight": weight}
    return {"weight": weight, "bias": Dense(sum_over_tokens(g_BTp))}


@rule("transformers.pytorch_utils:Conv1D")
def transposed_linear(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contributions of GPT-2's layer, y_t = a_t W + b with weight (d, p).

    Input and output gradient change places.
    """
    require_batch(module, x, 2)
    a_BTd = tokens(x)
    g_BTp = tokens(g)
    return {"weight": OuterProducts(g_BTp, a_BTd), "bias": Dense(sum_over_tokens(g_BTp))}


@rule(nn.Embedding)
def embedding(module: nn.Module, ids: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contribution of y_t = E[id_t], for ids (B, ...) and g (B, ..., p).

    Row id_t of weight (V, p) receives g_t; row padding_idx receives nothing.
    """
    assert isinstance(module, nn.Embedding)
    ids_BT = ids.reshape(len(ids), -1)
    g_BTp = tokens(g)
    if module.padding_idx is not None:
        g_BTp = g_BTp.masked_fill((ids_BT == module.padding_idx)[:, :, None], 0)
    return {"weight": EmbeddingGradient(ids_BT, g_BTp)}


# Normalisation layers: y = normalised(x) * weight + bias, so their per-example gradients are sums
# over positions. `normalised` is computed again from the layer's input, in fp32 at least, and not
# stored.


@rule(nn.LayerNorm)
def layer_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contributions to weight and bias, (*normalized_shape,) each.

    x and g are (B, ..., *normalized_shape).
    """
    assert isinstance(module, nn.LayerNorm)
    require_batch(module, x, len(module.normalized_shape) + 1)
    weight_B, bias_B = _layer_norm(x, g, module.normalized_shape, module.eps)
    return {"weight": Dense(weight_B), "bias": Dense(bias_B)}


@rule(nn.RMSNorm)
def rms_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contribution to weight (*normalized_shape,).

    x and g are (B, ..., *normalized_shape).
    """
    assert isinstance(module, nn.RMSNorm)
    require_batch(module, x, len(module.normalized_shape) + 1)
    # By default eps is that of the dtype that the layer itself computes in: fp32 for half-precision
    # inputs.
    return {"weight": Dense(_rms_norm(x, g, module.normalized_shape, module.eps))}


@fused(for_all_sizes=False)
def _layer_norm(x: Tensor, g: Tensor, shape: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    """Returns the gradients of weight and bias, (B, *shape) each."""
    products = F.layer_norm(wide(x), shape, eps=eps).mul_(g)
    return _summed(products, shape), _summed(g, shape)


@fused(for_all_sizes=False)
def _rms_norm(x: Tensor, g: Tensor, shape: tuple[int, ...], eps: float | None) -> Tensor:
    """Returns the gradient of weight, (B, *shape)."""
    return _summed(F.rms_norm(wide(x), shape, eps=eps).mul_(g), shape)


def _summed(x: Tensor, shape: tuple[int, ...]) -> Tensor:
    """Returns the sum of x (B, ..., *shape) over the middle dimensions, (B, *shape)."""
    x_BTd = x.reshape(len(x), -1, math.prod(shape))
    return sum_over_tokens(x_BTd).view(len(x), *shape)


@rule(nn.GroupNorm)
def group_norm(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contributions to weight and bias, (C,) each, for x and g (B, C, ...)."""
    assert isinstance(module, nn.GroupNorm)
    g = wide(g)
    products = F.group_norm(wide(x), module.num_groups, eps=module.eps).mul_(g)
    weight_BC = products.reshape(*x.shape[:2], -1).sum(2)
    bias_BC = g.reshape(*x.shape[:2], -1).sum(2)
    return {"weight": Dense(weight_BC), "bias": Dense(bias_BC)}


@rule(nn.Conv1d, nn.Conv2d, nn.Conv3d)
def convolution(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contributions of a convolution, for x (B, d, *size) and g (B, p, *out size).

    weight (p, d / groups, *kernel) and bias (p,), with any padding and dilation. A convolution is a
    Linear on unfolded patches (Rochette et al. 2019, arXiv 1912.06015).
    """
    assert isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d)
    n = len(module.kernel_size)
    require_batch(module, x, n + 2)
    both_sides: list[int] = module._reversed_padding_repeated_twice
    if any(both_sides):
        mode = "constant" if module.padding_mode == "zeros" else module.padding_mode
        x = F.pad(x, both_sides, mode)
    patches_BTd = _unfolded(module, x)
    g_BTp = g.flatten(2).transpose(1, 2)
    return _with_bias(module, _by_group(module, patches_BTd, g_BTp), g_BTp)


@rule(nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
def transposed_convolution(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contributions of a transposed convolution.

    x is (B, d, *size), g (B, p, *out size), weight (d, p / groups, *kernel) and bias (p,). The
    layer is the gradient of a convolution from p to d channels, so x and the patches of g change
    places.
    """
    assert isinstance(module, nn.ConvTranspose1d | nn.ConvTranspose2d | nn.ConvTranspose3d)
    n = len(module.kernel_size)
    require_batch(module, x, n + 2)
    padding = [int(size) for size in module.padding]
    both_sides = [size for size in reversed(padding) for _ in range(2)]
    patches_BTp = _unfolded(module, F.pad(g, both_sides), x.shape[2:])
    weight = _by_group(module, patches_BTp, x.flatten(2).transpose(1, 2))
    return _with_bias(module, weight, g.flatten(2).transpose(1, 2))


def _unfolded(
    module: nn.modules.conv._ConvNd, x: Tensor, num_places: Sequence[int] | None = None
) -> Tensor:
    """Returns the patches (B, T, channels * kernel size) of all places of the kernel.

    The entries of a patch are in the order of the weight.

    Args:
        num_places: in each dimension, where the kernel would fit in more often.
    """
    n = len(module.kernel_size)
    geometry = zip(module.kernel_size, module.stride, module.dilation, strict=True)
    for i, (size, step, gap) in enumerate(geometry):
        extent = (size - 1) * gap + 1
        x = x.unfold(2 + i, extent, step)[..., ::gap]
        if num_places is not None:
            x = x.narrow(2 + i, 0, num_places[i])
    places = range(2, 2 + n)
    entries = range(2 + n, 2 + 2 * n)
    return x.permute(0, *places, 1, *entries).flatten(1 + n).flatten(1, n)


def _by_group(module: nn.modules.conv._ConvNd, a_BTd: Tensor, g_BTp: Tensor) -> Contribution:
    """Returns sum_t g_t (x) a_t, of which groups keep the blocks on the diagonal.

    Those blocks are written out, being so much smaller.
    """
    if module.groups == 1:
        return OuterProducts(a_BTd, g_BTp)
    a_BTgd = wide(a_BTd).unflatten(2, (module.groups, -1))
    g_BTgp = wide(g_BTp).unflatten(2, (module.groups, -1))
    blocks_Bgpd = torch.einsum("btgp,btgd->bgpd", g_BTgp, a_BTgd)
    return Dense(blocks_Bgpd.reshape(len(a_BTgd), *module.weight.shape))


@rule(nn.PReLU)
def prelu(module: nn.Module, x: Tensor, g: Tensor) -> dict[str, Contribution]:
    """Returns the contribution of y = max(x, 0) + weight min(x, 0).

    weight is (1,) or (C,); x and g are (B, C, ...).
    """
    assert isinstance(module, nn.PReLU)
    products = wide(x).clamp(max=0) * wide(g)
    channels = 1 if module.num_parameters == 1 else x.shape[1]
    return {"weight": Dense(products.reshape(len(x), channels, -1).sum(2))}


def keep_for_vocabulary_head(
    module: nn.Module, inputs: Sequence[Tensor], output: Tensor
) -> tuple[Tensor, ...]:
    """Returns (targets, log-sum-exp, weight, bias).

    Weight and bias are copies, because sharded engines take the weights away after the forward.
    """
    if len(inputs) == 1:
        return ()
    head: Any = module
    _, weight_VD, bias_V = head.operands(inputs[0])
    copies = [p.detach().clone() for p in (weight_VD, bias_V) if p is not None]
    return (inputs[1], output[..., 0].detach(), *copies)


@rule("models.vocabulary_head:VocabularyHead", keep=keep_for_vocabulary_head)
def vocabulary_head(
    module: nn.Module, x: Tensor, g: Tensor, *tensors: Tensor
) -> dict[str, Contribution]:
    """Returns the contributions of a vocabulary head to weight (V, d) and bias (V,).

    Called for scores, the head is a Linear. With targets it goes straight to the cross-entropy, by
    chunks of the vocabulary; x is (B, T, d) and g is (B, T, 2). The rule uses the arithmetic of the
    class (`operands`, `logit_gradients`). The output gradients (B, T, V) are computed three times,
    for the hidden states (by the module), here for Gram matrix and bias, and for the weighted sum,
    and never all held.
    """
    if not tensors:
        return linear(module, x, g)
    head: Any = module
    targets_BT, logsumexp_BT, weight_Vd, *biases = tensors
    a_BTd = x.to(weight_Vd.dtype)
    bias_V = biases[0] if biases else None
    num_chunks = head.num_chunks(x)

    def gradients() -> Iterator[tuple[slice, Tensor]]:
        chunks: Iterator[tuple[slice, Tensor]] = head.logit_gradients(
            targets_BT, num_chunks, logsumexp_BT, g, a_BTd, weight_Vd, bias_V
        )
        return chunks

    num_rows = len(weight_Vd)
    num_tokens = x.shape[1]
    gram_BTT = g.new_zeros(len(x), num_tokens, num_tokens, dtype=torch.float64)
    bias_BV = wide(g).new_empty(len(x), num_rows)
    for rows, g_BTv in gradients():
        gram_BTT += gram(g_BTv, g_BTv)
        bias_BV[:, rows] = sum_over_tokens(g_BTv)
    contributions: dict[str, Contribution] = {
        "weight": ChunkedOuterProducts(a_BTd, gram_BTT.to(bias_BV.dtype), num_rows, gradients)
    }
    if bias_V is not None:
        contributions["bias"] = Dense(bias_BV)
    return contributions
