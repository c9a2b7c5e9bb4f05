"""Contract 4 against rounding: neighbours made so that one example changes how everything after it rounds; norms that underflow.

The construction: 2^k examples of +1, one of +1/2, the example x of -1, then many of -3/4 of the last place below 2^k, each
perhaps a token at a time. With x the partial sum lies below 2^k, and every later addition counts in full or more; with zeros in
its place it lies above, where every later addition rounds to nothing. In plain fp32 sums of embedding rows x moves the sum by
up to 4 C so.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import SUMS, ClippedSum
from privacy.clipping.clip_factors import FUNCTIONS
from privacy.clipping.clipped_sum import Mode
from privacy.plan.limits import LARGEST_BOUND, SMALLEST_BOUND
from privacy.plan.releases import SENSITIVITY_SLACK
from privacy.sums.local import LocalSums
from privacy.sums.sharded import ShardedSums
from tests.distributed.ranks import run_ranks
from tests.privacy.clipping import neighbours, oracle
from tests.privacy.clipping.neighbours import (
    DTYPES,
    MODES,
    ByChunks,
    Convolved,
    Found,
    Product,
    watched,
)

CPU = torch.device("cpu")
WIDTH = 160
"""Wide enough that a Linear takes the ghost norm at 64 tokens."""


class Case(NamedTuple):
    """A rule of neighbours.py, tokens, sizes of micro-batches (in turn), k, and how many examples follow x."""

    rule: str
    tokens: int
    micro_batches: tuple[int, ...]
    k: int
    after: int


def moved(case: Case, device: torch.device = CPU, accumulator: type = LocalSums) -> float:
    """|S - S'| in units of C, S' with zeros in the place of x; all but x is equal, and nothing is clipped."""
    x = 2**case.k + 1
    values = torch.zeros(x + 1 + case.after, case.tokens, neighbours.LANES, dtype=torch.float64)
    g_NT = values[:, :, 0]  # what the tokens add to the one coordinate that is looked at
    g_NT[: x - 1, 0], g_NT[x - 1, 0], g_NT[x, 0] = 1, 0.5, -1
    g_NT[x + 1 :] = -0.75 * 2.0 ** (case.k - 24)
    of = neighbours.Construction(
        case.rule,
        "fp32",
        "bookkeeping",
        "flat",
        case.tokens,
        case.micro_batches,
        x,
        case.after,
        bound=1.0,
    )
    size = float(neighbours.sizes_of(of, values, device, accumulator)[0, -1])  # of the whole vector
    assert size > 0.9
    return size


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
    Case("ghost", 1, ALONE, 8, 130),
    Case("ghost", 1, (8,), 9, 510),
    Case("ghost", 1, (3, 40, 1, 1, 64, 7), 8, 254),
    Case("ghost", 64, (8,), 8, 254),
    Case("written_out", 197, (16,), 7, 126),
]
TRIED = [
    pytest.param(c, marks=pytest.mark.full if i in (2, 4, 6, 7, 9, 11) else ())
    for i, c in enumerate(CASES)
]


@pytest.mark.parametrize(
    "case", TRIED, ids=lambda case: f"{case.rule}-{case.tokens}-{case.micro_batches[:6]}"
)
def test_contract_4_one_example_does_not_change_how_others_round(case: Case) -> None:
    assert moved(case) <= 1 + SENSITIVITY_SLACK


class TwoCalls(nn.Module):
    """Every number of the weight receives v[b, 0] in one call and v[b, 1] in the other, from example b."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(256, 256, bias=False)

    def forward(self, v: Tensor) -> Tensor:
        output = self.layer(v.new_ones(len(v), 256))
        return (output * v[:, :1]).sum(1) + (self.layer(v.new_ones(len(v), 256)) * v[:, 1:]).sum(1)


@pytest.mark.parametrize("cancelling", [2, 10, 16])
def test_contract_4_calls_of_others_that_cancel_change_no_rounding_of_x(cancelling: int) -> None:
    """Some examples carry one call near to 1 and the other near to -1, each by almost 16 C, and nothing is left of them.

    An ordinary x decides on which side of a power of two both sums lie, so that all that follows counts in full or not at all.
    """
    last_place, count, model = 2.0**-24, 45, TwoCalls()
    number = 1 / (
        15.9 * cancelling
    )  # that x adds; C is the length of as many numbers as the weight has
    v = torch.zeros(count, 2, dtype=torch.float64)
    v[:cancelling] = torch.tensor([1.0, -1.0]) / cancelling
    v[cancelling - 1] += 64 * last_place
    v[cancelling] = -number / 2
    v[cancelling + 1 :] = torch.tensor([-0.75, 0.75]) * last_place
    clipped, sums = ClippedSum(model, 256 * number), []
    for is_padding in (torch.zeros(count, dtype=torch.bool), torch.arange(count) == cancelling):
        clipped.zero_()
        stats = clipped.add_micro_batch(model, {"v": v.float()}, is_padding)
        assert stats.num_cancelled == 0
        sums.append(neighbours.whole(clipped))
    clipped.detach()
    size = float((sums[0] - sums[1]).norm()) / (256 * number)
    assert 0.999 < size <= 1 + SENSITIVITY_SLACK / 4


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
    require_small(
        list(getattr(neighbours, search)(CPU, f"{count}", count, draw=draw_of(count))), count
    )


@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=FULL)])
def test_contract_4_neighbours_of_models_of_several_parameters(count: int) -> None:
    require_small(list(neighbours.several(CPU, f"{count}", count)), count)


def test_a_pair_that_is_printed_can_be_typed_again() -> None:
    for found in neighbours.several(CPU, "typed", 6):
        again = eval(
            found.numbers, {"CPU": CPU, "Pair": neighbours.Pair, "size_of": neighbours.size_of}
        )
        assert again == found.size
    values = torch.tensor([[1.0, 0.1]] * 3 + [[-(2.0**-24), 0.0]], dtype=torch.float64)
    assert eval(neighbours.in_runs(values)) == values.tolist()


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
    cases = [case for case in CASES if case.micro_batches != ALONE][:: 3 if count == QUICK else 1]
    return [
        [moved(case, accumulator=ShardedSums) for case in cases],
        *(
            list(search(device, f"sharded {count}", count, ShardedSums, draw_of(count)))
            for search in searches
        ),
    ]


@pytest.mark.parametrize("kind", neighbours.CUDA_PRODUCTS)
@pytest.mark.parametrize("count", [100, pytest.param(5_000, marks=FULL)])
@pytest.mark.parametrize("search", [pytest.param("sums", marks=pytest.mark.full), "climb"])
def test_contract_4_neighbours_of_products_that_are_added_up_as_on_cuda(
    search: str, count: int, kind: str
) -> None:
    """Emulated: about once an example is not what these kernels round."""
    with neighbours.cuda_products(kind) as draw:
        require_small(
            list(getattr(neighbours, search)(CPU, f"cuda {count}", count, draw=draw)), count
        )


def require_small(found: list[neighbours.Found], count: int) -> None:
    assert sum(one.pairs for one in found) >= count
    worst = max(found, key=lambda one: one.size)
    assert 0.999 <= worst.size <= 1 + SENSITIVITY_SLACK, (
        f"{worst.size} C: {worst.construction}; {worst.numbers}"
    )


@pytest.mark.parametrize("tokens", [3, 8, 16, 32, 64])
@pytest.mark.parametrize("count", [4, 16, 64])
def test_contract_4_tokens_that_cancel_do_not_carry_partial_sums_away(
    tokens: int, count: int
) -> None:
    """Examples of +M, many of -3/4 of the last place below M, -M: their own sum is nothing, but x decides how it rounds."""
    for magnitude in (4.0, 16.0, 64.0, 128.0):
        model = Product(nn.Linear(WIDTH, WIDTH, bias=False))
        clipped = ClippedSum(model, 1.0)
        w_BTp = torch.zeros(count, tokens, WIDTH)
        w_BTp[2:, :, 0] = -0.75 * magnitude * 2.0**-24
        w_BTp[0, 0, 0], w_BTp[1, 0, 0], w_BTp[2:, 0, 0], w_BTp[2:, -1, 0] = (
            0.5,
            -1,
            magnitude,
            -magnitude,
        )
        inputs = {"x": torch.eye(WIDTH)[0].expand(count, tokens, -1).clone(), "w": w_BTp}
        sums = []
        for is_out in (False, True):
            clipped.zero_()
            clipped.add_micro_batch(model, inputs, (torch.arange(count) == 1) & is_out)
            sums.append(neighbours.whole(clipped))
        clipped.detach()
        assert float((sums[0] - sums[1]).norm()) <= 1 + SENSITIVITY_SLACK / 2, magnitude


@pytest.mark.parametrize("mode", neighbours.MODES)
@pytest.mark.parametrize("sizes", [(100, 256, 1), pytest.param((3,), marks=pytest.mark.full)])
def test_contract_4_products_of_one_row_are_not_added_up_token_by_token(
    mode: str, sizes: tuple[int, ...]
) -> None:
    """Kernels without blocks round at every token: in sums of 64 examples of 512 tokens one moved 1.0017 C."""
    of = neighbours.Construction(
        "chunked", "fp32", mode, "flat", 512, sizes, before=8, after=7, bound=None
    )
    values = neighbours.draw_values(of, random.Random(0))
    assert float(neighbours.sizes_of(of, values, CPU).max()) <= 1 + SENSITIVITY_SLACK / 4


@pytest.mark.parametrize("rule", sorted(set(neighbours.RULES)))
@pytest.mark.parametrize("mode", neighbours.MODES)
def test_contract_4_what_stands_in_a_row_without_an_example_changes_no_bit(
    rule: str, mode: Mode
) -> None:
    """So an example that is not drawn leaves the sum that it leaves with zeros in its place (privacy/sampling/rows.py)."""
    generator = torch.Generator().manual_seed(0)
    model, inputs_of, lanes_of = neighbours.build(rule, 5)
    values = torch.randn(70, 5, neighbours.LANES, generator=generator)
    is_empty = torch.rand(70, generator=generator) < 0.2
    found = []
    for content in (0.0, 1.0, 1e38, torch.nan, torch.inf):
        clipped = SUMS[mode](model, 1.0)
        there = torch.where(
            is_empty[:, None, None],
            torch.randn(values.shape, generator=generator) * content,
            values,
        )
        for rows in (slice(0, 7), slice(7, 70)):
            x, w = inputs_of(there[rows])
            clipped.add_micro_batch(model, {"x": x, "w": w}, is_empty[rows])
        found.append(lanes_of(neighbours.whole(clipped)))
        clipped.detach()
    assert all(torch.equal(one, found[0]) for one in found) and float(found[0].abs().max()) > 0


# Norms: an adversary that looks for an example whose norm reads low, among inputs and output gradients of any magnitude


class Tied(nn.Module):
    """An embedding and a Linear of one weight; x is the Linear's input and, with w's scale, the embedding's gradient."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device).expand(len(x), -1) % 3
        by_head, by_table = (
            self.head(x) * w,
            self.embedding(ids) * x * w.amax((1, 2))[:, None, None],
        )
        return by_head.flatten(1).sum(1) + by_table.flatten(1).sum(1)


class Twice(Product):
    """One Linear for two inputs: the norm of a sum of two contributions, of which bf16 loses no bit, whatever their size."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return super().forward(x, w) + super().forward(x.flip(1), w)


class Embedded(Product):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return super().forward(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device), w)


MODELS: dict[str, tuple[int, Callable[[int], nn.Module]]] = {
    "ghost": (96, lambda width: Product(nn.Linear(width, width))),
    "written_out": (6, lambda width: Product(nn.Linear(width, width))),
    "layer_norm": (96, lambda width: Product(nn.LayerNorm(width))),
    "shared": (96, lambda width: Twice(nn.Linear(width, width, bias=False))),
    "shared_written_out": (6, lambda width: Twice(nn.Linear(width, width, bias=False))),
    "tied": (96, Tied),
    "embedding": (96, lambda width: Embedded(nn.Embedding(3, width))),
    "convolution": (96, lambda width: Convolved(nn.Conv1d(width, width, 1))),
    "grouped_convolution": (96, lambda width: Convolved(nn.Conv1d(width, width, 1, groups=4))),
    "chunked": (96, ByChunks),
}


def norms(device: torch.device, seed: str, num_pairs: int, examples: int = 64) -> Iterator[Found]:
    """|clipped gradient| / C of every example, each a pair of its own, of magnitudes where squares underflow, overflow or cancel.

    The gradient is that of the same model in float64, the weight the one that was given. The worst example is also summed alone.
    """
    rng = random.Random(seed)
    for number in itertools.count():
        if num_pairs <= 0:
            return
        name, dtype = rng.choice(list(MODELS)), rng.choice(list(DTYPES))
        width, make = MODELS[name]
        model = make(width).to(device, DTYPES[dtype])
        bound, tokens = 10.0 ** rng.uniform(-6, 1), rng.choice([1, 2, 3, 7, 24])
        x, w = (
            t.to(device)
            for t in draw_magnitudes(rng, (examples, tokens, width), bound, DTYPES[dtype])
        )
        mode, function = rng.choice(MODES), rng.choice(list(FUNCTIONS))
        seen: list[Tensor] = []
        clipped = SUMS[mode](model, bound, function=watched(function, seen))  # type: ignore[arg-type]
        padding = torch.zeros(examples, dtype=torch.bool, device=device)
        clipped.add_micro_batch(model, {"x": x, "w": w}, padding)
        with torch.no_grad():
            is_finite = model(x, w).isfinite().cpu()
        weight = torch.where(is_finite, seen[-1], 0)
        sizes = torch.where(weight > 0, weight * exact_norms(make(width), model, x, w), 0) / bound
        if (
            name == "layer_norm"
        ):  # the model itself rounds, and where squares overflow loses, what is normalised
            sizes *= 0.5
        if dtype == "bf16" and name in ("tied", "chunked"):
            sizes *= 1 - 2.0**-7  # the model itself rounds these output gradients
        worst = int(sizes.argmax())
        clipped.zero_()
        clipped.add_micro_batch(
            model, {"x": x, "w": w}, torch.arange(examples, device=device) != worst
        )
        alone = (
            math.sqrt(
                sum(float(total.detach().double().square().sum()) for _, total in clipped.sums())
            )
            / bound
        )
        clipped.detach()
        num_pairs -= examples + 1
        yield Found(
            max(float(sizes[worst]), alone),
            examples + 1,
            (name, dtype),
            (name, dtype, mode, function, tokens, bound),
            f"example {worst} of draw {number} of the search {seed!r}",
        )


def draw_magnitudes(
    rng: random.Random, shape: tuple[int, ...], bound: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """Inputs and output gradients of 1e-38 to 1e38: apart, where a square is lost, or with a product near the bound."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    exponents, spreads, signs = [], [], []
    for _ in range(shape[0]):
        large, small, free = rng.uniform(16, 19), rng.uniform(-24, -19), rng.uniform(-38, 38)
        near = min(38, max(-38, math.log10(bound) - free + rng.uniform(-4, 3)))
        exponents.append(
            rng.choice([(large, small), (small, large), (free, rng.uniform(-38, 38)), (free, near)])
        )
        spreads.append(rng.choice([0, 0, 0.5, 3]))
        signs.append(rng.random() < 0.4)
    spread = torch.tensor(spreads, dtype=torch.float64)[:, None, None]
    found = []
    for column in torch.tensor(exponents, dtype=torch.float64).unbind(1):
        noise = torch.randn(shape, generator=generator, dtype=torch.float64) * spread
        sign = torch.where(
            torch.tensor(signs)[:, None, None], torch.randn(shape, generator=generator).sign(), 1
        )
        found.append((sign * (10.0 ** (column[:, None, None] + noise)).clamp(max=3e38)).to(dtype))
    return found[0], found[1]


def exact_norms(double: nn.Module, model: nn.Module, x: Tensor, w: Tensor) -> Tensor:
    """(B,) gradient norms of the model in float64 on the CPU."""
    double = double.double()
    double.load_state_dict(
        {name: value.double().cpu() for name, value in model.state_dict().items()}
    )
    gradients = oracle.per_example_gradients(
        double, double, {"x": x.double().cpu(), "w": w.double().cpu()}
    )
    return torch.tensor([oracle.norm(one) for one in gradients], dtype=torch.float64)


@pytest.mark.parametrize("count", [500, COUNTS[-1]])
def test_contract_4_norms_neither_underflow_nor_overflow(count: int) -> None:
    """Magnitudes from 1e-38 to 1e38, apart for inputs and output gradients."""
    require_small(list(norms(CPU, f"{count}", count)), count)


@pytest.mark.parametrize("bound", [SMALLEST_BOUND, LARGEST_BOUND])
def test_contract_4_squares_neither_underflow_nor_overflow_at_the_ends_of_c(bound: float) -> None:
    """Gradients from far below to far above C, spread over a million entries."""
    layer = nn.Linear(1000, 1000, bias=False)
    for scale in (0.5, 1.0, 2.0, 1e3):
        clipped = ClippedSum(layer, bound)
        x_BD = torch.full((1, 1000), bound * scale / 1000)
        clipped.add_micro_batch(
            lambda x: layer(x).sum(dim=1), {"x": x_BD}, torch.zeros(1, dtype=torch.bool)
        )
        clipped.detach()
        assert float(oracle.norm(dict(clipped.sums()))) / bound == pytest.approx(
            min(scale, 1), rel=SENSITIVITY_SLACK
        )
