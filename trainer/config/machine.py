"""ds_configs/*.json: what the machine decides.

Loading refuses every key that is the recipe's; resolving writes those keys out in full, because DeepSpeed's defaults
change (gradient_clipping went from 0 to 1.0 in 0.19.3) and unknown top-level keys pass it silently.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.errors import ConfigError

RECIPE_KEYS = {
    "train_batch_size": "privacy.expected_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "nothing (it follows from the batch sizes)",
    "gradient_clipping": "privacy.max_grad_norm",
    "optimizer": "[optimizer]",
    "scheduler": "[schedule]",
    "prescale_gradients": "nothing (gradients are sums)",
    "gradient_predivide_factor": "nothing (gradients are sums)",
    "gradient_allreduce_op": "nothing (gradients are sums)",
    "managed_gradient_accumulation": "nothing",
    "data_types": "nothing (accumulators are fp32)",
    "communication_data_type": "nothing (the reduction is fp64)",
    "steps_per_print": "train.log_every",
    "tensorboard": "nothing (always written)",
    "wandb": "nothing",
    "csv_monitor": "nothing",
    "zero_allow_untested_optimizer": "nothing",
    "zero_force_ds_cpu_optimizer": "nothing",
}
"""Keys that do not belong here, and the recipe key that means the same."""

MACHINE_KEYS = {"zero_optimization", "bf16", "fp16", "activation_checkpointing"}

NO_EFFECT = {
    "flops_profiler": "benchmarks/step.py counts FLOPs",
    "wall_clock_breakdown": "private/metrics.jsonl has the times of a step",
    "memory_breakdown": "private/metrics.jsonl has the peak memory",
    "comms_logger": "private/metrics.jsonl has the bytes of a step",
    "aio": "offload to NVMe is not supported",
    "zero_optimization.contiguous_gradients": "DeepSpeed never sees a gradient here",
    "zero_optimization.reduce_scatter": "DeepSpeed never sees a gradient here",
    "zero_optimization.reduce_bucket_size": "DeepSpeed never sees a gradient here",
    "zero_optimization.round_robin_gradients": "DeepSpeed never sees a gradient here",
    "zero_optimization.ignore_unused_parameters": "DeepSpeed never sees a gradient here",
    "zero_optimization.allgather_partitions": "the installed DeepSpeed does not read it",
    "zero_optimization.elastic_checkpoint": "every checkpoint can be resumed with any number of ranks",
    "zero_optimization.stage3_gather_16bit_weights_on_model_save": "launch_scripts/export.py writes whole weights",
    "zero_optimization.memory_efficient_linear": "always off: it would compute weight gradients that nobody reads",
}
"""DeepSpeed's keys that would be accepted and then change nothing: refused, with the place where the wish is met."""

Check = tuple[Callable[[Any], bool], str]

_SWITCH: Check = (lambda value: isinstance(value, bool), "true or false")
_COUNT: Check = (lambda value: type(value) is int and value >= 0, "a number of elements (an integer, 0 or more)")
_SIZE: Check = (lambda value: type(value) is int and value > 0, "a number of elements (an integer above 0)")
_OBJECT: Check = (lambda value: isinstance(value, dict), "an object")

ZERO_KEYS: Mapping[str, tuple[tuple[int, ...], Check]] = {
    "stage": ((1, 2, 3), (lambda value: type(value) is int and value in (1, 2, 3), "1, 2 or 3")),
    "offload_optimizer": ((1, 2, 3), _OBJECT),
    "offload_param": ((3,), _OBJECT),
    "allgather_bucket_size": ((1, 2), _SIZE),
    "overlap_comm": ((3,), _SWITCH),
    "sub_group_size": ((3,), _SIZE),
    "stage3_prefetch_bucket_size": ((3,), _COUNT),
    "stage3_param_persistence_threshold": ((3,), _COUNT),
    "stage3_model_persistence_threshold": ((3,), _COUNT),
    "stage3_max_live_parameters": ((3,), _COUNT),
    "stage3_max_reuse_distance": ((3,), _COUNT),
    "zero_init": ((3,), _SWITCH),
    "zero_hpz_partition_size": (
        (1, 2, 3),
        (lambda value: type(value) is int and value > 0, "a number of ranks above 0"),
    ),
}
"""Key of zero_optimization -> the stages at which it has an effect, and what its value must be."""

OFFLOAD_KEYS: Mapping[str, Check] = {
    "device": (lambda value: value in ("none", "cpu"), '"none" or "cpu" (offload to NVMe is not supported)'),
    "pin_memory": _SWITCH,
}

CHECKPOINTING_KEYS: Mapping[str, Check] = {"enabled": _SWITCH, "cpu_checkpointing": _SWITCH}
"""DeepSpeed's other keys tune its reentrant implementation, which clipping cannot use."""


@dataclass(frozen=True)
class MachineSettings:
    """A checked ds_config.

    Attributes:
        offload_optimizer: master weights and optimizer states live in host memory, and the optimizer steps there.
        offload_param: so do the shards of the weights between their uses.
        activation_checkpointing: the model's blocks are recomputed in the backward pass.
        checkpoint_on_cpu: what such a block keeps, its inputs, waits in host memory.
        zero_init: the model is built in shards, so that it need not fit into one process.
        shard_group_size: ranks that share one copy of the model, where groups of ranks hold copies of it (HSDP); None: all.
    """

    path: str
    stage: int
    compute_dtype: torch.dtype
    offload_optimizer: bool
    offload_param: bool
    activation_checkpointing: bool
    checkpoint_on_cpu: bool
    zero_init: bool
    shard_group_size: int | None
    raw: Mapping[str, Any] = field(repr=False)


def load_machine_settings(path: Path) -> MachineSettings:
    """Reads and checks a ds_config.

    Raises:
        ConfigError: no such file, no JSON, "auto", a key of the recipe's, an unknown key, a value of the wrong kind, a key
            without effect, fp16; names file and key.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Python keeps the last of two equal keys and says nothing."""
        keys = [key for key, _ in pairs]
        for key in keys:
            if keys.count(key) > 1:
                raise ConfigError(f"ds_config {path} has the key {key} twice")
        return dict(pairs)

    try:
        raw = json.loads(path.read_text(encoding="utf-8"), object_pairs_hook=unique)
    except OSError as error:
        raise ConfigError(f"ds_config {path}: {error.strerror}; see ds_configs/ for the shipped ones") from error
    except ConfigError:
        raise
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"ds_config {path} is no JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(f"ds_config {path} is nested too deeply; no key lies deeper than three objects") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"ds_config {path} must hold a JSON object")
    for key in raw:
        if key in RECIPE_KEYS:
            raise ConfigError(f"ds_config {path}: {key} belongs to the recipe: {RECIPE_KEYS[key]}")
        _refuse_without_effect(path, key)
        if key not in MACHINE_KEYS:
            raise ConfigError(f"ds_config {path}: unknown key {key}")
    automatic = _find_auto(raw, "")
    if automatic:
        raise ConfigError(f'ds_config {path}: {automatic} is "auto"; write the value')
    fp16 = _section(path, raw, "fp16").get("enabled", False)
    _check_values(path, {"enabled": fp16}, {"enabled": _SWITCH}, "fp16.")
    if fp16:
        raise ConfigError(
            f"ds_config {path}: fp16 is refused: its loss scale skips steps depending on single examples; use bf16"
        )
    zero = _section(path, raw, "zero_optimization")
    for key in zero:
        _refuse_without_effect(path, f"zero_optimization.{key}")
    checks = {key: check for key, (_, check) in ZERO_KEYS.items()}
    _check_values(path, {"stage": None, **zero}, checks, "zero_optimization.")
    for key in zero:
        stages = ZERO_KEYS[key][0]
        if zero["stage"] not in stages:
            raise ConfigError(
                f"ds_config {path}: zero_optimization.{key} has no effect at stage {zero['stage']} (only at "
                f"{' and '.join(map(str, stages))}); remove it"
            )
    for key in ("offload_optimizer", "offload_param"):
        _check_values(path, zero.get(key, {}), OFFLOAD_KEYS, f"zero_optimization.{key}.")
    bf16 = _section(path, raw, "bf16")
    _check_values(path, bf16, {"enabled": _SWITCH}, "bf16.")
    checkpointing = _section(path, raw, "activation_checkpointing")
    _check_values(path, checkpointing, CHECKPOINTING_KEYS, "activation_checkpointing.")
    if "activation_checkpointing" in raw and "enabled" not in checkpointing:
        raise ConfigError(f"ds_config {path}: activation_checkpointing needs the key enabled, true or false")
    return MachineSettings(
        path=str(path),
        stage=zero["stage"],
        compute_dtype=torch.bfloat16 if bf16.get("enabled", False) else torch.float32,
        offload_optimizer=zero.get("offload_optimizer", {}).get("device", "none") == "cpu",
        offload_param=zero.get("offload_param", {}).get("device", "none") == "cpu",
        activation_checkpointing=checkpointing.get("enabled", False),
        checkpoint_on_cpu=checkpointing.get("cpu_checkpointing", False),
        zero_init=zero.get("zero_init", False),
        shard_group_size=zero.get("zero_hpz_partition_size"),
        raw=raw,
    )


def _check_values(path: Path, section: Mapping[str, Any], known: Mapping[str, Check], prefix: str) -> None:
    for key, value in section.items():
        if key not in known:
            raise ConfigError(f"ds_config {path}: unknown key {prefix}{key}; known are {', '.join(known)}")
        is_good, expected = known[key]
        if not is_good(value):
            raise ConfigError(f"ds_config {path}: {prefix}{key} must be {expected}, not {json.dumps(value)}")


def _refuse_without_effect(path: Path, key: str) -> None:
    if key in NO_EFFECT:
        raise ConfigError(f"ds_config {path}: {key} has no effect ({NO_EFFECT[key]}); remove it")


def _section(path: Path, raw: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = raw.get(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f"ds_config {path}: {key} must be an object")
    return section


def _find_auto(value: Any, where: str) -> str:
    """Dotted place of the first "auto", or an empty string."""
    if value == "auto":
        return where
    if isinstance(value, dict | list):
        items = value.items() if isinstance(value, dict) else enumerate(value)
        return next(filter(None, (_find_auto(v, f"{where}.{k}".lstrip(".")) for k, v in items)), "")
    return ""


def resolve(machine: MachineSettings, *, micro_batch_size: int, world_size: int) -> dict[str, Any]:
    """The full dictionary for DeepSpeed: the machine's keys and every recipe-owned key, defaults included."""
    zero = {key: value for key, value in machine.raw["zero_optimization"].items() if key != "zero_init"}  # ours
    if machine.stage == 3:
        # No weight gradient is DeepSpeed's business: no buffer of 5e8 elements for them, and no linear that computes them.
        zero |= {"contiguous_gradients": False, "memory_efficient_linear": False}
    return {
        "zero_optimization": zero,
        "bf16": {"enabled": machine.compute_dtype == torch.bfloat16},
        "fp16": {"enabled": False},
        "train_batch_size": micro_batch_size * world_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_allow_untested_optimizer": True,
        "zero_force_ds_cpu_optimizer": False,  # offloaded states are stepped by our own optimizer
        "steps_per_print": 2**31 - 1,
        "tensorboard": {"enabled": False},
        "wandb": {"enabled": False},
        "csv_monitor": {"enabled": False},
        # ZeRO-3's gradient buffer takes the model's dtype otherwise. Not for ZeRO-1, where the key selects another wrapper.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if machine.stage == 3 else {}),
    }
