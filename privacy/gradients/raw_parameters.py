"""Parameters that a module reads itself: class tokens, positions, scales, and tables of subclassed embeddings.

While its owner's forward runs, something else stands in the parameter's place.

* **One copy for each example**, (B, ...), whose gradients are the per-example gradients. A parameter of shape (1, n, ...) is
  expanded over its first dimension: what is added to tokens, or put before them, is written that way. For other shapes s,
  `layouts` looks for a (B, 1, ..., *s) with which the model computes the same: (B, 1, D) for a scale of channels where tokens
  stand between examples and channels, (B, d, p) for a matrix that is multiplied.
* **A table of a class that derives from `nn.Embedding`** may be looked up: the result is tapped as that of `nn.Embedding` is, so
  no copy of the table per example is made. Everything else that is done with it is refused.

Neither is a guess. The self-check compares losses and gradients with torch's own at two batch sizes, so a model that uses such a
parameter otherwise is noticed (a token that is folded into the batch, rows that are read by number); then the fallback
differentiates the module around it (fallback.py).
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
    """Whether every example gets a copy of a parameter of this shape, which a module without a rule owns."""
    return shape[:1] == (1,) and len(shape) > 1


def is_table(module: nn.Module, local_name: str) -> bool:
    """Whether the parameter is what a subclass of an embedding looks up."""
    return isinstance(module, nn.Embedding) and local_name == "weight"


def copies(parameter: Tensor, batch_size: int, ones: int | None) -> Tensor:
    """(B, *shape without its leading 1), or (B, 1, ..., *shape) with so many ones."""
    if ones is None:
        return parameter.detach().expand(batch_size, *parameter.shape[1:])
    return parameter.detach().expand(batch_size, *[1] * ones, *parameter.shape)


def layouts(
    model: nn.Module,
    names: Sequence[str],
    losses: Callable[[int], Tensor],
    restore: Callable[[], object],
) -> dict[str, int]:
    """For parameters that a forward reads, the number of ones with which copies do; the self-check compares what is found.

    Parameters whose names differ in numbers alone have one layout.

    Args:
        losses: of so many made-up examples, (B,), under torch.enable_grad.
        restore: puts back what a forward has changed.
    """
    names = [name for name in names if not is_copied(model.get_parameter(name).shape)]
    if not names:
        return {}
    restore()
    plain = {size: losses(size) for size in SIZES}

    def does(name: str, ones: int) -> bool:
        """Whether losses and the first one's gradient stay the same with copies, and it depends on its own."""
        path, _, local = name.rpartition(".")
        owner, parameter = model.get_submodule(path), model.get_parameter(name)
        for size, before_B in plain.items():
            (truth,) = torch.autograd.grad(
                before_B[0], parameter, retain_graph=True, materialize_grads=True
            )
            restore()
            rows = owner.__dict__[local] = copies(parameter, size, ones).requires_grad_()
            try:
                loss_B = losses(size)
                (gradient,) = torch.autograd.grad(loss_B[0], rows, allow_unused=True)
            except Exception:  # shapes that do not fit, or whatever else a model says to them
                return False
            finally:
                owner.__dict__.pop(local, None)
            if gradient is None:  # only another module reads it, by a rule of its own
                continue
            alike = torch.allclose(loss_B, before_B, rtol=1e-3) and not gradient[1:].any()
            if not alike or float((gradient[0].view_as(truth) - truth).norm()) > 1e-3 * float(
                truth.norm()
            ):
                return False
        return True

    found: dict[str, int | None] = {}
    for name in names:
        kind = re.sub(r"\d+", "#", name)
        if kind not in found:
            found[kind] = next((ones for ones in range(MOST_ONES + 1) if does(name, ones)), None)
    by_name = {name: found[re.sub(r"\d+", "#", name)] for name in names}
    return {name: ones for name, ones in by_name.items() if ones is not None}


class Table(Tensor):
    """Stands for the table of an embedding, (V, p): `F.embedding` looks rows up, and reports them; nothing else is possible."""

    parameter: str
    tap: Callable[[Tensor, Tensor], Tensor]

    @staticmethod
    def of(weight: Tensor, name: str, tap: Callable[[Tensor, Tensor], Tensor]) -> "Table":
        """
        Args:
            name: of the parameter, for messages.
            tap: (ids, rows) -> rows whose gradient is reported.
        """
        table = weight.detach().as_subclass(Table)
        table.parameter, table.tap = name, tap
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
            result = func(*args, **kwargs)
            if not torch.is_grad_enabled() or not isinstance(
                result, Tensor
            ):  # of its shape, dtype or device
                return result
            table = next(x for x in [*args, *kwargs.values()] if isinstance(x, Table))
            if (
                func is not F.embedding
                or args[1] is not table
                or kwargs["scale_grad_by_freq"]
                or kwargs["sparse"]
            ):
                raise Uncovered(
                    f"the table {table.parameter} is used in another way than by F.embedding",
                    [table.parameter],
                )
            tapped, padding = table.tap(args[0], result), kwargs["padding_idx"]
            if padding is None:
                return tapped
            return torch.where(
                (args[0] == padding % len(table))[..., None], result, tapped
            )  # that row is not trained
