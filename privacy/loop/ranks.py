"""What ranks of a loop of one's own have in common before it begins."""

import torch.distributed as dist
from torch import nn

from ..errors import PrivacyConfigError
from ..step import collectives


def require_same(mine: str) -> None:
    """Refuses ranks that were started with other arguments: they would wait for one another, or draw other coins. Collective."""
    if len(set(collectives.gather_objects(mine))) > 1:
        raise PrivacyConfigError(
            "ranks have another data set, plan, example, micro-batch or run folder: make the same PrivateLoop on each of them"
        )


def require_talking() -> None:
    """Refuses a process group that carries no tensors of the CPU, which ledger and sampler need."""
    if dist.is_initialized() and dist.get_backend() == "nccl":
        raise PrivacyConfigError(
            'the process group carries CUDA tensors alone: make it with init_process_group("cpu:gloo,cuda:nccl"), under '
            'accelerate with InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")'
        )


def take_weights_of_main(model: nn.Module) -> None:
    """Parameters and buffers of rank 0 on every rank, as DistributedDataParallel does at its start."""
    if collectives.world_size() > 1:
        for tensor in (*model.parameters(), *model.buffers()):
            dist.broadcast(tensor.detach(), 0)
