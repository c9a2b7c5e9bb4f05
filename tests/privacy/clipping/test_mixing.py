"""The self-check decides: whatever lets one example reach another is refused at any strength, what does not is accepted.

Each mechanism adds strength * mix(model, h) to activations h (B, T, D) and may do something else in the forward. The strengths
range over ten orders of magnitude, because a part of 1e-6 on made-up inputs is one of 1 where an example is a thousand times as
large. A mechanism over the tokens of each example is right, at any strength.
"""

import random
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError

D, T, V = 6, 5, 24
STRENGTHS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4)


class Net(nn.Module):
    """Two linear layers around a mechanism; words instead of images, if `words`."""

    running: Tensor

    def __init__(self, mix: Callable[..., Tensor], strength: float, *, words: bool, narrow: bool = False) -> None:
        super().__init__()
        self.mix, self.strength, self.narrow, self.memory = mix, strength, narrow, 0.0
        self.cache: dict[Any, Tensor] = {}
        self.table = nn.Embedding(V, D) if words else None
        self.before, self.norm, self.after = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.frozen = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.register_buffer("running", torch.zeros(D))
        for p in self.experts.parameters():
            p.requires_grad_(mix in (capacity, experts_of_tokens, sorted_by_length))

    def forward(self, x: Tensor) -> Tensor:
        self.x = x
        h = self.table(x) if self.table is not None else x
        h = self.norm(self.before(h).tanh() + h)
        h = h + self.strength * self.mix(self, h)
        if self.narrow:
            h = (h.float() * 1.5).to(h.dtype)
        return self.after(h).sin().flatten(1).sum(1)


def made_up(count: int, *, words: bool, dtype: torch.dtype = torch.float32) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(count)
    if words:
        return {"x": torch.randint(1, V, (count, T), generator=generator)}
    return {"x": torch.randn(count, T, D, generator=generator).to(dtype)}


class GradientOfNeighbour(torch.autograd.Function):
    """Only the backward mixes."""

    @staticmethod
    def forward(ctx: Any, h: Tensor) -> Tensor:
        return h * 0

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> Tensor:
        return g.roll(1, 0)


def normalised(h: Tensor, dim: int | tuple[int, ...]) -> Tensor:
    return (h - h.mean(dim, keepdim=True)) / (h.std(dim, keepdim=True, correction=0) + 1e-3)


def attention(h: Tensor) -> Tensor:
    """Over the second to last dimension."""
    return F.scaled_dot_product_attention(h, h, h)


def lengths(x: Tensor) -> Tensor:
    return ((x.abs().flatten(2).sum(2) > 0) if x.dim() > 2 else x > 0).sum(1)


def capacity(m: Net, h: Tensor) -> Tensor:
    """Experts take half of the micro-batch at most."""
    chosen, most = h[:, 0, 0] > 0, len(h) // 2
    y = torch.zeros_like(h)
    for i, expert in enumerate(m.experts):
        mine = chosen == bool(i)
        kept = mine & (mine.cumsum(0) <= most)
        y = y + torch.where(kept[:, None, None], expert(h), 0)
    return y


def trimmed(m: Net, h: Tensor) -> Tensor:
    """Mean over as many tokens as the longest example has."""
    return h[:, : max(1, int(lengths(m.x).max()))].mean(1, keepdim=True)


def sorted_by_length(m: Net, h: Tensor) -> Tensor:
    """Losses are right, and the layer sees the examples in another order."""
    order = lengths(m.x).argsort(descending=True, stable=True)
    y: Tensor = m.experts[0](h[order])
    return y[order.argsort()] + m.experts[1](h)


def rounded_by_batch(m: Net, h: Tensor) -> Tensor:
    """8-bit numbers with one scale for the whole tensor."""
    scale = h.detach().abs().max() / 127
    return (h / scale).round() * scale


def remembered(m: Net, h: Tensor) -> Tensor:
    m.running.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h


def frozen_average(m: Net, h: Tensor) -> Tensor:
    m.frozen.data.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h


def new_buffer(m: Net, h: Tensor) -> Tensor:
    m.register_buffer("last", h.detach().mean((0, 1)))
    return h


def python_memory(m: Net, h: Tensor) -> Tensor:
    before, m.memory = m.memory, float(h.detach().mean())
    return h * before


def calibrated_by_shape(m: Net, h: Tensor) -> Tensor:
    """Statistics of the first call of a shape are kept."""
    return h * m.cache.setdefault(h.shape, h.detach().abs().amax())


def guarded(m: Net, h: Tensor) -> Tensor:
    """Raises on what is not finite or large, so that only rows of other examples are left to find what mixes."""
    if not bool(h.isfinite().all()) or float(m.x.abs().amax()) > 1e3:
        raise ValueError("what is this?")
    return h


def narrow_only(m: Net, h: Tensor) -> Tensor:
    """As code does that guards against overflow, where double precision needs no guard."""
    return h if h.dtype == torch.float64 else h / h.detach().abs().amax().clamp_min(1)


def hooked(m: Net, h: Tensor) -> Tensor:
    y = h * 1
    if y.requires_grad:
        y.register_hook(lambda g: g + g.mean(0))
    return y


WRONG: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "mean_of_detached": lambda m, h: h.detach().mean(0) * h,
    "batch_norm": lambda m, h: normalised(h, (0, 1)),
    "attention": lambda m, h: attention(h.transpose(0, 1)).transpose(0, 1),
    "softmax": lambda m, h: h.softmax(0),
    "previous": lambda m, h: h.roll(1, 0),
    "nan_ignored": lambda m, h: h * h.detach().nan_to_num(0, 0, 0).mean(0),
    "all_or_nothing": lambda m, h: h if h.isfinite().all() else torch.zeros_like(h),
    "scale_of_the_tensor": rounded_by_batch,
    "capacity": capacity,
    "trimmed": trimmed,
    "sorted_by_length": sorted_by_length,
    "remembered": remembered,
    "frozen_average": frozen_average,
    "new_buffer": new_buffer,
    "python_memory": python_memory,
    "calibrated_by_shape": calibrated_by_shape,
    "guarded": lambda m, h: guarded(m, h) * h.detach().mean(0),
    "narrow_only": narrow_only,
    "gradient_of_neighbour": lambda m, h: GradientOfNeighbour.apply(h),
    "gradient_hook": hooked,
}
LIMITS = ("capacity", "trimmed")
"""What they do is seen in losses only, to 1e-3 where values are narrowed to float32."""


def experts_of_tokens(m: Net, h: Tensor) -> Tensor:
    """Every token goes through both, and counts for one."""
    return torch.where(h[..., :1] > 0, m.experts[0](h), m.experts[1](h))


def keeps_the_last(m: Net, h: Tensor) -> Tensor:
    """For whoever looks; no forward reads it."""
    m.memory, m.cache["last"] = m.memory + 1, h.detach()
    return h


RIGHT: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "token_mean": lambda m, h: h.detach().mean((1, 2), keepdim=True) * h,
    "norm_by_hand": lambda m, h: normalised(h, 2),
    "attention": lambda m, h: attention(h),
    "experts": experts_of_tokens,
    "own_scale": lambda m, h: h / h.detach().abs().amax((1, 2), keepdim=True),
    "own_copy_in_place": lambda m, h: (h * 1).add_(1),
    "cached_table": lambda m, h: h * m.cache.setdefault(h.shape, torch.linspace(0, 1, D)).to(h.dtype),
    "last_seen": keeps_the_last,
    "guarded": guarded,
}


def cases(names: Iterable[str], seed: int, *, every: bool) -> list[tuple[str, float, bool, bool]]:
    """(mechanism, strength, words or not, fp32 inside or not): all of them, or one of each mechanism."""
    draw = random.Random(seed)
    ways = [(s, w, f) for s in STRENGTHS for w in (False, True) for f in (False, True)]
    return [(name, *way) for name in names for way in (ways if every else [draw.choice(ways)])]


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_mixes_examples_is_refused_at_any_strength(every: bool) -> None:
    passed = []
    for mix, strength, words, narrow in cases(WRONG, 1, every=every):
        if narrow and mix in LIMITS:
            continue
        torch.manual_seed(0)
        model = Net(WRONG[mix], strength, words=words, narrow=narrow)
        try:
            check_against_autograd(model, made_up(6, words=words))
        except PrivacyConfigError:
            continue
        passed.append((mix, strength, words, narrow))
    assert not passed, passed


@pytest.mark.parametrize("every", [False, pytest.param(True, marks=pytest.mark.full)])
def test_what_keeps_examples_apart_is_accepted_at_any_strength(every: bool) -> None:
    for dtype in (torch.float32, torch.bfloat16):
        for mix, strength, words, narrow in cases(RIGHT, 2, every=every):
            torch.manual_seed(0)
            model = Net(RIGHT[mix], strength, words=words, narrow=narrow).to(dtype)
            check_against_autograd(model, made_up(3, words=words, dtype=dtype))
