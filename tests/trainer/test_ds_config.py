"""Which side owns which key, and what DeepSpeed is told."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from privacy.errors import in_one_line
from trainer.config.machine import (
    ANYWAY,
    REFUSED,
    ZERO_KEYS,
    MachineSettings,
    load_machine_settings,
    resolve,
)
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
        "reduce_bucket_size": "auto",
        "sub_group_size": "1e9",
    }
    content = {
        "optimizer": {"params": {"lr": "auto"}},
        "gradient_clipping": 1.0,
        "zero_optimization": zero,
        "bfloat16": {"enabled": True},
        "fp16": {"enabled": True},
        "x\n  error: y\x1b": 1,
        "zero_optimisation": {},
    }
    with pytest.raises(ConfigError) as caught:
        load(file, content)
    said = in_one_line(caught.value)
    assert said is not None and said.exit_code == 2 and str(file) in said.line
    first, *lines = said.line.splitlines()
    assert first.endswith(": 10 keys must change") and len(lines) == 10
    for expected in (
        "  optimizer belongs to the recipe: [optimizer]",
        "  gradient_clipping belongs to the recipe: privacy.max_grad_norm",
        '  bfloat16 is an old name: write bf16 {"enabled": true}',
        "  unknown key x error: y\\u001b",
        "  unknown key zero_optimisation; did you mean zero_optimization?",
        "  fp16 is refused: its loss scale skips steps depending on single examples; use bf16",
        "  unknown key zero_optimization.stages; did you mean stage?",
        '  zero_optimization.cpu_offload is an old name: write offload_optimizer {"device": "cpu"}',
        '  zero_optimization.reduce_bucket_size is "auto"; write the value, or remove it',
        '  zero_optimization.sub_group_size must be a number of elements (an integer above 0), not "1e9"',
    ):
        assert expected in lines, (expected, lines)


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


@pytest.mark.parametrize("key", sorted(REFUSED.keys() - ANYWAY.keys()))
def test_what_is_off_anyway_may_say_so(file: Path, key: str) -> None:
    """Taken, and left out; anything else is refused by name."""
    *sections, name = key.split(".")

    def content(value: Any) -> dict[str, Any]:
        inner: dict[str, Any] = {name: value}
        for section in reversed(sections):
            inner = (
                {"enabled": True, **inner}
                if section in ("bf16", "activation_checkpointing")
                else inner
            )
            inner = {section: {"stage": 3, **inner} if section == "zero_optimization" else inner}
        return {**ZERO2, **inner}

    for value in OFF:
        assert f'"{name}"' not in json.dumps(load(file, content(value)).raw), value
    for value in (True, 1.0, "auto", {"enabled": True}, {"enabled": "auto"}, [0]):
        line = refusal(file, content(value))
        assert f"{key} {REFUSED[key]}" in line, value


@pytest.mark.parametrize(
    ("key", "taken", "refused"),
    [
        (
            "gradient_clipping",
            [0, 0.0],
            [1.0, 1e-9, "auto", True, None, False, {}, {"enabled": False}],
        ),
        ("gradient_accumulation_steps", [], [0, 1, None, "auto"]),
        ("train_batch_size", [], [0, None, False, "auto"]),
        ("optimizer", [], [{}, None, {"enabled": False}]),
        ("gradient_predivide_factor", [1, 1.0], [0, 2.0, True]),
        ("gradient_allreduce_op", ["sum"], ["mean", None]),
        ("zero_allow_untested_optimizer", [True], [False, 1]),
        ("steps_per_print", [None, 0, 10, 2000, 1e10, 2**31 - 1], ["auto", True, -1]),
        ("data_types", [{}, {"grad_accum_dtype": "fp32"}], [{"grad_accum_dtype": "bf16"}]),
        ("communication_data_type", [None], ["fp16", "fp32"]),
    ],
)
def test_what_happens_anyway(file: Path, key: str, taken: list[Any], refused: list[Any]) -> None:
    for value in taken:
        assert load(file, {**ZERO2, key: value}).raw["zero_optimization"] == {"stage": 2}
    for value in refused:
        assert key in refusal(file, {**ZERO2, key: value})


REFUSALS: list[tuple[Any, str]] = [
    *(
        (text, "is no JSON")
        for text in ("", "{", "stage: 2", '{"bf16": {"enabled": tru}}', b'{"\xff": 1}')
    ),
    *((content, "JSON object") for content in ([], "3", "null", '"zero"')),
    ('{"bf16": {"enabled": true}, "zero_optimization": {"stage": 2}, "bf16": {}}', "bf16 twice"),
    ('{"zero_optimization": {"stage": 2, "stage": 3}}', "stage twice"),
    # DeepSpeed itself ignores these two.
    ({**ZERO2, "gradient_cliping": 0.0}, "unknown key gradient_cliping"),
    ({**ZERO2, "zero_optimisation": {}}, "unknown key zero_optimisation"),
    ({"zero_optimization": {"stage": 2, "stages": 1}}, "unknown key zero_optimization.stages"),
    ({**ZERO2, "bf16": {"enabled": True, "immediate": True}}, "unknown key bf16.immediate"),
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
    ({**ZERO2, "fp16": {"enabled": 0}}, "fp16.enabled must be true or false"),
    ({**ZERO2, "fp16": {"enabled": True}}, "fp16 is refused"),
    (
        {"zero_optimization": {"stage": 3, "offload_param": {"device": "nvme"}}},
        "NVMe is not supported",
    ),
    (
        {"zero_optimization": {"stage": 3, "offload_optimizer": {"ratio": 0.5}}},
        "offload_optimizer.ratio must be 1",
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
    ({"zero_optimization": "auto"}, 'zero_optimization is "auto"'),
    ({"zero_optimization": {"stage": "auto"}}, 'zero_optimization.stage is "auto"'),
    ({**ZERO2, "fp16": {"sizes": [1, {"deep": "auto"}]}}, 'fp16.sizes.1.deep is "auto"'),
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
    tuning = {
        key: EXAMPLES.get(key, 5)
        for key, (_, (is_good, _)) in ZERO_KEYS.items()
        if is_good(EXAMPLES.get(key, 5))
    }
    tuning |= {
        key: True
        for key, (stages, (is_good, _)) in ZERO_KEYS.items()
        if not stages and is_good(True)
    }
    for stage, off in (
        (2, {"offload_param": {"device": "none", "pin_memory": True}, "zero_init": False}),
        (3, {}),
    ):
        kept = load(file, {"zero_optimization": {**tuning, **off, "stage": stage}}).raw[
            "zero_optimization"
        ]
        assert kept.keys() == {key for key in kept if stage in ZERO_KEYS[key][0]} and (
            "sub_group_size" in kept
        ) == (stage == 3)
        assert "reduce_bucket_size" in tuning and "contiguous_gradients" not in kept
    assert "contiguous_gradients must be" in refusal(
        file, {"zero_optimization": {"stage": 2, "contiguous_gradients": "yes"}}
    )


EXAMPLES: dict[str, Any] = {
    "offload_optimizer": {"device": "cpu"},
    "offload_param": {"device": "cpu"},
    "overlap_comm": False,
    "zero_init": True,
}


@pytest.mark.parametrize(
    "key",
    sorted(
        key
        for key in ZERO_KEYS
        if ZERO_KEYS[key][0] and key not in ("stage", "zero_hpz_partition_size")
    ),
)
def test_deepspeed_reads_every_accepted_key(file: Path, key: str) -> None:
    """What is accepted here must not end in DeepSpeed's traceback, nor be unknown to it."""
    from deepspeed.runtime.config import DeepSpeedConfig

    value = EXAMPLES.get(key, 12345)
    machine = load(file, {"zero_optimization": {"stage": ZERO_KEYS[key][0][-1], key: value}})
    read = DeepSpeedConfig(resolve(machine, micro_batch_size=4, world_size=1)).zero_config
    assert read.stage == machine.stage
    if key == "zero_init":  # ours: DeepSpeed has a context manager for it
        assert machine.zero_init
    elif not isinstance(value, dict):
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
