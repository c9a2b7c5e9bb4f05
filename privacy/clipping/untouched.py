"""What a check of a model may do to it: nothing that stays, and what it finds out about the forward meanwhile.

And what a model must not write in place to: a norm must be that of what is summed.
"""

import math
import random
from collections import deque
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError

SIMPLE = frozenset([bool, int, float, str, bytes, type(None), torch.dtype, torch.device, torch.Size])
"""Values that hold nothing else."""
MOST_VALUES = 50_000
"""This number of values is looked at, so that a model that holds a data set does not make every micro-batch wait."""
FOREIGN = ("torch.", "numpy", "builtins", "threading", "logging")
"""Attributes of objects that these define are not looked at."""
SMALL = 1e-3
"""Weights with a root mean square below it hide the gradients of the layers before them."""
Writes = list[tuple[str, Tensor, int]]
"""(name, tensor, how often it had been written to)."""


@contextmanager
def nothing_is_small(model: nn.Module) -> Iterator[None]:
    """Weights near zero are random inside: one that starts at zero hides the gradients of the layers before it."""
    small = {p: p.detach().clone() for p in model.parameters() if p.is_floating_point() and _is_small(p)}
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for parameter in small:
                std = parameter.shape[-1] ** -0.5 if parameter.dim() > 1 else 0.02
                parameter.copy_(std * torch.randn(parameter.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for parameter, before in small.items():
                parameter.copy_(before)


def _is_small(p: Tensor) -> bool:
    return float(p.detach().norm()) < SMALL * math.sqrt(p.numel())


@contextmanager
def on_copies(model: nn.Module, dtype: torch.dtype | None) -> Iterator[None]:
    """Parameters and buffers are copies inside, floating ones of `dtype`, which is torch's default there too.

    Raises:
        PrivacyConfigError: something inside wrote into one of them, which would leave the run in checkpoints, without noise.
    """
    tensors, default = _tensors(model), torch.get_default_dtype()
    originals, saved = {name: x.data for name, x in tensors.items()}, set(model.state_dict())
    try:
        for name, x in tensors.items():
            data = originals[name]
            x.data = data.to(dtype, copy=True) if dtype is not None and x.is_floating_point() else data.clone()
        torch.set_default_dtype(dtype or default)
        yield
        after = _tensors(model)
        for name, x in tensors.items():
            if after.get(name) is not x or not _same(x.data, originals[name].to(x.dtype)):
                raise PrivacyConfigError(
                    f"the forward changes the buffer {name}: what it keeps of one micro-batch would reach others and leave the "
                    "run without noise; keep no state in the forward"
                )
        if new := set(model.state_dict()) - saved:
            raise PrivacyConfigError(
                f"the forward makes the buffer {min(new)}, which would leave the run in checkpoints, without noise; make it in "
                "__init__, or with persistent=False"
            )
    finally:
        torch.set_default_dtype(default)
        for name, x in tensors.items():
            x.data = originals[name]


def _tensors(model: nn.Module) -> dict[str, Tensor]:
    return {**dict(model.named_parameters()), **dict(model.named_buffers())}


def _same(x: Tensor, y: Tensor) -> bool:
    return torch.equal(x, y) or (x.is_floating_point() and torch.allclose(x, y, rtol=0, atol=0, equal_nan=True))


@contextmanager
def as_it_was(*roots: object) -> Iterator[Callable[[], None]]:
    """What modules, objects and containers hold, such as caches that a forward fills, is kept.

    Yields a function that puts all of it back; it is called at the end too. Parameters and buffers are `on_copies`' matter.

    Args:
        roots: the model, and its task.

    Raises:
        PrivacyConfigError: something wrote in place into another tensor that they hold.
    """
    holders, tensors = held(*roots)
    before = [(holder, dict(holder) if isinstance(holder, dict) else list(holder)) for holder in holders]
    writes = [(x, writes_to(x)) for x in tensors]

    def restore() -> None:
        for holder, content in before:
            if isinstance(holder, dict | set):
                holder.clear()
                holder.update(content)
            else:
                holder.clear()
                holder.extend(content)
        if any(writes_to(x) != count for x, count in writes):
            raise PrivacyConfigError(
                "the forward writes in place into a tensor that the model or its task keeps: what it keeps of one micro-batch "
                "would reach others; keep no state in the forward"
            )

    try:
        yield restore
    finally:
        restore()


def held(*roots: object) -> tuple[list[Any], list[Tensor]]:
    """All that can hold something, of what the roots reach, and all tensors there but for parameters and buffers.

    Holders are dicts (of attributes too), lists, sets and deques. What torch and numpy define is not looked into, but for
    modules.
    """
    holders: list[Any] = []
    tensors: list[Tensor] = []
    known: dict[int, object] = {}
    queue = list(roots)
    while queue and len(known) < MOST_VALUES:
        x = queue.pop()
        if type(x) in SIMPLE or id(x) in known:
            continue
        known[id(x)] = x
        if isinstance(x, nn.Module):
            known.update({id(t): t for t in (*x._parameters.values(), *x._buffers.values())})
            queue.append(vars(x))
        elif isinstance(x, Tensor):
            tensors.append(x)
        elif isinstance(x, dict | list | set | deque):
            holders.append(x)
            queue.extend(x.values() if isinstance(x, dict) else x)
        elif isinstance(x, tuple | frozenset):
            queue.extend(x)
        elif isinstance(x, MethodType):
            queue.append(x.__self__)
        elif hasattr(x, "__dict__") and not isinstance(x, FunctionType | ModuleType | type):
            queue.append({} if type(x).__module__.startswith(FOREIGN) else vars(x))
    return holders, tensors


@contextmanager
def no_chance() -> Iterator[None]:
    """Refuses code that draws from a global generator: a mask or coin would depend on an example's place in the batch."""
    before = _generators()
    yield
    if _generators() != before:
        raise PrivacyConfigError(
            "the forward draws random numbers, so an example's gradient depends on its place in the micro-batch: switch "
            "dropout and random masks off (model.eval(), p = 0), or make them of an input that each example brings along"
        )


def _generators() -> list[bytes]:
    """The states of the generators that code draws from if it names none."""
    kind, numbers, *place = np.random.get_state(legacy=True)  # noqa: NPY002  # foreign models use it
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    states = [state.numpy().tobytes() for state in (torch.get_rng_state(), *devices)]
    return [*states, repr(random.getstate()).encode(), repr((kind, place)).encode(), np.asarray(numbers).tobytes()]


def writes_to(tensor: Tensor) -> int:
    """How often a tensor, or what shares its memory, was written to in place, by the count of autograd's own check."""
    return 0 if tensor.is_inference() else int(tensor._version)


def require_unwritten(writes: Writes, who: str) -> None:
    """
    Raises:
        PrivacyConfigError: a tensor was written to since: the norm would not be that of what is summed.
    """
    for name, tensor, before in writes:
        if writes_to(tensor) != before:
            raise PrivacyConfigError(
                f"{who} writes in place to what clipping still needs of {name} (a gradient, an output, an input): write to a copy"
            )
