"""The planner's sharding against real engines on two ranks: owned coordinates, bytes held and bytes sent, to the byte."""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import LocalSums
from tests.distributed.ranks import ROOT, run_ranks
from tests.distributed.test_engines import OPTIMIZER, fresh_captioner
from trainer.config.machine import MachineSettings, load_machine_settings
from trainer.engines import build_engine
from trainer.engines.base import split
from trainer.engines.reduction import reduce_to_owners
from trainer.engines.sharded_sums import ShardedSums
from trainer.planner.hardware import traffic
from trainer.planner.memory import RankMemory, Trainable, rank_memory, shares
from trainer.ranks import distributed

CASES = [
    ("local", "zero1"),
    ("deepspeed", "zero1"),
    ("deepspeed", "zero3"),
    ("fsdp", "zero3"),
    ("fairscale", "zero1_bf16"),
]
WORLD_SIZE = 2
Found = dict[str, Any]


def settings(name: str) -> MachineSettings:
    return load_machine_settings(Path(ROOT) / f"ds_configs/{name}.json")


def on_rank(device: torch.device) -> list[Found]:
    return [_one(device, engine, name, kind) for engine, name in CASES for kind in (LocalSums, ShardedSums)]


def _one(device: torch.device, name: str, ds_config: str, accumulator: type) -> Found:
    """What this rank holds and sends, without a micro-batch: that depends on shapes alone."""
    engine: Any = build_engine(name, fresh_captioner(), OPTIMIZER, settings(ds_config), device, 2)  # type: ignore[arg-type]
    clipped = ClippedSum(engine.module, 1.0, shapes=engine.shapes, accumulator=accumulator, self_check=False)
    sums: Any = clipped.accumulator
    distributed.traffic.reset()
    sums.start(1)
    sums.finish()
    held = [*sums._totals.values()] if accumulator is LocalSums else sums._kept
    found = {"sums": sum(t.nbytes for t in held), "sent_each": distributed.traffic.bytes.total()}
    distributed.traffic.reset()
    reduced = reduce_to_owners(clipped, engine.layout)
    found["sent_step"] = distributed.traffic.bytes.total()
    zeros = torch.zeros(engine.layout.count(distributed.rank()), dtype=torch.float64)
    engine.step(
        reduced if accumulator is LocalSums else split(zeros, engine.layout.owned_by(distributed.rank())), lr=0.0
    )
    found["sent_with_optimizer"] = distributed.traffic.bytes.total()
    found["owned"] = engine.layout.count(distributed.rank())
    found["states"] = _states(engine)
    clipped.detach()
    return found


def _states(engine: Any) -> int:
    """Bytes of the optimizer's moments on this rank."""
    for attribute in ("_zero", "_oss", "_optimizer"):
        if hasattr(engine, attribute):
            holder = getattr(engine, attribute)
            states = (holder.optimizer if attribute == "_zero" else getattr(holder, "optim", holder)).state
            return sum(
                t.nbytes
                for state in states.values()
                for kind, t in state.items()
                if isinstance(t, Tensor) and kind in ("exp_avg", "exp_avg_sq")
            )
    raise AssertionError


@pytest.fixture(scope="module")
def ranks() -> list[list[Found]]:
    return run_ranks("tests.distributed.test_planner:on_rank", WORLD_SIZE)


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(CASES[i]))
@pytest.mark.parametrize("accumulation", ["local", pytest.param("sharded", marks=pytest.mark.full)])
def test_planned_is_what_engines_do(ranks: list[list[Found]], index: int, accumulation: str) -> None:
    engine, name = CASES[index]
    machine = settings(name)
    trainable = Trainable.of(fresh_captioner())
    busiest = shares(trainable, engine, machine, OPTIMIZER, WORLD_SIZE)  # type: ignore[arg-type]
    memory: RankMemory = rank_memory(
        trainable, busiest, engine, machine, OPTIMIZER,  # type: ignore[arg-type]
        accumulation=accumulation, world_size=WORLD_SIZE, average=False,
    )  # fmt: skip
    sent = traffic(
        trainable, busiest, engine, machine,  # type: ignore[arg-type]
        mode="bookkeeping", accumulation=accumulation, world_size=WORLD_SIZE,
    )  # fmt: skip
    real = [rank[2 * index + (accumulation == "sharded")] for rank in ranks]
    assert max(found["owned"] for found in real) == busiest.owned
    assert sum(found["owned"] for found in real) == trainable.count
    assert {found["sums"] for found in real} == {memory.sums}
    assert max(found["states"] for found in real) == memory.moments
    assert {found["sent_each"] for found in real} == {sent.sums_per_micro_batch}
    if accumulation == "local":
        assert {found["sent_with_optimizer"] for found in real} == {sent.sums_per_step}
    else:
        assert all(found["sent_with_optimizer"] <= sent.sums_per_step for found in real)
