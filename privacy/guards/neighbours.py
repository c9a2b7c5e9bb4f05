"""Whether the examples of a micro-batch stay apart: losses of made-up examples among neighbours of all kinds.

Kernels give equal bits for equal shapes, so a loss that changes with its neighbours has read another row.
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
"""Makes other rows of a tensor (B, ...)."""
SMALL = 1e-3
"""Weights with a root mean square below it hide the gradients of the layers before them."""
LARGE = 1e4
"""An example's floating inputs times this are large."""
IN_ANY_ORDER = 1e-2
"""Relative difference on accelerators, some of whose kernels add up in no fixed order, in bf16 too."""


def require_apart(task: Task, inputs: Inputs, size: int) -> None:
    """Tries made-up neighbours in one micro-batch; collective where `task` is.

    Args:
        task: `task(**inputs)` returns loss_B.
        inputs: two or more made-up examples, shaped as those of the micro-batch; never private data.
        size: rows of the micro-batch.

    Raises:
        PrivacyConfigError: the loss of an example changes with its neighbours, or with chance, or there is not one for each;
            or the model raises an error on the made-up examples as they were given.
    """
    if size < 2:
        return
    stays_B = torch.rand(size, generator=torch.Generator().manual_seed(size)) < 1 / 3
    stays_B[0], stays_B[size // 2] = False, True
    losses: list[Tensor] = []
    row_B = torch.arange(size) % len(next(iter(inputs.values())))
    among_neighbours(
        inputs,
        row_B,
        stays_B,
        lambda micro_batch, has_nan: losses.append(losses_of(task, micro_batch)),
    )
    first, *others = (loss_B[stays_B.to(loss_B.device)].double() for loss_B in losses)
    where = f"in micro-batches of {size} examples, in the precision of the run, "
    for other in others:  # when all are there, since no rank may stop in between
        compare_losses(first, other, 0.0 if first.device.type == "cpu" else IN_ANY_ORDER, where)


def require_neighbours_apart(
    engine: Engine,
    task: Task,
    synthetic_inputs: Callable[[int], dict[str, Tensor]],
    micro_batch_size: int,
) -> None:
    """Tries made-up micro-batches as training has them: their numbers of rows, on its device and in its dtype. Collective.

    A large micro-batch is gone through in parts, so its last part is tried, too.

    Args:
        task: what training calls.
        synthetic_inputs: makes up the number of examples that it is called with, the same on every rank.

    Raises:
        PrivacyConfigError: on all ranks, if one of them finds that a loss depends on other examples.
    """
    inputs = to_device(synthetic_inputs(2), engine)

    def require() -> None:
        for rows in blocks(micro_batch_size, EXAMPLES_PER_PART):
            if rows.start == 0 or rows.stop == micro_batch_size:
                require_apart(task, inputs, rows.stop - rows.start)

    collectives.refuse_together(require)


def losses_of(task: Task, micro_batch: Inputs) -> Tensor:
    """(B,): the losses of made-up examples, without gradients.

    Raises:
        PrivacyConfigError: there is not one for each.
        NotTaken: the model raises an error on them.
    """
    size = len(next(iter(micro_batch.values())))
    with torch.no_grad(), must_take(f"{size} examples together"):
        loss_B = task(**micro_batch)
    if loss_B.shape != (size,):
        raise PrivacyConfigError(
            f"the task returned a tensor of shape {tuple(loss_B.shape)} for {size} examples, not one loss for each"
        )
    return loss_B


def compare_losses(first_B: Tensor, second_B: Tensor, tolerance: float, where: str = "") -> None:
    """
    Raises:
        PrivacyConfigError: the losses of the same examples differ.
    """
    largest = float(first_B.nan_to_num(0, 0, 0).abs().max())
    if not torch.allclose(
        first_B, second_B, rtol=tolerance, atol=tolerance * largest, equal_nan=True
    ):
        raise PrivacyConfigError(
            f"{where}the loss of an example changes with the other examples of its micro-batch: every example's loss must "
            "depend on that example alone, at every size (no mean over the batch, no contrast between examples, no state that "
            "the forward keeps, no limit or group that examples share, no length that is fitted to the longest, no branch on "
            "the size or dtype that leads to one)"
        )


def among_neighbours(
    inputs: Inputs, row_B: Tensor, stays_B: Tensor, run: Callable[[Inputs, bool], object]
) -> None:
    """Calls `run(micro_batch, has_nan)` on examples that stay while the rows around them change, for three kinds of these.

    The first hold NaN and infinity, the second large finite numbers, which NaN would hide from the largest number of a batch, and
    the third are other whole examples. What `run` finds of the examples that stay, it compares.

    Args:
        row_B: which made-up example stands in a row.
        stays_B: False for the rows that change.

    Raises:
        NotTaken: `run` raised it for all kinds but one. The third and the last are whole examples, whose ids may have to stand
            where they are.
    """
    kind_B = torch.arange(len(stays_B)) % 7

    def hostile(*values: float) -> Change:
        """As many of seven rows hold examples times these values."""

        def change(x_B: Tensor) -> Tensor:
            # A crowd of one example is for limits that count examples, a short one for lengths that are fitted to the longest.
            y_B = torch.where(in_rows(kind_B > 4, x_B), x_B[:1], x_B.roll(1, 0))
            y_B = torch.where(in_rows(kind_B == 4, x_B), shortened(x_B), y_B)
            if x_B.is_floating_point():  # NaN and infinity carry over at any strength
                for kind, value in enumerate(values):
                    y_B = torch.where(in_rows(kind_B == kind, x_B), y_B * value, y_B)
            return y_B

        return change

    kinds: list[Change] = [
        hostile(torch.nan, torch.inf, -torch.inf, torch.nan),
        hostile(LARGE, -LARGE, LARGE, -LARGE),
        lambda x_B: x_B.roll(1, 0),
        lambda x_B: shortened(x_B[:1]).expand_as(x_B),
        lambda x_B: x_B[:1].expand_as(x_B),
    ]
    rows = {name: x[row_B.to(x.device)] for name, x in inputs.items()}
    num_taken = 0
    for number, change in enumerate(kinds):
        if number > 2 and num_taken > 1:
            return
        try:
            micro_batch = {
                name: torch.where(in_rows(stays_B, x), x, change(x)) for name, x in rows.items()
            }
            run(micro_batch, number == 0)
            num_taken += 1
        except NotTaken:  # the model refuses such values itself; it is tried on those that it takes
            if num_taken + len(kinds[number + 1 :]) < 2:
                raise


def in_rows(is_so_B: Tensor, like: Tensor) -> Tensor:
    """A condition on rows, on the device of a tensor (B, ...) and with as many dimensions."""
    return is_so_B.to(like.device).view(-1, *[1] * (like.dim() - 1))


def shortened(x: Tensor) -> Tensor:
    """The second half of dimension 1 (tokens, as a rule) is zero."""
    if x.dim() < 2:
        return x
    length = x.shape[1]
    is_kept = torch.arange(length, device=x.device) < -(-length // 2)
    return torch.where(is_kept.view(-1, *[1] * (x.dim() - 2)), x, x.new_zeros(()))


class NotTaken(PrivacyConfigError):
    """The model raised an error on made-up inputs."""


def generators() -> list[object]:
    """States of the global generators, from which code draws that names none."""
    devices = torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []
    _, numbers, *rest = np.random.get_state(legacy=True)  # noqa: NPY002  # foreign models use it
    states = [x.numpy().tobytes() for x in (torch.get_rng_state(), *devices)]
    return [random.getstate(), np.asarray(numbers).tobytes(), rest, *states]


@contextmanager
def must_take(what: str) -> Iterator[None]:
    """Reports in one line what the model raises on made-up inputs; lets clipping's own refusals through.

    It also refuses code that draws from a global generator: a mask or coin would depend on an example's place in the batch.

    Raises:
        NotTaken: the model raised something else.
    """

    before = generators()
    try:
        yield
    except (
        PrivacyConfigError,
        MemoryError,
        torch.OutOfMemoryError,
    ):  # the last two speak for themselves
        raise
    except Exception as error:  # a model may raise anything
        said = " ".join(str(error).split())[:200] or "without a word"
        raise NotTaken(
            f"the model raises {type(error).__name__} on made-up examples of the self-check ({what}): {said}; "
            "give it made-up examples that it takes: made_up= of PrivateLoop, or inputs of check_against_autograd"
        ) from error
    if generators() != before:
        raise PrivacyConfigError(
            "the forward draws random numbers, so an example's gradient depends on its place in the micro-batch: switch "
            "dropout and random masks off (model.eval(), p = 0), or make them of an input that each example brings along"
        )


@contextmanager
def nothing_is_small(model: nn.Module) -> Iterator[None]:
    """Weights near zero are random inside: one that starts at zero hides the gradients of the layers before it."""
    floating = [_memory(p) for p in model.parameters() if p.is_floating_point()]
    small = {
        p: p.detach().clone()
        for p in floating
        if float(p.detach().float().norm()) < SMALL * math.sqrt(p.numel())
    }
    generator = torch.Generator().manual_seed(0)
    try:
        with torch.no_grad():
            for p in small:
                std = p.shape[-1] ** -0.5 if p.dim() > 1 else 0.02
                p.copy_(std * torch.randn(p.shape, generator=generator))
        yield
    finally:
        with torch.no_grad():
            for p, before in small.items():
                p.copy_(before)


def _memory(parameter: nn.Parameter) -> Tensor:
    """A view of each number that a parameter holds, once: one that is expanded repeats them and cannot be written itself."""
    repeated = slice(0, 1)
    return parameter.detach()[
        tuple(slice(None) if stride else repeated for stride in parameter.stride())
    ]
