"""The table of rules, and helpers that rules share."""

import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from privacy.clipping.contributions import Contribution
from privacy.errors import PrivacyConfigError

Rule = Callable[..., dict[str, Contribution]]
"""`function(module, x, g)`, and one more argument for each tensor of a `Keep`."""
Keep = Callable[[nn.Module, Sequence[Any], Tensor], tuple[Tensor, ...]]
"""`function(module, inputs of the call, its output)`: tensors that a rule needs beside x and g, at most once per call."""

RULES: dict[type[nn.Module], Rule] = {}
KEEPS: dict[type[nn.Module], Keep] = {}

_LAZY: dict[tuple[str, str], tuple[Rule, Keep | None]] = {}


def rule(*kinds: type[nn.Module]) -> Callable[[Rule], Rule]:
    """Registers `function(module, x, g) -> {local parameter name: contribution}` for these types, not their subclasses.

    x is the first input of the call, (B, ...); g the gradient with respect to its output, (B, ...). The rule may name
    parameters that are frozen: they are left out.
    """

    def register(function: Rule) -> Rule:
        RULES.update(dict.fromkeys(kinds, function))
        return function

    return register


def lazy_rule(module_name: str, class_name: str, *, keep: Keep | None = None) -> Callable[[Rule], Rule]:
    """Like `rule`, for a class that is not imported here: it counts as soon as somebody else has imported its module."""

    def register(function: Rule) -> Rule:
        _LAZY[module_name, class_name] = function, keep
        return function

    return register


def register_lazily() -> None:
    """Looks for the classes of `lazy_rule` among the imported modules; a rule that was registered by hand stays."""
    for (module_name, class_name), (function, keep) in _LAZY.items():
        kind = getattr(sys.modules.get(module_name), class_name, None)
        if kind is not None and RULES.setdefault(kind, function) is function and keep is not None:
            KEEPS[kind] = keep


def require_batch(module: nn.Module, x: Tensor, dims: int) -> None:
    """Refuses an input without a batch dimension: its first dimension would be taken for the examples."""
    if x.dim() < dims:
        raise PrivacyConfigError(
            f"{type(module).__name__} was called on a tensor of shape {tuple(x.shape)} without a batch dimension; "
            "per-example clipping needs the examples in the first dimension"
        )


def tokens(x: Tensor) -> Tensor:
    """(B, ..., d) -> (B, T, d)."""
    return x.reshape(len(x), -1, x.shape[-1]) if x.numel() else x.new_zeros(len(x), 0, x.shape[-1])


def wide(x: Tensor) -> Tensor:
    """fp32, or fp64 for fp64: what per-example gradients are computed in."""
    return x.to(torch.float64 if x.dtype == torch.float64 else torch.float32)
