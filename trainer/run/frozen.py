"""Weights that a recipe does not train: they get no gradient, no noise, no optimizer state and no weight decay.

Engines step the parameters that require a gradient and shard the others with them, but return none of these. A checkpoint
holds them nevertheless, so that it is a whole model: as they were before any engine cast or sharded them.
"""

from collections.abc import Iterator

import torch
from torch import nn

from privacy.step.engine import ShardState, even_layout
from trainer.config.recipe import RunConfig
from trainer.errors import ConfigError
from trainer.ranks import distributed


class FrozenWeights:
    """This rank's even share of the frozen parameters, in CPU memory; empty for a model that is trained whole."""

    def __init__(self, module: nn.Module) -> None:
        """Copies them from a whole module, before an engine takes it."""
        frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
        self.shapes = {name: p.shape for name, p in frozen.items()}
        owned = even_layout(self.shapes, distributed.world_size()).owned_by(distributed.rank())
        self._share = {
            piece: frozen[piece.name]
            .reshape(-1)[piece.offset : piece.offset + piece.length]
            .to("cpu", torch.float32, copy=True)
            for piece in owned
        }

    def states(self) -> Iterator[ShardState]:
        """What a checkpoint holds of them, in addition to the engine's states."""
        return (ShardState(piece, {"param": values}) for piece, values in self._share.items())

    def facts(self) -> dict[str, list[str]]:
        """The names, for a checkpoint's manifest; nothing where there are none."""
        return {"frozen": sorted(self.shapes)} if self.shapes else {}


def require_start(module: nn.Module, config: RunConfig) -> None:
    """Refuses frozen weights that would stay at random numbers for the whole run.

    Raises:
        ConfigError: the recipe trains a part of the model and names no start.
    """
    frozen = [name for name, p in module.named_parameters() if not p.requires_grad]
    if frozen and config.init is None:
        raise ConfigError(
            f"the recipe trains only a part of the model, and the rest ({frozen[0]}, ...) would stay at random: give "
            "init.checkpoint, a run whose encoder is trained"
        )
