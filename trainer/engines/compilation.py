"""torch.compile of a model's blocks (`train.compile`), with clipping on.

Block by block and in place: names of parameters, checkpoints and everything outside of the blocks stay as they are, and equal
blocks share one graph. The taps of clipping are opaque operations in it (privacy/clipping/compiled.py), so there is no graph
break, the weights' own gradients are not computed, and the clipped sum is what it is without compilation, up to the rounding
of fused operations. Norms are taken from the tensors that are summed, so the sensitivity does not depend on the compiler.

Refused where a block's weights come and go inside of it (ZeRO-3 and FSDP gather them in hooks of the modules), and on
fairscale, where it is not verified.
"""

import importlib.util
import os
import shutil

import torch
from torch import nn

from privacy.step.engine import repeated_blocks
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName
from trainer.errors import ConfigError

BACKEND = "inductor"


def require_compilable(
    module: nn.Module, engine_name: EngineName, machine: MachineSettings, device: torch.device
) -> None:
    """Refuses, before anything is trained, what cannot be compiled.

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
        block.compile(backend=BACKEND)


def require_compiler(device: torch.device) -> None:
    """Requires what torch's default backend needs: a C++ compiler for CPU kernels, Triton and a C compiler for CUDA ones."""
    if device.type == "cuda" and importlib.util.find_spec("triton") is None:
        raise ConfigError("train.compile needs Triton on CUDA: pip install '.[triton]'")
    names = [os.environ["CXX"]] if "CXX" in os.environ else ["g++", "clang++"]
    if device.type == "cuda":
        names = [os.environ["CC"]] if "CC" in os.environ else ["gcc", "cc", "clang"]
    if not any(shutil.which(name) for name in names):
        raise ConfigError(
            f"train.compile needs a compiler on this machine ({' or '.join(names)}): install one (apt-get install g++), or "
            "remove train.compile"
        )
