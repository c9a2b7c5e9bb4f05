"""What clipping should compute, written the slow way, one backward per example; and what `ClippedSum` makes of the same."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum


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
    total, count = ClippedSum(model, c, self_check=False, **options), len(next(iter(inputs.values())))
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
    model: nn.Module, task: Callable[..., Tensor], inputs: Mapping[str, Tensor], max_grad_norm: float
) -> dict[str, Tensor]:
    """sum_i g_i min(1, C / |g_i|), accumulated in the dtype of the gradients as a plain loop would."""
    total: dict[str, Tensor] = {}
    for g in per_example_gradients(model, task, inputs):
        weight = min(1.0, max_grad_norm / max(norm(g), 1e-300))
        for name, value in g.items():
            total[name] = total[name] + weight * value if name in total else weight * value
    return total


def flat(gradients: Mapping[str, Tensor]) -> Tensor:
    return torch.cat([gradients[name].double().flatten() for name in sorted(gradients)])


def relative_error(actual: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> float:
    return float((flat(actual) - flat(expected)).norm() / flat(expected).norm())


def median_norm(model: nn.Module, task: Callable[..., Tensor], inputs: Mapping[str, Tensor]) -> float:
    norms = sorted(norm(g) for g in per_example_gradients(model, task, inputs))
    return norms[len(norms) // 2]
