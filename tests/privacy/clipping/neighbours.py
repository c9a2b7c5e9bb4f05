"""An adversary that looks for one example which moves the clipped sum by more than C (1 + r): contract 4 against rounding.

A construction is a logical batch in which every example adds freely chosen values, token by token, to some parameter. Many
pairs of neighbours share one forward: each coordinate (lane) of the parameter is a pair of its own, with values, magnitude and
bound of its own, since a kernel adds up every entry by itself.

The sum with x is compared with the sum without it, x zeroed in its place or left out with the rows behind it closed up. In a lane
no example contributes more than C, which exact arithmetic on the same weights says, so neither may the two sums differ by more.
`sums` draws values that cross a power of two at x, fall between two numbers, cancel over tokens, or are random; `climb` changes
those of the worst lanes again and again. test_rounding.py looks for norms that read low, too.

Sums lie on a grid whose step h follows C, so a coordinate may move by h more than its lane says: one rounding changes with
x. Where rows close up, every micro-batch behind x may round anew. What h may be follows from C, sqrt(d) h <= 2^-13 C, and a finer
step of the code's allows less, never more. Whole vectors have no such allowance: h is part of the slack.

`several` has models of several parameters, of one number to thousands and of one layer to hundreds: what takes the norm, or the
number of coordinates, of one of them for that of all is seen there alone. It is judged by C and by nothing else.

Both run on any device and use `ClippedSum` as its users do; the weights are read by a clipping function that keeps them.
"""

import itertools
import math
import random
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, ClassVar, NamedTuple
from unittest import mock

import numpy as np
import torch
from torch import Tensor, nn

from models.vocabulary_head import VocabularyHead
from privacy.clipping import SUMS, ClippedSum
from privacy.clipping.clip_factors import FUNCTIONS, ClippingFunction
from privacy.clipping.clipped_sum import Mode
from privacy.gradients import per_example_gradients as contributions
from privacy.ranks.engine import even_layout
from privacy.sums import totals
from privacy.sums.grid import MOST_CANCELLED
from privacy.sums.sharded import ShardedSums
from privacy.sums.totals import real_numbers

MODES: tuple[Mode, ...] = ("bookkeeping", "two_pass")
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
LANES = 48
TOKENS_OF_A_DRAW = (1 << 13,) * 7 + (1 << 16,)
"""Examples times tokens, at random: bounds the time of one construction."""


class Found(NamedTuple):
    """The worst pair of a construction.

    Attributes:
        size: by how much its two sums differ, in units of C.
        name: the rule and the precision.
        numbers: of that pair, as Python reads them, or where it is drawn again.
    """

    size: float
    pairs: int
    name: tuple[str, str]
    construction: object
    numbers: str = ""


@dataclass(frozen=True)
class Watched(ClippingFunction):
    """A clipping function that keeps the weights it gave, zero where the norm was not finite."""

    seen: tuple[list[Tensor], ...] = ()

    def weight(self, norm_B: Tensor, bound: float) -> Tensor:
        weight_B = super().weight(norm_B, bound)
        self.seen[0].append(torch.where(norm_B.isfinite(), weight_B, 0).double().cpu())
        return weight_B


def watched(name: str, seen: list[Tensor]) -> Callable[[list[str], float], ClippingFunction]:
    """The function of that name; every micro-batch appends one (B,) to `seen` (the models here have one group)."""

    def make(names: list[str], bound: float) -> ClippingFunction:
        plain = FUNCTIONS[name](names, bound)
        return Watched(plain.group_of, plain.bounds, plain.kind, (seen,))

    return make


# Layers whose parameter receives chosen values


class Product(nn.Module):
    """loss_i = <layer(x_i), w_i>: the gradients of the layer's outputs are w."""

    def __init__(self, layer: nn.Module, *, frozen: str = "") -> None:
        super().__init__()
        self.layer = layer
        if frozen:
            getattr(layer, frozen).requires_grad_(False)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.layer(x) * w).to(torch.promote_types(w.dtype, torch.float32)).flatten(1).sum(1)


class Raw(nn.Module):
    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1, 1, lanes))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p


class Convolved(Product):
    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2), w.transpose(1, 2))


class Twice(Product):
    """Two calls that carry 21 times the values there and 20 times back: each of them alone is far longer than C."""

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return super().forward(x, 21 * w) + super().forward(x, -20 * w)


GROSS = {"calls": 41, "table_calls": 41}
"""What the calls of a rule give, added up without signs, where that is not the values themselves."""


class ByChunks(nn.Module):
    """Cross-entropy by chunks with all scores zero: row 1 of the weight receives x w / V."""

    def __init__(self, lanes: int) -> None:
        super().__init__()
        self.head = VocabularyHead(lanes, 4, max_logits=4, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        targets = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        return (self.head.token_losses(x, targets) * w[:, :, 0]).sum(1)


def build(
    rule: str, tokens: int
) -> tuple[nn.Module, Callable[[Tensor], tuple[Tensor, Tensor]], Callable[[Tensor], Tensor]]:
    """A model, its inputs (x, w) for values (N, T, LANES), and the lanes among its parameter's coordinates.

    A Linear takes the ghost norm where T (d + p) < d p, and writes gradients out elsewhere; its width decides.
    """
    size = max(LANES, 2 * tokens + 24)  # of a square matrix that takes the ghost norm
    signs = torch.arange(LANES) % 2 * 2.0 - 1  # which a norm leaves as they are
    if rule == "chunked":
        return (
            ByChunks(LANES),
            lambda values: (values, torch.full_like(values, 4.0)),
            lambda total: total[1],
        )
    models: dict[str, tuple[Callable[[], nn.Module], Tensor, int, Callable[[Tensor], Tensor]]] = {
        # the model, its input of one token, the width of its output, and the lanes
        "ghost": (
            lambda: Product(nn.Linear(size, size, bias=False)),
            torch.eye(size)[0],
            size,
            lambda x: x[:LANES, 0],
        ),
        "calls": (
            lambda: Twice(nn.Linear(size, size, bias=False)),
            torch.eye(size)[0],
            size,
            lambda x: x[:LANES, 0],
        ),
        "table_calls": (
            lambda: Twice(nn.Embedding(3, LANES)),
            torch.tensor(1),
            LANES,
            lambda x: x[1],
        ),
        "written_out": (
            lambda: Product(nn.Linear(2, LANES, bias=False)),
            torch.eye(2)[0],
            LANES,
            lambda x: x[:, 0],
        ),
        "convolution": (
            lambda: Convolved(nn.Conv1d(size, size, 1, bias=False)),
            torch.eye(size)[0],
            size,
            lambda x: x[:LANES, 0, 0],
        ),
        "bias": (
            lambda: Product(nn.Linear(2, LANES), frozen="weight"),
            torch.ones(2),
            LANES,
            torch.clone,
        ),
        "raw": (lambda: Product(Raw(LANES)), torch.zeros(LANES), LANES, torch.flatten),
        "layer_norm": (
            lambda: Product(nn.LayerNorm(LANES), frozen="weight"),
            signs,
            LANES,
            torch.clone,
        ),
        "group_norm": (
            lambda: Convolved(nn.GroupNorm(1, LANES), frozen="weight"),
            signs,
            LANES,
            torch.clone,
        ),
        "embedding": (
            lambda: Product(nn.Embedding(3, LANES)),
            torch.tensor(1),
            LANES,
            lambda x: x[1],
        ),
    }
    make, token, width, lanes_of = models[rule]
    return make(), partial(_constant, token, width), lanes_of


def _constant(token: Tensor, width: int, values_NTL: Tensor) -> tuple[Tensor, Tensor]:
    """The same input for all tokens; output gradients that are zero behind the lanes."""
    x = token.to(values_NTL.device, values_NTL.dtype if token.is_floating_point() else token.dtype)
    return x.expand(*values_NTL.shape[:2], *token.shape), nn.functional.pad(
        values_NTL, (0, width - LANES)
    )


RULES = (
    *(
        "embedding",
        "ghost",
        "bias",
        "written_out",
        "raw",
        "convolution",
        "layer_norm",
        "chunked",
        "group_norm",
    ),
    *("calls", "table_calls"),
)
"""In turn."""


# Sums


@dataclass(frozen=True)
class Construction:
    """A logical batch for `sums`; x is example number `before`.

    Attributes:
        micro_batches: sizes, in turn.
        bound: C; None is a power of two just above all norms, so that every lane may have a magnitude of its own.
        has_cap: whether the number of examples is declared, which makes h coarser and totals smaller.
    """

    rule: str
    dtype: str
    mode: str
    function: str
    tokens: int
    micro_batches: tuple[int, ...]
    before: int
    after: int
    bound: float | None
    has_cap: bool = False

    def stored(self, values_NTL: Tensor) -> Tensor:
        """Those values that the model's dtype holds, and their multiples in `Twice`, in float64."""
        return values_NTL.to(torch.bfloat16 if self.rule in GROSS else DTYPES[self.dtype]).double()


def draw_construction(rng: random.Random, rule: str) -> Construction:
    """Any precision, mode and size; as many examples as TOKENS_OF_A_DRAW allows."""
    dtype = "fp32" if rule in GROSS else rng.choice(["fp32", "fp32", "bf16"])
    tokens = rng.choice([1, 1, 2, 3, 8, 24, 40, 77, 197, 512])
    if rule == "raw" and dtype == "bf16":
        tokens = 1  # the model itself adds up the tokens of a raw parameter, in bf16: not what is searched here
    sizes = tuple(
        rng.choices(
            [1, 2, 3, 8, 16, 31, 32, 33, 63, 64, 65, 100, 256, 1024], k=rng.choice([1, 1, 3])
        )
    )
    most = max(
        4,
        min(
            1600,
            rng.choice(TOKENS_OF_A_DRAW) // tokens,
            rng.choice([60, 60, 600]) * sum(sizes) // len(sizes),
        ),
    )
    before = rng.choice([rng.randint(1, most - 2), 1 << ((most // 2).bit_length() - 1)])
    function = rng.choice(["flat"] * 4 + list(FUNCTIONS))
    bound = 1.0 if function == "automatic" else rng.choice([None, None, None, 1.0])
    mode, after, has_cap = rng.choice(MODES), most - before - 1, rng.random() < 0.5
    return Construction(rule, dtype, mode, function, tokens, sizes, before, after, bound, has_cap)


Draw = Callable[[random.Random, str], Construction]


def draw_few_tokens(rng: random.Random, rule: str) -> Construction:
    """Of the lesser number of tokens: all rules are met in the time that one large product of bf16 takes."""
    while (of := draw_construction(rng, rule)).tokens * (of.before + 1 + of.after) > min(
        TOKENS_OF_A_DRAW
    ):
        pass
    return of


def draw_small(rng: random.Random, rule: str) -> Construction:
    """Of few tokens, whose square a model's width goes by, and at most some twenty micro-batches."""
    while (of := draw_few_tokens(rng, rule)).tokens > 77:
        pass
    most = min(
        of.before + 1 + of.after,
        20 * sum(of.micro_batches) // len(of.micro_batches),
        (1 << 11) // of.tokens,
    )
    before = min(of.before, 1 << ((max(4, most) // 2).bit_length() - 1))
    return replace(of, before=before, after=max(4, most) - before - 1)


def draw_values(of: Construction, rng: random.Random) -> Tensor:
    """(N, T, LANES) in float64, each lane by a recipe of its own."""
    generator = torch.Generator().manual_seed(rng.getrandbits(63))
    x, count = of.before, of.before + 1 + of.after
    values = torch.zeros(count, of.tokens, LANES, dtype=torch.float64)
    magnitude = rng.randint(-40, 40) // 2  # C stays in its range
    for lane in range(LANES):
        g_NT = values[:, :, lane]
        k = rng.choice([rng.randint(0, x.bit_length() - 1), x.bit_length() - 1])
        below = 2.0 ** (k - 24)  # the last place below 2^k
        match rng.choice(["binade", "binade", "binade", "cancel", "random", "halves"]):
            case "binade":  # x decides on which side of 2^k the partial sum lies
                first = rng.choice([0, of.tokens - 1])
                g_NT[x - 2**k : x, first] = 1
                g_NT[x, 0], g_NT[x - 1, first] = -1, rng.choice([1.5, 1.25, 1 + 2.0**-7, 1])
                g_NT[x + 1 :] = (
                    rng.choice([-0.75, -0.75, -0.5, 0.5, 0.75, -0.26, 1.5])
                    * below
                    * rng.choice([1, 1, 1, 2, 4])
                )
            case "cancel":  # tokens carry the partial sum away and back
                size = rng.choice([1, 2, 4, 8, 15])
                g_NT[x + 1 :] = -rng.choice([0.5, 0.75]) * size * 2.0**-24
                g_NT[x - 1, 0], g_NT[x, 0] = 0.5, -1
                if of.tokens > 1:
                    g_NT[x + 1 :, 0], g_NT[x + 1 :, -1] = size, -size
            case "random":
                spread = rng.choice([0, 0, 2]) * torch.randn(
                    count, 1, generator=generator, dtype=torch.float64
                )
                g_NT[:] = (
                    torch.randn(count, of.tokens, generator=generator, dtype=torch.float64)
                    * 10.0**spread
                )
            case "halves":  # every addition falls between two numbers
                g_NT[:, 0] = 1
                g_NT[x + 1 :] = rng.choice([0.5, 1.5]) * 2.0**-24 * rng.choice([1, 2, 2.0**k])
                g_NT[x, 0] = rng.choice([-1, 1])
        g_NT *= 2.0 ** (magnitude - rng.choice([0, 0, 0, 1, 4, 12])) if of.bound is None else 1 / 8
    return of.stored(values)


def sizes_of(
    of: Construction, values_NTL: Tensor, device: torch.device, accumulator: type | None = None
) -> Tensor:
    """|S - S'| / C of every lane: first for x zeroed in its place, then for x left out with the rows behind it closed up.

    C of a lane is the largest contribution to it by exact arithmetic, or what an example may carry away and back
    (MOST_CANCELLED of grid.py). Where C is finite, one more pair is the whole vector.
    """
    model, inputs_of, lanes_of = build(of.rule, of.tokens)
    model = model.to(device, DTYPES[of.dtype])
    seen: list[Tensor] = []
    more: dict[str, Any] = {
        **({} if accumulator is None else {"accumulator": accumulator}),
    }
    most = (
        values_NTL.abs().sum(1).norm(dim=1).max()
    )  # rows of another word may have thrice as much (`ByChunks`)
    bound = of.bound or 2.0 ** math.ceil(math.log2(8 * most))
    cap = len(values_NTL) if of.has_cap else None
    clipped = SUMS[of.mode](model, bound, function=watched(of.function, seen), cap=cap, **more)
    unit = clipped.accumulator.unit
    assert unit is not None
    values = values_NTL.to(device, DTYPES[of.dtype])
    is_x = torch.arange(len(values), device=device) == of.before
    sums, weights = [], []
    for rows, is_padding in ((values, is_x & False), (values, is_x), (values[~is_x], is_x[~is_x])):
        seen.clear()
        clipped.zero_()
        start, turn = 0, 0
        while start < len(rows):
            some = slice(start, start + of.micro_batches[turn % len(of.micro_batches)])
            x, w = inputs_of(rows[some])
            clipped.add_micro_batch(model, {"x": x, "w": w}, is_padding[some])
            start, turn = some.stop, turn + 1
        sums.append(lanes_of(whole(clipped).cpu()))
        weights.append(torch.cat(seen))
    clipped.detach()
    weighted = (
        values_NTL * weights[0][:, None, None]
    )  # sums of few numbers of few bits: in fp64 as good as exact
    gross_NL = weighted.abs().sum(1) * GROSS.get(of.rule, 1)
    bound_L = torch.maximum(weighted.sum(1).abs(), gross_NL / MOST_CANCELLED).amax(0)
    moved = torch.stack([sums[0] - other for other in sums[1:]]).abs()
    num_coordinates = sum(p.numel() for p in model.parameters() if p.requires_grad)
    step = min(2.0**-unit.exponent, 2.0**-13 * bound / math.sqrt(num_coordinates))
    rounded = torch.tensor([[1.0], [turn + 1.0]], dtype=torch.float64) * step
    sizes = torch.where(moved > rounded, (moved - rounded) / bound_L, 0)
    if of.bound is None:
        return sizes
    return torch.cat([sizes, moved.norm(dim=1, keepdim=True) / of.bound], 1)


def whole(clipped: ClippedSum) -> Tensor:
    """The sum of the one trained parameter, where one process holds it."""
    if not isinstance(clipped.accumulator, ShardedSums):
        ((_, total),) = clipped.sums()
        return total.double().clone()
    (shapes,) = (bucket.shapes for bucket in clipped.accumulator._buckets)
    (shape,) = shapes.values()
    shards = clipped.accumulator.to_owners(even_layout(shapes, 1))
    assert clipped.exponent is not None
    return real_numbers(torch.cat([shard.values for shard in shards]), clipped.exponent).view(shape)


def sums(
    device: torch.device,
    seed: str,
    num_pairs: int,
    accumulator: type | None = None,
    draw: Draw = draw_construction,
    rounds: int = 1,
) -> Iterator[Found]:
    """Constructions drawn at random until they hold `num_pairs` pairs.

    Args:
        rounds: of hill climbing, if more than one: the worst quarter of a construction's lanes is kept, and the others become
            changed copies of it.
    """
    rng = random.Random(seed)
    for number, rule in enumerate(itertools.cycle(RULES)):
        of = draw(rng, rule)
        if rounds > 1:
            of = replace(of, function="flat", bound=None)
        generator, values = torch.Generator().manual_seed(rng.getrandbits(63)), draw_values(of, rng)
        for turn in range(rounds):
            sizes = sizes_of(of, values, device, accumulator)
            num_pairs -= sizes.numel()
            worst = float(sizes.nan_to_num(torch.inf).max())
            lane = int(sizes.nan_to_num(torch.inf).amax(0).argmax())
            numbers = f"construction {number}, round {turn} of the search {seed!r}"
            if lane < LANES:
                numbers = f"{in_runs(values[:, :, lane])} in a lane of {numbers}"
            yield Found(worst, sizes.numel(), (of.rule, of.dtype), of, numbers)
            if num_pairs <= 0:
                return
            if turn == rounds - 1:
                break
            best = values[:, :, sizes.amax(0).argsort(descending=True)[: LANES // 4]]
            others = best.repeat(1, 1, 3)
            change = torch.rand(others.shape, generator=generator) < rng.choice([0.02, 0.1, 0.5])
            factors = torch.tensor(
                [0, -1, 0.5, 2, 1 + 2.0**-7, 1 - 2.0**-8, 1.5, 0.75], dtype=torch.float64
            )
            factor = factors[torch.randint(len(factors), others.shape, generator=generator)]
            values = torch.cat([best, torch.where(change, others * factor, others)], 2)
            values = of.stored(values)


def in_runs(values_NT: Tensor, most: int = 4000) -> str:
    """Returns the values as an expression of Python, equal rows together; nothing where that is too long to be typed."""
    runs = [(row, len(list(rows))) for row, rows in itertools.groupby(values_NT.tolist())]
    text = " + ".join(f"{count} * [{row}]" for row, count in runs)
    return text if len(text) <= most else "numbers"


def climb(*of: Any, **how: Any) -> Iterator[Found]:
    """As `sums`, and twelve rounds of hill climbing from each construction."""
    return sums(*of, **how, rounds=12)


# Models of several parameters


class Pair(NamedTuple):
    """Two neighbours whose gradients are one number in all of a layer; `size_of` of what is printed gives the same again.

    Attributes:
        layers: (kind, width, how many), of which the values of an example have one number each.
        values: those of each example.
        x: the number of the example that is there in one of the two.
        bound: C.
        cap: what the sum is told; None tells nothing.
        micro_batch: examples of one.
    """

    layers: tuple[tuple[str, int, int], ...]
    values: tuple[tuple[float, ...], ...]
    x: int
    bound: float
    cap: int | None = None
    micro_batch: int = 64
    dtype: str = "fp32"
    mode: Mode = "bookkeeping"
    function: str = "flat"


class Adds(nn.Module):
    """Every trained number of a layer receives the value v_i of an example."""

    MAKE: ClassVar[dict[str, Callable[[int], nn.Module]]] = {
        "raw": Raw,
        "bias": lambda width: nn.Linear(1, width),
        "column": lambda width: nn.Linear(1, width, bias=False),
        "square": lambda width: nn.Linear(width, width, bias=False),
        "embedding": lambda width: nn.Embedding(1, width),
        "norm": nn.LayerNorm,
    }

    def __init__(self, kind: str, width: int) -> None:
        super().__init__()
        self.kind, self.width, self.layer = kind, width, self.MAKE[kind](width)
        if kind in ("bias", "norm"):
            self.layer.weight.requires_grad_(False)

    def forward(self, v_B: Tensor) -> Tensor:
        if self.kind == "embedding":
            output = self.layer(torch.zeros(len(v_B), 1, dtype=torch.long, device=v_B.device))
        else:
            width = {"bias": 1, "column": 1}.get(self.kind, self.width)
            output = self.layer(v_B.new_ones(len(v_B), 1, width))
        return (output * v_B[:, None, None]).float().sum((1, 2))


class Beside(nn.Module):
    """The sum of its layers."""

    def __init__(self, layers: Sequence[tuple[str, int, int]]) -> None:
        super().__init__()
        self.parts = nn.ModuleList(
            Adds(kind, width) for kind, width, count in layers for _ in range(count)
        )
        self.counts = [count for _, _, count in layers]

    def forward(self, v: Tensor) -> Tensor:
        columns = [
            column
            for column, count in zip(v.unbind(1), self.counts, strict=True)
            for _ in range(count)
        ]
        return torch.stack(
            [part(column) for part, column in zip(self.parts, columns, strict=True)]
        ).sum(0)


def numbers_of(layers: Sequence[tuple[str, int, int]]) -> list[int]:
    """Returns how many numbers each entry trains."""
    return [count * (width * width if kind == "square" else width) for kind, width, count in layers]


def clipped_for(of: Pair, device: torch.device) -> tuple[nn.Module, ClippedSum]:
    """Returns the pair's model and its sum."""
    model = Beside(of.layers).to(device, DTYPES[of.dtype])
    function = FUNCTIONS[of.function]
    return model, SUMS[of.mode](model, of.bound, function=function, cap=of.cap)


def size_of(of: Pair, device: torch.device) -> float:
    """Returns |S - S'| / C over all parameters."""
    model, clipped = clipped_for(of, device)
    values, sums = torch.tensor(of.values, device=device).to(DTYPES[of.dtype]), []
    for is_out in (False, True):
        clipped.zero_()
        is_padding = (torch.arange(len(values), device=device) == of.x) & is_out
        for v, padding in zip(
            values.split(of.micro_batch), is_padding.split(of.micro_batch), strict=True
        ):
            clipped.add_micro_batch(model, {"v": v}, padding)
        sums.append(torch.cat([total.double().flatten().cpu() for _, total in clipped.sums()]))
    clipped.detach()
    return float((sums[0] - sums[1]).norm()) / of.bound


HUGE_CAP = 1 << 29
"""With so many examples a sum has the coarsest step that its bound allows."""


def draw_pair(rng: random.Random, device: torch.device, *, is_deep: bool = False) -> Pair:
    """Layers of any sizes; gradients from far below to far above C, in which any layer may hold most; or rounding edges.

    Args:
        is_deep: of hundreds of small parameters, as the biases of a deep model are.
    """
    kinds = ("raw", "bias", "column", "square", "embedding", "norm")
    layers = tuple(
        (rng.choice(kinds), rng.choice([1, 2, 3, 8, 40]), 1) for _ in range(rng.randint(2, 5))
    )
    if is_deep:
        layers = ((rng.choice(("bias", "column")), 4, rng.randint(200, 250)), ("bias", 3, 1))
    bound = rng.choice([1.0, 0.75, 2.0**-7, 3.7, 1e-3, 100.0])
    if is_deep or rng.random() < 0.3:
        return at_an_edge(Pair(layers, (), 1, rng.choice([1.0, 2.0**-7, 64.0]), HUGE_CAP), device)
    count, dtype = rng.randint(2, 8), rng.choice(["fp32", "fp32", "bf16"])

    def row() -> tuple[float, ...]:
        whole = bound * 10 ** rng.uniform(-2, 2)
        shares = [10 ** rng.uniform(-4, 0) for _ in layers]
        drawn = [
            rng.choice((-1, 1)) * whole * s / math.sqrt(n)
            for s, n in zip(shares, numbers_of(layers), strict=True)
        ]
        return tuple(torch.tensor(drawn).to(DTYPES[dtype]).tolist())

    values, x = tuple(row() for _ in range(count)), rng.randrange(count)
    cap, micro_batch = rng.choice([None, count, HUGE_CAP]), rng.choice([1, 3, 64])
    function = rng.choice(["flat", "flat", *FUNCTIONS])
    return Pair(layers, values, x, bound, cap, micro_batch, dtype, rng.choice(MODES), function)


def at_an_edge(of: Pair, device: torch.device) -> Pair:
    """Returns the pair in which an example leaves all numbers just below a half, and x takes them over it.

    The step is that of the code, since whoever attacks knows it; C, in the same binade, is a little longer than x.
    """
    _, clipped = clipped_for(of, device)
    clipped.detach()
    assert clipped.exponent is not None
    step, d = 2.0**-clipped.exponent, sum(numbers_of(of.layers))
    whole = math.ceil(of.bound / (math.sqrt(d) * step))
    rows = ((0.5 - 2.0**-7) * step, (whole + 2.0**-6) * step)
    values = tuple((value,) * len(of.layers) for value in rows)
    return of._replace(values=values, bound=rows[1] * math.sqrt(d) * (1 + 2.0**-13))


def several(device: torch.device, seed: str, num_pairs: int) -> Iterator[Found]:
    """So many pairs, drawn at random; one in fifty is of a deep model, which takes a second."""
    rng = random.Random(seed)
    for number in range(num_pairs):
        of = draw_pair(rng, device, is_deep=number % 50 == 49)
        yield Found(size_of(of, device), 1, (of.function, of.dtype), of, f"size_of({of!r}, CPU)")


# Products as CUDA's kernels add them up, for machines without one

CUDA_PRODUCTS = {"one term after the other": 1, "16 terms, then cut off": 16}
"""fp32 products, a fused multiply-add for each term; and bf16 products on matrix units, whose accumulators truncate."""


@contextmanager
def cuda_products(kind: str) -> Iterator[Draw]:
    """Inside, products over tokens are added up in this way; yields what draws constructions that meet them.

    How a unit aligns its terms is not documented: this is the least that cutting off can do, not a copy of a kernel.
    """
    terms = CUDA_PRODUCTS[kind]

    def product(g_BTp: Tensor, a_BTd: Tensor, wide: torch.dtype, on_matrix_units: bool) -> Tensor:
        g_pN, a_Nd = g_BTp.flatten(0, 1).t().double().numpy(), a_BTd.flatten(0, 1).double().numpy()
        rows, columns = (
            np.flatnonzero(g_pN.any(1)),
            np.flatnonzero(a_Nd.any(0)),
        )  # all others stay zero
        g_pN, a_Nd, total = (
            g_pN[rows],
            a_Nd[:, columns],
            np.zeros((len(rows), len(columns)), np.float32),
        )
        for start in range(0, a_Nd.shape[0], terms):
            exact = total + g_pN[:, start : start + terms] @ a_Nd[start : start + terms]
            total = exact.astype(np.float32)
            if terms > 1:
                total = np.where(
                    np.abs(total) > np.abs(exact), np.nextafter(total, np.float32(0)), total
                )
        out = torch.zeros(g_BTp.shape[2], a_BTd.shape[2])
        out[torch.from_numpy(rows)[:, None], torch.from_numpy(columns)] = torch.from_numpy(total)
        return out

    def draw(rng: random.Random, _: str) -> Construction:
        tokens, size = rng.choice([24, 40, 77, 197]), rng.choice([16, 32, 64, 64, 128])
        most = max(4, min(200, (1 << rng.choice([11, 12, 13])) // tokens))
        before = rng.choice([rng.randint(1, most - 2), 1 << ((most // 2).bit_length() - 1)])
        of = replace(
            draw_construction(rng, rng.choice(["ghost", "convolution"])),
            dtype="bf16" if terms > 1 else "fp32",
        )
        # Weights are one: a lane knows nothing of what a factor, folded into bf16, is off by.
        return replace(
            of,
            tokens=tokens,
            micro_batches=(size,),
            before=before,
            after=most - before - 1,
            function="flat",
            bound=None,
        )

    with mock.patch.object(totals, "_product", product), ExitStack() as stack:
        stack.enter_context(mock.patch.object(totals, "adds_term_by_term", return_value=True))
        if terms > 1:
            stack.enter_context(
                mock.patch.object(contributions, "_has_bf16_units", return_value=True)
            )
            stack.enter_context(
                mock.patch.object(totals, "has_fp32_products_of_bf16", return_value=True)
            )
        yield draw
