"""ds_configs/*.json: what the machine decides.

Loading takes the keys of a list, leaves out what asks for nothing, and refuses all others: DeepSpeed ignores unknown
top-level keys. Resolving writes the recipe's keys out in full, because DeepSpeed's defaults change (gradient_clipping went
from 0 to 1.0 in 0.19.3).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.config.optimizer import did_you_mean
from trainer.errors import ConfigError

Check = tuple[Callable[[Any], bool], str]

_SWITCH: Check = (lambda value: isinstance(value, bool), "true or false")
_COUNT: Check = (
    lambda value: type(value) is int and value >= 0,
    "a number of elements (an integer, 0 or more)",
)
_SIZE: Check = (
    lambda value: type(value) is int and value > 0,
    "a number of elements (an integer above 0)",
)
_DEVICE: Check = (
    lambda value: value in ("none", "cpu"),
    '"none" or "cpu" (offload to NVMe is not supported)',
)
KEYS: Mapping[str, Check] = {
    "zero_optimization.stage": (
        lambda value: type(value) is int and value in (1, 2, 3),
        "1, 2 or 3",
    ),
    "zero_optimization.offload_optimizer.device": _DEVICE,
    "zero_optimization.offload_optimizer.pin_memory": _SWITCH,
    "zero_optimization.offload_param.device": _DEVICE,
    "zero_optimization.offload_param.pin_memory": _SWITCH,
    "zero_optimization.allgather_bucket_size": _SIZE,
    "zero_optimization.overlap_comm": _SWITCH,
    "zero_optimization.sub_group_size": _SIZE,
    "zero_optimization.stage3_prefetch_bucket_size": _COUNT,
    "zero_optimization.stage3_param_persistence_threshold": _COUNT,
    "zero_optimization.stage3_model_persistence_threshold": _COUNT,
    "zero_optimization.stage3_max_live_parameters": _COUNT,
    "zero_optimization.stage3_max_reuse_distance": _COUNT,
    "zero_optimization.zero_init": _SWITCH,
    "zero_optimization.zero_hpz_partition_size": (_SIZE[0], "a number of ranks above 0"),
    "bf16.enabled": _SWITCH,
    "fp16.enabled": (
        lambda value: value is False,
        "false: its loss scale skips steps depending on single examples; use bf16",
    ),
    "activation_checkpointing.enabled": _SWITCH,
    "activation_checkpointing.cpu_checkpointing": _SWITCH,
}
"""The keys that are read, and what their values must be."""

SECTIONS = {place.rpartition(".")[0] for place in KEYS} | {"zero_optimization"}
OF_STAGE_3 = frozenset(
    place
    for place in KEYS
    if place.startswith(("zero_optimization.offload_param.", "zero_optimization.stage3_"))
    or place.removeprefix("zero_optimization.") in ("overlap_comm", "sub_group_size", "zero_init")
)
TUNING = frozenset(
    [
        "aio",
        *(f"bf16.{name}" for name in ("loss_scale", "loss_scale_window", "initial_scale_power")),
        *(f"bf16.{name}" for name in ("hysteresis", "min_loss_scale")),
        *(
            f"zero_optimization.{section}.{name}"
            for section in ("offload_optimizer", "offload_param")
            for name in ("buffer_count", "buffer_size", "max_in_cpu", "fast_init")
        ),
    ]
) | frozenset(
    f"zero_optimization.{name}"
    for name in (
        *("reduce_bucket_size", "reduce_scatter", "contiguous_gradients", "round_robin_gradients"),
        *("allgather_partitions", "use_multi_rank_bucket_allreduce", "ignore_unused_parameters"),
        *("memory_efficient_linear", "elastic_checkpoint", "load_from_fp32_weights"),
        *("stage3_gather_16bit_weights_on_model_save", "gather_16bit_weights_on_model_save"),
    )
)
"""Keys of many files that tune what DeepSpeed does not do here, or ask for what happens anyway: left out."""


def is_off(value: Any) -> bool:
    """Says whether a value asks for nothing: null, false, 0, "none", an object that is not enabled, or one of such values."""
    if isinstance(value, dict):
        return (
            value.get("enabled") is False
            or value.get("device") == "none"
            or all(map(is_off, value.values()))
        )
    return value is None or value in (False, 0, "none")


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
        raw: the keys that something reads.
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
        ConfigError: no such file, no JSON, a key that is not in the list, a value of the wrong kind, a key without effect;
            names the file, and each such key on a line of its own, with its place.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Python keeps the last of two equal keys and says nothing."""
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise ValueError(f"it has the key {key} twice")
        return dict(pairs)

    try:
        raw = json.loads(
            path.read_text(encoding="utf-8"), object_pairs_hook=unique, parse_float=_number
        )
    except OSError as error:
        raise ConfigError(
            f"ds_config {path}: {error.strerror}; see ds_configs/ for the shipped ones"
        ) from error
    except ValueError as error:  # no JSON, no UTF-8, or a number of thousands of digits
        raise ConfigError(f"ds_config {path} is no JSON: {error}") from error
    except RecursionError as error:
        raise ConfigError(
            f"ds_config {path} is nested too deeply; no key lies deeper than three objects"
        ) from error
    if not isinstance(raw, dict):
        raise ConfigError(f"ds_config {path} must hold a JSON object")
    refused: list[str] = []
    values: dict[str, Any] = {}
    for place, value in _leaves(raw):
        if place in SECTIONS:
            refused.append(f"{place} must be an object, not {json.dumps(value)}")
        elif place not in KEYS:
            if not is_off(value) and place not in TUNING:
                hint = did_you_mean(place, [*SECTIONS, *KEYS]) or "; see ds_configs/README.md"
                refused.append(f"{place} is no key of a ds_config{hint}")
        elif value == "auto":
            refused.append(f'{place} is "auto"; write the value, or remove it')
        elif not KEYS[place][0](value):
            refused.append(f"{place} must be {KEYS[place][1]}, not {json.dumps(value)}")
        else:
            values[place] = value
    if "zero_optimization.stage" not in values and not refused:
        refused.append("zero_optimization.stage must be 1, 2 or 3; it is missing")
    stage = values.get("zero_optimization.stage", 3)
    asked = {
        "zero_optimization.offload_param": values.get("zero_optimization.offload_param.device")
        == "cpu",
        "zero_optimization.zero_init": values.get("zero_optimization.zero_init", False),
    }
    for place, is_asked in asked.items():
        if stage < 3 and is_asked:
            refused.append(f"{place} has no effect at stage {stage} (only at 3); remove it")
    checkpointing = values.get("activation_checkpointing.enabled")
    if values.get("activation_checkpointing.cpu_checkpointing") and not checkpointing:
        refused.append(
            "activation_checkpointing.cpu_checkpointing needs activation_checkpointing.enabled = true"
        )
    if refused:
        lines = refused if len(refused) == 1 else [f"{len(refused)} keys must change", *refused]
        raise ConfigError(f"ds_config {path}: {lines[0]}", *lines[1:])
    for place in values.keys() & OF_STAGE_3 if stage < 3 else ():
        del values[place]
    if stage == 3:
        values.pop("zero_optimization.allgather_bucket_size", None)
    return MachineSettings(
        path=str(path),
        stage=stage,
        compute_dtype=torch.bfloat16 if values.get("bf16.enabled") else torch.float32,
        offload_optimizer=values.get("zero_optimization.offload_optimizer.device") == "cpu",
        offload_param=values.get("zero_optimization.offload_param.device") == "cpu",
        activation_checkpointing=bool(checkpointing),
        checkpoint_on_cpu=values.get("activation_checkpointing.cpu_checkpointing", False),
        zero_init=values.get("zero_optimization.zero_init", False),
        shard_group_size=values.get("zero_optimization.zero_hpz_partition_size"),
        raw=_nested(values),
    )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted place, value) of everything that is no section of known keys."""
    for key, value in section.items():
        place = f"{prefix}{key}"
        if place in SECTIONS and isinstance(value, dict):
            # Beside these two nothing else of a section means anything.
            switched_off = {"enabled": False}, {"device": "none"}
            off = next((case for case in switched_off if case.items() <= value.items()), None)
            yield from _leaves(value if off is None else off, f"{place}.")
        elif place not in SECTIONS or not is_off(value):
            yield place, value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the objects that dotted places stand for."""
    tree: dict[str, Any] = {}
    for place, value in values.items():
        *sections, key = place.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return tree


def _number(text: str) -> int | float:
    """A whole number is an integer however it is written, as DeepSpeed reads 5e8."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def resolve(machine: MachineSettings, *, micro_batch_size: int, world_size: int) -> dict[str, Any]:
    """The full dictionary for DeepSpeed: the machine's keys and every recipe-owned key, defaults included."""
    zero = {
        key: value for key, value in machine.raw["zero_optimization"].items() if key != "zero_init"
    }  # ours
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
