"""The attributes of modules and all that they lead to.

They are read without running any code of theirs, and put back as they were.
"""

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
"""Begins the paths of modules of a task; no child of a model is called so."""
MODULE_ATTRIBUTES = vars(nn.Module()).keys() - {"_non_persistent_buffers_set"}
"""Attributes of every module; its mode and hooks are looked at by themselves."""
OBJECTS = 100_000
"""Objects in all attributes together that are looked at, the nearest first; a container of more
entries than are left is passed over."""
COPIED = 1 << 24
"""Numbers of a tensor or an array in an attribute that a check puts back; of larger ones writes are
seen only."""
PLAIN = (int, str, bytes, types.NoneType, bool, float, complex)
"""Types whose objects are compared as they are."""
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
"""Types whose objects are neither looked into nor compared."""
MUTABLE = (OrderedDict, dict, list, set, deque)
CONTAINERS = (*MUTABLE, tuple, frozenset)
HOLDERS = (list, dict, set, deque, Tensor, np.ndarray)
BYTES = (bytearray, array.array)
STREAMS = (io.BytesIO, io.StringIO)
OPAQUE = ("torch", "numpy", "logging", "threading", "_thread", __name__.partition(".")[0])
"""Packages whose objects and functions are not looked into."""


def modules_of(model: nn.Module, task: object) -> list[tuple[str, nn.Module]]:
    """Returns the modules of the model, and of a task that is another module or a method of one."""
    owner = getattr(task, "__self__", task)
    if isinstance(owner, nn.Module) and owner is not model:
        return [*model.named_modules(), *owner.named_modules(prefix=TASK)]
    return [*model.named_modules()]


Path = tuple[str | int, ...]
"""Name of an attribute, the entry that leads on from there, the next entry and so on; -1 stands for
all entries of a set."""


def objects_below(
    roots: Iterable[tuple[str, object]], excluded: Iterable[nn.Module], depth: int
) -> Iterator[tuple[Path, Any, list[Any]]]:
    """Yields each object below some named objects once: (path, object, its entries).

    The nearest come first, at most OBJECTS.

    Args:
        excluded: modules that are looked at by themselves.
        depth: of objects inside one another that are looked into; their entries are still yielded,
            as objects without entries.
    """
    # Holds the objects, which so keep their ids.
    visited: dict[int, object] = {id(module): module for module in excluded}
    level: list[tuple[Path, object]] = [((name,), x) for name, x in roots]
    room = OBJECTS
    for levels_below in reversed(range(depth + 1)):
        next_level: list[tuple[Path, object]] = []
        for path, x in level:
            if type(x) not in PLAIN:
                if id(x) in visited or issubclass(type(x), LEAVES):
                    continue
                visited[id(x)] = x
            entries = entries_of(x) if levels_below else []
            if len(entries) > room:
                entries = []
            room -= len(entries)
            yield path, x, entries
            is_set = issubclass(type(x), set | frozenset)
            for i, entry in enumerate(entries):
                if type(entry) not in PLAIN:
                    next_level.append(((*path, -1 if is_set else i), entry))
        level = next_level


def entries_of(x: Any) -> list[Any]:
    """Returns all that an object holds.

    These are entries and keys of a container; names and values of attributes and slots; and what C
    code refers to. No code of an object runs: all is read where Python keeps it.
    """
    kind = type(x)
    entries = _entries_of_container(x)
    if kind in PLAIN or kind in CONTAINERS:
        return entries
    if _is_opaque(x):
        return []
    attributes = attributes_of(x)
    entries += [*attributes, *attributes.values(), *class_containers(kind).values()]
    if issubclass(kind, np.ndarray) and x.dtype.hasobject:
        entries += x.ravel().tolist()
    if issubclass(kind, Tensor):
        entries.append(gradient_of(x))
    if issubclass(kind, CONTAINERS):
        return entries + [content for _, content in _slots(x) if content is not ...]
    listed_objects = [attributes, *attributes.values()]
    if issubclass(kind, types.FunctionType):
        listed_objects += [x.__globals__, x.__builtins__]
    listed_ids = {*map(id, listed_objects)}
    return entries + [y for y in gc.get_referents(x) if id(y) not in listed_ids]


def gradient_of(x: Tensor) -> Tensor | None:
    """Returns the gradient in a tensor, which a forward may have put there itself.

    Tensors that are no leaves have none: torch keeps none for them.
    """
    # Foreign tensors raise anything.
    with suppress(Exception):
        return x.grad if x.is_leaf else None
    return None


def lent_memory(x: Any) -> np.ndarray | None:
    """Returns the bytes of an object that lends its memory; None for more than COPIED bytes.

    Such objects are maps of memory and arrays of ctypes.
    """
    if issubclass(type(x), (Tensor, np.ndarray, np.generic, *PLAIN, *BYTES)):
        return None
    # Most objects lend none.
    with suppress(Exception):
        memory = np.frombuffer(x, np.uint8)
        return memory if memory.size <= COPIED else None
    return None


def stream_content(x: Any) -> tuple[Any, int]:
    """Returns the content of a stream in memory, and the place that is read or written next.

    Its built-in class reads them.
    """
    kind: Any = next(kind for kind in STREAMS if issubclass(type(x), kind))
    return kind.getvalue(x), kind.tell(x)


def set_stream_content(x: Any, content: Any, place: int) -> None:
    """Puts back what `stream_content` returned."""
    kind: Any = next(kind for kind in STREAMS if issubclass(type(x), kind))
    kind.seek(x, 0)
    kind.truncate(x)
    kind.write(x, content)
    kind.seek(x, place)


def _is_opaque(x: Any) -> bool:
    """Returns whether an object or a function is of a package whose objects are left alone."""
    if issubclass(type(x), (nn.Module, Tensor, np.ndarray, *CONTAINERS)):
        return False
    maker = x.__module__ if issubclass(type(x), types.FunctionType) else type(x).__module__
    return str(maker).partition(".")[0] in OPAQUE


def _entries_of_container(x: Any) -> list[Any]:
    """Returns the entries of a container, a mapping's keys first; none of other objects.

    Its built-in class reads them, because other classes may refuse.
    """
    if type(x) in PLAIN:
        return []
    kinds: tuple[Any, ...] = (type(x),) if type(x) in CONTAINERS else CONTAINERS
    for kind in kinds:
        if issubclass(type(x), kind):
            if issubclass(kind, dict):
                return [*kind.keys(x), *kind.values(x)]
            return [*kind.__iter__(x)]
    return []


def attributes_of(x: object) -> dict[str, Any]:
    """Returns the dict in which an object keeps its attributes; an empty dict if there is none."""
    # A class may make something else of the name.
    with suppress(Exception):
        attributes = object.__getattribute__(x, "__dict__")
        if type(attributes) is dict:
            return attributes
    return {}


def _slots(x: object) -> list[tuple[types.MemberDescriptorType, Any]]:
    """Returns the slots of an object, each with its content; ... where a slot is empty."""
    slots: list[tuple[types.MemberDescriptorType, Any]] = []
    for kind in type(x).__mro__:
        if "__slots__" not in vars(kind):
            continue
        for slot in vars(kind).values():
            if type(slot) is types.MemberDescriptorType:
                content = ...
                with suppress(AttributeError):
                    content = slot.__get__(x, kind)
                slots.append((slot, content))
    return slots


def class_containers(kind: type) -> dict[str, Any]:
    """Returns containers and tensors that a class holds for all its objects.

    torch's classes hold none of examples.
    """
    foreign_packages = (*OPAQUE, "builtins")
    bases = [
        base for base in kind.__mro__ if base.__module__.partition(".")[0] not in foreign_packages
    ]
    attributes: dict[str, Any] = {}
    for base in bases:
        attributes |= vars(base)
    containers = {}
    for name, x in attributes.items():
        if issubclass(type(x), HOLDERS) and not name.startswith("__"):
            containers[name] = x
    return containers


@contextmanager
def put_back(modules: Iterable[nn.Module], depth: int = 0) -> Iterator[Callable[[], None]]:
    """Puts attributes of modules back as they were, modes and hooks included, when it ends.

    Yields a function that puts them back early. The entries of dicts, lists, sets, deques and
    objects that are attributes (a cache) are put back too. With a depth so are those inside of
    them, and numbers of tensors and arrays of at most COPIED numbers.
    """
    modules = [*modules]
    roots: list[tuple[str, object]] = []
    for module in modules:
        roots += {**class_containers(type(module)), **vars(module)}.items()
    mutable: list[Any] = []
    holders: list[Any] = []
    for _, x, _ in objects_below(roots, modules, depth):
        if issubclass(type(x), MUTABLE):
            mutable.append(x)
        if type(x) not in PLAIN and type(x) not in CONTAINERS and not _is_opaque(x):
            holders.append(x)
    tables = [*map(vars, modules), *mutable, *map(attributes_of, holders)]
    contents = [(table, _copied(table)) for table in tables]
    slots = [(x, slot, content) for x in holders for slot, content in _slots(x)]
    registered: set[int] = set()
    for module in modules:
        registered |= {*map(id, module._parameters.values()), *map(id, module._buffers.values())}
    tensors: list[tuple[Tensor, Tensor]] = []
    arrays: list[tuple[Any, Any]] = []
    buffers: list[tuple[Any, Any]] = []
    lenders: list[tuple[Any, np.ndarray]] = []
    streams: list[tuple[Any, tuple[Any, int]]] = []
    gradients: list[tuple[Tensor, Tensor | None]] = []
    for x in holders:
        kind = type(x)
        if depth and id(x) not in registered and has_few_numbers(x):
            if issubclass(kind, Tensor):
                tensors.append((x.data, x.data.clone()))
            if issubclass(kind, np.ndarray):
                arrays.append((x, x.copy()))
        if depth and issubclass(kind, BYTES):
            buffers.append((x, x[:]))
        memory = lent_memory(x) if depth else None
        if memory is not None:
            lenders.append((x, memory.copy()))
        if depth and issubclass(kind, STREAMS) and not x.closed:
            streams.append((x, stream_content(x)))
        if issubclass(kind, Tensor):
            gradients.append((x, gradient_of(x)))

    def restore() -> None:
        for table, content in contents:
            # An untouched table may be in use elsewhere.
            if not _is_same(table, content):
                # By the built-in class, since others may refuse it.
                kind: Any = next(kind for kind in MUTABLE if issubclass(type(table), kind))
                kind.clear(table)
                if isinstance(content, dict):
                    for key, entry in content.items():
                        kind.__setitem__(table, key, entry)
                else:
                    extend = kind.update if kind is set else kind.extend
                    extend(table, content)
        for x, slot, content in slots:
            # A slot that is emptied may be empty already.
            with suppress(AttributeError):
                slot.__set__(x, content) if content is not ... else slot.__delete__(x)
        for tensor, copy in tensors:
            if not torch.equal(tensor, copy):
                tensor.copy_(copy)
        for array_, numbers in arrays:
            if array_.tobytes() != numbers.tobytes():
                array_[...] = numbers
        for buffer, entries in buffers:
            if buffer != entries:
                buffer[:] = entries
        for x, bytes_ in lenders:
            memory = lent_memory(x)
            if memory is not None and not np.array_equal(memory, bytes_):
                memory[:] = bytes_
        for x, content_and_place in streams:
            if stream_content(x) != content_and_place:
                set_stream_content(x, *content_and_place)
        for x, gradient in gradients:
            if gradient_of(x) is not gradient:
                x.grad = gradient

    try:
        yield restore
    finally:
        restore()


def has_few_numbers(x: Any) -> bool:
    """Returns whether a tensor or an array is plain and has at most COPIED numbers."""
    if issubclass(type(x), Tensor) and x.layout == torch.strided and not x.is_meta:
        return not x.is_nested and x.numel() <= COPIED
    return issubclass(type(x), np.ndarray) and x.flags.writeable and x.size <= COPIED


def _copied(table: Any) -> dict[Any, Any] | list[Any]:
    """Returns a copy of a container's entries."""
    entries = _entries_of_container(table)
    if not issubclass(type(table), dict):
        return entries
    half = len(entries) // 2
    return dict(zip(entries[:half], entries[half:], strict=True))


def _is_same(table: Any, content: Any) -> bool:
    """Returns whether a container still holds these very objects, in this order."""
    group = set if issubclass(type(table), set) else list
    ids = group(map(id, _entries_of_container(table)))
    return bool(ids == group(map(id, _entries_of_container(content))))


def writes_to(tensor: Tensor) -> int:
    """Returns how often a tensor, or what shares its memory, was written to in place.

    The count is that of autograd's own check.
    """
    return 0 if tensor.is_inference() else int(tensor._version)
