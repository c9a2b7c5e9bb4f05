"""What clipping calls: the tensors of a micro-batch -> one loss per example."""

from collections.abc import Callable

from torch import Tensor, nn

from ..clipping.recorder import Task
from .fields import Example


def per_example_task(model: nn.Module, loss: Callable[..., Tensor] | None, example: Example) -> Task:
    """A function that holds nothing but the loss and the fields, so that the self-check sees all that it could change."""
    if loss is None:
        from .hugging_face import loss_of

        loss = loss_of(model, example)
    given = loss

    def task(**inputs: Tensor) -> Tensor:
        in_order, named = example.arguments(inputs)
        return given(*in_order, **named)

    return task
