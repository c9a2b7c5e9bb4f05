"""The optimizers again, from the publications' algorithms: float64, whole parameters, one loop. Slow and plain on purpose."""

import torch
from torch import Tensor

Named = dict[str, Tensor]


def is_excluded(parameter: Tensor) -> bool:
    """Biases, norms, tokens of one row."""
    return sum(size > 1 for size in parameter.shape) < 2


def lamb(
    weights: Named, gradients: list[Named], lr: float, betas: tuple[float, float], eps: float, decay: float
) -> Named:
    """Algorithm 2 of You et al. 2020; excluded parameters are Adam's."""
    x = {n: w.double().clone() for n, w in weights.items()}
    m = {n: torch.zeros_like(w) for n, w in x.items()}
    v = {n: torch.zeros_like(w) for n, w in x.items()}
    for t, gradient in enumerate(gradients, 1):
        for n, g in ((n, g.double()) for n, g in gradient.items()):
            m[n] = betas[0] * m[n] + (1 - betas[0]) * g
            v[n] = betas[1] * v[n] + (1 - betas[1]) * g**2
            r = (m[n] / (1 - betas[0] ** t)) / ((v[n] / (1 - betas[1] ** t)).sqrt() + eps)
            if is_excluded(x[n]):
                x[n] = x[n] - lr * r
                continue
            u = r + decay * x[n]
            ratio = x[n].norm() / u.norm() if x[n].norm() > 0 and u.norm() > 0 else 1.0
            x[n] = x[n] - lr * ratio * u
    return x


def lars(weights: Named, gradients: list[Named], lr: float, momentum: float, eta: float, decay: float) -> Named:
    """Algorithm 1 of You et al. 2017; excluded parameters are SGD's."""
    x = {n: w.double().clone() for n, w in weights.items()}
    v = {n: torch.zeros_like(w) for n, w in x.items()}
    for gradient in gradients:
        for n, g in ((n, g.double()) for n, g in gradient.items()):
            if is_excluded(x[n]):
                v[n] = momentum * v[n] + lr * g
            else:
                positive = x[n].norm() > 0 and g.norm() > 0
                ratio = eta * x[n].norm() / (g.norm() + decay * x[n].norm()) if positive else 1.0
                v[n] = momentum * v[n] + lr * ratio * (g + decay * x[n])
            x[n] = x[n] - v[n]
    return x


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
