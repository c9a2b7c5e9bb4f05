"""Which models have passed the self-check (selfcheck.py), and in which shape; `ClippedSum` asks before every micro-batch.

A micro-batch of a size, of shapes or under an autocast that this model has not met yet is tried on made-up examples first
(apart.py), because a model may take another way there.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from .apart import require_apart
from .sharded import is_of_fsdp, kind_of, put_away, whole
from .untouched import SIMPLE, as_it_was, nothing_is_small, on_copies, writes_to

Task = Callable[..., Tensor]
Place = tuple[str, str]
"""Path of a module, and an attribute of it."""
Structure = dict[Place, object]
_NOTHING = object()


HOW = (
    "call privacy.clipping.selfcheck.check_against_autograd(model, made_up_inputs) before the first micro-batch, on made-up "
    "examples and never on private data; self_check=False is for a model of which a copy has passed"
)


@dataclass(frozen=True)
class _Passed:
    """What a model was when it passed.

    Attributes:
        structure: what is compared at every micro-batch.
        moved: places that a forward changes itself, such as hooks that it adds when it is first called.
        task: a weak reference, because a task usually refers to its model.
        made_up: two or more made-up examples.
        tried: shapes and autocasts (`_way`) in which made-up examples were tried.
    """

    structure: Structure
    moved: set[Place]
    task: weakref.ref[Any]
    made_up: dict[str, Tensor]
    tried: set[object]


_PASSED: weakref.WeakKeyDictionary[nn.Module, list[_Passed]] = weakref.WeakKeyDictionary()


def note_passed(
    model: nn.Module, task: Task, inputs: Mapping[str, Tensor], structure: Structure, moved: list[Place]
) -> None:
    """The model has passed with this task and these made-up examples; it had this structure, moved by its own forward there."""
    reference = weakref.WeakMethod(task) if inspect.ismethod(task) else weakref.ref(task)
    made_up = {name: x.detach().clone() for name, x in inputs.items()}
    _PASSED.setdefault(model, []).append(_Passed(structure, set(moved), reference, made_up, set()))


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
    changed = [[place for place in changes(p.structure, now) if place not in p.moved] for p in passed]
    unchanged = [p for p, places in zip(passed, changed, strict=True) if not places]
    if not unchanged:
        module, attribute = changed[-1][0]
        raise PrivacyConfigError(
            f"since the self-check, {f'{module}.{attribute}'.strip('.') or 'the model'} has changed (layers were exchanged, "
            "frozen or unfrozen, given a hook or another setting, a buffer was written to, or model.train() or model.eval() "
            f"was called): check the model as it is trained; {HOW}"
        )
    if trained(model) != made_for:
        raise PrivacyConfigError(
            "since this sum was made, parameters of its model were frozen, unfrozen, exchanged or given another dtype: make a "
            "new one"
        )
    way = _way(inputs)
    if not any(way in p.tried for p in unchanged):
        mine = max(unchanged, key=lambda p: sum(p.made_up[n].shape[1:] == x.shape[1:] for n, x in inputs.items()))
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
    """Made-up examples of the shape of others: cut, or their last entry repeated, in each dimension but the first."""
    for dim in range(1, like.dim()):
        places = torch.arange(like.shape[dim], device=made_up.device).clamp(max=made_up.shape[dim] - 1)
        made_up = made_up.index_select(dim, places)
    return made_up.to(like.device)


def structure(model: nn.Module, task: object = None) -> Structure:
    """Reads, from ids and flags, what decides the way of a value or a gradient through the model; never values of tensors.

    These are its registered modules with class, mode, hooks and an own `forward`, the settings of torch's layers (numbers,
    flags, names), parameters with whether they are trained, and buffers; the same of a task that is another module; and
    torch's global hooks. Hooks of clipping itself and of FSDP do not count.
    """
    found: Structure = {}
    for name, table in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(table, dict):
            found["", name] = _foreign(table)
    owner = getattr(task, "__self__", task)
    others = owner.named_modules(prefix="task") if isinstance(owner, nn.Module) and owner is not model else ()
    for path, module in [*model.named_modules(), *others]:
        found[path, ""] = (_Same(type(module)), _Same(module))
        is_of_torch = kind_of(module).__module__.startswith("torch.nn.")
        for name, value in vars(module).items():
            if name.endswith(("ward_hooks", "ward_pre_hooks")):
                found[path, name] = _foreign(value)
            elif name == "forward":
                found[path, name] = _Same(value)
            elif name == "training" or (is_of_torch and type(value) in SIMPLE):
                found[path, name] = (type(value), value)
        for name, p in module._parameters.items():
            if p is not None:
                hooks = [_foreign(table) for table in (p._backward_hooks, p._post_accumulate_grad_hooks)]
                found[path, name] = (_Same(p), p.requires_grad, p.dtype, hooks)
        for name, x in module._buffers.items():
            found[path, name] = None if x is None else (_Same(x), x.dtype, writes_to(x))
    return found


def changes(before: Structure, now: Structure) -> list[Place]:
    """Where two structures differ."""
    return [x for x in {**before, **now} if before.get(x, _NOTHING) != now.get(x, _NOTHING)]


def _foreign(hooks: Mapping[int, object] | None) -> list["_Same"]:
    return [_Same(h) for h in (hooks or {}).values() if not (_is_ours(h) or is_of_fsdp(h))]


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


def trained(model: nn.Module) -> list[object]:
    """The parameters that a clipper of this model, as it is now, is made for."""
    return [(id(p), p.dtype) for p in model.parameters() if p.requires_grad]


def _is_ours(hook: object) -> bool:
    function = hook.func if isinstance(hook, functools.partial) else hook
    return str(getattr(function, "__module__", "")).startswith(f"{__package__}.")
