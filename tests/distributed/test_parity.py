"""Every way to shard takes the same steps: one table over engines, optimizers, ranks and noise, against `local` in one process.

Three steps of clipped training with uneven and empty ranks; `make test` runs pairs of the table's factors, `make test-all` the
whole table. Many cases share one pair of rank processes, since starting those is what costs.
"""

import itertools
import zlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batch import Batch
from privacy.clipping import ClippedSum
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    NUM_EXAMPLES,
    a_run,
    machine_settings,
    micro_batches,
    pairs,
    tiny_captioner,
    whole_parameters,
)
from tests.privacy.clipping import oracle
from trainer import distributed
from trainer.config import OptimizerSection
from trainer.engines import build_engine
from trainer.engines.base import Engine, Piece
from trainer.engines.reduction import reduce_to_owners
from trainer.loop import train_step

CPU = {"device": "cpu"}
ENGINES: Mapping[str, tuple[str, int, Mapping[str, Any]]] = {
    "local": ("local", 1, {}),
    "zero1": ("deepspeed", 1, {}),
    "zero2": ("deepspeed", 2, {}),
    "zero3": ("deepspeed", 3, {}),
    "zero3 offload": ("deepspeed", 3, {"offload_optimizer": CPU, "offload_param": CPU}),
    "fsdp": ("fsdp", 3, {}),
    "fsdp gathered": ("fsdp", 2, {}),
    "fsdp offload": ("fsdp", 3, {"offload_param": CPU}),
    "hsdp 2x1": ("fsdp", 3, {"zero_hpz_partition_size": 1}),
    "hsdp 1x2": ("fsdp", 3, {"zero_hpz_partition_size": 2}),
    "oss": ("fairscale", 1, {}),
}
OPTIMIZERS = {
    name: OptimizerSection(name=name, peak_lr=1e-2, eps=1e-4, weight_decay=0.01)  # type: ignore[arg-type]
    for name in ("adamw", "lamb")
}
MAX_GRAD_NORM, SIGMA = 1.0, 0.5
DEALS = {1: [(7,), (7,), (7,)], 2: [(5, 2), (7, 0), (1, 6)]}
"""Examples per rank in each of the three steps."""


class Case(NamedTuple):
    engine: str
    optimizer: str
    noisy: bool


class NamedNoise:
    """Normals that depend on step, parameter name and coordinate alone, so that they are the same for any layout."""

    def __init__(self, engine: Engine, first_step: int = 1) -> None:
        self._shapes = engine.shapes
        self._pieces = self._in_order(engine.layout.owned_by(distributed.rank()), first_step)

    def _in_order(self, owned: Sequence[Piece], first_step: int) -> Iterator[tuple[int, Piece]]:
        for step in itertools.count(first_step):
            for piece in owned:
                yield step, piece

    def standard_normal(self, count: int, device: torch.device) -> Tensor:
        step, piece = next(self._pieces)
        assert count == piece.length
        seed = zlib.crc32(f"{step} {piece.name}".encode())
        whole = np.random.Generator(np.random.Philox(seed)).standard_normal(self._shapes[piece.name].numel())
        return torch.from_numpy(whole[piece.offset : piece.offset + count]).to(device)


def build(device: torch.device, engine: str, optimizer: str = "adamw", **more: Any) -> Any:
    name, stage, settings = ENGINES[engine]
    machine = machine_settings(stage, **settings, **more)
    return build_engine(name, tiny_captioner(), OPTIMIZERS[optimizer], machine, device, MICRO_BATCH)  # type: ignore[arg-type]


def rank_three_steps(device: torch.device, cases: Sequence[Case]) -> list[dict[str, Tensor]]:
    return [_three_steps(device, case) for case in cases]


def _three_steps(device: torch.device, case: Case) -> dict[str, Tensor]:
    engine = build(device, case.engine, case.optimizer)
    sigma = SIGMA if case.noisy else 0.0
    clipped = ClippedSum(engine.module, MAX_GRAD_NORM, shapes=engine.shapes)
    run = a_run(engine, clipped, NamedNoise(engine), sigma, NUM_EXAMPLES)
    for step, counts in enumerate(DEALS[distributed.world_size()], start=1):
        train_step(run, step, iter(micro_batches(pairs(), counts)))
    return whole_parameters(engine)


def table(world_size: int) -> list[Case]:
    engines = [name for name in ENGINES if world_size == 2 or name != "hsdp 1x2"]
    return [Case(*factors) for factors in itertools.product(engines, OPTIMIZERS, (False, True))]


def in_pairs(world_size: int) -> list[Case]:
    """Every pair of two factors' values, but not every triple."""
    return [
        case
        for i, (_, rows) in enumerate(itertools.groupby(table(world_size), key=lambda case: case.engine))
        for case in rows
        if (case.optimizer == "lamb") ^ case.noisy ^ (i % 2 == 0)
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize("world_size", [1, 2])
@pytest.mark.parametrize("cases", [in_pairs, pytest.param(table, marks=pytest.mark.full)])
def test_every_engine_takes_the_steps_of_local(world_size: int, cases: Any) -> None:
    wanted = sorted({Case("local", case.optimizer, case.noisy) for case in cases(world_size)})
    (references,) = run_ranks(f"{__name__}:rank_three_steps", 1, cases=wanted)
    expected = dict(zip(wanted, references, strict=True))
    start = {name: p.detach() for name, p in tiny_captioner().named_parameters()}
    assert all(oracle.relative_error(end, start) > 1e-3 for end in references)
    found, *_ = run_ranks(f"{__name__}:rank_three_steps", world_size, timeout=1000, cases=cases(world_size))
    errors = {
        case: oracle.relative_error(parameters, expected[Case("local", case.optimizer, case.noisy)])
        for case, parameters in zip(cases(world_size), found, strict=True)
    }
    assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


def rank_bf16_sums(device: torch.device, engines: Sequence[str]) -> list[tuple[float, torch.dtype]]:
    return [_bf16_sum(device, engine) for engine in engines]


def _bf16_sum(device: torch.device, name: str) -> tuple[float, torch.dtype]:
    """Relative error of this rank's shards of the sum over 64 micro-batches, and the dtype of the model's computation."""
    engine = build(device, name, bf16={"enabled": True})
    clipped = ClippedSum(engine.module, MAX_GRAD_NORM, shapes=engine.shapes)
    inputs = pairs(64)
    mine = range(distributed.rank(), 64, distributed.world_size())
    batches = [Batch({k: v[i : i + 1] for k, v in inputs.items()}, torch.tensor([False])) for i in mine]
    exact = {n: torch.zeros(s.numel(), dtype=torch.float64) for n, s in engine.shapes.items()}
    for batch in batches:
        clipped.zero_()
        _add(engine, clipped, batch)
        for parameter, part in clipped.sums():
            exact[parameter] += part.view(-1)
    for total in exact.values():
        distributed.all_reduce_sum(total)
    clipped.zero_()
    for batch in batches:
        _add(engine, clipped, batch)
    squared_error, squared = 0.0, 0.0
    for shard in reduce_to_owners(clipped, engine.layout):
        part = exact[shard.name][shard.offset : shard.offset + shard.values.numel()]
        squared_error += float((shard.values - part).square().sum())
        squared += float(part.square().sum())
    return (squared_error / squared) ** 0.5, _seen_dtype(engine)


def _add(engine: Engine, clipped: ClippedSum, batch: Batch) -> None:
    inputs = {k: v.to(engine.compute_dtype) if v.is_floating_point() else v for k, v in batch.inputs.items()}
    clipped.add_micro_batch(engine.module, inputs, batch.is_padding_B)


def _seen_dtype(engine: Engine) -> torch.dtype:
    """Of what the model's layers give."""
    seen: list[torch.dtype] = []
    last = engine.module.get_submodule("encoder.norm")
    handle = last.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.no_grad():
        engine.module(**{k: v.to(engine.device) for k, v in pairs(1).items()})
    handle.remove()
    return seen[0]


def test_contract_6_sums_of_bf16_contributions_are_fp32() -> None:
    engines = [name for name in ENGINES if name not in ("hsdp 2x1", "hsdp 1x2")]
    for rank in run_ranks(f"{__name__}:rank_bf16_sums", 2, engines=engines):
        for engine, (error, dtype) in zip(engines, rank, strict=True):
            assert error <= 1e-6 and dtype == torch.bfloat16, (engine, error, dtype)
