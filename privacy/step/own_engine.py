"""The engine of a loop of one's own: a model and an optimizer of torch, whole on every rank or in the shards of FSDP2.

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
"""Key of a manifest: the optimizer's class, and its numbers that are no tensors of a parameter's shape, such as step counts."""


class OwnEngine:
    """See `privacy.ranks.engine.Engine`.

    Args:
        sets_rate: the step's learning rate goes into all groups of the optimizer; else they keep what the caller has put there.

    Attributes:
        trainable: parameters by name.
        moments: names of the tensors that the optimizer keeps of each parameter.
        rates: of the last step, one for each group.
        is_resumed: no step was taken since a checkpoint was loaded.
        is_scheduled: a scheduler is registered, which a resume forwards.
    """

    def __init__(
        self, model: nn.Module, optimizer: torch.optim.Optimizer, *, sets_rate: bool = False
    ) -> None:
        put_away(model)
        self.module, self.optimizer, self.sets_rate = model, optimizer, sets_rate
        self.trainable = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self.shapes = {name: p.shape for name, p in self.trainable.items()}
        first = next(iter(self.trainable.values()))
        self.device, self.compute_dtype = first.device, first.dtype
        is_sharded = any(map(is_dtensor, model.parameters()))
        self.replicated = not is_sharded
        self._rows = RowShards(self.trainable, self.device) if is_sharded else None
        self.layout = (
            self._rows.layout if self._rows else even_layout(self.shapes, collectives.world_size())
        )
        self.moments, self._numbers = probe(optimizer, self.trainable)
        self.rates, self.is_resumed, self.is_scheduled = list[float](), False, False
        self._next_rates = list[float]()
        clear_gradients(model, optimizer)

    def release(self) -> None:
        """Gives the model back."""
        switch_reduction(self.module, on=True)

    def step(self, shards: list[GradShard], *, lr: float) -> None:
        """One step of the optimizer."""
        put_away(self.module)
        clear_gradients(self.module, self.optimizer)
        for name, gradient in self._gradients(shards).items():
            p = self.trainable[name]  # fused steps take gradient and moments for laid out as it is
            p.grad = strided_as(p, gradient)
            stepped = self.optimizer.state.get(p, {})
            stepped.update(
                {key: strided_as(p, x) for key, x in stepped.items() if key in self.moments}
            )
        given = [group.get("lr") for group in self.optimizer.param_groups]
        self.rates = [lr] * len(given) if self.sets_rate else self._next_rates or self.read_rates()
        self._next_rates, self.is_resumed = [], False
        for group, rate in zip(self.optimizer.param_groups, self.rates, strict=True):
            if self.sets_rate or "lr" in group:
                group["lr"] = (
                    rate  # torch's steps compute with a tensor's own dtype, which may be too narrow
                )
        try:
            self.optimizer.step()
        finally:
            for group, value in zip(self.optimizer.param_groups, given, strict=True):
                if (
                    isinstance(value, Tensor) and not self.sets_rate
                ):  # the caller may go on to fill it
                    group["lr"] = value
        clear_gradients(self.module, self.optimizer)

    def _gradients(self, shards: list[GradShard]) -> dict[str, Tensor]:
        """Noised gradients by name: whole ones, or in the shards of their parameters."""
        if self._rows is None:
            return gather_from_owners(
                shards, self.layout, self.shapes, self.compute_dtype, self.device
            )
        rows = self._rows.exchange([shard.values for shard in shards])
        return {name: in_shards(values, self.trainable[name]) for name, values in rows.items()}

    def read_rates(self) -> list[float]:
        """Returns the learning rate of each group, which the next step takes: behind its charge none is read.

        Raises:
            PrivacyConfigError: see `rate_of`.
        """
        self._next_rates = [
            rate_of(group.get("lr", 0.0), f"param_groups[{number}]['lr'] of the optimizer")
            for number, group in enumerate(self.optimizer.param_groups)
        ]
        return self._next_rates

    def facts(self) -> dict[str, Any]:
        """The optimizer as a checkpoint's manifest describes it."""
        numbers: dict[str, dict[str, float]] = {}
        for name, p in self.trainable.items():
            for key, value in self.optimizer.state.get(p, {}).items():
                if key not in self.moments and value is not None:
                    if key not in self._numbers:
                        raise PrivacyConfigError(
                            f"{type(self.optimizer).__name__} keeps {key!r} of {name}, which it did not when the loop was made: "
                            "leave its settings as they were; a scheduler that changes momentum is made before the loop"
                        )
                    numbers.setdefault(name, {})[key] = float(value)
        return {
            OPTIMIZER_FACTS: {
                "class": type(self.optimizer).__name__,
                "numbers": numbers,
                "rates": self.rates,
            }
        }

    def state(self) -> Iterator[ShardState]:
        for piece in self.layout.owned_by(collectives.rank()):
            p = self.trainable[piece.name]
            stepped = self.optimizer.state.get(p, {})
            # A group may keep less than another; zeros stand for what it does not have.
            moments = {
                key: stepped[key] if key in stepped else torch.zeros_like(p) for key in self.moments
            }
            tensors = {"param": p.detach(), **moments}
            yield ShardState(piece, {key: own_part(t, piece) for key, t in tensors.items()})

    def load_facts(self, manifest: Mapping[str, Any]) -> None:
        """Takes what `facts` said, before `load_state`.

        Raises:
            ConfigError: another optimizer.
        """
        known = manifest.get(OPTIMIZER_FACTS, {})
        if known.get("class") != type(self.optimizer).__name__:
            raise ConfigError(
                f"the checkpoint was written with the optimizer {known.get('class')}, not {type(self.optimizer).__name__}: give "
                "the same one, or start another run folder"
            )
        for name, numbers in known["numbers"].items():
            for key, number in numbers.items():
                if key not in self._numbers:
                    raise ConfigError(
                        f"the checkpoint was written with other settings of the optimizer, which kept {key!r}: give the same ones"
                    )
                like = self._numbers[key]
                value = (
                    torch.full_like(like, number)
                    if isinstance(like, Tensor)
                    else type(like)(number)
                )
                self.optimizer.state[self.trainable[name]][key] = value
        self.rates, self.is_resumed = known["rates"], bool(known["rates"])

    def load_state(self, states: Mapping[Piece, Mapping[str, Tensor]], *, num_steps: int) -> None:
        """Takes all coordinates that this rank holds."""
        with torch.no_grad():
            for p in self.trainable.values():  # of some, this rank may hold no row
                self.optimizer.state[p].update({key: torch.zeros_like(p) for key in self.moments})
            for piece, tensors in states.items():
                p = self.trainable[piece.name]
                for key, values in tensors.items():
                    set_own_part(
                        p if key == "param" else self.optimizer.state[p][key], piece, values
                    )
