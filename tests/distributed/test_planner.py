"""The planner's sharding against real engines: owned coordinates and bytes held, to the byte; and what ranks sent."""

import time
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.clipping import ClippedSum
from privacy.ranks import collectives
from privacy.ranks.engine import split
from privacy.sums.grid import Grid
from privacy.sums.local import LocalSums
from privacy.sums.reduction import reduce_to_owners
from privacy.sums.sharded import ShardedSums
from privacy.sums.totals import real_numbers_
from tests.distributed.ranks import ROOT, run_ranks
from tests.distributed.test_engines import OPTIMIZER, fresh_captioner
from trainer.config.machine import MachineSettings, load_machine_settings
from trainer.engines import build_engine
from trainer.planner.memory import FP32, FP64, rank_memory, trained_count
from trainer.planner.probe import MemoryTimeline

CASES = [
    ("local", "zero1"),
    ("deepspeed", "zero1"),
    ("deepspeed", "zero3"),
    ("fsdp", "zero3"),
    ("fairscale", "zero1_bf16"),
]
ACCUMULATORS = {"local": LocalSums, "sharded": ShardedSums}
CAP = 1000
Found = dict[str, Any]


def settings(name: str) -> MachineSettings:
    return load_machine_settings(Path(ROOT) / f"ds_configs/{name}.json")


def on_rank(device: torch.device, accumulation: str) -> list[Found]:
    """What this rank holds and sends in each case, without a micro-batch: that depends on shapes alone."""
    return [_one(device, *case, ACCUMULATORS[accumulation]) for case in CASES]


def _one(device: torch.device, name: str, ds_config: str, accumulator: type) -> Found:
    engine: Any = build_engine(name, fresh_captioner(), OPTIMIZER, settings(ds_config), device, 2)  # type: ignore[arg-type]
    clipped = ClippedSum(
        engine.module,
        1.0,
        shapes=engine.shapes,
        accumulator=accumulator,
        cap=CAP,
        rows=CAP,
    )
    sums: Any = clipped.accumulator
    collectives.traffic.reset()
    with MemoryTimeline() as held:
        clipped.zero_()
        sums.start(1)
        sums.finish()
        time.sleep(0.5)  # gloo's threads let go of what they have sent a little later
        torch.empty(0)  # bytes are counted at operations
    found = {"sums": held.live_bytes[-1], "sent_each": collectives.traffic.bytes.total()}
    collectives.traffic.reset()
    zeros = torch.zeros(engine.layout.count(collectives.rank()), dtype=torch.float64)
    with MemoryTimeline() as timeline:
        reduced = reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)
        reduced = [
            shard._replace(values=real_numbers_(shard.values, clipped.exponent))
            for shard in reduced
        ]
        engine.step(
            reduced
            if accumulator is LocalSums
            else split(zeros, engine.layout.owned_by(collectives.rank())),
            lr=0.0,
        )
    found["peak_of_step"] = max(timeline.live_bytes)
    found["sent_with_optimizer"] = collectives.traffic.bytes.total()
    found["owned"] = engine.layout.count(collectives.rank())
    found["states"] = _states(engine)
    clipped.detach()
    return found


def _states(engine: Any) -> int:
    """Bytes of the optimizer's moments on this rank."""
    holder = next(
        getattr(engine, name) for name in ("_zero", "_oss", "_optimizer") if hasattr(engine, name)
    )
    states = (
        holder.optimizer if hasattr(engine, "_zero") else getattr(holder, "optim", holder)
    ).state
    moments = (state.get(kind) for state in states.values() for kind in ("exp_avg", "exp_avg_sq"))
    return sum(moment.nbytes for moment in moments if isinstance(moment, Tensor))


@pytest.fixture(
    scope="module",
    params=[
        "local 2",
        *(
            pytest.param(case, marks=pytest.mark.full)
            for case in ("local 4", "sharded 2", "sharded 4")
        ),
    ],
)
def found(request: pytest.FixtureRequest) -> tuple[str, list[list[Found]]]:
    """The way of accumulation, and what each of so many ranks found."""
    accumulation, world_size = request.param.split()
    return accumulation, run_ranks(
        f"{__name__}:on_rank", int(world_size), accumulation=accumulation
    )


@pytest.mark.parametrize("index", range(len(CASES)), ids=lambda i: "-".join(CASES[i]))
def test_planned_is_what_engines_do(found: tuple[str, list[list[Found]]], index: int) -> None:
    engine, name = CASES[index]
    accumulation, ranks = found
    machine, world_size = settings(name), len(ranks)
    model = fresh_captioner()
    grid = Grid.of(trained_count(model), torch.float32, CAP, CAP)
    assert grid.layout == "int32+int16"
    memory = rank_memory(
        model,
        engine,
        machine,
        OPTIMIZER,  # type: ignore[arg-type]
        accumulation=accumulation,
        world_size=world_size,
        on_cpu=True,
        grid=grid,
    )
    real = [rank[index] for rank in ranks]
    assert max(one["owned"] for one in real) == memory.owned
    assert sum(one["owned"] for one in real) == trained_count(model)
    assert {one["sums"] for one in real} == {memory.sums}
    assert max(one["states"] for one in real) == memory.moments
    # Sums travel in fp64: to the owners, whose noised gradients the others need in fp32 where every rank steps all (local).
    sums = FP64 * (world_size - 1) * memory.owned
    assert {one["sent_each"] for one in real} == {
        0 if accumulation == "local" else (world_size - 1) * memory.sums
    }
    if accumulation == "local":
        noised = FP32 * (world_size - 1) * memory.owned if engine == "local" else 0
        assert {one["sent_with_optimizer"] for one in real} == {sums + noised}
        # gloo's threads now and then let go of a buffer late, on one rank or another.
        assert memory.step <= min(one["peak_of_step"] for one in real) <= 1.35 * memory.step
