"""One module per way to shard; each is imported only when it is used."""

from collections.abc import Callable

import torch
from torch import nn

from trainer.config import EngineName, OptimizerSection
from trainer.ds_config import MachineSettings
from trainer.engines.base import Engine
from trainer.errors import ConfigError


def sharder(
    name: EngineName, machine: MachineSettings, device: torch.device, micro_batch_size: int
) -> Callable[[nn.Module], None] | None:
    """What shards a model's modules one by one while it is built, where the ds_config asks for that (`zero_init`)."""
    if not machine.zero_init:
        return None
    if name != "deepspeed":
        raise ConfigError(f"ds_config {machine.path}: zero_optimization.zero_init needs --engine deepspeed, not {name}")
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
    """Wraps a module, whose weights are already set and equal on all ranks; checks that every coordinate has one owner.

    A module built with a `sharder` holds its weights in shards already; after a resume they come with the master weights.
    """
    if machine.shard_group_size is not None and name != "fsdp":
        raise ConfigError(
            f"ds_config {machine.path}: zero_optimization.zero_hpz_partition_size (groups of ranks that each hold the whole "
            f"model) needs --engine fsdp, not {name}"
        )
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
    engine.layout.check(engine.shapes)
    return engine
