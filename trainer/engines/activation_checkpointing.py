"""Activation checkpointing of a model's blocks: keep a block's inputs, compute the rest again in the backward pass.

Chen et al. 2016 (https://arxiv.org/abs/1604.06174), with torch's non-reentrant implementation, which alone lets a backward
pass skip weight gradients (`torch.autograd.grad` with chosen inputs), as clipping does. The whole call of a block is repeated,
its hooks included: sharded engines gather the block's weights again, and the taps of clipping record it again
(`privacy/clipping/recorder.py`).

The clipped sum does not change. What is saved depends on the clipping mode: `two_pass` keeps one block's activations at a time;
`bookkeeping` keeps the input and output gradient of every linear layer until the norms are known, so that only the
activations between them (attention weights, non-linearities) are saved.
"""

import contextlib
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from privacy.step.engine import repeated_blocks
from trainer.config.machine import MachineSettings
from trainer.errors import ConfigError


class _Checkpointed(nn.Module):
    """Stands before a block's class among its bases, so that its parameters keep their names."""

    inputs_on_cpu: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        pin = any(isinstance(value, Tensor) and value.is_cuda for value in args)
        with save_on_cpu(pin_memory=pin) if self.inputs_on_cpu else contextlib.nullcontext():
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(module: nn.Module, machine: MachineSettings) -> None:
    """Does what the ds_config's `activation_checkpointing` says; call it before an engine wraps the module.

    Raises:
        ConfigError: the ds_config asks for it, but the model does not say what its blocks are.
    """
    if not machine.activation_checkpointing:
        return
    blocks = repeated_blocks(module)
    if not blocks:
        raise ConfigError(
            f"ds_config {machine.path}: activation_checkpointing needs a model with a method blocks() that lists its "
            f"repeated modules; {type(module).__name__} has none: remove the key"
        )
    for block in blocks:
        block.__class__ = type(f"Checkpointed{type(block).__name__}", (_Checkpointed, type(block)), {})
        block.inputs_on_cpu = machine.checkpoint_on_cpu  # type: ignore[assignment]
