"""Every way to shard takes the same steps: engines, optimizers, ranks, accumulation and noise, against `local` in one process.

Two or three steps of clipped training with uneven and empty ranks; `make test` runs all pairs of the factors of six
engines, `make test-all` the whole table. Many cases share one pair of rank processes, since starting those is what costs.
"""

import itertools
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor

from data.batch import Batch
from privacy.clipping import SUMS, ClippedSum
from privacy.ranks import collectives as distributed
from privacy.ranks.engine import Engine, Piece, ShardLayout
from privacy.step.step import train_step
from privacy.sums.local import LocalSums
from privacy.sums.reduction import reduce_to_owners
from privacy.sums.sharded import ShardedSums
from privacy.sums.totals import real_numbers
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    NUM_EXAMPLES,
    RecordedNoise,
    a_mechanism,
    machine_settings,
    micro_batches,
    not_charged,
    pairs,
    tiny_captioner,
    whole_parameters,
)
from tests.privacy.clipping import oracle
from trainer.config.recipe import OptimizerSection
from trainer.engines import build_engine

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
    "fsdp checkpointed": ("fsdp", 3, {"activation_checkpointing": {"enabled": True}}),
    "hsdp 2x1": ("fsdp", 3, {"zero_hpz_partition_size": 1}),
    "hsdp 1x2": ("fsdp", 3, {"zero_hpz_partition_size": 2}),
    "oss": ("fairscale", 1, {}),
    "oss checkpointed": ("fairscale", 2, {"activation_checkpointing": {"enabled": True}}),
}
OPTIMIZERS = {
    "adamw": OptimizerSection(name="adamw", peak_lr=1e-2, eps=1e-4, weight_decay=0.01),
    "sgd": OptimizerSection(name="sgd", peak_lr=0.3, weight_decay=0.01),
}
QUICK = ("local", "zero1", "zero3 offload", "fsdp checkpointed", "hsdp 1x2", "oss")
"""Engines whose pairs `make test` runs."""
MAX_GRAD_NORM, SIGMA = 1.0, 0.5
DEALS = {1: [(7,), (7,), (7,)], 2: [(5, 2), (7, 0), (1, 6)]}
"""Examples per rank in each of the three steps."""


TWO_PASS = "fsdp checkpointed"
"""The engine that clips in two passes, which is what checkpointing is for."""
ACCUMULATORS = {"local": LocalSums, "sharded": ShardedSums}
ONLY_ON_TWO_RANKS = "hsdp 1x2"


class Case(NamedTuple):
    engine: str
    world_size: int
    optimizer: str
    accumulation: str
    noisy: bool

    @property
    def reference(self) -> "Case":
        return Case("local", 1, self.optimizer, "local", self.noisy)


class NamedNoise:
    """Normals that depend on step, parameter name and coordinate alone, so that they are the same for any layout."""

    def __init__(self, engine: Engine, first_step: int = 1) -> None:
        self._shapes = engine.shapes
        owned = engine.layout.owned_by(distributed.rank())
        self._pieces = ((step, piece) for step in itertools.count(first_step) for piece in owned)

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        step, piece = next(self._pieces)
        assert count == piece.length
        whole = (
            (normals(step, piece, self._shapes[piece.name]) * deviation).round().astype(np.int64)
        )
        return torch.from_numpy(whole).to(device)


def normals(step: int, piece: Piece, shape: torch.Size) -> np.ndarray:
    """The fresh normals of a piece in a step."""
    seed = zlib.crc32(f"{step} {piece.name}".encode())
    whole = np.random.Generator(np.random.Philox(seed)).standard_normal(shape.numel())
    return whole[piece.offset : piece.offset + piece.length]


def build(device: torch.device, engine: str, optimizer: str = "adamw", **more: Any) -> Any:
    name, stage, settings = ENGINES[engine]
    machine = machine_settings(stage, **settings, **more)
    return build_engine(name, tiny_captioner(), OPTIMIZERS[optimizer], machine, device, MICRO_BATCH)  # type: ignore[arg-type]


def rank_each(device: torch.device, function: str, rows: Sequence[Any], **more: Any) -> list[Any]:
    """Calls a function of this file for each of many cases or engines, in one start of the ranks."""
    return [globals()[function](device, row, **more) for row in rows]


def on_ranks(
    world_size: int, function: Callable[..., Any], rows: Sequence[Any], **more: Any
) -> list[list[Any]]:
    target, name = f"{__name__}:rank_each", function.__name__
    return run_ranks(target, world_size, timeout=1500, function=name, rows=rows, **more)


def _steps(device: torch.device, case: Case, num_steps: int) -> dict[str, Tensor]:
    engine = build(device, case.engine, case.optimizer)
    sigma = SIGMA if case.noisy else 0.0
    clipped = SUMS["two_pass" if case.engine == TWO_PASS else "bookkeeping"](
        engine.module,
        MAX_GRAD_NORM,
        shapes=engine.shapes,
        accumulator=ACCUMULATORS[case.accumulation],
        noise_multiplier=sigma,
    )
    run = a_mechanism(engine, clipped, NamedNoise(engine), sigma, NUM_EXAMPLES)
    charge = replace(not_charged(), learning_rate=lambda step: OPTIMIZERS[case.optimizer].peak_lr)
    for step, counts in enumerate(DEALS[distributed.world_size()][:num_steps], start=1):
        train_step(run, charge, step, iter(micro_batches(pairs(), counts)))
    return whole_parameters(engine)


def table(engines: Iterable[str] = ENGINES) -> list[Case]:
    rows = itertools.product(engines, (1, 2), OPTIMIZERS, ACCUMULATORS, (False, True))
    return [Case(*row) for row in rows if row[:2] != (ONLY_ON_TWO_RANKS, 1)]


def in_pairs() -> list[Case]:
    """A part of the table in which every two factors meet in all their values: two opposite cases of each engine."""
    optimizers, accumulations = list(OPTIMIZERS), list(ACCUMULATORS)
    orthogonal = [(0, 0, 0, 0), (0, 0, 1, 1), (0, 1, 0, 1), (0, 1, 1, 0)]
    cases = []
    for engine, row in zip(QUICK, itertools.cycle(orthogonal)):
        for a, b, c, d in (row, tuple(1 - bit for bit in row)):
            world_size = 2 if engine == ONLY_ON_TWO_RANKS else 1 + a
            cases.append(Case(engine, world_size, optimizers[b], accumulations[c], bool(d)))
    return cases


def test_the_part_of_the_table_has_all_pairs() -> None:
    for i, j in itertools.combinations(range(len(Case._fields)), 2):
        assert {(case[i], case[j]) for case in in_pairs()} == {
            (case[i], case[j]) for case in table(QUICK)
        }


@pytest.mark.timeout(2400)
@pytest.mark.parametrize(
    ("cases", "num_steps"), [(in_pairs, 2), pytest.param(table, 3, marks=pytest.mark.full)]
)
def test_every_engine_takes_the_steps_of_local(cases: Any, num_steps: int) -> None:
    references = sorted({case.reference for case in cases()})
    start = {name: p.detach() for name, p in tiny_captioner().named_parameters()}
    ends: dict[Case, dict[str, Tensor]] = {}
    for world_size in (1, 2):
        rows = [case for case in [*references, *cases()] if case.world_size == world_size]
        found, *_ = on_ranks(world_size, _steps, rows, num_steps=num_steps)
        ends |= zip(rows, found, strict=True)
    assert all(oracle.relative_error(ends[case], start) > 1e-3 for case in references)
    errors = {case: oracle.relative_error(ends[case], ends[case.reference]) for case in cases()}
    assert {case: error for case, error in errors.items() if not error < 1e-5} == {}


ROWS = 4


def _noised(device: torch.device, name: str) -> list[tuple[Piece, np.ndarray]]:
    """What steps without any example, which are noise alone, hand to the optimizer: (rows, length) by owned piece."""
    engine = build(device, name)
    clipped = ClippedSum(engine.module, MAX_GRAD_NORM, shapes=engine.shapes)
    run = a_mechanism(engine, clipped, NamedNoise(engine), SIGMA, NUM_EXAMPLES)
    owned, rows = engine.layout.owned_by(distributed.rank()), list[list[np.ndarray]]()
    take = engine.step

    def watched(shards: Sequence[Any], **rates: float) -> None:
        rows.append([shard.values.numpy(force=True).copy() for shard in shards])
        take(shards, **rates)

    engine.step = watched
    for step in range(1, ROWS + 1):
        train_step(
            run,
            not_charged(),
            step,
            iter(micro_batches(pairs(), (0,) * distributed.world_size())[:1]),
        )
    return [
        (piece, np.stack(column))
        for piece, column in zip(owned, zip(*rows, strict=True), strict=True)
    ]


@pytest.mark.timeout(1200)
@pytest.mark.parametrize(
    ("engines", "world_size"),
    [
        (["zero3", "fsdp"], 2),
        *(
            pytest.param(
                [e for e in ENGINES if w == 2 or e != ONLY_ON_TWO_RANKS], w, marks=pytest.mark.full
            )
            for w in (1, 2)
        ),
        pytest.param(
            ["local", "zero1", "zero2", "zero3", "zero3 offload", "fsdp", "oss"],
            4,
            marks=pytest.mark.full,
        ),
    ],
)
def test_contract_7_every_engine_hands_over_the_owner_s_noise_once(
    engines: list[str], world_size: int
) -> None:
    """For every coordinate, whoever owns it: sigma C / B times the fresh normal of its name and step."""
    shapes = {name: p.shape for name, p in tiny_captioner().named_parameters()}
    ranks = on_ranks(world_size, _noised, engines)
    scale = MAX_GRAD_NORM * SIGMA / NUM_EXAMPLES
    for number, engine in enumerate(engines):
        ShardLayout(tuple(tuple(piece for piece, _ in rank[number]) for rank in ranks)).check(
            shapes
        )
        for piece, noise in (found for rank in ranks for found in rank[number]):
            fresh = np.stack(
                [normals(step, piece, shapes[piece.name]) for step in range(1, ROWS + 1)]
            )
            np.testing.assert_allclose(
                noise, scale * fresh, atol=1e-14, err_msg=f"{engine} {piece}"
            )


def _noise(device: torch.device, name: str, num_steps: int) -> tuple[np.ndarray, Sequence[Piece]]:
    """What this rank draws on steps without any example, and which coordinates it owns."""
    engine, noise = build(device, name), RecordedNoise()
    run = a_mechanism(
        engine,
        ClippedSum(engine.module, MAX_GRAD_NORM, shapes=engine.shapes),
        noise,
        2.0,
        4,
    )
    for step in range(1, num_steps + 1):
        train_step(run, not_charged(), step, iter(micro_batches(pairs(), (0, 0))[:1]))
    return torch.cat(noise.draws).numpy(), engine.layout.owned_by(distributed.rank())


@pytest.mark.parametrize(
    ("engines", "num_steps"),
    [(["zero3", "oss"], 2), pytest.param(list(ENGINES), 3, marks=pytest.mark.full)],
)
def test_contract_7_noise_once_per_coordinate_and_never_twice(
    engines: list[str], num_steps: int
) -> None:
    first, second = on_ranks(2, _noise, engines, num_steps=num_steps)
    shapes = {name: p.shape for name, p in tiny_captioner().named_parameters()}
    num_parameters = sum(shape.numel() for shape in shapes.values())
    for engine, (draws, owned), (more_draws, also_owned) in zip(
        engines, first, second, strict=True
    ):
        ShardLayout((tuple(owned), tuple(also_owned))).check(shapes)
        assert len(draws) == num_steps * sum(piece.length for piece in owned), engine
        assert len(draws) + len(more_draws) == num_steps * num_parameters, engine
    draws = np.concatenate([draws for draws, _ in [*first, *second]])
    assert len(np.unique(draws)) == len(draws)
    assert abs(draws.std() - 1) < 0.01
    assert abs(draws.mean()) < 4 / np.sqrt(len(draws))


def _bf16_sums(
    device: torch.device, name: str, accumulation: Sequence[str], count: int
) -> tuple[list[float], torch.dtype]:
    """Relative errors of this rank's shards of a sum over `count` micro-batches, and the dtype of what its layers give."""
    engine = build(device, name, bf16={"enabled": True})
    inputs = pairs(count)
    mine = range(distributed.rank(), count, distributed.world_size())
    batches = [
        Batch({k: v[i : i + 1] for k, v in inputs.items()}, torch.tensor([False])) for i in mine
    ]
    exact = {n: torch.zeros(s.numel(), dtype=torch.float64) for n, s in engine.shapes.items()}
    clipped = ClippedSum(engine.module, MAX_GRAD_NORM, shapes=engine.shapes)
    for batch in batches:
        clipped.zero_()
        _add(engine, clipped, batch)
        for parameter, part in clipped.sums():
            exact[parameter] += part.view(-1)
    clipped.detach()
    for total in exact.values():
        distributed.all_reduce_sum(total)
    errors = []
    for kind in accumulation:
        clipped = ClippedSum(
            engine.module,
            MAX_GRAD_NORM,
            shapes=engine.shapes,
            accumulator=ACCUMULATORS[kind],
        )
        for batch in batches:
            _add(engine, clipped, batch)
        squared_error, squared = 0.0, 0.0
        for shard in reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout):
            part = exact[shard.name][shard.offset : shard.offset + shard.values.numel()]
            squared_error += float(
                (real_numbers(shard.values, clipped.exponent) - part).square().sum()
            )
            squared += float(part.square().sum())
        clipped.detach()
        errors.append((squared_error / squared) ** 0.5)
    seen: list[torch.dtype] = []
    last = engine.module.get_submodule("encoder.norm")
    handle = last.register_forward_hook(lambda module, args, output: seen.append(output.dtype))
    with torch.no_grad():
        engine.module(**{k: v.to(engine.device) for k, v in pairs(1).items()})
    handle.remove()
    return errors, seen[0]


def _add(engine: Engine, clipped: ClippedSum, batch: Batch) -> None:
    inputs = {
        k: v.to(engine.compute_dtype) if v.is_floating_point() else v
        for k, v in batch.inputs.items()
    }
    clipped.add_micro_batch(engine.module, inputs, batch.is_padding_B)


@pytest.mark.timeout(1800)
@pytest.mark.parametrize(
    ("engines", "accumulation", "count"),
    [
        (["zero3"], ["local"], 8),
        pytest.param(list(ENGINES), list(ACCUMULATORS), 64, marks=pytest.mark.full),
    ],
)
def test_contract_6_sums_of_bf16_contributions_are_fp32(
    engines: list[str], accumulation: list[str], count: int
) -> None:
    for rank in on_ranks(2, _bf16_sums, engines, accumulation=accumulation, count=count):
        for engine, (errors, dtype) in zip(engines, rank, strict=True):
            assert max(errors) <= 1e-6 and dtype == torch.bfloat16, (engine, errors, dtype)
