"""One parameter used in two ways: the cross term of its norm is exact, whatever the two ways are."""

import itertools

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
