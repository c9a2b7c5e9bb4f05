"""What a subclass of a layer, or a module that holds a layer's weights itself, does with them: torch's layer functions.

`nn.Embedding.forward` calls `F.embedding(ids, self.weight)`, so a subclass that shifts the ids or scales the result (OPT, BART)
arrives here with a stand-in for its weight, and so does a subclass of `nn.LayerNorm` that moves channels about (ConvNeXt) or of
`nn.Linear` that adds a term. A table or matrix that is used as it stands is tapped like a layer's output, so no copy of it per
example is made. Scales and shifts of norms become products and sums, which raw_operations.py splits by example.
"""

from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .contributions import OuterProducts, Rows
from .raw import PerExample, handles, of_batch, refusal
from .rules import tokens


def as_layer(x: Tensor, g: Tensor) -> OuterProducts | Rows:
    """The gradient of a table (V, p) that ids x (B, ...) looked up, or of a matrix (p, d) for activations x (B, ..., d)."""
    return OuterProducts(tokens(x), tokens(g)) if x.is_floating_point() else Rows(x.reshape(len(x), -1), tokens(g))


def _tap_of(func: Any, args: Any, kwargs: Any, x: Any, weight: Any) -> Callable[[Tensor, Tensor], Tensor]:
    """What taps the output of a function that uses the weight as a layer would."""
    if isinstance(x, PerExample) or not isinstance(weight, PerExample) or weight.as_layer is None:
        raise refusal(func, args, kwargs, "a matrix or table must be used as it stands, on a tensor of the batch")
    return weight.as_layer


def _value(weight: Tensor) -> Tensor:
    """The parameter itself."""
    return weight.full().detach()[0] if isinstance(weight, PerExample) else weight


@handles([F.embedding])
def _embedding(func: Any, args: Any, kwargs: Any) -> Tensor:
    """Row padding_idx gets no gradient."""
    ids, weight = args
    if kwargs["max_norm"] is not None or kwargs["scale_grad_by_freq"] or kwargs["sparse"]:
        raise refusal(func, args, kwargs, "max_norm, scale_grad_by_freq and sparse are not supported")
    tap = _tap_of(func, args, kwargs, ids, weight)
    output = F.embedding(ids, _value(weight))
    tapped = tap(ids, output)
    if kwargs["padding_idx"] is None:
        return tapped
    if isinstance(tapped, PerExample):
        raise refusal(func, args, kwargs, "padding_idx is not supported where all examples share the ids")
    return torch.where((ids == kwargs["padding_idx"] % len(_value(weight)))[..., None], output, tapped)


@handles([F.linear])
def _linear(func: Any, args: Any, kwargs: Any) -> Tensor:
    x, weight, bias = _arguments(args, kwargs, ("input", "weight", "bias"))
    x = _of_examples(func, args, kwargs, x)
    if x.dim() < 2:
        raise refusal(func, args, kwargs, "its input is not of the batch")
    if isinstance(weight, PerExample):
        output = _tap_of(func, args, kwargs, x, weight)(x, F.linear(x, _value(weight)))
    else:
        output = _evident(F.linear(x, weight), x, bias)
    return output if bias is None else output + bias


@handles([F.layer_norm])
def _layer_norm(func: Any, args: Any, kwargs: Any) -> Tensor:
    """The normalised input, times weight, plus bias."""
    (x, shape), weight, bias = args, kwargs["weight"], kwargs.get("bias")
    x = _of_examples(func, args, kwargs, x)
    y = _evident(F.layer_norm(x, shape, eps=kwargs["eps"]), x, weight, bias)
    if weight is not None:
        y = y * weight
    return y if bias is None else y + bias


def _of_examples(func: Any, args: Any, kwargs: Any, x: Tensor) -> Tensor:
    """A layer's input, whose first dimension is the examples by the convention of all rules, as of queries expanded to them."""
    if not isinstance(x, PerExample):
        return x
    if not x.may_join or x.shape[0] != x.scope.batch_size:
        raise refusal(func, args, kwargs, "its input is not of the batch")
    return x.diagonal_part()


def _evident(y: Tensor, x: Tensor, *values: Any) -> Tensor:
    """y, computed from x: of the batch where x is, which a tensor that requires a gradient shows."""
    scopes = [v.scope for v in values if isinstance(v, PerExample)]
    return y.requires_grad_() if not y.requires_grad and of_batch(x, scopes) else y


def _arguments(args: Any, kwargs: Any, names: tuple[str, ...]) -> list[Any]:
    return [args[i] if i < len(args) else kwargs.get(name) for i, name in enumerate(names)]
