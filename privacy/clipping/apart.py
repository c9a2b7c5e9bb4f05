"""Does the loss of any example change with the others around it, in micro-batches as a run has them?

The self-check compares gradients with torch's own, in float64 and in small batches. A model may take another way in a larger one
(a limit, groups, a mask that is as long as the batch), in another precision or under autocast. So here a micro-batch of made-up
examples, of the run's own number of rows, shapes, precision and device, goes forward twice: a third of the rows stay what they
are and all others change. Kernels give equal bits for equal shapes, whatever the other rows hold, so what mixes is seen as long
as rounding does not hide it; NaN, infinity and large numbers in some rows make that any strength, unless the model refuses them.

Two forwards without gradients cost less than one micro-batch of training, wherever that runs.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager

import torch
from torch import Tensor

from ..errors import PrivacyConfigError
from .untouched import no_chance

LARGE = 1e4
"""An example's floating inputs times this are large."""
IN_ANY_ORDER = 1e-2
"""Relative difference on accelerators, some of whose kernels add up in no fixed order, in bf16 too."""


def require_apart(task: Callable[..., Tensor], inputs: Mapping[str, Tensor], size: int) -> None:
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
    seen: list[Tensor] = []
    for micro_batch, is_last in _neighbourhoods(inputs, stays_B):
        if len(seen) == 2:
            break
        try:
            with torch.no_grad(), no_chance(), must_take(f"{size} examples together"):
                loss_B = task(**micro_batch)
        except NotTaken:  # the model refuses such values itself; it is tried on those that it takes
            if is_last:
                raise
            continue
        if loss_B.shape != (size,):
            raise PrivacyConfigError(
                f"the task returned a tensor of shape {tuple(loss_B.shape)} for {size} examples, not one loss for each"
            )
        seen.append(loss_B[stays_B.to(loss_B.device)].double())
    first, second = seen
    tolerance = 0.0 if loss_B.device.type == "cpu" else IN_ANY_ORDER
    largest = float(first.nan_to_num(0, 0, 0).abs().max())
    if not torch.allclose(first, second, rtol=tolerance, atol=tolerance * largest, equal_nan=True):
        raise PrivacyConfigError(
            f"in micro-batches of {size} examples, in the precision of the run, the loss of an example changes with the others: "
            "every example's loss must depend on that example alone, at every size (no mean, limit, group or length that "
            "examples share, no branch on the size or dtype that leads to one)"
        )


class NotTaken(PrivacyConfigError):
    """The model raised an error on made-up inputs."""


@contextmanager
def must_take(what: str) -> Iterator[None]:
    """Says in one line what the model raises on made-up inputs; clipping's own refusals pass.

    Raises:
        NotTaken: the model raised something else.
    """
    try:
        yield
    except PrivacyConfigError:
        raise
    except Exception as error:  # a model may raise anything
        said = " ".join(str(error).split())[:200] or "without a word"
        raise NotTaken(
            f"the model raises {type(error).__name__} on made-up examples of the self-check ({what}): {said}; "
            "give it made-up examples that it takes: made_up= of PrivateLoop, or inputs of check_against_autograd"
        ) from error


def _neighbourhoods(inputs: Mapping[str, Tensor], stays_B: Tensor) -> Iterator[tuple[dict[str, Tensor], bool]]:
    """(a micro-batch of which some rows stay and the others change, whether it is the last).

    The first and the last are of whole examples, whose ids may have to stand where they are.
    """
    row_B = torch.arange(len(stays_B)) % len(next(iter(inputs.values())))
    kind_B = torch.arange(len(stays_B)) % 7

    def among(change: Callable[[Tensor], Tensor]) -> dict[str, Tensor]:
        made = {}
        for name, x in inputs.items():
            x_B = x[row_B.to(x.device)]
            made[name] = torch.where(_as(stays_B, x_B), x_B, change(x_B))
        return made

    def hostile(x_B: Tensor) -> Tensor:
        # A crowd of one example is for limits that count examples, a short one for lengths that are fitted to the longest.
        y_B = torch.where(_as(kind_B > 4, x_B), x_B[:1], x_B.roll(1, 0))
        y_B = torch.where(_as(kind_B == 4, x_B), shortened(x_B), y_B)
        if x_B.is_floating_point():
            for kind, value in enumerate((torch.nan, -LARGE, torch.inf, LARGE)):
                y_B = torch.where(_as(kind_B == kind, x_B), y_B * value, y_B)
        return y_B

    yield among(lambda x_B: x_B.roll(1, 0)), False
    yield among(hostile), False
    yield among(lambda x_B: shortened(x_B[:1]).expand_as(x_B)), False
    yield among(lambda x_B: x_B[:1].expand_as(x_B)), True


def _as(is_so_B: Tensor, like: Tensor) -> Tensor:
    """(B, 1, ...) on the same device."""
    return is_so_B.to(like.device).view(-1, *[1] * (like.dim() - 1))


def shortened(x: Tensor) -> Tensor:
    """The second half of dimension 1 (tokens, as a rule) is zero."""
    if x.dim() < 2:
        return x
    length = x.shape[1]
    is_kept = torch.arange(length, device=x.device) < -(-length // 2)
    return torch.where(is_kept.view(-1, *[1] * (x.dim() - 2)), x, x.new_zeros(()))
