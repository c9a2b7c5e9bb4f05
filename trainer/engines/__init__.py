"""One module per way to shard; each is imported only when it is used."""

import torch
from torch import nn

from trainer.config import EngineName, OptimizerSection
from trainer.ds_config import MachineSettings
from trainer.engines.base import Engine


def build_engine(
    name: EngineName,
    module: nn.Module,
    optimizer: OptimizerSection,
    machine: MachineSettings,
    device: torch.device,
    micro_batch_size: int,
) -> Engine:
    """Wraps a module, whose weights are already set and equal on all ranks; checks that every coordinate has one owner."""
    engine: Engine
    if name == "deepspeed":
        from trainer.engines.deepspeed import DeepSpeedEngine

        engine = DeepSpeedEngine(module, optimizer, machine, device, micro_batch_size)
    else:
        from trainer.engines.local import LocalEngine

        engine = LocalEngine(module, optimizer, machine, device)
    engine.layout.check(engine.shapes)
    return engine
