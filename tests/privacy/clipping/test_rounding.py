"""Contract 4 against rounding: neighbours made so that one example changes how everything after it rounds; norms that underflow.

The construction: 2^k examples of +1, one of +1/2, the example x of -1, then many of -3/4 of the last place below 2^k, each
perhaps a token at a time. With x the partial sum lies below 2^k, and every later addition counts in full or more; with zeros in
its place it lies above, where every later addition rounds to nothing. In plain fp32 sums of embedding rows x moves the sum by
up to 4 C so.
"""

import itertools
import random
from typing import NamedTuple

import pytest
import torch
from torch import Tensor, nn

from models.vocabulary_head import VocabularyHead
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import LocalSums
from privacy.clipping.clipped_sum import Mode
from privacy.releases import SENSITIVITY_SLACK
from tests.distributed.ranks import run_ranks
from trainer.engines.base import even_layout
from trainer.engines.sharded_sums import ShardedSums

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


class Raw(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.p = nn.Parameter(torch.zeros(1, 1))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.p


class Product(nn.Module):
    """loss_i = <layer(x_i), w_i>: the gradients of the layer's outputs are chosen freely."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.layer(x) * w).float().flatten(1).sum(1)


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
            return Raw(), torch.zeros(1), 1
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


CASES = [
    Case("embedding", 24, (32,), 8, 254),
    Case("embedding", 40, (64,), 9, 510),
    Case("embedding", 197, (64, 9, 7), 7, 126),
    Case("embedding", 40, (256,), 7, 120),  # within one micro-batch
    Case("bias", 1, (1,), 8, 254),
    Case("bias", 1, (1024,), 9, 510),
    Case("layer_norm", 1, (1,), 8, 254),
    Case("raw", 1, (1,), 8, 254),
    Case("linear", 1, (1,), 8, 254),
    Case("linear", 1, (8,), 9, 510),
    Case("linear", 1, (3, 40, 1, 1, 64, 7), 8, 254),
    Case("linear", 64, (8,), 8, 254),  # ghost norm
    Case("linear", 197, (16,), 7, 126),  # written out
]


@pytest.mark.parametrize("case", CASES, ids=str)
def test_contract_4_one_example_does_not_change_how_others_round(case: Case) -> None:
    assert moved(case) <= 1 + SENSITIVITY_SLACK


@pytest.mark.parametrize("accumulator", [LocalSums, ShardedSums])
@pytest.mark.parametrize("count", [20, pytest.param(1000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_contract_4_neighbours_drawn_at_random(accumulator: type, count: int) -> None:
    """Across binades, tokens, micro-batches of one size and of several, and places within a sum."""
    found = run_ranks(f"{__name__}:rank_draws", 1, accumulator=accumulator, count=count, timeout=3600)[0]
    assert len(found) == count
    for case, mode, size in found:
        assert 0.999 <= size <= 1 + SENSITIVITY_SLACK, (case, mode)


def rank_draws(device: torch.device, accumulator: type, count: int) -> list[tuple[Case, Mode, float]]:
    rng = random.Random(f"{accumulator.__name__} {count}")
    found = []
    for _ in range(count):
        sizes = rng.choices([1, 2, 8, 16, 31, 32, 33, 64, 100, 256, 1024], k=rng.choice([1, 1, 3]))
        tokens = rng.choice([1, 1, 2, 8, 24, 40, 197, 512])
        k = rng.randint(2, 9 if min(sizes) > 8 and tokens < 100 else 5)
        rule = rng.choice(["embedding", "bias", "layer_norm", "raw", "linear", "linear"])
        after = min(rng.randint(1, 2 ** (k + 1)), 30_000 // tokens)
        case = Case(rule, tokens, tuple(sizes), k, after, lead=rng.randint(0, 70))
        mode: Mode = rng.choice(["bookkeeping", "two_pass"])
        found.append((case, mode, moved(case, mode, accumulator)))
    return found


def test_contract_4_sharded_accumulation_rounds_no_worse() -> None:
    for case, size in run_ranks(f"{__name__}:rank_sharded", 1)[0]:
        assert size <= 1 + SENSITIVITY_SLACK, case


def rank_sharded(device: torch.device) -> list[tuple[Case, float]]:
    return [(case, moved(case, accumulator=ShardedSums)) for case in CASES if case.micro_batches != (1,)]


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


# Norms: inputs and output gradients of any magnitude


class Twice(nn.Module):
    """One Linear for two inputs: the norm of a sum of two contributions."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, width, bias=False)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.layer(x) * w).flatten(1).sum(1) + (self.layer(x.flip(1)) * w * 0.5).flatten(1).sum(1)


class Tied(nn.Module):
    """An embedding and a Linear of one weight; x is the Linear's input, w the gradient of both outputs."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(width, width)
        self.head = nn.Linear(width, width, bias=False)
        self.head.weight = self.embedding.weight

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        ids = torch.arange(x.shape[1], device=x.device).expand(len(x), -1) % 3
        return (self.head(x) * w).flatten(1).sum(1) + (self.embedding(ids) * x * w.amax()).flatten(1).sum(1)


class ByChunks(nn.Module):
    """Cross-entropy over a vocabulary in chunks; scores are zero, x and the scale of the loss are free."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.head = VocabularyHead(width, width, max_logits=width, bias=False)
        nn.init.zeros_(self.head.weight)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        targets = torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)
        return (self.head.token_losses(x, targets) * w[:, :, 0]).sum(1)


class Embedded(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.embedding = nn.Embedding(3, width)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.embedding(torch.zeros(x.shape[:2], dtype=torch.long, device=x.device)) * w).flatten(1).sum(1)


class Convolved(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Conv1d(width, width, 1)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        return (self.layer(x.transpose(1, 2)) * w.transpose(1, 2)).flatten(1).sum(1)


MODELS = {
    "ghost": lambda: Product(nn.Linear(96, 96)),
    "written_out": lambda: Product(nn.Linear(6, 6)),
    "layer_norm": lambda: Product(nn.LayerNorm(96)),
    "shared": lambda: Twice(96),
    "shared_written_out": lambda: Twice(6),
    "tied": lambda: Tied(96),
    "embedding": lambda: Embedded(96),
    "convolution": lambda: Convolved(96),
    "chunked": lambda: ByChunks(96),
}


def contribution(model: nn.Module, x: Tensor, w: Tensor, bound: float, mode: Mode) -> float:
    """|the clipped gradient of one example| / C, from the fp64 sum."""
    clipped = ClippedSum(model, bound, mode=mode, self_check=False)
    clipped.add_micro_batch(model, {"x": x, "w": w}, torch.zeros(len(x), dtype=torch.bool, device=x.device))
    clipped.detach()
    total = total_of(clipped)
    assert total.isfinite().all()
    return float(total.norm()) / bound


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", list(MODELS))
@pytest.mark.parametrize("count", [40, pytest.param(5000, marks=[pytest.mark.full, pytest.mark.timeout(3600)])])
def test_contract_4_norms_neither_underflow_nor_overflow(name: str, dtype: torch.dtype, count: int) -> None:
    """Magnitudes from 1e-38 to 1e38, apart for inputs and output gradients, half of them where one of the two squares is lost."""
    sizes = contributions_drawn(name, dtype, count, torch.device("cpu"))
    assert max(sizes) <= 1 + SENSITIVITY_SLACK
    assert sum(size > 0 for size in sizes) >= count / 20


def contributions_drawn(name: str, dtype: torch.dtype, count: int, device: torch.device) -> list[float]:
    """Sizes in units of C of what single drawn examples contribute."""
    rng, generator = random.Random(f"{name} {dtype} {count}"), torch.Generator().manual_seed(count)
    model = MODELS[name]().to(device, dtype)
    width = 6 if "written_out" in name else 96
    sizes = []
    for _ in range(count):
        large, small = rng.uniform(16, 19), rng.uniform(-24, -19)
        exponents = rng.choice([(large, small), (small, large), (rng.uniform(-38, 38), rng.uniform(-38, 38))])
        shape = (1, rng.choice([1, 3, 7]), width)
        spread = rng.choice([0, 0, 3])
        x, w = (
            (10.0 ** (torch.randn(shape, generator=generator, dtype=torch.float64) * spread + exponent)).clamp(max=3e38)
            for exponent in exponents
        )
        signs = torch.randn(shape, generator=generator).sign() if rng.random() < 0.3 else 1
        bound = 10.0 ** rng.uniform(-6, 1)
        inputs = (tensor.to(device, dtype) for tensor in (x, w * signs))
        sizes.append(contribution(model, *inputs, bound, rng.choice(["bookkeeping", "two_pass"])))
    return sizes


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize(("width", "tokens"), [(768, 196), (512, 64)])
def test_contract_4_large_inputs_with_gradients_whose_squares_are_lost(
    width: int, tokens: int, mode: Mode, dtype: torch.dtype
) -> None:
    """Wide layers: the norm reads 0 while the gradient is 9 C."""
    model = Product(nn.Linear(width, width, bias=False)).to(dtype)
    for large, small in ((3e17, 2e-23), (2e-23, 3e17), (1e18, 3e-21), (1e38, 1e-38)):
        x, w = (torch.full((1, tokens, width), value).to(dtype) for value in (large, small))
        assert contribution(model, x, w, 0.1, mode) <= 1 + SENSITIVITY_SLACK
