"""torch FSDP2 (`fully_shard`): sharded parameters and optimizer states, optionally in replicated groups (HSDP).

FSDP gathers and frees weights in its module hooks and does nothing else: the recorder differentiates with respect to a dummy
root, so no gradient ever reaches a parameter, and its gradient reduction is switched off. The optimizer works on plain tensors
that share the memory of FSDP's fp32 shards, cut along the first dimension; forward and backward see them in the compute dtype.

HSDP: `zero_optimization.zero_hpz_partition_size` ranks share a copy of the model, and each such group holds all of it (absent:
one group of all ranks; 1: every rank holds everything). Replicas of a shard divide its coordinates among themselves. Each
coordinate is thus reduced to one rank, which alone draws its noise; the replicas then exchange what they noised, so that all
take the same step from the same bits (contract 7).

From ds_config: stage 3 frees a block's weights between forward and backward. Stages 1 and 2 gather the weights once per logical
step and keep them (gradients are ours, so the two are one). `offload_param` keeps shards, moments and the optimizer's step on
the CPU. DeepSpeed's bucket and prefetch sizes have no meaning here and are not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor

from privacy.step.engine import GradShard, Piece, ShardState, flat_part, repeated_blocks
from trainer.config.machine import MachineSettings
from trainer.config.optimizer import OptimizerSection
from trainer.engines.activation_checkpointing import checkpoint_blocks
from trainer.engines.layouts import layout_of, replica_cut, row_shard
from trainer.optimizers import Segment, bind_segments, fresh_state, make_optimizer, moments, parameter_groups, set_step
from trainer.ranks import distributed


class _Span(NamedTuple):
    """Where one owned piece lives: coordinates of this rank's shard of the parameter, from `start`."""

    piece: Piece
    start: int


class FsdpEngine:
    """See `privacy.step.engine.Engine`."""

    replicated = False

    def __init__(
        self, module: nn.Module, optimizer: OptimizerSection, machine: MachineSettings, device: torch.device
    ) -> None:
        world_size = distributed.world_size()
        num_ranks = machine.shard_group_size or world_size  # per replica
        shape = (world_size // num_ranks, num_ranks)
        mesh = init_device_mesh(device.type, shape, mesh_dim_names=("replicate", "shard"))
        checkpoint_blocks(module, machine)
        self.shapes = {name: p.shape for name, p in module.named_parameters() if p.requires_grad}
        self.device = device
        self.compute_dtype = machine.compute_dtype
        self.module = _shard(module, mesh, machine)
        self._sharded = {n: p for n, p in self.module.named_parameters() if n in self.shapes}
        self._locals = {name: nn.Parameter(_local(p)) for name, p in self._sharded.items()}
        self._replicas = mesh["replicate"]
        self.layout = layout_of("fsdp", self.shapes, optimizer, machine, world_size)
        offsets, shard = {}, mesh["shard"]
        for name, local in self._locals.items():
            offsets[name], length = row_shard(self.shapes[name], shard.get_local_rank(), shard.size())
            if local.numel() != length:
                raise RuntimeError(f"FSDP has {local.numel()} coordinates of {name}, where {length} were expected")
        owned = self.layout.owned_by(distributed.rank())
        self._spans = [_Span(piece, piece.offset - offsets[piece.name]) for piece in owned]
        self._config = optimizer
        self._optimizer = make_optimizer(parameter_groups(self._locals.items(), self.shapes, optimizer), optimizer)
        segments: dict[Tensor, list[Segment]] = {
            local: [Segment(name, 0, local.numel())] for name, local in self._locals.items()
        }
        bind_segments(self._optimizer, segments, sharded=True)

    def step(self, shards: Sequence[GradShard], *, lr: float, noise_variance: float = 0.0) -> None:
        self._free_gathered()
        for name, parameter in self._sharded.items():
            if parameter.grad is not None:
                raise RuntimeError(f"a gradient of {name} reached FSDP: only the recorder may see gradients")
            if _local(parameter).data_ptr() != self._locals[name].data_ptr():
                raise RuntimeError(f"FSDP moved its shard of {name}: the optimizer would step on a copy")
        owned = {span: shard.values for span, shard in zip(self._spans, shards, strict=True)}
        for name, gradient in self._exchange(owned).items():
            self._locals[name].grad = gradient.view_as(self._locals[name])
        set_step(self._optimizer.param_groups, lr=lr, noise_variance=noise_variance)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def _free_gathered(self) -> None:
        """Weights that are still gathered would be used again after the step, outdated."""
        for unit in self.module.modules():
            if isinstance(unit, FSDPModule):
                unit.reshard()

    def _exchange(self, owned: Mapping[_Span, Tensor]) -> dict[str, Tensor]:
        """Whole shards by name, from what this rank and its replicas own of them; bit for bit equal on all replicas."""
        num_replicas, replica = self._replicas.size(), self._replicas.get_local_rank()
        total = sum(p.numel() for p in self._locals.values())
        cut = replica_cut(total, num_replicas)
        first = next(iter(self._locals.values()))
        flat = torch.zeros(num_replicas, cut, dtype=first.dtype, device=self.device)
        position = 0
        for values in owned.values():
            flat[replica, position : position + values.numel()] = values
            position += values.numel()
        if num_replicas > 1:
            distributed.all_gather_rows(flat, flat[replica].clone(), self._replicas.get_group())
        sizes = [p.numel() for p in self._locals.values()]
        parts = flat.view(-1)[:total].to(first.device).split(sizes)
        return dict(zip(self._locals, parts, strict=True))

    def state(self) -> Iterator[ShardState]:
        for span in self._spans:
            local = self._locals[span.piece.name]
            stepped = self._optimizer.state.get(local, {})
            tensors = {"param": local, **{kind: stepped[kind] for kind in moments(self._config) if kind in stepped}}
            yield ShardState(span.piece, {k: flat_part(t, span.start, span.piece.length) for k, t in tensors.items()})

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        self._free_gathered()
        for local in self._locals.values():
            self._optimizer.state[local] = fresh_state(self._config, local, num_steps)
        for key in ("param", *(moments(self._config) if num_steps > 0 else ())):
            whole = self._exchange({span: states[span.piece][key] for span in self._spans})
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
            block, mesh=mesh, reshard_after_forward=machine.stage == 3, mp_policy=policy, offload_policy=offload
        )
    # What is left (embeddings, head) is needed again as soon as the backward begins.
    root = fully_shard(module, mesh=mesh, reshard_after_forward=False, mp_policy=policy, offload_policy=offload)
    root.set_reshard_after_backward(machine.stage == 3)
    root.set_requires_gradient_sync(False)
    return module


@torch.no_grad()
def _local(parameter: nn.Parameter) -> Tensor:
    """This rank's fp32 shard, as a view."""
    assert isinstance(parameter, DTensor)
    return parameter.to_local()
