"""What clipping should compute, written the slow way, one backward per example; and what `ClippedSum` makes of the same."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from privacy.clipping import SUMS
from privacy.clipping.clip_factors import ClippingFunction


def summed(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    c: float,
    *,
    task: Callable[..., Tensor] | None = None,
    micro: int | None = None,
    **options: Any,
) -> dict[str, Tensor]:
    """By `ClippedSum` with these options, in micro-batches of `micro` examples or in one."""
    total = SUMS[options.pop("mode", "bookkeeping")](model, c, **options)
    count = len(next(iter(inputs.values())))
    for start in range(0, count, micro or count):
        part = {name: x[start : start + (micro or count)] for name, x in inputs.items()}
        size = len(next(iter(part.values())))
        total.add_micro_batch(task or model, part, torch.zeros(size, dtype=torch.bool))
    total.detach()
    return dict(total.sums())


def per_example_gradients(
    model: nn.Module, task: Callable[..., Tensor], inputs: Mapping[str, Tensor]
) -> list[dict[str, Tensor]]:
    parameters = {n: p for n, p in model.named_parameters() if p.requires_grad}
    out = []
    for i in range(len(next(iter(inputs.values())))):
        loss = task(**{k: v[i : i + 1] for k, v in inputs.items()}).sum()
        gradients = torch.autograd.grad(loss, list(parameters.values()), allow_unused=True)
        out.append(
            {
                n: torch.zeros_like(p) if g is None else g
                for (n, p), g in zip(parameters.items(), gradients, strict=True)
            }
        )
    return out


def norm(gradients: Mapping[str, Tensor]) -> float:
    return float(sum(g.double().square().sum() for g in gradients.values())) ** 0.5


def clipped_sum(
    model: nn.Module,
    task: Callable[..., Tensor],
    inputs: Mapping[str, Tensor],
    max_grad_norm: float,
    *,
    function: Callable[[list[str], float], ClippingFunction] | None = None,
    dtype: torch.dtype | None = None,
) -> dict[str, Tensor]:
    """sum_i g_i min(1, C / |g_i|), or with the weights of another function for each group of parameters.

    Args:
        dtype: in which it is accumulated; that of the gradients by default, as a plain loop would.
    """
    chosen = function and function(
        [n for n, p in model.named_parameters() if p.requires_grad], max_grad_norm
    )
    total: dict[str, Tensor] = {}
    for g in per_example_gradients(model, task, inputs):
        for name, value in g.items():
            if chosen is None:
                weight = min(1.0, max_grad_norm / max(norm(g), 1e-300))
            else:
                i = chosen.group_of[name]
                of_group = norm({n: x for n, x in g.items() if chosen.group_of[n] == i})
                weight = float(
                    chosen.weight(torch.tensor(of_group, dtype=torch.float64), chosen.bounds[i])
                )
            total[name] = total.get(name, 0) + weight * value.to(dtype)
    return total


def error(
    model: nn.Module,
    inputs: Mapping[str, Tensor],
    *,
    task: Callable[..., Tensor] | None = None,
    **how: Any,
) -> float:
    """Of `summed`, relative, where clipping is active for about half of the examples; not finite where they add up to nothing."""
    c = median_norm(model, task or model, inputs)
    return relative_error(
        summed(model, inputs, c, task=task, **how), clipped_sum(model, task or model, inputs, c)
    )


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return float((flat(actual) - flat(expected)).norm() / flat(expected).norm())


def median_norm(
    model: nn.Module, task: Callable[..., Tensor], inputs: Mapping[str, Tensor]
) -> float:
    norms = sorted(norm(g) for g in per_example_gradients(model, task, inputs))
    return norms[len(norms) // 2]
