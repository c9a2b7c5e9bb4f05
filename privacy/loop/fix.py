"""`fix(model)`: makes a model trainable per example where that needs no decision, and says what it has changed."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..errors import say

GROUPS = 32
"""The most groups of a GroupNorm that takes a BatchNorm's place, as Opacus has it."""


def fix(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | None = None,
    task: Callable[..., Tensor] | None = None,
) -> list[str]:
    """Changes the model in place before its optimizer is made, and prints one line for each change.

    BatchNorm becomes GroupNorm with the same scales and shifts. Activations that write in place no longer do, and
    dropout layers drop nothing: what they draw for an example would depend on its place in the micro-batch. With `inputs`,
    parameters that the loss never reaches are frozen, which the self-check would refuse by name.

    Args:
        inputs: two or more made-up examples, never private data.
        task: `task(**inputs)` returns the losses; the model itself by default.

    Returns:
        The lines.
    """
    lines = []
    for path, module in list(model.named_modules()):
        match module:
            case nn.modules.batchnorm._BatchNorm() if path and (
                module.training or module.running_mean is None
            ):
                norm = nn.GroupNorm(
                    math.gcd(GROUPS, module.num_features),
                    module.num_features,
                    module.eps,
                    module.affine,
                )
                norm.train(module.training)
                if module.affine:
                    norm.weight, norm.bias = module.weight, module.bias
                    norm.to(module.weight.device)
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, norm)
                kept = (
                    "; statistics of its pre-training are gone, so what follows sees other numbers: train it on, or keep the "
                    "BatchNorm frozen and in eval mode instead"
                ) * (module.running_mean is not None)
                lines.append(
                    f"{path}: {type(module).__name__} became GroupNorm of {norm.num_groups} groups{kept}"
                )
            case nn.modules.dropout._DropoutNd() if module.p > 0:
                module.p, module.inplace = 0.0, False
                lines.append(f"{path}: {type(module).__name__} drops nothing now (p = 0)")
            case nn.Module(inplace=True):
                module.inplace = False
                lines.append(f"{path}: {type(module).__name__} no longer writes in place")
    if inputs is not None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            loss = (task or model)(**inputs).sum()
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for (name, p), g in zip(trained.items(), gradients, strict=True):
            if g is None:
                p.requires_grad_(False)
                lines.append(f"{name}: frozen, since the loss never reaches it")
    say(*lines, folds=True)
    return lines
