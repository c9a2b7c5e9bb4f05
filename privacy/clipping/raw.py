"""A parameter that a module reads without a layer: class token, positions, layer scale, temperature, prompt.

While its owner's forward runs, the recorder puts a `PerExample` in the parameter's place. To the model it looks like the
parameter: shape s, dtype, device. Behind it stands a tensor of shape (B, *s), one copy per example, whose gradient is the
per-example gradient. Each operation is carried out with this hidden leading dimension, which is exact for every operation
that leaves it alone, until the value meets a tensor of the batch. There the hidden dimension and the batch dimension become
one, and the result is an ordinary tensor.

Which tensor is "of the batch" must never be guessed from a size, because T tokens may happen to be as many as B examples: a
gradient booked to the wrong example would break the sensitivity bound without a trace. Evidence is dependence on a recorded
layer (visible in the autograd graph), or being an argument of the owner's forward. That the first dimension of such a tensor
is the examples is the convention of all rules; selfcheck.py tests it with two batch sizes, which finds sequence-first layouts
even where T = B. A tensor without evidence may be a table or a mask of the batch; then both readings are carried along:

* `full`     (B, *s), valid if the first dimension of s is not the examples;
* `diagonal` (B, *s[1:]), valid if it is, and needed only where s[0] = B.

The next tensor of the batch decides: aligned with the first dimension of s, it makes that one the examples.

Everything else is refused with the names of parameter and function. The method has no published counterpart that we know of;
Opacus hands such modules to functorch as a whole, fastDP does not train them.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from .fallback import Uncovered

Handler = Callable[[Any, tuple[Any, ...], dict[str, Any]], Any]
HANDLERS: dict[Any, Handler] = {}
"""What a stand-in can do, by torch function; raw_operations.py fills it."""
METADATA: set[Any] = set()
"""Functions that read no values: they run on the wrapper, which has shape, dtype and device but no data."""


def handles(functions: Sequence[Any]) -> Callable[[Handler], Handler]:
    """Registers the decorated handler for all `functions`."""

    def register(handler: Handler) -> Handler:
        HANDLERS.update(dict.fromkeys(functions, handler))
        return handler

    return register


@dataclass(frozen=True)
class Scope:
    """Where a value comes from: the parameter's name (for messages), B, and the arguments of the owner's forward."""

    name: str
    batch_size: int
    arguments: tuple[Tensor, ...] = ()


class PerExample(Tensor):
    """A stand-in of shape s for a parameter (or a value computed from one) that every example has a copy of.

    Made by `per_example`. Raises `PrivacyConfigError` from any operation it cannot split by example.
    """

    scope: Scope
    as_layer: Callable[[Tensor, Tensor], Tensor] | None
    """It taps the output of a function that uses the parameter as a layer would: (input, output) -> output (raw_layers.py).
    None stands for values that are computed from a parameter."""
    _full: Callable[[], Tensor]
    _diagonal: Tensor | None

    @staticmethod
    def make(
        shape: Sequence[int], like: Tensor, full: Callable[[], Tensor], diagonal: Tensor | None, scope: Scope
    ) -> "PerExample":
        value: PerExample = Tensor._make_wrapper_subclass(
            PerExample, torch.Size(shape), dtype=like.dtype, device=like.device, requires_grad=like.requires_grad
        )
        value.scope, value._full, value._diagonal, value.as_layer = scope, full, diagonal, None
        return value

    def full(self) -> Tensor:
        """(B, *s)."""
        with torch.enable_grad():  # the value is kept for later, when a gradient may be wanted
            tensor = self._full()
        self._full = lambda: tensor
        return tensor

    @property
    def may_join(self) -> bool:
        """Whether the first dimension of s can be the examples."""
        return self.dim() > 0 and (self._diagonal is not None or self.shape[0] == 1)

    def diagonal_part(self) -> Tensor:
        """(B, *s[1:]): example b's slice of its own copy."""
        return self.full().select(1, 0) if self._diagonal is None else self._diagonal

    @classmethod
    def __torch_function__(
        cls, func: Callable[..., Any], types: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if func in METADATA:
            with torch._C.DisableTorchFunctionSubclass():
                return func(*args, **kwargs)
        if not torch.is_grad_enabled():  # no gradient flows, so the parameter's own value will do
            return func(*_values(args), **{k: _values(v) for k, v in kwargs.items()})
        handler = HANDLERS.get(func)
        if handler is None or "out" in kwargs:
            raise refusal(func, args, kwargs)
        return handler(func, args, kwargs)

    @classmethod
    def __torch_dispatch__(  # type: ignore[override]  # torch's own stub is not a classmethod
        cls, func: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        raise refusal(func, args, kwargs or {})  # a function that no handler has seen

    def __repr__(self) -> str:  # type: ignore[override]
        return f"PerExample({self.scope.name}, shape={tuple(self.shape)})"


def per_example(
    batched: Tensor,
    name: str,
    arguments: Sequence[Any] = (),
    as_layer: Callable[[Tensor, Tensor], Tensor] | None = None,
) -> Tensor:
    """The stand-in for a parameter.

    Args:
        batched: (B, *s), one copy of the parameter per example.
        name: the parameter, or the layer whose output this is, for messages.
        arguments: of the owner's forward; those with B rows count as tensors of the batch.
        as_layer: see `PerExample`.
    """
    tensors = tuple(a for a in arguments if isinstance(a, Tensor) and a.dim() > 0 and len(a) != 1)
    value = from_full(batched, Scope(name, len(batched), tensors))
    value.as_layer = as_layer
    return value


def from_full(full: Tensor, scope: Scope) -> PerExample:
    return PerExample.make(full.shape[1:], full, lambda: full, None, scope)


def of_batch(x: Tensor, scopes: Sequence[Scope]) -> bool:
    """Whether there is evidence that the first dimension of x is the examples.

    x is an argument of an owner's forward, or depends on a leaf that is no parameter: the recorder's root, or an input that
    requires a gradient.
    """
    if any(x is a for scope in scopes for a in scope.arguments):
        return True
    if x.grad_fn is None:
        return x.requires_grad and not isinstance(x, nn.Parameter)
    stack, seen = [x.grad_fn], set()
    while stack:
        node = stack.pop()
        if node in seen:
            continue
        seen.add(node)
        leaf = getattr(node, "variable", None)
        if leaf is not None and not isinstance(leaf, nn.Parameter):
            return True
        stack.extend(parent for parent, _ in node.next_functions if parent is not None)
    return False


def _values(x: Any) -> Any:
    match x:
        case PerExample():
            return x.full().detach()[0]
        case list() | tuple():
            return type(x)(_values(y) for y in x)
        case _:
            return x


def stand_ins(x: Any) -> list[PerExample]:
    """All stand-ins among the arguments of a call."""
    match x:
        case PerExample():
            return [x]
        case list() | tuple():
            return [s for y in x for s in stand_ins(y)]
        case dict():
            return stand_ins(list(x.values()))
        case _:
            return []


def refusal(func: Any, args: Any, kwargs: Any, why: str = "") -> PrivacyConfigError:
    names = sorted({s.scope.name for s in stand_ins([args, kwargs])})
    what = getattr(func, "__name__", str(func))
    why = why or "this use of a parameter cannot be split by example"
    return Uncovered(
        f"{' and '.join(names) or 'a raw parameter'} in {what}(): {why}; move the parameter into a layer that has a "
        "clipping rule (nn.Linear for a matrix), register a rule for its module (docs/extending.md), or freeze it",
        [part for name in names for part in name.split(" and ")],
    )
