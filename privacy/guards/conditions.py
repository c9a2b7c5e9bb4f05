"""Does a forward put a condition on its whole batch: on the largest number, the mean, whether any is NaN, how many ids differ?

    if x.abs().max() > 100:
        x = x / x.abs().max()

Ordinary examples never meet such a condition, and one that meets it changes the losses of all others. So examples stand beside
rows of one kind after the other, each in a batch of its own: NaN hides large numbers from the largest, large ones hide small
ones, and what is equal in all rows shows only where nothing differs. Some kinds fill whole batches, beside which one ordinary
example is the exception: negative, tiny, whole or constant numbers, one id. Losses must stay what they were.

    x = torch.where(x.isnan(), x.nanmean(0), x)

Here the example that has the NaN reads the others. So examples with unusual numbers, in all places or in one, stay too, beside
rows like them and beside ordinary ones.
"""

import math
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import cache, partial
from types import MappingProxyType
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..gradients.recorder import Task
from .neighbours import LARGE, Change, Inputs, NotTaken, compare_losses, in_rows, losses_of

HUGE, VAST, LARGEST = 1e18, 1e30, torch.finfo(torch.float32).max
"""Larger than LARGE: with a square that fits into float32, with a sum that does, and nothing that is finite there is larger."""
NO_IDS: Mapping[str, Tensor] = MappingProxyType({})
LISTED = 1 << 24
"""So many ids are listed; of an input with larger ones those are tried that its made-up examples hold."""
UNUSUAL = (
    math.nan,
    math.inf,
    -math.inf,
    *(sign * size for size in (10.0, 1e3, 1e6) for sign in (1, -1)),
)
"""Numbers of an example that a model may replace by what other examples have, one kind to a batch; squares fit into float32."""
COLUMNS = 16
"""An input of so many numbers is a row of a table: each of its numbers is tried alone, and of a larger one only the first."""
MOST_IDS = 64
"""So many values of all inputs that are ids stand beside an example one by one; of more, the ends and some in between."""


class Ids(NamedTuple):
    """What ids of an input there are among made-up examples.

    Attributes:
        every: all that are free, in order: those that are allowed; where nobody says which are, those from 0 to the highest
            made-up one, and negative ones that are made up, such as the -100 of labels that count for nothing.
        bound: those that stand equally often in every example, such as placeholders that the patches of a picture replace. They
            stay where they are, and come nowhere else.
    """

    every: Tensor
    bound: Tensor

    @classmethod
    def of(cls, x_N: Tensor, allowed: Tensor | None = None) -> "Ids":
        rows = x_N.reshape(len(x_N), -1).long()
        values = rows[0].unique()
        is_bound = [len({*(rows == value).sum(1).tolist()}) == 1 for value in values]
        bound = values[torch.tensor(is_bound, device=values.device)]
        free = rows[~torch.isin(rows, bound)]
        if len(free) == 0:
            return cls(rows.unique(), bound)
        if allowed is None and int(free.max()) >= LISTED:  # hashes and the like
            every = free.unique()
        elif allowed is None:
            every = torch.cat(
                [free[free < 0].unique(), torch.arange(int(free.max()) + 1, device=rows.device)]
            )
        else:
            every = allowed.to(rows.device).unique()
        return cls(every[~torch.isin(every, bound)], bound)

    def some(self, most: int) -> Tensor:
        """At most so many of them: a quarter from each end, where special tokens are, and others evenly from between."""
        if len(self.every) <= most:
            return self.every
        end, last = most // 4, len(self.every) - 1
        between = torch.linspace(end, last - end, most - 2 * end).long()
        chosen = torch.cat([torch.arange(end), between, torch.arange(last - end + 1, last + 1)])
        return self.every[chosen.to(self.every.device)]

    def put(self, x_B: Tensor, ids_B: Tensor) -> Tensor:
        """Ids in place of those that are free."""
        stays = torch.isin(x_B.long(), self.bound) | torch.isin(ids_B.long(), self.bound)
        return torch.where(stays, x_B, ids_B.to(x_B.dtype))


def _unchanged(x_B: Tensor, ids: Ids | None = None) -> Tensor:
    return x_B


class Rows(NamedTuple):
    """What rows of a made-up batch hold in place of examples. Each takes and returns (B, ...).

    Attributes:
        numbers: of inputs that are floating-point numbers.
        ids: of the other inputs; told which there are.
        looked_up: of what tables return for ids, which cannot be hostile themselves.
    """

    numbers: Change = _unchanged
    ids: Callable[[Tensor, Ids], Tensor] = _unchanged
    looked_up: Change = _unchanged


def _example(row: int) -> Rows:
    """Every row holds the same example."""
    return Rows(lambda x_B: x_B[row].expand_as(x_B), lambda x_B, ids: x_B[row].expand_as(x_B))


def _of(change: Change) -> Rows:
    """Hostile numbers, of inputs and of what tables return."""
    return Rows(change, looked_up=change)


def _numbers(value: float) -> Rows:
    """Numbers of one sign that are at least `value`, as far as they are finite; zeros, NaN and infinity are exact."""

    def change(x_B: Tensor) -> Tensor:
        if not 0 < abs(value) < math.inf:
            return torch.full_like(x_B, value)
        most = torch.finfo(x_B.dtype).max
        return ((1 + x_B.abs()) * value).clamp(-most, most)

    return _of(change)


def _largest(x_B: Tensor) -> Tensor:
    """The largest finite numbers, in every second row negative: neither hides the other from a maximum or a minimum."""
    most = min(LARGEST, torch.finfo(x_B.dtype).max)
    sign_B = 1 - 2 * (torch.arange(len(x_B), device=x_B.device) // 2 % 2)
    return torch.full_like(x_B, most) * in_rows(sign_B, x_B)


def _spread(x_B: Tensor, ids: Ids) -> Tensor:
    """All ids between the lowest and the highest, as far as there is room."""
    every = ids.every[torch.arange(x_B.numel(), device=x_B.device) % len(ids.every)]
    return ids.put(x_B, every.view_as(x_B))


AMONG_OTHERS, BUT_ONE = (False, True, False), (False, True, True, True, True, True)
"""Whether a row stays: every second, or all but one."""
EXAMPLES, ZEROS, SMALL, LARGE_NUMBERS = Rows(), *map(_numbers, (0.0, 1e-2, LARGE))
TINY, TINIER, TINIEST = map(_numbers, (1e-6, 1e-12, 1e-30))
NEGATIVE = _of(lambda x_B: -x_B.abs())
CONSTANT = _of(lambda x_B: torch.full_like(x_B, 1.5))
WHOLE = _of(lambda x_B: (64 * x_B).abs().round())  # as bytes of pictures
LOWEST = Rows(ids=lambda x_B, ids: ids.put(x_B, torch.full_like(x_B, int(ids.every[0]))))
HIGHEST = Rows(ids=lambda x_B, ids: ids.put(x_B, torch.full_like(x_B, int(ids.every[-1]))))
SPREAD = Rows(ids=_spread)
BATCHES: tuple[tuple[tuple[bool, ...], Rows, tuple[Rows, ...]], ...] = (
    (
        AMONG_OTHERS,
        EXAMPLES,
        (
            EXAMPLES,
            *map(_numbers, (math.nan, math.inf, -math.inf, LARGE, -LARGE, HUGE, VAST, 0.0)),
            _of(_largest),
            TINIEST,
            _example(0),
            LOWEST,
            HIGHEST,
            SPREAD,
        ),
    ),
    (BUT_ONE, EXAMPLES, (EXAMPLES, _numbers(math.nan), LARGE_NUMBERS, HIGHEST)),
    (AMONG_OTHERS, SMALL, (SMALL, *map(_numbers, (1.0, 10.0, 100.0, 1000.0, LARGE, -1.0)))),
    (AMONG_OTHERS, ZEROS, (ZEROS, _numbers(1.0), _numbers(-1.0))),
    *(
        (AMONG_OTHERS, kind, (kind, EXAMPLES))
        for kind in (TINY, TINIER, TINIEST, NEGATIVE, CONSTANT, WHOLE)
    ),
    (BUT_ONE, LARGE_NUMBERS, (LARGE_NUMBERS, EXAMPLES)),
    (AMONG_OTHERS, _example(0), (_example(0), EXAMPLES, SPREAD)),
    (AMONG_OTHERS, _example(1), (_example(1), EXAMPLES, SPREAD)),
    (AMONG_OTHERS, LOWEST, (LOWEST, EXAMPLES)),
    (AMONG_OTHERS, HIGHEST, (HIGHEST, EXAMPLES)),
)
"""Which rows stay, what they hold, and what stands beside them: one kind to a batch."""


def require_unconditional(
    model: nn.Module,
    task: Task,
    inputs: Inputs,
    tolerance: float,
    allowed_ids: Mapping[str, Tensor] = NO_IDS,
) -> None:
    """Requires that examples keep their losses whatever stands beside them; a kind that the model refuses is left out.

    Args:
        allowed_ids: the values of each input that is ids, where it is known which there may be.

    Raises:
        PrivacyConfigError: the loss of an example changes with the rows beside it.
    """
    ids = {
        name: Ids.of(x, allowed_ids.get(name))
        for name, x in inputs.items()
        if not (x.is_floating_point() or x.is_complex())
    }

    def held(rows: Rows, name: str, x_B: Tensor) -> Tensor:
        return rows.ids(x_B, ids[name]) if name in ids else rows.numbers(x_B)

    for stays, here, neighbours in BATCHES:
        stays_B, examples = torch.tensor(stays), _repeated(inputs, len(stays))
        losses: list[Tensor] = []
        for beside in neighbours:
            batch = {
                n: _beside(stays_B, held(here, n, x), held(beside, n, x))
                for n, x in examples.items()
            }
            looked_up = partial(_looked_up, stays_B, here, beside)
            with suppress(NotTaken), returning(tables_of(model), looked_up, batch):
                loss_B = losses_of(task, batch)
                losses.append(loss_B[stays_B.to(loss_B.device)])
                compare_losses(losses[0], losses[-1], tolerance)
    for name, x in inputs.items():
        if x.is_floating_point():
            _require_own_numbers(task, inputs, name, tolerance)
    left = MOST_IDS
    by_number = sorted(
        ids.items(), key=lambda pair: len(pair[1].every)
    )  # a mask needs two, and leaves the others to tokens
    for number, (name, allowed) in enumerate(by_number):
        values = allowed.some(left // (len(ids) - number)).tolist()
        left -= len(values)
        _require_each_id(task, inputs, name, allowed, values, tolerance)


def _require_own_numbers(task: Task, inputs: Inputs, name: str, tolerance: float) -> None:
    """Requires that an example with unusual numbers in one input keeps its loss beside its like and beside ordinary examples.

    The ordinary rows hold the highest numbers of the made-up examples but for one row of the lowest, and are more than the rows
    that stay, which hold numbers in between: so the mean, the extremes and the median of a column all change.
    """
    lowest, highest = inputs[name].amin(0), inputs[name].amax(0)
    middle = (lowest + highest) / 2
    size = middle.numel()
    one_each = torch.eye(
        size if size <= COLUMNS else 1, size, dtype=torch.bool, device=middle.device
    )
    is_unusual_S = torch.cat(
        [torch.ones_like(middle, dtype=torch.bool)[None], one_each.view(-1, *middle.shape)]
    )
    count = len(is_unusual_S)
    ordinary = torch.cat([highest.expand(count + 1, *middle.shape), lowest[None]])
    others = {n: x[[0] * (count + len(ordinary))] for n, x in inputs.items() if n != name}
    for value in UNUSUAL:
        unusual = _numbers(value).numbers(middle)
        here = torch.where(is_unusual_S, unusual, middle)
        losses: list[Tensor] = []
        for beside in (unusual.expand_as(ordinary), ordinary):
            with suppress(NotTaken):
                losses.append(losses_of(task, {name: torch.cat([here, beside]), **others})[:count])
                compare_losses(
                    losses[0][1:], losses[-1][1:], tolerance
                )  # the first may be much larger
                compare_losses(losses[0], losses[-1], tolerance)


def _require_each_id(
    task: Task, inputs: Inputs, name: str, ids: Ids, values: list[int], tolerance: float
) -> None:
    """Requires that an example keeps its loss beside a row of any one id, and such a row its own beside an example."""
    rows_N, others = inputs[name], {n: x for n, x in inputs.items() if n != name}

    def of_one_id(value: int, row: int) -> Tensor:
        return ids.put(rows_N[row], torch.full_like(rows_N[row], value))

    def losses(row: int, *pair: Tensor) -> Tensor:
        """(2,): of two rows that are made-up example `row` but for these ids."""
        return losses_of(
            task, {name: torch.stack(pair), **{n: x[[row, row]] for n, x in others.items()}}
        )

    @cache
    def among_its_like(row: int, value: int | None) -> Tensor:
        """(2,): of two rows that are this example, or hold one id."""
        ids_of_row = rows_N[row] if value is None else of_one_id(value, row)
        return losses(row, ids_of_row, ids_of_row)

    for value in values:
        lacking = [row for row, x in enumerate(rows_N) if not bool((x == value).any())]
        row = lacking[0] if lacking else 0
        other = None if lacking else values[-1 if value == values[0] else 0]
        stays = rows_N[row] if other is None else of_one_id(other, row)
        with suppress(NotTaken):
            beside_B = losses(row, stays, of_one_id(value, row))
            compare_losses(among_its_like(row, other)[:1], beside_B[:1], tolerance)
            compare_losses(among_its_like(row, value)[1:], beside_B[1:], tolerance)


def require_padding(task: Task, inputs: Inputs, padding: Inputs, tolerance: float) -> None:
    """Requires that a model takes rows without an example, a whole batch of them too, and that examples keep their losses.

    Args:
        padding: what stands in such a row, (1, ...) in each input.

    Raises:
        PrivacyConfigError: it does not, as models that look for the placeholders of a picture in every row.
    """
    way = "declare ids that every row needs, such as placeholders of a picture, by integers(..., fixed={id: count})"
    stays_B, examples = torch.tensor(AMONG_OTHERS), _repeated(inputs, len(AMONG_OTHERS))
    empty = {
        name: padding[name].to(x).expand(len(x), *padding[name].shape[1:])
        for name, x in examples.items()
    }
    try:
        losses_of(task, empty)
        if any(empty[name].shape != x.shape for name, x in examples.items()):
            return  # made-up examples of another length
        found_B = losses_of(
            task, {name: _beside(stays_B, x, empty[name]) for name, x in examples.items()}
        )
    except NotTaken as error:
        said = f"{type(error.__cause__).__name__}: {' '.join(str(error.__cause__).split())[:160]}"
        raise PrivacyConfigError(
            f"rows without an item hold zeros, and the model refuses them ({said}): {way}"
        ) from error
    stays_B = stays_B.to(found_B.device)
    compare_losses(
        losses_of(task, examples)[stays_B],
        found_B[stays_B],
        tolerance,
        f"beside rows without an item ({way}), ",
    )


def _repeated(inputs: Inputs, size: int) -> Inputs:
    """So many rows of made-up examples."""
    row_B = torch.arange(size) % len(next(iter(inputs.values())))
    return {name: x[row_B.to(x.device)] for name, x in inputs.items()}


def _beside(stays_B: Tensor, here_B: Tensor, beside_B: Tensor) -> Tensor:
    return torch.where(in_rows(stays_B, here_B), here_B, beside_B)


def _looked_up(stays_B: Tensor, here: Rows, beside: Rows, y_B: Tensor) -> Tensor:
    return _beside(stays_B, here.looked_up(y_B), beside.looked_up(y_B))


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
            bool((x.reshape(len(x), -1) == ids[:, None]).all(0).any())
            for x in given
            if x.shape[:1] == ids.shape
        )

    def hook(table: nn.Module, args: Any, output: Any) -> Any:
        return (
            change(output) if args and isinstance(output, Tensor) and is_of_batch(args[0]) else None
        )

    handles = [table.register_forward_hook(hook) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
