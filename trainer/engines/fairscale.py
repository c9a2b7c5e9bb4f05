"""fairscale: parameters whole on every rank, optimizer states sharded by parameter (OSS, which is ZeRO-1).

Each parameter belongs to one rank: it gets the reduced sum, adds the noise and steps; OSS then broadcasts the new values, so
every replica holds the owner's bits. With bf16 compute OSS works on fp32 master weights apart from the module.

Stages 1 and 2 of ds_config both mean OSS (gradients are ours). What was verified with fairscale 0.4.13 and torch 2.13, and what
is refused for that reason:

* OSS on CPU over gloo, 1 and 2 ranks, fp32 and bf16: equal to `local` (tests/distributed/test_parity.py). OSS on
  CUDA was not run.
* Stage 3 would be fairscale's FullyShardedDataParallel. On CPU its first forward fails, because its streams exist on CUDA
  only. On any device its state machine insists on its own post-backward hooks, which fire
  only where a gradient is accumulated; per-example clipping never accumulates one. Refused: use `--engine fsdp`.
* fairscale's `checkpoint_wrapper` is reentrant: it runs a nested `backward()` and so refuses the norm pass, which asks for
  the gradient of one tensor. `activation_checkpointing` of ds_config is torch's non-reentrant one, on every engine.
* Offload: OSS has none.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from fairscale.optim import OSS
from torch import Tensor, nn

from privacy.ranks import collectives
from privacy.ranks.engine import GradShard, Piece
from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.engines.blocks import checkpoint_blocks
from trainer.engines.layouts import layout_of, require_dealt
from trainer.engines.local import LocalEngine
from trainer.optimizers import make_optimizer, parameter_groups, set_rate


class FairscaleEngine(LocalEngine):
    """The master weights of `LocalEngine`, with an optimizer that steps only the parameters that this rank owns."""

    replicated = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        machine: MachineSettings,
        device: torch.device,
    ) -> None:
        checkpoint_blocks(module, machine)
        self.device = device
        self.compute_dtype = machine.compute_dtype
        self.module = module.to(device)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in trainable.items()}
        self._masters = trainable
        if self.compute_dtype != torch.float32:
            self._masters = {
                name: nn.Parameter(p.detach().clone()) for name, p in trainable.items()
            }
            self.module.to(self.compute_dtype)
        self._config = optimizer
        groups = parameter_groups(self._masters.items(), self.shapes, optimizer)
        self._oss = OSS(groups, optim=lambda owned: make_optimizer(owned, optimizer))
        self.layout = layout_of(
            "fairscale", self.shapes, optimizer, machine, collectives.world_size()
        )
        names = {id(master): name for name, master in self._masters.items()}
        for rank, owned_groups in enumerate(self._oss.partition_parameters()):
            dealt = [names[id(master)] for group in owned_groups for master in group["params"]]
            require_dealt(
                self.layout, rank, [Piece(n, 0, self.shapes[n].numel()) for n in dealt], "fairscale"
            )
        self._optimizer = self._oss.optim

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        for shard in shards:
            master = self._masters[shard.name]
            master.grad = shard.values.to(master.dtype).view_as(master)
        set_rate(self._oss.param_groups, lr)
        self._oss.step()
        for shard in shards:
            self._masters[shard.name].grad = None
        self._copy_to_module()

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        super().load_state(states, num_steps=num_steps)
        for owner, pieces in enumerate(self.layout.pieces):
            for piece in pieces:
                dist.broadcast(self._masters[piece.name].detach(), owner)
        self._copy_to_module()
