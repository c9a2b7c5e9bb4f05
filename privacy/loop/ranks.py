"""What ranks of a loop of one's own have in common before it begins."""

from collections.abc import Callable

import torch.distributed as dist
from torch import nn

from ..clipping.sharded import is_dtensor
from ..errors import PrivacyConfigError
from ..step import collectives


def require_same(mine: str) -> None:
    """Refuses ranks that were started with other arguments or other data. Collective.

    They would wait for one another or draw other coins, and an example could count on two of them.
    """
    if len(set(collectives.gather_objects(mine))) > 1:
        raise PrivacyConfigError(
            "ranks have another data set, plan, example, micro-batch, optimizer or run folder: make the same PrivateLoop on each "
            "of them, with the whole data set; the loop deals the items"
        )


def on_all_or_none(check: Callable[[], object]) -> None:
    """Collective; no rank waits for one that stopped.

    Raises:
        PrivacyConfigError: on all ranks, where the check raises it on one, or returns something else on another.
    """
    found, problem = None, None
    try:
        found = check()
    except PrivacyConfigError as error:
        problem = str(error)
    ranks = collectives.gather_objects((found, problem))
    if problems := [said for _, said in ranks if said is not None]:
        raise PrivacyConfigError(problems[0])
    if any(other != ranks[0][0] for other, _ in ranks):
        raise PrivacyConfigError(
            "ranks hold different weights: was their optimizer or learning rate set differently between two steps? Make the loop "
            "again on all ranks, and it goes on where it was saved"
        )


def say(line: str) -> None:
    """Prints a line on the console of rank 0, which lies inside the trust boundary."""
    if collectives.rank() == 0:
        print(line, flush=True)


def require_talking() -> None:
    """Refuses a process group that carries no tensors of the CPU, which ledger and sampler need."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        raise PrivacyConfigError(
            'the process group carries CUDA tensors alone: make it with init_process_group("cpu:gloo,cuda:nccl"), under '
            'accelerate with InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")'
        )


def take_weights_of_main(model: nn.Module) -> None:
    """Parameters and buffers of rank 0 on every rank, as DistributedDataParallel does at its start; shards are a rank's own."""
    if collectives.world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            if not is_dtensor(tensor):
                dist.broadcast(tensor.detach(), 0)
