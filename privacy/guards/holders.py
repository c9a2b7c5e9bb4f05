"""What a forward keeps between two calls: in attributes of modules, in what these lead to, in parameters and buffers."""

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
from .neighbours import Inputs, must_take

DEPTH = 6
"""Levels of containers and objects inside one another, below a module's attribute, in which a forward may gather something."""


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
    modules, state = modules_of(model, task), Held()
    registered: dict[str, Tensor] = {}
    roots: dict[str, Any] = {}
    for prefix, module in modules:
        attributes = {**class_containers(type(module)), **vars(module)}
        roots |= {
            f"{prefix}.{name}".strip("."): value
            for name, value in attributes.items()
            if name not in MODULE_ATTRIBUTES
        }
        tensors = {**module._parameters, **module._buffers}
        registered |= {
            f"{prefix}.{name}".strip("."): x for name, x in tensors.items() if x is not None
        }
    roots |= {place: attributes_of(x) for place, x in registered.items()}
    roots |= {f"{place}.grad": gradient_of(x) for place, x in registered.items()}
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
                if x.flags.writeable and not has_few_numbers(x):
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
            return stream_content(x)
        if (memory := lent_memory(x)) is not None:
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
    with put_back((module for _, module in modules_of(model, task)), DEPTH) as restore:
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
