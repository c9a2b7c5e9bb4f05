"""`fix(model)` makes a model trainable per example where that needs no decision."""

import math
from collections.abc import Callable, Mapping

import torch
from torch import Tensor, nn

from ..errors import say

GROUPS = 32
"""The largest number of groups of a GroupNorm that replaces a BatchNorm, as in Opacus."""


def fix(
    model: nn.Module,
    inputs: Mapping[str, Tensor] | None = None,
    task: Callable[..., Tensor] | None = None,
) -> list[str]:
    """Changes the model in place before its optimizer is made, and prints one line for each change.

    BatchNorm becomes GroupNorm with the same scales and shifts. Activations that write in place no
    longer do, and dropout layers drop nothing: their draw for an example would depend on its place
    in the micro-batch. With `inputs`, parameters that the loss never reaches are frozen; the
    self-check would refuse them by name.

    Args:
        inputs: two or more made-up examples, never private data.
        task: `task(**inputs)` returns the losses; the model itself by default.

    Returns:
        The printed lines.
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
                    norm.weight = module.weight
                    norm.bias = module.bias
                    norm.to(module.weight.device)
                parent, _, name = path.rpartition(".")
                setattr(model.get_submodule(parent), name, norm)
                line = (
                    f"{path}: {type(module).__name__} became GroupNorm of {norm.num_groups} groups"
                )
                if module.running_mean is not None:
                    line += (
                        "; statistics of its pre-training are gone, so the layers behind it see "
                        "other numbers: train it on, or keep the BatchNorm frozen and in eval mode "
                        "instead"
                    )
                lines.append(line)
            case nn.modules.dropout._DropoutNd() if module.p > 0:
                module.p = 0.0
                module.inplace = False
                lines.append(f"{path}: {type(module).__name__} drops nothing now (p = 0)")
            case nn.Module(inplace=True):
                module.inplace = False
                lines.append(f"{path}: {type(module).__name__} no longer writes in place")
    if inputs is not None:
        trained = {name: p for name, p in model.named_parameters() if p.requires_grad}
        with torch.enable_grad():
            loss = (task or model)(**inputs).sum()
        gradients = torch.autograd.grad(loss, list(trained.values()), allow_unused=True)
        for (name, p), gradient in zip(trained.items(), gradients, strict=True):
            if gradient is None:
                p.requires_grad_(False)
                lines.append(f"{name}: frozen, since the loss never reaches it")
    say(*lines, folds=True)
    return lines
