"""Local and sharded accumulation: the promised collectives and no others, nothing before the intent; sums of any layout.

test_parity.py has the steps of both under every engine, test_certified.py their equal bits.
Collectives are counted twice: by the trainer's own counter and, independently of who issues them, where torch dispatches them.
"""

import itertools
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from privacy.clipping import SUMS
from privacy.noise.source import SystemNoise
from privacy.ranks import collectives
from privacy.ranks.engine import Piece, ShardLayout, even_layout
from privacy.step.step import train_step
from privacy.sums.grid import Grid
from privacy.sums.local import LocalSums
from privacy.sums.sharded import ShardedSums
from privacy.sums.totals import SumTarget, real_numbers
from tests.distributed.ranks import run_ranks
from tests.distributed.test_engines import (
    NUM_EXAMPLES,
    NoLedger,
    a_mechanism,
    build,
    micro_batches,
    not_charged,
    pairs,
)

ENGINES = [("deepspeed", 3), ("local", 1), ("fsdp", 3), ("deepspeed", 1), ("fairscale", 1)]
"""`make test` measures `local`, whose collectives are all ours."""
DEALS, PER_STEP = [(3, 1), (3, 0)], 2
"""Examples per rank, and micro-batches of a step: some with padding, some of padding alone."""
NUM_PARAMETERS = 21_277
BUCKET = 3500
"""Coordinates: several buckets for the tiny captioner."""


class Collectives(TorchDispatchMode):
    """Torch's own collectives in this thread, whoever calls them: (name, largest tensor), from this many numbers on.

    Control messages and statistics are of 100 numbers or fewer.
    """

    def __init__(self, least: int = 101) -> None:
        super().__init__()
        self.seen: list[tuple[str, int]] = []
        self.least = least

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        name = function.__name__.split(".")[0].strip("_")
        if function.namespace in ("c10d", "_c10d_functional") and "wait" not in name:
            largest = max(
                (x.numel() for x in tree_leaves(args) if isinstance(x, Tensor)), default=0
            )
            if largest >= self.least:
                self.seen.append((name, largest))
        return function(*args, **(kwargs or {}))

    def count(self, word: str) -> int:
        return sum(word in name for name, _ in self.seen)


class StrictLedger(NoLedger):
    """Contract 9: at the intent nothing that depends on a gradient has left its process."""

    def intent(self, step: int, **release: Any) -> None:
        assert not collectives.traffic.collectives
        super().intent(step, **release)


class CountingOpenBuckets(ShardedSums):
    """Notes the most coordinates that were ever held unsharded."""

    most = 0

    def slot(self, name: str) -> SumTarget:
        slot = super().slot(name)
        self.most = max(self.most, sum(b.sums.numel() for b in self._buckets if b.sums is not None))
        return slot


def rank_operations(device: torch.device, engines: Sequence[tuple[str, int]]) -> dict[Any, Any]:
    found: dict[Any, Any] = {}
    for case in engines:
        found[case] = []
        for deal in DEALS:
            engine = build(device, *case)  # ZeRO-3 gathers in another order once it has seen a step
            found[case].append(_collectives(engine, deal))
    return found


def _collectives(engine: Any, deal: tuple[int, ...]) -> dict[str, Any]:
    """Of one step, by way of accumulation: ours, and all large ones that torch saw."""
    found: dict[str, Any] = {"open": 0}
    sharded: Any = partial(CountingOpenBuckets, bucket_coordinates=BUCKET)
    for way, accumulator, mode in [
        ("local", LocalSums, "bookkeeping"),
        ("sharded", sharded, "bookkeeping"),
        ("two_pass", sharded, "two_pass"),
    ]:
        clipped = SUMS[mode](
            engine.module,
            1.0,
            shapes=engine.shapes,
            accumulator=accumulator,
            noise_multiplier=0.0,
        )  # type: ignore[arg-type]
        run = a_mechanism(engine, clipped, SystemNoise(), 0.0, NUM_EXAMPLES)
        charge = replace(not_charged(), ledger=StrictLedger())
        with Collectives() as seen:
            train_step(run, charge, 1, iter(micro_batches(pairs(), deal)[:PER_STEP]))
        traffic = collectives.traffic
        assert seen.count("reduce") == 0, (
            "between CPUs a reduce-scatter is an exchange, and no engine reduces anything"
        )
        found[way] = (
            dict(traffic.collectives),
            dict(traffic.bytes),
            seen.count("alltoall"),
            seen.seen,
        )
        found["buckets"] = len(getattr(clipped.accumulator, "_buckets", ()))
        found["open"] = max(found["open"], getattr(clipped.accumulator, "most", 0))
        clipped.detach()
    return found


@pytest.mark.parametrize("engines", [ENGINES[1:2], pytest.param(ENGINES, marks=pytest.mark.full)])
def test_collectives_of_a_logical_batch(engines: list[tuple[str, int]]) -> None:
    """No rank holds more than two buckets unsharded.

    One in the order of the model; raw parameters of a module are used before its layers, but registered after them.
    """
    ranks = run_ranks(f"{__name__}:rank_operations", 2, engines=engines)
    for engine in engines:
        uneven, empty = ([rank[engine][i] for rank in ranks] for i in range(len(DEALS)))
        assert all(0 < found["open"] <= 2 * BUCKET for found in (*uneven, *empty))
        first, buckets = uneven[0], uneven[0]["buckets"]
        assert buckets >= 5
        counts, num_bytes, exchanges, _ = first["local"]
        assert counts["reduce_scatter"] == exchanges == 1
        size = 8 * NUM_PARAMETERS  # in fp64; all but the own half is sent
        assert 0 <= num_bytes["reduce_scatter"] - size / 2 <= 0.1 * size
        for way in ("sharded", "two_pass"):
            counts, num_bytes, exchanges, _ = first[way]
            assert counts["reduce_scatter"] == PER_STEP * buckets
            assert counts["exchange"] == buckets
            assert (
                counts["reduce_scatter"]
                <= exchanges
                <= counts["reduce_scatter"] + counts["exchange"]
            )
            assert (
                0 <= num_bytes["reduce_scatter"] - PER_STEP * size / 2 <= 8 * 2 * PER_STEP * buckets
            )
        for way, rank in itertools.product(
            ("local", "sharded", "two_pass"), (0, 1)
        ):  # whatever the data
            assert uneven[rank][way] == empty[rank][way]
            names = [[name for name, _ in seen[way][3]] for seen in (uneven[rank], first)]
            assert names[0] == names[1]


def random_layout(
    shapes: Mapping[str, torch.Size], world_size: int, rng: random.Random
) -> ShardLayout:
    """Every parameter cut somewhere, its parts owned by anyone."""
    pieces: list[list[Piece]] = [[] for _ in range(world_size)]
    for name, shape in shapes.items():
        cuts = sorted(
            {0, shape.numel(), *(rng.randint(0, shape.numel()) for _ in range(rng.randint(0, 3)))}
        )
        for a, b in itertools.pairwise(cuts):
            pieces[rng.randrange(world_size)].append(Piece(name, a, b - a))
    for owned in pieces:
        rng.shuffle(owned)
    return ShardLayout(tuple(tuple(p) for p in pieces))


def rank_random_sums(device: torch.device, seeds: range) -> list[float]:
    """The largest error of a sum, for made-up parameters, layouts, orders and missing contributions."""
    return [_random_sums(device, seed) for seed in seeds]


def _random_sums(device: torch.device, seed: int) -> float:
    world_size, rank = collectives.world_size(), collectives.rank()
    shared, own = random.Random(seed), random.Random(1000 * seed + rank)
    shapes = {
        f"p{i}": torch.Size(shared.randint(1, 9) for _ in range(shared.randint(1, 3)))
        for i in range(shared.randint(1, 8))
    }
    layout = (
        random_layout(shapes, world_size, shared) if seed % 3 else even_layout(shapes, world_size)
    )
    layout.check(shapes)
    grid = Grid() if seed % 2 else Grid.of(1000, torch.float64, 64, 64)
    sums = ShardedSums(shapes, grid, device, bucket_coordinates=shared.randint(1, 200))
    sums.zero_(grid.unit(8.0))
    generator = torch.Generator().manual_seed(own.randrange(1 << 30))
    mine = {name: torch.zeros(shape, dtype=torch.float64) for name, shape in shapes.items()}
    for _ in range(shared.randint(1, 4)):
        sums.start(2)
        for name in own.sample(
            sorted(shapes), own.randint(0, len(shapes))
        ):  # this rank's own order; some are missing
            part = torch.randn(shapes[name], generator=generator, dtype=torch.float64)
            total = sums.slot(name).total
            assert total.low.shape == (shapes[name].numel(),) and not total.low.any()
            mine[name] += part
            total.add([part.flatten()], 2)
            sums.complete(name)
        sums.finish()
    exact = {
        name: sum(parts[name] for parts in collectives.gather_objects(mine)) for name in shapes
    }
    shards = sums.to_owners(layout)
    assert not any(part.untyped_storage().nbytes() for part in sums._parts), (
        "what has gone to its owner is freed"
    )
    if sums.unit is not None:
        shards = [
            shard._replace(values=real_numbers(shard.values, sums.unit.exponent))
            for shard in shards
        ]
    assert [(s.name, s.offset, s.values.numel()) for s in shards] == list(layout.owned_by(rank))
    errors = [
        (s.values - exact[s.name].flatten()[s.offset : s.offset + s.values.numel()]).abs().max()
        for s in shards
    ]  # type: ignore[union-attr]
    return max((float(e) for e in errors), default=0.0)


@pytest.mark.parametrize(
    ("world_size", "count"),
    [(3, 12), *(pytest.param(size, 40, marks=pytest.mark.full) for size in (1, 3))],
)
def test_any_layout_order_and_missing_contribution(world_size: int, count: int) -> None:
    for errors in run_ranks(f"{__name__}:rank_random_sums", world_size, seeds=range(count)):
        assert max(errors[1::2]) < 1e-14 and 0 < max(errors) < 1e-9  # fp64, and whole numbers
