"""One parameter used in two ways: the cross term of its norm is exact, whatever the two ways are."""

import itertools
import math

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import SUMS
from privacy.gradients.per_example_gradients import (
    ChunkedOuterProducts,
    Contribution,
    Dense,
    EmbeddingGradient,
    OuterProducts,
    inner,
)

B, T, V, D = 5, 4, 7, 3


def written_out(part: Contribution) -> Tensor:
    """(B, V, D)."""
    match part:
        case OuterProducts():
            return part.instantiate()
        case EmbeddingGradient():
            table = torch.zeros(B, V, D, dtype=torch.float64)
            return table.scatter_add_(1, part.ids_BT[:, :, None].expand(-1, -1, D), part.g_BTp)
        case Dense():
            return part.grad_B
        case ChunkedOuterProducts():
            return torch.einsum(
                "btv,btd->bvd", torch.cat([g for _, g in part.gradients()], 2), part.a_BTd
            )
    raise AssertionError(part)


def chunked(a: Tensor, g: Tensor, size: int) -> ChunkedOuterProducts:
    cuts = [slice(i, min(i + size, V)) for i in range(0, V, size)]
    return ChunkedOuterProducts(
        a, torch.bmm(g, g.transpose(1, 2)), V, lambda: ((c, g[:, :, c]) for c in cuts)
    )


def test_every_pair_of_kinds_against_the_written_out_gradients() -> None:
    generator = torch.Generator().manual_seed(0)

    def numbers(*shape: int) -> Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    kinds: list[Contribution] = [
        OuterProducts(numbers(B, T, D), numbers(B, T, V)),
        OuterProducts(numbers(B, 1, D), numbers(B, 1, V)),
        EmbeddingGradient(torch.randint(0, V, (B, T), generator=generator), numbers(B, T, D)),
        EmbeddingGradient(torch.full((B, T), V - 1), numbers(B, T, D)),
        Dense(numbers(B, V, D)),
        chunked(numbers(B, T, D), numbers(B, T, V), 3),
        chunked(numbers(B, 2, D), numbers(B, 2, V), 5),
        chunked(numbers(B, 2, D), numbers(B, 2, V), V),
    ]
    for x, y in itertools.product(kinds, repeat=2):
        expected = (written_out(x) * written_out(y)).sum((1, 2))
        torch.testing.assert_close(inner(x, y), expected, rtol=1e-12, atol=1e-12)
        if x is y:
            torch.testing.assert_close(x.norm().squared_B, expected)


class Steps(nn.Module):
    """One layer that is called once a step, as in a recurrent cell."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.layer = nn.Linear(width, 1, bias=False)

    def forward(self, x_BKD: Tensor) -> Tensor:
        return sum(
            (self.layer(x_BKD[:, k])[:, 0] for k in range(x_BKD.shape[1])), torch.zeros(len(x_BKD))
        )


def clipped_steps(x_NKD: Tensor, mode: str) -> Tensor:
    """The clipped sum of examples that come one by one, with C = 1."""
    model = Steps(x_NKD.shape[2])
    total = SUMS[mode](model, 1.0)  # type: ignore[arg-type]
    for x_KD in x_NKD:
        total.add_micro_batch(model, {"x_BKD": x_KD[None]}, torch.zeros(1, dtype=torch.bool))
    (result,) = (value.double().flatten().clone() for _, value in total.sums())
    return result


@pytest.mark.parametrize("mode", ["bookkeeping", pytest.param("two_pass", marks=pytest.mark.full)])
@pytest.mark.parametrize(
    ("count", "cancels"), [(270, False), pytest.param(450, True, marks=pytest.mark.full)]
)
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
    filling = [
        torch.full((count, 1), amount / count) for amount in [0.999] * 15 + [0.5 - 15 * 0.999 + 15]
    ]
    sums = []
    for amount in (1.0, 0.0):
        rows = [torch.full((count, 1), amount / count), *filling, *[hovering] * (64 - 17)]
        sums.append(clipped_steps(torch.stack(rows), "bookkeeping"))
    assert (sums[0] - sums[1]).norm() <= 1.001
