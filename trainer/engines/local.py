"""Plain torch: whole parameters and optimizer states on every rank. The numerical reference for all other engines.

Coordinates are dealt out evenly for the noise; the owners' noised gradients are gathered, so that every replica takes the
same step from the same bits.
"""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor, nn

from trainer import distributed
from trainer.config import OptimizerSection
from trainer.ds_config import MachineSettings
from trainer.engines.base import GradShard, Piece, ShardLayout, ShardState, even_layout
from trainer.errors import ConfigError
from trainer.optimizer import MOMENTS, make_optimizer, parameter_groups


class LocalEngine:
    """See `trainer.engines.base.Engine`. With bf16 compute, fp32 master weights are kept beside the module."""

    replicated = True

    def __init__(
        self, module: nn.Module, optimizer: OptimizerSection, machine: MachineSettings, device: torch.device
    ) -> None:
        if machine.offloads:
            raise ConfigError(f"ds_config {machine.path}: engine local cannot offload; use --engine deepspeed")
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in trainable.items()}
        self.layout: ShardLayout = even_layout(self.shapes, distributed.world_size())
        self.device = device
        self.compute_dtype = machine.compute_dtype
        self._masters = {
            name: nn.Parameter(p.detach().to(device, torch.promote_types(p.dtype, torch.float32), copy=True))
            for name, p in trainable.items()
        }
        wide = next(iter(self._masters.values())).dtype
        self.module = module.to(device, self.compute_dtype if wide == torch.float32 else wide)
        self._optimizer = make_optimizer(
            parameter_groups(self._masters.items(), self.shapes, optimizer.weight_decay), optimizer
        )

    def step(self, shards: Sequence[GradShard], *, lr: float) -> None:
        for name, gradient in self._gather(shards).items():
            self._masters[name].grad = gradient.view(self.shapes[name])
        for group in self._optimizer.param_groups:
            group["lr"] = lr
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._copy_to_module()

    def _gather(self, shards: Sequence[GradShard]) -> dict[str, Tensor]:
        """Whole gradients by name, from every rank's shards."""
        world_size, dtype = distributed.world_size(), next(iter(self._masters.values())).dtype
        longest = max(self.layout.count(r) for r in range(world_size))
        row = torch.zeros(longest, dtype=dtype, device=self.device)
        position = 0
        for shard in shards:
            row[position : position + shard.values.numel()] = shard.values
            position += shard.values.numel()
        rows = torch.empty(world_size, longest, dtype=dtype, device=self.device)
        distributed.all_gather_rows(rows, row)
        gradients = {n: torch.empty(s.numel(), dtype=dtype, device=self.device) for n, s in self.shapes.items()}
        for r in range(world_size):
            position = 0
            for piece in self.layout.owned_by(r):
                gradients[piece.name][piece.offset : piece.offset + piece.length] = rows[r, position:][: piece.length]
                position += piece.length
        return gradients

    @torch.no_grad()
    def _copy_to_module(self) -> None:
        for name, parameter in self.module.named_parameters():
            if name in self._masters:
                parameter.copy_(self._masters[name])

    def state(self) -> Iterator[ShardState]:
        for piece in self.layout.owned_by(distributed.rank()):
            master = self._masters[piece.name]
            tensors = {"param": _part(master, piece)}
            tensors |= {k: _part(v, piece) for k, v in self._optimizer.state.get(master, {}).items() if k in MOMENTS}
            yield ShardState(piece, tensors)

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Takes all coordinates, since every rank holds everything."""
        for master in self._masters.values():
            moments = {key: torch.zeros_like(master) for key in MOMENTS} if num_steps > 0 else {}
            self._optimizer.state[master] = {"step": torch.tensor(float(num_steps)), **moments} if moments else {}
        for piece, tensors in states.items():
            master = self._masters[piece.name]
            for key, values in tensors.items():
                _part(master if key == "param" else self._optimizer.state[master][key], piece).copy_(values)
        self._copy_to_module()


def _part(tensor: Tensor, piece: Piece) -> Tensor:
    return tensor.detach().view(-1)[piece.offset : piece.offset + piece.length]
