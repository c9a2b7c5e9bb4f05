"""What a check of a model may do to it: nothing that stays, and what it finds out about the forward meanwhile."""

import math
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from privacy.errors import PrivacyConfigError

SMALL = 1e-3
"""Weights with a root mean square below it hide the gradients of the layers before them."""


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
def as_it_was(model: nn.Module) -> Iterator[None]:
    """Attributes of modules, such as caches that a forward fills, are afterwards what they were before."""
    tables: list[tuple[dict[str, Any], dict[str, Any]]] = []
    for module in model.modules():
        tables += [(table, dict(table)) for table in (vars(module), *vars(module).values()) if isinstance(table, dict)]
    try:
        yield
    finally:
        for table, entries in tables:
            table.clear()
            table.update(entries)


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
