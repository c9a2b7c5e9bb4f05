"""Refuses a forward that puts a condition on its whole batch, such as on its largest number.

Ordinary examples never meet such a condition (`if x.abs().max() > 100`), and one that meets it
changes the losses of all others. So examples are tried among rows of one kind after the other,
and examples with unusual numbers among ordinary rows. docs/guarantee.md lists all kinds.
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

HUGE = 1e18
"""A number whose square fits into float32."""
VAST = 1e30
"""A number whose sum over a batch fits into float32."""
LARGEST = torch.finfo(torch.float32).max
"""The largest finite number of float32."""
NO_IDS: Mapping[str, Tensor] = MappingProxyType({})
LISTED = 1 << 24
"""Largest number of ids that are listed; of a larger range only the made-up ids are tried."""
UNUSUAL = (math.nan, math.inf, -math.inf, 10.0, -10.0, 1e3, -1e3, 1e6, -1e6)
"""Numbers of an example that a model may replace by numbers of other examples.

A batch holds one kind. Their squares fit into float32.
"""
COLUMNS = 16
"""Numbers of an input that are each tried alone: a row of a table. Larger inputs try the first."""
MOST_IDS = 64
"""Ids of all inputs that are tried one by one beside an example."""


class Ids(NamedTuple):
    """The ids of an input among made-up examples.

    Attributes:
        every: all free ids in order: the allowed ones; or, if those are not declared, the ids from
            0 to the highest made-up one, and negative ones that are made up, such as the -100 of
            labels that count for nothing.
        bound: ids that occur equally often in every example, such as placeholders that the patches
            of a picture replace. They keep their places, and no other place gets them.
    """

    every: Tensor
    bound: Tensor

    @classmethod
    def of(cls, x_N: Tensor, allowed: Tensor | None = None) -> "Ids":
        """Returns the ids of an input (N, ...), of which `allowed` may be free."""
        rows = x_N.reshape(len(x_N), -1).long()
        made_up = rows[0].unique()
        is_bound = []
        for id_ in made_up:
            counts_N = (rows == id_).sum(1).tolist()
            is_bound.append(len(set(counts_N)) == 1)
        bound = made_up[torch.tensor(is_bound, device=made_up.device)]
        free = rows[~torch.isin(rows, bound)]
        if len(free) == 0:
            return cls(rows.unique(), bound)
        if allowed is not None:
            every = allowed.to(rows.device).unique()
        elif int(free.max()) >= LISTED:  # hashes and the like
            every = free.unique()
        else:
            negative = free[free < 0].unique()
            up_to_highest = torch.arange(int(free.max()) + 1, device=rows.device)
            every = torch.cat([negative, up_to_highest])
        return cls(every[~torch.isin(every, bound)], bound)

    def some(self, count: int) -> Tensor:
        """Returns at most `count` ids: a quarter from each end, others evenly from between.

        Special tokens are at the ends.
        """
        if len(self.every) <= count:
            return self.every
        quarter = count // 4
        last = len(self.every) - 1
        between = torch.linspace(quarter, last - quarter, count - 2 * quarter).long()
        highest = torch.arange(last - quarter + 1, last + 1)
        places = torch.cat([torch.arange(quarter), between, highest])
        return self.every[places.to(self.every.device)]

    def put(self, x_B: Tensor, ids_B: Tensor) -> Tensor:
        """Returns an input with other ids in the places of its free ids."""
        is_bound = torch.isin(x_B.long(), self.bound) | torch.isin(ids_B.long(), self.bound)
        return torch.where(is_bound, x_B, ids_B.to(x_B.dtype))


def _unchanged(x_B: Tensor, ids: Ids | None = None) -> Tensor:
    return x_B


class Rows(NamedTuple):
    """The changes that turn examples of a made-up batch into rows of one kind.

    Each takes and returns (B, ...).

    Attributes:
        numbers: changes inputs that are floating-point numbers.
        ids: changes the other inputs, given the ids that there are.
        looked_up: changes the outputs of tables, since ids cannot be hostile themselves.
    """

    numbers: Change = _unchanged
    ids: Callable[[Tensor, Ids], Tensor] = _unchanged
    looked_up: Change = _unchanged


def _example(row: int) -> Rows:
    """Returns the kind in which every row holds the same example."""
    return Rows(lambda x_B: x_B[row].expand_as(x_B), lambda x_B, ids: x_B[row].expand_as(x_B))


def _of(change: Change) -> Rows:
    """Returns a kind of hostile numbers, in inputs and in outputs of tables."""
    return Rows(change, looked_up=change)


def _numbers(number: float) -> Rows:
    """Returns a kind of numbers of one sign that are at least `number`, where finite.

    Zeros, NaN and infinity are exact.
    """

    def change(x_B: Tensor) -> Tensor:
        if not 0 < abs(number) < math.inf:
            return torch.full_like(x_B, number)
        largest = torch.finfo(x_B.dtype).max
        return ((1 + x_B.abs()) * number).clamp(-largest, largest)

    return _of(change)


def _largest(x_B: Tensor) -> Tensor:
    """Returns the largest finite numbers, with pairs of rows of alternating sign.

    Neither sign hides the other from a maximum or a minimum.
    """
    largest = min(LARGEST, torch.finfo(x_B.dtype).max)
    row_B = torch.arange(len(x_B), device=x_B.device)
    sign_B = 1 - 2 * (row_B // 2 % 2)
    return torch.full_like(x_B, largest) * in_rows(sign_B, x_B)


def _whole(x_B: Tensor) -> Tensor:
    """Returns whole numbers, such as bytes of pictures."""
    return (64 * x_B).abs().round()


def _one_id(place: int, x_B: Tensor, ids: Ids) -> Tensor:
    """Returns an input that holds one id, given by its place among all."""
    return ids.put(x_B, torch.full_like(x_B, int(ids.every[place])))


def _spread(x_B: Tensor, ids: Ids) -> Tensor:
    """Returns an input that holds all ids from the lowest on, as far as there is room."""
    place = torch.arange(x_B.numel(), device=x_B.device) % len(ids.every)
    return ids.put(x_B, ids.every[place].view_as(x_B))


AMONG_OTHERS = (False, True, False)
"""Every second row stays."""
BUT_ONE = (False, True, True, True, True, True)
"""All rows but one stay."""
EXAMPLES = Rows()
ZEROS = _numbers(0.0)
SMALL = _numbers(1e-2)
LARGE_NUMBERS = _numbers(LARGE)
TINY = _numbers(1e-6)
TINIER = _numbers(1e-12)
TINIEST = _numbers(1e-30)
NEGATIVE = _of(lambda x_B: -x_B.abs())
CONSTANT = _of(lambda x_B: torch.full_like(x_B, 1.5))
WHOLE = _of(_whole)
LOWEST = Rows(ids=partial(_one_id, 0))
HIGHEST = Rows(ids=partial(_one_id, -1))
SPREAD = Rows(ids=_spread)
FIRST_EXAMPLE = _example(0)
SECOND_EXAMPLE = _example(1)
HOSTILE_NUMBERS = (math.nan, math.inf, -math.inf, LARGE, -LARGE, HUGE, VAST, 0.0)
HOSTILE = (*map(_numbers, HOSTILE_NUMBERS), _of(_largest), TINIEST)
GROWING = tuple(map(_numbers, (1.0, 10.0, 100.0, 1000.0, LARGE, -1.0)))
OF_ONE_KIND = (TINY, TINIER, TINIEST, NEGATIVE, CONSTANT, WHOLE)
# NaN hides large numbers from the largest, large ones hide small ones, and a property that all
# rows share shows only in a batch without an exception. So a batch has one kind of neighbours, and
# some kinds fill whole batches, with one ordinary example as the exception.
BATCHES: tuple[tuple[tuple[bool, ...], Rows, tuple[Rows, ...]], ...] = (
    (AMONG_OTHERS, EXAMPLES, (EXAMPLES, *HOSTILE, FIRST_EXAMPLE, LOWEST, HIGHEST, SPREAD)),
    (BUT_ONE, EXAMPLES, (EXAMPLES, _numbers(math.nan), LARGE_NUMBERS, HIGHEST)),
    (AMONG_OTHERS, SMALL, (SMALL, *GROWING)),
    (AMONG_OTHERS, ZEROS, (ZEROS, _numbers(1.0), _numbers(-1.0))),
    *((AMONG_OTHERS, kind, (kind, EXAMPLES)) for kind in OF_ONE_KIND),
    (BUT_ONE, LARGE_NUMBERS, (LARGE_NUMBERS, EXAMPLES)),
    (AMONG_OTHERS, FIRST_EXAMPLE, (FIRST_EXAMPLE, EXAMPLES, SPREAD)),
    (AMONG_OTHERS, SECOND_EXAMPLE, (SECOND_EXAMPLE, EXAMPLES, SPREAD)),
    (AMONG_OTHERS, LOWEST, (LOWEST, EXAMPLES)),
    (AMONG_OTHERS, HIGHEST, (HIGHEST, EXAMPLES)),
)
"""The rows that stay, their kind, and the kinds of their neighbours: one kind to a batch."""


def require_unconditional(
    model: nn.Module,
    task: Task,
    inputs: Inputs,
    tolerance: float,
    allowed_ids: Mapping[str, Tensor] = NO_IDS,
) -> None:
    """Refuses a model in which the loss of an example changes with its neighbours.

    Kinds that the model refuses are left out.

    Args:
        allowed_ids: the ids of each input that are allowed, where they are declared.

    Raises:
        PrivacyConfigError: the loss of an example changes.
    """
    ids: dict[str, Ids] = {}
    for name, x in inputs.items():
        if not x.is_floating_point() and not x.is_complex():
            ids[name] = Ids.of(x, allowed_ids.get(name))

    def changed(rows: Rows, name: str, x_B: Tensor) -> Tensor:
        return rows.ids(x_B, ids[name]) if name in ids else rows.numbers(x_B)

    for stays, kind, kinds_of_neighbours in BATCHES:
        stays_B = torch.tensor(stays)
        examples = _repeated(inputs, len(stays))
        losses: list[Tensor] = []
        for kind_of_neighbours in kinds_of_neighbours:
            batch = {}
            for name, x in examples.items():
                neighbours = changed(kind_of_neighbours, name, x)
                batch[name] = _mixed(stays_B, changed(kind, name, x), neighbours)
            looked_up = partial(_looked_up, stays_B, kind, kind_of_neighbours)
            with suppress(NotTaken), returning(tables_of(model), looked_up, batch):
                loss_B = losses_of(task, batch)
                losses.append(loss_B[stays_B.to(loss_B.device)])
                compare_losses(losses[0], losses[-1], tolerance)
    for name, x in inputs.items():
        if x.is_floating_point():
            _require_own_numbers(task, inputs, name, tolerance)
    num_ids_left = MOST_IDS
    # Inputs with few ids come first: a mask needs two, and leaves the others to tokens.
    names = sorted(ids, key=lambda name: len(ids[name].every))
    for number, name in enumerate(names):
        share = num_ids_left // (len(names) - number)
        tried_ids = ids[name].some(share).tolist()
        num_ids_left -= len(tried_ids)
        _require_each_id(task, inputs, name, ids[name], tried_ids, tolerance)


def _require_own_numbers(task: Task, inputs: Inputs, name: str, tolerance: float) -> None:
    """Requires that an example with unusual numbers in one input keeps its loss.

    Its neighbours are rows like it, and then ordinary ones. These hold the highest numbers of the
    made-up examples but for one row of the lowest. They are more than the rows that stay, which
    hold numbers in between: so the mean, the extremes and the median of a column all change.
    """
    lowest = inputs[name].amin(0)
    highest = inputs[name].amax(0)
    middle = (lowest + highest) / 2
    size = middle.numel()
    num_columns = size if size <= COLUMNS else 1
    # One row is unusual in all columns, and each other row in one.
    is_column_S = torch.eye(num_columns, size, dtype=torch.bool, device=middle.device)
    all_columns = torch.ones_like(middle, dtype=torch.bool)
    is_unusual_S = torch.cat([all_columns[None], is_column_S.view(-1, *middle.shape)])
    count = len(is_unusual_S)
    ordinary = torch.cat([highest.expand(count + 1, *middle.shape), lowest[None]])
    row_B = [0] * (count + len(ordinary))
    fixed_inputs = {n: x[row_B] for n, x in inputs.items() if n != name}
    for number in UNUSUAL:
        unusual = _numbers(number).numbers(middle)
        examples = torch.where(is_unusual_S, unusual, middle)
        losses: list[Tensor] = []
        for neighbours in (unusual.expand_as(ordinary), ordinary):
            with suppress(NotTaken):
                x_B = torch.cat([examples, neighbours])
                loss_B = losses_of(task, {name: x_B, **fixed_inputs})
                losses.append(loss_B[:count])
                # The loss of the first example may be much larger, and hide a difference.
                expected = losses[0]
                compare_losses(expected[1:], losses[-1][1:], tolerance)
                compare_losses(expected, losses[-1], tolerance)


def _require_each_id(
    task: Task, inputs: Inputs, name: str, ids: Ids, tried_ids: list[int], tolerance: float
) -> None:
    """Requires that an example keeps its loss beside a row of any one id, and such a row its own.

    Args:
        name: the input that holds the ids.
    """
    rows_N = inputs[name]

    def of_one_id(id_: int, row: int) -> Tensor:
        return ids.put(rows_N[row], torch.full_like(rows_N[row], id_))

    def losses(row: int, first: Tensor, second: Tensor) -> Tensor:
        """Returns losses (2,) of two rows of these ids that otherwise are made-up example `row`."""
        equal_inputs = {n: x[[row, row]] for n, x in inputs.items() if n != name}
        return losses_of(task, {name: torch.stack([first, second]), **equal_inputs})

    @cache
    def losses_of_equals(row: int, id_: int | None) -> Tensor:
        """Returns losses (2,) of two rows that are this example, or hold one id."""
        ids_of_row = rows_N[row] if id_ is None else of_one_id(id_, row)
        return losses(row, ids_of_row, ids_of_row)

    for id_ in tried_ids:
        lacking = [row for row, x in enumerate(rows_N) if not bool((x == id_).any())]
        row = lacking[0] if lacking else 0
        # Where all examples hold the id, a row of another id takes the place of the example.
        second_id = tried_ids[-1 if id_ == tried_ids[0] else 0]
        id_of_example = None if lacking else second_id
        example = rows_N[row] if lacking else of_one_id(second_id, row)
        with suppress(NotTaken):
            loss_B = losses(row, example, of_one_id(id_, row))
            compare_losses(losses_of_equals(row, id_of_example)[:1], loss_B[:1], tolerance)
            compare_losses(losses_of_equals(row, id_)[1:], loss_B[1:], tolerance)


def require_padding(task: Task, inputs: Inputs, padding: Inputs, tolerance: float) -> None:
    """Refuses a model that takes no rows without an example, or changes losses beside such rows.

    A whole batch of such rows is tried, too.

    Args:
        padding: the contents of such a row, (1, ...) in each input.

    Raises:
        PrivacyConfigError: the model refuses such rows, as models that look for the placeholders
            of a picture in every row, or losses change.
    """
    way = (
        "declare ids that every row needs, such as placeholders of a picture, by "
        "integers(..., fixed={id: count})"
    )
    stays_B = torch.tensor(AMONG_OTHERS)
    examples = _repeated(inputs, len(AMONG_OTHERS))
    empty = {}
    for name, x in examples.items():
        empty_row = padding[name].to(x)
        empty[name] = empty_row.expand(len(x), *empty_row.shape[1:])
    try:
        losses_of(task, empty)
        if any(empty[name].shape != x.shape for name, x in examples.items()):
            return  # made-up examples of another length
        batch = {name: _mixed(stays_B, x, empty[name]) for name, x in examples.items()}
        loss_B = losses_of(task, batch)
    except NotTaken as error:
        cause = error.__cause__
        message = " ".join(str(cause).split())[:160]
        raise PrivacyConfigError(
            "rows without an item hold zeros, and the model refuses them "
            f"({type(cause).__name__}: {message}): {way}"
        ) from error
    stays_B = stays_B.to(loss_B.device)
    expected_B = losses_of(task, examples)[stays_B]
    prefix = f"beside rows without an item ({way}), "
    compare_losses(expected_B, loss_B[stays_B], tolerance, prefix)


def _repeated(inputs: Inputs, size: int) -> Inputs:
    """Returns `size` rows of made-up examples."""
    num_examples = len(next(iter(inputs.values())))
    row_B = torch.arange(size) % num_examples
    return {name: x[row_B.to(x.device)] for name, x in inputs.items()}


def _mixed(stays_B: Tensor, examples_B: Tensor, neighbours_B: Tensor) -> Tensor:
    return torch.where(in_rows(stays_B, examples_B), examples_B, neighbours_B)


def _looked_up(stays_B: Tensor, kind: Rows, kind_of_neighbours: Rows, y_B: Tensor) -> Tensor:
    return _mixed(stays_B, kind.looked_up(y_B), kind_of_neighbours.looked_up(y_B))


def tables_of(model: nn.Module) -> list[nn.Embedding]:
    """Returns the tables of a model that ids look up."""
    return [module for module in model.modules() if isinstance(module, nn.Embedding)]


@contextmanager
def returning(tables: list[nn.Embedding], change: Change, batch: Inputs) -> Iterator[None]:
    """Changes the outputs of tables for the ids of a batch, which cannot be hostile themselves.

    Without it, a scale that all examples share would be seen in float64 alone: the largest number
    of a batch is that of an example that stays, whatever its made-up neighbours are. Positions are
    looked up in tables too, and belong to no example: ids count as those of the batch if they have
    the shape of an input, or are one of its columns.
    """
    integers = [x for x in batch.values() if not x.is_floating_point()]

    def is_of_batch(ids: Tensor) -> bool:
        if ids.dim() > 1:
            return any(ids.shape == x.shape for x in integers)
        for x in integers:
            if x.shape[:1] != ids.shape:
                continue
            is_equal = x.reshape(len(x), -1) == ids[:, None]
            if bool(is_equal.all(0).any()):
                return True
        return False

    def hook(table: nn.Module, args: Any, output: Any) -> Any:
        is_changed = args and isinstance(output, Tensor) and is_of_batch(args[0])
        return change(output) if is_changed else None

    handles = [table.register_forward_hook(hook) for table in tables]
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()
