"""Requires that made-up examples keep their losses among neighbours of all kinds.

Kernels give equal bits for equal shapes, so a loss that changes with its neighbours has read
another row.
"""

import math
import random
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor, nn

from ..errors import PrivacyConfigError
from ..gradients.recorder import Task
from ..ranks import collectives
from ..ranks.engine import Engine, to_device
from ..sums.grid import EXAMPLES_PER_PART
from ..sums.totals import blocks

Inputs = dict[str, Tensor]
Change = Callable[[Tensor], Tensor]
"""Takes a tensor (B, ...), and returns one with other rows."""
SMALL = 1e-3
"""Weights with a smaller root mean square hide the gradients of the layers before them."""
LARGE = 1e4
"""The factor that makes floating-point inputs large."""
IN_ANY_ORDER = 1e-2
"""A tolerance, relative, for accelerators: some of their kernels add in no fixed order, also in
bf16."""


def require_apart(task: Task, inputs: Inputs, size: int) -> None:
    """Refuses a task whose loss for an example depends on the other rows of the micro-batch.

    Collective if the task's forward is, as that of a sharded model.

    Args:
        task: `task(**inputs)` returns loss_B.
        inputs: two or more made-up examples in the shapes of the micro-batch; never private data.
        size: rows of the micro-batch.

    Raises:
        PrivacyConfigError: the loss of an example changes with its neighbours or with chance, or
            the task does not return one loss for each example, or the model raises an error on
            the unchanged made-up examples.
    """
    if size < 2:
        return
    generator = torch.Generator().manual_seed(size)
    stays_B = torch.rand(size, generator=generator) < 1 / 3
    stays_B[0] = False
    stays_B[size // 2] = True
    losses: list[Tensor] = []

    def run(micro_batch: Inputs, _has_nan: bool) -> None:
        losses.append(losses_of(task, micro_batch))

    row_B = torch.arange(size) % len(next(iter(inputs.values())))
    among_neighbours(inputs, row_B, stays_B, run)
    losses = [loss_B[stays_B.to(loss_B.device)].double() for loss_B in losses]
    first = losses[0]
    tolerance = 0.0 if first.device.type == "cpu" else IN_ANY_ORDER
    prefix = f"in micro-batches of {size} examples, in the precision of the run, "
    # All forwards come before the first comparison, since no rank may stop in between.
    for loss_B in losses[1:]:
        compare_losses(first, loss_B, tolerance, prefix)


def require_neighbours_apart(
    engine: Engine,
    task: Task,
    synthetic_inputs: Callable[[int], dict[str, Tensor]],
    micro_batch_size: int,
) -> None:
    """Calls `require_apart` at training's own sizes, device and dtype. Collective.

    Clipping goes through a large micro-batch in parts, so the size of its last part is tried, too.

    Args:
        task: the callable that training calls.
        synthetic_inputs: makes up as many examples as it is asked for, the same on every rank.

    Raises:
        PrivacyConfigError: on all ranks, if one of them finds a loss that depends on others.
    """
    inputs = to_device(synthetic_inputs(2), engine)

    def require() -> None:
        for rows in blocks(micro_batch_size, EXAMPLES_PER_PART):
            if rows.start == 0 or rows.stop == micro_batch_size:
                require_apart(task, inputs, rows.stop - rows.start)

    collectives.refuse_together(require)


def losses_of(task: Task, micro_batch: Inputs) -> Tensor:
    """Returns the losses of made-up examples, (B,), without gradients.

    Raises:
        PrivacyConfigError: the task does not return one loss for each example.
        NotTaken: the model raises an error on the examples.
    """
    size = len(next(iter(micro_batch.values())))
    with torch.no_grad(), must_take(f"{size} examples together"):
        loss_B = task(**micro_batch)
    if loss_B.shape != (size,):
        raise PrivacyConfigError(
            f"the task returned a tensor of shape {tuple(loss_B.shape)} for {size} examples, not "
            "one loss for each"
        )
    return loss_B


def compare_losses(first_B: Tensor, second_B: Tensor, tolerance: float, prefix: str = "") -> None:
    """Refuses losses that differ for the same examples.

    Raises:
        PrivacyConfigError: they differ by more than `tolerance` of the largest.
    """
    largest = float(first_B.nan_to_num(0, 0, 0).abs().max())
    allowed = tolerance * largest
    if not torch.allclose(first_B, second_B, rtol=tolerance, atol=allowed, equal_nan=True):
        raise PrivacyConfigError(
            f"{prefix}the loss of an example changes with the other examples of its micro-batch: "
            "every example's loss must depend on that example alone, at every size (no mean over "
            "the batch, no contrast between examples, no state that the forward keeps, no limit or "
            "group that examples share, no length that is fitted to the longest, no branch on the "
            "size or dtype that leads to one)"
        )


def among_neighbours(
    inputs: Inputs, row_B: Tensor, stays_B: Tensor, run: Callable[[Inputs, bool], object]
) -> None:
    """Calls `run(micro_batch, has_nan)` three times: some examples stay, and other rows change.

    The other rows hold NaN and infinity first; then large finite numbers, since a model that
    divides by the largest number of a batch would meet NaN before; then other whole examples. If
    the model refuses one of these micro-batches, two more of whole examples take its place. The
    caller compares what its `run` has computed for the examples that stay.

    Args:
        row_B: the made-up example of each row.
        stays_B: False for the rows that change.

    Raises:
        NotTaken: `run` raised it for all micro-batches but one, so there is nothing to compare.
    """
    # In hostile micro-batches: rows 0 to 3 of seven are multiplied by a factor each, row 4 is cut
    # to half, and rows 5 and 6 repeat one example.
    place_B = torch.arange(len(stays_B)) % 7

    def hostile(*factors: float) -> Change:
        """Returns a change for hostile rows with these four factors."""

        def change(x_B: Tensor) -> Tensor:
            # Repeated examples meet limits that count examples; a short one meets lengths that are
            # fitted to the longest. NaN shows in a neighbour however weakly examples are mixed.
            y_B = torch.where(in_rows(place_B > 4, x_B), x_B[:1], x_B.roll(1, 0))
            y_B = torch.where(in_rows(place_B == 4, x_B), shortened(x_B), y_B)
            if x_B.is_floating_point():
                for place, factor in enumerate(factors):
                    y_B = torch.where(in_rows(place_B == place, x_B), y_B * factor, y_B)
            return y_B

        return change

    to_infinity = hostile(torch.nan, torch.inf, -torch.inf, torch.nan)
    to_large = hostile(LARGE, -LARGE, LARGE, -LARGE)
    # The last two repeat one example, cut to half and whole; they take the place of refused ones.
    changes: list[Change] = [
        to_infinity,
        to_large,
        lambda x_B: x_B.roll(1, 0),
        _short_example,
        lambda x_B: x_B[:1].expand_as(x_B),
    ]
    rows = {name: x[row_B.to(x.device)] for name, x in inputs.items()}
    num_taken = 0
    for number, change in enumerate(changes):
        is_replacement = number > 2
        if is_replacement and num_taken > 1:
            return
        try:
            micro_batch = {}
            for name, x in rows.items():
                micro_batch[name] = torch.where(in_rows(stays_B, x), x, change(x))
            run(micro_batch, number == 0)
            num_taken += 1
        except NotTaken:
            num_left = len(changes) - number - 1
            if num_taken + num_left < 2:
                raise


def _short_example(x_B: Tensor) -> Tensor:
    """Returns the first example, cut to half, in all rows."""
    return shortened(x_B[:1]).expand_as(x_B)


def in_rows(condition_B: Tensor, like: Tensor) -> Tensor:
    """Returns a condition on rows with the device and the number of dimensions of a tensor."""
    shape = [-1, *[1] * (like.dim() - 1)]
    return condition_B.to(like.device).view(shape)


def shortened(x: Tensor) -> Tensor:
    """Returns a tensor whose second half of dimension 1 (tokens, as a rule) is zero."""
    if x.dim() < 2:
        return x
    length = x.shape[1]
    half = -(-length // 2)
    is_kept = torch.arange(length, device=x.device) < half
    shape = [-1, *[1] * (x.dim() - 2)]
    return torch.where(is_kept.view(shape), x, x.new_zeros(()))


class NotTaken(PrivacyConfigError):
    """The model raised an error on made-up inputs."""


def generator_states() -> list[object]:
    """Returns the states of the global generators of random numbers."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    _, numbers, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # foreign models use it
    states = [x.numpy().tobytes() for x in (torch.get_rng_state(), *devices)]
    return [random.getstate(), np.asarray(numbers).tobytes(), rest, *states]


@contextmanager
def must_take(examples: str) -> Iterator[None]:
    """Reports an error of the model on made-up inputs in one line, and refuses random numbers.

    A mask or coin from a global generator would depend on an example's place in the batch.
    Refusals of clipping itself pass.

    Raises:
        NotTaken: the model raised another error.
        PrivacyConfigError: the block has drawn from a global generator.
    """

    states_before = generator_states()
    try:
        yield
    except (PrivacyConfigError, MemoryError, torch.OutOfMemoryError):
        raise
    except Exception as error:  # a model may raise anything
        message = " ".join(str(error).split())[:200] or "without a word"
        raise NotTaken(
            f"the model raises {type(error).__name__} on made-up examples of the self-check "
            f"({examples}): {message}; give it made-up examples that it takes: made_up= of "
            "PrivateLoop, or inputs of check_against_autograd"
        ) from error
    if generator_states() != states_before:
        raise PrivacyConfigError(
            "the forward draws random numbers, so an example's gradient depends on its place in "
            "the micro-batch: switch dropout and random masks off (model.eval(), p = 0), or make "
            "them of an input that each example brings along"
        )


@contextmanager
def nothing_is_small(model: nn.Module) -> Iterator[None]:
    """Replaces weights near zero by random ones inside its block.

    A weight that starts at zero hides the gradients of the layers before it.
    """
    floating = [_memory(p) for p in model.parameters() if p.is_floating_point()]
    small = {}
    for p in floating:
        numbers = p.detach()
        if float(numbers.float().norm()) < SMALL * math.sqrt(p.numel()):
            small[p] = numbers.clone()
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in small:
                std = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.02
                p.copy_(std * torch.randn(p.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for p, values in small.items():
                p.copy_(values)


def _memory(parameter: nn.Parameter) -> Tensor:
    """Returns a view of each number of a parameter once.

    An expanded parameter repeats numbers, and torch refuses to write to it.
    """
    is_repeated = [stride == 0 for stride in parameter.stride()]
    places = tuple(slice(0, 1) if repeats else slice(None) for repeats in is_repeated)
    return parameter.detach()[places]
