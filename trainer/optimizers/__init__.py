"""Makes optimizers of noised gradients, AdamW and SGD with momentum, and the rate of each step.

An engine calls:

    groups = parameter_groups(named_parameters, shapes, config)
    optimizer = make_optimizer(groups, config)  # of parameters, shards or flat partitions of them
    set_rate(optimizer.param_groups, lr); optimizer.step()

`moments` names the per-coordinate states that a checkpoint keeps, `fresh_state` makes them anew for
a resume. All of it is post-processing of noised sums: no example comes here.
"""

import math
import re
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from trainer.config.sections import OptimizerSection, ScheduleSection
from trainer.errors import ConfigError

_BLOCK = re.compile(r"encoder\.blocks\.([0-9]+)\.")


def parameter_groups(
    parameters: Iterable[tuple[str, nn.Parameter]],
    shapes: Mapping[str, torch.Size],
    config: OptimizerSection,
) -> list[dict[str, Any]]:
    """Returns groups by weight decay and by the part of the rate; equal order on every rank.

    Args:
        parameters: (name, parameter) pairs.
        shapes: full shapes by name; a sharded parameter has another shape.

    Raises:
        ConfigError: layer_decay for a model without an encoder of blocks.
    """
    by_name = dict(parameters)
    groups = []
    for (weight_decay, lr_scale), names in group_names(by_name, shapes, config).items():
        members = [by_name[name] for name in names]
        groups.append({"params": members, "weight_decay": weight_decay, "lr_scale": lr_scale})
    return groups


def group_names(
    names: Iterable[str], shapes: Mapping[str, torch.Size], config: OptimizerSection
) -> dict[tuple[float, float], list[str]]:
    """Returns the names in each group of `parameter_groups`, by weight decay and part of the rate.

    Weight decay is for matrices: biases, norms and tokens (one row) are excluded. The masked
    autoencoder's probes and fine-tuning exclude vectors too (He et al. 2021). The released code of
    ViP and DP-Cap does not: its AdamW decays every trained parameter, vectors, tokens and (ViP's)
    position tables included, by 0.005.
    """
    rates = layer_rates(shapes, config.layer_decay)
    groups: dict[tuple[float, float], list[str]] = {}
    for name in names:
        is_matrix = sum(size > 1 for size in shapes[name]) >= 2
        weight_decay = config.weight_decay if is_matrix else 0.0
        groups.setdefault((weight_decay, rates[name]), []).append(name)
    return groups


def layer_rates(names: Iterable[str], decay: float | None) -> dict[str, float]:
    """Returns the part of the learning rate that each parameter takes.

    It is decay^k for the k-th layer of the encoder from above, as the masked autoencoder's
    fine-tuning counts them (He et al. 2021, https://arxiv.org/abs/2111.06377, after Clark et al.
    2020): its norm and all later layers have k = 0, its last block k = 1, its patch embedding,
    class token and positions one more than its first block.

    Raises:
        ConfigError: there is a decay, and no encoder of blocks.
    """
    blocks = {name: _BLOCK.match(name) for name in names}
    if decay is None:
        return dict.fromkeys(blocks, 1.0)
    depth = 1 + max((int(block[1]) for block in blocks.values() if block), default=-1)
    if depth == 0:
        raise ConfigError(
            "optimizer.layer_decay: the model trains no encoder.blocks to which it could apply; "
            "remove it"
        )
    rates = dict[str, float]()
    for name, block in blocks.items():
        height = 0
        if block:
            height = depth - int(block[1])
        elif name.startswith("encoder.") and not name.startswith("encoder.norm."):
            height = depth + 1
        rates[name] = decay**height
    return rates


def make_optimizer(groups: list[dict[str, Any]], config: OptimizerSection) -> torch.optim.Optimizer:
    """Returns the optimizer that the recipe names.

    Its present rate is never used: `set_rate` sets the rate of each step.
    AdamW: Loshchilov and Hutter 2019. SGD: torch's, with heavy-ball momentum and weight decay added
    to the gradient.
    """
    match config.name:
        case "adamw":
            return torch.optim.AdamW(groups, lr=config.peak_lr, betas=config.betas, eps=config.eps)
        case "sgd":
            return torch.optim.SGD(groups, lr=config.peak_lr, momentum=config.momentum)


def moments(config: OptimizerSection) -> tuple[str, ...]:
    """Returns the names of per-coordinate states in the optimizer's `state` and in checkpoints."""
    if config.name == "adamw":
        return ("exp_avg", "exp_avg_sq")
    return ("momentum_buffer",) if config.momentum > 0 else ()


def fresh_state(config: OptimizerSection, parameter: Tensor, num_steps: int) -> dict[str, Tensor]:
    """Returns `optimizer.state[parameter]` after `num_steps` steps, with moments of zero.

    `load_state` fills them.
    """
    if num_steps == 0:
        return {}
    zeros = {name: torch.zeros_like(parameter, requires_grad=False) for name in moments(config)}
    return {"step": torch.tensor(float(num_steps)), **zeros}


def set_rate(param_groups: Iterable[dict[str, Any]], lr: float) -> None:
    """Sets the rate of a step; each group takes its part of it."""
    for group in param_groups:
        group["lr"] = lr * group["lr_scale"]


def learning_rate(step: int, num_steps: int, peak_lr: float, schedule: ScheduleSection) -> float:
    """Returns the rate of step 1, 2, ..., num_steps.

    A linear warm-up reaches the peak at `warmup_steps`; then the rate is constant or a cosine.
    `cosine_from_start` is ViP's released schedule: the lesser of warm-up and a cosine that began
    with step 1.
    """
    warmup = schedule.warmup_steps
    end = schedule.decay_steps or num_steps
    warmup_share = min(step / warmup, 1.0) if warmup else 1.0
    if schedule.decay == "constant" or (schedule.decay == "cosine" and step <= warmup):
        return peak_lr * warmup_share
    if schedule.decay == "cosine_from_start":
        progress = min((step - 1) / end, 1.0)
    else:
        # The cosine ends one step past the end, so that the last step still moves.
        progress = min((step - warmup) / (end + 1 - warmup), 1.0)
    final = schedule.final_fraction
    cosine_share = final + (1 - final) * 0.5 * (1 + math.cos(math.pi * progress))
    return peak_lr * min(warmup_share, cosine_share)
