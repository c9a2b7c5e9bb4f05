"""One module per way to shard; each is imported only when it is used."""

from collections.abc import Callable

import torch
from torch import nn

from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.config.recipe import EngineName
from trainer.engines.base import Engine
from trainer.engines.refusals import require_supported
from trainer.ranks import distributed


def sharder(
    name: EngineName, machine: MachineSettings, device: torch.device, micro_batch_size: int
) -> Callable[[nn.Module], None] | None:
    """What shards a model's modules one by one while it is built, where the ds_config asks for that (`zero_init`)."""
    if not machine.zero_init:
        return None
    require_supported(name, machine, 1)  # no engine that builds in shards cares how many ranks there are
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
    require_supported(name, machine, distributed.world_size())
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
