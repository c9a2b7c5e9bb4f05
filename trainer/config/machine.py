"""ds_configs/*.json: what the machine decides.

Loading refuses every key that is the recipe's; resolving writes those keys out in full, because DeepSpeed's defaults
change (gradient_clipping went from 0 to 1.0 in 0.19.3) and unknown top-level keys pass it silently.
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

RECIPE_KEYS = {
    "train_batch_size": "privacy.expected_batch_size",
    "train_micro_batch_size_per_gpu": "train.micro_batch_size",
    "gradient_accumulation_steps": "nothing (it follows from the batch sizes)",
    "gradient_clipping": "privacy.max_grad_norm",
    "optimizer": "[optimizer]",
    "scheduler": "[schedule]",
    **dict.fromkeys(
        ("prescale_gradients", "gradient_predivide_factor", "gradient_allreduce_op"),
        "nothing (gradients are sums)",
    ),
    "data_types": "nothing (accumulators are fp32)",
    "communication_data_type": "nothing (the reduction is fp64)",
    "steps_per_print": "train.log_every",
    "tensorboard": "nothing (always written)",
    **dict.fromkeys(
        (
            "wandb",
            "comet",
            "csv_monitor",
            "managed_gradient_accumulation",
            "zero_allow_untested_optimizer",
            "zero_force_ds_cpu_optimizer",
        ),
        "nothing",
    ),
}
"""Keys that do not belong here, and the recipe key that means the same."""

MACHINE_KEYS = ("zero_optimization", "bf16", "fp16", "activation_checkpointing")
_STAGE3 = (
    "prefetch_bucket_size",
    "param_persistence_threshold",
    "model_persistence_threshold",
    "max_live_parameters",
    "max_reuse_distance",
)


def is_off(value: Any) -> bool:
    """Says whether a value asks for nothing: null, false, 0, "none", an object that is not enabled, or one of such values."""
    if isinstance(value, dict):
        return (
            value.get("enabled") is False
            or value.get("device") == "none"
            or all(map(is_off, value.values()))
        )
    return value is None or value in (False, 0, "none")


REFUSED: Mapping[str, str] = {
    **{key: f"belongs to the recipe: {owner}" for key, owner in RECIPE_KEYS.items()},
    "flops_profiler": "has no effect (benchmarks/step.py counts FLOPs); remove it",
    "wall_clock_breakdown": "has no effect (private/metrics.jsonl has the times of a step); remove it",
    "memory_breakdown": "has no effect (private/metrics.jsonl has the peak memory); remove it",
    "comms_logger": "has no effect (private/metrics.jsonl has the bytes of a step); remove it",
    "bfloat16": 'is an old name: write bf16 {"enabled": true}',
    "zero_optimization.cpu_offload": 'is an old name: write offload_optimizer {"device": "cpu"}',
    "zero_optimization.cpu_offload_param": 'is an old name: write offload_param {"device": "cpu"}, at stage 3',
    "zero_optimization.cpu_offload_params": 'is an old name: write offload_param {"device": "cpu"}, at stage 3',
    "zero_optimization.cpu_offload_use_pin_memory": "is an old name: write pin_memory into offload_optimizer",
    "zero_optimization.mics_shard_size": "is not supported: write zero_hpz_partition_size, and start with --engine fsdp",
    **{f"zero_optimization.{name}": f"is an old name: write stage3_{name}" for name in _STAGE3},
    **{
        f"zero_optimization.zero_quantized_{what}": "is not supported (nothing is sent in fewer bits); remove it"
        for what in ("weights", "nontrainable_weights", "gradients")
    },
    **{
        f"{section}{name}": "is not supported; remove it"
        for section, names in {
            "": "amp autotuning checkpoint compile compression_training curriculum_learning data_efficiency dataloader_drop_last "
            "disable_allgather disable_python_gc dump_state eigenvalue elasticity expert_parallel fp32_allreduce hybrid_engine "
            "nebula pipeline progressive_layer_drop quantize_training seq_parallel_communication_data_type sparse_attention "
            "sparse_gradients tensor_parallel timers torch_autocast use_data_before_expert_parallelism weight_quantization",
            "zero_optimization.": "mics_hierarchical_params_gather legacy_stage1 parameter_alignment zenflow leaf_module "
            "pipeline_loading_checkpoint log_trace_cache_warnings enable_sanity_checks save_muon_momentum_buffer_in_memory "
            "stage3_module_granularity_threshold stage3_use_all_reduce_for_fetch_params stage3_allgather_sequential",
            "zero_optimization.offload_optimizer.": "super_offload",
            "bf16.": "auto_cast check_grad_overflow immediate_grad_update bf16_master_weights_and_grads bf16_optimizer_states",
            "activation_checkpointing.": "partition_activations contiguous_memory_optimization number_checkpoints "
            "synchronize_checkpoint_boundary profile",
        }.items()
        for name in names.split()
    },
}
"""DeepSpeed's keys that are refused, and what to write instead; but what only says "off" is taken, and left out."""

ANYWAY: Mapping[str, Callable[[Any], bool]] = {
    **{
        name: lambda value: False
        for name in (
            "train_batch_size",
            "train_micro_batch_size_per_gpu",
            "optimizer",
            "scheduler",
            "gradient_accumulation_steps",
            "managed_gradient_accumulation",
        )
    },
    "gradient_clipping": lambda value: type(value) is int and value == 0,
    "gradient_predivide_factor": lambda value: type(value) is int and value == 1,
    "gradient_allreduce_op": lambda value: value == "sum",
    "data_types": lambda value: (
        value in ({}, {"grad_accum_dtype": None}, {"grad_accum_dtype": "fp32"})
    ),
    "steps_per_print": lambda value: (
        value is None or (type(value) in (int, float) and value >= 0)
    ),  # it counts no step here
    "zero_allow_untested_optimizer": lambda value: value is True,
    "zero_optimization.mics_shard_size": lambda value: type(value) is int and value in (-1, 0),
}
"""Which values of those keys ask for what happens anyway, where that is another question than whether they are off."""

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
_OBJECT: Check = (lambda value: isinstance(value, dict), "an object")
_ANY: Check = (lambda value: True, "anything")

ZERO_KEYS: Mapping[str, tuple[tuple[int, ...], Check]] = {
    "stage": ((1, 2, 3), (lambda value: type(value) is int and value in (1, 2, 3), "1, 2 or 3")),
    "offload_optimizer": ((1, 2, 3), _OBJECT),
    "offload_param": ((3,), _OBJECT),
    "allgather_bucket_size": ((1, 2), _SIZE),
    "overlap_comm": ((3,), _SWITCH),
    "sub_group_size": ((3,), _SIZE),
    **{f"stage3_{name}": ((3,), _COUNT) for name in _STAGE3},
    "zero_init": ((3,), _SWITCH),
    "zero_hpz_partition_size": ((1, 2, 3), (_SIZE[0], "a number of ranks above 0")),
    "reduce_bucket_size": ((), _SIZE),
    **dict.fromkeys(
        (
            "contiguous_gradients",
            "reduce_scatter",
            "round_robin_gradients",
            "ignore_unused_parameters",
            "allgather_partitions",
            "use_multi_rank_bucket_allreduce",
            "compute_grad_norm",
            "elastic_checkpoint",
            "load_from_fp32_weights",
            "memory_efficient_linear",
            "override_module_apply",
            "stage3_gather_16bit_weights_on_model_save",
            "stage3_gather_fp16_weights_on_model_save",
            "gather_16bit_weights_on_model_save",
        ),
        ((), _SWITCH),
    ),
}
"""Key of zero_optimization -> the stages at which something reads it, and what its value must be.

At other stages it is taken and left out: it tunes how DeepSpeed sends and keeps what it does not send or keep here, or asks for
whole weights, which launch_scripts/export.py writes. `offload_param` and `zero_init` ask for more: refused there unless off.
"""

OFFLOAD_KEYS: Mapping[str, Check] = {
    "device": (
        lambda value: value in ("none", "cpu"),
        '"none" or "cpu" (offload to NVMe is not supported)',
    ),
    "pin_memory": _SWITCH,
    "ratio": (
        lambda value: type(value) is int and value == 1,
        "1 (all of it waits in host memory)",
    ),
    **dict.fromkeys(
        (
            "buffer_count",
            "buffer_size",
            "max_in_cpu",
            "nvme_path",
            "fast_init",
            "pipeline_read",
            "pipeline_write",
        ),
        _ANY,
    ),
}
"""The last ones tune an offload to NVMe, as `aio` does: left out."""

BF16_KEYS: Mapping[str, Check] = {
    "enabled": _SWITCH,
    "loss_scale": (
        lambda value: type(value) is int and value in (0, 1),
        "0 or 1 (bf16 has no loss scale)",
    ),
    **dict.fromkeys(
        ("loss_scale_window", "initial_scale_power", "hysteresis", "min_loss_scale"), _ANY
    ),
}
"""The last ones tune a loss scale; many files repeat here what they say of fp16: left out."""

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
        ConfigError: no such file, no JSON, "auto", a key of the recipe's, an unknown key, a value of the wrong kind, a key
            without effect, fp16; names the file, and each such key on a line of its own, with its place and the way out.
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

    def taken(
        section: Mapping[str, Any], known: Mapping[str, Check], prefix: str = ""
    ) -> dict[str, Any]:
        """What is known and good; `refused` gets a line for all else, but for what asks for what happens anyway."""
        good: dict[str, Any] = {}
        for key, value in section.items():
            place = f"{prefix}{key}"
            if place in REFUSED:
                if not ANYWAY.get(place, is_off)(value):
                    refused.append(f"{place} {REFUSED[place]}")
            elif key not in known:
                refused.append(f"unknown key {place}{did_you_mean(key, known)}")
            elif (
                automatic := []
                if known[key] is _OBJECT and value != "auto"
                else list(_find_auto(value, place))
            ):
                refused.extend(
                    f'{auto} is "auto"; write the value, or remove it' for auto in automatic
                )
            elif not known[key][0](value):
                refused.append(f"{place} must be {known[key][1]}, not {json.dumps(value)}")
            else:
                good[key] = value
        return good

    top = taken(raw, {**dict.fromkeys(MACHINE_KEYS, _OBJECT), "aio": _ANY})
    fp16 = top.get("fp16", {})
    if taken(fp16, {**dict.fromkeys(fp16, _ANY), "enabled": _SWITCH}, "fp16.").get("enabled"):
        refused.append(
            "fp16 is refused: its loss scale skips steps depending on single examples; use bf16"
        )
    bf16 = taken(top.get("bf16", {}), BF16_KEYS, "bf16.").get("enabled", False)
    held = top.get("activation_checkpointing", {})
    checkpointing = {
        "enabled": False,
        **taken(held, CHECKPOINTING_KEYS, "activation_checkpointing."),
    }
    if "enabled" not in held and not (held and is_off(held)) and "activation_checkpointing" in top:
        refused.append("activation_checkpointing needs the key enabled, true or false")
    if held.get("enabled") is False and checkpointing.get("cpu_checkpointing"):
        refused.append(
            "activation_checkpointing.cpu_checkpointing has no effect where enabled is false; remove it"
        )
    held = top.get("zero_optimization", {})
    zero = taken(held, {key: check for key, (_, check) in ZERO_KEYS.items()}, "zero_optimization.")
    if "stage" not in held and isinstance(raw.get("zero_optimization", {}), dict):
        refused.append("zero_optimization.stage must be 1, 2 or 3; it is missing")
    for key in ("offload_optimizer", "offload_param"):
        if key in zero:
            offload = taken(zero[key], OFFLOAD_KEYS, f"zero_optimization.{key}.")
            zero[key] = {
                name: offload[name] for name in ("device", "pin_memory") if name in offload
            }
    stage = zero.get("stage", 3)
    for key in [key for key in zero if stage not in ZERO_KEYS[key][0]]:
        if key in ("offload_param", "zero_init") and not is_off(held[key]):
            refused.append(
                f"zero_optimization.{key} has no effect at stage {stage} (only at 3); remove it"
            )
        del zero[key]
    if refused:
        lines = refused if len(refused) == 1 else [f"{len(refused)} keys must change", *refused]
        raise ConfigError(f"ds_config {path}: {lines[0]}", *lines[1:])
    return MachineSettings(
        path=str(path),
        stage=zero["stage"],
        compute_dtype=torch.bfloat16 if bf16 else torch.float32,
        offload_optimizer=zero.get("offload_optimizer", {}).get("device", "none") == "cpu",
        offload_param=zero.get("offload_param", {}).get("device", "none") == "cpu",
        activation_checkpointing=checkpointing["enabled"],
        checkpoint_on_cpu=checkpointing.get("cpu_checkpointing", False),
        zero_init=zero.get("zero_init", False),
        shard_group_size=zero.get("zero_hpz_partition_size"),
        raw={
            "zero_optimization": zero,
            "bf16": {"enabled": bf16},
            "activation_checkpointing": checkpointing,
        },
    )


def _number(text: str) -> int | float:
    """A whole number is an integer however it is written, as DeepSpeed reads 5e8."""
    value = float(text)
    return int(value) if value.is_integer() and abs(value) < 2**63 else value


def _find_auto(value: Any, where: str) -> Iterator[str]:
    """Dotted places of every "auto"."""
    if value == "auto":
        yield where
    elif isinstance(value, dict | list):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from _find_auto(inner, f"{where}.{key}")


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
