"""Optimizer and learning rate. The rate is a pure function of the step; step 1 already moves."""

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn

from trainer.config import OptimizerSection, ScheduleSection

MOMENTS = ("exp_avg", "exp_avg_sq")
"""Names of AdamW's per-coordinate states, in torch and in checkpoints."""


def decays(shape: torch.Size) -> bool:
    """Weight decay is for matrices: biases, norms and tokens (one row) are excluded."""
    return sum(size > 1 for size in shape) >= 2


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]], shapes: dict[str, torch.Size], weight_decay: float
) -> list[dict[str, Any]]:
    """Two groups, with and without weight decay; empty ones are left out. Takes (name, parameter) pairs."""
    groups: dict[float, list[nn.Parameter]] = {}
    for name, parameter in parameters:
        groups.setdefault(weight_decay if decays(shapes[name]) else 0.0, []).append(parameter)
    return [{"params": params, "weight_decay": decay} for decay, params in groups.items()]


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerSection) -> torch.optim.AdamW:
    """AdamW (Loshchilov and Hutter 2019). The rate given here is never used: `step(lr=...)` sets it."""
    return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps)


def learning_rate(step: int, num_steps: int, peak_lr: float, schedule: ScheduleSection) -> float:
    """Rate of step 1, 2, ..., num_steps: linear warm-up that reaches the peak at `warmup_steps`, then cosine or constant."""
    if step <= schedule.warmup_steps:
        return peak_lr * step / schedule.warmup_steps
    if schedule.decay == "constant":
        return peak_lr
    end = schedule.decay_steps or num_steps
    # One past the end, so that the last step still moves.
    progress = min((step - schedule.warmup_steps) / (end + 1 - schedule.warmup_steps), 1.0)
    final = schedule.final_fraction
    return peak_lr * (final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
