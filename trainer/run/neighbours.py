"""What a start asks of the model in its engine: no example's loss depends on the others of a micro-batch."""

from collections.abc import Callable

from torch import Tensor

from privacy.clipping.accumulators import EXAMPLES_PER_PART
from privacy.clipping.apart import require_apart
from privacy.errors import PrivacyConfigError
from trainer.engines.base import Engine
from trainer.ranks import distributed
from trainer.tasks.base import to_device


def require_neighbours_apart(
    engine: Engine, synthetic_inputs: Callable[[int], dict[str, Tensor]], micro_batch_size: int
) -> None:
    """Tries a made-up micro-batch as training has it: its number of rows, on the device and in the dtype of training. Collective.

    Args:
        synthetic_inputs: makes up the number of examples that it is called with, the same on every rank.

    Raises:
        PrivacyConfigError: on all ranks, if one of them finds that a loss depends on other examples.
    """
    problem = None
    try:
        inputs = to_device(synthetic_inputs(2), engine)
        require_apart(engine.module, inputs, min(micro_batch_size, EXAMPLES_PER_PART))
    except PrivacyConfigError as error:
        problem = str(error)
    if found := [said for said in distributed.gather_objects(problem) if said is not None]:
        raise PrivacyConfigError(found[0])
