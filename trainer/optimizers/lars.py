"""LARS: layer-wise adaptive rate scaling (You et al. 2017, arXiv:1708.03888, algorithm 1)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.optimizers.layer_wise import LayerWise, local


class Lars(LayerWise):
    """v <- momentum * v + lr * ratio * (g + weight_decay * x); x <- x - v.

    ratio = trust_coefficient * ||x|| / (||g|| + weight_decay * ||x||); 1 where a norm is zero, and in groups that are not
    `layer_wise`, which is SGD with momentum there.
    """

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, momentum: float, trust_coefficient: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "momentum": momentum, "trust_coefficient": trust_coefficient})

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert parameter.grad is not None
        state, gradient = self.state[parameter], local(parameter.grad).view(-1)
        if group["momentum"] > 0 and "momentum_buffer" not in state:
            state["momentum_buffer"] = torch.zeros_like(parameter, requires_grad=False)
        return gradient.add(local(parameter).view(-1), alpha=group["weight_decay"]), gradient

    def _ratios(self, weight_norms: Tensor, measured_norms: Tensor, group: dict[str, Any]) -> Tensor:
        usable = (weight_norms > 0) & (measured_norms > 0)
        scaled = group["trust_coefficient"] * weight_norms
        return torch.where(usable, scaled / (measured_norms + group["weight_decay"] * weight_norms), 1.0)

    def _update(self, weight: Tensor, direction: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        direction.mul_(group["lr"])
        if group["momentum"] > 0:
            direction = local(state["momentum_buffer"]).view(-1).mul_(group["momentum"]).add_(direction)
        weight.sub_(direction)
