"""One parameter used in two ways: the cross term of its norm is exact, whatever the two ways are."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.clipping.contributions import Contribution, Dense, OuterProducts, Rows, inner
from tests.privacy.clipping import oracle

B, T, V, D = 5, 4, 7, 3


class TableUsedTwice(nn.Module):
    """An embedding whose table is also read as a raw parameter (added to the tokens), and optionally as a Linear's weight."""

    def __init__(self, *, head: bool) -> None:
        super().__init__()
        self.embedding = nn.Embedding(V, D)
        self.positions = Positions(self.embedding.weight)
        self.head = nn.Linear(D, V, bias=False) if head else nn.Linear(D, 2)
        if head:
            self.head.weight = self.embedding.weight

    def forward(self, ids: Tensor, scale: Tensor) -> Tensor:
        x = self.embedding(ids) * scale[:, None, None]
        return self.head(self.positions(x).tanh()).square().mean((1, 2))


class Positions(nn.Module):
    def __init__(self, table: nn.Parameter) -> None:
        super().__init__()
        self.table = table

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table[: x.shape[1]]


@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
@pytest.mark.parametrize("head", [False, True])
def test_an_embedding_that_is_also_a_raw_parameter(head: bool, mode: str) -> None:
    torch.manual_seed(0)
    model = TableUsedTwice(head=head).double()
    inputs = {"ids": torch.randint(0, V, (B, T)), "scale": torch.logspace(-1, 1, B).double()}
    c = oracle.median_norm(model, model, inputs)
    total = ClippedSum(model, c, mode=mode, self_check=False)  # type: ignore[arg-type]
    stats = total.add_micro_batch(model, inputs, torch.zeros(B, dtype=torch.bool))
    total.detach()
    assert 0 < int(stats.num_clipped) < B
    assert oracle.relative_error(dict(total.sums()), oracle.clipped_sum(model, model, inputs, c)) <= 1e-9


def written_out(part: Contribution) -> Tensor:
    """(B, V, D)."""
    match part:
        case OuterProducts():
            return part.instantiate()
        case Rows():
            table = torch.zeros(B, V, D, dtype=torch.float64)
            return table.scatter_add_(1, part.ids_BT[:, :, None].expand(-1, -1, D), part.g_BTp)
        case Dense():
            return part.grad_B
    raise AssertionError(part)


def test_every_pair_of_kinds_against_the_written_out_gradients() -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kinds: list[Contribution] = [
        OuterProducts(numbers(B, T, D), numbers(B, T, V)),
        OuterProducts(numbers(B, 1, D), numbers(B, 1, V)),
        Rows(torch.randint(0, V, (B, T), generator=generator), numbers(B, T, D)),
        Rows(torch.full((B, T), V - 1), numbers(B, T, D)),
        Dense(numbers(B, V, D)),
    ]
    for x, y in itertools.product(kinds, repeat=2):
        expected = (written_out(x) * written_out(y)).sum((1, 2))
        torch.testing.assert_close(inner(x, y), expected, rtol=1e-12, atol=1e-12)


class Steps(nn.Module):
    """One layer that is called once a step, as in a recurrent cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1, bias=False)

    def forward(self, x_BKD: Tensor) -> Tensor:
        return sum((self.layer(x_BKD[:, k])[:, 0] for k in range(x_BKD.shape[1])), torch.zeros(len(x_BKD)))


def clipped_steps(x_NKD: Tensor, mode: str) -> Tensor:
    """The clipped sum of examples that come one by one, with C = 1."""
    model = Steps(x_NKD.shape[2])
    total = ClippedSum(model, 1.0, mode=mode, self_check=False)  # type: ignore[arg-type]
    for x_KD in x_NKD:
        total.add_micro_batch(model, {"x_BKD": x_KD[None]}, torch.zeros(1, dtype=torch.bool))
    (result,) = (value.double().flatten().clone() for _, value in total.sums())
    return result


@pytest.mark.parametrize("mode", ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)])
@pytest.mark.parametrize(("count", "cancels"), [(270, False), pytest.param(450, True, marks=pytest.mark.full)])
def test_contract_4_a_norm_counts_every_use(count: int, cancels: bool, mode: str) -> None:
    """Each of K small uses is below the rounding of a large one; together they are not."""
    x_KD = torch.tensor([0.0, 1.72e-4]).repeat(count, 1)
    x_KD[-1] = torch.tensor([1.0, 0.0])
    if cancels:
        x_KD[0] = torch.tensor([-1.0, 0.0])
    assert clipped_steps(128 * x_KD[None], mode).norm() <= 1.001


@pytest.mark.parametrize("count", [24, pytest.param(48, marks=pytest.mark.full)])
def test_contract_4_sums_of_many_uses_do_not_round_with_those_of_other_examples(count: int) -> None:
    """The others hover at 16: half of their uses round up there, and half round down, unless x is missing below it."""
    unit = 2.0**-23 * 16
    whole = math.floor(0.95 / count / unit)
    hovering = torch.full((count, 1), (whole + 0.52) * unit)
    hovering[1::2] = -(whole + 0.48) * unit
    filling = [torch.full((count, 1), amount / count) for amount in [0.999] * 15 + [0.5 - 15 * 0.999 + 15]]
    sums = []
    for amount in (1.0, 0.0):
        rows = [torch.full((count, 1), amount / count), *filling, *[hovering] * (64 - 17)]
        sums.append(clipped_steps(torch.stack(rows), "bookkeeping"))
    assert (sums[0] - sums[1]).norm() <= 1.001
