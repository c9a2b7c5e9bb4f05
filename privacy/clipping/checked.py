"""Which models have passed the self-check (selfcheck.py), and in which shape; `ClippedSum` asks before every micro-batch."""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from privacy.errors import PrivacyConfigError

Task = Callable[..., Tensor]
Place = tuple[str, str]
"""Path of a module, and an attribute of it."""
Structure = dict[Place, object]
SIMPLE = frozenset([bool, int, float, str, type(None), torch.dtype])
FUNCTIONS = frozenset([types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial])

HOW = (
    "call privacy.clipping.selfcheck.check_against_autograd(model, made_up_inputs) before the first micro-batch, on made-up "
    "examples and never on private data; self_check=False is for a model of which a copy has passed"
)


@dataclass(frozen=True)
class _Passed:
    """What a model was when it passed.

    Attributes:
        structure: of the model.
        moving: entries of it that its own forward changes, such as a counter of calls.
        task: a weak reference, because a task usually refers to its model.
    """

    structure: "Structure"
    moving: frozenset[Place]
    input_names: frozenset[str]
    task: weakref.ref[Any]


_PASSED: weakref.WeakKeyDictionary[nn.Module, list[_Passed]] = weakref.WeakKeyDictionary()


def note_passed(
    model: nn.Module, task: Task, inputs: Mapping[str, Tensor], before: Structure, after: Structure
) -> None:
    """The model has passed with this task and inputs of these names; it had these structures before and after forwards."""
    reference = weakref.WeakMethod(task) if inspect.ismethod(task) else weakref.ref(task)
    moving = frozenset(_differing(before, after))
    _PASSED.setdefault(model, []).append(_Passed(before, moving, frozenset(inputs), reference))


def require_passed(model: nn.Module, task: Task, inputs: Mapping[str, Tensor], made_for: list[object]) -> None:
    """Only the names of the inputs are looked at, never their values.

    Args:
        made_for: `trained(model)` when the clipper was made.

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
    now = structure(model)
    changed = [[place for place in _differing(p.structure, now) if place not in p.moving] for p in passed]
    if all(changed):
        module, attribute = changed[-1][0]
        raise PrivacyConfigError(
            f"since the self-check, {f'{module}.{attribute}'.strip('.') or 'the model'} has changed (layers were exchanged, "
            "frozen or unfrozen, given a hook or another attribute, or model.train() or model.eval() was called): check the "
            f"model as it is trained; {HOW}"
        )
    if trained(model) != made_for:
        raise PrivacyConfigError(
            "since this sum was made, parameters of its model were frozen, unfrozen, exchanged or given another dtype: make a "
            "new one"
        )


def structure(model: nn.Module) -> Structure:
    """What may change the way of a value or a gradient through the model, without any look at values of tensors.

    These are the modules, their attributes that are plain values or functions, their hooks, and their parameters with
    whether they are trained. Hooks of clipping itself do not count.
    """
    found: Structure = {}
    for path, module in model.named_modules():
        found[path, ""] = (type(module), id(module))
        for name, value in vars(module).items():
            kind = type(value)
            if kind in SIMPLE or (kind is tuple and all(type(x) in SIMPLE for x in value)):
                found[path, name] = value
            elif kind in FUNCTIONS:
                found[path, name] = id(value)
            elif name.endswith(("ward_hooks", "ward_pre_hooks")):
                found[path, name] = [id(hook) for hook in value.values() if not _is_ours(hook)]
        for name, p in module.named_parameters(recurse=False):
            found[path, name] = (id(p), p.requires_grad, p.dtype)
    return found


def trained(model: nn.Module) -> list[object]:
    """The parameters that a clipper of this model, as it is now, is made for."""
    return [(id(p), p.dtype) for p in model.parameters() if p.requires_grad]


def _is_ours(hook: object) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).startswith("privacy.clipping.")


def _differing(x: Structure, y: Structure) -> list[Place]:
    return [place for place in {**x, **y} if x.get(place, _NOTHING) != y.get(place, _NOTHING)]


_NOTHING = object()
