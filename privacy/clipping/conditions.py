"""Does a forward put a condition on its whole batch: on the largest number, the mean, whether any is NaN, how many ids differ?

    if x.abs().max() > 100:
        x = x / x.abs().max()

Ordinary examples never meet such a condition, and one that meets it changes the losses of all others. So examples stand beside
rows of one kind after the other, each in a batch of its own: NaN hides large numbers from the largest, large ones hide small
ones, and what is equal in all rows shows only where nothing differs. Losses must stay what they were.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from .checked import LARGE, Change, Inputs, NotTaken, Task, compare_losses, in_rows, losses_of

HUGE = 1e18
"""Larger than LARGE, with a square that fits into float32."""


def _unchanged(x_B: Tensor) -> Tensor:
    return x_B


class Rows(NamedTuple):
    """What rows of a made-up batch hold in place of examples. Each takes and returns (B, ...).

    Attributes:
        numbers: of inputs that are floating-point numbers.
        ids: of the other inputs.
        looked_up: of what tables return for ids, which cannot be hostile themselves.
    """

    numbers: Change = _unchanged
    ids: Change = _unchanged
    looked_up: Change = _unchanged


def _example(row: int) -> Rows:
    """Every row holds the same example."""
    return Rows(*[lambda x_B: x_B[row].expand_as(x_B)] * 2)


def _numbers(value: float) -> Rows:
    """Numbers of one sign that are at least `value`; zeros, NaN and infinity are exact."""

    def change(x_B: Tensor) -> Tensor:
        return (1 + x_B.abs()) * value if 0 < abs(value) < math.inf else torch.full_like(x_B, value)

    return Rows(change, looked_up=change)


def _spread(x_B: Tensor) -> Tensor:
    """All ids between the lowest and the highest, as far as there is room."""
    low, high = int(x_B.amin()), int(x_B.amax())
    every = low + torch.arange(x_B.numel(), device=x_B.device) % (1 + high - low)
    return every.to(x_B.dtype).view_as(x_B)


AMONG_OTHERS, BUT_ONE = (False, True, False), (False, True, True, True, True, True)
"""Whether a row stays: every second, or all but one."""
EXAMPLES, ZEROS, TINY, SMALL, LARGE_NUMBERS = Rows(), *map(_numbers, (0.0, 1e-6, 1e-2, LARGE))
LOWEST, HIGHEST = Rows(ids=lambda x_B: x_B.amin().expand_as(x_B)), Rows(ids=lambda x_B: x_B.amax().expand_as(x_B))
SPREAD = Rows(ids=_spread)
BATCHES: tuple[tuple[tuple[bool, ...], Rows, tuple[Rows, ...]], ...] = (
    (
        AMONG_OTHERS,
        EXAMPLES,
        (
            EXAMPLES,
            *map(_numbers, (math.nan, math.inf, -math.inf, LARGE, -LARGE, HUGE, 0.0)),
            _example(0),
            LOWEST,
            HIGHEST,
            SPREAD,
        ),
    ),
    (BUT_ONE, EXAMPLES, (EXAMPLES, _numbers(math.nan), LARGE_NUMBERS, HIGHEST)),
    (AMONG_OTHERS, SMALL, (SMALL, *map(_numbers, (1.0, 10.0, 100.0, 1000.0, LARGE, -1.0)))),
    (AMONG_OTHERS, ZEROS, (ZEROS, _numbers(1.0), _numbers(-1.0))),
    (AMONG_OTHERS, TINY, (TINY, EXAMPLES)),
    (BUT_ONE, LARGE_NUMBERS, (LARGE_NUMBERS, EXAMPLES)),
    (AMONG_OTHERS, _example(0), (_example(0), EXAMPLES, SPREAD)),
    (AMONG_OTHERS, _example(1), (_example(1), EXAMPLES, SPREAD)),
    (AMONG_OTHERS, LOWEST, (LOWEST, EXAMPLES)),
    (AMONG_OTHERS, HIGHEST, (HIGHEST, EXAMPLES)),
)
"""Which rows stay, what they hold, and what stands beside them: one kind to a batch."""


def require_unconditional(model: nn.Module, task: Task, inputs: Inputs, tolerance: float) -> None:
    """Requires that examples keep their losses whatever stands beside them; a kind that the model refuses is left out.

    Raises:
        PrivacyConfigError: the loss of an example changes with the rows beside it.
    """
    count = len(next(iter(inputs.values())))
    for stays, here, neighbours in BATCHES:
        stays_B, row_B = torch.tensor(stays), torch.arange(len(stays)) % count
        rows = {name: x[row_B.to(x.device)] for name, x in inputs.items()}

        def put(here: Change, beside: Change, x_B: Tensor, stays_B: Tensor = stays_B) -> Tensor:
            return torch.where(in_rows(stays_B, x_B), here(x_B), beside(x_B))

        losses: list[Tensor] = []
        for beside in neighbours:
            numbers, ids, looked_up = map(partial, [put] * 3, here, beside)
            batch = {name: (numbers if x.is_floating_point() else ids)(x) for name, x in rows.items()}
            with suppress(NotTaken), returning(tables_of(model), looked_up, batch):
                loss_B = losses_of(task, batch)
                losses.append(loss_B[stays_B.to(loss_B.device)])
                compare_losses(losses[0], losses[-1], tolerance)


def tables_of(model: nn.Module) -> list[nn.Embedding]:
    """The tables of a model that ids look up."""
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


@contextmanager
def returning(tables: list[nn.Embedding], change: Change, batch: Inputs) -> Iterator[None]:
    """Changes what tables return for the ids of a batch: inputs that are ids cannot be made hostile themselves.

    Without it, a scale that all examples share would be seen in float64 alone: the largest number of a batch is that of an
    example that stays, whatever made-up examples stand around it. Positions are looked up in tables too, and are no examples':
    ids count as those of the batch if they have the shape of an input, or are one of its columns.
    """
    given = [x for x in batch.values() if not x.is_floating_point()]

    def is_of_batch(ids: Tensor) -> bool:
        if ids.dim() > 1:
            return any(ids.shape == x.shape for x in given)
        return any(
            bool((x.reshape(len(x), -1) == ids[:, None]).all(0).any()) for x in given if x.shape[:1] == ids.shape
        )

    def hook(table: nn.Module, args: Any, output: Any) -> Any:
        return change(output) if args and isinstance(output, Tensor) and is_of_batch(args[0]) else None

    handles = [table.register_forward_hook(hook) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
