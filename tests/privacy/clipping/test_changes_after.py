"""What is changed after the self-check is noticed, wherever it lies."""

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


@pytest.mark.parametrize("change", ["class", "global hook", "hook at a reused address", "task"])
def test_changes_outside_of_the_model_are_noticed_too(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    class Loss(nn.Module):
        def __init__(self, model: nn.Module) -> None:
            super().__init__()
            self.model, self.contrast = model, False

        def forward(self, x: Tensor) -> Tensor:
            y: Tensor = self.model(x)
            return y

    model = Net()
    task, first = Loss(model), model.a.register_forward_hook(lambda m, args, y: None)
    check_against_autograd(model, made_up(), task)
    if change == "class":
        monkeypatch.setattr(Net, "forward", lambda self, x: self.b(self.a(x)).sum(1))
    elif change == "global hook":
        first = nn.modules.module.register_module_forward_hook(lambda m, args, y: None)
    elif change == "task":
        task.contrast = True
    else:
        first.remove()
        model.a.register_forward_hook(lambda m, args, y: 2 * y)
    try:
        with pytest.raises(PrivacyConfigError, match="since the self-check"):
            add(ClippedSum(model, 1.0), task, x=torch.randn(3, 4))
    finally:
        first.remove()


SWITCH = False


class Kept(Net):
    """A model that keeps things, some of which its forward moves."""

    kind = 0

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("flag", torch.zeros(2))
        self.plain, self.cache = torch.zeros(2), {"flag": torch.zeros(2)}
        self.config = SimpleNamespace(calls=0, mix=False, sizes=[1, 2])
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls, self.config.calls = self.calls + 1, self.config.calls + 1
        self.last = x
        return super().forward(x) + (1.0 if SWITCH else 0.0)


def switch(_: Kept) -> None:
    globals()["SWITCH"] = True


CHANGES: dict[str, Callable[[Any], object]] = {
    "value of a buffer": lambda m: m.flag.fill_(1),
    "part of a buffer": lambda m: m.flag[0].add_(1),
    "another buffer": lambda m: setattr(m, "flag", torch.zeros(2)),
    "value of a tensor": lambda m: m.plain.fill_(1),
    "another tensor": lambda m: setattr(m, "plain", torch.zeros(2)),
    "tensor in a dict": lambda m: m.cache["flag"].add_(1),
    "hook of a weight": lambda m: m.a.weight.register_hook(lambda g: 2 * g),
    "hook after a weight": lambda m: m.a.weight.register_post_accumulate_grad_hook(lambda p: None),
    "next to a counter": lambda m: setattr(m.config, "mix", True),
    "list next to a counter": lambda m: m.config.sizes.append(3),
    "kind of a counter": lambda m: setattr(m, "calls", "many"),
    "class": lambda m: setattr(Kept, "kind", 1),
    "global variable": switch,
    "state_dict": lambda m: m.load_state_dict(m.state_dict()),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_beside_what_the_forward_moves_is_noticed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Kept, "kind", 0)
    monkeypatch.setitem(globals(), "SWITCH", False)
    model = Kept()
    check_against_autograd(model, made_up())
    total = ClippedSum(model, 1.0)
    for _ in range(3):
        add(total, model, x=torch.randn(3, 4))
    CHANGES[change](model)
    with pytest.raises(PrivacyConfigError, match="since the self-check"):
        add(total, model, x=torch.randn(3, 4))


def test_a_first_use_of_the_compiler_is_no_change(monkeypatch: pytest.MonkeyPatch) -> None:
    """It wraps how modules are made, wherever in the program it comes: before the check, in it or after it."""
    usual = nn.Module.__init__
    model = Net()
    check_against_autograd(model, made_up())
    monkeypatch.setattr(nn.Module, "__init__", lambda self, *args, **more: usual(self, *args, **more))
    monkeypatch.setattr(nn.Module, "___needs_generation_tag_patch", True, raising=False)
    add(ClippedSum(model, 1.0), model, x=torch.randn(3, 4))
    monkeypatch.setattr(nn.Module, "__call__", lambda self, x: self.forward(x))
    with pytest.raises(PrivacyConfigError, match="since the self-check"):
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
