"""What an optimizer of torch keeps besides its parameters: tensors of their shapes, numbers, and settings of its groups."""

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
"""Attributes that torch's own optimizers and schedulers change at a step, and that need no place in a checkpoint."""


def leaves_of(value: object, place: tuple[Any, ...] = ()) -> dict[tuple[Any, ...], object]:
    """What lies in containers, by place."""
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
    return {
        at: leaf for key, child in children for at, leaf in leaves_of(child, (*place, key)).items()
    }


def clear_gradients(model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    """No gradient of anybody stays, frozen parameters included."""
    for p in (
        *model.parameters(),
        *(p for group in optimizer.param_groups for p in group["params"]),
    ):
        p.grad = None


def strided_as(p: Tensor, values: Any) -> Any:
    """Returns a tensor laid out in memory as a parameter; anything else as it is."""
    is_alike = not isinstance(values, Tensor) or values.stride() == p.stride()
    return values if is_alike else torch.empty_like(p).copy_(values)


def rate_of(value: Any, what: str) -> float:
    """Returns a learning rate as a float: any kind of number from 0 on, one of numpy and a tensor of one number too.

    Args:
        what: begins the error.

    Raises:
        PrivacyConfigError: it is none, and a step with it would be charged for weights that are lost.
    """
    try:
        if isinstance(value, Tensor | np.ndarray):
            kind = str(value.dtype).removeprefix("torch.")
            is_number = value.ndim == 0 and kind.startswith(("float", "bfloat", "int", "uint"))
            is_number &= not (isinstance(value, Tensor) and value.is_meta)
        else:
            is_number = isinstance(value, Real | Decimal) and not isinstance(value, bool)
        rate = (
            float(value.detach() if isinstance(value, Tensor) else value) if is_number else math.nan
        )
    except (
        Exception
    ) as error:  # too large for a float, a NaN that signals, or what a foreign class raises
        raise PrivacyConfigError(
            f"{what} is a {type(value).__name__} that no float holds, and a learning rate is a finite number from 0 on that fits "
            "into float32"
        ) from error
    if not 0 <= rate <= LARGEST_RATE:
        raise PrivacyConfigError(
            f"{what} is {shown(value)}, and a learning rate is a finite number from 0 on that fits into float32, or a function "
            "of the step that returns one; schedulers of torch are for loop.register"
        )
    return abs(rate)  # 0 has no sign


def shown(value: object, most: int | None = 120) -> str:
    """Returns the representation of an object of the caller in one short line; that of its class where it has none."""
    try:
        return " ".join(repr(value).split())[:most]
    except Exception:  # whatever a foreign class raises
        return f"a {type(value).__name__}"


def probe(
    optimizer: torch.optim.Optimizer, trainable: Mapping[str, nn.Parameter]
) -> tuple[tuple[str, ...], dict[str, Any]]:
    """What the optimizer keeps of a parameter: names of tensors of its shape, and numbers, each as it is after a step.

    Found by steps of a copy on copies of the smallest parameters, one for each number of dimensions.

    Raises:
        PrivacyConfigError: it keeps something else, or needs a closure.
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
    probe.param_groups = [
        {**group, "params": [twin for (of, _), twin in twins.items() if of == number]}
        for number, group in enumerate(optimizer.param_groups)
    ]
    for group in probe.param_groups:
        if "lr" in group:  # as a step will have it
            group["lr"] = 0.001

    def outside() -> dict[str, str]:
        attributes = {
            f"attribute {key}": shown(value, None)
            for key, value in vars(probe).items()
            if key not in OF_TORCH
        }
        return settings(probe) | attributes

    before = outside()
    try:
        kind.step(probe)
    except (
        Exception
    ) as error:  # whatever an optimizer raises that wants a closure, a scaler or a wrapper
        raise PrivacyConfigError(
            f"{kind.__name__} takes no step from gradients alone ({type(error).__name__}: {error}): the loop has no loss to "
            "evaluate again; take SGD, Adam, AdamW or another optimizer whose step() needs no closure"
        ) from error
    after = outside()
    changed = [name for name in {**before, **after} if before.get(name) != after.get(name)]
    if changed := [
        *changed,
        *(f"state of {key!r}" for key in probe.state if not isinstance(key, Tensor)),
    ]:
        raise PrivacyConfigError(
            f"{kind.__name__} counts in its {changed[0]}, outside of the state of its parameters, which checkpoints do not hold: "
            "a resumed run would go on otherwise; take SGD, Adam or AdamW"
        )
    moments, numbers = dict[str, None](), dict[str, Any]()
    for twin in twins.values():
        for key, value in probe.state[twin].items():
            is_tensor = isinstance(value, Tensor)
            if (
                is_tensor
                and value.dim() > 0
                and (value.shape, value.dtype) == (twin.shape, twin.dtype)
            ):
                moments[key] = None
            elif (is_tensor and value.numel() == 1) or isinstance(value, int | float):
                numbers[key] = value
            elif value is not None:
                raise PrivacyConfigError(
                    f"{kind.__name__} keeps {key!r} of another shape than its parameter, which checkpoints do not hold: take "
                    "SGD, Adam or AdamW"
                )
    return tuple(moments), {key: value for key, value in numbers.items() if key not in moments}


def settings(optimizer: torch.optim.Optimizer, *, with_rates: bool = True) -> dict[str, str]:
    """Returns an optimizer's class and what stands in its groups besides parameters, as text.

    Args:
        with_rates: else of rates only which groups have one.
    """
    return {"class": type(optimizer).__name__} | {
        f"param_groups[{number}][{key!r}]": (
            shown(
                value.tolist() if isinstance(value, Tensor) and not value.is_meta else value, None
            )
            if with_rates or key != "lr"
            else "a rate"
        )
        for number, group in enumerate(
            getattr(optimizer, "param_groups", [])
        )  # what is no optimizer is refused later
        for key, value in group.items()
        if key != "params"
    }
