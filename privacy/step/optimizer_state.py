"""The state of a torch optimizer: tensors of its parameters' shapes, numbers, group settings."""

import copy
import math
from collections import defaultdict, deque
from collections.abc import Mapping
from decimal import Decimal
from numbers import Real
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError

LARGEST_RATE = torch.finfo(torch.float32).max
OF_TORCH = ("state", "param_groups", "_opt_called", "_need_device_dtype_check_for_fused")
"""Attributes that torch's optimizers and schedulers change at a step; no checkpoint needs them."""


def leaves_of(value: object, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], object]:
    """Returns the leaves of nested containers by place; an object that is none is its own leaf."""
    children: Any
    if isinstance(value, Mapping):
        children = [
            (id(key) if isinstance(key, Tensor) else str(key), child)
            for key, child in value.items()
        ]
    elif isinstance(value, list | tuple | set | frozenset | deque):
        children = enumerate(value)
    else:
        return {place: value}
    leaves: dict[tuple[Any, ...], object] = {}
    for key, child in children:
        leaves.update(leaves_of(child, (*place, key)))
    return leaves


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """Sets every gradient of model and optimizer to None, those of frozen parameters included."""
    for p in model.parameters():
        p.grad = None
    for group in optimizer.param_groups:
        for p in group["params"]:
            p.grad = None


def strided_as(p: Tensor, values: Any) -> Any:
    """Returns a tensor laid out in memory as a parameter; any other object as it is."""
    if not isinstance(values, Tensor) or values.stride() == p.stride():
        return values
    return torch.empty_like(p).copy_(values)


def rate_of(value: Any, place: str) -> float:
    """Returns a learning rate as a float: any number from 0 on, of numpy or in a tensor, too.

    Args:
        place: of the rate, which begins the error.

    Raises:
        PrivacyConfigError: it is not one, and a step with it would be charged for weights that are
            lost.
    """
    rate = math.nan
    try:
        if isinstance(value, Tensor | np.ndarray):
            dtype = str(value.dtype).removeprefix("torch.")
            is_number = value.ndim == 0 and dtype.startswith(("float", "bfloat", "int", "uint"))
            is_number &= not (isinstance(value, Tensor) and value.is_meta)
        else:
            is_number = isinstance(value, Real | Decimal) and not isinstance(value, bool)
        if is_number:
            rate = float(value.detach() if isinstance(value, Tensor) else value)
    # Too large for a float, a NaN that signals, or any error of a foreign class.
    except Exception as error:
        raise PrivacyConfigError(
            f"{place} is a {type(value).__name__} that no float holds, and a learning rate is a "
            "finite number from 0 on that fits into float32"
        ) from error
    if not 0 <= rate <= LARGEST_RATE:
        raise PrivacyConfigError(
            f"{place} is {short_text(value)}, and a learning rate is a finite number from 0 on "
            "that fits into float32, or a function of the step that returns one; schedulers of "
            "torch are for loop.register"
        )
    # abs takes the sign off a -0.0.
    return abs(rate)


def short_text(value: object, max_length: int | None = 120) -> str:
    """Returns the representation of a caller's object in one short line, or that of its class."""
    try:
        return " ".join(repr(value).split())[:max_length]
    # The repr of a foreign class may raise anything.
    except Exception:
        return f"a {type(value).__name__}"


def probe(
    optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """Returns the optimizer's state of a parameter: names of tensors of its shape, and numbers.

    Numbers are as they are after a step. A copy of the optimizer makes it on copies of the smallest
    parameters, one of each group and number of dimensions.

    Raises:
        PrivacyConfigError: the state holds something else, or the optimizer needs a closure.
    """
    kind = type(optimizer)
    smallest: dict[tuple[int, int], nn.Parameter] = {}
    for number, group in enumerate(optimizer.param_groups):
        for p in sorted((p for p in group["params"] if p.requires_grad), key=Tensor.numel):
            smallest.setdefault((number, p.dim()), p)
    twins = {place: nn.Parameter(p.detach().clone()) for place, p in smallest.items()}
    for twin in twins.values():
        twin.grad = torch.ones_like(twin)
    probe = copy.copy(optimizer)
    probe.state = defaultdict(dict)
    for place, p in smallest.items():
        if p in optimizer.state:
            probe.state[twins[place]] = copy.deepcopy(optimizer.state[p])
    probe.param_groups = []
    for number, group in enumerate(optimizer.param_groups):
        group_twins = [twin for place, twin in twins.items() if place[0] == number]
        probe.param_groups.append({**group, "params": group_twins})
        # A step has a float there, whatever the caller has put in.
        if "lr" in group:
            probe.param_groups[number]["lr"] = 0.001

    settings_before = _settings_and_attributes(probe)
    try:
        kind.step(probe)
    # An optimizer that wants a closure, a scaler or a wrapper may raise anything.
    except Exception as error:
        raise PrivacyConfigError(
            f"{kind.__name__} takes no step from gradients alone ({type(error).__name__}: "
            f"{error}): the loop has no loss to evaluate again; take SGD, Adam, AdamW or another "
            "optimizer whose step() needs no closure"
        ) from error
    settings_after = _settings_and_attributes(probe)
    changed_places = [
        name
        for name in {**settings_before, **settings_after}
        if settings_before.get(name) != settings_after.get(name)
    ]
    foreign_keys = [key for key in probe.state if not isinstance(key, Tensor)]
    changed_places += [f"state of {key!r}" for key in foreign_keys]
    if changed_places:
        raise PrivacyConfigError(
            f"{kind.__name__} counts in its {changed_places[0]}, outside of the state of its "
            "parameters, which checkpoints do not hold: a resumed run would go on otherwise; take "
            "SGD, Adam or AdamW"
        )
    # A dict keeps the order in which the keys came.
    moments: dict[str, None] = {}
    numbers: dict[str, Any] = {}
    for twin in twins.values():
        for key, entry in probe.state[twin].items():
            is_tensor = isinstance(entry, Tensor)
            is_like_twin = is_tensor and (entry.shape, entry.dtype) == (twin.shape, twin.dtype)
            if is_like_twin and entry.dim() > 0:
                moments[key] = None
            elif (is_tensor and entry.numel() == 1) or isinstance(entry, int | float):
                numbers[key] = entry
            elif entry is not None:
                raise PrivacyConfigError(
                    f"{kind.__name__} keeps {key!r} of another shape than its parameter, which "
                    "checkpoints do not hold: take SGD, Adam or AdamW"
                )
    return tuple(moments), {key: number for key, number in numbers.items() if key not in moments}


def _settings_and_attributes(optimizer: torch.optim.Optimizer) -> dict[str, str]:
    """Returns all that an optimizer holds outside of the state of its parameters, as text."""
    attributes = {
        f"attribute {key}": short_text(attribute, None)
        for key, attribute in vars(optimizer).items()
        if key not in OF_TORCH
    }
    return settings(optimizer) | attributes


def settings(optimizer: torch.optim.Optimizer, *, with_rates: bool = True) -> dict[str, str]:
    """Returns an optimizer's class and the settings of its groups, without parameters, as text.

    Args:
        with_rates: rates, too; else only which groups have a rate.
    """
    texts = {"class": type(optimizer).__name__}
    # An object without groups is refused later, as no optimizer.
    for number, group in enumerate(getattr(optimizer, "param_groups", [])):
        for key, setting in group.items():
            if key == "params":
                continue
            if key == "lr" and not with_rates:
                text = "a rate"
            elif isinstance(setting, Tensor) and not setting.is_meta:
                text = short_text(setting.tolist(), None)
            else:
                text = short_text(setting, None)
            texts[f"param_groups[{number}][{key!r}]"] = text
    return texts
