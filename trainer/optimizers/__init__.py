"""Optimizers of noised gradients: AdamW and SGD with momentum; and the rate of each step.

What an engine does with them:

    groups = parameter_groups(named_parameters, shapes, config)
    optimizer = make_optimizer(groups, config)            # over whole parameters, shards or flat partitions of them
    set_rate(optimizer.param_groups, lr); optimizer.step()

`moments` names the per-coordinate states that a checkpoint keeps, `fresh_state` makes them anew for a resume.
All of it is post-processing of noised sums: nothing here sees an example.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.optimizer import OptimizerSection, ScheduleSection
from trainer.errors import ConfigError

_BLOCK = re.compile(r"encoder\.blocks\.([0-9]+)\.")


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    shapes: Mapping[str, torch.Size],
    config: OptimizerSection,
) -> list[dict[str, Any]]:
    """Groups by weight decay and by the part of the rate that they take. Equal order on every rank.

    Args:
        parameters: (name, parameter) pairs.
        shapes: full shapes by name; a sharded parameter has another shape.

    Raises:
        ConfigError: layer_decay for a model without an encoder of blocks.
    """
    by_name = dict(parameters)
    return [
        {
            "params": [by_name[name] for name in names],
            "weight_decay": weight_decay,
            "lr_scale": lr_scale,
        }
        for (weight_decay, lr_scale), names in group_names(by_name, shapes, config).items()
    ]


def group_names(
    names: Iterable[str], shapes: Mapping[str, torch.Size], config: OptimizerSection
) -> dict[tuple[float, float], list[str]]:
    """The names in each group of `parameter_groups`, in its order, by weight decay and part of the rate.

    Weight decay is for matrices: biases, norms and tokens (one row) are excluded. The masked autoencoder's probes and fine-tuning
    exclude vectors too (He et al. 2021). The released code of ViP and DP-Cap does not: its AdamW decays every trained parameter,
    vectors, tokens and (ViP's) position tables included, by 0.005.
    """
    rates = layer_rates(shapes, config.layer_decay)
    groups: dict[tuple[float, float], list[str]] = {}
    for name in names:
        is_matrix = sum(size > 1 for size in shapes[name]) >= 2
        groups.setdefault((config.weight_decay if is_matrix else 0.0, rates[name]), []).append(name)
    return groups


def layer_rates(names: Iterable[str], decay: float | None) -> dict[str, float]:
    """The part of the learning rate that each parameter takes.

    decay^k for the k-th layer of the encoder from above, as the masked autoencoder's fine-tuning counts them (He et al. 2021,
    https://arxiv.org/abs/2111.06377, after Clark et al. 2020): its norm and all that follows have k = 0, its last block k = 1,
    its patch embedding, class token and positions one more than its first block.

    Raises:
        ConfigError: there is a decay, and no encoder of blocks.
    """
    blocks = {name: _BLOCK.match(name) for name in names}
    if decay is None:
        return dict.fromkeys(blocks, 1.0)
    depth = 1 + max((int(block[1]) for block in blocks.values() if block), default=-1)
    if depth == 0:
        raise ConfigError(
            "optimizer.layer_decay: the model trains no encoder.blocks to which it could apply; remove it"
        )

    def height(name: str) -> int:
        block = blocks[name]
        if block:
            return depth - int(block[1])
        return (
            depth + 1 if name.startswith("encoder.") and not name.startswith("encoder.norm.") else 0
        )

    return {name: decay ** height(name) for name in blocks}


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerSection) -> torch.optim.Optimizer:
    """The optimizer that the recipe names. The rate given here is never used: `set_rate` sets it.

    AdamW: Loshchilov and Hutter 2019. SGD: torch's, heavy-ball momentum, weight decay added to the gradient.
    """
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.peak_lr, momentum=config.momentum)


def moments(config: OptimizerSection) -> tuple[str, ...]:
    """Names of the per-coordinate states, in the optimizer's `state` and in checkpoints."""
    if config.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum > 0 else ()


def fresh_state(config: OptimizerSection, parameter: Tensor, num_steps: int) -> dict[str, Tensor]:
    """`optimizer.state[parameter]` after `num_steps` steps, with moments of zero, for `load_state` to fill."""
    if num_steps == 0:
        return {}
    zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in moments(config)}
    return {"step": torch.tensor(float(num_steps)), **zeros}


def set_rate(param_groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Sets the rate of a step; each group takes its part of it."""
    for group in param_groups:
        group["lr"] = lr * group["lr_scale"]


def learning_rate(step: int, num_steps: int, peak_lr: float, schedule: ScheduleSection) -> float:
    """Rate of step 1, 2, ..., num_steps: linear warm-up that reaches the peak at `warmup_steps`, then cosine or constant.

    `cosine_from_start` is ViP's released schedule: the lesser of warm-up and a cosine that began with step 1.
    """
    warmup, end = schedule.warmup_steps, schedule.decay_steps or num_steps
    warmed = min(step / warmup, 1.0) if warmup else 1.0
    if schedule.decay == "constant" or (schedule.decay == "cosine" and step <= warmup):
        return peak_lr * warmed
    if schedule.decay == "cosine_from_start":
        progress = min((step - 1) / end, 1.0)
    else:  # to one past the end, so that the last step still moves
        progress = min((step - warmup) / (end + 1 - warmup), 1.0)
    final = schedule.final_fraction
    return peak_lr * min(warmed, final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress)))
