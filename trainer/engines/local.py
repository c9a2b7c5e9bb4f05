"""Keeps all parameters and optimizer states on every rank: the numerical reference of all engines.

Coordinates are dealt out evenly for the noise; the owners' noised gradients are gathered, so that
every replica takes the same step from the same bits.
"""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor, nn

from privacy.ranks import collectives
from privacy.ranks.engine import GradShard, Piece, ShardState, flat_part
from privacy.sums.reduction import gather_from_owners
from trainer.config.machine import MachineSettings
from trainer.config.sections import OptimizerSection
from trainer.engines.blocks import checkpoint_blocks
from trainer.engines.layouts import layout_of
from trainer.optimizers import fresh_state, make_optimizer, moments, parameter_groups, set_rate


class LocalEngine:
    """An engine of plain torch; see `privacy.ranks.engine.Engine`.

    With bf16 compute, fp32 master weights are kept apart from the module.
    """

    replicated = True

    def __init__(
        self,
        module: nn.Module,
        optimizer: OptimizerSection,
        machine: MachineSettings,
        device: torch.device,
    ) -> None:
        checkpoint_blocks(module, machine)
        trainable = {name: p for name, p in module.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in trainable.items()}
        self.layout = layout_of("local", self.shapes, optimizer, machine, collectives.world_size())
        self.device = device
        self.compute_dtype = machine.compute_dtype
        self._masters: dict[str, nn.Parameter] = {}
        for name, p in trainable.items():
            dtype = torch.promote_types(p.dtype, torch.float32)
            self._masters[name] = nn.Parameter(p.detach().to(device, dtype, copy=True))
        master_dtype = next(iter(self._masters.values())).dtype
        # A float64 model, such as a test's, computes in float64.
        self.module = module.to(
            device, self.compute_dtype if master_dtype == torch.float32 else master_dtype
        )
        self._config = optimizer
        groups = parameter_groups(self._masters.items(), self.shapes, optimizer)
        self._optimizer = make_optimizer(groups, optimizer)

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Steps with the noised gradients of all owners. Collective."""
        dtype = next(iter(self._masters.values())).dtype
        gradients = gather_from_owners(shards, self.layout, self.shapes, dtype, self.device)
        for name, gradient in gradients.items():
            self._masters[name].grad = gradient
        set_rate(self._optimizer.param_groups, lr)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        self._copy_to_module()

    @torch.no_grad()
    def _copy_to_module(self) -> None:
        """Copies the master weights to the module, where it has weights of its own."""
        for name, parameter in self.module.named_parameters():
            if name in self._masters and self._masters[name] is not parameter:
                parameter.copy_(self._masters[name])

    def state(self) -> Iterator[ShardState]:
        """Yields the owned pieces of weights and moments."""
        for piece in self.layout.owned_by(collectives.rank()):
            master = self._masters[piece.name]
            optimizer_state = self._optimizer.state.get(master, {})
            tensors = {"param": flat_part(master, piece.offset, piece.length)}
            for kind in moments(self._config):
                if kind in optimizer_state:
                    tensors[kind] = flat_part(optimizer_state[kind], piece.offset, piece.length)
            yield ShardState(piece, tensors)

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Sets all coordinates of weights and optimizer states, since every rank has them all."""
        for name in {piece.name for piece in states}:
            master = self._masters[name]
            self._optimizer.state[master] = fresh_state(self._config, master, num_steps)
        for piece, tensors in states.items():
            master = self._masters[piece.name]
            for key, values in tensors.items():
                target = master if key == "param" else self._optimizer.state[master][key]
                flat_part(target, piece.offset, piece.length).copy_(values)
        self._copy_to_module()
