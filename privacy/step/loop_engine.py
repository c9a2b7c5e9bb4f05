"""The engine of a loop of one's own: a torch model and optimizer, whole or in FSDP2's shards.

The optimizer steps on `.grad`s that hold noised, divided sums and nothing else.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from ..errors import ConfigError, PrivacyConfigError
from ..ranks import collectives
from ..ranks.engine import GradShard, Piece, ShardState, even_layout
from ..ranks.fsdp import is_dtensor, put_away, switch_reduction
from ..ranks.row_shards import RowShards, in_shards, own_part, set_own_part
from ..sums.reduction import gather_from_owners
from .optimizer_state import clear_gradients, probe, rate_of, strided_as

OPTIMIZER_FACTS = "optimizer"
"""Key of a manifest: the optimizer's class, and its numbers, such as step counts."""


class LoopEngine:
    """Steps a torch optimizer on noised gradients; see `privacy.ranks.engine.Engine`.

    Args:
        sets_rate: the step's learning rate goes into all groups of the optimizer; else they keep
            the caller's rates.

    Attributes:
        trainable: parameters by name.
        moments: names of the tensors that the optimizer keeps of each parameter.
        rates: learning rates of the last step, one for each group.
        is_resumed: whether no step was taken since a checkpoint was loaded.
        is_scheduled: whether a scheduler is registered, which a resume forwards.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sets_rate: bool = False
    ) -> None:
        put_away(model)
        self.module = model
        self.optimizer = optimizer
        self.sets_rate = sets_rate
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in self.trainable.items()}
        first_parameter = next(iter(self.trainable.values()))
        self.device = first_parameter.device
        self.compute_dtype = first_parameter.dtype
        is_sharded = any(map(is_dtensor, model.parameters()))
        self.replicated = not is_sharded
        self._rows = RowShards(self.trainable, self.device) if is_sharded else None
        self.layout = (
            self._rows.layout if self._rows else even_layout(self.shapes, collectives.world_size())
        )
        self.moments, self._numbers = probe(optimizer, self.trainable)
        self.rates: list[float] = []
        self._next_rates: list[float] = []
        self.is_resumed = False
        self.is_scheduled = False
        clear_gradients(model, optimizer)

    def release(self) -> None:
        """Gives the model back, with FSDP's reduction of gradients switched on."""
        switch_reduction(self.module, on=True)

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """Takes one step of the optimizer on the noised gradients."""
        put_away(self.module)
        clear_gradients(self.module, self.optimizer)
        for name, gradient in self._gradients(shards).items():
            p = self.trainable[name]
            # Fused steps take gradient and moments to be laid out as the parameter is.
            p.grad = strided_as(p, gradient)
            p_state = self.optimizer.state.get(p, {})
            for key in self.moments:
                if key in p_state:
                    p_state[key] = strided_as(p, p_state[key])
        caller_rates = [group.get("lr") for group in self.optimizer.param_groups]
        if self.sets_rate:
            self.rates = [lr] * len(caller_rates)
        else:
            self.rates = self._next_rates or self.read_rates()
        self._next_rates = []
        self.is_resumed = False
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if self.sets_rate or "lr" in group:
                # A float, since torch's steps compute with the dtype of a tensor, which may be too
                # narrow.
                group["lr"] = rate
        try:
            self.optimizer.step()
        finally:
            for group, caller_rate in zip(self.optimizer.param_groups, caller_rates, strict=True):
                # The caller may go on to fill the tensor.
                if isinstance(caller_rate, Tensor) and not self.sets_rate:
                    group["lr"] = caller_rate
        clear_gradients(self.module, self.optimizer)

    def _gradients(self, shards: list[GradShard]) -> dict[str, Tensor]:
        """Returns noised gradients by name: whole ones, or in the shards of their parameters."""
        if self._rows is None:
            return gather_from_owners(
                shards, self.layout, self.shapes, self.compute_dtype, self.device
            )
        rows = self._rows.exchange([shard.values for shard in shards])
        return {name: in_shards(values, self.trainable[name]) for name, values in rows.items()}

    def read_rates(self) -> list[float]:
        """Returns the learning rate of each group, for the next step.

        The next step takes these, since a rate that is read after the charge and refused would
        lose the step.

        Raises:
            PrivacyConfigError: see `rate_of`.
        """
        rates = []
        for number, group in enumerate(self.optimizer.param_groups):
            place = f"param_groups[{number}]['lr'] of the optimizer"
            rates.append(rate_of(group.get("lr", 0.0), place))
        self._next_rates = rates
        return rates

    def facts(self) -> dict[str, Any]:
        """Returns the description of the optimizer for a checkpoint's manifest."""
        kind = type(self.optimizer).__name__
        numbers: dict[str, dict[str, float]] = {}
        for name, p in self.trainable.items():
            for key, number in self.optimizer.state.get(p, {}).items():
                if key in self.moments or number is None:
                    continue
                if key not in self._numbers:
                    raise PrivacyConfigError(
                        f"{kind} keeps {key!r} of {name}, which it did not when the loop was made: "
                        "leave its settings as they were; a scheduler that changes momentum is "
                        "made before the loop"
                    )
                numbers.setdefault(name, {})[key] = float(number)
        return {OPTIMIZER_FACTS: {"class": kind, "numbers": numbers, "rates": self.rates}}

    def state(self) -> Iterator[ShardState]:
        for piece in self.layout.owned_by(collectives.rank()):
            p = self.trainable[piece.name]
            p_state = self.optimizer.state.get(p, {})
            tensors = {"param": own_part(p.detach(), piece)}
            for key in self.moments:
                # A group may keep fewer moments than another; zeros replace the missing ones.
                moment = p_state[key] if key in p_state else torch.zeros_like(p)
                tensors[key] = own_part(moment, piece)
            yield ShardState(piece, tensors)

    def load_facts(self, manifest: Mapping[str, Any]) -> None:
        """Takes the optimizer's numbers and rates from a manifest, before `load_state`.

        Raises:
            ConfigError: another optimizer.
        """
        facts = manifest.get(OPTIMIZER_FACTS, {})
        kind = type(self.optimizer).__name__
        if facts.get("class") != kind:
            raise ConfigError(
                f"the checkpoint was written with the optimizer {facts.get('class')}, not {kind}: "
                "give the same one, or start another run folder"
            )
        for name, numbers in facts["numbers"].items():
            for key, number in numbers.items():
                if key not in self._numbers:
                    raise ConfigError(
                        "the checkpoint was written with other settings of the optimizer, which "
                        f"kept {key!r}: give the same ones"
                    )
                template = self._numbers[key]
                if isinstance(template, Tensor):
                    p_number: Any = torch.full_like(template, number)
                else:
                    p_number = type(template)(number)
                self.optimizer.state[self.trainable[name]][key] = p_number
        self.rates = facts["rates"]
        self.is_resumed = bool(self.rates)

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Takes all coordinates that this rank holds."""
        with torch.no_grad():
            # First zeros for all parameters: this rank may hold no row of some.
            for p in self.trainable.values():
                self.optimizer.state[p].update({key: torch.zeros_like(p) for key in self.moments})
            for piece, tensors in states.items():
                p = self.trainable[piece.name]
                p_state = self.optimizer.state[p]
                for key, values in tensors.items():
                    set_own_part(p if key == "param" else p_state[key], piece, values)
