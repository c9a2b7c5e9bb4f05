"""With bf16 compute every engine's fp32 master weights begin with the model's fp32 weights, not with their bf16 rounding."""

from typing import Any

import pytest
import torch

from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    OPTIMIZER,
    fresh_captioner,
    machine_settings,
    whole_parameters,
)
from tests.distributed.test_parity import CPU, ENGINES
from trainer.engines import build_engine, sharder

BF16 = {
    name: ENGINES[name]
    for name in ("local", "zero1", "zero2", "zero3", "zero3 offload", "fsdp", "oss")
} | {
    "zero1 offload": ("deepspeed", 1, {"offload_optimizer": CPU}),
    "zero_init": ("deepspeed", 3, {}),
}


def rank_masters(device: torch.device) -> dict[str, Any]:
    """Engine -> (master weights, the module's own where they are whole)."""
    found = {}
    for case, (name, stage, settings) in BF16.items():
        machine = machine_settings(stage, bf16={"enabled": True}, **settings)
        shard = sharder(name, machine, device, MICRO_BATCH) if case == "zero_init" else None  # type: ignore[arg-type]
        engine = build_engine(
            name, fresh_captioner(after=shard), OPTIMIZER, machine, device, MICRO_BATCH
        )  # type: ignore[arg-type]
        whole = (
            {n: p.detach().clone() for n, p in engine.module.named_parameters()}
            if stage < 3
            else {}
        )
        found[case] = whole_parameters(engine), whole
    return found


@pytest.fixture(scope="module")
def masters() -> list[dict[str, Any]]:
    return run_ranks(f"{__name__}:rank_masters", 2)


@pytest.mark.parametrize("case", list(BF16))
def test_masters_are_the_weights_of_the_model(case: str, masters: list[dict[str, Any]]) -> None:
    expected = dict(fresh_captioner().named_parameters())
    assert any(not torch.equal(p, p.bfloat16().float()) for p in expected.values())
    for rank in masters:
        found, module = rank[case]
        for name, parameter in expected.items():
            assert torch.equal(found[name], parameter.detach()), name
        for name, parameter in module.items():
            assert torch.equal(parameter, expected[name].detach().bfloat16()), name
