"""The fallback: modules that no rule follows are exact as a whole, and each condition has a case that breaks it.

Conditions are those of `privacy/gradients/fallback.py`. Models map (B, T, D), with T = B in some micro-batches:
nothing is told by its size. Parameters that a forward reads itself come as copies (raw_parameters.py) or by the
fallback.
"""

from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence
from torch.utils.checkpoint import checkpoint

import privacy.gradients.fallback as fallback
from privacy.certified.certified_sum import CertifiedSum
from privacy.clipping import ClippedSum
from privacy.errors import PrivacyConfigError
from privacy.gradients.fallback import plan_of
from privacy.guards.selfcheck import check_against_autograd
from privacy.plan.lattice import Lattice
from privacy.plan.releases import SENSITIVITY_SLACK
from tests.privacy.clipping import oracle
from tests.privacy.clipping.test_wirings import D, Piece, T, freeze_idle, require_exact
from tests.self_check import Guarded

Use = Callable[[Any, Tensor], Tensor]


class Model(nn.Module):
    """x -> Linear -> use(inner, x) -> Linear -> loss."""

    def __init__(self, inner: nn.Module, use: Use) -> None:
        super().__init__()
        self.before, self.inner, self.after, self.use = nn.Linear(D, D), inner, nn.Linear(D, 3), use

    def forward(self, x: Tensor) -> Tensor:
        return self.after(self.use(self.inner, self.before(x))).sin().flatten(1).sum(1)


def made(inner: nn.Module | Use, use: Use = lambda m, x: m(x)) -> Model:
    """In float64; what the loss does not reach is frozen."""
    model = Model(inner if isinstance(inner, nn.Module) else Piece(inner), use).double()
    freeze_idle(model, batch(3))
    return model


def batch(count: int) -> dict[str, Tensor]:
    x = torch.randn(count, T, D, generator=torch.Generator().manual_seed(count)).double()
    return {"x": x * torch.logspace(-1, 1, count)[:, None, None]}


def single(inputs: dict[str, Tensor]) -> dict[str, Tensor]:
    return {name: x.float() for name, x in inputs.items()}


def add(total: ClippedSum, model: Callable[..., Tensor], inputs: dict[str, Tensor]) -> None:
    total.add_micro_batch(model, inputs, torch.zeros(len(inputs["x"]), dtype=torch.bool))


def is_exact(model: nn.Module, *how: Any, **counts: Any) -> None:
    require_exact(model, batch(2), batch, *how, **counts)


def in_both_modes(names: Iterable[str], *quick: str) -> pytest.MarkDecorator:
    """In two passes `make test` tries the quick ones, and all others with bookkeeping."""
    daily = [(n, "two_pass" if n in quick else "bookkeeping") for n in names]
    full = [
        pytest.param(n, "bookkeeping" if n in quick else "two_pass", marks=pytest.mark.full)
        for n in names
    ]
    return pytest.mark.parametrize(("name", "mode"), [*daily, *full])


def windows(m: Piece, x: Tensor) -> Tensor:
    return m.a(x.reshape(2 * len(x), -1, D)).reshape(x.shape)


def resized(m: Piece, x: Tensor) -> Tensor:
    return x + F.interpolate(m.matrix.view(1, D, 2, 2), size=(2, 2), mode="bicubic").flatten(2).mT


def experts(m: Piece, x: Tensor) -> Tensor:
    """Each token takes the weights of its own expert."""
    return torch.einsum(
        "btd,btpd->btp", x, torch.stack([m.matrix, m.b.weight])[(x[..., 0] > 0).long()]
    )


def writes_inside(m: Piece, x: Tensor) -> Tensor:
    y = x @ m.matrix
    y[:, 0] = m.a(x[:, 1])
    return y.mul_(2)


EXACT: dict[str, Callable[[], Model]] = {
    "windows": lambda: made(windows),
    "interpolated positions": lambda: made(resized),
    "experts": lambda: made(experts),
    "writes inside": lambda: made(writes_inside),
    "shared table": lambda: made(lambda m, x: x * m.positions(torch.arange(x.shape[1]))),
    "used twice": lambda: made(lambda m, x: (x @ m.matrix).tanh() @ m.matrix.t()),
    "called twice": lambda: made(lambda m, x: x @ m.matrix, lambda m, x: m(m(x).tanh())),
    "weight of another layer": lambda: made(lambda m, x: m.a(x) @ m.a.weight),
    "checkpointed": lambda: made(windows, lambda m, x: checkpoint(m, x, use_reentrant=False)),
    "attention": lambda: made(
        nn.MultiheadAttention(D, 2, batch_first=True), lambda m, x: m(x, x, x)[0]
    ),
    "encoder layer": lambda: made(
        nn.TransformerEncoderLayer(D, 2, 8, dropout=0.0, batch_first=True)
    ),
    "sequence first": lambda: made(
        nn.Linear(D, D), lambda m, x: m(x.transpose(0, 1)).transpose(0, 1)
    ),
    "attention, sequence first": lambda: made(
        nn.MultiheadAttention(D, 2),
        lambda m, x: m(*[x.transpose(0, 1)] * 3, need_weights=False)[0].transpose(0, 1),
    ),
    "LSTM": lambda: made(nn.LSTM(D, D, batch_first=True), lambda m, x: m(x)[0]),
    "GRU, sequence first": lambda: made(
        nn.GRU(D, D), lambda m, x: m(x.transpose(0, 1))[0].transpose(0, 1)
    ),
    "InstanceNorm": lambda: made(nn.InstanceNorm1d(T, affine=True)),
    "batch norm in eval mode": lambda: made(nn.BatchNorm1d(T).eval()),
    "Bilinear": lambda: made(nn.Bilinear(D, D, D), lambda m, x: m(x, x.sin())),
    "weight norm": lambda: made(nn.utils.parametrizations.weight_norm(nn.Linear(D, D))),
    "EmbeddingBag": lambda: made(
        nn.EmbeddingBag(9, D),
        lambda m, x: x + m((4 * x[..., 0].detach().sin() + 4).long())[:, None],
    ),
    "own input written to": lambda: made(lambda m, x: windows(m, x.add_(1)), lambda m, x: m(x * 1)),
    "repeated class token": lambda: made(
        raw(lambda m, x: torch.cat((x, m.p.repeat(len(x), 2, 1)), dim=1), 1, 1, D)
    ),
    "rows by number": lambda: made(raw(lambda m, x: x + m.p[torch.tensor([2, 0, 2, 5])], 7, D)),
    "its norm": lambda: made(raw(lambda m, x: x + m.p / m.p.norm(), 1, T, D)),
    "rows by value": lambda: made(
        raw(lambda m, x: x + m.p[(x.detach().sum((1, 2)) > 0).long()][:, None], 2, D)
    ),
    "a row for two": lambda: made(
        raw(lambda m, x: (x.reshape(-1, 2, D) + m.p).view_as(x), 1, 2, D)
    ),
    "transposed": lambda: made(raw(lambda m, x: x + m.p.t(), D, T)),
    "tokens first": lambda: made(
        raw(lambda m, x: (x.transpose(0, 1) + m.p).transpose(0, 1), T, 1, D)
    ),
    "table that is read": lambda: made(
        Piece(lambda m, x: x + m.table.weight[ids(x)], table=nn.Embedding(9, D))
    ),
}


def raw(use: Use, *shape: int) -> Piece:
    """With a parameter of its own, of any shape."""
    return Piece(use, p=nn.Parameter(torch.randn(shape)))


class Table(nn.Embedding):
    """Ids are shifted, as in OPT."""

    def forward(self, ids: Tensor) -> Tensor:
        return 2 * super().forward((ids + 2) % len(self.weight))


def ids(x: Tensor) -> Tensor:
    return (x[..., 0].detach().sin() * 4 + 4).round().long()


def masked(m: Piece, x: Tensor) -> Tensor:
    """A mask of the batch meets an expanded token: the idiom of masked image models."""
    mask = (x.detach()[..., 1:2] > 0).to(x.dtype)
    return x * (1 - mask) + m.p.expand(len(x), T, -1) * mask


BY_COPIES: dict[str, Callable[[], Piece]] = {
    "class token": lambda: raw(lambda m, x: torch.cat([m.p.expand(len(x), -1, -1), x], 1), 1, 1, D),
    "positions": lambda: raw(lambda m, x: x + m.p[:, :T].to(x.dtype), 1, T + 3, D),
    "mask token": lambda: raw(masked, 1, 1, D),
    "used twice": lambda: raw(lambda m, x: (x * m.p).tanh() * m.p, 1, 1, D),
    "vector": lambda: raw(lambda m, x: 1.0 - x * m.p, D),
    "vector after a table": lambda: raw(lambda m, x: x + m.table * m.p, D),
    "vector for one token": lambda: raw(lambda m, x: (x[:, 0] + m.p.sigmoid())[:, None] + x, D),
    "scalar": lambda: raw(lambda m, x: x * m.p.sigmoid()),
    "positions without a leading 1": lambda: raw(lambda m, x: x + m.p, T, D),
    "matrix": lambda: raw(lambda m, x: (x @ m.p).tanh(), D, D),
    "subclassed table": lambda: Piece(lambda m, x: x + m.table(ids(x)), table=Table(9, D)),
    "padded table": lambda: Piece(
        lambda m, x: x + m.table(ids(x)), table=Table(9, D, padding_idx=3)
    ),
    "table for all": lambda: Piece(
        lambda m, x: x + m.table(torch.arange(T)[None]), table=Table(9, D)
    ),
    # What a layer gives for all examples together is one copy for each too, so layers after it see the examples.
    "layer on a table for all": lambda: Piece(
        lambda m, x: x + m.a(m.table(torch.arange(T)[None])), table=Table(9, D)
    ),
}


@in_both_modes(BY_COPIES, "class token", "used twice", "table for all")
def test_a_parameter_that_its_forward_reads_is_copied_for_each_example(
    name: str, mode: str
) -> None:
    """In two passes under activation checkpointing around the owner."""
    torch.manual_seed(0)
    use: Use = (
        (lambda m, x: checkpoint(m, x, use_reentrant=False))
        if mode == "two_pass"
        else lambda m, x: m(x)
    )
    model = made(BY_COPIES[name](), use)
    is_exact(model, mode)
    assert not plan_of(model).covers and "p" not in model.inner.__dict__


def test_without_a_check_only_what_the_shape_decides_is_copied() -> None:
    with pytest.raises(PrivacyConfigError, match=r"inner\.p.*reads them itself"):
        ClippedSum(made(raw(lambda m, x: x * m.p, D)), 1.0)


@in_both_modes(EXACT, "windows", "called twice", "checkpointed", "LSTM", "weight norm")
def test_what_no_rule_follows_is_exact(name: str, mode: str) -> None:
    """With as many examples as tokens too: the examples' dimension is not told by its size."""
    torch.manual_seed(0)
    model = EXACT[name]()
    is_exact(model, mode)
    by_copies = name in ("writes inside", "called twice")  # of the matrix (raw_parameters.py)
    covering = set() if by_copies else {"" if name == "own input written to" else "inner"}
    assert {*plan_of(model).covers.values()} == covering or "encoder" in name


def test_the_smallest_module_is_chosen_and_the_console_names_it() -> None:
    torch.manual_seed(0)
    model = made(windows)
    check_against_autograd(model, batch(2))
    assert plan_of(model).covers == {"inner.a.weight": "inner", "inner.a.bias": "inner"}
    (line,) = plan_of(model).sentences(model)
    share = 100 * 20 / sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert line.startswith(
        f"fallback: inner (Piece) covers {share:.2g} % of the trained parameters: it runs"
    )
    for allowed in (False, ["inner.a"]):
        with pytest.raises(PrivacyConfigError, match=r"^layer inner\.a .*windows"):
            check_against_autograd(model, batch(2), fallback=allowed)
    check_against_autograd(model, batch(2), fallback=["", "before"])
    assert {*plan_of(model).covers.values()} == {""}


def test_contract_4_one_example_moves_the_sum_by_at_most_c() -> None:
    """Whatever it is: excluded rows are blanked, and no row of a replay reaches another."""
    torch.manual_seed(0)
    model, inputs = made(experts).float(), single(batch(6))
    check_against_autograd(model, single(batch(2)))
    total = Guarded(ClippedSum(model, c := 0.1))
    without = torch.arange(6) == 2
    total.add_micro_batch(model, inputs, without)
    others = {name: value.clone() for name, value in total.sums()}
    for value in (None, 0.0, 1e6, float("nan"), float("inf")):
        changed = {"x": inputs["x"].clone()}
        changed["x"][2] = inputs["x"][2] if value is None else value
        total.zero_()
        add(total, model, changed)
        moved = oracle.norm({name: others[name] - v for name, v in total.sums()})
        assert moved <= c * (1 + SENSITIVITY_SLACK) and (moved > 0) == (value in (None, 0.0, 1e6))


def test_chunks_have_one_shape_that_the_last_is_filled_up_to(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    torch.manual_seed(0)
    model = made(experts)
    seen: list[int] = []
    plain = torch.func.vmap

    def watched(function: Any, **named: Any) -> Any:
        return lambda *args: seen.append(len(args[0][0])) or plain(function, **named)(*args)  # type: ignore[func-returns-value]

    monkeypatch.setattr(torch.func, "vmap", watched)
    monkeypatch.setattr(fallback, "CHUNK_BYTES", 2 * 8 * (2 * D * D + 2 * T * D))
    is_exact(model, counts=(5,))
    assert seen[-3:] == [2, 2, 2]


def test_certified_sums_read_the_same_gradients() -> None:
    torch.manual_seed(0)
    model, inputs = made(windows).float(), single(batch(4))
    check_against_autograd(model, single(batch(2)))
    total = Guarded(CertifiedSum(model, Lattice.of(1.0, 64, 1.0)))
    add(total, model, inputs)
    sums = {name: value.double() * 2.0**-total.lattice.exponent for name, value in total.sums()}
    assert oracle.relative_error(sums, oracle.clipped_sum(model, model, inputs, 1.0)) <= 1e-2


def test_autocast_and_mode_of_the_forward_are_those_of_the_replay() -> None:
    """Both are put back before the backward."""
    torch.manual_seed(0)
    model = made(lambda m, x: windows(m, x) * (2.0 if m.training else 3.0)).float()

    def task(x: Tensor) -> Tensor:
        model.inner.train()
        with torch.autocast("cpu", torch.bfloat16):
            loss_B = model(x).float()
        model.inner.eval()
        return loss_B

    model.inner.eval()
    check_against_autograd(model, single(batch(2)), task)
    total, inputs = Guarded(ClippedSum(model, 1.0)), single(batch(4))
    add(total, task, inputs)
    assert (
        oracle.relative_error(dict(total.sums()), oracle.clipped_sum(model, task, inputs, 1.0))
        <= 2e-2
    )


@pytest.mark.parametrize("place", ["before", "inner.b"])
def test_weights_tied_to_a_layer_outside_or_inside_count_once(place: str) -> None:
    torch.manual_seed(0)
    model = made(lambda m, x: windows(m, x) + m.b(x))
    model.get_submodule(place).weight = model.inner.a.weight
    is_exact(model)


def writes_a_buffer(m: Piece, x: Tensor) -> Tensor:
    m.running.add_(1)
    return windows(m, x)


def packed(m: nn.LSTM, x: Tensor) -> Tensor:
    y, _ = m(pack_padded_sequence(x, [T] * len(x), batch_first=True))
    return pad_packed_sequence(y, batch_first=True)[0]


REFUSED: dict[str, tuple[Callable[[], Model], str]] = {
    "draws": (lambda: made(lambda m, x: F.dropout(windows(m, x), 0.1)), "draws random"),
    "dropout layer": (
        lambda: made(nn.TransformerEncoderLayer(D, 2, 8, batch_first=True)),
        "draws random",
    ),
    "dropout of an LSTM": (
        lambda: made(nn.LSTM(D, D, 2, dropout=0.1), lambda m, x: m(x)[0]),
        "draws random",
    ),
    "buffer": (lambda: made(writes_a_buffer), "cannot follow its forward .*mutate"),
    "branches on values": (
        lambda: made(lambda m, x: windows(m, x) if bool(x.detach().sum() < 1e9) else x),
        r"^inner \(Piece\) .*vmap cannot follow",
    ),
    "packed sequences": (
        lambda: made(nn.LSTM(D, D, batch_first=True), packed),
        "vmap cannot follow",
    ),
    "mixes": (
        lambda: made(lambda m, x: windows(m, x) + x.mean(0)),
        "alone than together|loss of an example changes",
    ),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_replay_cannot_repeat_is_refused_in_a_line(name: str) -> None:
    torch.manual_seed(0)
    make, line = REFUSED[name]
    with pytest.raises(PrivacyConfigError, match=line) as caught:
        check_against_autograd(make(), batch(2))
    assert "\n" not in str(caught.value)


def test_an_output_for_all_examples_together_disqualifies_a_module() -> None:
    """A router's loss: here it is added with weight 0, so that the examples stay apart, and the module around it is taken."""
    torch.manual_seed(0)
    model = made(
        lambda m, x: (windows(m, x), m.a(x).mean()),
        lambda m, x: (lambda y, aside: y + 0 * aside)(*m(x)),
    )
    for found in model.inner, model:
        places = fallback.places_of(model, lambda size: model(**batch(size)), lambda: None)
        assert (found in places) == (found is model)


def test_mixing_is_looked_for_at_the_size_of_training_with_the_fallback_in_place() -> None:
    """Above 30 examples only the first 4 are served: that is no neighbour's doing, so losses do not show it."""

    def capacity(m: Piece, x: Tensor) -> Tensor:
        served = torch.arange(len(x)) < (4 if len(x) > 30 else 30)
        return torch.where(served[:, None, None], windows(m, x), x)

    torch.manual_seed(0)
    model = made(capacity)
    check_against_autograd(model, batch(2))
    total = Guarded(ClippedSum(model, 1.0))
    add(total, model, batch(30))
    with pytest.raises(PrivacyConfigError, match="other outputs for examples alone than together"):
        add(total, model, batch(40))


def test_a_write_to_what_a_module_was_given_is_refused_before_the_replay() -> None:
    def later(m: Piece, x: Tensor) -> Tensor:
        h = x * 1
        y = m(h)
        h.add_(1)
        return y

    torch.manual_seed(0)
    with pytest.raises(PrivacyConfigError, match="in place"):
        check_against_autograd(made(lambda m, x: x + m.matrix[0].softmax(0), later), batch(2))


def test_a_replay_leaves_attributes_as_they_were() -> None:
    def remembers(m: Piece, x: Tensor) -> Tensor:
        m.seen = {"last": x}  # type: ignore[assignment]
        return windows(m, x)

    torch.manual_seed(0)
    model = made(remembers)
    check_against_autograd(model, batch(2))
    add(Guarded(ClippedSum(model, 1.0)), model, batch(5))
    kept = model.inner.seen["last"]  # type: ignore[union-attr,index]
    assert kept.shape == (5, T, D) and not torch._C._functorch.is_functorch_wrapped_tensor(kept)


@pytest.mark.parametrize(
    ("call", "line"),
    [
        (lambda x: x[:, None], "another way than in the self-check"),
        (lambda x: {x}, "called with a set"),
    ],
)
def test_a_call_in_another_form_than_in_the_self_check_is_refused(
    call: Callable[[Tensor], Any], line: str
) -> None:
    torch.manual_seed(0)
    model = made(
        lambda m, x: windows(m, x if isinstance(x, Tensor) and x.dim() == 3 else next(iter(x)))
    )
    check_against_autograd(model, batch(2))
    model.use = lambda m, x: m(call(x))
    with pytest.raises(PrivacyConfigError, match=line):
        add(ClippedSum(model, 1.0), model, batch(5))
