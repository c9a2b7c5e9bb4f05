"""DP-AdamBC: Adam whose second moment is corrected for the noise that we added and therefore know.

Tang, Shpilevskiy and Lecuyer 2023 (arXiv:2312.14334): noise of variance Phi in every gradient adds Phi to the second-moment
estimate; where it dominates, Adam's division by the root of that estimate is division by a constant. So
x <- x - lr * m_hat / sqrt(max(v_hat - Phi, gamma')), with Phi = (sigma C / B)^2 and a floor gamma' instead of eps.
"""

from collections.abc import Callable, Iterable
from typing import Any

import torch


class AdamBC(torch.optim.Optimizer):
    """See the module docstring; weight decay is decoupled, as in AdamW. `noise_variance` of the groups is set every step."""

    def __init__(
        self, groups: Iterable[dict[str, Any]], *, lr: float, betas: tuple[float, float], variance_floor: float
    ) -> None:
        super().__init__(groups, {"lr": lr, "betas": betas, "variance_floor": variance_floor})

    @torch.no_grad()
    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        if closure is not None:
            raise ValueError("a closure would evaluate the loss again; gradients are set before the step")
        for group in self.param_groups:
            (beta1, beta2), lr = group["betas"], group["lr"]
            for parameter in group["params"]:
                if parameter.grad is None:
                    continue
                state = self.state[parameter]
                if "step" not in state:
                    state["step"] = torch.tensor(0.0)
                    state["exp_avg"] = torch.zeros_like(parameter, requires_grad=False)
                    state["exp_avg_sq"] = torch.zeros_like(parameter, requires_grad=False)
                state["step"] += 1
                step, m, v = float(state["step"]), state["exp_avg"], state["exp_avg_sq"]
                m.lerp_(parameter.grad, 1 - beta1)
                v.mul_(beta2).addcmul_(parameter.grad, parameter.grad, value=1 - beta2)
                corrected = (v / (1 - beta2**step)).sub_(group["noise_variance"]).clamp_(min=group["variance_floor"])
                parameter.mul_(1 - lr * group["weight_decay"])
                parameter.addcdiv_(m, corrected.sqrt_(), value=-lr / (1 - beta1**step))
