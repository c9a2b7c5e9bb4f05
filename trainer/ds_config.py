"""ds_configs/*.json: what the machine decides.

Loading refuses every key that is the recipe's; resolving writes those keys out in full, because DeepSpeed's defaults
change (gradient_clipping went from 0 to 1.0 in 0.19.3) and unknown top-level keys pass it silently.
"""

import json
from collections.abc import Mapping
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
}
"""Keys that do not belong here, and the recipe key that means the same."""

MACHINE_KEYS = {"zero_optimization", "bf16", "fp16", "activation_checkpointing", "aio", "comms_logger",
                "flops_profiler", "wall_clock_breakdown", "memory_breakdown"}  # fmt: skip

ZERO_KEYS = {"stage", "offload_optimizer", "offload_param", "contiguous_gradients", "overlap_comm", "reduce_scatter",
             "reduce_bucket_size", "allgather_partitions", "allgather_bucket_size", "sub_group_size",
             "round_robin_gradients", "stage3_max_live_parameters", "stage3_max_reuse_distance",
             "stage3_prefetch_bucket_size", "stage3_param_persistence_threshold",
             "stage3_model_persistence_threshold"}  # fmt: skip


@dataclass(frozen=True)
class MachineSettings:
    """A checked ds_config."""

    path: str
    stage: int
    compute_dtype: torch.dtype
    offloads: bool
    raw: Mapping[str, Any] = field(repr=False)


def load_machine_settings(path: Path) -> MachineSettings:
    """Reads and checks a ds_config.

    Raises:
        ConfigError: no such file, no JSON, "auto", a key of the recipe's, an unknown key, fp16; names file and key.
    """
    try:
        raw = json.loads(path.read_text(), object_pairs_hook=lambda pairs: _unique(path, pairs))
    except OSError as error:
        raise ConfigError(f"ds_config {path}: {error.strerror}; see ds_configs/ for the shipped ones") from error
    except (json.JSONDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"ds_config {path} is no JSON: {error}") from error
    if not isinstance(raw, dict):
        raise ConfigError(f"ds_config {path} must hold a JSON object")
    _check_keys(path, raw)
    zero = raw.get("zero_optimization", {})
    stage = zero.get("stage", 0)
    if type(stage) is not int or stage not in (1, 2, 3):
        raise ConfigError(f"ds_config {path}: zero_optimization.stage must be 1, 2 or 3, not {stage!r}")
    unknown = set(_section(path, raw, "bf16")) - {"enabled"}
    if unknown:
        raise ConfigError(f"ds_config {path}: unknown key bf16.{min(unknown)}")
    offloads = [_section(path, zero, key, "zero_optimization.") for key in ("offload_optimizer", "offload_param")]
    return MachineSettings(
        path=str(path),
        stage=stage,
        compute_dtype=torch.bfloat16 if _is_enabled(path, raw, "bf16") else torch.float32,
        offloads=any(offload.get("device", "none") != "none" for offload in offloads),
        raw=raw,
    )


def _check_keys(path: Path, raw: Mapping[str, Any]) -> None:
    for key in raw:
        if key in RECIPE_KEYS:
            raise ConfigError(f"ds_config {path}: {key} belongs to the recipe: {RECIPE_KEYS[key]}")
        if key not in MACHINE_KEYS:
            raise ConfigError(f"ds_config {path}: unknown key {key}")
    automatic = _find_auto(raw, "")
    if automatic:
        raise ConfigError(f'ds_config {path}: {automatic} is "auto"; write the value')
    for key in _section(path, raw, "zero_optimization"):
        if key not in ZERO_KEYS:
            raise ConfigError(f"ds_config {path}: unknown key zero_optimization.{key}")
    if _is_enabled(path, raw, "fp16"):
        raise ConfigError(
            f"ds_config {path}: fp16 is refused: its loss scale skips steps depending on single examples; use bf16"
        )
    if raw.get("activation_checkpointing"):
        raise ConfigError(
            f"ds_config {path}: activation_checkpointing cannot be combined with book-keeping clipping; remove it "
            "and lower train.micro_batch_size instead"
        )


def _unique(path: Path, pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Python keeps the last of two equal keys and says nothing."""
    keys = [key for key, _ in pairs]
    for key in keys:
        if keys.count(key) > 1:
            raise ConfigError(f"ds_config {path} has the key {key} twice")
    return dict(pairs)


def _section(path: Path, raw: Mapping[str, Any], key: str, prefix: str = "") -> Mapping[str, Any]:
    section = raw.get(key, {})
    if not isinstance(section, dict):
        raise ConfigError(f"ds_config {path}: {prefix}{key} must be an object")
    return section


def _is_enabled(path: Path, raw: Mapping[str, Any], key: str) -> bool:
    enabled = _section(path, raw, key).get("enabled", False)
    if not isinstance(enabled, bool):
        raise ConfigError(f"ds_config {path}: {key}.enabled must be true or false, not {enabled!r}")
    return enabled


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
    return {
        **machine.raw,
        "bf16": {"enabled": machine.compute_dtype == torch.bfloat16},
        "fp16": {"enabled": False},
        "train_batch_size": micro_batch_size * world_size,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "gradient_accumulation_steps": 1,
        "gradient_clipping": 0.0,
        "prescale_gradients": False,
        "gradient_predivide_factor": 1.0,
        "zero_allow_untested_optimizer": True,
        "steps_per_print": 2**31 - 1,
        "tensorboard": {"enabled": False},
        "wandb": {"enabled": False},
        "csv_monitor": {"enabled": False},
        # ZeRO-3's gradient buffer takes the model's dtype otherwise. Not for ZeRO-1, where the key selects another wrapper.
        **({"data_types": {"grad_accum_dtype": "fp32"}} if machine.stage == 3 else {}),
    }
