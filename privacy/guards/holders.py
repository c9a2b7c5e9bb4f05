"""Refuses a forward that keeps something between two calls.

It may do so in attributes of modules, in objects that these lead to, in parameters and buffers.
"""

import hashlib
import io
import itertools
import pickle
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..gradients.module_state import (
    BYTES,
    CONTAINERS,
    COPIED,
    MODULE_ATTRIBUTES,
    PLAIN,
    STREAMS,
    Path,
    attributes_of,
    class_containers,
    entries_of,
    gradient_of,
    has_few_numbers,
    lent_memory,
    modules_of,
    objects_below,
    put_back,
    stream_content,
    writes_to,
)
from ..gradients.recorder import Task
from .fingerprints import in_order
from .neighbours import Inputs, must_take

DEPTH = 6
"""Levels of containers and objects below a module's attribute in which a forward may gather."""


@dataclass
class Held:
    """The contents of attributes of modules after a call.

    Attributes:
        counts: by attribute, of entries, and of the numbers in tensors and arrays among them.
        writes: id of a tensor -> its attribute, the tensor, which so keeps its id, and how often
            it was written to; for an array that is too large to be put back, a hash of it.
        contents: of every object, by its path: its numbers, and those and the words among its
            entries.
    """

    counts: Counter[str] = field(default_factory=Counter)
    writes: dict[int, tuple[str, object, object]] = field(default_factory=dict)
    contents: dict[Path, list[Any]] = field(default_factory=lambda: defaultdict(list))

    def of(self, path: Path) -> list[Any]:
        """Returns the contents at a path, in the same order for the same entries of a set."""
        contents = self.contents.get(path, [])
        return sorted(contents, key=repr) if -1 in path else contents


def held(model: nn.Module, task: Task) -> Held:
    """Reads the objects that attributes of modules lead to.

    Of registered parameters and buffers it reads the attributes, and not the numbers.
    """
    modules = modules_of(model, task)
    state = Held()
    registered: dict[str, Tensor] = {}
    roots: dict[str, Any] = {}
    for prefix, module in modules:
        attributes = {**class_containers(type(module)), **vars(module)}
        for name, attribute in attributes.items():
            if name not in MODULE_ATTRIBUTES:
                roots[f"{prefix}.{name}".strip(".")] = attribute
        for name, x in {**module._parameters, **module._buffers}.items():
            if x is not None:
                registered[f"{prefix}.{name}".strip(".")] = x
    roots |= {place: attributes_of(x) for place, x in registered.items()}
    roots |= {f"{place}.grad": gradient_of(x) for place, x in registered.items()}
    registered_ids = {*map(id, registered.values())}
    bare_modules = [module for _, module in modules]
    for path, x, entries in objects_below(roots.items(), bare_modules, DEPTH):
        place = str(path[0])
        kind = type(x)
        state.counts[place] += len(entries)
        words: list[Any] = [_word(y) if type(y) in PLAIN else None for y in entries]
        if kind not in CONTAINERS:
            digest = None if id(x) in registered_ids else _content(x, entries)
            words.append(digest)
            if issubclass(kind, Tensor):
                state.counts[place] += x.numel()
                state.writes[id(x)] = (place, x, writes_to(x))
            elif issubclass(kind, np.ndarray):
                state.counts[place] += x.size
                if x.flags.writeable and not has_few_numbers(x):
                    state.writes[id(x)] = (place, x, digest)
            elif issubclass(kind, BYTES):
                state.counts[place] += len(x)
        # A set has no order of its own.
        is_set = issubclass(kind, set | frozenset)
        state.contents[path] += sorted(words, key=repr) if is_set else words
    return state


def _word(x: Any) -> object:
    """Returns a number or a word as an object that equals its equals.

    1 is not True, and a NaN equals itself.
    """
    return repr(x) if type(x) in (bool, float, complex) else x


def _content(x: Any, entries: list[Any]) -> object:
    """Returns an object's own value, or a hash of its numbers; None if it has neither."""
    kind = type(x)
    if kind in PLAIN:
        return _word(x)
    with suppress(Exception):  # foreign tensors and objects may raise any exception
        if issubclass(kind, Tensor):
            return hashlib.sha256(_bytes_of(x.detach())).hexdigest()
        if issubclass(kind, np.ndarray):
            is_large_file = x.size > COPIED and not x.flags.writeable
            is_skipped = is_large_file or x.dtype.hasobject
            numbers = np.empty(0) if is_skipped else np.ascontiguousarray(x)
            words = numbers.reshape(-1).view(np.uint8)
            return x.shape, hashlib.sha256(words.data).hexdigest()
        if issubclass(kind, BYTES):
            return bytes(x)
        if issubclass(kind, STREAMS):
            return stream_content(x)
        memory = lent_memory(x)
        if memory is not None:
            return memory.tobytes()
        is_of_library = kind.__module__ in sys.stdlib_module_names
        is_leaf = is_of_library and not entries and not entries_of(x)
        if issubclass(kind, np.generic) or is_leaf:
            return hashlib.sha256(pickle.dumps(x)).hexdigest()
    return None


def _bytes_of(x: Tensor) -> bytes:
    """Returns shape and numbers of a tensor; all that it consists of if it is sparse, say."""
    if x.layout != torch.strided or x.is_nested or x.is_quantized:
        file = io.BytesIO()
        torch.save(x, file)
        return file.getvalue()
    shape = str(x.shape).encode()
    if x.is_meta:
        return shape
    words = in_order(x.cpu()).view(torch.uint8)
    return shape + words.numpy().tobytes()


def require_nothing_gathered(
    model: nn.Module, task: Task, inputs: Inputs, restore: Callable[[], None]
) -> None:
    """Refuses a forward that gathers something for later calls, such as a queue of features.

    Two examples go first, or one of them twice, and then a single one twice: nothing that modules
    hold at the end may depend on the first examples, grow with every call, or have been written
    in place. So state for much later calls shows before it is used. The search covers attributes
    of modules, of their classes and of parameters, and objects in them to DEPTH levels.

    Raises:
        PrivacyConfigError: naming the attribute.
    """

    def call(*rows: int) -> None:
        with must_take("one call after another"):
            task(**{name: x[[*rows]] for name, x in inputs.items()})

    def state_after(*first: int) -> tuple[Held, Held]:
        """Returns the contents of attributes after the second and after the third call."""
        restore()
        call(*first)
        call(0)
        second_state = held(model, task)
        call(0)
        third_state = held(model, task)
        restore()
        return second_state, third_state

    second_state, third_state = state_after(0, 1)
    _, state_of_others = state_after(1, 1)
    _, repeated_state = state_after(0, 1)
    places = []
    for place, count in third_state.counts.items():
        if count > second_state.counts[place]:
            places.append(place)
    for key, (place, _, writes) in third_state.writes.items():
        if key in second_state.writes and second_state.writes[key][-1] != writes:
            places.append(place)
    for path in {**third_state.contents, **state_of_others.contents}:
        leaves = itertools.zip_longest(
            third_state.of(path),
            state_of_others.of(path),
            repeated_state.of(path),
            fillvalue=...,
        )
        # A leaf that differs between equal calls too, such as the time, is no example's. The
        # leaves beside it are compared.
        for leaf, leaf_of_others, repeated_leaf in leaves:
            if leaf == repeated_leaf != leaf_of_others:
                places.append(str(path[0]))
    if places:
        raise PrivacyConfigError(
            "the forward keeps more with every call, something of earlier calls, or writes in "
            f"place into a tensor that it keeps ({places[0]}): what it keeps of one micro-batch "
            "would reach later ones; keep no state in the forward"
        )


@contextmanager
def untouched(
    model: nn.Module, task: object, dtype: torch.dtype | None = None
) -> Iterator[Callable[[], None]]:
    """Replaces parameters, buffers and attributes of modules by copies for the time of a check.

    Floating parameters and buffers are of `dtype`, which is torch's default there too. It yields
    the same function as `put_back`.

    Raises:
        PrivacyConfigError: the block wrote into a parameter or buffer, or made a buffer: that
            would reach other micro-batches, and leave the run in checkpoints, without noise.
    """
    tensors = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    default_dtype = torch.get_default_dtype()
    originals = {name: x.data for name, x in tensors.items()}
    saved_names = set(model.state_dict())
    modules = [module for _, module in modules_of(model, task)]
    with put_back(modules, DEPTH) as restore:
        try:
            for name, x in tensors.items():
                dtype_of_copy = dtype if dtype and x.is_floating_point() else x.dtype
                x.data = originals[name].to(dtype_of_copy, copy=True)
            torch.set_default_dtype(dtype or default_dtype)
            yield restore
            current = {**dict(model.named_parameters()), **dict(model.named_buffers())}
            for name, x in tensors.items():
                original = originals[name].to(x.dtype)
                is_same = current.get(name) is x
                if not is_same or not torch.allclose(x.data, original, 0, 0, equal_nan=True):
                    raise PrivacyConfigError(
                        f"the forward changes the buffer {name}: what it keeps of one micro-batch "
                        "would reach others and leave the run without noise; keep no state in the "
                        "forward"
                    )
            new_names = set(model.state_dict()) - saved_names
            if new_names:
                raise PrivacyConfigError(
                    f"the forward makes the buffer {min(new_names)}, which would leave the run in "
                    "checkpoints, without noise; make it in __init__, or with persistent=False"
                )
        finally:
            torch.set_default_dtype(default_dtype)
            for name, x in tensors.items():
                x.data = originals[name]
