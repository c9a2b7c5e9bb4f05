"""Models wired in ways that no rule foresaw, and what becomes of each: exact, refused in a line, or found by the self-check.

A piece maps (B, T, D) to (B, T, D) between two linear layers. `outcome` treats it as a newcomer would: ClippedSum, the
self-check on made-up inputs, then micro-batches of several sizes, as many examples as tokens among them, against a loop of
single examples in float64.
"""

import random
import re
from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations
from torch.utils.checkpoint import checkpoint

from privacy.clipping import ClippedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from tests.privacy.clipping import oracle

D, T = 4, 4
FOUND = (
    r"do not see the gradient|changes with the other examples|draws random|changes the buffer|no made-up example gives"
)


class Piece(nn.Module):
    """`use(self, x)` with two linear layers, a norm, a table of positions, raw parameters and a buffer at hand."""

    running: Tensor

    def __init__(self, use: Callable[..., Tensor], **more: nn.Module) -> None:
        super().__init__()
        self.use = use
        self.a, self.b, self.norm = nn.Linear(D, D), nn.Linear(D, D), nn.LayerNorm(D)
        self.positions = nn.Embedding(9, D)
        self.gain = nn.Parameter(torch.randn(D))
        self.matrix = nn.Parameter(torch.randn(D, D))
        self.register_buffer("table", torch.randn(1, T, D))
        self.register_buffer("running", torch.zeros(D))
        for name, module in more.items():
            setattr(self, name, module)

    def forward(self, x: Tensor) -> Tensor:
        return self.use(self, x)


class Model(nn.Module):
    def __init__(self, *pieces: nn.Module) -> None:
        super().__init__()
        self.before, self.pieces, self.after = nn.Linear(D, D), nn.ModuleList(pieces), nn.Linear(D, 3)

    def forward(self, x: Tensor, w: Tensor) -> Tensor:
        y = self.before(x)
        for piece in self.pieces:
            y = piece(y).tanh() + 0.1 * y
        return self.after(y).sin().flatten(1).sum(1) * w


def example_inputs(count: int, seed: int, tokens: int = T) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(count, tokens, D, generator=generator, dtype=torch.float64)
    return {"x": x, "w": torch.logspace(-0.5, 0.5, count).double()}


def freeze_idle(model: nn.Module) -> None:
    """A piece uses some of what it has; the rest would be refused as idle."""
    buffers = {name: x.clone() for name, x in model.named_buffers()}
    model(**example_inputs(2, 9)).sum().backward()
    for p in model.parameters():
        p.requires_grad_(p.grad is not None)
        p.grad = None
    for name, x in model.named_buffers():
        x.copy_(buffers[name])


def outcome(model: nn.Module) -> str:
    """ "exact", "refused: ..." or "found: ..."; fails if it is none of them."""
    try:
        freeze_idle(model)
        total = ClippedSum(model, 1.0)
        check_against_autograd(model, example_inputs(2, 1, tokens=T))
        for count in (1, 3, T, T + 1):
            inputs = example_inputs(count, count)
            total.max_grad_norm = c = oracle.median_norm(model, model, inputs)
            total.add_micro_batch(model, inputs, torch.zeros(count, dtype=torch.bool))
            error = oracle.relative_error(dict(total.sums()), oracle.clipped_sum(model, model, inputs, c))
            assert error <= 1e-12, f"silently wrong by {error:.1e} with {count} examples"
        total.detach()
    except PrivacyConfigError as error:
        line = str(error)
    else:
        return "exact"
    assert "\n" not in line and len(line) > 40
    return f"{'found' if re.search(FOUND, line) else 'refused'}: {line}"


# The layers of pieces.


class Shifted(nn.Embedding):
    """OPT's and BART's."""

    def forward(self, ids: Tensor) -> Tensor:
        return super().forward(ids + 2) * 3


class ChannelsFirst(nn.LayerNorm):
    """ConvNeXt's."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x.transpose(1, 2)).transpose(1, 2)


class WithTerm(nn.Linear):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 2 * F.linear(x.sin(), self.weight)


class Standardised(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return F.conv1d(x, self.weight / self.weight.std(), self.bias, padding=1)


class Double(torch.autograd.Function):
    """Its backward is not that of its forward."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return 5 * g


def hooked(register: str, hook: Callable[..., object]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        piece = Piece(lambda m, x: m.a(x))
        getattr(piece.a, register)(hook)
        return piece

    return make


def tied(change: Callable[[Piece], object], use: Callable[..., Tensor]) -> Callable[[], nn.Module]:
    def make() -> nn.Module:
        piece = Piece(use)
        change(piece)
        return piece

    return make


def attention(m: Piece, x: Tensor) -> Tensor:
    q, k, v = m.a(x), m.b(x), x
    return torch.einsum("bts,bsd->btd", torch.einsum("btd,bsd->bts", q, k).softmax(2), v)


def energy(m: Piece, x: Tensor) -> Tensor:
    x = x if x.requires_grad else x.requires_grad_()
    return torch.autograd.grad(m.a(x).tanh().sum(), x, create_graph=True)[0]


def changed_in_place(m: Piece, x: Tensor) -> Tensor:
    y = m.a(x)
    y += 1
    return y


def own_copy_in_place(m: Piece, x: Tensor) -> Tensor:
    y = m.a(x) * 2
    y[:, 0] = y[:, 1]
    return y.add_(m.gain)


def remembered(m: Piece, x: Tensor) -> Tensor:
    m.running.mul_(0.9).add_(x.detach().mean((0, 1)))
    return m.a(x)


def routed(m: Piece, x: Tensor) -> Tensor:
    """A mixture of experts that picks tokens."""
    y, chosen = torch.zeros_like(x), x[..., 0] > 0
    y[chosen] = m.a(x[chosen])
    y[~chosen] = m.b(x[~chosen])
    return y


def sorted_batch(m: Piece, x: Tensor) -> Tensor:
    order = x[:, 0, 0].argsort()
    return m.a(x[order])[order.argsort()]


def per_example_weights(m: Piece, x: Tensor) -> Tensor:
    return torch.bmm(x, m.a(x.mean(1)).tanh()[:, :, None] * m.b(x.mean(1))[:, None])


def windows(m: Piece, x: Tensor) -> Tensor:
    return m.a(x.reshape(2 * len(x), T // 2, D)).reshape(x.shape)


def captured() -> nn.Module:
    piece = Piece(lambda m, x: m.function(x))
    gain = piece.gain
    piece.function = lambda x: x * gain  # type: ignore[assignment]
    return piece


def depth(m: Piece, x: Tensor) -> Tensor:
    return m.a(x) if random.random() < 0.5 else m.a(x) * 2


PIECES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    # ways to write a model that are right
    "layer": ("exact", lambda: Piece(lambda m, x: m.a(x))),
    "called_twice": ("exact", lambda: Piece(lambda m, x: m.a(m.a(x).tanh()))),
    "tied_layers": ("exact", tied(lambda m: setattr(m.b, "weight", m.a.weight), lambda m, x: m.b(m.a(x).tanh()))),
    "tied_bias_and_gain": ("exact", tied(lambda m: setattr(m.norm, "bias", m.a.bias), lambda m, x: m.norm(m.a(x)))),
    "keyword": ("exact", lambda: Piece(lambda m, x: m.a(input=x))),
    "flattened": ("exact", lambda: Piece(lambda m, x: m.wide(x.flatten(1)).view_as(x), wide=nn.Linear(T * D, T * D))),
    "indexed": ("exact", lambda: Piece(lambda m, x: m.a(x[:, torch.tensor([1, 1, 0, 3])]).flip(1))),
    "broadcast": ("exact", lambda: Piece(lambda m, x: m.a(x.mean(1, keepdim=True)) * m.norm(x))),
    "expanded": ("exact", lambda: Piece(lambda m, x: m.a(x[:, :1].expand_as(x)))),
    "raw_gain": ("exact", lambda: Piece(lambda m, x: x * m.gain)),
    "raw_passed_on": ("exact", lambda: Piece(lambda m, x: m.b(x * m.gain) + m.gain)),
    "raw_linear": ("exact", lambda: Piece(lambda m, x: F.linear(x, m.matrix, m.gain))),
    "raw_layer_norm": ("exact", lambda: Piece(lambda m, x: F.layer_norm(x, (D,), m.gain))),
    "shared_buffer": ("exact", lambda: Piece(lambda m, x: m.a(x * m.table) + m.table)),
    "layer_on_shared_row": ("exact", lambda: Piece(lambda m, x: x * m.a(m.table))),
    "positions": ("exact", lambda: Piece(lambda m, x: x + m.positions(torch.arange(T)[None]))),
    "attention": ("exact", lambda: Piece(attention)),
    "per_example_weights": ("exact", lambda: Piece(per_example_weights)),
    "fourier": ("exact", lambda: Piece(lambda m, x: m.a(torch.fft.fft(m.b(x), dim=1).real))),
    "cumsum_over_tokens": ("exact", lambda: Piece(lambda m, x: m.a(x.cumsum(1)))),
    "detached": ("exact", lambda: Piece(lambda m, x: m.a(x).detach() * m.b(x))),
    "detached_weight": ("exact", lambda: Piece(lambda m, x: m.a(x) + F.linear(x, m.a.weight.detach()))),
    "own_gradient": ("exact", lambda: Piece(lambda m, x: Double.apply(m.a(x)))),
    "checkpoint": (
        "exact",
        lambda: Piece(lambda m, x: checkpoint(lambda x: m.b(m.a(x).tanh()), x, use_reentrant=False)),
    ),
    "nested": ("exact", lambda: Piece(lambda m, x: m.n(x), n=nn.Sequential(nn.Sequential(nn.Linear(D, D), nn.SiLU())))),
    "own_copy_in_place": ("exact", lambda: Piece(own_copy_in_place)),
    "low_rank": (
        "exact",
        lambda: Piece(
            lambda m, x: m.frozen(x) + m.up(m.down(x)),
            frozen=nn.Linear(D, D).requires_grad_(False),
            down=nn.Linear(D, 2, bias=False),
            up=nn.Linear(2, D, bias=False),
        ),
    ),
    "conv": ("exact", lambda: Piece(lambda m, x: m.c(x.mT).mT, c=nn.Conv1d(D, D, 3, padding=1, groups=2))),
    "transposed_conv": ("exact", lambda: Piece(lambda m, x: m.c(x.mT).mT, c=nn.ConvTranspose1d(D, D, 3, padding=1))),
    "prelu": ("exact", lambda: Piece(lambda m, x: m.r(x), r=nn.PReLU())),
    "subclass_of_embedding": (
        "exact",
        lambda: Piece(lambda m, x: x + m.e((x[..., 0].detach() > 0).long()), e=Shifted(5, D)),
    ),
    "subclass_of_embedding_shared": (
        "exact",
        lambda: Piece(lambda m, x: x + m.e(torch.arange(T)[None]), e=Shifted(9, D)),
    ),
    "subclass_of_layer_norm": ("exact", lambda: Piece(lambda m, x: m.n(x.mT).mT, n=ChannelsFirst(D))),
    "subclass_of_linear": ("exact", lambda: Piece(lambda m, x: m.n(x), n=WithTerm(D, D))),
    "forward_hook": ("exact", hooked("register_forward_hook", lambda module, args, y: 2 * y.sin())),
    "forward_pre_hook": ("exact", hooked("register_forward_pre_hook", lambda module, args: (args[0].cos(),))),
    "backward_hook": ("exact", hooked("register_full_backward_hook", lambda module, gi, go: (3 * gi[0],))),
    "output_hook": ("exact", lambda: Piece(lambda m, x: with_hook(m.a(x)))),
    "functional_call_of_itself": (
        "exact",
        lambda: Piece(lambda m, x: torch.func.functional_call(m.a, dict(m.a.named_parameters()), (x,))),
    ),
    # the seven of which ClippedSum alone knows nothing
    "tied_through_functional": (
        "found",
        lambda: Piece(lambda m, x: m.a(x) + F.linear(x, m.positions.weight[:D]) + m.positions(ids(x))),
    ),
    "weight_used_directly": ("found", lambda: Piece(lambda m, x: m.a(x) @ m.a.weight)),
    "functional_dropout": ("found", lambda: Piece(lambda m, x: F.dropout(m.a(x), 0.01))),
    "batch_mean": ("found", lambda: Piece(lambda m, x: m.a(x) - m.a(x).mean(0, keepdim=True))),
    "sequence_first": ("refused", lambda: Piece(lambda m, x: m.a(x.transpose(0, 1)).transpose(0, 1))),
    "one_dimensional_positions": ("refused", lambda: Piece(lambda m, x: x + m.positions(torch.arange(x.shape[1])))),
    "past_its_hooks": ("found", lambda: Piece(lambda m, x: m.a(x) + m.a.forward(x).tanh())),
    # and more of their kind
    "small_part_directly": ("found", lambda: Piece(lambda m, x: m.a(x) + 1e-6 * F.linear(x, m.a.weight))),
    "weight_decay_in_the_loss": ("found", lambda: Piece(lambda m, x: m.a(x) + 1e-3 * m.a.weight.square().sum())),
    "parameter_in_a_closure": ("found", captured),
    "functional_call": (
        "found",
        lambda: Piece(lambda m, x: torch.func.functional_call(m.a, {"weight": 2 * m.a.weight}, (x,))),
    ),
    "detached_batch_mean": ("found", lambda: Piece(lambda m, x: m.a(x) - x.detach().mean(0))),
    "batch_softmax": ("found", lambda: Piece(lambda m, x: m.a(x).softmax(0))),
    "contrast": ("found", lambda: Piece(lambda m, x: m.a(x) + torch.einsum("btd,ctd->bc", x, x).sum(1)[:, None, None])),
    "cumsum_over_batch": ("found", lambda: Piece(lambda m, x: m.a(x.cumsum(0)))),
    "first_example_for_all": ("found", lambda: Piece(lambda m, x: m.a(x[:1].expand_as(x)))),
    "reversed_batch": ("found", lambda: Piece(lambda m, x: m.a(x.flip(0)).flip(0))),
    "sorted_batch": ("found", lambda: Piece(sorted_batch)),
    "rolled_batch": ("found", lambda: Piece(lambda m, x: m.norm(x.roll(2, 0)).roll(-2, 0))),
    "gradient_mixed": ("found", lambda: Piece(lambda m, x: m.a(x) + MixedGradient.apply(x))),
    "remembered": ("found", lambda: Piece(remembered)),
    "numpy_mask": ("found", lambda: Piece(lambda m, x: m.a(x) * (np.random.rand() < 0.99))),  # noqa: NPY002
    "stochastic_depth": ("found", lambda: Piece(depth)),
    "attention_dropout": (
        "found",
        lambda: Piece(lambda m, x: F.scaled_dot_product_attention(m.a(x), m.b(x), x, dropout_p=0.01)),
    ),
    "parameter_hook": (
        "found",
        tied(lambda m: m.a.weight.register_hook(lambda g: 2 * g), lambda m, x: m.a(x)),
    ),
    # what rules cannot express
    "layer_on_table": ("refused", lambda: Piece(lambda m, x: x * m.a(m.table[0, :2]).sum())),
    "layer_on_layer_of_shared_row": ("refused", lambda: Piece(lambda m, x: x * m.b(m.a(m.table)))),
    "windows": ("refused", lambda: Piece(windows)),
    "tokens_as_batch": ("refused", lambda: Piece(lambda m, x: m.a(x.flatten(0, 1)).view_as(x))),
    "routed": ("refused", lambda: Piece(routed)),
    "raw_matmul": ("refused", lambda: Piece(lambda m, x: x @ m.matrix)),
    "raw_einsum": ("refused", lambda: Piece(lambda m, x: torch.einsum("btd,de->bte", x, m.matrix))),
    "changed_in_place": ("refused", lambda: Piece(changed_in_place)),
    "relu_in_place": ("refused", lambda: Piece(lambda m, x: m.r(m.a(x)), r=nn.ReLU(inplace=True))),
    "reentrant_checkpoint": (
        "refused",
        lambda: Piece(lambda m, x: checkpoint(lambda x: m.a(x), x, use_reentrant=True)),
    ),
    "vmap": ("refused", lambda: Piece(lambda m, x: torch.func.vmap(m.a)(x))),
    "energy": ("refused", lambda: Piece(energy)),
    "weight_norm": ("refused", lambda: Piece(lambda m, x: m.n(x), n=parametrizations.weight_norm(nn.Linear(D, D)))),
    "spectral_norm": ("refused", lambda: Piece(lambda m, x: m.n(x), n=parametrizations.spectral_norm(nn.Linear(D, D)))),
    "old_weight_norm": ("refused", lambda: Piece(lambda m, x: m.n(x), n=nn.utils.weight_norm(nn.Linear(D, D)))),
    "subclass_of_conv": ("refused", lambda: Piece(lambda m, x: m.c(x.mT).mT, c=Standardised(D, D, 3))),
    "multihead_attention": (
        "refused",
        lambda: Piece(lambda m, x: m.m(x, x, x)[0], m=nn.MultiheadAttention(D, 2, batch_first=False)),
    ),
    "encoder_layer": (
        "refused",
        lambda: Piece(lambda m, x: m.m(x), m=nn.TransformerEncoderLayer(D, 2, 8, 0.0, batch_first=True)),
    ),
    "lstm": ("refused", lambda: Piece(lambda m, x: m.m(x)[0], m=nn.LSTM(D, D, batch_first=True))),
    "batch_norm": ("refused", lambda: Piece(lambda m, x: m.m(x.mT).mT, m=nn.BatchNorm1d(D))),
}


class MixedGradient(torch.autograd.Function):
    """The loss says nothing of it: only the gradient of an example reaches the others."""

    @staticmethod
    def forward(ctx: object, x: Tensor) -> Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: object, g: Tensor) -> Tensor:
        return g.flip(0)


def with_hook(y: Tensor) -> Tensor:
    if y.requires_grad:
        y.register_hook(lambda g: 2 * g.tanh())
    return y


def ids(x: Tensor) -> Tensor:
    return (x[..., 0].detach() > 0).long()
