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
from privacy.errors import PrivacyConfigError
from tests.privacy.clipping import oracle

B = T = D = 4


class Model(nn.Module):
    """x -> Linear -> forward(p, x) -> Linear -> loss, where p is a raw parameter."""

    def __init__(self, shape: tuple[int, ...], use: Callable[["Model", Tensor], Tensor]) -> None:
        super().__init__()
        self.before, self.after = nn.Linear(D, D), nn.Linear(D, 3)
        self.inner = Inner(shape, use)
        self.register_buffer("table", torch.randn(T, D))

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = self.inner(self.before(x) * w[:, None, None])
        return self.after(y).tanh().flatten(1).sum(1) * w


class Inner(nn.Module):
    def __init__(self, shape: tuple[int, ...], use: Callable[["Inner", Tensor], Tensor]) -> None:
        super().__init__()
        self.p, self.q = nn.Parameter(torch.randn(shape)), nn.Parameter(torch.randn(1, 1, D))
        self.register_buffer("table", torch.randn(T, D))
        self.register_buffer("mask", torch.rand(T, 1) < 0.5)
        self.use = use

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


def make(shape: tuple[int, ...], use: Callable[[Inner, Tensor], Tensor]) -> tuple[Model, dict[str, Tensor]]:
    torch.manual_seed(0)
    model = Model(shape, use).double()
    return model, {"x": torch.randn(B, T, D).double(), "w": torch.logspace(-1, 1, B).double()}


def changed_in_place(m: Inner, x: Tensor) -> Tensor:
    y = x * 2
    y += m.p
    return y


def masked(m: Inner, x: Tensor) -> Tensor:
    """A mask of the batch (known only by its shape) meets an expanded token: the idiom of masked image models."""
    tokens = m.p.expand(len(x), T, -1)
    mask = (x.detach()[..., :1] > 0).to(x.dtype).type_as(tokens)
    return x * (1 - mask) + tokens * mask


def ids_of(x: Tensor) -> Tensor:
    """(B, T) ids from 0 to 8 that differ by example."""
    return (x[..., 0].detach().sin() * 4 + 4).round().long()


EXACT: dict[str, tuple[tuple[int, ...], Callable[[Inner, Tensor], Tensor]]] = {
    "vector": ((D,), lambda m, x: x * m.p),
    "reflected": ((D,), lambda m, x: 1.0 - m.p * x),
    "scalar": ((), lambda m, x: x * m.p.exp().clamp(max=3)),
    "one": ((1,), lambda m, x: x / (1 + m.p.square())),
    "positions": ((T, D), lambda m, x: x + m.p),
    "positions_with_batch": ((1, T, D), lambda m, x: torch.add(x, m.p, alpha=2)),
    "row_for_tokens": ((1, D), lambda m, x: x + m.p),
    "column": ((T, 1), lambda m, x: x * m.p),
    "row_as_tokens": ((1, D), lambda m, x: x + m.p.expand(T, D)),
    "class_token": ((1, 1, D), lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), x], 1)),
    "class_token_repeated": ((1, 1, D), lambda m, x: torch.cat((x, m.p.repeat(len(x), 2, 1)), dim=1)),
    "class_token_sum": ((1, 1, D), lambda m, x: torch.cat([(m.p + m.q).expand(len(x), -1, -1), x], 1)),
    "sum_of_expanded": ((1, 1, D), lambda m, x: torch.cat([m.p.expand(len(x), -1, -1) + m.q, x], 1)),
    "vector_token": ((D,), lambda m, x: torch.cat([m.p[None, None].expand(len(x), 1, D), x], 1)),
    "prompt": ((3, D), lambda m, x: torch.cat([m.p.unsqueeze(0).expand(len(x), -1, -1), x], dim=1)),
    "prompt_repeated": ((3, D), lambda m, x: torch.concat([m.p.repeat(len(x), 1, 1), x], 1)),
    "long_positions": ((1, T + 3, D), lambda m, x: x + m.p[:, :T]),
    "gathered": ((7, D), lambda m, x: x + m.p[torch.tensor([2, 0, 2, 5])]),
    "gathered_by_example": ((7, D), lambda m, x: x + m.p[ids_of(x) % 7]),
    "gathered_by_example_part": ((7, D + 2), lambda m, x: x * m.p[ids_of(x) % 7, 1:-1].tanh()),
    "gathered_by_first_token": ((7, D), lambda m, x: x + m.p[ids_of(x)[:, 0] % 7][:, None] * m.p[:1]),
    "split_positions": ((1, T + 1, D), lambda m, x: torch.cat([m.q + m.p[:, :1], m.p[:, 1:]], 1)[:, 1:] + x),
    "table": ((D,), lambda m, x: x + m.table * m.p),
    "table_twice": ((D,), lambda m, x: x + m.table * m.p + (m.table + m.p)[None]),
    "transposed": ((D, T), lambda m, x: x + m.p.permute(1, 0)),
    "reshaped": ((2, 2, D), lambda m, x: x + m.p.view(T, D) + m.p.reshape(-1, D)),
    "where": ((D,), lambda m, x: torch.where(m.mask, m.p, x)),
    "masked": ((1, 1, D), masked),
    "lerp": ((D,), lambda m, x: torch.lerp(x, m.table.expand_as(x), m.p.sigmoid())),
    "in_place": ((T, D), changed_in_place),
    "converted": ((D,), lambda m, x: x * m.p.float().to(x.dtype) + m.p.to(x) * x),
    "used_twice": ((D,), lambda m, x: (x * m.p).tanh() * m.p),
    "channel_first": ((D, 1), lambda m, x: (x.transpose(1, 2) * m.p).transpose(1, 2)),
    "head_scale": ((2, 1, 1), lambda m, x: (x.view(len(x), T, 2, 2).transpose(1, 2) * m.p).transpose(1, 2).flatten(2)),
    "first_token": ((D,), lambda m, x: (x[:, 0] + m.p)[:, None] + x),
    "layer_norm": ((D,), lambda m, x: nn.functional.layer_norm(x, (D,), m.p, m.q.view(-1))),
    "layer_norm_bias": ((D,), lambda m, x: nn.functional.layer_norm(x, (D,), None, m.p)),
    "linear": ((D, D), lambda m, x: nn.functional.linear(x, m.p, m.q.view(-1))),
    "linear_and_product": ((D, D), lambda m, x: nn.functional.linear(x * m.p, m.p)),
    "linear_bias": ((D,), lambda m, x: nn.functional.linear(x, m.table, bias=m.p)),
    "embedding": ((9, D), lambda m, x: x + nn.functional.embedding(ids_of(x), m.p) * 2),
    "embedding_padded": ((9, D), lambda m, x: x + nn.functional.embedding(ids_of(x), m.p, padding_idx=-5)),
    "embedding_shared": ((9, D), lambda m, x: x + nn.functional.embedding(torch.arange(T)[None], m.p)),
    "embedding_and_product": ((T, D), lambda m, x: x * m.p + nn.functional.embedding(ids_of(x) % T, m.p)),
    "no_gradient": ((D,), lambda m, x: x * m.p.detach() + m.p),
}


@pytest.mark.parametrize("name", EXACT)
def test_exact(name: str) -> None:
    model, inputs = make(*EXACT[name])
    c = oracle.median_norm(model, model, inputs)
    expected = oracle.clipped_sum(model, model, inputs, c)
    assert expected["inner.p"].norm() > 0
    for micro in (B, 1, 3):
        total = ClippedSum(model, c, self_check=False)
        for start in range(0, B, micro):
            part = {k: v[start : start + micro] for k, v in inputs.items()}
            total.add_micro_batch(model, part, torch.zeros(len(part["x"]), dtype=torch.bool))
        total.detach()
        assert oracle.relative_error(dict(total.sums()), expected) <= 1e-9


@pytest.mark.parametrize("name", ["vector", "positions", "masked", "prompt", "scalar", "table_twice"])
@pytest.mark.parametrize("mode", ["bookkeeping", "two_pass"])
def test_exact_in_both_modes_under_activation_checkpointing(
    name: str, mode: Literal["bookkeeping", "two_pass"]
) -> None:
    model, inputs = make(*EXACT[name])
    expected = oracle.clipped_sum(model, model, inputs, 1.0)

    def task(x: Tensor, w: Tensor) -> Tensor:
        y = checkpoint(model.inner, model.before(x) * w[:, None, None], use_reentrant=False)
        return model.after(y).tanh().flatten(1).sum(1) * w

    total = ClippedSum(model, 1.0, mode=mode, self_check=False)
    total.add_micro_batch(task, inputs, torch.zeros(B, dtype=torch.bool))
    assert oracle.relative_error(dict(total.sums()), expected) <= 1e-9


def test_a_checkpoint_inside_the_owner_is_refused() -> None:
    """Its recomputation runs after the owner's forward, where the parameter is itself again; torch notices."""
    model, inputs = make((D,), lambda m, x: checkpoint(lambda x: x * m.p, x, use_reentrant=False))
    with pytest.raises(PrivacyConfigError, match="around the module that owns"):
        ClippedSum(model, 1.0, self_check=False).add_micro_batch(model, inputs, torch.zeros(B, dtype=torch.bool))


REFUSED: dict[str, tuple[tuple[int, ...], Callable[[Inner, Tensor], Tensor]]] = {
    "matmul": ((D, D), lambda m, x: x @ m.p),
    "linear_transposed": ((D, D), lambda m, x: nn.functional.linear(x, m.p.t())),
    "linear_on_positions": ((T, D), lambda m, x: x + nn.functional.linear(m.p, m.table)),
    "embedding_of_part": ((9, D), lambda m, x: x + nn.functional.embedding(ids_of(x) % 7, m.p[:7])),
    "embedding_of_table": ((9, D), lambda m, x: x + nn.functional.embedding(torch.arange(T - 1), m.p)[:1]),
    "softmax": ((D,), lambda m, x: x * m.p.softmax(0)),
    "sequence_first": ((D,), lambda m, x: (x[:, :3].transpose(0, 1) * m.p).transpose(0, 1)),
    "folded": ((D,), lambda m, x: (x.flatten(0, 1) * m.p).view_as(x)),
    "batch_aligned_with_channels": ((D,), lambda m, x: x + (x[:, 0, 0] * m.p)[:, None, None]),
    "batch_aligned_with_tokens": ((T, 1, 1), lambda m, x: x * m.p),
    "by_example": ((B, D), lambda m, x: torch.cat([x, m.p[:, None]], 1)),
    "in_place": ((D,), lambda m, x: x + m.p.exp().mul_(2)),
    "in_place_with_batch": ((T, D), lambda m, x: m.p.exp().expand(len(x), -1, -1).add_(x)),
    "out": ((D,), lambda m, x: torch.mul(x, m.p, out=torch.empty_like(x))),
    "boolean_index": ((T, D), lambda m, x: x + m.p[m.mask[:, 0]].sum(0)),
    "dropout": ((D,), lambda m, x: x + nn.functional.dropout(m.p, 0.5)),
    "batch_mean": ((D,), lambda m, x: x + m.p * x.mean()),
    "values": ((), lambda m, x: x * m.p if m.p > 0 else x),
    "item": ((), lambda m, x: x * m.p.item()),
    "interpolated": ((1, 1, D), lambda m, x: x + nn.functional.interpolate(m.p, size=D)),
    "iterated": ((2, D), lambda m, x: x + sum(row for row in m.p)),
}


@pytest.mark.parametrize("name", REFUSED)
def test_contract_3_refused_by_name(name: str) -> None:
    model, inputs = make(*REFUSED[name])
    total = ClippedSum(model, 1.0, self_check=False)
    with pytest.raises(PrivacyConfigError, match=r"inner\.p"):
        total.add_micro_batch(model, inputs, torch.zeros(B, dtype=torch.bool))
    assert "p" not in model.inner.__dict__
    assert all((value == 0).all() for _, value in total.sums())


class Trunk(nn.Module):
    """A frozen trunk: its features carry no gradient, so only the layer's own argument tells what the batch is."""

    def __init__(self, *, hide: bool) -> None:
        super().__init__()
        self.trunk = nn.Linear(D, D).requires_grad_(False)
        self.scale = Inner((D,), (lambda m, x: (x + 0) * m.p + m.q) if hide else (lambda m, x: x * m.p + m.q))

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(self.trunk(x)).square().flatten(1).sum(1)


def test_a_raw_parameter_after_a_frozen_trunk() -> None:
    torch.manual_seed(0)
    model, inputs = Trunk(hide=False).double(), {"x": torch.randn(B, T, D).double()}
    for micro in (B, 3, 1):
        total = ClippedSum(model, 5.0, self_check=False)
        for part in inputs["x"].split(micro):
            total.add_micro_batch(model, {"x": part}, torch.zeros(len(part), dtype=torch.bool))
        total.detach()
        assert oracle.relative_error(dict(total.sums()), oracle.clipped_sum(model, model, inputs, 5.0)) <= 1e-9


def test_without_evidence_it_is_refused_and_an_input_that_requires_a_gradient_is_evidence() -> None:
    torch.manual_seed(0)
    model, x = Trunk(hide=True).double(), torch.randn(B, T, D).double()
    total = ClippedSum(model, 5.0, self_check=False)
    with pytest.raises(PrivacyConfigError, match=r"scale\.p"):
        total.add_micro_batch(model, {"x": x}, torch.zeros(B, dtype=torch.bool))
    total.add_micro_batch(model, {"x": x.requires_grad_()}, torch.zeros(B, dtype=torch.bool))
    expected = oracle.clipped_sum(model, model, {"x": x.detach()}, 5.0)
    assert oracle.relative_error(dict(total.sums()), expected) <= 1e-9


class Positions(nn.Module):
    """Position embeddings looked up once for all examples."""

    def __init__(self, use: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.tokens, self.positions, self.use = nn.Embedding(9, D), nn.Embedding(T, D), use

    def forward(self, ids: Tensor) -> Tensor:
        x = self.use(self.tokens(ids), self.positions(torch.arange(ids.shape[1])[None]))
        return x.tanh().flatten(1).sum(1)


@pytest.mark.parametrize(
    "use",
    [
        lambda x, p: x + p,
        lambda x, p: x * p[0],
        lambda x, p: x - p.expand(len(x), -1, -1),
    ],
)
def test_position_ids_with_one_row(use: Callable[[Tensor, Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, inputs = Positions(use).double(), {"ids": torch.randint(0, 9, (B, T))}
    c = oracle.median_norm(model, model, inputs)
    total = ClippedSum(model, c, self_check=False)
    total.add_micro_batch(model, inputs, torch.zeros(B, dtype=torch.bool))
    assert oracle.relative_error(dict(total.sums()), oracle.clipped_sum(model, model, inputs, c)) <= 1e-9


def test_a_layer_on_position_embeddings_with_one_row_is_refused() -> None:
    layer = nn.Linear(D, D)
    model = Positions(lambda x, p: x + layer(p))
    with pytest.raises(PrivacyConfigError, match="positions"):
        ClippedSum(model, 1.0, self_check=False).add_micro_batch(
            model, {"ids": torch.zeros(B, T).long()}, torch.zeros(B, dtype=torch.bool)
        )
