"""Which models have passed the self-check (selfcheck.py), and in which shape; `ClippedSum` asks before every micro-batch."""

import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn

from privacy.errors import PrivacyConfigError

Task = Callable[..., Tensor]

HOW = (
    "call privacy.clipping.selfcheck.check_against_autograd(model, made_up_inputs) before the first micro-batch, on made-up "
    "examples and never on private data; self_check=False is for a model of which a copy has passed"
)


@dataclass(frozen=True)
class _Passed:
    """What a model was when it passed.

    Attributes:
        task: a weak reference, because a task usually refers to its model.
    """

    wiring: object
    input_names: frozenset[str]
    task: weakref.ref[Any]


_PASSED: weakref.WeakKeyDictionary[nn.Module, list[_Passed]] = weakref.WeakKeyDictionary()


def note_passed(model: nn.Module, task: Task, inputs: Mapping[str, Tensor]) -> None:
    """The model, as it is now, has passed with this task and inputs of these names."""
    reference = weakref.WeakMethod(task) if inspect.ismethod(task) else weakref.ref(task)
    _PASSED.setdefault(model, []).append(_Passed(_wiring(model), frozenset(inputs), reference))


def require_passed(model: nn.Module, task: Task, inputs: Mapping[str, Tensor]) -> None:
    """Only the names of the inputs are looked at, never their values.

    Raises:
        PrivacyConfigError: the model has not passed the self-check, or has changed since, or passed with something else.
    """
    passed = _PASSED.get(model, [])
    if not passed:
        raise PrivacyConfigError(f"this {type(model).__name__} has not passed the self-check: {HOW}")
    passed = [p for p in passed if p.task() == task]
    if not passed:
        raise PrivacyConfigError(
            "the task of this micro-batch is not the one that passed the self-check, so its loss may mix examples: give the "
            f"same object to check_against_autograd(model, made_up_inputs, task) and to add_micro_batch; {HOW}"
        )
    passed = [p for p in passed if p.input_names == frozenset(inputs)]
    if not passed:
        raise PrivacyConfigError(
            f"the self-check has not seen inputs named {', '.join(sorted(inputs))}, which may take another way through the "
            f"model: {HOW}"
        )
    wiring = _wiring(model)
    if all(p.wiring != wiring for p in passed):
        raise PrivacyConfigError(
            "since the self-check, layers were exchanged, frozen or unfrozen, or model.train() or model.eval() was called: "
            f"check the model as it is trained; {HOW}"
        )


def _wiring(model: nn.Module) -> object:
    """What may change the way of a gradient: the layers, their modes, and what is trained."""
    layers = tuple((path, type(module), module.training) for path, module in model.named_modules())
    return layers, tuple(name for name, p in model.named_parameters() if p.requires_grad)
