"""Requires that a model still is the one that passed the self-check (selfcheck.py).

`SelfChecked` compares ids and flags before every micro-batch of a loop of one's own: parameters,
modes, layers, hooks. Other attributes, closures and globals are an assumption of docs/guarantee.md.
Made-up examples try each new shape or autocast first, since a limit, groups or a mask as long as
the batch may send it another way through the model (`neighbours.require_apart`).
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
"""Prefix of the attribute in the place of a module's number or word."""
MOST_FORCED = 3
"""Checks that a number or a word of a module may ask for by changing."""
SETTINGS = (bool, int, float, str, type(None), np.generic, enum.Enum)
OWN_HOOKS = f"{modules_of.__module__.rpartition('.')[0]}."
"""Prefix of the modules whose hooks record gradients for clipping."""
HOW = (
    "make the PrivateLoop again; for a ClippedSum call "
    "privacy.guards.selfcheck.check_against_autograd(model, made_up_inputs) "
    "before the first micro-batch, on made-up examples and never on private data"
)


class Part(NamedTuple):
    """Some rows of a micro-batch; see `privacy.step.step.MicroBatch`."""

    inputs: Mapping[str, Tensor]
    is_padding_B: Tensor
    num_undecodable: int


class SelfCheckRecord(NamedTuple):
    """The record of a model that passed the self-check.

    Attributes:
        structure: is compared at every micro-batch.
        moved: places that a forward changes itself, such as hooks that its first call adds.
        task: a weak reference, because a task usually refers to its model.
        made_up: two or more made-up examples.
        tried: shapes and autocasts that the made-up examples have tried.
    """

    structure: Structure
    moved: set[Place]
    task: weakref.ref[Any]
    made_up: Inputs
    tried: set[object]


PASSED: weakref.WeakKeyDictionary[nn.Module, list[SelfCheckRecord]] = weakref.WeakKeyDictionary()
"""The records of each model, one for each task and set of made-up examples; selfcheck.py adds."""


class SelfChecked:
    """Yields micro-batches while a model is the one that passed, and tries each new shape first.

    Args:
        task: the task that the clipped sum is given.
        clipped: the sum of this model; made before, since the check is about its parameters.
        on_change: is called when a number or a word of a module has changed (isolation.py).
    """

    def __init__(
        self, model: nn.Module, task: Task, clipped: ClippedSum, on_change: Callable[[], None]
    ) -> None:
        self.model = model
        self.task = task
        self.clipped = clipped
        self._on_change = on_change
        self._settings: Structure = {}
        self._times_moved = Counter[Place]()
        self.made_for = clippable(model)

    def watched(
        self, micro_batches: Iterator[MicroBatch], device: torch.device, dtype: torch.dtype
    ) -> Iterator[Part]:
        """Yields each part of a micro-batch that clipping takes at a time, after its check.

        Args:
            device: where the model computes, in `dtype`.

        Raises:
            PrivacyConfigError: see `require`.
        """
        for micro_batch in micro_batches:
            num_undecodable = micro_batch.num_undecodable
            for rows in self.clipped.parts(len(micro_batch.is_padding_B)):
                inputs = {name: x[rows] for name, x in micro_batch.inputs.items()}
                # Tensors on the device meta show shapes and dtypes, and hide private values.
                shapes = {}
                for name, x in inputs.items():
                    shapes[name] = x.to("meta", dtype if x.is_floating_point() else None)
                self.require(shapes, device)
                yield Part(inputs, micro_batch.is_padding_B[rows], num_undecodable)
                num_undecodable = 0

    def require_model(self) -> None:
        """Refuses a model that has changed since it passed with this task.

        A charge needs that too, since it follows the last forward.

        Raises:
            PrivacyConfigError: the model has not passed, or has changed since.
        """
        put_away(self.model)
        records = PASSED.get(self.model, [])
        of_task = [record for record in records if record.task() == self.task]
        self._require_same(of_task, structure(self.model, self.task))

    def require(self, inputs: Mapping[str, Tensor], device: torch.device) -> None:
        """Refuses a model that has changed since it passed, or that mixes examples in these shapes.

        Args:
            inputs: of one part of a micro-batch; their dtypes and shapes alone are read, never
                their values.

        Raises:
            PrivacyConfigError: the model has not passed the self-check with this task and such
                inputs, or has changed since; or its examples influence one another in
                micro-batches of this size and these shapes.
        """
        records = self._records_with(inputs)
        put_away(self.model)
        current = structure(self.model, self.task)
        unchanged, changed = self._require_same(records, current)
        recorded = {place for p in unchanged for place in p.structure}
        modules = dict(modules_of(self.model, self.task))
        settings = {}
        for place in changed:
            if _is_fixed(place):
                continue
            path, attribute = place
            is_of_class = hasattr(type(modules.get(path)), attribute.removeprefix(SETTING))
            # Engines add attributes of their own, which are no settings of the model.
            if place in recorded or is_of_class:
                settings[place] = current.get(place, ...)
        self._note_settings(settings)
        way = way_of(inputs, device)
        if any(way in p.tried for p in unchanged):
            return

        def num_equal_shapes(record: SelfCheckRecord) -> int:
            shapes = {name: x.shape[1:] for name, x in record.made_up.items()}
            return sum(shapes[name] == x.shape[1:] for name, x in inputs.items())

        nearest = max(unchanged, key=num_equal_shapes)
        size = len(next(iter(inputs.values())))
        self._try(fitted(nearest.made_up, inputs, device), size)
        nearest.tried.add(way)

    def _note_settings(self, settings: Structure) -> None:
        """Asks for a check of the next micro-batch where numbers or words of modules have moved.

        Each is checked at most MOST_FORCED times: one that is scheduled moves at every step.

        Args:
            settings: those that differ from the record.
        """
        moved = changes(self._settings, settings)
        # Of what has become a tensor, say, no value is read.
        moved |= {place for place, setting in settings.items() if setting is ...}
        self._settings = settings
        is_new = any(self._times_moved[place] < MOST_FORCED for place in moved)
        self._times_moved.update(moved)
        if is_new:
            self._on_change()

    def _require_same(
        self, records: list[SelfCheckRecord], current: Structure
    ) -> tuple[list[SelfCheckRecord], set[Place]]:
        """Returns the records from which no fixed place differs, and all places that differ.

        Raises:
            PrivacyConfigError: there is no such record, or the clipped sum is for other parameters.
        """
        unchanged: list[SelfCheckRecord] = []
        changed: set[Place] = set()
        fixed: list[Place] = []
        for record in records:
            places = changes(record.structure, current) - record.moved
            changed |= places
            fixed = [place for place in places if _is_fixed(place)]
            if not fixed:
                unchanged.append(record)
        if not unchanged:
            place = ".".join(min(fixed)).strip(".") if records else ""
            raise PrivacyConfigError(
                f"since the self-check, {place or 'the model'} has changed (layers were "
                "exchanged, frozen or unfrozen, given a hook, or model.train() or model.eval() "
                f"was called): put it back, or check it anew: {HOW}"
            )
        if clippable(self.model) != self.made_for:
            raise PrivacyConfigError(
                "since this sum was made, parameters of its model were frozen, unfrozen, "
                "exchanged, given another dtype or given to the fallback: make a new one"
            )
        return unchanged, changed

    def _records_with(self, inputs: Mapping[str, Tensor]) -> list[SelfCheckRecord]:
        """Returns the records of the model with this task and inputs of these kinds.

        Raises:
            PrivacyConfigError: there is none.
        """
        records = PASSED.get(self.model, [])
        if not records:
            raise PrivacyConfigError(
                f"this {type(self.model).__name__} has not passed the self-check: {HOW}"
            )
        kinds = kinds_of(inputs)
        of_task = [record for record in records if record.task() == self.task]
        matching = [record for record in of_task if kinds_of(record.made_up) == kinds]
        if not matching:
            descriptions = []
            for name, (dtype, ndim) in sorted(kinds.items()):
                descriptions.append(f"{name} ({dtype}, {ndim} dimensions)")
            raise PrivacyConfigError(
                "the task of this micro-batch is not the one that passed the self-check, or not "
                f"with inputs named {', '.join(descriptions)}, so its loss may mix examples: give "
                "the same object to check_against_autograd and to add_micro_batch; "
                f"{HOW}"
            )
        return matching

    def _try(self, made_up: Inputs, size: int) -> None:
        """Sends made-up examples the way of a micro-batch of `size` rows."""
        with gathered(self.model), nothing_is_small(self.model), untouched(self.model, self.task):
            require_apart(self.task, made_up, size)
            num_examples = len(next(iter(made_up.values())))
            row_B = torch.arange(size) % num_examples
            repeated = {name: x[row_B.to(x.device)] for name, x in made_up.items()}
            require_replays(self.clipped, self.task, repeated)


def kinds_of(inputs: Mapping[str, Tensor]) -> dict[str, tuple[torch.dtype, int]]:
    """Returns dtype and number of dimensions of each input."""
    return {name: (x.dtype, x.dim()) for name, x in inputs.items()}


def way_of(inputs: Mapping[str, Tensor], device: torch.device) -> tuple[object, ...]:
    """Returns shapes, the device and autocast, which may send a micro-batch another way."""
    shapes = tuple((name, x.shape) for name, x in sorted(inputs.items()))
    autocasts = []
    for kind in sorted({"cpu", device.type}):
        is_enabled = torch.is_autocast_enabled(kind)
        autocasts.append((kind, is_enabled, torch.get_autocast_dtype(kind)))
    return shapes, device, *autocasts


def fitted(made_up: Inputs, inputs: Mapping[str, Tensor], device: torch.device) -> Inputs:
    """Returns made-up examples in the shapes of a micro-batch.

    Each dimension but the first is cut, or filled with its last entry.
    """
    examples = {}
    for name, x in inputs.items():
        y = made_up[name]
        for dim in range(1, x.dim()):
            last = y.shape[dim] - 1
            place = torch.arange(x.shape[dim], device=y.device).clamp(max=last)
            y = y.index_select(dim, place)
        examples[name] = y.to(device)
    return examples


def require_replays(clipped: ClippedSum, task: Task, inputs: Mapping[str, Tensor]) -> None:
    """Refuses a fallback that does not replay the outputs of the forward at this size.

    Chunks and their edges are included.

    Args:
        inputs: made up, never private data.

    Raises:
        PrivacyConfigError: the replayed outputs differ.
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
    """Reads ids and flags that decide the way of a value or a gradient through the model.

    These are torch's global hooks and the registered modules of the model, and of a task that is
    another module or a method of one: class, mode, hooks, an own `forward`, numbers and words such
    as a rate or a name, and parameters with whether they are trained. Values of tensors are never
    read. Hooks of clipping itself and of FSDP do not count. Objects are compared by weak
    references: an id could be given out again.
    """

    def foreign(hooks: Mapping[int, Any] | None) -> list[_Same]:
        references = []
        for hook in (hooks or {}).values():
            # Clipping's hooks may be partial functions.
            function = getattr(hook, "func", hook)
            is_of_clipping = str(getattr(function, "__module__", "")).startswith(OWN_HOOKS)
            if not is_of_clipping and not is_of_fsdp(hook):
                references.append(_Same(hook))
        return references

    entries: Structure = {}
    for name, table in vars(torch.nn.modules.module).items():
        if name.startswith("_global_") and isinstance(table, dict):
            entries["", name] = foreign(table)
    for path, module in modules_of(model, task):
        entries[path, ""] = (_Same(type(module)), _Same(module))
        for name, attribute in vars(module).items():
            if name.endswith(("ward_hooks", "ward_pre_hooks")):
                entries[path, name] = foreign(attribute)
            elif name == "forward":
                entries[path, name] = _Same(attribute)
            elif isinstance(attribute, SETTINGS) and name not in MODULE_ATTRIBUTES:
                # The type tells 1 from True, and None makes a NaN equal to itself.
                setting = attribute if attribute == attribute else None
                entries[path, SETTING + name] = (type(attribute), setting)
        # A module that torch.jit has frozen has no mode.
        entries[path, "training"] = getattr(module, "training", None)
        for name, p in module._parameters.items():
            if p is not None:
                hooks = (foreign(p._backward_hooks), foreign(p._post_accumulate_grad_hooks))
                entries[path, name] = (_Same(p), p.requires_grad, p.dtype, hooks)
    return entries


def changes(first: Structure, second: Structure) -> set[Place]:
    """Returns the places in which two structures differ."""
    places = {**first, **second}
    return {place for place in places if first.get(place, ...) != second.get(place, ...)}


def _is_fixed(place: Place) -> bool:
    """Returns whether this change invalidates the self-check.

    A module's own numbers and words may be scheduled.
    """
    return not place[1].startswith(SETTING)


class _Same:
    """A reference that equals references to the same object alone, and does not keep it alive."""

    def __init__(self, x: object) -> None:
        try:
            # Python returns the same weak reference as long as the object lives.
            self.reference: object = weakref.ref(x)
        except TypeError:
            self.reference = x

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Same) and self.reference is other.reference


def clippable(model: nn.Module) -> object:
    """Returns the trained parameters of the model, and those that the fallback takes over.

    A clipped sum is made for them.
    """
    plan = plan_of(model)
    parameters = [(id(p), p.dtype) for p in model.parameters() if p.requires_grad]
    return parameters, dict(plan.covers), dict(plan.layouts)
