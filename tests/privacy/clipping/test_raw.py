"""Parameters that a forward reads itself: exact against a loop of single examples, or refused, but never wrong.

Everywhere B = T = d = 4 examples, tokens and channels, so that nothing can be told by its size.
"""

from collections.abc import Callable
from typing import Literal

import pytest
import torch
from torch import Tensor, nn
from torch.utils.checkpoint import checkpoint

from privacy.clipping import ClippedSum
from privacy.clipping.fallback import plan_of
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from tests.privacy.clipping import oracle

B = T = D = 4
Use = Callable[["Inner", Tensor], Tensor]


class Inner(nn.Module):
    def __init__(self, shape: tuple[int, ...], use: Use) -> None:
        super().__init__()
        self.p, self.use = nn.Parameter(torch.randn(shape)), use
        self.register_buffer("table", torch.randn(T, D))

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Table(nn.Embedding):
    """Ids are shifted, as in OPT."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward((ids + 2) % len(self.weight))


class Model(nn.Module):
    """x -> Linear -> inner -> Linear -> loss."""

    def __init__(self, inner: nn.Module) -> None:
        super().__init__()
        self.before, self.inner, self.after = nn.Linear(D, D), inner, nn.Linear(D, 3)
        self.wraps: Callable[[nn.Module, Tensor], Tensor] = lambda m, x: m(x)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = self.wraps(self.inner, self.before(x) * w[:, None, None])
        return self.after(y).tanh().flatten(1).sum(1) * w


class Looking(nn.Module):
    def __init__(self, table: Table, *, is_shared: bool = False) -> None:
        super().__init__()
        self.table, self.is_shared = table, is_shared

    def forward(self, x: Tensor) -> Tensor:
        return x + self.table(
            torch.arange(T)[None] if self.is_shared else (x[..., 0].detach().sin() * 4 + 4).round().long()
        )


def data(batch: int) -> dict[str, Tensor]:
    torch.manual_seed(batch)
    return {"x": torch.randn(batch, T, D).double(), "w": torch.logspace(-1, 1, batch).double()}


def masked(m: Inner, x: Tensor) -> Tensor:
    """A mask of the batch meets an expanded token: the idiom of masked image models."""
    mask = (x.detach()[..., :1] > 0).to(x.dtype)
    return x * (1 - mask) + m.p.expand(len(x), T, -1) * mask


BY_COPIES: dict[str, Callable[[], nn.Module]] = {
    "class token": lambda: Inner((1, 1, D), lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), x], 1)),
    "positions": lambda: Inner((1, T + 3, D), lambda m, x: x + m.p[:, :T].to(x.dtype)),
    "mask token": lambda: Inner((1, 1, D), masked),
    "used twice": lambda: Inner((1, 1, D), lambda m, x: (x * m.p).tanh() * m.p),
    "vector": lambda: Inner((D,), lambda m, x: 1.0 - x * m.p),
    "vector after a table": lambda: Inner((D,), lambda m, x: x + m.table * m.p),
    "vector for one token": lambda: Inner((D,), lambda m, x: (x[:, 0] + m.p.sigmoid())[:, None] + x),
    "scalar": lambda: Inner((), lambda m, x: x * m.p.sigmoid()),
    "positions without a leading 1": lambda: Inner((T, D), lambda m, x: x + m.p),
    "matrix": lambda: Inner((D, D), lambda m, x: (x @ m.p).tanh()),
    "subclassed table": lambda: Looking(Table(9, D)),
    "padded table": lambda: Looking(Table(9, D, padding_idx=3)),
    "table for all": lambda: Looking(Table(9, D), is_shared=True),
}
BY_FALLBACK: dict[str, Callable[[], nn.Module]] = {
    "repeated class token": lambda: Inner((1, 1, D), lambda m, x: torch.cat((x, m.p.repeat(len(x), 2, 1)), dim=1)),
    "first row of positions": lambda: Inner((1, T, D), lambda m, x: x + m.p[0]),
    "rows by number": lambda: Inner((7, D), lambda m, x: x + m.p[torch.tensor([2, 0, 2, 5])]),
    "its norm": lambda: Inner((1, T, D), lambda m, x: x + m.p / m.p.norm()),
    "its length": lambda: Inner((1, T, D), lambda m, x: x + m.p / len(m.p)),
    "rows that depend on values": lambda: Inner(
        (2, D), lambda m, x: x + m.p[(x.detach().sum((1, 2)) > 0).long()][:, None]
    ),
    "windows": lambda: Inner((1, 2, D), lambda m, x: (x.reshape(-1, 2, D) + m.p).view_as(x)),
    "transposed": lambda: Inner((D, T), lambda m, x: x + m.p.t()),
    "tokens first": lambda: Inner((T, 1, D), lambda m, x: (x.transpose(0, 1) + m.p).transpose(0, 1)),
    "linear": lambda: Inner((D, D), lambda m, x: nn.functional.linear(x, m.p)),
    "table that is read": lambda: Looking(type("Read", (Table,), {"forward": lambda m, ids: m.weight[ids]})(9, D)),
}


@pytest.mark.parametrize("name", [*BY_COPIES, *BY_FALLBACK])
@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_exact(name: str, mode: Literal["bookkeeping", "two_pass"]) -> None:
    torch.manual_seed(0)
    model = Model({**BY_COPIES, **BY_FALLBACK}[name]()).double()
    check_against_autograd(model, data(2))
    assert bool(plan_of(model).covers) == (name in BY_FALLBACK)
    if mode == "two_pass":  # under activation checkpointing around the owner
        model.wraps = lambda m, x: checkpoint(m, x, use_reentrant=False)
    for batch in (B, 1, 3):
        inputs = data(batch)
        c = oracle.median_norm(model, model, inputs)
        total = ClippedSum(model, c, mode=mode)
        total.add_micro_batch(model, inputs, torch.zeros(batch, dtype=torch.bool))
        total.detach()
        expected = oracle.clipped_sum(model, model, inputs, c)
        assert max(g.norm() for n, g in expected.items() if n.startswith("inner")) > 0
        assert oracle.relative_error(dict(total.sums()), expected) <= 1e-9
    assert "p" not in model.inner.__dict__


REFUSED: dict[str, tuple[tuple[int, ...], Use, str]] = {
    "mean of the batch": ((1, 1, D), lambda m, x: x + m.p * x.mean(), "changes with the other examples"),
    "checkpoint inside": (
        (1, 1, D), lambda m, x: checkpoint(lambda x: x * m.p, x, use_reentrant=False), "around the module that owns"
    ),
    "value": ((1, 1, 1), lambda m, x: x * m.p.item(), "the model raises RuntimeError"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_contract_3_refused_in_a_line(name: str) -> None:
    shape, use, said = REFUSED[name]
    torch.manual_seed(0)
    model = Model(Inner(shape, use)).double()
    with pytest.raises(PrivacyConfigError, match=said):
        check_against_autograd(model, data(2), fallback=False)
    assert "p" not in model.inner.__dict__


def test_without_a_check_only_what_the_shape_decides_is_copied() -> None:
    model = Model(Inner((D,), lambda m, x: x * m.p))
    with pytest.raises(PrivacyConfigError, match=r"inner\.p.*reads them itself"):
        ClippedSum(model, 1.0, self_check=False)


def test_a_layer_on_position_embeddings_of_one_row_is_exact() -> None:
    """What a layer gives for all examples together is one copy for each too, so layers after it see the examples."""
    torch.manual_seed(0)
    model = Model(Looking(Table(9, D), is_shared=True)).double()
    layer = nn.Linear(D, D).double()
    model.inner.register_module("layer", layer)
    model.inner.table.register_forward_hook(lambda m, args, output: layer(output))  # type: ignore[union-attr]
    check_against_autograd(model, data(2))
    inputs = data(B)
    c = oracle.median_norm(model, model, inputs)
    total = ClippedSum(model, c)
    total.add_micro_batch(model, inputs, torch.zeros(B, dtype=torch.bool))
    assert oracle.relative_error(dict(total.sums()), oracle.clipped_sum(model, model, inputs, c)) <= 1e-9
