"""Shards parameters and optimizer states with torch's FSDP2, also in replicas (HSDP).

FSDP gathers and frees weights in its module hooks and does nothing else: the recorder
differentiates with respect to a dummy root, so no gradient ever reaches a parameter. DeepSpeed's
bucket and prefetch sizes have no meaning here and are not read.
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
from trainer.config.sections import OptimizerSection
from trainer.engines.blocks import checkpoint_blocks
from trainer.optimizers import fresh_state, make_optimizer, moments, parameter_groups, set_rate


class FsdpEngine:
    """An engine that shards with FSDP2; see `privacy.ranks.engine.Engine`."""

    replicated = False

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        machine: MachineSettings,
        device: torch.device,
    ) -> None:
        world_size = collectives.world_size()
        # With HSDP each group of so many ranks holds a replica of the model
        # (`zero_optimization.zero_hpz_partition_size`); privacy/ranks/row_shards.py deals them out.
        num_ranks = machine.shard_group_size or world_size
        shape = (world_size // num_ranks, num_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        checkpoint_blocks(module, machine)
        self.shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        self.device = device
        self.compute_dtype = machine.compute_dtype
        self.module = _shard(module, mesh, machine)
        self._sharded = {n: p for n, p in self.module.named_parameters() if n in self.shapes}
        # Plain tensors that share the memory of FSDP's fp32 shards, cut along the first dimension;
        # the optimizer steps them, and forward and backward see them in the compute dtype.
        self._locals = {name: nn.Parameter(own_rows(p)[0]) for name, p in self._sharded.items()}
        self._rows = RowShards(self._sharded, device)
        self.layout = self._rows.layout
        self._owned = self.layout.owned_by(collectives.rank())
        self._config = optimizer
        self._optimizer = make_optimizer(
            parameter_groups(self._locals.items(), self.shapes, optimizer), optimizer
        )

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Steps with the noised gradients of this rank's rows. Collective."""
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
        gradients = self._rows.exchange([shard.values for shard in shards])
        for name, gradient in gradients.items():
            self._locals[name].grad = gradient.view_as(self._locals[name])
        set_rate(self._optimizer.param_groups, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def state(self) -> Iterator[ShardState]:
        """Yields the owned pieces of weights and moments."""
        for piece in self._owned:
            local = self._locals[piece.name]
            start = piece.offset - self._rows.starts[piece.name]
            optimizer_state = self._optimizer.state.get(local, {})
            tensors = {"param": flat_part(local, start, piece.length)}
            for kind in moments(self._config):
                if kind in optimizer_state:
                    tensors[kind] = flat_part(optimizer_state[kind], start, piece.length)
            yield ShardState(piece, tensors)

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Sets weights and optimizer states of this rank's rows. Collective."""
        put_away(self.module)
        for local in self._locals.values():
            self._optimizer.state[local] = fresh_state(self._config, local, num_steps)
        kinds = moments(self._config) if num_steps > 0 else ()
        for key in ("param", *kinds):
            rows = self._rows.exchange([states[piece][key] for piece in self._owned])
            for name, values in rows.items():
                local = self._locals[name]
                target = local if key == "param" else self._optimizer.state[local][key]
                target.detach().view(-1).copy_(values)


def _shard(module: nn.Module, mesh: DeviceMesh, machine: MachineSettings) -> nn.Module:
    """Shards each repeated block, and then the rest of the module, in place, on the device.

    Stage 3 frees a block's weights between forward and backward. Stages 1 and 2, which differ in
    gradients alone, gather the weights once per logical step and keep them. `offload_param` keeps
    shards, moments and the optimizer's step on the CPU.
    """
    is_fp32 = all(p.dtype == torch.float32 for p in module.parameters())
    if is_fp32:
        # FSDP casts parameters only.
        for buffer in module.buffers():
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
    # The backward begins with the rest (embeddings, head), so that it stays gathered.
    root = fully_shard(
        module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload
    )
    root.set_reshard_after_backward(machine.stage == 3)
    root.set_requires_gradient_sync(False)
    return module
