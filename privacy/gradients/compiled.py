"""Taps inside compiled blocks: recorder.py's autograd function as operations for torch.compile.

`block.compile()` traces the hooks of the layers in it. Under the tracer a hook calls `tap`: the
opaque operation `called`, and an identity whose backward has the opaque operation `report`. The
compiler schedules both and looks into neither, so a block stays one graph, and the blocks of a
model, which differ only in the number in a tensor (`key`), share it.
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
    """The callbacks of one layer's opaque operations.

    Args:
        on_call: (input, output) of each forward; may refuse by raising.
        on_gradient: (input, gradient with respect to the output) of each backward.
    """

    _taps: ClassVar[WeakValueDictionary[int, "CompiledTap"]] = WeakValueDictionary()
    _numbers = itertools.count()

    def __init__(
        self,
        on_call: Callable[[Tensor, Tensor], None],
        on_gradient: Callable[[Tensor, Tensor], None],
    ) -> None:
        number = next(self._numbers)
        self._taps[number] = self
        self.on_call = on_call
        self.on_gradient = on_gradient
        self.num_calls = torch.tensor(0)
        # A tensor, because the compiler would make a graph of its own for each int.
        self.key = torch.tensor(number)

    @classmethod
    def of(cls, key: Tensor) -> "CompiledTap":
        """Returns the tap of a key."""
        return cls._taps[int(key)]


# A process may hold the clone's package and the installed one; torch has one operation of each
# name, the one that came last.
_OPERATIONS = f"{__name__.partition('.')[0]}_clipping"


@torch.library.custom_op(f"{_OPERATIONS}::called", mutates_args=("num_calls",))
def _called(output: Tensor, x: Tensor, key: Tensor, num_calls: Tensor) -> Tensor:
    num_calls += 1
    CompiledTap.of(key).on_call(x, output)
    # A key of its own for each call. The compiler makes one operation of two with equal arguments,
    # so a layer that is called twice on one input would report one gradient of two.
    return key.clone()


@torch.library.custom_op(f"{_OPERATIONS}::report", mutates_args=())
def _report(gradient: Tensor, x: Tensor, key: Tensor) -> Tensor:
    CompiledTap.of(key).on_gradient(x, gradient)
    # The gradient of the recorder's root, without which the compiler would drop the operation as
    # dead code.
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
    """Returns the output with a gradient that is reported on its way back.

    It serves hooks under the compiler's tracer.

    Args:
        num_calls: () integer, which each call counts up, so that the compiler neither drops nor
            moves the call.
    """
    key_of_call = _called(output.detach(), x.detach(), key, num_calls)
    arguments = (output, root, x.detach(), key_of_call)
    tapped: Tensor = _Tap.apply(*arguments)  # type: ignore[no-untyped-call]  # torch's
    return tapped


def compiled_weights(model: nn.Module) -> list[nn.Parameter]:
    """Returns the trainable parameters inside compiled modules.

    Raises:
        PrivacyConfigError: one of them is read without a layer; stand-ins for such parameters
            cannot be compiled.
    """
    weights: dict[int, nn.Parameter] = {}
    for path, block in model.named_modules():
        # Neither `module.compile()` nor `torch.compile(module)` leaves a public mark; tests compile
        # and look.
        if block._compiled_call_impl is None and type(block).__name__ != "OptimizedModule":
            continue
        for module_path, module in block.named_modules():
            for local, parameter in module.named_parameters(recurse=False):
                if not parameter.requires_grad:
                    continue
                reason = ""
                if type(module) not in RULES:
                    reason = "is read without a layer"
                elif type(module) in KEEPS:
                    reason = "needs more than its layer's input"
                if reason:
                    name = ".".join(filter(None, (path, module_path, local)))
                    raise PrivacyConfigError(
                        f"{name} {reason}, which cannot be compiled with clipping on; do not "
                        f"compile {path or 'the model'}, or compile its parts that have no such "
                        "parameter"
                    )
                weights[id(parameter)] = parameter
    return list(weights.values())


@contextmanager
def weights_at_rest(parameters: Sequence[nn.Parameter]) -> Iterator[None]:
    """Keeps these parameters from requiring gradients inside the context.

    A compiled backward computes the gradients of everything that requires one, weights included.
    """
    for parameter in parameters:
        parameter.requires_grad_(False)
    try:
        yield
    finally:
        for parameter in parameters:
            parameter.requires_grad_(True)
