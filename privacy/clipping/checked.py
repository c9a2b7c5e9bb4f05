"""Whether a model still is what passed the self-check (selfcheck.py), and whether its examples stay apart in a new shape.

`ClippedSum` calls `require_passed` before every micro-batch. It reads ids and flags: parameters that were added, replaced,
frozen or unfrozen, modes, and layers, hooks or adapters that were added or swapped. Values, closures, globals and other
attributes are not compared (docs/guarantee.md states that assumption).

A micro-batch of a new size or shape, or under a new autocast, may take another way through a model: a limit, groups, a mask as
long as the batch. So made-up examples take it first, twice, with the run's number of rows, precision and device. A third of the
rows stay and all others change. Kernels give equal bits for equal shapes, so a loss that changes has read another row.
"""

import enum
import hashlib
import itertools
import math
import random
import types
import weakref
from collections import OrderedDict, defaultdict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
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
_OWN = vars(nn.Module()).keys()
"""Attributes of every module; its mode and hooks are looked at by themselves."""
SMALL = 1e-3
"""Weights with a root mean square below it hide the gradients of the layers before them."""
DEPTH = 6
"""Of containers and objects inside one another, from a module's attribute on, in which a forward may gather something."""
LOOKED_INTO = 1000
"""Containers and objects of one depth that are looked into."""
COPIED = 1 << 24
"""Numbers of a tensor or an array in an attribute that a check puts back; of larger ones writes are seen only."""
LEAVES = (
    Tensor, np.ndarray, str, bytes, *SETTINGS, type, types.ModuleType, types.FunctionType, types.BuiltinFunctionType,
    types.MethodType, weakref.ref,
)  # fmt: skip
"""What holds nothing that is looked into."""
HOLDERS = (list, dict, set, deque, Tensor, np.ndarray)
OPAQUE = ("builtins", "torch", "numpy", "logging", "threading", "_thread", __name__.partition(".")[0])
"""Packages whose objects are not looked into."""
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
        raise PrivacyConfigError(f"this {type(model).__name__} has not passed the self-check: {HOW}")
    kinds, *others = [{n: (x.dtype, x.dim()) for n, x in xs.items()} for xs in (inputs, *(p.made_up for p in passed))]
    passed = [p for p, made_up in zip(passed, others, strict=True) if p.task() == task and made_up == kinds]
    if not passed:
        listed = ", ".join(f"{name} ({dtype}, {ndim} dimensions)" for name, (dtype, ndim) in sorted(kinds.items()))
        raise PrivacyConfigError(
            f"the task of this micro-batch is not the one that passed the self-check, or not with inputs named {listed}, so its "
            f"loss may mix examples: give the same object to check_against_autograd and to add_micro_batch; {HOW}"
        )
    put_away(model)
    now = structure(model, task)
    changed = [changes(p.structure, now) - p.moved for p in passed]
    unchanged = [p for p, places in zip(passed, changed, strict=True) if not any(map(_is_fixed, places))]
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
    autocasts = [(device, torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)) for device in devices]
    shapes = tuple((name, x.shape, x.device) for name, x in sorted(inputs.items()))
    known = {place for p in unchanged for place in p.structure}  # engines add attributes of their own
    modules = dict(_modules(model, task))
    settings = {
        (path, name)
        for path, name in set[Place]().union(*changed)
        if not _is_fixed((path, name))
        and ((path, name) in known or hasattr(type(modules.get(path)), name.removeprefix(SETTING)))
    }
    way = (shapes, *autocasts, frozenset((place, now.get(place)) for place in settings))
    is_seen = settings <= now.keys()  # what has become a tensor, say, has values that nobody looks at
    if is_seen and any(way in p.tried for p in unchanged):
        return
    mine = max(unchanged, key=lambda p: sum(p.made_up[n].shape[1:] == x.shape[1:] for n, x in inputs.items()))
    made_up = {}
    for name, x in inputs.items():  # cut, or their last entry repeated, in each dimension but the first
        y = mine.made_up[name]
        for dim in range(1, x.dim()):
            y = y.index_select(dim, torch.arange(x.shape[dim], device=y.device).clamp(max=y.shape[dim] - 1))
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
    others = owner.named_modules(prefix=TASK) if isinstance(owner, nn.Module) and owner is not model else ()
    return [*model.named_modules(), *others]


def structure(model: nn.Module, task: object = None) -> Structure:
    """Reads, from ids and flags, what decides the way of a value or a gradient through the model; never values of tensors.

    These are the registered modules of the model, and of a task that is another module or a method of one: class, mode, hooks,
    an own `forward`, numbers and words such as a rate or a name, and parameters with whether they are trained; and torch's
    global hooks. Hooks of clipping itself and of FSDP do not count. Objects are compared by weak references: an id could be
    given out again.
    """

    def foreign(hooks: Mapping[int, Any] | None) -> list[_Same]:
        of_modules = [(getattr(h, "func", h), h) for h in (hooks or {}).values()]  # clipping's may be partial
        ours = [str(getattr(f, "__module__", "")).startswith(f"{__package__}.") or is_of_fsdp(h) for f, h in of_modules]
        return [_Same(h) for (_, h), is_ours in zip(of_modules, ours, strict=True) if not is_ours]

    of_all = {
        n: x for n, x in vars(torch.nn.modules.module).items() if n.startswith("_global_") and isinstance(x, dict)
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
        found[path, "training"] = getattr(module, "training", None)  # a module that torch.jit has frozen has no mode
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
            self.reference: object = weakref.ref(x)  # the same reference as long as the object lives
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
    among_neighbours(inputs, row_B, stays_B, lambda micro_batch, has_nan: losses.append(losses_of(task, micro_batch)))
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
    if not torch.allclose(first_B, second_B, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        raise PrivacyConfigError(
            f"{where}the loss of an example changes with the other examples of its micro-batch: every example's loss must "
            "depend on that example alone, at every size (no mean over the batch, no contrast between examples, no state that "
            "the forward keeps, no limit or group that examples share, no length that is fitted to the longest, no branch on "
            "the size or dtype that leads to one)"
        )


def among_neighbours(inputs: Inputs, row_B: Tensor, stays_B: Tensor, run: Callable[[Inputs, bool], object]) -> None:
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
            micro_batch = {name: torch.where(in_rows(stays_B, x), x, change(x)) for name, x in rows.items()}
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
    except (PrivacyConfigError, MemoryError, torch.OutOfMemoryError):  # the last two speak for themselves
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
    floating = [p for p in model.parameters() if p.is_floating_point()]
    small = {p: p.detach().clone() for p in floating if float(p.detach().norm()) < SMALL * math.sqrt(p.numel())}
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


def containers(
    roots: Iterable[tuple[str, object]], known: Iterable[nn.Module], depth: int
) -> Iterator[tuple[str, Any, list[Any]]]:
    """Each container and plain object below some named values, once, with the name and what it holds; the nearest first.

    Args:
        known: modules that are looked at by themselves.
        depth: of containers inside one another. Of each depth but the first, LOOKED_INTO are looked into.
    """
    seen = {id(module) for module in known}
    level = [*roots]
    for _ in range(depth):
        below: list[tuple[str, object]] = []
        for name, x in level:
            entries = None if id(x) in seen or isinstance(x, LEAVES) else entries_of(x)
            if entries is None:
                continue
            seen.add(id(x))
            yield name, x, entries
            below += [(name, y) for y in _ends(entries) if not isinstance(y, LEAVES)]
        level = below[:LOOKED_INTO]


def entries_of(x: Any) -> list[Any] | None:
    """What a container holds, or an object, and its class for all objects; None for those of OPAQUE packages.

    No code of an object runs: attributes are read where Python keeps them.
    """
    if isinstance(x, dict):
        return [*dict.values(x)]
    if isinstance(x, list | tuple | set | frozenset | deque):
        return [*x]
    if _is_opaque(type(x)) and not isinstance(x, nn.Module):
        return None
    return [*_slots(x).values(), *getattr(x, "__dict__", {}).values(), *_class_containers(type(x)).values()]


def _ends(entries: list[Any]) -> list[Any]:
    """The entries that are looked at: of many the first and the last, where a queue is written."""
    return entries if len(entries) <= LOOKED_INTO else entries[: LOOKED_INTO // 2] + entries[-LOOKED_INTO // 2 :]


def _is_opaque(kind: type) -> bool:
    return kind.__module__.partition(".")[0] in OPAQUE


def _slots(x: object) -> dict[str, Any]:
    """Attributes of an object without a dictionary."""
    stated = [vars(kind).get("__slots__", ()) for kind in type(x).__mro__]
    names = [name for slots in stated for name in ([slots] if isinstance(slots, str) else slots)]
    return {name: getattr(x, name) for name in names if hasattr(x, name) and not name.startswith("__")}


def _class_containers(kind: type) -> dict[str, Any]:
    """Containers and tensors that a class holds for all its objects; torch's classes hold none of examples."""
    held = {name: value for one in kind.__mro__ if not _is_opaque(one) for name, value in vars(one).items()}
    return {name: value for name, value in held.items() if isinstance(value, HOLDERS) and not name.startswith("__")}


@contextmanager
def put_back(modules: Iterable[nn.Module], depth: int = 1) -> Iterator[Callable[[], None]]:
    """Attributes of these modules, modes and hooks included, are afterwards what they were; yields what puts them back early.

    The entries of dicts, lists, sets, deques and objects that are attributes (a cache) are put back too, to a depth of
    containers inside one another; below the first, also numbers of tensors and arrays of at most COPIED numbers in them.
    """
    modules = [*modules]
    roots = [(name, x) for m in modules for name, x in {**_class_containers(type(m)), **vars(m)}.items()]
    found = [*containers(roots, modules, depth)]
    objects = [x for _, x, _ in found]
    tables: list[Any] = [*map(vars, modules), *(x for x in objects if isinstance(x, dict | list | set | deque))]
    tables += [vars(x) for x in objects if hasattr(x, "__dict__")]
    before = [(table, (dict if isinstance(table, dict) else list)(table)) for table in tables]
    slots = [(x, _slots(x)) for x in objects]
    registered = {id(x) for m in modules for x in (*m._parameters.values(), *m._buffers.values())}
    held = [x for _, x in roots] + [x for _, _, entries in found for x in _ends(entries)]
    plain = [x for x in held if depth > 1 and id(x) not in registered and _has_few_numbers(x)]
    tensors = [(x.data, x.data.clone()) for x in plain if isinstance(x, Tensor)]
    arrays = [(x, x.copy()) for x in plain if isinstance(x, np.ndarray)]

    def restore() -> None:
        for table, content in before:
            if not _is_same(table, content):  # what nobody has touched may be in use elsewhere
                # Of the plain class, since others may refuse it.
                kind: Any = next(one for one in (OrderedDict, dict, list, set, deque) if isinstance(table, one))
                kind.clear(table)
                (kind.extend if isinstance(table, list | deque) else kind.update)(table, content)
        for x, values in slots:
            for name, value in values.items():
                object.__setattr__(x, name, value)
        for tensor, as_it_was in tensors:
            if not torch.equal(tensor, as_it_was):
                tensor.copy_(as_it_was)
        for array, numbers in arrays:
            array[...] = numbers

    try:
        yield restore
    finally:
        restore()


def _has_few_numbers(x: Any) -> bool:
    is_plain = isinstance(x, Tensor) and x.layout == torch.strided and not x.is_meta
    return (is_plain or (isinstance(x, np.ndarray) and x.flags.writeable)) and math.prod(x.shape) <= COPIED


def _is_same(table: Any, content: Any) -> bool:
    """Whether a container still holds these very objects, in this order."""
    if isinstance(table, set):
        return {*map(id, table)} == {*map(id, content)}
    if isinstance(table, dict):
        table, content = ([*itertools.chain(*x.items())] for x in (table, content))
    return [*map(id, table)] == [*map(id, content)]


def writes_to(tensor: Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to in place, by the count of autograd's own check."""
    return 0 if tensor.is_inference() else int(tensor._version)


@dataclass
class Held:
    """What lies in an attribute of a module.

    Attributes:
        count: of entries, and of the numbers in tensors and arrays among them.
        writes: id of a tensor -> the tensor, which so keeps its id, and how often it was written to.
        contents: hashes of tensors and arrays, and other values as text.
    """

    count: int = 0
    writes: dict[int, tuple[Tensor, int]] = field(default_factory=dict)
    contents: list[str] = field(default_factory=list)


def require_nothing_gathered(model: nn.Module, task: Task, inputs: Inputs, restore: Callable[[], None]) -> None:
    """What a forward gathers of made-up examples for much later calls shows before it is used, such as a queue of features.

    Two examples go first, or one of them twice, and then a single one twice: nothing that is held at the end may depend on who
    went first, become more with every call, or have been written in place. Looked at are attributes of modules and of their
    classes, and what lies in them to the DEPTH of containers and objects inside one another.

    Raises:
        PrivacyConfigError: naming the attribute.
    """

    def content(x: Any) -> str:
        if isinstance(x, np.ndarray):
            return repr(x.tolist()) if x.dtype.hasobject else hashlib.sha256(x.tobytes()).hexdigest()
        if not isinstance(x, Tensor):
            return repr(x) if isinstance(x, int | float | str | bytes | bytearray) else ""
        if x.layout != torch.strided or x.is_meta:
            return str(x.shape)
        return hashlib.sha256(x.detach().cpu().contiguous().view(-1).view(torch.uint8).numpy().tobytes()).hexdigest()

    def looked_into() -> Iterator[tuple[str, Any, list[Any]]]:
        """Name of an attribute, what is looked into there, and what that holds: the attribute itself, then what lies in it."""
        modules = _modules(model, task)
        roots = {
            f"{path}.{name}".strip("."): value
            for path, module in modules
            for name, value in {**_class_containers(type(module)), **vars(module)}.items()
            if name not in _OWN
        }
        yield from ((place, None, [value]) for place, value in roots.items())
        yield from containers(roots.items(), [module for _, module in modules], DEPTH)

    def held() -> dict[str, Held]:
        by_place: dict[str, Held] = defaultdict(Held)
        for place, x, entries in looked_into():
            arrays = [y for y in _ends(entries) if isinstance(y, Tensor | np.ndarray)]
            contents = [content(y) for y in _ends(entries)]
            by_place[place].count += len(entries) + sum(math.prod(y.shape) for y in arrays)
            by_place[place].writes |= {id(y): (y, writes_to(y)) for y in arrays if isinstance(y, Tensor)}
            by_place[place].contents += sorted(contents) if isinstance(x, set | frozenset) else contents
        return by_place

    def after(*first: int) -> tuple[dict[str, Held], dict[str, Held]]:
        """What is held after the second and after the third call."""
        restore()
        seen = []
        for rows in ([*first], [0], [0]):
            with must_take("one call after another"):
                task(**{name: x[rows] for name, x in inputs.items()})
            seen.append(held())
        restore()
        return seen[1], seen[2]

    (before, last), (_, others), (_, again) = after(0, 1), after(1, 1), after(0, 1)
    for place, now in last.items():
        known, other, twin = (found.get(place, Held()) for found in (before, others, again))
        is_written = any(known.writes.get(key, (x, count))[1] != count for key, (x, count) in now.writes.items())
        # What differs between equal calls too, such as the time, is no example's.
        if now.count > known.count or is_written or now.contents == twin.contents != other.contents:
            raise PrivacyConfigError(
                "the forward keeps more with every call, something of earlier calls, or writes in place into a tensor that it "
                f"keeps ({place}): what it keeps of one micro-batch would reach later ones; keep no state in the forward"
            )


@contextmanager
def untouched(model: nn.Module, task: object, dtype: torch.dtype | None = None) -> Iterator[Callable[[], None]]:
    """A check of a model leaves nothing behind: parameters, buffers and attributes of its modules are copies inside.

    Floating parameters and buffers are of `dtype`, which is torch's default there too. It yields as `put_back` does.

    Raises:
        PrivacyConfigError: something inside wrote into a parameter or buffer, or made a buffer: that would reach other
            micro-batches, and leave the run in checkpoints, without noise.
    """
    tensors, default = {**dict(model.named_parameters()), **dict(model.named_buffers())}, torch.get_default_dtype()
    originals, saved = {name: x.data for name, x in tensors.items()}, set(model.state_dict())
    with put_back((module for _, module in _modules(model, task)), DEPTH) as restore:
        try:
            for name, x in tensors.items():
                x.data = originals[name].to(dtype if dtype and x.is_floating_point() else x.dtype, copy=True)
            torch.set_default_dtype(dtype or default)
            yield restore
            after = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, x in tensors.items():
                before = originals[name].to(x.dtype)
                if after.get(name) is not x or not torch.allclose(x.data, before, 0, 0, equal_nan=True):
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
