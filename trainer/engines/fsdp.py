"""torch FSDP2 (`fully_shard`): sharded parameters and optimizer states, optionally in replicated groups (HSDP).

FSDP gathers and frees weights in its module hooks and does nothing else: the recorder differentiates with respect to a dummy
root, so no gradient ever reaches a parameter, and its gradient reduction is switched off. The optimizer works on plain tensors
that share the memory of FSDP's fp32 shards, cut along the first dimension; forward and backward see them in the compute dtype.

HSDP: `zero_optimization.zero_hpz_partition_size` ranks share a copy of the model, and each such group holds all of it (absent:
one group of all ranks; 1: every rank holds everything). `privacy/ranks/row_shards.py` says who owns what.

From ds_config: stage 3 frees a block's weights between forward and backward. Stages 1 and 2 gather the weights once per logical
step and keep them (gradients are ours, so the two are one). `offload_param` keeps shards, moments and the optimizer's step on
the CPU. DeepSpeed's bucket and prefetch sizes have no meaning here and are not read.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import (
    CPUOffloadPolicy,
    MixedPrecisionPolicy,
    OffloadPolicy,
    fully_shard,
)

from privacy.ranks import collectives
from privacy.ranks.engine import GradShard, Piece, ShardState, flat_part, repeated_blocks
from privacy.ranks.fsdp import put_away
from privacy.ranks.row_shards import RowShards, own_rows
from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.engines.blocks import checkpoint_blocks
from trainer.optimizers import fresh_state, make_optimizer, moments, parameter_groups, set_rate


class FsdpEngine:
    """See `privacy.ranks.engine.Engine`."""

    replicated = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        machine: MachineSettings,
        device: torch.device,
    ) -> None:
        world_size = collectives.world_size()
        num_ranks = machine.shard_group_size or world_size  # per replica
        shape = (world_size // num_ranks, num_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        checkpoint_blocks(module, machine)
        self.shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        self.device = device
        self.compute_dtype = machine.compute_dtype
        self.module = _shard(module, mesh, machine)
        self._sharded = {n: p for n, p in self.module.named_parameters() if n in self.shapes}
        self._locals = {name: nn.Parameter(own_rows(p)[0]) for name, p in self._sharded.items()}
        self._rows = RowShards(self._sharded, device)
        self.layout = self._rows.layout
        self._owned = self.layout.owned_by(collectives.rank())
        self._config = optimizer
        self._optimizer = make_optimizer(
            parameter_groups(self._locals.items(), self.shapes, optimizer), optimizer
        )

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        put_away(self.module)
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                raise RuntimeError(
                    f"a gradient of {name} reached FSDP: only the recorder may see gradients"
                )
            if own_rows(parameter)[0].data_ptr() != self._locals[name].data_ptr():
                raise RuntimeError(
                    f"FSDP moved its shard of {name}: the optimizer would step on a copy"
                )
        for name, gradient in self._rows.exchange([shard.values for shard in shards]).items():
            self._locals[name].grad = gradient.view_as(self._locals[name])
        set_rate(self._optimizer.param_groups, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> Iterator[ShardState]:
        for piece in self._owned:
            local, start = self._locals[piece.name], piece.offset - self._rows.starts[piece.name]
            stepped = self._optimizer.state.get(local, {})
            tensors = {
                "param": local,
                **{kind: stepped[kind] for kind in moments(self._config) if kind in stepped},
            }
            yield ShardState(
                piece, {k: flat_part(t, start, piece.length) for k, t in tensors.items()}
            )

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        put_away(self.module)
        for local in self._locals.values():
            self._optimizer.state[local] = fresh_state(self._config, local, num_steps)
        for key in ("param", *(moments(self._config) if num_steps > 0 else ())):
            whole = self._rows.exchange([states[piece][key] for piece in self._owned])
            for name, values in whole.items():
                local = self._locals[name]
                target = local if key == "param" else self._optimizer.state[local][key]
                target.detach().view(-1).copy_(values)


def _shard(module: nn.Module, mesh: DeviceMesh, machine: MachineSettings) -> nn.Module:
    """Moves each repeated block to the device and shards it, and then what is left, in place."""
    is_fp32 = all(p.dtype == torch.float32 for p in module.parameters())
    if is_fp32:
        for buffer in module.buffers():  # FSDP casts parameters only
            buffer.data = buffer.to(machine.compute_dtype) if buffer.is_floating_point() else buffer
    policy = MixedPrecisionPolicy(param_dtype=machine.compute_dtype if is_fp32 else None)
    offload = OffloadPolicy()
    if machine.offload_param:
        pin_memory = machine.raw["zero_optimization"]["offload_param"].get("pin_memory", False)
        offload = CPUOffloadPolicy(pin_memory=pin_memory and mesh.device_type == "cuda")
    mesh = mesh if mesh["replicate"].size() > 1 else mesh["shard"]
    for block in repeated_blocks(module):
        fully_shard(
            block,
            mesh=mesh,
            reshard_after_forward=machine.stage == 3,
            mp_policy=policy,
            offload_policy=offload,
        )
    # What is left (embeddings, head) is needed again as soon as the backward begins.
    root = fully_shard(
        module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload
    )
    root.set_reshard_after_backward(machine.stage == 3)
    root.set_requires_gradient_sync(False)
    return module
