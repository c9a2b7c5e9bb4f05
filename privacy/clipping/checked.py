"""Whether a model still is what passed the self-check (selfcheck.py), and whether its examples stay apart in a new shape.

`ClippedSum` calls `require_passed` before every micro-batch. It reads ids and flags: parameters that were added, replaced,
frozen or unfrozen, modes, and layers, hooks or adapters that were added or swapped. Values, closures, globals and other
attributes are not compared (docs/guarantee.md states that assumption).

A micro-batch of a new size or shape, or under a new autocast, may take another way through a model: a limit, groups, a mask as
long as the batch. So made-up examples take it first, twice, with the run's number of rows, precision and device. A third of the
rows stay and all others change. Kernels give equal bits for equal shapes, so a loss that changes has read another row.
"""

import array
import enum
import gc
import hashlib
import io
import itertools
import math
import pickle
import random
import sys
import types
import weakref
from collections import Counter, OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from .sharded import is_of_fsdp, put_away, whole

Task = Callable[..., Tensor]
Inputs = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]
"""Makes other rows of a tensor (B, ...)."""
Place = tuple[str, str]
"""Path of a module, and an attribute of it."""
Structure = dict[Place, object]

TASK = "the task"
"""Before the paths of modules of a task; no child of a model is called so."""
SETTING = "setting "
"""Before the name of a module's attribute that is a number or a word."""
SETTINGS = (bool, int, float, str, type(None), np.generic, enum.Enum)
_OWN = vars(nn.Module()).keys() - {"_non_persistent_buffers_set"}
"""Attributes of every module; its mode and hooks are looked at by themselves."""
SMALL = 1e-3
"""Weights with a root mean square below it hide the gradients of the layers before them."""
DEPTH = 6
"""Levels of containers and objects inside one another, below a module's attribute, in which a forward may gather something."""
OBJECTS = 100_000
"""Objects in all attributes together that are looked at, the nearest first; a container of more than are left is passed over."""
COPIED = 1 << 24
"""Numbers of a tensor or an array in an attribute that a check puts back; of larger ones writes are seen only."""
PLAIN = (int, str, bytes, types.NoneType, bool, float, complex)
"""What is compared as it is."""
LEAVES = (
    type,
    types.ModuleType,
    types.BuiltinFunctionType,
    types.CodeType,
    types.FrameType,
    types.GeneratorType,
    property,
    weakref.ref,
    weakref.ProxyType,
    weakref.CallableProxyType,
    np.dtype,
    torch.dtype,
    torch.device,
)
"""What is neither looked into nor compared."""
MUTABLE = (OrderedDict, dict, list, set, deque)
CONTAINERS = (*MUTABLE, tuple, frozenset)
HOLDERS = (list, dict, set, deque, Tensor, np.ndarray)
BYTES = (bytearray, array.array)
STREAMS = (io.BytesIO, io.StringIO)
OPAQUE = ("torch", "numpy", "logging", "threading", "_thread", __name__.partition(".")[0])
"""Packages whose objects and functions are not looked into."""
LARGE = 1e4
"""An example's floating inputs times this are large."""
IN_ANY_ORDER = 1e-2
"""Relative difference on accelerators, some of whose kernels add up in no fixed order, in bf16 too."""
HOW = (
    "make the PrivateLoop again; for a ClippedSum call privacy.clipping.selfcheck.check_against_autograd(model, made_up_inputs) "
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
    modules = dict(_modules(model, task))
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


def _modules(model: nn.Module, task: object) -> list[tuple[str, nn.Module]]:
    """Those of the model, and of a task that is another module, or a method of one."""
    owner = getattr(task, "__self__", task)
    others = (
        owner.named_modules(prefix=TASK)
        if isinstance(owner, nn.Module) and owner is not model
        else ()
    )
    return [*model.named_modules(), *others]


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
            str(getattr(f, "__module__", "")).startswith(f"{__package__}.") or is_of_fsdp(h)
            for f, h in of_modules
        ]
        return [_Same(h) for (_, h), is_ours in zip(of_modules, ours, strict=True) if not is_ours]

    of_all = {
        n: x
        for n, x in vars(torch.nn.modules.module).items()
        if n.startswith("_global_") and isinstance(x, dict)
    }
    found: Structure = {("", name): foreign(table) for name, table in of_all.items()}
    for path, module in _modules(model, task):
        found[path, ""] = (_Same(type(module)), _Same(module))
        for name, value in vars(module).items():
            if name.endswith(("ward_hooks", "ward_pre_hooks")):
                found[path, name] = foreign(value)
            elif name == "forward":
                found[path, name] = _Same(value)
            elif isinstance(value, SETTINGS) and name not in _OWN:
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


def require_apart(task: Task, inputs: Inputs, size: int) -> None:
    """Tries made-up neighbours in one micro-batch; collective where `task` is.

    Args:
        task: `task(**inputs)` returns loss_B.
        inputs: two or more made-up examples, shaped as those of the micro-batch; never private data.
        size: rows of the micro-batch.

    Raises:
        PrivacyConfigError: the loss of an example changes with its neighbours, or with chance, or there is not one for each;
            or the model raises an error on the made-up examples as they were given.
    """
    if size < 2:
        return
    stays_B = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 1 / 3
    stays_B[0], stays_B[size // 2] = False, True
    losses: list[Tensor] = []
    row_B = torch.arange(size) % len(next(iter(inputs.values())))
    among_neighbours(
        inputs,
        row_B,
        stays_B,
        lambda micro_batch, has_nan: losses.append(losses_of(task, micro_batch)),
    )
    first, *others = (loss_B[stays_B.to(loss_B.device)].double() for loss_B in losses)
    where = f"in micro-batches of {size} examples, in the precision of the run, "
    for other in others:  # when all are there, since no rank may stop in between
        compare_losses(first, other, 0.0 if first.device.type == "cpu" else IN_ANY_ORDER, where)


def losses_of(task: Task, micro_batch: Inputs) -> Tensor:
    """(B,): the losses of made-up examples, without gradients.

    Raises:
        PrivacyConfigError: there is not one for each.
        NotTaken: the model raises an error on them.
    """
    size = len(next(iter(micro_batch.values())))
    with torch.no_grad(), must_take(f"{size} examples together"):
        loss_B = task(**micro_batch)
    if loss_B.shape != (size,):
        raise PrivacyConfigError(
            f"the task returned a tensor of shape {tuple(loss_B.shape)} for {size} examples, not one loss for each"
        )
    return loss_B


def compare_losses(first_B: Tensor, second_B: Tensor, tolerance: float, where: str = "") -> None:
    """
    Raises:
        PrivacyConfigError: the losses of the same examples differ.
    """
    largest = float(first_B.nan_to_num(0, 0, 0).abs().max())
    if not torch.allclose(
        first_B, second_B, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    ):
        raise PrivacyConfigError(
            f"{where}the loss of an example changes with the other examples of its micro-batch: every example's loss must "
            "depend on that example alone, at every size (no mean over the batch, no contrast between examples, no state that "
            "the forward keeps, no limit or group that examples share, no length that is fitted to the longest, no branch on "
            "the size or dtype that leads to one)"
        )


def among_neighbours(
    inputs: Inputs, row_B: Tensor, stays_B: Tensor, run: Callable[[Inputs, bool], object]
) -> None:
    """Calls `run(micro_batch, has_nan)` on examples that stay while the rows around them change, for three kinds of these.

    The first hold NaN and infinity, the second large finite numbers, which NaN would hide from the largest number of a batch, and
    the third are other whole examples. What `run` finds of the examples that stay, it compares.

    Args:
        row_B: which made-up example stands in a row.
        stays_B: False for the rows that change.

    Raises:
        NotTaken: `run` raised it for all kinds but one. The third and the last are whole examples, whose ids may have to stand
            where they are.
    """
    kind_B = torch.arange(len(stays_B)) % 7

    def hostile(*values: float) -> Change:
        """As many of seven rows hold examples times these values."""

        def change(x_B: Tensor) -> Tensor:
            # A crowd of one example is for limits that count examples, a short one for lengths that are fitted to the longest.
            y_B = torch.where(in_rows(kind_B > 4, x_B), x_B[:1], x_B.roll(1, 0))
            y_B = torch.where(in_rows(kind_B == 4, x_B), shortened(x_B), y_B)
            if x_B.is_floating_point():  # NaN and infinity carry over at any strength
                for kind, value in enumerate(values):
                    y_B = torch.where(in_rows(kind_B == kind, x_B), y_B * value, y_B)
            return y_B

        return change

    kinds: list[Change] = [
        hostile(torch.nan, torch.inf, -torch.inf, torch.nan),
        hostile(LARGE, -LARGE, LARGE, -LARGE),
        lambda x_B: x_B.roll(1, 0),
        lambda x_B: shortened(x_B[:1]).expand_as(x_B),
        lambda x_B: x_B[:1].expand_as(x_B),
    ]
    rows = {name: x[row_B.to(x.device)] for name, x in inputs.items()}
    num_taken = 0
    for number, change in enumerate(kinds):
        if number > 2 and num_taken > 1:
            return
        try:
            micro_batch = {
                name: torch.where(in_rows(stays_B, x), x, change(x)) for name, x in rows.items()
            }
            run(micro_batch, number == 0)
            num_taken += 1
        except NotTaken:  # the model refuses such values itself; it is tried on those that it takes
            if num_taken + len(kinds[number + 1 :]) < 2:
                raise


def in_rows(is_so_B: Tensor, like: Tensor) -> Tensor:
    """A condition on rows, on the device of a tensor (B, ...) and with as many dimensions."""
    return is_so_B.to(like.device).view(-1, *[1] * (like.dim() - 1))


def shortened(x: Tensor) -> Tensor:
    """The second half of dimension 1 (tokens, as a rule) is zero."""
    if x.dim() < 2:
        return x
    length = x.shape[1]
    is_kept = torch.arange(length, device=x.device) < -(-length // 2)
    return torch.where(is_kept.view(-1, *[1] * (x.dim() - 2)), x, x.new_zeros(()))


class NotTaken(PrivacyConfigError):
    """The model raised an error on made-up inputs."""


def generators() -> list[object]:
    """States of the global generators, from which code draws that names none."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    _, numbers, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # foreign models use it
    states = [x.numpy().tobytes() for x in (torch.get_rng_state(), *devices)]
    return [random.getstate(), np.asarray(numbers).tobytes(), rest, *states]


@contextmanager
def must_take(what: str) -> Iterator[None]:
    """Reports in one line what the model raises on made-up inputs; lets clipping's own refusals through.

    It also refuses code that draws from a global generator: a mask or coin would depend on an example's place in the batch.

    Raises:
        NotTaken: the model raised something else.
    """

    before = generators()
    try:
        yield
    except (
        PrivacyConfigError,
        MemoryError,
        torch.OutOfMemoryError,
    ):  # the last two speak for themselves
        raise
    except Exception as error:  # a model may raise anything
        said = " ".join(str(error).split())[:200] or "without a word"
        raise NotTaken(
            f"the model raises {type(error).__name__} on made-up examples of the self-check ({what}): {said}; "
            "give it made-up examples that it takes: made_up= of PrivateLoop, or inputs of check_against_autograd"
        ) from error
    if generators() != before:
        raise PrivacyConfigError(
            "the forward draws random numbers, so an example's gradient depends on its place in the micro-batch: switch "
            "dropout and random masks off (model.eval(), p = 0), or make them of an input that each example brings along"
        )


@contextmanager
def nothing_is_small(model: nn.Module) -> Iterator[None]:
    """Weights near zero are random inside: one that starts at zero hides the gradients of the layers before it."""
    floating = [_memory(p) for p in model.parameters() if p.is_floating_point()]
    small = {
        p: p.detach().clone()
        for p in floating
        if float(p.detach().float().norm()) < SMALL * math.sqrt(p.numel())
    }
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in small:
                std = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.02
                p.copy_(std * torch.randn(p.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for p, before in small.items():
                p.copy_(before)


def _memory(parameter: nn.Parameter) -> Tensor:
    """A view of each number that a parameter holds, once: one that is expanded repeats them and cannot be written itself."""
    repeated = slice(0, 1)
    return parameter.detach()[
        tuple(slice(None) if stride else repeated for stride in parameter.stride())
    ]


Path = tuple[str | int, ...]
"""Name of an attribute, and which entry leads on from there, and from there; -1 for all entries of a set."""


def objects_below(
    roots: Iterable[tuple[str, object]], known: Iterable[nn.Module], depth: int
) -> Iterator[tuple[Path, Any, list[Any]]]:
    """Each object below some named values, once, with its path and what it holds; the nearest first, at most OBJECTS.

    Args:
        known: modules that are looked at by themselves.
        depth: of objects inside one another that are looked into; what they hold is still given, as if it held nothing.
    """
    seen: dict[int, object] = {id(module): module for module in known}  # which so keep their ids
    level: list[tuple[Path, object]] = [((name,), x) for name, x in roots]
    left = OBJECTS
    for levels_below in reversed(range(depth + 1)):
        below: list[tuple[Path, object]] = []
        for path, x in level:
            if type(x) not in PLAIN:
                if id(x) in seen or issubclass(type(x), LEAVES):
                    continue
                seen[id(x)] = x
            entries = entries_of(x) if levels_below else []
            entries = entries if len(entries) <= left else []
            left -= len(entries)
            yield path, x, entries
            is_set = issubclass(type(x), set | frozenset)
            below += [
                ((*path, -1 if is_set else i), y)
                for i, y in enumerate(entries)
                if type(y) not in PLAIN
            ]
        level = below


def entries_of(x: Any) -> list[Any]:
    """What an object holds: entries and keys of a container; names and values of attributes, slots, what C code refers to.

    No code of an object runs: all is read where Python keeps it.
    """
    kind, items = type(x), _items(x)
    if kind in PLAIN or kind in CONTAINERS:
        return items
    if _is_opaque(x):
        return []
    attributes = _attributes(x)
    items += [*attributes, *attributes.values(), *_class_containers(kind).values()]
    if issubclass(kind, np.ndarray) and x.dtype.hasobject:
        items += x.ravel().tolist()
    if issubclass(kind, Tensor):
        items.append(_gradient(x))
    if issubclass(kind, CONTAINERS):
        return items + [value for _, value in _slots(x) if value is not ...]
    listed = [attributes, *attributes.values()]
    if issubclass(kind, types.FunctionType):
        listed += [x.__globals__, x.__builtins__]
    ids = {*map(id, listed)}
    return items + [y for y in gc.get_referents(x) if id(y) not in ids]


def _gradient(x: Tensor) -> Tensor | None:
    """The gradient in a tensor, which a forward may have put there itself; of what is computed, torch keeps none."""
    with suppress(Exception):  # foreign tensors raise anything
        return x.grad if x.is_leaf else None
    return None


def _lent(x: Any) -> np.ndarray | None:
    """The bytes of an object that lends its memory, such as a map of memory or an array of ctypes; None of more than COPIED."""
    if issubclass(type(x), (Tensor, np.ndarray, np.generic, *PLAIN, *BYTES)):
        return None
    with suppress(Exception):  # most objects lend none
        memory = np.frombuffer(x, np.uint8)
        return memory if memory.size <= COPIED else None
    return None


def _stream(x: Any) -> tuple[Any, int]:
    """The content of a stream in memory, and the place that is read or written next; by its built-in class."""
    kind: Any = next(kind for kind in STREAMS if issubclass(type(x), kind))
    return kind.getvalue(x), kind.tell(x)


def _set_stream(x: Any, content: Any, place: int) -> None:
    kind: Any = next(kind for kind in STREAMS if issubclass(type(x), kind))
    kind.seek(x, 0)
    kind.truncate(x)
    kind.write(x, content)
    kind.seek(x, place)


def _is_opaque(x: Any) -> bool:
    """Whether an object or a function is of a package whose objects are left alone."""
    if issubclass(type(x), (nn.Module, Tensor, np.ndarray, *CONTAINERS)):
        return False
    maker = x.__module__ if issubclass(type(x), types.FunctionType) else type(x).__module__
    return str(maker).partition(".")[0] in OPAQUE


def _items(x: Any) -> list[Any]:
    """Entries of a container, a mapping's keys first, as its built-in class gives them: other classes may refuse."""
    if type(x) in PLAIN:
        return []
    kinds: tuple[Any, ...] = (type(x),) if type(x) in CONTAINERS else CONTAINERS
    for kind in kinds:
        if issubclass(type(x), kind):
            return (
                [*kind.keys(x), *kind.values(x)] if issubclass(kind, dict) else [*kind.__iter__(x)]
            )
    return []


def _attributes(x: object) -> dict[str, Any]:
    """Where an object keeps its attributes; an empty one if nowhere."""
    with suppress(Exception):  # a class may make something else of the name
        attributes = object.__getattribute__(x, "__dict__")
        if type(attributes) is dict:
            return attributes
    return {}


def _slots(x: object) -> list[tuple[types.MemberDescriptorType, Any]]:
    """Attributes that an object keeps in slots, by what reads and writes them; ... where there is none."""
    slots: list[tuple[types.MemberDescriptorType, Any]] = []
    for kind in type(x).__mro__:
        for slot in vars(kind).values() if "__slots__" in vars(kind) else ():
            if type(slot) is types.MemberDescriptorType:
                value = ...
                with suppress(AttributeError):
                    value = slot.__get__(x, kind)
                slots.append((slot, value))
    return slots


def _class_containers(kind: type) -> dict[str, Any]:
    """Containers and tensors that a class holds for all its objects; torch's classes hold none of examples."""
    bases = [
        base
        for base in kind.__mro__
        if base.__module__.partition(".")[0] not in (*OPAQUE, "builtins")
    ]
    attributes = {name: value for base in bases for name, value in vars(base).items()}
    return {
        name: value
        for name, value in attributes.items()
        if issubclass(type(value), HOLDERS) and not name.startswith("__")
    }


@contextmanager
def put_back(modules: Iterable[nn.Module], depth: int = 0) -> Iterator[Callable[[], None]]:
    """Attributes of these modules, modes and hooks included, are afterwards what they were; yields what puts them back early.

    The entries of dicts, lists, sets, deques and objects that are attributes (a cache) are put back too. With a depth so are
    those inside of them, and numbers of tensors and arrays of at most COPIED numbers.
    """
    modules = [*modules]
    roots = [
        (name, x) for m in modules for name, x in {**_class_containers(type(m)), **vars(m)}.items()
    ]
    objects = [x for _, x, _ in objects_below(roots, modules, depth)]
    mutable = [x for x in objects if issubclass(type(x), MUTABLE)]
    others = [
        x
        for x in objects
        if type(x) not in PLAIN and type(x) not in CONTAINERS and not _is_opaque(x)
    ]
    tables = [*map(vars, modules), *mutable, *map(_attributes, others)]
    before = [(table, _copied(table)) for table in tables]
    slots = [(x, slot, value) for x in others for slot, value in _slots(x)]
    registered = {id(x) for m in modules for x in (*m._parameters.values(), *m._buffers.values())}
    numbers = [x for x in others if depth and id(x) not in registered and _has_few_numbers(x)]
    tensors = [(x.data, x.data.clone()) for x in numbers if issubclass(type(x), Tensor)]
    arrays: list[tuple[Any, Any]] = [
        (x, x.copy()) for x in numbers if issubclass(type(x), np.ndarray)
    ]
    buffers: list[tuple[Any, Any]] = [
        (x, x[:]) for x in others if depth and issubclass(type(x), BYTES)
    ]
    lent = [(x, memory.copy()) for x in others if depth and (memory := _lent(x)) is not None]
    streams = [
        (x, _stream(x)) for x in others if depth and issubclass(type(x), STREAMS) and not x.closed
    ]
    gradients = [(x, _gradient(x)) for x in others if issubclass(type(x), Tensor)]

    def restore() -> None:
        for table, content in before:
            if not _is_same(table, content):  # what nobody has touched may be in use elsewhere
                # By the built-in class, since others may refuse it.
                kind: Any = next(kind for kind in MUTABLE if issubclass(type(table), kind))
                kind.clear(table)
                if isinstance(content, dict):
                    for key, value in content.items():
                        kind.__setitem__(table, key, value)
                else:
                    (kind.update if kind is set else kind.extend)(table, content)
        for x, slot, value in slots:
            with suppress(AttributeError):  # what is deleted may not be there
                slot.__set__(x, value) if value is not ... else slot.__delete__(x)
        for tensor, as_it_was in tensors:
            if not torch.equal(tensor, as_it_was):
                tensor.copy_(as_it_was)
        for array_, as_it_was in arrays:
            if array_.tobytes() != as_it_was.tobytes():
                array_[...] = as_it_was
        for buffer, as_it_was in buffers:
            if buffer != as_it_was:
                buffer[:] = as_it_was
        for x, as_it_was in lent:
            memory = _lent(x)
            if memory is not None and not np.array_equal(memory, as_it_was):
                memory[:] = as_it_was
        for x, as_it_was in streams:
            if _stream(x) != as_it_was:
                _set_stream(x, *as_it_was)
        for x, gradient in gradients:
            if _gradient(x) is not gradient:
                x.grad = gradient

    try:
        yield restore
    finally:
        restore()


def _has_few_numbers(x: Any) -> bool:
    is_plain = issubclass(type(x), Tensor) and x.layout == torch.strided and not x.is_meta
    is_array = issubclass(type(x), np.ndarray) and x.flags.writeable
    return (is_plain and not x.is_nested and x.numel() <= COPIED) or (is_array and x.size <= COPIED)


def _copied(table: Any) -> dict[Any, Any] | list[Any]:
    """The entries of a container."""
    items = _items(table)
    half = len(items) // 2
    return (
        dict(zip(items[:half], items[half:], strict=True))
        if issubclass(type(table), dict)
        else items
    )


def _is_same(table: Any, content: Any) -> bool:
    """Whether a container still holds these very objects, in this order."""
    same = set if issubclass(type(table), set) else list
    return bool(same(map(id, _items(table))) == same(map(id, _items(content))))


def writes_to(tensor: Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to in place, by the count of autograd's own check."""
    return 0 if tensor.is_inference() else int(tensor._version)


@dataclass
class Held:
    """What lies in attributes of modules after a call.

    Attributes:
        counts: by attribute, of entries, and of the numbers in tensors and arrays among them.
        writes: id of a tensor -> its attribute, the tensor, which so keeps its id, and how often it was written to; of an array
            that is too large to be put back, what it holds.
        contents: of every object, by its path: its numbers, and those and the words among its entries.
    """

    counts: Counter[str] = field(default_factory=Counter)
    writes: dict[int, tuple[str, object, object]] = field(default_factory=dict)
    contents: dict[Path, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def of(self, path: Path) -> list[Any]:
        """What lies at a path, in an order that is the same for the same entries of a set."""
        contents = self.contents.get(path, [])
        return sorted(contents, key=repr) if -1 in path else contents


def held(model: nn.Module, task: Task) -> Held:
    """Reads what attributes of modules lead to: not the values of registered parameters and buffers, but their attributes."""
    modules, state = _modules(model, task), Held()
    registered: dict[str, Tensor] = {}
    roots: dict[str, Any] = {}
    for prefix, module in modules:
        attributes = {**_class_containers(type(module)), **vars(module)}
        roots |= {
            f"{prefix}.{name}".strip("."): value
            for name, value in attributes.items()
            if name not in _OWN
        }
        tensors = {**module._parameters, **module._buffers}
        registered |= {
            f"{prefix}.{name}".strip("."): x for name, x in tensors.items() if x is not None
        }
    roots |= {place: _attributes(x) for place, x in registered.items()}
    roots |= {f"{place}.grad": _gradient(x) for place, x in registered.items()}
    registered_ids = {*map(id, registered.values())}
    for path, x, entries in objects_below(roots.items(), [module for _, module in modules], DEPTH):
        place, kind = str(path[0]), type(x)
        state.counts[place] += len(entries)
        words: list[Any] = [_word(y) if type(y) in PLAIN else None for y in entries]
        if kind not in CONTAINERS:
            digest = None if id(x) in registered_ids else _content(x, entries)
            words.append(digest)
            if issubclass(kind, Tensor):
                state.counts[place] += x.numel()
                state.writes[id(x)] = place, x, writes_to(x)
            elif issubclass(kind, np.ndarray):
                state.counts[place] += x.size
                if x.flags.writeable and not _has_few_numbers(x):
                    state.writes[id(x)] = place, x, digest
            elif issubclass(kind, BYTES):
                state.counts[place] += len(x)
        state.contents[path] += (
            sorted(words, key=repr) if issubclass(kind, set | frozenset) else words
        )
    return state


def _word(x: Any) -> object:
    """A number or a word, of which equals are equal: 1 is not True, and a NaN is itself."""
    return repr(x) if type(x) in (bool, float, complex) else x


def _content(x: Any, entries: list[Any]) -> object:
    """What tells an object from others apart from what it holds: its value, or a hash of its numbers."""
    if type(x) in PLAIN:
        return _word(x)
    with suppress(Exception):  # foreign tensors and objects raise anything
        if issubclass(type(x), Tensor):
            return hashlib.sha256(_bytes_of(x.detach())).hexdigest()
        if issubclass(type(x), np.ndarray):
            is_large_file = x.size > COPIED and not x.flags.writeable
            numbers = np.empty(0) if is_large_file or x.dtype.hasobject else np.ascontiguousarray(x)
            return x.shape, hashlib.sha256(numbers.reshape(-1).view(np.uint8).data).hexdigest()
        if issubclass(type(x), BYTES):
            return bytes(x)
        if issubclass(type(x), STREAMS):
            return _stream(x)
        if (memory := _lent(x)) is not None:
            return memory.tobytes()
        is_value = (
            type(x).__module__ in sys.stdlib_module_names and not entries and not entries_of(x)
        )
        if issubclass(type(x), np.generic) or is_value:
            return hashlib.sha256(pickle.dumps(x)).hexdigest()
    return None


def _bytes_of(x: Tensor) -> bytes:
    """The numbers of a tensor; of one that is sparse, say, all that it consists of."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        torch.save(x, file := io.BytesIO())
        return file.getvalue()
    shape = str(x.shape).encode()
    if x.is_meta:
        return shape
    return (
        shape
        + x.cpu()
        .resolve_conj()
        .resolve_neg()
        .contiguous()
        .view(-1)
        .view(torch.uint8)
        .numpy()
        .tobytes()
    )


def require_nothing_gathered(
    model: nn.Module, task: Task, inputs: Inputs, restore: Callable[[], None]
) -> None:
    """What a forward gathers of made-up examples for much later calls shows before it is used, such as a queue of features.

    Two examples go first, or one of them twice, and then a single one twice: nothing that is held at the end may depend on who
    went first, become more with every call, or have been written in place. Looked at are attributes of modules, of their
    classes and of parameters, and what lies in them to the DEPTH of objects inside one another.

    Raises:
        PrivacyConfigError: naming the attribute.
    """

    def call(*rows: int) -> None:
        with must_take("one call after another"):
            task(**{name: x[[*rows]] for name, x in inputs.items()})

    def after(*first: int) -> tuple[Held, Held]:
        """What is held after the second and after the third call."""
        restore()
        call(*first)
        call(0)
        second = held(model, task)
        call(0)
        third = held(model, task)
        restore()
        return second, third

    (before, last), (_, others), (_, again) = after(0, 1), after(1, 1), after(0, 1)
    kept = [place for place, count in last.counts.items() if count > before.counts[place]]
    kept += [
        place
        for key, (place, _, writes) in last.writes.items()
        if before.writes.get(key, [writes])[-1] != writes
    ]
    for path in {**last.contents, **others.contents}:
        leaves = itertools.zip_longest(
            last.of(path), others.of(path), again.of(path), fillvalue=...
        )
        # What differs between equal calls too, such as the time, is no example's; what lies beside it is looked at.
        kept += [str(path[0]) for now, other, twin in leaves if now == twin != other]
    if kept:
        raise PrivacyConfigError(
            "the forward keeps more with every call, something of earlier calls, or writes in place into a tensor that it "
            f"keeps ({kept[0]}): what it keeps of one micro-batch would reach later ones; keep no state in the forward"
        )


@contextmanager
def untouched(
    model: nn.Module, task: object, dtype: torch.dtype | None = None
) -> Iterator[Callable[[], None]]:
    """A check of a model leaves nothing behind: parameters, buffers and attributes of its modules are copies inside.

    Floating parameters and buffers are of `dtype`, which is torch's default there too. It yields as `put_back` does.

    Raises:
        PrivacyConfigError: something inside wrote into a parameter or buffer, or made a buffer: that would reach other
            micro-batches, and leave the run in checkpoints, without noise.
    """
    tensors, default = (
        {**dict(model.named_parameters()), **dict(model.named_buffers())},
        torch.get_default_dtype(),
    )
    originals, saved = {name: x.data for name, x in tensors.items()}, set(model.state_dict())
    with put_back((module for _, module in _modules(model, task)), DEPTH) as restore:
        try:
            for name, x in tensors.items():
                x.data = originals[name].to(
                    dtype if dtype and x.is_floating_point() else x.dtype, copy=True
                )
            torch.set_default_dtype(dtype or default)
            yield restore
            after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, x in tensors.items():
                before = originals[name].to(x.dtype)
                if after.get(name) is not x or not torch.allclose(
                    x.data, before, 0, 0, equal_nan=True
                ):
                    raise PrivacyConfigError(
                        f"the forward changes the buffer {name}: what it keeps of one micro-batch would reach others and leave "
                        "the run without noise; keep no state in the forward"
                    )
            if new := set(model.state_dict()) - saved:
                raise PrivacyConfigError(
                    f"the forward makes the buffer {min(new)}, which would leave the run in checkpoints, without noise; make it "
                    "in __init__, or with persistent=False"
                )
        finally:
            torch.set_default_dtype(default)
            for name, x in tensors.items():
                x.data = originals[name]
