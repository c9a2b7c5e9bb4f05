"""What a model's own backward writes, or repeats differently, never parts the norm from what is summed: it is refused.

The self-check passes on these models, because the made-up inputs have other sizes or values; so the sum itself must notice.
"""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.clipping.checked import writes_to
from privacy.errors import PrivacyConfigError


class ReusesItsOutput(torch.autograd.Function):
    """The gradient is computed into the activation, which the next layer's gradient still needs."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        y = x.exp()
        ctx.kept = y.detach()
        return y

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Tensor:
        kept: Tensor = ctx.kept
        return kept.mul_(gradients[0])


class Activation(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.last(ReusesItsOutput.apply(self.first(x) * 0.1)).sum((1, 2))
        return loss


class SharedGradient(nn.Module):
    """Both layers are handed one gradient, which a hook then cuts off in place."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.other = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.clamp_(-1, 1))
        loss: Tensor = (3 * (h + self.other(x))).sum((1, 2))
        return loss


class Shift(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.shift = nn.Parameter(torch.zeros(3, 64))

    def forward(self, x: Tensor) -> Tensor:
        return x + self.shift


class SharedWithAParameter(nn.Module):
    """As `SharedGradient`, with a parameter of few numbers: their norms are taken all at once, after the hook."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), Shift()

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x) * 1
        if h.requires_grad:
            h.register_hook(lambda gradient: gradient.mul_(1e-3))
        loss: Tensor = (3 * self.last(h)).sum((1, 2))
        return loss


class ConsumedByItsBackward(nn.Module):
    """As fused losses do; a second backward of the same graph finds another gradient there."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = (3 * ReusesItsOutput.apply(self.layer(x) * 0.1)).sum((1, 2))
        return loss


class ScalesItsInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        loss: Tensor = self.layer(x.mul_(30)).sum((1, 2))
        return loss


class DifferentiatesInAHook(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, 64), nn.Linear(64, 64)

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        y = self.last(h)
        total, z = y.sum(), y * 1
        if z.requires_grad:
            z.register_hook(lambda gradient: gradient + 0 * torch.autograd.grad(total, h, retain_graph=True)[0])
        loss: Tensor = z.sum((1, 2))
        return loss


def read_sums(clipped: ClippedSum, model: nn.Module) -> None:
    """The refusal comes at the latest before a sum can be read."""
    clipped.add_micro_batch(model, {"x": torch.randn(4, 3, 64)}, torch.zeros(4, dtype=torch.bool))
    list(clipped.sums())


@pytest.mark.parametrize(
    ("make", "mode", "message"),
    [
        (Activation, "bookkeeping", "writes in place"),
        (SharedGradient, "bookkeeping", "writes in place"),
        (SharedWithAParameter, "bookkeeping", "writes in place"),
        (SharedWithAParameter, "two_pass", "writes in place"),
        (ConsumedByItsBackward, "two_pass", "the second time"),
        (ScalesItsInput, "two_pass", "writes in place"),
        (DifferentiatesInAHook, "bookkeeping", "more gradients"),
        (DifferentiatesInAHook, "two_pass", "more gradients|second time"),
    ],
)
def test_it_is_refused(make: Callable[[], nn.Module], mode: Any, message: str) -> None:
    torch.manual_seed(0)
    model = make()
    clipped = ClippedSum(model, 1.0, mode=mode, self_check=False)
    if make is ScalesItsInput:
        clipped._keeps_graph = False  # as where weights are sharded or compiled: two forwards of one input
    with pytest.raises(PrivacyConfigError, match=message):
        read_sums(clipped, model)


def test_the_count_of_writes_is_shared_by_views() -> None:
    """torch's `_version`, on which the refusals stand."""
    base = torch.zeros(4, 4)
    view = base.detach().view(16)
    before = writes_to(view)
    base.add_(1)
    assert writes_to(view) == before + 1
    with torch.inference_mode():
        assert writes_to(torch.zeros(2)) == 0
