"""Reads ds_configs/*.json, the settings of the machine.

Loading takes the keys of a list, drops keys that are switched off, and refuses all others, since
DeepSpeed ignores unknown top-level keys. Resolving writes the recipe's keys out in full, because
DeepSpeed's defaults change (gradient_clipping went from 0 to 1.0 in 0.19.3).
"""

import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from trainer.config.sections import did_you_mean
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
"""The keys that are read, each with a check of its value and words for it."""

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
        "bf16.loss_scale",
        "bf16.loss_scale_window",
        "bf16.initial_scale_power",
        "bf16.hysteresis",
        "bf16.min_loss_scale",
        "zero_optimization.offload_optimizer.buffer_count",
        "zero_optimization.offload_optimizer.buffer_size",
        "zero_optimization.offload_optimizer.max_in_cpu",
        "zero_optimization.offload_optimizer.fast_init",
        "zero_optimization.offload_param.buffer_count",
        "zero_optimization.offload_param.buffer_size",
        "zero_optimization.offload_param.max_in_cpu",
        "zero_optimization.offload_param.fast_init",
        "zero_optimization.reduce_bucket_size",
        "zero_optimization.reduce_scatter",
        "zero_optimization.contiguous_gradients",
        "zero_optimization.round_robin_gradients",
        "zero_optimization.allgather_partitions",
        "zero_optimization.use_multi_rank_bucket_allreduce",
        "zero_optimization.ignore_unused_parameters",
        "zero_optimization.memory_efficient_linear",
        "zero_optimization.elastic_checkpoint",
        "zero_optimization.load_from_fp32_weights",
        "zero_optimization.stage3_gather_16bit_weights_on_model_save",
        "zero_optimization.gather_16bit_weights_on_model_save",
    ]
)
"""Keys of many files that are dropped.

They tune parts of DeepSpeed that do not run here, or ask for the present behaviour."""


def is_off(value: Any) -> bool:
    """Returns whether a value asks for nothing.

    So do null, false, 0, "none", an object that is not enabled, and an object of such values.
    """
    if isinstance(value, dict):
        if value.get("enabled") is False or value.get("device") == "none":
            return True
        return all(map(is_off, value.values()))
    return value is None or value in (False, 0, "none")


@dataclass(frozen=True)
class MachineSettings:
    """A checked ds_config.

    Attributes:
        offload_optimizer: master weights and optimizer states live in host memory, and the
            optimizer steps there.
        offload_param: the shards of the weights live in host memory between their uses.
        activation_checkpointing: the model's blocks are recomputed in the backward pass.
        checkpoint_on_cpu: the inputs of such a block wait in host memory.
        zero_init: the model is built in shards, so that it need not fit into one process.
        shard_group_size: ranks that share one copy of the model, where groups of ranks hold copies
            of it (HSDP); None: all.
        raw: the checked keys.
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
    """Returns the checked settings of a ds_config.

    Raises:
        ConfigError: no such file, no JSON, a key that is not in the list, a value of the wrong
            kind, a key without effect; names the file, and each such key on a line of its own,
            with its place.
    """

    def refuse_twins(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        """Refuses two equal keys, of which Python would silently keep the last."""
        for key, count in Counter(key for key, _ in pairs).items():
            if count > 1:
                raise ValueError(f"it has the key {key} twice")
        return dict(pairs)

    try:
        text = path.read_text(encoding="utf-8")
        raw = json.loads(text, object_pairs_hook=refuse_twins, parse_float=_number)
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
    offload_optimizer = values.get("zero_optimization.offload_optimizer.device") == "cpu"
    offload_param = values.get("zero_optimization.offload_param.device") == "cpu"
    zero_init = values.get("zero_optimization.zero_init", False)
    needs_stage_3 = {
        "zero_optimization.offload_param": offload_param,
        "zero_optimization.zero_init": zero_init,
    }
    for place, is_on in needs_stage_3.items():
        if stage < 3 and is_on:
            refused.append(f"{place} has no effect at stage {stage} (only at 3); remove it")
    checkpointing = values.get("activation_checkpointing.enabled")
    if values.get("activation_checkpointing.cpu_checkpointing") and not checkpointing:
        refused.append(
            "activation_checkpointing.cpu_checkpointing needs "
            "activation_checkpointing.enabled = true"
        )
    if refused:
        lines = refused if len(refused) == 1 else [f"{len(refused)} keys must change", *refused]
        raise ConfigError(f"ds_config {path}: {lines[0]}", *lines[1:])
    if stage < 3:
        for place in values.keys() & OF_STAGE_3:
            del values[place]
    else:
        values.pop("zero_optimization.allgather_bucket_size", None)
    return MachineSettings(
        path=str(path),
        stage=stage,
        compute_dtype=torch.bfloat16 if values.get("bf16.enabled") else torch.float32,
        offload_optimizer=offload_optimizer,
        offload_param=offload_param,
        activation_checkpointing=bool(checkpointing),
        checkpoint_on_cpu=values.get("activation_checkpointing.cpu_checkpointing", False),
        zero_init=zero_init,
        shard_group_size=values.get("zero_optimization.zero_hpz_partition_size"),
        raw=_nested(values),
    )


def _leaves(section: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yields (dotted place, value) of every key that is no section."""
    for key, value in section.items():
        place = f"{prefix}{key}"
        if place in SECTIONS and isinstance(value, dict):
            # A section that is switched off ignores its other keys.
            if value.get("enabled") in (False, 0):
                value = {"enabled": False}
            elif value.get("device") == "none":
                value = {"device": "none"}
            yield from _leaves(value, f"{place}.")
        elif place not in SECTIONS or not is_off(value):
            yield place, value


def _nested(values: Mapping[str, Any]) -> dict[str, Any]:
    """Returns nested objects from values at dotted places."""
    tree: dict[str, Any] = {}
    for place, value in values.items():
        *sections, key = place.split(".")
        section = tree
        for name in sections:
            section = section.setdefault(name, {})
        section[key] = value
    return tree


def _number(text: str) -> int | float:
    """Returns an integer for a whole number, however it is written, as DeepSpeed reads 5e8."""
    number = float(text)
    return int(number) if number.is_integer() and abs(number) < 2**63 else number


def resolve(machine: MachineSettings, *, micro_batch_size: int, world_size: int) -> dict[str, Any]:
    """Returns DeepSpeed's full configuration: the machine's keys, and all of the recipe's.

    Defaults are written out.
    """
    zero = dict(machine.raw["zero_optimization"])
    # The engine builds the model in shards itself (trainer/engines/deepspeed.py).
    zero.pop("zero_init", None)
    if machine.stage == 3:
        # DeepSpeed handles no weight gradient here: no buffer of 5e8 elements for them, and no
        # linear that computes them.
        zero |= {"contiguous_gradients": False, "memory_efficient_linear": False}
    config = {
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
        # Offloaded states are stepped by our own optimizer.
        "zero_force_ds_cpu_optimizer": False,
        "steps_per_print": 2**31 - 1,
        "tensorboard": {"enabled": False},
        "wandb": {"enabled": False},
        "csv_monitor": {"enabled": False},
    }
    # Otherwise ZeRO-3's gradient buffer takes the model's dtype. ZeRO-1 gets no such key, since it
    # selects another wrapper there.
    if machine.stage == 3:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    return config
