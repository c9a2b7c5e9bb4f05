"""Whether a model still is what passed the self-check (selfcheck.py), and whether its examples stay apart in a new shape.

`ClippedSum` calls `require_passed` before every micro-batch. It reads ids and flags: parameters that were added, replaced,
frozen or unfrozen, modes, and layers, hooks or adapters that were added or swapped. Values, closures, globals and other
attributes are not compared (docs/guarantee.md states that assumption).

A micro-batch of a new size or shape, or under a new autocast, may take another way through a model: a limit, groups, a mask as
long as the batch. So made-up examples take it first, twice, with the run's number of rows, precision and device. A third of the
rows stay and all others change. Kernels give equal bits for equal shapes, so a loss that changes has read another row.
"""

import enum
import weakref
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..gradients.module_state import MODULE_ATTRIBUTES, modules_of
from ..gradients.recorder import Task
from ..gradients.sharded import is_of_fsdp, put_away, whole
from .holders import untouched
from .neighbours import Inputs, nothing_is_small, require_apart

Place = tuple[str, str]
"""Path of a module, and an attribute of it."""
Structure = dict[Place, object]
SETTING = "setting "
"""Before the name of a module's attribute that is a number or a word."""
SETTINGS = (bool, int, float, str, type(None), np.generic, enum.Enum)
OWN_HOOKS = f"{modules_of.__module__.rpartition('.')[0]}."
"""Before the modules whose hooks record what clipping needs."""
HOW = (
    "make the PrivateLoop again; for a ClippedSum call privacy.guards.selfcheck.check_against_autograd(model, made_up_inputs) "
    "before the first micro-batch, on made-up examples and never on private data; self_check=False is for a model of which a "
    "copy has passed"
)


class Passed(NamedTuple):
    """What a model was when it passed.

    Attributes:
        structure: what is compared at every micro-batch.
        moved: places that a forward changes itself, such as hooks that it adds when it is first called.
        task: a weak reference, because a task usually refers to its model.
        made_up: two or more made-up examples.
        tried: shapes and autocasts in which made-up examples were tried.
    """

    structure: Structure
    moved: set[Place]
    task: weakref.ref[Any]
    made_up: Inputs
    tried: set[object]


PASSED: weakref.WeakKeyDictionary[nn.Module, list[Passed]] = weakref.WeakKeyDictionary()
"""With which tasks and made-up examples a model has passed, and what it was then; selfcheck.py adds to it."""


def require_passed(
    model: nn.Module,
    task: Task,
    inputs: Mapping[str, Tensor],
    made_for: list[object],
    require_replays: Callable[[Task, Inputs], None],
) -> None:
    """Requires that the model has passed with this task, is what it was then, and keeps examples apart in this shape.

    It looks at names, dtypes and shapes of the inputs, never at their values.

    Args:
        made_for: `trained(model)` when the clipper was made.
        require_replays: tries the fallback on made-up examples of this size.

    Raises:
        PrivacyConfigError: the model has not passed the self-check, or has changed since, or passed with something else; or
            its examples influence one another in micro-batches of this size and these shapes.
    """
    passed = PASSED.get(model, [])
    if not passed:
        raise PrivacyConfigError(
            f"this {type(model).__name__} has not passed the self-check: {HOW}"
        )
    kinds, *others = [
        {n: (x.dtype, x.dim()) for n, x in xs.items()}
        for xs in (inputs, *(p.made_up for p in passed))
    ]
    passed = [
        p
        for p, made_up in zip(passed, others, strict=True)
        if p.task() == task and made_up == kinds
    ]
    if not passed:
        listed = ", ".join(
            f"{name} ({dtype}, {ndim} dimensions)" for name, (dtype, ndim) in sorted(kinds.items())
        )
        raise PrivacyConfigError(
            f"the task of this micro-batch is not the one that passed the self-check, or not with inputs named {listed}, so its "
            f"loss may mix examples: give the same object to check_against_autograd and to add_micro_batch; {HOW}"
        )
    put_away(model)
    now = structure(model, task)
    changed = [changes(p.structure, now) - p.moved for p in passed]
    unchanged = [
        p for p, places in zip(passed, changed, strict=True) if not any(map(_is_fixed, places))
    ]
    if not unchanged:
        place = min(filter(_is_fixed, changed[-1]))
        raise PrivacyConfigError(
            f"since the self-check, {'.'.join(place).strip('.') or 'the model'} has changed (layers were exchanged, "
            "frozen or unfrozen, given a hook, or model.train() or model.eval() was called): put it back, or check it anew: "
            f"{HOW}"
        )
    if trained(model) != made_for:
        raise PrivacyConfigError(
            "since this sum was made, parameters of its model were frozen, unfrozen, exchanged or given another dtype: make a "
            "new one"
        )
    # Shapes, devices, autocasts and settings may send a micro-batch another way through the model: a new way is tried once.
    devices = sorted({"cpu", *(x.device.type for x in inputs.values())} - {"meta"})
    autocasts = [
        (device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device))
        for device in devices
    ]
    shapes = tuple((name, x.shape, x.device) for name, x in sorted(inputs.items()))
    known = {
        place for p in unchanged for place in p.structure
    }  # engines add attributes of their own
    modules = dict(modules_of(model, task))
    settings = {
        (path, name)
        for path, name in set[Place]().union(*changed)
        if not _is_fixed((path, name))
        and ((path, name) in known or hasattr(type(modules.get(path)), name.removeprefix(SETTING)))
    }
    way = (shapes, *autocasts, frozenset((place, now.get(place)) for place in settings))
    is_seen = (
        settings <= now.keys()
    )  # what has become a tensor, say, has values that nobody looks at
    if is_seen and any(way in p.tried for p in unchanged):
        return
    mine = max(
        unchanged,
        key=lambda p: sum(p.made_up[n].shape[1:] == x.shape[1:] for n, x in inputs.items()),
    )
    made_up = {}
    for (
        name,
        x,
    ) in inputs.items():  # cut, or their last entry repeated, in each dimension but the first
        y = mine.made_up[name]
        for dim in range(1, x.dim()):
            y = y.index_select(
                dim, torch.arange(x.shape[dim], device=y.device).clamp(max=y.shape[dim] - 1)
            )
        made_up[name] = y.to(x.device)
    with whole(model), nothing_is_small(model), untouched(model, task):
        size = len(next(iter(inputs.values())))
        require_apart(task, made_up, size)
        rows = torch.arange(size) % len(next(iter(made_up.values())))
        require_replays(task, {name: x[rows.to(x.device)] for name, x in made_up.items()})
    mine.tried.add(way)


def structure(model: nn.Module, task: object = None) -> Structure:
    """Reads, from ids and flags, what decides the way of a value or a gradient through the model; never values of tensors.

    These are the registered modules of the model, and of a task that is another module or a method of one: class, mode, hooks,
    an own `forward`, numbers and words such as a rate or a name, and parameters with whether they are trained; and torch's
    global hooks. Hooks of clipping itself and of FSDP do not count. Objects are compared by weak references: an id could be
    given out again.
    """

    def foreign(hooks: Mapping[int, Any] | None) -> list[_Same]:
        of_modules = [
            (getattr(h, "func", h), h) for h in (hooks or {}).values()
        ]  # clipping's may be partial
        ours = [
            str(getattr(f, "__module__", "")).startswith(OWN_HOOKS) or is_of_fsdp(h)
            for f, h in of_modules
        ]
        return [_Same(h) for (_, h), is_ours in zip(of_modules, ours, strict=True) if not is_ours]

    of_all = {
        n: x
        for n, x in vars(torch.nn.modules.module).items()
        if n.startswith("_global_") and isinstance(x, dict)
    }
    found: Structure = {("", name): foreign(table) for name, table in of_all.items()}
    for path, module in modules_of(model, task):
        found[path, ""] = (_Same(type(module)), _Same(module))
        for name, value in vars(module).items():
            if name.endswith(("ward_hooks", "ward_pre_hooks")):
                found[path, name] = foreign(value)
            elif name == "forward":
                found[path, name] = _Same(value)
            elif isinstance(value, SETTINGS) and name not in MODULE_ATTRIBUTES:
                found[path, SETTING + name] = (
                    type(value),
                    value if value == value else None,
                )  # 1 is not True; a NaN is itself
        found[path, "training"] = getattr(
            module, "training", None
        )  # a module that torch.jit has frozen has no mode
        for name, p in module._parameters.items():
            if p is not None:
                hooks = foreign(p._backward_hooks), foreign(p._post_accumulate_grad_hooks)
                found[path, name] = (_Same(p), p.requires_grad, p.dtype, hooks)
    return found


def changes(before: Structure, now: Structure) -> set[Place]:
    """Where two structures differ."""
    return {place for place in {**before, **now} if before.get(place, ...) != now.get(place, ...)}


def _is_fixed(place: Place) -> bool:
    """Whether a model that differs there is another model; a module's own numbers and words may be scheduled."""
    return not place[1].startswith(SETTING)


class _Same:
    """Equal for one object only, which it does not keep alive, and never for another at its address."""

    def __init__(self, x: object) -> None:
        try:
            self.reference: object = weakref.ref(
                x
            )  # the same reference as long as the object lives
        except TypeError:
            self.reference = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.reference is other.reference


def trained(model: nn.Module) -> list[object]:
    """The parameters that a clipper of this model, as it is now, is made for."""
    return [(id(p), p.dtype) for p in model.parameters() if p.requires_grad]
