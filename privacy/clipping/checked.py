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
SIMPLE = frozenset([bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size])
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
TABLES = frozenset(["_parameters", "_buffers", "_modules"])
"""Attributes of modules that are looked at in another way."""
DEPTH = 8
"""Containers and objects in others are looked into so often."""
MOST_VALUES = 50_000
"""So many values are looked at, so that a model that holds a data set does not make every micro-batch wait."""

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
    now = structure(model, task)
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


def structure(model: nn.Module, task: object = None) -> Structure:
    """What may change the way of a value or a gradient through the model, without any look at values of tensors.

    These are the modules, their attributes with what lies in lists, dicts and plain objects, their hooks and torch's global
    ones, the functions and values of their classes, and their parameters with whether they are trained. Of a task that is
    another object or a function these are its attributes or the variables around it. Hooks of clipping itself do not count.
    """
    look = _Look()
    for path, module in model.named_modules():
        look.at_module(path, module)
    for name, table in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(table, dict):
            look.found["", name] = [_Same(hook) for hook in table.values() if not _is_ours(hook)]
    owner = getattr(task, "__self__", task)
    if isinstance(owner, nn.Module) and owner is not model:
        for path, module in owner.named_modules(prefix="task"):
            look.at_module(path, module)
    elif isinstance(owner, types.FunctionType):
        for name, cell in zip(owner.__code__.co_freevars, owner.__closure__ or (), strict=True):
            look.found["task", name] = look.into(_value(cell), DEPTH)
    elif owner is not None and owner is not model:
        for name, value in list(getattr(owner, "__dict__", {}).items()):
            look.found["task", name] = look.into(value, DEPTH)
        look.classes.update(dict.fromkeys(type(owner).__mro__))
    for kind in list(look.classes):
        if kind.__module__ not in ("builtins", "typing", "abc"):
            values = {name: x for name, x in vars(kind).items() if name not in UNIMPORTANT}
            place = "", f"class {kind.__qualname__}"
            look.found[place] = (look.found.get(place), {name: look.into(x, 2) for name, x in values.items()})
    return look.found


class _Same:
    """Equal for one object only, which it does not keep alive, and never for another at its address."""

    __slots__ = ("reference",)

    def __init__(self, x: object) -> None:
        try:
            self.reference: object = weakref.ref(x)  # the same reference as long as the object lives
        except TypeError:
            self.reference = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.reference is other.reference

    def __hash__(self) -> int:
        return id(self.reference)


class _Look:
    """One look at a model: what was found, the classes that were met, and what each object that was met looks like."""

    def __init__(self) -> None:
        self.found: Structure = {}
        self.classes: dict[type, None] = {}
        self.known: dict[int, object] = {}

    def at_module(self, path: str, module: nn.Module) -> None:
        self.found[path, ""] = (_Same(type(module)), _Same(module))
        self.known[id(module)] = _Same(module)
        self.classes.update(dict.fromkeys(type(module).__mro__))
        for name, value in vars(module).items():
            if name.endswith(("ward_hooks", "ward_pre_hooks")):
                self.found[path, name] = [_Same(hook) for hook in value.values() if not _is_ours(hook)] if value else []
            elif type(value) in SIMPLE:
                self.found[path, name] = (type(value), value)
            elif name not in TABLES and "_hooks" not in name:
                self.found[path, name] = self.into(value, DEPTH)
        for name, p in module._parameters.items():
            if p is not None:
                self.found[path, name] = (_Same(p), p.requires_grad, p.dtype)
        for name, x in module._buffers.items():
            self.found[path, name] = None if x is None else x.dtype

    def into(self, x: Any, depth: int) -> object:
        """What can be compared later: the value itself, the values in a container, or which object it is and its attributes."""
        kind = type(x)
        if kind in SIMPLE:
            return kind, x
        if isinstance(x, FUNCTIONS):
            return _Same(x)
        if isinstance(x, Tensor):
            return kind, x.dtype
        if id(x) in self.known:
            return self.known[id(x)]
        if depth == 0 or len(self.known) > MOST_VALUES:
            return _Same(x) if not isinstance(x, dict | list | tuple | set | frozenset) else (kind, len(x))
        self.known[id(x)] = _Same(x)  # for what refers to itself
        seen: object
        if isinstance(x, nn.Module):
            hooks = {n: [_Same(h) for h in t.values()] for n, t in vars(x).items() if n.endswith("_hooks") and t}
            rest = {
                n: self.into(y, depth - 1) for n, y in vars(x).items() if n not in TABLES and not n.endswith("_hooks")
            }
            layers = {n: self.into(y, depth - 1) for n, y in x._modules.items()}
            seen = (_Same(x), hooks, rest, layers)
            self.classes.update(dict.fromkeys(kind.__mro__))
        elif isinstance(x, dict):
            seen = (kind, [(self.into(k, depth - 1), self.into(y, depth - 1)) for k, y in list(x.items())])
        elif isinstance(x, list | tuple):
            seen = (kind, [self.into(y, depth - 1) for y in x])
        elif isinstance(x, set | frozenset):
            seen = (kind, frozenset(y if type(y) in SIMPLE else _Same(y) for y in x))
        elif hasattr(x, "__dict__") and not kind.__module__.startswith(("torch.", "numpy", "builtins", "threading")):
            seen = (_Same(x), {name: self.into(y, depth - 1) for name, y in list(vars(x).items())})
            self.classes.update(dict.fromkeys(kind.__mro__))
        else:
            seen = _Same(x)
        self.known[id(x)] = seen
        return seen


UNIMPORTANT = frozenset(
    ["__dict__", "__weakref__", "__doc__", "__annotations__", "__module__", "_abc_impl", "__slots__"]
)
"""Attributes that classes have of themselves."""


def _value(cell: types.CellType) -> object:
    try:
        return cell.cell_contents
    except ValueError:  # not yet set
        return None


def trained(model: nn.Module) -> list[object]:
    """The parameters that a clipper of this model, as it is now, is made for."""
    return [(id(p), p.dtype) for p in model.parameters() if p.requires_grad]


def _is_ours(hook: object) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).startswith("privacy.clipping.")


def _differing(x: Structure, y: Structure) -> list[Place]:
    return [place for place in {**x, **y} if x.get(place, _NOTHING) != y.get(place, _NOTHING)]


_NOTHING = object()
