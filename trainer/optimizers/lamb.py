"""LAMB: layer-wise adaptive moments for batch training (You et al. 2020, arXiv:1904.00962, algorithm 2)."""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trainer.optimizers.layer_wise import LayerWise, local


class Lamb(LayerWise):
    """x <- x - lr * ||x|| / ||u|| * u, where u = m_hat / (sqrt(v_hat) + eps) + weight_decay * x, and phi is the identity.

    Ratio 1 where a norm is zero, and in groups that are not `layer_wise`.
    """

    def __init__(self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], eps: float) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "eps": eps})

    def _direction(self, parameter: Tensor, group: dict[str, Any]) -> tuple[Tensor, Tensor]:
        assert parameter.grad is not None
        state, weight, gradient = self.state[parameter], local(parameter).view(-1), local(parameter.grad).view(-1)
        if "step" not in state:
            state["step"] = torch.tensor(0.0)
            state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
            state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
        state["step"] += 1
        step, (beta1, beta2) = float(state["step"]), group["betas"]
        m, v = local(state["exp_avg"]).view(-1), local(state["exp_avg_sq"]).view(-1)
        m.lerp_(gradient, 1 - beta1)
        v.mul_(beta2).addcmul_(gradient, gradient, value=1 - beta2)
        denominator = (v / (1 - beta2**step)).sqrt_().add_(group["eps"])
        direction = (m / (1 - beta1**step)).div_(denominator).add_(weight, alpha=group["weight_decay"])
        return direction, direction

    def _ratios(self, weight_norms: Tensor, measured_norms: Tensor, group: dict[str, Any]) -> Tensor:
        usable = (weight_norms > 0) & (measured_norms > 0)
        return torch.where(usable, weight_norms / measured_norms, 1.0)

    def _update(self, weight: Tensor, direction: Tensor, group: dict[str, Any], state: dict[str, Any]) -> None:
        weight.add_(direction, alpha=-group["lr"])
