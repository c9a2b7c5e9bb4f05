"""The optimizers again, from the publications' algorithms: float64, whole parameters, one loop. Slow and plain on purpose."""

import torch
from torch import Tensor

Named = dict[str, Tensor]


def is_excluded(parameter: Tensor) -> bool:
    """Biases, norms, tokens of one row."""
    return sum(size > 1 for size in parameter.shape) < 2


def sgd(weights: Named, gradients: list[Named], lr: float, momentum: float, decay: float) -> Named:
    """Heavy ball: v <- momentum v + g + decay x; x <- x - lr v."""
    x = {n: w.double().clone() for n, w in weights.items()}
    v = {n: torch.zeros_like(w) for n, w in x.items()}
    for gradient in gradients:
        for n, g in ((n, g.double()) for n, g in gradient.items()):
            v[n] = momentum * v[n] + g + (0 if is_excluded(x[n]) else decay) * x[n]
            x[n] = x[n] - lr * v[n]
    return x


def adam(
    weights: Named, gradients: list[Named], lr: float, betas: tuple[float, float], decay: float,
    *, eps: float = 0.0, noise: list[float] | None = None, floor: float = 0.0,
) -> Named:  # fmt: skip
    """AdamW; with `noise` (one standard deviation per step) DP-AdamBC of Tang et al. 2023.

    The expectation of the noise's part of v is computed from its definition, not by a recursion.
    """
    x = {n: w.double().clone() for n, w in weights.items()}
    for t in range(1, len(gradients) + 1):
        for n in x:
            past = [gradient[n].double() for gradient in gradients[:t]]
            m = sum((1 - betas[0]) * betas[0] ** (t - 1 - i) * g for i, g in enumerate(past)) / (1 - betas[0] ** t)
            v = sum((1 - betas[1]) * betas[1] ** (t - 1 - i) * g**2 for i, g in enumerate(past)) / (1 - betas[1] ** t)
            x[n] = x[n] * (1 - lr * (0 if is_excluded(x[n]) else decay))
            if noise is None:
                x[n] = x[n] - lr * m / (v**0.5 + eps)
            else:
                phi = sum((1 - betas[1]) * betas[1] ** (t - 1 - i) * s**2 for i, s in enumerate(noise[:t]))
                x[n] = x[n] - lr * m / (v - phi / (1 - betas[1] ** t)).clamp(min=floor).sqrt()
    return x
