"""Shards optimizer states by parameter with fairscale's OSS, which is ZeRO-1.

Stages 1 and 2 of a ds_config both mean OSS, since gradients are ours; `require_supported` refuses
stage 3 and offload. fairscale 0.4.13 with torch 2.13 equals `local` on CPU over gloo, on 1 and 2
ranks, in fp32 and bf16 (tests/distributed/test_parity.py). OSS on CUDA was not run.
"""

from collections.abc import Mapping

import torch
import torch.distributed as dist
from fairscale.optim import OSS
from torch import Tensor, nn

from privacy.ranks import collectives
from privacy.ranks.engine import GradShard, Piece
from trainer.config.machine import MachineSettings
from trainer.config.sections import OptimizerSection
from trainer.engines.blocks import checkpoint_blocks
from trainer.engines.layouts import layout_of, require_dealt
from trainer.engines.local import LocalEngine
from trainer.optimizers import make_optimizer, parameter_groups, set_rate


class FairscaleEngine(LocalEngine):
    """An engine with all weights on every rank, and optimizer states of a rank's own parameters.

    A parameter belongs to one rank, which gets the reduced sum, adds the noise and steps; OSS then
    broadcasts the new values, so that every replica has the owner's bits. With bf16 compute OSS
    steps fp32 master weights apart from the module.
    """

    replicated = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        machine: MachineSettings,
        device: torch.device,
    ) -> None:
        # fairscale's own `checkpoint_wrapper` is reentrant: its nested `backward()` refuses the
        # norm pass, which asks for the gradient of one tensor.
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
        for rank, groups_of_rank in enumerate(self._oss.partition_parameters()):
            pieces = []
            for group in groups_of_rank:
                for master in group["params"]:
                    name = names[id(master)]
                    pieces.append(Piece(name, 0, self.shapes[name].numel()))
            require_dealt(self.layout, rank, pieces, "fairscale")
        self._optimizer = self._oss.optim

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Steps the owned parameters and broadcasts them. Collective."""
        for shard in shards:
            master = self._masters[shard.name]
            master.grad = shard.values.to(master.dtype).view_as(master)
        set_rate(self._oss.param_groups, lr)
        self._oss.step()
        for shard in shards:
            self._masters[shard.name].grad = None
        self._copy_to_module()

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Sets the owned parameters and their states, and broadcasts the parameters. Collective."""
        super().load_state(states, num_steps=num_steps)
        for owner, pieces in enumerate(self.layout.pieces):
            for piece in pieces:
                dist.broadcast(self._masters[piece.name].detach(), owner)
        self._copy_to_module()
