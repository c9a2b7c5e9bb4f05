"""What is done to a model's repeated blocks before training: activation checkpointing, and torch.compile (`train.compile`).

**Checkpointing** keeps a block's inputs and computes the rest again in the backward pass. Chen et al. 2016
(https://arxiv.org/abs/1604.06174), with torch's non-reentrant implementation, which alone lets a backward pass skip weight
gradients (`torch.autograd.grad` with chosen inputs), as clipping does. The whole call of a block is repeated, its hooks included:
sharded engines gather the block's weights again, and the taps of clipping record it again (`privacy/gradients/recorder.py`). The
clipped sum does not change. `two_pass` clipping keeps one block's activations at a time; `bookkeeping` keeps the input and output
gradient of every linear layer until the norms are known, so that only the activations between them are saved.

**Compilation** goes block by block and in place: names of parameters and checkpoints stay as they are, and equal blocks share one
graph. The taps of clipping are opaque operations in it (privacy/gradients/compiled.py), so there is no graph break, gradients of
weights are not computed, and the clipped sum is what it is without compilation, up to the rounding of fused operations. Norms
are taken from the tensors that are summed, so the sensitivity does not depend on the compiler.
"""

import contextlib
import importlib.util
import os
import shutil
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import save_on_cpu
from torch.utils.checkpoint import checkpoint

from privacy.ranks.engine import repeated_blocks
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName
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
        block.__class__ = type(
            f"Checkpointed{type(block).__name__}", (_Checkpointed, type(block)), {}
        )
        block.inputs_on_cpu = machine.checkpoint_on_cpu  # type: ignore[assignment]


def require_compilable(
    module: nn.Module, engine_name: EngineName, machine: MachineSettings, device: torch.device
) -> None:
    """Refuses, before anything is trained, what cannot be compiled, or on fairscale is not verified.

    Raises:
        ConfigError: the engine gathers weights inside of the blocks, the model names no blocks, or no compiler is installed.
    """
    if engine_name == "fsdp" or (engine_name == "deepspeed" and machine.stage == 3):
        sharding = "engine fsdp" if engine_name == "fsdp" else "ZeRO-3"
        raise ConfigError(
            f"train.compile cannot be combined with {sharding}, which gathers the weights of each layer in hooks inside the "
            "compiled blocks; use ds_configs/zero1.json or zero2.json, or remove train.compile"
        )
    if engine_name == "fairscale":
        raise ConfigError(
            "train.compile has not been verified with engine fairscale; use --engine deepspeed with ds_configs/zero1.json, "
            "which shards the same states, or remove train.compile"
        )
    if not repeated_blocks(module):
        raise ConfigError(
            f"train.compile needs a model with a method blocks() that lists its repeated modules; {type(module).__name__} "
            "has none: remove train.compile"
        )
    require_compiler(device)


def compile_blocks(module: nn.Module) -> None:
    """Compiles `module.blocks()` in place; call it after an engine took the module and before `ClippedSum` does.

    The work is done at the first forward, once for every new combination of shapes.
    """
    for block in repeated_blocks(module):
        block.compile(backend="inductor")


def require_compiler(device: torch.device) -> None:
    """Requires what torch's default backend needs: a C++ compiler for CPU kernels, Triton and a C compiler for CUDA ones."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "train.compile needs Triton on CUDA, which CUDA builds of torch bring: install torch anew"
        )
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if device.type == "cuda":
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "cc", "clang"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"train.compile needs a compiler on this machine ({' or '.join(names)}): install one (apt-get install g++), or "
            "remove train.compile"
        )
