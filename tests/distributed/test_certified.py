"""Certified sums under every engine: the same integers on 1, 2 and 4 ranks, however examples are dealt and summed; then noise."""

import itertools
import random
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from data.batch import Batch
from privacy.certified.certified_sum import CertifiedSum
from privacy.errors import PrivacyConfigError
from privacy.noise.rounded_normal import deviation_in_units
from privacy.noise.source import SystemNoise
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.request import PlanRequest
from privacy.ranks import collectives
from privacy.run.mechanism import clipper_of
from privacy.step.step import train_step
from privacy.sums.local import LocalSums
from privacy.sums.reduction import reduce_to_owners
from privacy.sums.sharded import ShardedSums
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    MICRO_BATCH,
    a_mechanism,
    build,
    micro_batches,
    not_charged,
    pairs,
    tiny_captioner,
)
from trainer.run.clipping_mode import require_same_integers

ENGINES = [("local", 1), ("deepspeed", 1), ("deepspeed", 3), ("fsdp", 3), ("fairscale", 1)]
NUM_EXAMPLES = 8
Sums = dict[tuple[str, int], Tensor]


def certified_plan() -> PrivacyPlan:
    return make_plan(
        PlanRequest(
            num_examples=8000,
            expected_batch_size=NUM_EXAMPLES,
            num_steps=100,
            noise_multiplier=0.5,
            max_grad_norm=0.7,
            arithmetic="certified",
        )
    )


def dealt(order: list[int]) -> list[Batch]:
    """This rank's micro-batches of equal size, the last of which are padding."""
    parts = [order[rank :: collectives.world_size()] for rank in range(collectives.world_size())]
    inputs = {name: x[list(itertools.chain(*parts))] for name, x in pairs(NUM_EXAMPLES).items()}
    return micro_batches(inputs, tuple(map(len, parts)))


def rank_everything(device: torch.device) -> tuple[Any, Any, Any]:
    """In one pair of processes: starting those is what costs."""
    noised = rank_noised(device, [("local", 1), ("fsdp", 3)])
    return rank_sums(device, [("deepspeed", 3)], 2), noised, rank_refusals(device)


@pytest.fixture(scope="module")
def two_ranks() -> list[tuple[Any, Any, Any]]:
    return run_ranks(f"{__name__}:rank_everything", 2)


def rank_sums(device: torch.device, cases: list[tuple[str, int]], seed: int) -> dict[Any, Sums]:
    """What this rank owns of the sum, by engine and accumulation, each with an order of its own."""
    shared, found = random.Random(seed), {}
    ways = [LocalSums, partial(ShardedSums, bucket_coordinates=3500)]
    for case in cases:
        engine = build(device, *case)
        for i, way in enumerate(ways):
            clipped = clipper_of(
                certified_plan(),
                engine.module,
                shapes=engine.shapes,
                accumulator=way,
            )
            order = shared.sample(range(NUM_EXAMPLES), NUM_EXAMPLES)
            for batch in dealt(order):
                clipped.add_micro_batch(engine.module, batch.inputs, batch.is_padding_B)
            found[case, i] = {
                (s.name, s.offset): s.values.clone()
                for s in reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)
            }
            clipped.detach()
    return found


def whole(ranks: list[Sums]) -> dict[str, Tensor]:
    parts: dict[str, list[tuple[int, Tensor]]] = {}
    for name, offset, values in ((n, o, v) for sums in ranks for (n, o), v in sums.items()):
        parts.setdefault(name, []).append((offset, values))
    return {
        name: torch.cat([v for _, v in sorted(pieces, key=lambda p: p[0])])
        for name, pieces in parts.items()
    }


def alone() -> dict[str, Tensor]:
    """The same sum in this process, without an engine, in micro-batches of MICRO_BATCH."""
    model = tiny_captioner()
    clipped = clipper_of(certified_plan(), model)
    for start in range(0, NUM_EXAMPLES, MICRO_BATCH):
        inputs = {name: x[start : start + MICRO_BATCH] for name, x in pairs(NUM_EXAMPLES).items()}
        clipped.add_micro_batch(model, inputs, torch.zeros(MICRO_BATCH, dtype=torch.bool))
    return {name: total.flatten() for name, total in clipped.sums()}


@pytest.mark.parametrize(
    "world_size", [None, *(pytest.param(size, marks=pytest.mark.full) for size in (1, 2, 4))]
)
def test_sums_of_all_engines_are_equal_to_the_last_bit(
    world_size: int | None, two_ranks: list[Any]
) -> None:
    ranks = [sums for sums, _, _ in two_ranks]
    if world_size is not None:
        ranks = run_ranks(f"{__name__}:rank_sums", world_size, cases=ENGINES, seed=world_size)
    expected = alone()
    assert all(total.any() for total in expected.values())
    for case in ranks[0]:
        found = whole([rank[case] for rank in ranks])
        assert found.keys() == expected.keys()
        for name, total in found.items():
            assert total.dtype == torch.int64 and torch.equal(total, expected[name]), (case, name)


class Recorded(SystemNoise):
    """Keeps what it gave."""

    def __init__(self) -> None:
        self.draws: list[tuple[float, Tensor]] = []

    def rounded_normal(self, deviation: float, count: int, device: torch.device) -> Tensor:
        draw = super().rounded_normal(deviation, count, device)
        self.draws.append((deviation, draw))
        return draw


def rank_noised(device: torch.device, cases: list[tuple[str, int]]) -> dict[Any, Any]:
    """Each engine's sums, the noise of one step, and what reached the optimizer."""
    found = {}
    for case in cases:
        engine, plan, noise = build(device, *case), certified_plan(), Recorded()
        clipped = clipper_of(plan, engine.module, shapes=engine.shapes)
        for batch in dealt(list(range(NUM_EXAMPLES))):
            clipped.add_micro_batch(engine.module, batch.inputs, batch.is_padding_B)
        sums = [
            s.values.clone()
            for s in reduce_to_owners(clipped.accumulator, clipped.exponent, engine.layout)
        ]
        arrived: list[Tensor] = []
        step = engine.step

        def watched(
            shards: Any, arrived: list[Tensor] = arrived, step: Any = step, **rest: Any
        ) -> None:
            arrived.extend(s.values.clone() for s in shards)
            step(shards, **rest)

        engine.step = watched
        mechanism = replace(a_mechanism(engine, clipped, noise, 0.5, NUM_EXAMPLES), plan=plan)
        train_step(mechanism, not_charged(), 1, iter(dealt(list(range(NUM_EXAMPLES)))))
        found[case] = sums, noise.draws, arrived
    return found


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_each_owner_adds_whole_numbers_once_and_then_divides(
    every: bool, two_ranks: list[Any]
) -> None:
    ranks = [noised for _, noised, _ in two_ranks]
    if every:
        ranks = run_ranks(f"{__name__}:rank_noised", 2, cases=ENGINES)
    lattice = certified_plan().lattice
    assert lattice is not None
    every: list[Tensor] = []
    for rank in ranks:
        for case, (sums, draws, arrived) in rank.items():
            assert len(sums) == len(draws) == len(arrived), case
            for total, (deviation, draw), values in zip(sums, draws, arrived, strict=True):
                assert deviation == deviation_in_units(0.5 * lattice.bound, lattice.exponent)
                assert torch.equal(
                    values, (total + draw).double() * 2.0**-lattice.exponent / NUM_EXAMPLES
                )
                every.append(draw.double() / deviation)
    normal = torch.cat(every)
    assert abs(float(normal.std()) - 1) < 0.02 and len(normal.unique()) > 0.999 * len(normal)


class RankDependent(nn.Module):
    """On rank 1 a gradient is another; or, for `row`, in row 1."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layer, self.kind = nn.Linear(3, 3), kind

    def forward(self, x: Tensor) -> Tensor:
        scale = 1 + 1e-6 * (
            collectives.rank() if self.kind == "rank" else torch.arange(len(x))[:, None]
        )
        return (self.layer(x) * scale).sum(1)


def rank_refusals(device: torch.device) -> list[str | None]:
    """The refusal of each kind of model; None where there is none."""
    said: list[str | None] = []
    for kind, size in itertools.product(("rank", "row"), (1, 4)):
        engine = build(device, "local", 1)
        engine.module = RankDependent(kind)
        engine.shapes = {name: p.shape for name, p in engine.module.named_parameters()}
        clipped = clipper_of(certified_plan(), engine.module)
        assert isinstance(clipped, CertifiedSum)
        try:
            generator = torch.Generator().manual_seed(0)
            require_same_integers(
                clipped, engine, lambda n, g=generator: {"x": torch.randn(n, 3, generator=g)}, size
            )
            said.append(None)
        except PrivacyConfigError as error:
            said.append(str(error))
    return said


def test_ranks_or_rows_that_compute_differently_are_refused_on_every_rank(
    two_ranks: list[Any],
) -> None:
    for _, _, (by_rank, by_rank_too, single, by_row) in two_ranks:
        assert "on rank 1" in by_rank and "on rank 1" in by_rank_too
        assert single is None and "row 1" in by_row and "layer." in by_row
