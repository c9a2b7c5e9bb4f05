"""What changes on registered modules after the self-check is noticed; layers may be reached in other ways too."""

from collections import deque
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from privacy.clipping import ClippedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyConfigError
from tests.privacy.clipping.test_selfcheck import Net, add, made_up


class Loss(nn.Module):
    """A task that is a module of its own."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model, self.drop = model, nn.Dropout(0.0)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.drop(self.model(x))
        return y


@pytest.mark.parametrize(
    "change", ["global hook", "hook at a reused address", "mode of the task", "setting of the task"]
)
def test_changes_outside_of_the_model_are_noticed_too(change: str) -> None:
    model = Net()
    task, first = Loss(model), model.a.register_forward_hook(lambda m, args, y: None)
    check_against_autograd(model, made_up(), task)
    if change == "global hook":
        first = nn.modules.module.register_module_forward_hook(lambda m, args, y: None)
    elif change == "mode of the task":
        task.eval()
    elif change == "setting of the task":
        task.drop.p = 0.5
    else:
        first.remove()
        model.a.register_forward_hook(lambda m, args, y: 2 * y)
    try:
        with pytest.raises(PrivacyConfigError, match="since the self-check"):
            add(ClippedSum(model, 1.0), task, x=torch.randn(3, 4))
    finally:
        first.remove()


class Kept(Net):
    """A model that keeps things, some of which its forward moves."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.zeros(2))
        self.config, self.cache = SimpleNamespace(calls=0), {"flag": torch.zeros(2)}
        self.calls, self.seen = 0, deque[int](maxlen=1)

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.config.calls = self.calls + 1, self.config.calls + 1
        self.last = x
        self.register_buffer("shift", torch.zeros_like(x[:, :1]), persistent=False)
        if not self.seen:
            self.b.register_forward_hook(lambda m, args, y: self.seen.append(len(y)))
        return super().forward(x)


CHANGES: dict[str, Callable[[Any], object]] = {
    "value of a buffer": lambda m: m.flag.fill_(1),
    "part of a buffer": lambda m: m.flag[0].add_(1),
    "another buffer": lambda m: setattr(m, "flag", torch.zeros(2)),
    "hook of a weight": lambda m: m.a.weight.register_hook(lambda g: 2 * g),
    "hook after a weight": lambda m: m.a.weight.register_post_accumulate_grad_hook(lambda p: None),
    "another layer": lambda m: m.add_module("adapter", nn.Identity()),
    "a layer around another": lambda m: setattr(m, "a", nn.Sequential(m.a)),
    "frozen": lambda m: m.a.requires_grad_(False),
    "class of a layer": lambda m: setattr(m.a, "__class__", type("Other", (nn.Linear,), {})),
    "state_dict": lambda m: m.load_state_dict(m.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_beside_what_the_forward_moves_is_noticed(change: str) -> None:
    model = Kept()
    check_against_autograd(model, made_up())
    total = ClippedSum(model, 1.0)
    for _ in range(3):
        add(total, model, x=torch.randn(3, 4))
    CHANGES[change](model)
    with pytest.raises(PrivacyConfigError, match="since the self-check"):
        add(total, model, x=torch.randn(3, 4))


WAYS: dict[str, Callable[[Any], object]] = {
    "list": lambda m: setattr(m, "parts", [m.a, m.b]),
    "tuple": lambda m: setattr(m, "parts", (m.a, m.b)),
    "dict": lambda m: setattr(m, "parts", {"a": m.a, "b": {"b": [m.b]}}),
    "object": lambda m: setattr(m, "holder", SimpleNamespace(layer=m.a)),
    "plain attribute": lambda m: object.__setattr__(m, "first", m.a),
    "plain attribute of a layer": lambda m: object.__setattr__(m.b, "owner", m),
    "a function": lambda m: setattr(m, "get", lambda: m.b),
    "a bound method": lambda m: setattr(m, "call", m.a.forward),
    "the class": lambda m: setattr(type(m), "shared", [m.a]),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("early", [False, True])
def test_a_layer_that_is_reached_in_other_ways_too_is_trained(way: str, early: bool) -> None:
    """Early: the attribute is there before the layers are registered."""

    class Reached(Net):
        def __init__(self) -> None:
            if early:
                self.parts = self.holder = self.get = self.call = None
            super().__init__()

    model = Reached()
    WAYS[way](model)
    check_against_autograd(model, made_up())
    total = ClippedSum(model, 1.0)
    for _ in range(2):
        add(total, model, x=torch.randn(3, 4))
    add(ClippedSum(model, 1.0), model, x=torch.randn(3, 4))


def test_a_first_use_of_the_compiler_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wraps how modules are made, wherever in the program it comes: before the check, in it or after it."""
    usual = nn.Module.__init__
    model = Net()
    check_against_autograd(model, made_up())
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **more: usual(self, *args, **more))
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    add(ClippedSum(model, 1.0), model, x=torch.randn(3, 4))


def test_a_change_of_weights_is_training() -> None:
    """Wherever else the model or its task holds them."""
    model = Kept()
    model.cache["weight"] = weight = model.a.weight

    def task(x: Tensor) -> Tensor:
        assert weight is model.a.weight
        y: Tensor = model(x)
        return y

    check_against_autograd(model, made_up(), task)
    total = ClippedSum(model, 1.0)
    for p in model.parameters():
        p.data.mul_(0.5)
        with torch.no_grad():
            p.sub_(0.1)
        add(total, task, x=torch.randn(3, 4))
