"""Taps inside compiled blocks: what recorder.py's autograd function does, as operations that torch.compile leaves alone.

`block.compile()` traces the hooks of the layers in it. Under the tracer a hook calls `tap`: the opaque operation `called`, and
an identity whose backward has the opaque operation `report`. The compiler schedules both but looks into neither, so a block
stays one graph, without a graph break, and the blocks of a model, which differ in nothing but the number in a tensor (`key`),
share it. `report`'s result is the (zero) gradient of the recorder's root, which keeps the compiler from dropping it as dead code.

The compiler also makes one operation of two with equal arguments. A layer that is called twice on one input, and whose outputs
are added, would report one gradient of two. So each call makes a key of its own for its report.

A compiled backward computes the gradients of everything that requires one, weights included. So for the time of a clipped
forward the parameters of compiled blocks do not require gradients (`weights_at_rest`). The compiler may use the memory of a
tensor again once it has been reported, so those that are kept are copied first (`contributions.owned`), and no others are.
"""

import itertools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, ClassVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from .rules import KEEPS, RULES


class CompiledTap:
    """What one layer's opaque operations call.

    Args:
        on_call: (input, output) of each forward; may refuse by raising.
        on_gradient: (input, gradient with respect to the output) of each backward.
    """

    _known: ClassVar[WeakValueDictionary[int, "CompiledTap"]] = WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(
        self,
        on_call: Callable[[Tensor, Tensor], None],
        on_gradient: Callable[[Tensor, Tensor], None],
    ) -> None:
        number = next(self._numbers)
        self._known[number] = self
        self.on_call, self.on_gradient = on_call, on_gradient
        self.num_calls = torch.tensor(0)
        self.key = torch.tensor(
            number
        )  # a tensor, because the compiler would make a graph of its own for each int

    @classmethod
    def of(cls, key: Tensor) -> "CompiledTap":
        return cls._known[int(key)]


# A process may hold the clone's package and the installed one; torch has one operation of each name, the one that came last.
_OPERATIONS = f"{__name__.partition('.')[0]}_clipping"


@torch.library.custom_op(f"{_OPERATIONS}::called", mutates_args=("num_calls",))
def _called(output: Tensor, x: Tensor, key: Tensor, num_calls: Tensor) -> Tensor:
    num_calls += 1
    CompiledTap.of(key).on_call(x, output)
    return key.clone()


@torch.library.custom_op(f"{_OPERATIONS}::report", mutates_args=())
def _report(gradient: Tensor, x: Tensor, key: Tensor) -> Tensor:
    CompiledTap.of(key).on_gradient(x, gradient)
    return torch.zeros((), device=gradient.device)


@_called.register_fake
def _(output: Tensor, x: Tensor, key: Tensor, num_calls: Tensor) -> Tensor:
    return torch.empty_like(key)


@_report.register_fake
def _(gradient: Tensor, x: Tensor, key: Tensor) -> Tensor:
    return torch.zeros((), device=gradient.device)


class _Tap(torch.autograd.Function):
    """An identity, which the compiler traces, around two operations into which it does not look."""

    @staticmethod
    def forward(ctx: Any, output: Tensor, root: Tensor, x: Tensor, key: Tensor) -> Tensor:
        ctx.save_for_backward(x, key)
        return output.view_as(output)

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor | None, ...]:
        return gradients[0], _report(gradients[0], *ctx.saved_tensors), None, None


def tap(output: Tensor, root: Tensor, x: Tensor, key: Tensor, num_calls: Tensor) -> Tensor:
    """`output`, with a gradient that is reported on its way back. For hooks under the compiler's tracer.

    Args:
        num_calls: () integers, which each call counts up: so the compiler neither drops nor moves it.
    """
    key_of_call = _called(output.detach(), x.detach(), key, num_calls)
    result: Tensor = _Tap.apply(output, root, x.detach(), key_of_call)  # type: ignore[no-untyped-call]  # torch's
    return result


def compiled_weights(model: nn.Module) -> list[nn.Parameter]:
    """The trainable parameters inside compiled modules.

    Raises:
        PrivacyConfigError: one of them is read without a layer; stand-ins for such parameters cannot be compiled.
    """
    weights: dict[int, nn.Parameter] = {}
    for path, block in model.named_modules():
        # Neither `module.compile()` nor `torch.compile(module)` leaves a public mark; tests compile and look.
        if block._compiled_call_impl is None and type(block).__name__ != "OptimizedModule":
            continue
        for name, module in block.named_modules():
            for local, parameter in module.named_parameters(recurse=False):
                if parameter.requires_grad and (type(module) not in RULES or type(module) in KEEPS):
                    whole = ".".join(filter(None, (path, name, local)))
                    what = (
                        "is read without a layer"
                        if type(module) not in RULES
                        else "needs more than its layer's input"
                    )
                    raise PrivacyConfigError(
                        f"{whole} {what}, which cannot be compiled with clipping on; do not compile "
                        f"{path or 'the model'}, or compile its parts that have no such parameter"
                    )
                if parameter.requires_grad:
                    weights[id(parameter)] = parameter
    return list(weights.values())


@contextmanager
def weights_at_rest(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """These parameters require no gradient inside."""
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
