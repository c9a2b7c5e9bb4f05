"""Which side owns which key, and what DeepSpeed is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy.errors import in_one_line
from trainer.config.machine import KEYS, MachineSettings, load_machine_settings, resolve
from trainer.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = sorted((ROOT / "ds_configs").glob("*.json"))
ZERO2: dict[str, Any] = {"zero_optimization": {"stage": 2}}


@pytest.fixture
def file(tmp_path: Path) -> Path:
    return tmp_path / "machine.json"


def load(file: Path, content: Any) -> MachineSettings:
    if not isinstance(content, bytes):
        content = (content if isinstance(content, str) else json.dumps(content)).encode()
    file.write_bytes(content)
    return load_machine_settings(file)


def refusal(file: Path, content: Any) -> str:
    with pytest.raises(ConfigError) as caught:
        load(file, content)
    line = str(caught.value)
    assert caught.value.exit_code == 2 and str(file) in line and "\n" not in line
    return line


def test_all_refused_keys_are_named_at_once(file: Path) -> None:
    """One start shows every edit, a line for a key; a key cannot add a line of its own."""
    zero = {
        "stage": 3,
        "stages": 1,
        "cpu_offload": True,
        "overlap_comm": "auto",
        "sub_group_size": "1e9",
    }
    content = {
        "optimizer": {"params": {"lr": "auto"}},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "fp16": {"enabled": True},
        "x\n  error: y\x1b": 1,
        "zero_optimisation": {"stage": 3},
    }
    with pytest.raises(ConfigError) as caught:
        load(file, content)
    said = in_one_line(caught.value)
    assert said is not None and said.exit_code == 2 and str(file) in said.line
    first, *lines = said.line.splitlines()
    assert first.endswith(": 9 keys must change")
    assert lines == [
        "  optimizer is no key of a ds_config; see ds_configs/README.md",
        "  gradient_clipping is no key of a ds_config; see ds_configs/README.md",
        "  zero_optimization.stages is no key of a ds_config; did you mean zero_optimization.stage?",
        "  zero_optimization.cpu_offload is no key of a ds_config; did you mean zero_optimization.offload_param?",
        '  zero_optimization.overlap_comm is "auto"; write the value, or remove it',
        '  zero_optimization.sub_group_size must be a number of elements (an integer above 0), not "1e9"',
        "  fp16.enabled must be false: its loss scale skips steps depending on single examples; use bf16, not true",
        "  x error: y\\u001b is no key of a ds_config; see ds_configs/README.md",
        "  zero_optimisation is no key of a ds_config; did you mean zero_optimization?",
    ]


def test_whole_numbers_as_deepspeed_writes_them(file: Path) -> None:
    for text in ("5e8", "5E+8", "500000000.0", "500000000"):
        zero = load(file, f'{{"zero_optimization": {{"stage": 3, "sub_group_size": {text}}}}}').raw[
            "zero_optimization"
        ]
        assert zero["sub_group_size"] == 500_000_000 and type(zero["sub_group_size"]) is int
    for text in ("1.5", "5e-1", "1e300", "1e999", "-5e8", '"5e8"', "true", "NaN"):
        assert "sub_group_size must be" in refusal(
            file, f'{{"zero_optimization": {{"stage": 3, "sub_group_size": {text}}}}}'
        )


OFF = [
    False,
    None,
    0,
    0.0,
    {},
    {"enabled": False},
    {"enabled": False, "detailed": True, "steps": [3]},
]
FOREIGN = [
    "gradient_clipping",
    "optimizer",
    "scheduler",
    "train_batch_size",
    "flops_profiler",
    "zero_allow_untested_optimizer",
    "amp",
    "zero_optimization.zenflow",
    "zero_optimization.cpu_offload",
    "bf16.auto_cast",
    "activation_checkpointing.profile",
]


@pytest.mark.parametrize("key", FOREIGN)
def test_what_is_off_anyway_may_say_so(file: Path, key: str) -> None:
    """Taken, and left out; anything else is refused by name."""
    section, _, name = key.rpartition(".")
    beside = {"zero_optimization": {"stage": 3}, "": {}}.get(section, {"enabled": True})

    def content(value: Any) -> dict[str, Any]:
        return {**ZERO2, section: {**beside, name: value}} if section else {**ZERO2, name: value}

    for value in OFF:
        assert f'"{name}"' not in json.dumps(load(file, content(value)).raw), value
    for value in (True, 1.0, "auto", {"enabled": True}, {"enabled": "auto"}, [0]):
        line = refusal(file, content(value))
        assert f"{key} is no key of a ds_config" in line, value


OF_OTHERS: dict[str, Any] = {
    "gradient_clipping": 0.0,
    "wall_clock_breakdown": False,
    "aio": {"block_size": 1048576, "thread_count": 1},
    "fp16": {"enabled": False, "loss_scale_window": 1000, "initial_scale_power": 16},
    "bf16": {"enabled": True, "loss_scale": 1, "hysteresis": 2},
    "zero_optimization": {
        "stage": 2,
        "offload_optimizer": {"device": "none", "nvme_path": "/local", "ratio": 0.5},
        "contiguous_gradients": True,
        "reduce_scatter": True,
        "reduce_bucket_size": 5e8,
        "allgather_partitions": True,
        "stage3_max_live_parameters": 1e9,
        "offload_param": {"device": "none", "pin_memory": True},
        "zero_init": False,
    },
}


def test_what_other_programs_files_say_beside_is_left_out(file: Path) -> None:
    assert load(file, OF_OTHERS).raw == {
        "zero_optimization": {"stage": 2, "offload_optimizer": {"device": "none"}},
        "bf16": {"enabled": True},
        "fp16": {"enabled": False},
    }


REFUSALS: list[tuple[Any, str]] = [
    *(
        (text, "is no JSON")
        for text in ("", "{", "stage: 2", '{"bf16": {"enabled": tru}}', b'{"\xff": 1}')
    ),
    *((content, "JSON object") for content in ([], "3", "null", '"zero"')),
    ('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "bf16": {}}', "bf16 twice"),
    ('{"zero_optimization": {"stage": 2, "stage": 3}}', "stage twice"),
    # DeepSpeed itself ignores this one.
    ({**ZERO2, "gradient_cliping": 0.5}, "gradient_cliping is no key of a ds_config"),
    ({**ZERO2, "bf16": {"enabled": True, "immediate": True}}, "bf16.immediate is no key"),
    *(
        ({"zero_optimization": {"stage": stage}}, "zero_optimization.stage must be 1, 2 or 3")
        for stage in (0, "3", 2.5, True)
    ),
    *(
        (content, "zero_optimization.stage must be")
        for content in ({}, {"zero_optimization": {}}, {"bf16": {"enabled": True}})
    ),
    ({"zero_optimization": 3}, "zero_optimization must be an object"),
    ({**ZERO2, "bf16": True}, "bf16 must be an object"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": "cpu"}},
        "zero_optimization.offload_param must be an object",
    ),
    (
        {**ZERO2, "bf16": {"enabled": "false"}},
        "bf16.enabled must be true or false",
    ),  # in quotes it would count as true
    ({**ZERO2, "fp16": {"enabled": True}}, "fp16.enabled must be false: its loss scale skips"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "NVMe is not supported",
    ),
    *(
        ({"zero_optimization": {"stage": 3, key: value}}, f"zero_optimization.{key} must be")
        for key, values in {
            "overlap_comm": ["true", 1, None, {}],
            "zero_init": ["yes"],
            "sub_group_size": ["1e9", True, 0],
            "stage3_max_live_parameters": [1.5, [], -1],
        }.items()
        for value in values
    ),
    ({"zero_optimization": "auto"}, "zero_optimization must be an object"),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"device": "cpu", "ratio": 0.5}}},
        "zero_optimization.offload_optimizer.ratio is no key of a ds_config",
    ),
    (
        {**ZERO2, "activation_checkpointing": {"cpu_checkpointing": True}},
        "needs activation_checkpointing.enabled",
    ),
    ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage is "auto"'),
]


@pytest.mark.parametrize(("content", "words"), REFUSALS, ids=range(len(REFUSALS)))
def test_what_is_wrong_is_one_line(file: Path, content: Any, words: str) -> None:
    """DeepSpeed's own reader would turn "yes" into true, ignore a key, or end in a traceback."""
    assert words in refusal(file, content)


def test_keys_of_another_stage(file: Path) -> None:
    """What only tunes DeepSpeed is left out; what asks for more is refused."""
    for stage, key, value in [(2, "offload_param", {"device": "cpu"}), (1, "zero_init", True)]:
        line = refusal(file, {"zero_optimization": {"stage": stage, key: value}})
        assert f"zero_optimization.{key} has no effect at stage {stage}" in line
    tuning = {"sub_group_size": 5, "overlap_comm": True, "allgather_bucket_size": 5}
    for stage, kept in ((2, {"allgather_bucket_size"}), (3, {"sub_group_size", "overlap_comm"})):
        zero = load(file, {"zero_optimization": {**tuning, "stage": stage}}).raw[
            "zero_optimization"
        ]
        assert zero.keys() == kept | {"stage"}


VALUES: dict[str, Any] = {
    "device": "cpu",
    "pin_memory": True,
    "overlap_comm": False,
    "zero_init": True,
}


@pytest.mark.parametrize(
    "place",
    sorted(
        place
        for place in KEYS
        if place.startswith("zero_") and not place.endswith((".stage", ".zero_hpz_partition_size"))
    ),
)
def test_deepspeed_reads_every_accepted_key(file: Path, place: str) -> None:
    """What is accepted here must not end in DeepSpeed's traceback, nor be unknown to it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    *sections, key = place.split(".")
    value = VALUES.get(key, 12345)
    content: dict[str, Any] = {"device": "cpu", key: value} if len(sections) > 1 else {key: value}
    content = {sections[1]: content} if len(sections) > 1 else content
    stage = 1 if key == "allgather_bucket_size" else 3
    machine = load(file, {"zero_optimization": {"stage": stage, **content}})
    read: Any = DeepSpeedConfig(resolve(machine, micro_batch_size=4, world_size=1)).zero_config
    assert read.stage == machine.stage
    if key == "zero_init":  # ours: DeepSpeed has a context manager for it
        assert machine.zero_init
        return
    read = getattr(read, sections[1]) if len(sections) > 1 else read
    assert getattr(read, key.removeprefix("stage3_")) == value


@pytest.mark.parametrize(("world_size", "micro_batch_size"), [(1, 24), (8, 1)])
@pytest.mark.parametrize("path", SHIPPED, ids=lambda p: p.stem)
def test_every_shipped_file_resolves(
    path: Path, file: Path, world_size: int, micro_batch_size: int
) -> None:
    """All that `resolve` sees of a recipe is its micro batch size. What a run folder keeps of a file can be used again."""
    machine = load_machine_settings(path)
    assert load(file, machine.raw).raw == machine.raw
    assert "gradient_clipping" not in machine.raw, "it is the resolver's"
    resolved = resolve(machine, micro_batch_size=micro_batch_size, world_size=world_size)
    # Written, not left to a default: DeepSpeed's own clipping became 1.0 in 0.19.3 (contract 14).
    written = {
        "gradient_clipping": 0.0,
        "train_batch_size": micro_batch_size * world_size,
        "gradient_accumulation_steps": 1,
        "train_micro_batch_size_per_gpu": micro_batch_size,
        "bf16": {"enabled": machine.compute_dtype == torch.bfloat16},
        **{key: {"enabled": False} for key in ("fp16", "tensorboard", "wandb", "csv_monitor")},
    }
    assert resolved | written == resolved == json.loads(json.dumps(resolved))
    assert resolved["zero_optimization"]["stage"] == machine.stage


def test_deepspeed_reads_the_resolved_keys() -> None:
    """DeepSpeed's own reader agrees; what it would do with an absent key is its business, so none may be absent."""
    from deepspeed.runtime.config import DeepSpeedConfig

    machine = load_machine_settings(ROOT / "ds_configs" / "zero3_bf16.json")
    read = DeepSpeedConfig(resolve(machine, micro_batch_size=4, world_size=1))
    assert read.gradient_clipping == 0.0
    assert (
        read.zero_config.stage == 3
        and read.bfloat16_config.enabled
        and not read.float16_config.enabled
    )
    assert (read.train_micro_batch_size_per_gpu, read.gradient_accumulation_steps) == (4, 1)
    assert read.prescale_gradients is False and read.gradient_predivide_factor == 1.0
