"""ds_configs as other projects publish them, retyped by their shapes: one start says all that must change."""

import json
from pathlib import Path
from statistics import median
from typing import Any

import pytest

from privacy.errors import in_one_line
from trainer.config.machine import load_machine_settings
from trainer.errors import ConfigError

AUTO = "auto"
LOSS_SCALE = {
    "loss_scale": 0,
    "loss_scale_window": 1000,
    "initial_scale_power": 16,
    "hysteresis": 2,
    "min_loss_scale": 1,
}
FP16_AUTO = {"enabled": AUTO, **LOSS_SCALE}
CPU = {"device": "cpu", "pin_memory": True}
ADAMW = {"type": "AdamW", "params": {"lr": AUTO, "betas": AUTO, "eps": AUTO, "weight_decay": AUTO}}
WARM_UP = {"type": "WarmupLR", "params": {"warmup_min_lr": AUTO, "warmup_max_lr": AUTO, "warmup_num_steps": AUTO}}
SIZES = {"train_batch_size": AUTO, "train_micro_batch_size_per_gpu": AUTO}
ACCUMULATION = {"gradient_accumulation_steps": AUTO, "gradient_clipping": AUTO}
QUIET = {"steps_per_print": 2000, "wall_clock_breakdown": False}
STAGE2 = {
    "stage": 2, "allgather_partitions": True, "allgather_bucket_size": 2e8, "overlap_comm": True, "reduce_scatter": True,
    "reduce_bucket_size": 2e8, "contiguous_gradients": True,
}  # fmt: skip
STAGE3 = {
    "stage": 3, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9, "reduce_bucket_size": AUTO,
    "stage3_prefetch_bucket_size": AUTO, "stage3_param_persistence_threshold": AUTO, "stage3_max_live_parameters": 1e9,
    "stage3_max_reuse_distance": 1e9, "stage3_gather_16bit_weights_on_model_save": True,
}  # fmt: skip
NUMBERS3 = {
    **STAGE3, "reduce_bucket_size": 5e8, "stage3_prefetch_bucket_size": 5e8, "stage3_param_persistence_threshold": 1e6,
}  # fmt: skip
CHECKPOINTING = {
    "partition_activations": True, "cpu_checkpointing": True, "contiguous_memory_optimization": False,
    "number_checkpoints": None, "synchronize_checkpoint_boundary": False, "profile": False,
}  # fmt: skip
ALL_OFF = dict.fromkeys(CHECKPOINTING, False)
BF16: dict[str, Any] = {"bf16": {"enabled": True}}

PUBLIC: dict[str, dict[str, Any]] = {
    "trainer, zero2": {"fp16": FP16_AUTO, "bf16": {"enabled": AUTO}, "optimizer": ADAMW, "scheduler": WARM_UP,
        "zero_optimization": {**STAGE2, "offload_optimizer": CPU}, **SIZES, **ACCUMULATION, **QUIET},
    "trainer, zero3": {"fp16": FP16_AUTO, "bf16": {"enabled": AUTO}, "optimizer": ADAMW, "scheduler": WARM_UP,
        "zero_optimization": {**STAGE3, "offload_optimizer": CPU, "offload_param": CPU}, **SIZES, **ACCUMULATION, **QUIET},
    "trainer, zero1": {"zero_optimization": {"stage": 1}, "bf16": {"enabled": AUTO}, **SIZES, **ACCUMULATION},
    "plugin, zero2": {"fp16": {"enabled": True, **LOSS_SCALE}, "optimizer": ADAMW, "scheduler": WARM_UP,
        "zero_optimization": {**STAGE2, "offload_optimizer": {"device": "cpu"}}, "gradient_accumulation_steps": 1,
        "gradient_clipping": AUTO, **SIZES, **QUIET},
    "plugin, zero3 in bf16": {**BF16, "zero_optimization": NUMBERS3, "train_batch_size": AUTO,
        "gradient_clipping": 1.0, **QUIET},
    "visual assistant, zero2": {"fp16": FP16_AUTO, "bf16": {"enabled": AUTO}, **SIZES, "gradient_accumulation_steps": AUTO,
        "zero_optimization": {"stage": 2, "overlap_comm": True, "contiguous_gradients": True, "sub_group_size": 1e9,
        "reduce_bucket_size": AUTO}},
    "visual assistant, zero3": {"fp16": FP16_AUTO, "bf16": {"enabled": AUTO}, **SIZES, "gradient_accumulation_steps": AUTO,
        "zero_optimization": STAGE3},
    "vision and language, zero1": {"zero_optimization": {**STAGE2, "stage": 1, "allgather_bucket_size": 1e9,
        "reduce_bucket_size": 1e9}, "fp16": {"enabled": AUTO, "auto_cast": True, **LOSS_SCALE}, "bf16": {"enabled": AUTO},
        "optimizer": ADAMW, **ACCUMULATION, **SIZES, "steps_per_print": 1000, "wall_clock_breakdown": True},
    "vision and language, zero3": {"bf16": {"enabled": True, **LOSS_SCALE}, "zero_optimization": {**NUMBERS3,
        "offload_optimizer": {"device": "none"}, "offload_param": {"device": "none", "pin_memory": True}},
        "gradient_clipping": 1.0, "train_micro_batch_size_per_gpu": AUTO, **QUIET},
    "bf16, zero3": {**BF16, "zero_optimization": {**STAGE3, "stage3_gather_16bit_weights_on_model_save": False}, **SIZES},
    "reinforcement, zero2": {"train_micro_batch_size_per_gpu": 1, "fp16": {"enabled": True, "auto_cast": False},
        "optimizer": ADAMW, "zero_optimization": {"stage": 2, "contiguous_gradients": True}},
    "cifar tutorial": {"train_batch_size": 16, "steps_per_print": 2000, "optimizer": ADAMW, "scheduler": WARM_UP,
        "gradient_clipping": 1.0, "prescale_gradients": False, "bf16": {"enabled": True}, "fp16": {"enabled": False},
        "wall_clock_breakdown": False, "zero_optimization": {**STAGE2, "allgather_bucket_size": 50000000,
        "reduce_bucket_size": 50000000, "cpu_offload": False}},
    "large language models, zero1": {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1}, "fp16": {"enabled": True, **LOSS_SCALE}, **QUIET},
    "large language models, bf16": {"train_micro_batch_size_per_gpu": 2, "train_batch_size": 64, "gradient_clipping": 1.0,
        "zero_optimization": {"stage": 1}, "bfloat16": {"enabled": True}, **QUIET, "data_types": {"grad_accum_dtype": "fp32"}},
    "chat, zero3": {"train_batch_size": 32, "train_micro_batch_size_per_gpu": 4, "steps_per_print": 10,
        "zero_optimization": {"stage": 3, "offload_param": {"device": "none"}, "offload_optimizer": {"device": "none"},
        "stage3_param_persistence_threshold": 1e4, "stage3_max_live_parameters": 3e7, "stage3_prefetch_bucket_size": 3e7,
        "memory_efficient_linear": False}, "fp16": {"enabled": True, "loss_scale_window": 100}, "gradient_clipping": 1.0,
        "prescale_gradients": False, "wall_clock_breakdown": False, "hybrid_engine": {"enabled": False, "max_out_tokens": 512},
        "tensorboard": {"enabled": False, "output_path": "x/", "job_name": "y"}},
    "quantized": {**BF16, "zero_optimization": {"stage": 3, "zero_quantized_weights": True, "zero_hpz_partition_size": 8,
        "zero_quantized_gradients": True, "contiguous_gradients": True, "overlap_comm": True},
        "train_micro_batch_size_per_gpu": 1},
    "old offload": {"train_batch_size": 10, "gradient_accumulation_steps": 1, "scheduler": WARM_UP, "zero_optimization":
        {**STAGE2, "cpu_offload": True}, "fp16": {"enabled": True}, "amp": {"enabled": False}},
    "pictures": {"train_batch_size": 1024, "train_micro_batch_size_per_gpu": 128, "steps_per_print": 1e10,
        "optimizer": ADAMW, "fp16": {"enabled": True, **LOSS_SCALE}, "zero_optimization": {"stage": 1},
        "zero_allow_untested_optimizer": True,
        "flops_profiler": {"enabled": False, "profile_step": -1, "module_depth": -1, "top_modules": 1, "detailed": True},
        "activation_checkpointing": ALL_OFF, "dump_state": False},
    "disk": {"train_batch_size": 1024, "fp16": {"enabled": False}, **BF16, "gradient_clipping": 1.0, "zero_optimization":
        {**NUMBERS3, "offload_optimizer": {**CPU, "buffer_count": 4, "fast_init": False}, "offload_param": {**CPU,
        "buffer_count": 5, "buffer_size": 1e8}}, "aio": {"block_size": 262144, "queue_depth": 32, "thread_count": 1,
        "single_submit": False, "overlap_events": True}},
    "checkpointing": {"bf16": {"enabled": True}, "zero_optimization": NUMBERS3, "activation_checkpointing": CHECKPOINTING,
        "gradient_clipping": 1.0, "comms_logger": {"enabled": False}, "sparse_gradients": False},
    "plain": {**BF16, "zero_optimization": {"stage": 3, "contiguous_gradients": True, "reduce_bucket_size": 5e8,
        "stage3_gather_fp16_weights_on_model_save": False}, "wall_clock_breakdown": False, "memory_breakdown": False,
        "gradient_clipping": 0.0, "zero_allow_untested_optimizer": True, "communication_data_type": None},
}  # fmt: skip


def refused_lines(file: Path, content: Any) -> list[str]:
    """What a start says of the file, a line for a key."""
    file.write_text(json.dumps(content))
    try:
        load_machine_settings(file)
    except ConfigError as error:
        said = in_one_line(error)
        assert said is not None and said.exit_code == 2
        first, *others = said.line.splitlines()
        assert str(file) in first and all(line.startswith("  ") for line in others)
        return [line.strip() for line in others] or [first.partition(f"{file}: ")[2]]
    return []


def without(content: dict[str, Any], place: str) -> None:
    """Deletes a key by its dotted place."""
    *sections, key = place.split(".")
    for section in sections:
        content = content[section]
    del content[key]


@pytest.mark.parametrize("name", sorted(PUBLIC))
def test_one_start_names_every_edit(tmp_path: Path, name: str) -> None:
    content = json.loads(json.dumps(PUBLIC[name]))
    for line in refused_lines(tmp_path / "machine.json", content):
        if line.startswith(("activation_checkpointing needs", "fp16 is refused")):
            content.pop(line.split()[0])
        elif "old name" in line and "bf16" in line:
            content["bf16"] = content.pop("bfloat16")
        elif line.split()[0].partition(".")[0] in content:
            without(content, line.split()[0])
    assert refused_lines(tmp_path / "machine.json", content) == []
    kept = load_machine_settings(tmp_path / "machine.json").raw
    assert refused_lines(tmp_path / "kept.json", kept) == [], "a run folder has a file that can be used again"
    assert load_machine_settings(tmp_path / "kept.json").raw == kept


def test_few_edits_are_left(tmp_path: Path) -> None:
    """Most of what is left is the recipe's, which no ds_config may state, or "auto"."""
    lines = {name: refused_lines(tmp_path / "machine.json", content) for name, content in PUBLIC.items()}
    assert median(map(len, lines.values())) <= 4
    others = [
        line for said in lines.values() for line in said if "belongs to the recipe" not in line and '"auto"' not in line
    ]
    assert len(others) < len(lines)
