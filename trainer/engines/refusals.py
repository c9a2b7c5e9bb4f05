"""What an engine cannot honour of a ds_config, refused before anything is begun. No engine is imported: the planner asks too."""

from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName
from trainer.errors import ConfigError


def require_supported(name: EngineName, machine: MachineSettings, world_size: int) -> None:
    """Refuses a combination of engine and ds_config.

    Raises:
        ConfigError: naming file, key, reason and a way out.
    """
    where = f"ds_config {machine.path}: zero_optimization"
    if machine.zero_init and name != "deepspeed":
        raise ConfigError(f"{where}.zero_init needs --engine deepspeed, not {name}")
    ranks = machine.shard_group_size
    if ranks is not None and name != "fsdp":
        raise ConfigError(
            f"{where}.zero_hpz_partition_size (groups of ranks that each hold the whole model) needs --engine fsdp, not {name}"
        )
    if ranks is not None and world_size % ranks != 0:
        raise ConfigError(f"{where}.zero_hpz_partition_size {ranks} must divide the {world_size} ranks")
    if name == "fairscale" and machine.stage == 3:
        raise ConfigError(
            f"{where}.stage 3 is refused with --engine fairscale: its FullyShardedDataParallel waits for gradients that "
            "per-example clipping never makes; use stage 1 (OSS), or --engine fsdp"
        )
    if name == "fairscale" and machine.offload_optimizer:
        raise ConfigError(f"{where}.offload_optimizer: --engine fairscale cannot offload; use deepspeed or fsdp")
    if name == "fsdp" and machine.offload_optimizer and not machine.offload_param:
        raise ConfigError(
            f"{where}.offload_optimizer: FSDP2 keeps weights and optimizer states in one place; add offload_param (stage 3), "
            "or remove it"
        )
    if name == "local" and (machine.offload_optimizer or machine.offload_param):
        raise ConfigError(f"ds_config {machine.path}: engine local cannot offload; use --engine deepspeed")
