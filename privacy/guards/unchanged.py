"""Whether a model still is what passed the self-check (selfcheck.py), and whether its examples stay apart in a new shape.

`SelfChecked` stands before every micro-batch of a loop of one's own. It reads ids and flags: parameters that were added,
replaced, frozen or unfrozen, modes, and layers, hooks or adapters that were added or swapped. Values, closures, globals and other
attributes are not compared (docs/guarantee.md states that assumption).

A micro-batch of a new size or shape, or under a new autocast, may take another way through a model: a limit, groups, a mask as
long as the batch. So made-up examples take it first, twice, with the run's number of rows, precision and device. A third of the
rows stay and all others change. Kernels give equal bits for equal shapes, so a loss that changes has read another row.
"""

import enum
import weakref
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..clipping import ClippedSum
from ..errors import PrivacyConfigError
from ..gradients.fallback import plan_of
from ..gradients.module_state import MODULE_ATTRIBUTES, modules_of
from ..gradients.recorder import Task
from ..ranks.fsdp import gathered, is_of_fsdp, put_away
from ..step.step import MicroBatch
from .holders import untouched
from .neighbours import Inputs, nothing_is_small, require_apart

Place = tuple[str, str]
"""Path of a module, and an attribute of it."""
Structure = dict[Place, object]
SETTING = "setting "
"""Before the name of a module's attribute that is a number or a word."""
MOST_FORCED = 3
"""How often a number or a word of a module may ask for a check when it changes."""
SETTINGS = (bool, int, float, str, type(None), np.generic, enum.Enum)
OWN_HOOKS = f"{modules_of.__module__.rpartition('.')[0]}."
"""Before the modules whose hooks record what clipping needs."""
HOW = (
    "make the PrivateLoop again; for a ClippedSum call privacy.guards.selfcheck.check_against_autograd(model, made_up_inputs) "
    "before the first micro-batch, on made-up examples and never on private data"
)


class Part(NamedTuple):
    """Some rows of a micro-batch; see `privacy.step.step.MicroBatch`."""

    inputs: Mapping[str, Tensor]
    is_padding_B: Tensor
    num_undecodable: int


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


class SelfChecked:
    """Lets micro-batches through while a model is what passed the self-check, and tries each new way through it first.

    Args:
        task: what the clipped sum is given.
        clipped: the sum of this model; made before, since the check is about its parameters.
        on_change: is called when a number or a word of a module has changed (isolation.py).
    """

    def __init__(
        self, model: nn.Module, task: Task, clipped: ClippedSum, on_change: Callable[[], None]
    ) -> None:
        self.model, self.task, self.clipped = model, task, clipped
        self._on_change = on_change
        self._settings: Structure = {}
        self._times_moved = Counter[Place]()
        self.made_for = clippable(model)

    def watched(
        self, micro_batches: Iterator[MicroBatch], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Part]:
        """Yields each part of a micro-batch that clipping goes through by itself, when the model may take it.

        Args:
            device: where the model computes, in `dtype`.

        Raises:
            PrivacyConfigError: see `require`.
        """
        for micro_batch in micro_batches:
            num_undecodable = micro_batch.num_undecodable
            for rows in self.clipped.parts(len(micro_batch.is_padding_B)):
                inputs = {name: x[rows] for name, x in micro_batch.inputs.items()}
                kinds = {
                    name: x.to("meta", dtype if x.is_floating_point() else None)
                    for name, x in inputs.items()
                }
                self.require(kinds, device)
                yield Part(inputs, micro_batch.is_padding_B[rows], num_undecodable)
                num_undecodable = 0

    def require_model(self) -> None:
        """Requires that the model is what it was when it passed with this task: before a charge, which follows the last forward.

        Raises:
            PrivacyConfigError: it has not passed, or has changed since.
        """
        put_away(self.model)
        passed = [p for p in PASSED.get(self.model, []) if p.task() == self.task]
        self._require_same(passed, structure(self.model, self.task))

    def require(self, inputs: Mapping[str, Tensor], device: torch.device) -> None:
        """Requires that the model has passed with this task, is what it was then, and keeps examples apart in these shapes.

        Args:
            inputs: of one part of a micro-batch; their dtypes and shapes alone are read, never their values.

        Raises:
            PrivacyConfigError: the model has not passed the self-check, or has changed since, or passed with something else; or
                its examples influence one another in micro-batches of this size and these shapes.
        """
        passed = self._passed_with(inputs)
        put_away(self.model)
        now = structure(self.model, self.task)
        unchanged, changed = self._require_same(passed, now)
        # Engines add attributes of their own.
        recorded = {place for p in unchanged for place in p.structure}
        modules = dict(modules_of(self.model, self.task))
        settings = {
            place: now.get(place, ...)
            for place in changed
            if not _is_fixed(place)
            and (
                place in recorded
                or hasattr(type(modules.get(place[0])), place[1].removeprefix(SETTING))
            )
        }
        self._note_settings(settings)
        way = way_of(inputs, device)
        if any(way in p.tried for p in unchanged):
            return
        nearest = max(
            unchanged,
            key=lambda p: sum(p.made_up[n].shape[1:] == x.shape[1:] for n, x in inputs.items()),
        )
        self._try(fitted(nearest.made_up, inputs, device), len(next(iter(inputs.values()))))
        nearest.tried.add(way)

    def _note_settings(self, settings: Structure) -> None:
        """Asks for a check of the next micro-batch where numbers or words of modules have moved.

        Each is checked at most MOST_FORCED times: one that is scheduled moves at every step.

        Args:
            settings: those that differ from what passed.
        """
        moved = changes(self._settings, settings)
        self._settings = settings
        is_new = any(self._times_moved[place] < MOST_FORCED for place in moved)
        self._times_moved.update(moved)
        if is_new:
            self._on_change()

    def _require_same(
        self, passed: list[Passed], now: Structure
    ) -> tuple[list[Passed], set[Place]]:
        """Returns the passes since which nothing fixed has changed, and all places that have changed since any pass."""
        changed = [changes(p.structure, now) - p.moved for p in passed]
        unchanged = [
            p for p, places in zip(passed, changed, strict=True) if not any(map(_is_fixed, places))
        ]
        if not unchanged:
            place = min(filter(_is_fixed, changed[-1])) if changed else ("", "")
            raise PrivacyConfigError(
                f"since the self-check, {'.'.join(place).strip('.') or 'the model'} has changed (layers were exchanged, "
                "frozen or unfrozen, given a hook, or model.train() or model.eval() was called): put it back, or check it anew: "
                f"{HOW}"
            )
        if clippable(self.model) != self.made_for:
            raise PrivacyConfigError(
                "since this sum was made, parameters of its model were frozen, unfrozen, exchanged, given another dtype or given "
                "to the fallback: make a new one"
            )
        return unchanged, set[Place]().union(*changed)

    def _passed_with(self, inputs: Mapping[str, Tensor]) -> list[Passed]:
        """Returns what the model was when it passed with this task and inputs of these kinds."""
        recorded = PASSED.get(self.model, [])
        if not recorded:
            raise PrivacyConfigError(
                f"this {type(self.model).__name__} has not passed the self-check: {HOW}"
            )
        kinds = kinds_of(inputs)
        passed = [p for p in recorded if p.task() == self.task and kinds_of(p.made_up) == kinds]
        if not passed:
            listed = ", ".join(
                f"{name} ({dtype}, {ndim} dimensions)"
                for name, (dtype, ndim) in sorted(kinds.items())
            )
            raise PrivacyConfigError(
                "the task of this micro-batch is not the one that passed the self-check, or not with inputs named "
                f"{listed}, so its loss may mix examples: give the same object to check_against_autograd and to "
                f"add_micro_batch; {HOW}"
            )
        return passed

    def _try(self, made_up: Inputs, size: int) -> None:
        """Sends made-up examples the way of a micro-batch of `size` rows."""
        with gathered(self.model), nothing_is_small(self.model), untouched(self.model, self.task):
            require_apart(self.task, made_up, size)
            rows = torch.arange(size) % len(next(iter(made_up.values())))
            repeated = {name: x[rows.to(x.device)] for name, x in made_up.items()}
            require_replays(self.clipped, self.task, repeated)


def kinds_of(inputs: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, int]]:
    """Returns dtype and number of dimensions of each input."""
    return {name: (x.dtype, x.dim()) for name, x in inputs.items()}


def way_of(inputs: Mapping[str, Tensor], device: torch.device) -> tuple[object, ...]:
    """Returns what may send a micro-batch another way through a model: shapes, the device, autocast."""
    shapes = tuple((name, x.shape) for name, x in sorted(inputs.items()))
    autocasts = [
        (kind, torch.is_autocast_enabled(kind), torch.get_autocast_dtype(kind))
        for kind in sorted({"cpu", device.type})
    ]
    return shapes, device, *autocasts


def fitted(made_up: Inputs, inputs: Mapping[str, Tensor], device: torch.device) -> Inputs:
    """Returns made-up examples in the shapes of a micro-batch: cut, or their last entries repeated, in each dimension but one."""
    examples = {}
    for name, x in inputs.items():
        y = made_up[name]
        for dim in range(1, x.dim()):
            place = torch.arange(x.shape[dim], device=y.device).clamp(max=y.shape[dim] - 1)
            y = y.index_select(dim, place)
        examples[name] = y.to(device)
    return examples


def require_replays(clipped: ClippedSum, task: Task, inputs: Mapping[str, Tensor]) -> None:
    """Requires that what the fallback replays at this size are the outputs that the forward gave, chunks and edges included.

    Args:
        inputs: made up, never private data.

    Raises:
        PrivacyConfigError: they are not.
    """
    recorder = clipped.recorder
    if not plan_of(clipped.model).covers:
        return
    recorder.compares = True
    try:
        size = len(next(iter(inputs.values())))
        with torch.no_grad(), recorder.forward(task, inputs, size) as passed:
            passed.backward(lambda call: None)
    finally:
        recorder.compares = False


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


def clippable(model: nn.Module) -> object:
    """Returns what a clipped sum of this model is made for: its trained parameters, and what the fallback takes over."""
    plan = plan_of(model)
    parameters = [(id(p), p.dtype) for p in model.parameters() if p.requires_grad]
    return parameters, dict(plan.covers), dict(plan.layouts)
