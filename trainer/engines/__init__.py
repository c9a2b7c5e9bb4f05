"""Builds engines, one module per way to shard, and refuses settings that an engine cannot do.

An engine's module is imported only when the engine is used.
"""

from collections.abc import Callable

import torch
from torch import nn

from privacy.ranks import collectives
from privacy.ranks.engine import Engine
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName
from trainer.config.sections import OptimizerSection
from trainer.errors import ConfigError


def require_supported(name: EngineName, machine: MachineSettings, world_size: int) -> None:
    """Refuses a combination of engine and ds_config.

    Raises:
        ConfigError: naming file, key, reason and a way out.
    """
    prefix = f"ds_config {machine.path}: zero_optimization"
    if machine.zero_init and name != "deepspeed":
        raise ConfigError(f"{prefix}.zero_init needs --engine deepspeed, not {name}")
    group_size = machine.shard_group_size
    if group_size is not None and name != "fsdp":
        raise ConfigError(
            f"{prefix}.zero_hpz_partition_size (groups of ranks that each hold the whole model) "
            f"needs --engine fsdp, not {name}"
        )
    if group_size is not None and world_size % group_size != 0:
        raise ConfigError(
            f"{prefix}.zero_hpz_partition_size {group_size} must divide the {world_size} ranks"
        )
    # Its post-backward hooks fire only where a gradient is accumulated. Besides, its first forward
    # fails on CPU, because its streams exist on CUDA only (fairscale 0.4.13).
    if name == "fairscale" and machine.stage == 3:
        raise ConfigError(
            f"{prefix}.stage 3 is refused with --engine fairscale: its FullyShardedDataParallel "
            "waits for gradients that per-example clipping never makes; use stage 1 (OSS), or "
            "--engine fsdp"
        )
    if name == "fairscale" and machine.offload_optimizer:
        raise ConfigError(
            f"{prefix}.offload_optimizer: --engine fairscale cannot offload; use deepspeed or fsdp"
        )
    if name == "fsdp" and machine.offload_optimizer and not machine.offload_param:
        raise ConfigError(
            f"{prefix}.offload_optimizer: FSDP2 keeps weights and optimizer states in one place; "
            "add offload_param (stage 3), or remove it"
        )
    if name == "local" and (machine.offload_optimizer or machine.offload_param):
        raise ConfigError(
            f"ds_config {machine.path}: engine local cannot offload; use --engine deepspeed"
        )


def sharder(
    name: EngineName, machine: MachineSettings, device: torch.device, micro_batch_size: int
) -> Callable[[nn.Module], None] | None:
    """Returns a function that shards one module of a model that is being built.

    None where the ds_config does not ask for it (`zero_init`).
    """
    if not machine.zero_init:
        return None
    # Engines that build in shards support any number of ranks.
    require_supported(name, machine, 1)
    from trainer.engines.deepspeed import module_sharder

    return module_sharder(machine, device, micro_batch_size)


def build_engine(
    name: EngineName,
    module: nn.Module,
    optimizer: OptimizerSection,
    machine: MachineSettings,
    device: torch.device,
    micro_batch_size: int,
) -> Engine:
    """Returns an engine around a module whose weights are set and equal on all ranks.

    A module built with a `sharder` has its weights in shards already; a resume sets them from the
    master weights.
    """
    require_supported(name, machine, collectives.world_size())
    engine: Engine
    match name:
        case "deepspeed":
            from trainer.engines.deepspeed import DeepSpeedEngine

            engine = DeepSpeedEngine(module, optimizer, machine, device, micro_batch_size)
        case "fsdp":
            from trainer.engines.fsdp import FsdpEngine

            engine = FsdpEngine(module, optimizer, machine, device)
        case "fairscale":
            from trainer.engines.fairscale import FairscaleEngine

            engine = FairscaleEngine(module, optimizer, machine, device)
        case "local":
            from trainer.engines.local import LocalEngine

            engine = LocalEngine(module, optimizer, machine, device)
    return engine
