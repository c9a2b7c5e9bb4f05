"""Models whose loss or gradient for one example depends on others, and their neighbours of the same shapes that do not.

Each mechanism adds strength * mix(model, h) to activations h (B, T, D) and may do something else in the forward. The strengths
range over ten orders of magnitude, because a part of 1e-6 on made-up inputs is one of 1 where an example is a thousand times as
large. A mechanism over the tokens of each example is right, at any strength.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

D, T, V = 6, 5, 24
STRENGTHS = (1e-6, 1e-4, 1e-2, 1.0, 1e2, 1e4)


class Net(nn.Module):
    """Two linear layers around a mechanism; words instead of images, if `words`."""

    running: Tensor
    count: Tensor

    def __init__(self, mix: Callable[..., Tensor], strength: float, *, words: bool, narrow: bool = False) -> None:
        super().__init__()
        self.mix, self.strength, self.narrow, self.memory = mix, strength, narrow, 0.0
        self.cache: dict[Any, Tensor] = {}
        self.bank: list[Tensor] = []
        self.plain, self.calls = torch.zeros(50), 0
        self.table = nn.Embedding(V, D) if words else None
        self.before, self.norm, self.after = nn.Linear(D, D), nn.LayerNorm(D), nn.Linear(D, 2)
        self.experts = nn.ModuleList(nn.Linear(D, D) for _ in range(2))
        self.frozen = nn.Parameter(torch.zeros(D), requires_grad=False)
        self.register_buffer("running", torch.zeros(D))
        self.register_buffer("count", torch.zeros(V, dtype=torch.long))
        for p in self.experts.parameters():
            p.requires_grad_(mix in (capacity, experts_of_tokens, sorted_by_length, shortest_first))

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


def capacity(m: Net, h: Tensor) -> Tensor:
    """Experts take half of the micro-batch at most, and eight examples at least."""
    chosen, most = h[:, 0, 0] > 0, max(8, len(h) // 2)
    y = torch.zeros_like(h)
    for i, expert in enumerate(m.experts):
        mine = chosen == bool(i)
        kept = mine & (mine.cumsum(0) <= most)
        y = y + torch.where(kept[:, None, None], expert(h), 0)
    return y


def trimmed(m: Net, h: Tensor) -> Tensor:
    """Mean over as many tokens as the longest example has."""
    used = m.x.abs().flatten(2).sum(2) > 0 if m.x.dim() > 2 else m.x > 0
    longest = max(1, int(used.sum(1).max()))
    return h[:, :longest].mean(1, keepdim=True)


def share_of_tokens(m: Net, h: Tensor) -> Tensor:
    """Losses over the number of tokens of the whole micro-batch, as a mean over tokens has it."""
    return h * m.x.ne(0).double().mean().to(h.dtype)


def all_or_nothing(m: Net, h: Tensor) -> Tensor:
    """A micro-batch in which anything is not finite counts for nothing."""
    return h if h.isfinite().all() else torch.zeros_like(h)


def rounded_by_batch(m: Net, h: Tensor) -> Tensor:
    """8-bit numbers with one scale for the whole tensor."""
    scale = h.detach().abs().max() / 127
    return (h / scale).round() * scale


def remembered(m: Net, h: Tensor) -> Tensor:
    m.running.mul_(0.9).add_(0.1 * h.detach().mean((0, 1)))
    return h


def reassigned(m: Net, h: Tensor) -> Tensor:
    m.running = m.running + h.detach().mean((0, 1))
    return h


def counted(m: Net, h: Tensor) -> Tensor:
    m.count += torch.bincount(m.x.flatten(), minlength=V) if m.x.dim() == 2 else (h > 0).sum()
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


def calibrated(m: Net, h: Tensor) -> Tensor:
    """Statistics of the first call are kept."""
    if m.memory == 0.0:
        m.memory = float(h.detach().abs().amax())
    return h * m.memory


def calibrated_by_shape(m: Net, h: Tensor) -> Tensor:
    return h * m.cache.setdefault(h.shape, h.detach().abs().amax())


def calibrated_gradient(m: Net, h: Tensor) -> Tensor:
    """Statistics of the first backward."""

    def hook(g: Tensor) -> Tensor:
        m.memory = m.memory or float(g.abs().mean())
        return g * m.memory

    y = h * 1
    if y.requires_grad:
        y.register_hook(hook)
    return y


def bank(m: Net, h: Tensor) -> Tensor:
    """What the last fifty micro-batches were, once there have been fifty."""
    mean = torch.stack(m.bank).mean(0) if len(m.bank) == 50 else 1.0
    m.bank = [*m.bank[-49:], h.detach().mean((0, 1))]
    return h * mean


def written_to(m: Net, h: Tensor) -> Tensor:
    """A tensor that is no buffer."""
    m.plain.mul_(0.9).add_(float(h.detach().mean()))
    return h * float(m.plain[0])


def ring(m: Net, h: Tensor) -> Tensor:
    """The same in a table of fixed size, which is used when it is full."""
    m.plain[m.calls % len(m.plain)] = float(h.detach().mean())
    m.calls += 1
    return h * float(m.plain.mean()) if m.calls >= len(m.plain) else h


def guarded(m: Net, h: Tensor) -> Tensor:
    """Raises on what is not finite or large, so that only rows of other examples are left to find it."""
    if not bool(h.isfinite().all()) or float(m.x.abs().amax()) > 1e3:
        raise ValueError("what is this?")
    return h * h.detach().mean(0)


def guarded_memory(m: Net, h: Tensor) -> Tensor:
    if not bool(h.isfinite().all()) or float(m.x.abs().amax()) > 1e3:
        raise ValueError("what is this?")
    return python_memory(m, h)


def narrow_only(m: Net, h: Tensor) -> Tensor:
    """As code does that guards against overflow, where double precision needs no guard."""
    return h if h.dtype == torch.float64 else h / h.detach().abs().amax().clamp_min(1)


def sorted_by_length(m: Net, h: Tensor, *, descending: bool = True) -> Tensor:
    """Losses are right, and the layer sees the examples in another order."""
    used = m.x.abs().flatten(2).sum(2) > 0 if m.x.dim() > 2 else m.x > 0
    order = used.sum(1).argsort(descending=descending, stable=True)
    y: Tensor = m.experts[0](h[order])
    return y[order.argsort()] + m.experts[1](h)


def shortest_first(m: Net, h: Tensor) -> Tensor:
    return sorted_by_length(m, h, descending=False)


def hooked(m: Net, h: Tensor) -> Tensor:
    y = h * 1
    if y.requires_grad:
        y.register_hook(lambda g: g + g.mean(0))
    return y


def clipped_in_a_hook(m: Net, h: Tensor) -> Tensor:
    y = h * 1
    if y.requires_grad:
        y.register_hook(lambda g: g / g.norm())
    return y


def in_place_on_a_copy(m: Net, h: Tensor) -> Tensor:
    y = h * 1
    y[1:] += h[:-1].detach()
    return y


def loss_like(m: Net, h: Tensor) -> Tensor:
    loss_B = h.square().sum((1, 2))
    return (loss_B / (1e-3 + loss_B.mean()))[:, None, None] * h


WRONG: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "batch_mean": lambda m, h: h.mean(0),
    "mean_of_detached": lambda m, h: h.detach().mean(0) * h,
    "mean_of_data": lambda m, h: h.data.mean(0) * h,
    "load": lambda m, h: h.detach().square().mean() * h,
    "batch_norm": lambda m, h: normalised(h, 0),
    "batch_norm_over_tokens_too": lambda m, h: normalised(h, (0, 1)),
    "loss_over_its_mean": loss_like,
    "attention_over_the_batch": lambda m, h: attention(h.transpose(0, 1)).transpose(0, 1),
    "attention_over_everything": lambda m, h: attention(h.flatten(0, 1)).view_as(h),
    "similarity": lambda m, h: (h.flatten(1) @ h.flatten(1).T).softmax(1).sum(1)[:, None, None] * h.mean(0),
    "softmax": lambda m, h: h.softmax(0),
    "logsumexp": lambda m, h: h.logsumexp(0),
    "largest": lambda m, h: h.amax(0),
    "sorted": lambda m, h: h.sort(0).values,
    "rank": lambda m, h: h[:, 0, 0].argsort().argsort()[:, None, None] * h,
    "median": lambda m, h: (h > h.median(0).values) * h,
    "top_two": lambda m, h: (h >= h.topk(min(2, len(h)), 0).values[-1]) * h,
    "above_the_mean": lambda m, h: (h > h.detach().mean()).to(h.dtype),
    "running_sum": lambda m, h: h.cumsum(0),
    "first": lambda m, h: h[:1].expand_as(h),
    "last": lambda m, h: h[-1:] * h,
    "previous": lambda m, h: h.roll(1, 0),
    "reversed": lambda m, h: h.flip(0),
    "flattened_mean": lambda m, h: h.mean(),
    "as_numpy": lambda m, h: torch.from_numpy(np.asarray(h.detach().double().mean(0).numpy())).to(h.dtype) * h,
    "as_a_number": lambda m, h: h * float(h.detach().mean()),
    "nan_ignored": lambda m, h: h * h.detach().nan_to_num(0, 0, 0).mean(0),
    "scale_of_the_tensor": rounded_by_batch,
    "capacity": capacity,
    "trimmed": trimmed,
    "share_of_tokens": share_of_tokens,
    "all_or_nothing": all_or_nothing,
    "remembered": remembered,
    "reassigned": reassigned,
    "counted": counted,
    "frozen_average": frozen_average,
    "new_buffer": new_buffer,
    "python_memory": python_memory,
    "calibrated": calibrated,
    "calibrated_by_shape": calibrated_by_shape,
    "calibrated_gradient": calibrated_gradient,
    "bank": bank,
    "written_to": written_to,
    "guarded": guarded,
    "guarded_memory": guarded_memory,
    "narrow_only": narrow_only,
    "ring": ring,
    "sorted_by_length": sorted_by_length,
    "shortest_first": shortest_first,
    "gradient_of_neighbour": lambda m, h: GradientOfNeighbour.apply(h),
    "gradient_hook": hooked,
    "gradient_clipped": clipped_in_a_hook,
    "in_place_on_a_copy": in_place_on_a_copy,
}


def experts_of_tokens(m: Net, h: Tensor) -> Tensor:
    """Every token goes through both, and counts for one."""
    return torch.where(h[..., :1] > 0, m.experts[0](h), m.experts[1](h))


def keeps_the_last(m: Net, h: Tensor) -> Tensor:
    """For whoever looks; no forward reads it."""
    m.memory, m.cache["last"] = m.memory + 1, h.detach()
    return h


def guarded_and_right(m: Net, h: Tensor) -> Tensor:
    if not bool(h.isfinite().all()) or float(m.x.abs().amax()) > 1e3:
        raise ValueError("what is this?")
    return h


RIGHT: dict[str, Callable[[Net, Tensor], Tensor]] = {
    "nothing": lambda m, h: h,
    "token_mean": lambda m, h: h.mean(1, keepdim=True),
    "detached_mean": lambda m, h: h.detach().mean((1, 2), keepdim=True) * h,
    "load": lambda m, h: h.detach().square().mean((1, 2), keepdim=True) * h,
    "norm_by_hand": lambda m, h: normalised(h, 2),
    "attention": lambda m, h: attention(h),
    "softmax": lambda m, h: h.softmax(1),
    "logsumexp": lambda m, h: h.logsumexp(1, keepdim=True),
    "sorted": lambda m, h: h.sort(1).values,
    "median": lambda m, h: (h > h.median(2, keepdim=True).values) * h,
    "running_sum": lambda m, h: h.cumsum(1),
    "first_token": lambda m, h: h[:, :1].expand_as(h),
    "reversed_tokens": lambda m, h: h.flip(1),
    "experts": experts_of_tokens,
    "own_scale": lambda m, h: h / h.detach().abs().amax((1, 2), keepdim=True),
    "scatter": lambda m, h: torch.zeros_like(h).index_add(1, torch.arange(T) // 2, h),
    "own_copy_in_place": lambda m, h: (h * 1).add_(1),
    "random_but_fixed": lambda m, h: h * torch.linspace(0, 1, D, dtype=h.dtype),
    "table": lambda m, h: h * m.frozen + m.running,
    "cached_table": lambda m, h: h * m.cache.setdefault(h.shape, torch.linspace(0, 1, D)).to(h.dtype),
    "last_seen": keeps_the_last,
    "guarded": guarded_and_right,
}
