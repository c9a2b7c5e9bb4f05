"""Applies activation checkpointing and torch.compile to a model's repeated blocks.

Checkpointing does not change the clipped sum. Compilation changes it by the rounding of fused
operations alone; norms are taken from the tensors that are summed, so the sensitivity does not
depend on the compiler.
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
    """A block that keeps its inputs and computes the rest again in the backward pass.

    Chen et al. 2016 (https://arxiv.org/abs/1604.06174), with torch's non-reentrant implementation,
    which alone lets a backward pass skip weight gradients (`torch.autograd.grad` with chosen
    inputs), as clipping does. It is a base before the block's own class, so that the block's
    parameters keep their names.
    """

    inputs_on_cpu: bool

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        if not torch.is_grad_enabled():
            return super().__call__(*args, **kwargs)
        saving: contextlib.AbstractContextManager[Any] = contextlib.nullcontext()
        if self.inputs_on_cpu:
            tensors = [argument for argument in args if isinstance(argument, Tensor)]
            saving = save_on_cpu(pin_memory=any(tensor.is_cuda for tensor in tensors))
        with saving:
            return checkpoint(super().__call__, *args, use_reentrant=False, **kwargs)


def checkpoint_blocks(module: nn.Module, machine: MachineSettings) -> None:
    """Applies the ds_config's `activation_checkpointing`.

    Call it before an engine wraps the module. A block repeats its hooks too: sharded engines gather
    its weights again, and the taps of clipping record it again (`privacy/gradients/recorder.py`).
    `two_pass` clipping keeps one block's activations at a time. `bookkeeping` keeps the input and
    output gradient of every linear layer until the norms are known, so that checkpointing saves
    only the activations between them.

    Raises:
        ConfigError: the ds_config asks for it, but the model does not list its blocks.
    """
    if not machine.activation_checkpointing:
        return
    blocks = repeated_blocks(module)
    if not blocks:
        raise ConfigError(
            f"ds_config {machine.path}: activation_checkpointing needs a model with a method "
            f"blocks() that lists its repeated modules; {type(module).__name__} has none: remove "
            "the key"
        )
    for block in blocks:
        name = f"Checkpointed{type(block).__name__}"
        block.__class__ = type(name, (_Checkpointed, type(block)), {})
        block.inputs_on_cpu = machine.checkpoint_on_cpu  # type: ignore[assignment]


def require_compilable(
    module: nn.Module, engine_name: EngineName, machine: MachineSettings, device: torch.device
) -> None:
    """Refuses a run whose blocks cannot be compiled, or on fairscale are not verified.

    Raises:
        ConfigError: the engine gathers weights inside of the blocks, the model names no blocks, or
            no compiler is installed.
    """
    if engine_name == "fsdp" or (engine_name == "deepspeed" and machine.stage == 3):
        sharding = "engine fsdp" if engine_name == "fsdp" else "ZeRO-3"
        raise ConfigError(
            f"train.compile cannot be combined with {sharding}, which gathers the weights of each "
            "layer in hooks inside the compiled blocks; use ds_configs/zero1.json or zero2.json, "
            "or remove train.compile"
        )
    if engine_name == "fairscale":
        raise ConfigError(
            "train.compile has not been verified with engine fairscale; use --engine deepspeed "
            "with ds_configs/zero1.json, which shards the same states, or remove train.compile"
        )
    if not repeated_blocks(module):
        raise ConfigError(
            "train.compile needs a model with a method blocks() that lists its repeated modules; "
            f"{type(module).__name__} has none: remove train.compile"
        )
    require_compiler(device)


def compile_blocks(module: nn.Module) -> None:
    """Compiles `module.blocks()` in place.

    Call it after an engine took the module and before `ClippedSum` does. torch compiles at the
    first forward, once for every new combination of shapes. Names of parameters and checkpoints
    stay, and equal blocks share one graph. The taps of clipping are opaque operations in it
    (privacy/gradients/compiled.py), so the graph does not break and gradients of weights are not
    computed.
    """
    for block in repeated_blocks(module):
        block.compile(backend="inductor")


def require_compiler(device: torch.device) -> None:
    """Refuses a machine without the compilers of torch's default backend.

    CPU kernels need a C++ compiler, CUDA kernels Triton and a C compiler.
    """
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError(
            "train.compile needs Triton on CUDA, which CUDA builds of torch bring: install torch "
            "anew"
        )
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if device.type == "cuda":
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "cc", "clang"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"train.compile needs a compiler on this machine ({' or '.join(names)}): install one "
            "(apt-get install g++), or remove train.compile"
        )
