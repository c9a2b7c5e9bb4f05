"""Contract 4 against rounding: neighbours made so that one example changes how everything after it rounds; norms that underflow.

The construction: 2^k examples of +1, one of +1/2, the example x of -1, then many of -3/4 of the last place below 2^k, each
perhaps a token at a time. With x the partial sum lies below 2^k, and every later addition counts in full or more; with zeros in
its place it lies above, where every later addition rounds to nothing. In plain fp32 sums of embedding rows x moves the sum by
up to 4 C so.
"""

import itertools
import random
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from privacy.adaptive_clipping import LARGEST_BOUND, SMALLEST_BOUND
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import LocalSums
from privacy.clipping.clipped_sum import Mode
from privacy.releases import SENSITIVITY_SLACK
from privacy.step.engine import even_layout
from privacy.step.sharded_sums import ShardedSums
from tests.distributed.ranks import run_ranks
from tests.privacy.clipping import neighbours
from tests.privacy.clipping.magnitudes import norms
from tests.privacy.clipping.neighbours import Product, Raw

WIDTH = 160
"""Wide enough that a Linear takes the ghost norm at 64 tokens; at 197 it writes gradients out."""


class Case(NamedTuple):
    """A trained parameter, tokens, sizes of micro-batches (in turn), k, how many examples follow x, and how many zeros lead."""

    rule: str
    tokens: int
    micro_batches: tuple[int, ...]
    k: int
    after: int
    lead: int = 0


def layer_of(rule: str) -> tuple[nn.Module, Tensor, int]:
    """A layer with one kind of trained parameter, its input of one token, and the width of its output."""
    match rule:
        case "embedding":
            return nn.Embedding(3, 1), torch.tensor(1), 1
        case "bias":
            linear = nn.Linear(1, 1)
            linear.weight.requires_grad_(False)
            return linear, torch.ones(1), 1
        case "layer_norm":
            norm = nn.LayerNorm(2)
            norm.weight.requires_grad_(False)
            return norm, torch.tensor([1.0, -1.0]), 2
        case "raw":
            return Raw(1), torch.zeros(1), 1
        case "linear":
            return nn.Linear(WIDTH, WIDTH, bias=False), torch.eye(WIDTH)[0], WIDTH
    raise AssertionError(rule)


def moved(case: Case, mode: Mode = "bookkeeping", accumulator: type = LocalSums) -> float:
    """|S - S'| in units of C, S' with zeros in the place of x; all but x is equal, and nothing is clipped."""
    layer, token, width = layer_of(case.rule)
    model = Product(layer)
    ones, x = case.lead + 2**case.k, case.lead + 2**case.k + 1
    g_NT = torch.zeros(x + 1 + case.after, case.tokens)  # what the tokens add to the one coordinate that is looked at
    g_NT[case.lead : ones, 0], g_NT[ones, 0], g_NT[x, 0] = 1, 0.5, -1
    g_NT[x + 1 :] = -0.75 * 2.0 ** (case.k - 24)
    clipped = ClippedSum(model, 1.0, mode=mode, accumulator=accumulator, self_check=False)
    sums = []
    for is_out in (False, True):
        clipped.zero_()
        start, sizes = 0, itertools.cycle(case.micro_batches)
        while start < len(g_NT):
            rows = torch.arange(start, min(start + next(sizes), len(g_NT)))
            w_BTp = torch.zeros(len(rows), case.tokens, width)
            w_BTp[:, :, 0] = g_NT[rows]
            inputs = {"x": token.expand(len(rows), case.tokens, *token.shape).clone(), "w": w_BTp}
            stats = clipped.add_micro_batch(model, inputs, (rows == x) & is_out)
            assert int(stats.num_clipped) == 0
            start += len(rows)
        sums.append(total_of(clipped))
    clipped.detach()
    assert float(sums[0].abs().max()) > 0
    return float((sums[0] - sums[1]).norm())


def total_of(clipped: ClippedSum) -> Tensor:
    """The whole sum, where one process holds it."""
    if isinstance(clipped.accumulator, ShardedSums):
        shapes = {name: shape for bucket in clipped.accumulator._buckets for name, shape in bucket.shapes.items()}
        return torch.cat([shard.values.clone() for shard in clipped.accumulator.to_owners(even_layout(shapes, 1))])
    return torch.cat([total.double().flatten() for _, total in clipped.sums()])


ALONE = (256, *(1,) * 255)
"""What fills the sum in one micro-batch, and then every example in its own."""
CASES = [
    Case("embedding", 24, (32,), 8, 254),
    Case("embedding", 40, (64,), 9, 510),
    Case("embedding", 197, (64, 9, 7), 7, 126),
    Case("embedding", 40, (256,), 7, 120),  # within one micro-batch
    Case("bias", 1, ALONE, 8, 130),
    Case("bias", 1, (1024,), 9, 510),
    Case("layer_norm", 1, ALONE, 8, 130),
    Case("raw", 1, ALONE, 8, 130),
    Case("linear", 1, ALONE, 8, 130),
    Case("linear", 1, (8,), 9, 510),
    Case("linear", 1, (3, 40, 1, 1, 64, 7), 8, 254),
    Case("linear", 64, (8,), 8, 254),  # ghost norm
    Case("linear", 197, (16,), 7, 126),  # written out
]


@pytest.mark.parametrize("case", CASES, ids=lambda case: f"{case.rule}-{case.tokens}-{case.micro_batches[:6]}")
def test_contract_4_one_example_does_not_change_how_others_round(case: Case) -> None:
    assert moved(case) <= 1 + SENSITIVITY_SLACK


FULL = [pytest.mark.full, pytest.mark.timeout(7200)]
QUICK, OF_ANY_SIZE = 1_100, 1_000
COUNTS = [QUICK, pytest.param(OF_ANY_SIZE, marks=FULL), pytest.param(25_000, marks=FULL)]
"""Pairs of each search: every rule once in `make test`, and more than 100,000 in `make test-all`."""


def draw_of(count: int) -> neighbours.Draw:
    draws = {QUICK: neighbours.draw_small, OF_ANY_SIZE: neighbours.draw_construction}
    return draws.get(count, neighbours.draw_few_tokens)


@pytest.mark.parametrize("count", COUNTS)
@pytest.mark.parametrize("search", ["sums", "climb"])
def test_contract_4_neighbours_drawn_at_random(search: str, count: int) -> None:
    """x zeroed in its place, and x left out with the rows behind it closed up; see neighbours.py."""
    require_small(list(getattr(neighbours, search)(torch.device("cpu"), f"{count}", count, draw=draw_of(count))), count)


@pytest.mark.parametrize("count", COUNTS)
def test_contract_4_sharded_accumulation_rounds_no_worse(count: int) -> None:
    (found,) = run_ranks(f"{__name__}:rank_sharded", 1, count=count, timeout=7200)
    cases, *searches = found
    assert max(cases) <= 1 + SENSITIVITY_SLACK, cases
    for one in searches:
        require_small(one, count)


def rank_sharded(device: torch.device, count: int) -> list[Any]:
    """By how much the cases move, and what each search finds."""
    searches = (neighbours.sums,) if count == QUICK else (neighbours.sums, neighbours.climb)
    return [
        [moved(case, accumulator=ShardedSums) for case in CASES if case.micro_batches != ALONE],
        *(list(search(device, f"sharded {count}", count, ShardedSums, draw_of(count))) for search in searches),
    ]


@pytest.mark.parametrize("kind", neighbours.CUDA_PRODUCTS)
@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=FULL)])
@pytest.mark.parametrize("search", ["sums", "climb"])
def test_contract_4_neighbours_of_products_that_are_added_up_as_on_cuda(search: str, count: int, kind: str) -> None:
    """Emulated: about once an example is not what these kernels round."""
    with neighbours.cuda_products(kind) as draw:
        require_small(list(getattr(neighbours, search)(torch.device("cpu"), f"cuda {count}", count, draw=draw)), count)


def require_small(found: list[neighbours.Found], count: int) -> None:
    assert sum(one.pairs for one in found) >= count
    worst = max(found, key=lambda one: one.size)
    assert 0.999 <= worst.size <= 1 + SENSITIVITY_SLACK, worst


@pytest.mark.parametrize("tokens", [3, 8, 16, 32, 64])
@pytest.mark.parametrize("count", [4, 16, 64])
def test_contract_4_tokens_that_cancel_do_not_carry_partial_sums_away(tokens: int, count: int) -> None:
    """Examples of +M, many of -3/4 of the last place below M, -M: their own sum is nothing, but x decides how it rounds."""
    for magnitude in (4.0, 16.0, 64.0, 128.0):
        model = Product(nn.Linear(WIDTH, WIDTH, bias=False))
        clipped = ClippedSum(model, 1.0, self_check=False)
        w_BTp = torch.zeros(count, tokens, WIDTH)
        w_BTp[2:, :, 0] = -0.75 * magnitude * 2.0**-24
        w_BTp[0, 0, 0], w_BTp[1, 0, 0], w_BTp[2:, 0, 0], w_BTp[2:, -1, 0] = 0.5, -1, magnitude, -magnitude
        inputs = {"x": torch.eye(WIDTH)[0].expand(count, tokens, -1).clone(), "w": w_BTp}
        sums = []
        for is_out in (False, True):
            clipped.zero_()
            clipped.add_micro_batch(model, inputs, (torch.arange(count) == 1) & is_out)
            sums.append(total_of(clipped))
        clipped.detach()
        assert float((sums[0] - sums[1]).norm()) <= 1 + SENSITIVITY_SLACK / 2, magnitude


@pytest.mark.parametrize("mode", neighbours.MODES)
@pytest.mark.parametrize("sizes", [(100, 256, 1), (3,)])
def test_contract_4_products_of_one_row_are_not_added_up_token_by_token(mode: str, sizes: tuple[int, ...]) -> None:
    """Kernels without blocks round at every token: in sums of 64 examples of 512 tokens one moved 1.0017 C."""
    of = neighbours.Construction("chunked", "fp32", mode, "flat", 512, sizes, before=8, after=7, bound=None)
    values = neighbours.draw_values(of, random.Random(0))
    assert float(neighbours.sizes_of(of, values, torch.device("cpu")).max()) <= 1 + SENSITIVITY_SLACK / 4


@pytest.mark.parametrize("rule", sorted(set(neighbours.RULES)))
@pytest.mark.parametrize("mode", neighbours.MODES)
def test_contract_4_what_stands_in_a_row_without_an_example_changes_no_bit(rule: str, mode: Mode) -> None:
    """So an example that is not drawn leaves the sum that it leaves with zeros in its place (privacy/sampling/rows.py)."""
    generator = torch.Generator().manual_seed(0)
    model, inputs_of, lanes_of = neighbours.build(rule, 5)
    values = torch.randn(70, 5, neighbours.LANES, generator=generator)
    is_empty = torch.rand(70, generator=generator) < 0.2
    found = []
    for content in (0.0, 1.0, 1e38, torch.nan, torch.inf):
        clipped = ClippedSum(model, 1.0, mode=mode, self_check=False)
        there = torch.where(is_empty[:, None, None], torch.randn(values.shape, generator=generator) * content, values)
        for rows in (slice(0, 7), slice(7, 70)):
            x, w = inputs_of(there[rows])
            clipped.add_micro_batch(model, {"x": x, "w": w}, is_empty[rows])
        found.append(lanes_of(neighbours.whole(clipped)))
        clipped.detach()
    assert all(torch.equal(one, found[0]) for one in found) and float(found[0].abs().max()) > 0


# Norms: inputs and output gradients of any magnitude


@pytest.mark.parametrize("count", [500, COUNTS[-1]])
def test_contract_4_norms_neither_underflow_nor_overflow(count: int) -> None:
    """Magnitudes from 1e-38 to 1e38, apart for inputs and output gradients; see magnitudes.py."""
    require_small(list(norms(torch.device("cpu"), f"{count}", count)), count)


@pytest.mark.parametrize("bound", [SMALLEST_BOUND, LARGEST_BOUND])
def test_contract_4_squares_neither_underflow_nor_overflow_at_the_ends_of_c(bound: float) -> None:
    """Gradients from far below to far above C, spread over a million entries."""
    layer = nn.Linear(1000, 1000, bias=False)
    for scale in (0.5, 1.0, 2.0, 1e3):
        clipped = ClippedSum(layer, bound, self_check=False)
        x_BD = torch.full((1, 1000), bound * scale / 1000)
        clipped.add_micro_batch(lambda x: layer(x).sum(dim=1), {"x": x_BD}, torch.zeros(1, dtype=torch.bool))
        clipped.detach()
        assert float(total_of(clipped).norm()) / bound == pytest.approx(min(scale, 1), rel=SENSITIVITY_SLACK)
