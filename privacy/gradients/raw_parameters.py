"""Parameters that a module reads itself: class tokens, positions, scales, tables of embeddings.

While its owner's forward runs, one copy for each example stands in the parameter's place, or a
table that reports the rows that are looked up. The self-check compares losses and gradients with
torch's own at two batch sizes, so a model that uses such a parameter otherwise is noticed (a token
that is folded into the batch, rows that are read by number); then the fallback differentiates the
module around it (fallback.py).
"""

import re
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from .fallback import Uncovered

SIZES = (1, 2, 3)
"""Numbers of examples with which layouts are tried."""
MOST_ONES = 2


def is_copied(shape: torch.Size) -> bool:
    """Returns whether every example gets a copy of a parameter of this shape.

    A module without a rule owns it. What is added to tokens, or put before them, has the shape
    (1, n, ...).
    """
    return shape[:1] == (1,) and len(shape) > 1


def is_table(module: nn.Module, local_name: str) -> bool:
    """Returns whether the parameter is the table that a subclass of an embedding looks up."""
    return isinstance(module, nn.Embedding) and local_name == "weight"


def copies(parameter: Tensor, batch_size: int, num_ones: int | None) -> Tensor:
    """Returns one copy for each example: (B, *shape without its leading 1).

    With `num_ones` it is (B, 1, ..., *shape), with so many ones.
    """
    if num_ones is None:
        return parameter.detach().expand(batch_size, *parameter.shape[1:])
    return parameter.detach().expand(batch_size, *[1] * num_ones, *parameter.shape)


def layouts(
    model: nn.Module,
    names: Sequence[str],
    losses: Callable[[int], Tensor],
    restore: Callable[[], object],
) -> dict[str, int]:
    """Returns the number of ones in the copies of parameters that a forward reads.

    Copies of shape (B, 1, ..., *shape) serve where the model computes the same with them: (B, 1, D)
    for a scale of channels where tokens stand between examples and channels, (B, d, p) for a matrix
    that is multiplied. Parameters whose names differ in numbers alone have one layout. The
    self-check compares the outcome.

    Args:
        losses: returns those of so many made-up examples, (B,), under torch.enable_grad.
        restore: puts back what a forward has changed.
    """
    names = [name for name in names if not is_copied(model.get_parameter(name).shape)]
    if not names:
        return {}
    restore()
    plain_losses = {size: losses(size) for size in SIZES}

    def serves(name: str, num_ones: int) -> bool:
        """Returns whether copies change no loss and no gradient of the first example.

        The first loss must depend on its own copy alone.
        """
        path, _, local = name.rpartition(".")
        owner = model.get_submodule(path)
        parameter = model.get_parameter(name)
        for size, plain_loss_B in plain_losses.items():
            (plain_gradient,) = torch.autograd.grad(
                plain_loss_B[0], parameter, retain_graph=True, materialize_grads=True
            )
            restore()
            rows = owner.__dict__[local] = copies(parameter, size, num_ones).requires_grad_()
            try:
                loss_B = losses(size)
                (gradient,) = torch.autograd.grad(loss_B[0], rows, allow_unused=True)
            # The model may reject the copies with any exception.
            except Exception:
                return False
            finally:
                owner.__dict__.pop(local, None)
            # Only another module reads the parameter, by a rule of its own.
            if gradient is None:
                continue
            if not torch.allclose(loss_B, plain_loss_B, rtol=1e-3) or gradient[1:].any():
                return False
            error = float((gradient[0].view_as(plain_gradient) - plain_gradient).norm())
            if error > 1e-3 * float(plain_gradient.norm()):
                return False
        return True

    ones_by_kind: dict[str, int | None] = {}
    ones_by_name: dict[str, int] = {}
    for name in names:
        kind = re.sub(r"\d+", "#", name)
        if kind not in ones_by_kind:
            candidates = (num_ones for num_ones in range(MOST_ONES + 1) if serves(name, num_ones))
            ones_by_kind[kind] = next(candidates, None)
        num_ones = ones_by_kind[kind]
        if num_ones is not None:
            ones_by_name[name] = num_ones
    return ones_by_name


class Table(Tensor):
    """A stand-in for the table of an embedding, (V, p), in which `F.embedding` looks rows up.

    The rows are tapped as those of `nn.Embedding` are, so no copy of the table per example is made.
    Every other use is refused.
    """

    parameter: str
    tap: Callable[[Tensor, Tensor], Tensor]

    @staticmethod
    def of(weight: Tensor, name: str, tap: Callable[[Tensor, Tensor], Tensor]) -> "Table":
        """Returns the stand-in of a weight.

        Args:
            name: of the parameter, for messages.
            tap: (ids, rows) -> rows whose gradient is reported.
        """
        table = weight.detach().as_subclass(Table)
        table.parameter = name
        table.tap = tap
        return table

    @classmethod
    def __torch_function__(
        cls,
        func: Callable[..., Any],
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        kwargs = kwargs or {}
        with torch._C.DisableTorchFunctionSubclass():
            output = func(*args, **kwargs)
            # Shape, dtype or device of the table.
            if not torch.is_grad_enabled() or not isinstance(output, Tensor):
                return output
            table = next(x for x in [*args, *kwargs.values()] if isinstance(x, Table))
            is_lookup = func is F.embedding and args[1] is table
            if not is_lookup or kwargs["scale_grad_by_freq"] or kwargs["sparse"]:
                raise Uncovered(
                    f"the table {table.parameter} is used in another way than by F.embedding",
                    [table.parameter],
                )
            tapped = table.tap(args[0], output)
            padding_idx = kwargs["padding_idx"]
            if padding_idx is None:
                return tapped
            # The row of padding is not trained.
            is_padding = (args[0] == padding_idx % len(table))[..., None]
            return torch.where(is_padding, output, tapped)
