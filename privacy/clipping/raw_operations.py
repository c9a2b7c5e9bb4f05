"""What a `PerExample` can do: element by element, changes of shape, concatenation. See raw.py for the idea.

A handler is called like `__torch_function__` with (function, args, kwargs) and returns what the model goes on with: an
ordinary tensor where a tensor of the batch took part, else a new stand-in. n is the number of dimensions of the result.
"""

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from .raw import METADATA, PerExample, Scope, from_full, handles, of_batch, refusal, stand_ins


def _methods(names: str, *homes: Any) -> list[Any]:
    return [getattr(home, name) for name in names.split() for home in homes if hasattr(home, name)]


_PROPERTIES = (
    "shape dtype device ndim layout requires_grad is_leaf is_cuda is_meta is_sparse is_quantized grad_fn _version"
)
_SIZES = "size dim numel nelement ndimension __len__ __hash__ is_floating_point is_complex element_size get_device"
METADATA.update(getattr(Tensor, name).__get__ for name in _PROPERTIES.split())
METADATA.update(_methods(_SIZES, Tensor))
METADATA.update(_methods("numel is_floating_point is_complex", torch))

_ARITHMETIC = (
    "add sub subtract rsub mul multiply div divide true_divide pow maximum minimum where lerp addcmul addcdiv atan2"
)
_DUNDERS = (
    "__add__ __radd__ __sub__ __rsub__ __mul__ __rmul__ __truediv__ __rtruediv__ __pow__ __rpow__ __neg__ __abs__"
)
_UNARY = (
    "neg negative abs exp expm1 log log1p log2 sqrt rsqrt square reciprocal sigmoid tanh sin cos relu gelu silu softplus "
    "elu leaky_relu hardtanh logsigmoid clamp clamp_min clamp_max clip erf clone float double half bfloat16"
)
_IN_PLACE = "add_ sub_ mul_ div_ multiply_ divide_ subtract_ lerp_ addcmul_ __iadd__ __isub__ __imul__ __itruediv__"


@handles(_methods(f"{_ARITHMETIC} {_DUNDERS} {_UNARY} {_IN_PLACE}", Tensor, torch, F))
def _elementwise(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    """f(x, y, ...) with broadcasting. Tensors in kwargs (other=, input=) are operands as well."""
    operands = [x for x in [*args, *kwargs.values()] if isinstance(x, Tensor)]
    shape = torch.broadcast_shapes(*[x.shape for x in operands])
    n = len(shape)

    def call(convert: Callable[[Tensor], Tensor]) -> Tensor:
        result = func(
            *[convert(x) if isinstance(x, Tensor) else x for x in args],
            **{k: convert(x) if isinstance(x, Tensor) else x for k, x in kwargs.items()},
        )
        assert isinstance(result, Tensor)
        return result

    in_place = func in _IN_PLACE_FUNCTIONS or kwargs.get("inplace", False)
    meets_batch = _meets_batch(func, args, kwargs, operands, n)
    if in_place and (not meets_batch or isinstance(args[0], PerExample)):
        raise refusal(func, args, kwargs, "it would be changed in place, or change a tensor that is not of the batch")
    if meets_batch:
        return call(lambda x: _joined(x, n))
    return _both_readings(shape, operands, lambda: call(lambda x: _hidden(x, n)), lambda: call(lambda x: _joined(x, n)))


_IN_PLACE_FUNCTIONS = set(_methods(_IN_PLACE, Tensor, torch, F))


def _evident(operands: Sequence[Tensor]) -> list[Tensor]:
    """The operands that are of the batch for certain."""
    scopes = [v.scope for v in stand_ins(operands)]
    return [x for x in operands if not isinstance(x, PerExample) and of_batch(x, scopes)]


def _meets_batch(func: Any, args: Any, kwargs: Any, operands: Sequence[Tensor], n: int) -> bool:
    """Whether an operand is of the batch; then its first dimension must be the first of the result."""
    values = stand_ins(operands)
    batch = _evident(operands)
    size = values[0].scope.batch_size
    if not batch:
        # All of a single example's gradient is its own, so any tensor with one row will do.
        return (
            size == 1
            and any(not isinstance(x, PerExample) and x.dim() == n for x in operands)
            and _can_join(operands, n, 1)
        )
    if n == 0 or any(x.dim() != n or x.shape[0] != size for x in batch):
        shapes = ", ".join(str(tuple(x.shape)) for x in batch)
        raise refusal(
            func, args, kwargs, f"it meets a tensor of shape {shapes}, where the {size} examples are not first"
        )
    if any(v.dim() == n and not v.may_join for v in values):
        raise refusal(func, args, kwargs, "its first dimension is not a 1 that broadcasts along the examples")
    return True


def _joined(x: Tensor, n: int) -> Tensor:
    """x where the hidden dimension is the first of the n dimensions of the result."""
    if not isinstance(x, PerExample):
        return x
    if x.dim() == n:
        return x.diagonal_part()
    full = x.full()
    return full.reshape(len(full), *[1] * (n - 1 - x.dim()), *x.shape)


def _hidden(x: Tensor, n: int) -> Tensor:
    """x where the hidden dimension comes before the n dimensions of the result."""
    if not isinstance(x, PerExample):
        return x
    full = x.full()
    return full.reshape(len(full), *[1] * (n - x.dim()), *x.shape)


def _both_readings(
    shape: Sequence[int], operands: Sequence[Tensor], full: Callable[[], Tensor], joined: Callable[[], Tensor]
) -> PerExample:
    """A stand-in; where the first dimension could be the examples, the larger reading waits until it is asked for."""
    scope = _merged(stand_ins(operands))
    n, size = len(shape), scope.batch_size
    if size == 1 or n == 0 or shape[0] != size or not _can_join(operands, n, size):
        return from_full(full(), scope)
    versions = [(x, x._version) for x in operands if not isinstance(x, PerExample)]

    def later() -> Tensor:
        if any(x._version != version for x, version in versions):
            raise refusal(
                "broadcast", list(operands), {}, "a tensor that it was combined with has changed in place since"
            )
        return full()

    diagonal = joined()
    return PerExample.make(shape, diagonal, later, diagonal, scope)


def _can_join(operands: Sequence[Tensor], n: int, size: int) -> bool:
    """Whether the first of the n dimensions of the result can be the examples."""
    return n > 0 and all(
        x.dim() < n or (x.may_join if isinstance(x, PerExample) else x.shape[0] in (1, size)) for x in operands
    )


def _merged(values: Sequence[PerExample]) -> Scope:
    scopes = [v.scope for v in values]
    name = " and ".join(sorted({s.name for s in scopes}))
    return Scope(name, scopes[0].batch_size, tuple(a for s in scopes for a in s.arguments))


def _reshaped(
    x: PerExample, shape: Sequence[int], full: Callable[[], Tensor], diagonal: Callable[[], Tensor] | None
) -> PerExample:
    """`diagonal` is given where the first dimension stays what it was."""
    if x._diagonal is not None and diagonal is not None:
        return PerExample.make(shape, x, full, diagonal(), x.scope)
    return from_full(full(), x.scope)


def _numbers(args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[int]:
    """The sizes or dimensions of view(2, 3), view((2, 3)) and view(size=(2, 3))."""
    rest = [*args[1:], *kwargs.values()]
    return list(rest[0] if len(rest) == 1 and not isinstance(rest[0], int) else rest)


@handles(_methods("view reshape", Tensor, torch))
def _view(func: Any, args: Any, kwargs: Any) -> PerExample:
    x, sizes = args[0], _numbers(args, kwargs)
    if not all(isinstance(s, int) for s in sizes):
        raise refusal(func, args, kwargs)
    known = math.prod(s for s in sizes if s != -1)
    shape = [x.numel() // known if s == -1 else s for s in sizes]
    keeps = x.dim() > 0 and len(shape) > 0 and shape[0] == x.shape[0]
    size = x.scope.batch_size
    return _reshaped(
        x, shape, lambda: x.full().reshape(size, *shape), (lambda: x._diagonal.reshape(shape)) if keeps else None
    )


@handles(_methods("unsqueeze", Tensor, torch))
def _unsqueeze(func: Any, args: Any, kwargs: Any) -> PerExample:
    x, dim = args[0], _numbers(args, kwargs)[0]
    dim %= x.dim() + 1
    shape = [*x.shape[:dim], 1, *x.shape[dim:]]
    diagonal = (lambda: x._diagonal.unsqueeze(dim)) if dim > 0 else None
    return _reshaped(x, shape, lambda: x.full().unsqueeze(dim + 1), diagonal)


@handles(_methods("permute", Tensor, torch))
def _permute(func: Any, args: Any, kwargs: Any) -> PerExample:
    x = args[0]
    dims = [d % x.dim() for d in _numbers(args, kwargs)]
    diagonal = (lambda: x._diagonal.permute(dims)) if dims and dims[0] == 0 else None
    return _reshaped(x, [x.shape[d] for d in dims], lambda: x.full().permute(0, *[d + 1 for d in dims]), diagonal)


@handles(_methods("expand repeat", Tensor))
def _expand_or_repeat(func: Any, args: Any, kwargs: Any) -> PerExample:
    x, numbers, repeats = args[0], _numbers(args, kwargs), func is Tensor.repeat
    padded = [1] * (len(numbers) - x.dim()) + list(x.shape)
    if repeats:
        shape = [p * times for p, times in zip(padded, numbers, strict=True)]
    else:
        shape = [p if s == -1 else s for p, s in zip(padded, numbers, strict=True)]
    size = x.scope.batch_size

    def changed(hidden: Tensor, first: int) -> Tensor:
        """What the dimensions from `first` on become, behind the hidden one."""
        hidden = hidden.reshape(size, *padded[first:])
        return hidden.repeat(1, *numbers[first:]) if repeats else hidden.expand(size, *shape[first:])

    full = lambda: changed(x.full(), 0)  # noqa: E731
    if shape and shape[0] == size != 1 and padded[0] == 1:
        return PerExample.make(shape, x, full, changed(x.full(), 1), x.scope)
    keeps = len(numbers) == x.dim() > 0 and (not repeats or numbers[0] == 1)
    return _reshaped(x, shape, full, (lambda: changed(x._diagonal, 1)) if keeps else None)


@handles([Tensor.__getitem__])
def _getitem(func: Any, args: Any, kwargs: Any) -> PerExample:
    """Integers, slices, None, ..., and at most one tensor of indices that is the same for all examples."""
    x, index = args
    index = index if isinstance(index, tuple) else (index,)
    tensors, numbers = [i for i in index if isinstance(i, Tensor)], [i for i in index if isinstance(i, int)]
    is_known = all(
        isinstance(i, (int, slice, type(None), type(...), Tensor)) and not isinstance(i, bool) for i in index
    )
    are_plain = all(i.dtype in (torch.int32, torch.int64) and not isinstance(i, PerExample) for i in tensors)
    # torch moves dimensions about when a tensor meets a number or another tensor in one index.
    stay_in_place = len(tensors) <= (0 if numbers else 1)
    if not (isinstance(x, PerExample) and is_known and are_plain and stay_in_place):
        raise refusal(func, args, kwargs, "such an index is not supported")
    if x._diagonal is not None and len(index) > 0 and isinstance(index[0], slice) and index[0] == slice(None):
        diagonal = x._diagonal[index]
        return PerExample.make(diagonal.shape, x, lambda: x.full()[(slice(None), *index)], diagonal, x.scope)
    ids, size = index[0] if index else None, x.scope.batch_size
    if isinstance(ids, Tensor) and ids.dim() > 0 and len(ids) == size != 1:  # the ids may be those of each example
        rows = torch.arange(size, device=ids.device).view(-1, *[1] * (ids.dim() - 1))
        diagonal = x.full()[(rows, *index)]
        return PerExample.make(diagonal.shape, x, lambda: x.full()[(slice(None), *index)], diagonal, x.scope)
    return from_full(x.full()[(slice(None), *index)], x.scope)


@handles(_methods("to type_as", Tensor))
def _convert(func: Any, args: Any, kwargs: Any) -> Any:
    """A type comes from an example value of that type, so a stand-in to the right may be any tensor."""
    x = args[0]
    rest = [torch.empty((), dtype=a.dtype, device=a.device) if isinstance(a, PerExample) else a for a in args[1:]]
    if not isinstance(x, PerExample):
        return func(x, *rest, **kwargs)
    like = func(torch.empty((), dtype=x.dtype, device=x.device), *rest, **kwargs)
    if like.dtype == x.dtype and like.device == x.device:
        return x
    return _reshaped(x, x.shape, lambda: x.full().to(like), lambda: x.diagonal_part().to(like))


@handles(_methods("detach", Tensor, torch))
def _detach(func: Any, args: Any, kwargs: Any) -> Tensor:
    x: PerExample = args[0]
    return x.full().detach()[0]


@handles(_methods("cat concat concatenate", torch))
def _cat(func: Any, args: Any, kwargs: Any) -> Any:
    tensors: list[Tensor] = list(args[0] if args else kwargs["tensors"])
    dim: int = args[1] if len(args) > 1 else kwargs.get("dim", kwargs.get("axis", 0))
    n = tensors[0].dim()
    if any(x.dim() != n for x in tensors):
        raise refusal(func, args, kwargs)
    dim %= n

    def joined() -> Tensor:
        return torch.cat([_joined(x, n) for x in tensors], dim)

    if (dim != 0 or _evident(tensors)) and _meets_batch(func, args, kwargs, tensors, n):
        if dim == 0 or any(x.shape[0] != tensors[0].shape[0] for x in tensors):
            raise refusal(func, args, kwargs, "examples cannot be concatenated with it")
        return joined()
    size = stand_ins(tensors)[0].scope.batch_size

    def full() -> Tensor:
        return torch.cat(
            [x.full() if isinstance(x, PerExample) else x.expand(size, *x.shape) for x in tensors], dim + 1
        )

    if dim == 0:
        return from_full(full(), _merged(stand_ins(tensors)))
    shape = list(tensors[0].shape)
    shape[dim] = sum(x.shape[dim] for x in tensors)
    return _both_readings(shape, tensors, full, joined)
