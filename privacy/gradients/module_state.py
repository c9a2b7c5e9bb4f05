"""The attributes of modules and what they lead to: read without running any code of theirs, and put back as they were."""

import array
import gc
import io
import types
import weakref
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

TASK = "the task"
"""Before the paths of modules of a task; no child of a model is called so."""
MODULE_ATTRIBUTES = vars(nn.Module()).keys() - {"_non_persistent_buffers_set"}
"""Attributes of every module; its mode and hooks are looked at by themselves."""
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


def modules_of(model: nn.Module, task: object) -> list[tuple[str, nn.Module]]:
    """Those of the model, and of a task that is another module, or a method of one."""
    owner = getattr(task, "__self__", task)
    others = (
        owner.named_modules(prefix=TASK)
        if isinstance(owner, nn.Module) and owner is not model
        else ()
    )
    return [*model.named_modules(), *others]


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
    attributes = attributes_of(x)
    items += [*attributes, *attributes.values(), *class_containers(kind).values()]
    if issubclass(kind, np.ndarray) and x.dtype.hasobject:
        items += x.ravel().tolist()
    if issubclass(kind, Tensor):
        items.append(gradient_of(x))
    if issubclass(kind, CONTAINERS):
        return items + [value for _, value in _slots(x) if value is not ...]
    listed = [attributes, *attributes.values()]
    if issubclass(kind, types.FunctionType):
        listed += [x.__globals__, x.__builtins__]
    ids = {*map(id, listed)}
    return items + [y for y in gc.get_referents(x) if id(y) not in ids]


def gradient_of(x: Tensor) -> Tensor | None:
    """The gradient in a tensor, which a forward may have put there itself; of what is computed, torch keeps none."""
    with suppress(Exception):  # foreign tensors raise anything
        return x.grad if x.is_leaf else None
    return None


def lent_memory(x: Any) -> np.ndarray | None:
    """The bytes of an object that lends its memory, such as a map of memory or an array of ctypes; None of more than COPIED."""
    if issubclass(type(x), (Tensor, np.ndarray, np.generic, *PLAIN, *BYTES)):
        return None
    with suppress(Exception):  # most objects lend none
        memory = np.frombuffer(x, np.uint8)
        return memory if memory.size <= COPIED else None
    return None


def stream_content(x: Any) -> tuple[Any, int]:
    """The content of a stream in memory, and the place that is read or written next; by its built-in class."""
    kind: Any = next(kind for kind in STREAMS if issubclass(type(x), kind))
    return kind.getvalue(x), kind.tell(x)


def set_stream_content(x: Any, content: Any, place: int) -> None:
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


def attributes_of(x: object) -> dict[str, Any]:
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


def class_containers(kind: type) -> dict[str, Any]:
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
        (name, x) for m in modules for name, x in {**class_containers(type(m)), **vars(m)}.items()
    ]
    objects = [x for _, x, _ in objects_below(roots, modules, depth)]
    mutable = [x for x in objects if issubclass(type(x), MUTABLE)]
    others = [
        x
        for x in objects
        if type(x) not in PLAIN and type(x) not in CONTAINERS and not _is_opaque(x)
    ]
    tables = [*map(vars, modules), *mutable, *map(attributes_of, others)]
    before = [(table, _copied(table)) for table in tables]
    slots = [(x, slot, value) for x in others for slot, value in _slots(x)]
    registered = {id(x) for m in modules for x in (*m._parameters.values(), *m._buffers.values())}
    numbers = [x for x in others if depth and id(x) not in registered and has_few_numbers(x)]
    tensors = [(x.data, x.data.clone()) for x in numbers if issubclass(type(x), Tensor)]
    arrays: list[tuple[Any, Any]] = [
        (x, x.copy()) for x in numbers if issubclass(type(x), np.ndarray)
    ]
    buffers: list[tuple[Any, Any]] = [
        (x, x[:]) for x in others if depth and issubclass(type(x), BYTES)
    ]
    lent = [(x, memory.copy()) for x in others if depth and (memory := lent_memory(x)) is not None]
    streams = [
        (x, stream_content(x))
        for x in others
        if depth and issubclass(type(x), STREAMS) and not x.closed
    ]
    gradients = [(x, gradient_of(x)) for x in others if issubclass(type(x), Tensor)]

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
            memory = lent_memory(x)
            if memory is not None and not np.array_equal(memory, as_it_was):
                memory[:] = as_it_was
        for x, as_it_was in streams:
            if stream_content(x) != as_it_was:
                set_stream_content(x, *as_it_was)
        for x, gradient in gradients:
            if gradient_of(x) is not gradient:
                x.grad = gradient

    try:
        yield restore
    finally:
        restore()


def has_few_numbers(x: Any) -> bool:
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
