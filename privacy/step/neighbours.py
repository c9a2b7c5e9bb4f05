"""What a start asks of the model in its engine: no example's loss depends on the others of a micro-batch."""

from collections.abc import Callable

from torch import Tensor

from ..clipping.accumulators import EXAMPLES_PER_PART
from ..clipping.checked import require_apart
from ..clipping.recorder import Task
from . import collectives
from .engine import Engine, to_device


def require_neighbours_apart(
    engine: Engine, task: Task, synthetic_inputs: Callable[[int], dict[str, Tensor]], micro_batch_size: int
) -> None:
    """Tries a made-up micro-batch as training has it: its number of rows, on the device and in the dtype of training. Collective.

    Args:
        task: what training calls.
        synthetic_inputs: makes up the number of examples that it is called with, the same on every rank.

    Raises:
        PrivacyConfigError: on all ranks, if one of them finds that a loss depends on other examples.
    """
    inputs = to_device(synthetic_inputs(2), engine)
    collectives.refuse_together(lambda: require_apart(task, inputs, min(micro_batch_size, EXAMPLES_PER_PART)))
