"""Which models have passed the self-check (selfcheck.py), and in which shape; `ClippedSum` asks before every micro-batch.

A micro-batch of a size, of shapes or under an autocast that this model has not met yet is tried on made-up examples first
(apart.py), because a model may take another way there.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from .apart import require_apart
from .in_place import writes_to
from .sharded import is_of_fsdp, put_away, stands_for, whole
from .untouched import MOST_VALUES, SIMPLE, as_it_was, is_foreign, nothing_is_small, on_copies

Task = Callable[..., Tensor]
Place = tuple[str, str]
"""Path of a module, and an attribute of it."""
Structure = dict[Place, object]
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial, type)
TABLES = frozenset(["_parameters", "_buffers", "_modules"])
"""Attributes of modules that are looked at in another way."""
DEPTH = 8
"""Containers and objects in others are looked into so often."""

HOW = (
    "call privacy.clipping.selfcheck.check_against_autograd(model, made_up_inputs) before the first micro-batch, on made-up "
    "examples and never on private data; self_check=False is for a model of which a copy has passed"
)


@dataclass(frozen=True)
class _Passed:
    """What a model was when it passed.

    Attributes:
        before: its structure.
        after: its structure after forwards; where the two differ its own forward changes it, such as a counter of calls.
        task: a weak reference, because a task usually refers to its model.
        made_up: two or more made-up examples.
        tried: shapes and autocasts (`_way`) in which made-up examples were tried.
    """

    before: "Structure"
    after: "Structure"
    task: weakref.ref[Any]
    made_up: dict[str, Tensor]
    tried: set[object]


_PASSED: weakref.WeakKeyDictionary[nn.Module, list[_Passed]] = weakref.WeakKeyDictionary()


def note_passed(
    model: nn.Module, task: Task, inputs: Mapping[str, Tensor], before: Structure, after: Structure
) -> None:
    """The model has passed with this task and these made-up examples; it had these structures before and after forwards."""
    reference = weakref.WeakMethod(task) if inspect.ismethod(task) else weakref.ref(task)
    made_up = {name: x.detach().clone() for name, x in inputs.items()}
    _PASSED.setdefault(model, []).append(_Passed(before, after, reference, made_up, set()))


def require_passed(model: nn.Module, task: Task, inputs: Mapping[str, Tensor], made_for: list[object]) -> None:
    """Only names, dtypes and shapes of the inputs are looked at, never their values.

    Args:
        made_for: `trained(model)` when the clipper was made.

    Raises:
        PrivacyConfigError: the model has not passed the self-check, or has changed since, or passed with something else; or
            its examples influence one another in micro-batches of this size and these shapes.
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
    passed = [p for p in passed if _kinds(p.made_up) == _kinds(inputs)]
    if not passed:
        kinds = ", ".join(f"{dtype} of {ndim} dimensions" for _, (dtype, ndim) in sorted(_kinds(inputs).items()))
        raise PrivacyConfigError(
            f"the self-check has not seen inputs named {', '.join(sorted(inputs))} ({kinds}), which may take another way through "
            f"the model: {HOW}"
        )
    put_away(model)
    now = structure(model, task)
    changed = [_changed(p.before, p.after, now) for p in passed]
    if all(changed):
        module, attribute = changed[-1][0]
        raise PrivacyConfigError(
            f"since the self-check, {f'{module}.{attribute}'.strip('.') or 'the model'} has changed (layers were exchanged, "
            "frozen or unfrozen, given a hook or another attribute, a buffer was written to, or model.train() or model.eval() "
            f"was called): check the model as it is trained; {HOW}"
        )
    if trained(model) != made_for:
        raise PrivacyConfigError(
            "since this sum was made, parameters of its model were frozen, unfrozen, exchanged or given another dtype: make a "
            "new one"
        )
    mine = passed[changed.index([])]
    way = _way(inputs)
    if way not in mine.tried:
        made_up = {name: _stretched(mine.made_up[name], x) for name, x in inputs.items()}
        with whole(model), nothing_is_small(model), as_it_was(model, task), on_copies(model, None):
            require_apart(task, made_up, len(next(iter(inputs.values()))))
        mine.tried.add(way)


def _kinds(inputs: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, int]]:
    return {name: (x.dtype, x.dim()) for name, x in inputs.items()}


def _way(inputs: Mapping[str, Tensor]) -> object:
    """What may send a micro-batch of these kinds another way through a model: shapes, devices and autocasts."""
    shapes = tuple((name, x.shape, x.device) for name, x in sorted(inputs.items()))
    kinds = sorted({"cpu", *(x.device.type for x in inputs.values())} - {"meta"})
    return shapes, tuple((kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind)) for kind in kinds)


def _stretched(made_up: Tensor, like: Tensor) -> Tensor:
    """Made-up examples of the shape of others: repeated or cut in each dimension but the first."""
    for dim in range(1, like.dim()):
        made_up = made_up.index_select(dim, torch.arange(like.shape[dim], device=made_up.device) % made_up.shape[dim])
    return made_up.to(like.device)


def structure(model: nn.Module, task: object = None) -> Structure:
    """What may change the way of a value or a gradient through the model, without any look at values of tensors.

    These are the modules, their attributes with what lies in lists, dicts and plain objects, their hooks and torch's global
    ones, the functions and values of their classes, and their parameters with whether they are trained. Of a task that is
    another object or a function these are its attributes or the variables around it. Hooks of clipping itself and of FSDP do
    not count.
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
    functions: list[object] = [owner]
    for kind in list(look.classes):
        if kind.__module__ not in ("builtins", "typing", "abc"):
            skipped = UNIMPORTANT | MADE_BY_THE_COMPILER if kind is nn.Module else UNIMPORTANT
            values = {name: x for name, x in vars(kind).items() if name not in skipped}
            place = "", f"class {kind.__qualname__}"
            look.found[place] = (look.found.get(place), {name: look.into(x, 2) for name, x in values.items()})
            functions += [] if is_foreign(kind) else values.values()
    for function in functions:
        if isinstance(function, types.FunctionType):
            around = function.__globals__
            for name in function.__code__.co_names:
                if name in around and (
                    type(around[name]) in SIMPLE or isinstance(around[name], Tensor | dict | list | set)
                ):
                    look.found["", f"global {name}"] = look.into(around[name], 2)
    return look.found


def shared_state(before: Structure, after: Structure) -> list[str]:
    """What a forward has changed in classes and global variables, where nobody puts it back."""
    return [
        name
        for module, name in before
        if module == "" and " " in name and before[module, name] != after.get((module, name))
    ]


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
                self.found[path, name] = (
                    [_Same(h) for h in value.values() if not (_is_ours(h) or is_of_fsdp(h))] if value else []
                )
            elif type(value) in SIMPLE:
                self.found[path, name] = (type(value), value)
            elif name not in TABLES and "_hooks" not in name:
                self.found[path, name] = self.into(value, DEPTH)
        for name, p in module._parameters.items():
            if p is not None:
                kept = stands_for(p)
                hooks = [*(kept._backward_hooks or {}).values(), *(kept._post_accumulate_grad_hooks or {}).values()]
                self.found[path, name] = (_Same(kept), p.requires_grad, p.dtype, [_Same(hook) for hook in hooks])
        for name, x in module._buffers.items():
            self.found[path, name] = None if x is None else (_Same(x), x.dtype, writes_to(x))

    def into(self, x: Any, depth: int) -> object:
        """What can be compared later: the value itself, the values in a container, or which object it is and its attributes."""
        kind = type(x)
        if kind in SIMPLE:
            return kind, x
        if isinstance(x, FUNCTIONS):
            return _Same(x)
        if isinstance(x, Tensor):
            return (
                _Same(x),
                x.dtype,
                None if isinstance(x, nn.Parameter) else writes_to(x),
            )  # training writes to weights
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
        elif hasattr(x, "__dict__") and not is_foreign(kind):
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
MADE_BY_THE_COMPILER = frozenset(["__init__", "__setstate__", "___needs_generation_tag_patch"])
"""What torch.compile changes in nn.Module at its first use in a process: how modules are made, and never what one computes."""


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
    return str(getattr(function, "__module__", "")).startswith(f"{__package__}.")


def _changed(before: Structure, after: Structure, now: Structure) -> list[Place]:
    """Where a model is not what it was, but for what its own forward changes."""
    return [
        place
        for place in {**before, **now}
        if not _kept(before.get(place, _NOTHING), after.get(place, _NOTHING), now.get(place, _NOTHING))
    ]


def _kept(before: Any, after: Any, now: Any) -> bool:
    """Whether `now` differs from `before` only where `after` does too, down to single values in containers."""
    if now == before:
        return True
    three = [list(x.items()) if isinstance(x, dict) else x for x in (before, after, now)]
    if all(type(x) in (tuple, list) and type(x) is type(three[0]) and len(x) == len(three[0]) for x in three):
        return all(_kept(*entries) for entries in zip(*three, strict=True))
    return bool(before != after)


_NOTHING = object()
