"""Sums in whole numbers: exact, in any order, on any ranks; each micro-batch rounds once, within the stated bound."""

import itertools
import math
import random
from fractions import Fraction
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.clipping import ClippedSum
from privacy.errors import PrivacyConfigError
from privacy.gradients.per_example_gradients import Dense, EmbeddingGradient, OuterProducts
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.ranks.engine import even_layout
from privacy.sums.grid import (
    EXAMPLES_PER_PART,
    EXAMPLES_PER_SUM,
    LARGEST_SPLIT,
    MOST_CANCELLED,
    Grid,
    Unit,
)
from privacy.sums.local import LocalSums
from privacy.sums.reduction import reduce_to_owners
from privacy.sums.sharded import ShardedSums
from privacy.sums.totals import ParameterSum, SumTarget, add_together, real_numbers
from tests.distributed.ranks import run_ranks
from tests.privacy.clipping.neighbours import Product
from trainer.planner.probe import MemoryTimeline

CPU = torch.device("cpu")
SIZES = [
    (100, 100),
    (26_010, 314),
    (22_000_000, 1000),
    (190_000_000, 20_000),
    (407_000_000, 1_319_879),
    (7 * 10**9, 1_319_879),
]


@pytest.mark.parametrize(("num_coordinates", "cap"), SIZES)
def test_contract_4_the_step_is_fine_enough_and_public(num_coordinates: int, cap: int) -> None:
    """sqrt(d) h <= 2^-13 C in exact numbers, for any C, the same on any number of ranks; the parts of the slack are within r."""
    grids = [
        Grid.of(num_coordinates, torch.float32, cap, rows)
        for rows in (None, cap // 128 + 9, 2 * cap)
    ]
    assert len({grid.bits for grid in grids}) == 1
    for bound in (1.0, 0.1, math.nextafter(1.0, 0), 3e-7, 6e19):
        unit = grids[0].unit(bound)
        assert unit is not None
        assert (
            num_coordinates * Fraction(4) ** 13
            <= Fraction(bound) ** 2 * Fraction(4) ** unit.exponent
        )
        for grid in grids:
            if grid.layout == "int32+int16":
                assert grid.rows is not None and grid.rows * (unit.largest + 1) <= LARGEST_SPLIT
    # What x adds, the roundings of others beside it, h, and sums in fp64 where calls cancel, in units of C.
    n, part = EXAMPLES_PER_SUM, (MOST_CANCELLED * (1 + SENSITIVITY_SLACK / 2) + 1) / 2
    one_call = 2 * 2**-24 * sum(whole + part for whole in range(1, n + 1))
    few = math.isqrt(n**2 // MOST_CANCELLED)
    several_calls = 2 * 2**-24 * (2 * part - 1) * sum(range(1, few + 1))
    others = max(one_call, several_calls) + 2**-13 + 2**-53 * MOST_CANCELLED * 1024**2
    assert few == 11 and SENSITIVITY_SLACK / 2 + others <= SENSITIVITY_SLACK


def test_six_bytes_where_rows_fit_and_eight_elsewhere() -> None:
    of = [Grid.of(190_000_000, torch.float32, 1_319_879, rows) for rows in (10_400, 1_400_000)]
    assert [grid.layout for grid in of] == ["int32+int16", "int64"]
    assert Grid.of(100, torch.float32).layout == Grid.of(100, torch.float64, 64).layout == "int64"
    with pytest.raises(PrivacyConfigError, match="use a smaller batch"):
        Grid.of(10**15, torch.float32, 10**12)


def whole(values: Tensor, unit: Unit, num_examples: int) -> list[int]:
    """By Python's integers. A power of two is exact; Python rounds halves to even, too."""
    most = torch.tensor(float(num_examples * unit.largest), dtype=values.dtype).item()
    numbers = (values * 2.0**unit.exponent).tolist()
    return [0 if x != x else round(min(max(x, -most), most)) for x in numbers]


def contributions(
    rng: random.Random, unit: Unit, bound: float, rows: int, count: int
) -> list[tuple[Tensor, int]]:
    """Ordinary ones, and those that are as large as may be, or no numbers."""
    generator, found = torch.Generator().manual_seed(rng.getrandbits(63)), []
    while rows > 0 and len(found) < count:
        examples = min(rng.choice([1, 8, 64, 500]), rows)
        rows -= examples
        x = torch.randn(300, generator=generator, dtype=rng.choice([torch.float32, torch.float64]))
        x *= bound * examples * 10 ** rng.uniform(-6, 0)
        match rng.choice(["ordinary", "ordinary", "largest", "smallest", "no numbers"]):
            case "largest":
                x[:] = bound * examples * 1.0009
            case "smallest":
                x[:] = -bound * examples * 1.0009
            case "no numbers":
                x[::3], x[1::3], x[2::3] = math.nan, math.inf, -1e30
        found.append((x, examples))
    return found


@pytest.mark.parametrize("seed", range(20))
def test_contract_4_sums_equal_those_of_big_integers_in_any_order(seed: int) -> None:
    rng = random.Random(seed)
    rows, bound = rng.choice([100, 3000, 60_000]), rng.choice([1.0, 0.3, 1e-6, 7e5])
    grid = Grid.of(rng.choice([100, 10**6, 2 * 10**8]), torch.float32, rows, rows)
    unit = grid.unit(bound)
    assert unit is not None
    parts = contributions(rng, unit, bound, rows, 60)
    expected = [sum(column) for column in zip(*(whole(x, unit, n) for x, n in parts), strict=True)]
    for layout, _ in itertools.product((grid.layout, "int64"), range(2)):
        rng.shuffle(parts)
        (total,) = ParameterSum.zeros([300], layout, unit, CPU)
        for x, examples in parts:
            total.make_room()
            for some in (slice(0, 130), slice(130, 300)):  # as products of large matrices come
                total.add([x[some].clone()], examples, some.start)
        assert total.read(slice(None)).tolist() == expected
        assert total.read(slice(7, 9)).tolist() == expected[7:9]


def test_contract_4_the_edge_of_the_range() -> None:
    """Every example as large as may be, with one sign or alternating, up to the last row that has room."""
    grid = Grid.of(190_000_000, torch.float32, 1_319_879, 100_000)
    unit = grid.unit(math.nextafter(1.0, 0))
    assert grid.layout == "int32+int16" and unit is not None
    (total,), examples = ParameterSum.zeros([2], grid.layout, unit, CPU), 1000
    largest = examples * unit.largest
    for _ in range(100_000 // examples):
        total.make_room()
        total.add(
            [torch.tensor([1.0, -1.0], dtype=torch.float64) * largest * 2.0**-unit.exponent],
            examples,
        )
    assert total.read(slice(None)).tolist() == [100 * largest, -100 * largest]
    sums = LocalSums({"w": torch.Size([1])}, grid, CPU)
    sums.zero_(unit)
    sums.start(100_000)
    with pytest.raises(PrivacyConfigError, match="passes the 100,000"):
        sums.start(1)


@pytest.mark.parametrize("calls", [1, 3])
def test_contract_4_half_way_points_reach_the_bound_and_do_not_pass_it(calls: int) -> None:
    """Others leave every coordinate just below a half, and x adds just enough to pass it: the rounding moves by 2^-13 C.

    A weight that several calls share must not round once a call, or the bound would be passed by their number. With so many
    examples the step is the coarsest that 64^2 coordinates may have.
    """
    width = 64
    model = torch.nn.Linear(width, width, bias=False)
    clipped = ClippedSum(model, 1.0, cap=1 << 29, rows=2 * width)
    unit = clipped.accumulator.unit
    assert unit is not None
    step = 2.0**-unit.exponent
    # fp32 has 24 bits: values of the size of a step are exact, and their products with 1 too.
    others, x = (0.5 - 2.0**-10) / calls * step, 2.0**-9 / calls * step
    rows = torch.eye(width)
    inputs = torch.cat([rows, rows]).expand(
        calls, -1, -1
    )  # example i sees unit vector i: its gradient is row w of outputs
    gradients = torch.cat([torch.full((width, width), others), torch.full((width, width), x)])

    def task(a: Tensor, w: Tensor) -> Tensor:
        return sum((model(a) * w).sum(1) for _ in range(calls))  # type: ignore[return-value]

    sums = []
    for is_there in (True, False):
        is_padding = torch.arange(2 * width) >= (2 * width if is_there else width)
        clipped.zero_()
        clipped.add_micro_batch(task, {"a": inputs[0], "w": gradients}, is_padding)
        sums.append(dict(clipped.sums())["weight"])
    moved = float((sums[0] - sums[1]).norm())
    assert 0.9 * 2.0**-13 <= moved <= 2.0**-13 * (1 + 2.0**-8)


def test_contract_4_calls_that_cancel_are_clamped_together() -> None:
    """20 C in one call and -19.5 C in the other: each of them alone is more than one example may contribute."""
    (total,) = ParameterSum.zeros([2], "int64", Grid.of(2, torch.float32, 1, 1).unit(1.0), CPU)
    slot = SumTarget(total).of_uses()
    for value in (20.0, -19.5):
        slot.total.add([torch.tensor([value, -value], dtype=torch.float64)], 1)
    total.add([slot.total.low], 1)
    assert real_numbers(total.read(slice(None)), total.unit.exponent).tolist() == [0.5, -0.5]


@pytest.mark.parametrize("seed", range(8))
def test_contract_4_no_fp32_sum_holds_more_than_64_examples(seed: int) -> None:
    """Values that fp32 drops next to a larger one, whatever the sizes of micro-batches.

    One example of 1 comes first; then each adds a quarter of its last place. In one fp32 sum all of them would be lost.
    """
    rng = random.Random(seed)
    grid = Grid.of(1, torch.float32, 2500, 2500)
    sums, value, count, size = LocalSums({"w": torch.Size([1, 1])}, grid, CPU), 2.0**-25, 0, 1
    sums.zero_(grid.unit(1.0))
    while count < 2000:
        sums.start(size)
        g_B11 = torch.full((size, 1, 1), value)
        if count == 0:
            g_B11[0] = 1
        OuterProducts(torch.ones(size, 1, 1), g_B11).add_weighted(torch.ones(size), sums.slot("w"))
        count, size = count + size, rng.choice([1, 2, 7, 8, 31, 32, 33, 64, 200])
    total = float(dict(sums.sums())["w"]) - 1
    assert abs(total / value - (count - 1)) <= EXAMPLES_PER_SUM


def test_short_products_of_a_large_micro_batch_do_not_wait_for_one_another() -> None:
    """Narrow products over many tokens are of one example each: hundreds of them take no more memory than some."""
    (total,), peaks = (
        ParameterSum.zeros(
            [16 * 512], "int64", Grid.of(16 * 512, torch.float32, 1, 1).unit(1.0), CPU
        ),
        [],
    )
    for count in (16, 512):
        g_B1p, a_B1d, grad_Bn = (
            torch.ones(count, 1, 16),
            torch.ones(count, 1, 512),
            torch.ones(count, 16 * 512),
        )
        slot = SumTarget(total, examples=1)
        with MemoryTimeline() as timeline:
            slot.add_product(g_B1p, a_B1d)
            slot.add_matrices(grad_Bn, torch.ones(count))
        peaks.append(max(timeline.live_bytes))
    assert peaks[1] <= peaks[0] + 4 * 512, peaks  # the weights


@pytest.mark.parametrize("kind", ["rows", "dense", "dense_matrix", "product", "short"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("size", [20, 150])
@pytest.mark.parametrize(
    "grid", [Grid(), Grid.of(24, torch.float32, 200, 200), Grid.of(24, torch.float32)]
)
def test_slots_hold_the_weighted_sum(kind: str, size: int, dtype: torch.dtype, grid: Grid) -> None:
    """To fp32's precision, also of contributions that are stored in bf16: neither factors nor sums are rounded to it."""
    generator = torch.Generator().manual_seed(0)
    weight_B, g_BTp = (
        torch.rand(size, generator=generator),
        torch.randn(size, 5, 6, generator=generator),
    )
    ids_BT, a_BTd = (
        torch.randint(0, 4, (size, 5), generator=generator),
        torch.randn(size, 5, 4, generator=generator),
    )
    g_BTp, a_BTd = g_BTp.to(dtype), a_BTd.to(dtype)
    part: Any = {
        "rows": EmbeddingGradient(ids_BT, g_BTp),
        "dense": Dense(g_BTp[:, :4]),
        "dense_matrix": Dense(g_BTp[:, :4].float(), is_product=True),
        "product": OuterProducts(g_BTp, a_BTd),
    }.get(kind)
    one_hot_BTV = torch.nn.functional.one_hot(ids_BT, 4).double()
    per_example_BVp = {
        "rows": torch.einsum("btv,btp->bvp", one_hot_BTV, g_BTp.double()),
        "product": torch.einsum("btd,btp->bdp", a_BTd.double(), g_BTp.double()),
    }.get(kind, g_BTp[:, :4].double())
    expected = torch.einsum("b,bvp->vp", weight_B.double(), per_example_BVp)
    sums = LocalSums({"w": torch.Size([4, 6])}, grid, CPU)
    sums.zero_(grid.unit(16.0))
    for _ in range(1 if size == 150 else 7):  # carries
        sums.start(size)
        if kind == "short":
            add_together([sums.slot("w").total], [expected.flatten()], size)
        else:
            part.add_weighted(weight_B, sums.slot("w"))
    total = dict(sums.sums())["w"] / (1 if size == 150 else 7)
    atol = 1e-4 if kind in ("dense_matrix", "product") else 3e-9 if dtype == torch.float32 else 1e-5
    torch.testing.assert_close(total, expected, rtol=0, atol=atol)


@pytest.mark.parametrize("sign", [1, -1])
def test_contract_6_a_row_of_a_table_in_every_block_of_a_micro_batch(sign: int) -> None:
    """1,024 examples come in 16 blocks, whose sums are as far from a carry as can be: 6 bytes hold their sum exactly."""
    grid = Grid.of(190_000_000, torch.float32, 1_319_879, 100_000)
    unit = grid.unit(1.0)
    assert grid.layout == "int32+int16" and unit is not None
    units_B = torch.full((EXAMPLES_PER_PART,), sign * 2**29 // EXAMPLES_PER_SUM)
    units_B[::EXAMPLES_PER_SUM] -= sign
    assert int(units_B.abs().max()) <= unit.largest
    g_BTp = (units_B.double() * 2.0**-unit.exponent).view(-1, 1, 1).expand(-1, 1, 2)
    ids_BT = torch.zeros(EXAMPLES_PER_PART, 1, dtype=torch.int64)
    sums = LocalSums({"table": torch.Size([10_000, 2])}, grid, CPU)
    sums.zero_(unit)
    for _ in range(3):
        sums.start(EXAMPLES_PER_PART)
        EmbeddingGradient(ids_BT, g_BTp).add_weighted(
            torch.ones(EXAMPLES_PER_PART), sums.slot("table")
        )
    total = sums.take("table").read(slice(None)).view(10_000, 2)
    assert total[0].tolist() == [3 * int(units_B.sum())] * 2 and not total[1:].any()


SHAPES = {"a": torch.Size([40, 33]), "b": torch.Size([7]), "c": torch.Size([129])}
GRID = Grid.of(sum(shape.numel() for shape in SHAPES.values()), torch.float32, 5000, 5000)


def rank_sums(device: torch.device, orders: list[list[list[int]]]) -> list[list[Tensor]]:
    """What this rank owns of the sums of ten fixed micro-batches, of which it adds its part in the given orders."""
    from privacy.ranks import collectives

    unit, found = GRID.unit(0.7), []
    assert unit is not None
    parts = {name: contributions(random.Random(name), unit, 0.7, 5000, 10) for name in SHAPES}
    for accumulator, order in itertools.product((LocalSums, ShardedSums), orders):

        class Sums:  # what `reduce_to_owners` asks of a ClippedSum
            exponent = unit.exponent

            def require_repeated(self) -> None: ...

        clipped: Any = Sums()
        clipped.accumulator = sums = accumulator(SHAPES, GRID, device)
        sums.zero_(unit)
        most = max(len(mine) for mine in order)
        mine = order[collectives.rank()]
        for i in range(most):  # every rank issues the same collectives
            sums.start(1)
            for name, shape in SHAPES.items():
                slot = sums.slot(name)
                if i < len(mine):
                    x, examples = parts[name][mine[i]]
                    slot.total.add([x.repeat(5)[: shape.numel()].clone()], examples)
                sums.complete(name)
            sums.finish()
        shards = reduce_to_owners(
            clipped.accumulator, clipped.exponent, even_layout(SHAPES, collectives.world_size())
        )
        found.append([shard.values for shard in shards])
    return found


def joined(ranks: list[list[list[Tensor]]], way: int) -> Tensor:
    return torch.cat([values for rank in ranks for values in rank[way]])


@pytest.mark.parametrize(
    "world_size",
    [2, pytest.param(3, marks=pytest.mark.full), pytest.param(4, marks=pytest.mark.full)],
)
def test_contract_6_equal_bits_on_any_ranks_in_any_order(world_size: int) -> None:
    rng = random.Random(world_size)

    def deal() -> list[list[int]]:
        order = rng.sample(range(10), 10)
        return [order[rank::world_size] for rank in range(world_size)]

    alone = run_ranks(f"{__name__}:rank_sums", 1, orders=[[list(range(10))]])
    together = run_ranks(f"{__name__}:rank_sums", world_size, orders=[deal(), deal()])
    expected = joined(alone, 0)
    assert expected.dtype == torch.int64 and expected.any()
    assert torch.equal(joined(alone, 1), expected)
    for way in range(4):
        assert torch.equal(joined(together, way), expected)


def test_a_model_without_noise_or_bound_keeps_small_gradients() -> None:
    model = torch.nn.Linear(2, 1)
    for bound, sigma, expected in ((math.inf, 1.0, 1e-30), (1.0, 0.0, 1e-30), (1.0, 1.0, 0.0)):
        clipped = ClippedSum(model, bound, noise_multiplier=sigma)
        inputs = {"x": torch.full((1, 2), 1e-30)}
        clipped.add_micro_batch(
            lambda x: 1e-30 * model(x).sum(1) * 1e30, inputs, torch.zeros(1, dtype=torch.bool)
        )
        assert float(dict(clipped.sums())["weight"][0, 0]) == pytest.approx(expected)
        clipped.detach()


def test_a_huge_micro_batch_is_taken_in_parts() -> None:
    """1.0001 half ulps each would all round up in fp32."""
    width, rows = 8, 40 * EXAMPLES_PER_PART + 3
    model = Product(torch.nn.Linear(1, width)).requires_grad_(False)
    model.layer.bias.requires_grad_(True)  # type: ignore[union-attr]
    scale = 63.51 / (1 << 23)
    inputs = {"x": torch.zeros(rows, 1, 1), "w": torch.full((rows, 1, width), scale)}
    padding = torch.arange(rows) % 7 == 6
    total = ClippedSum(model, 1e3)
    sizes = []
    count_rows = total._add_part
    total._add_part = lambda task, part, padded: (
        sizes.append(len(padded)),
        count_rows(task, part, padded),
    )[1]  # type: ignore[method-assign]
    stats = total.add_micro_batch(model, inputs, padding)
    total.detach()
    assert max(sizes) == EXAMPLES_PER_PART and sum(sizes) == rows
    kept = int((~padding).sum())
    assert int(stats.num_examples) == kept and int(stats.num_clipped) == 0
    (bias,) = dict(total.sums()).values()
    assert bias.dtype == torch.float64
    assert float((bias / (kept * float(torch.tensor(scale))) - 1).abs().max()) <= 1e-4
