"""Exponential moving average of the weights: post-processing of noised steps, free of privacy cost.

The average is sharded like the master weights: each rank averages the coordinates that it owns,
whatever the engine. Checkpoints hold it beside the weights: `Checkpoint.load_weights(...,
average=True)` loads it for evaluation and export, and `in_use` for evaluation during training. The
trainer keeps an average for `train.ema_decay`, and a `PrivateLoop` the one that is registered.
"""

import contextlib
from collections.abc import Iterator
from typing import Self

import torch
from torch import Tensor

from ..checkpoints.read import AVERAGE, Checkpoint
from ..errors import PrivacyConfigError
from ..ranks import collectives
from ..ranks.engine import Engine, Piece, ShardState, holds_whole_weights


def decay_at(step: int, decay: float) -> float:
    """Returns the decay of a step, which counts from 1: at most (1 + step) / (10 + step).

    So a short run forgets its initial weights.
    """
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """Computes average <- decay * average + (1 - decay) * weights after every step, in fp32."""

    _engine: Engine

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise PrivacyConfigError(
                f"the decay of a weight average is at least 0 and below 1, not {decay}"
            )
        self._decay = decay
        self._average: dict[Piece, Tensor] = {}

    def start(self, engine: Engine, resumed: Checkpoint | None) -> Self:
        """Starts from the checkpoint's average, or from the present weights if it has none."""
        self._engine = engine
        has_average = resumed is not None and AVERAGE in resumed.kinds
        for state in engine.state():
            average = state.tensors["param"].detach().float().clone()
            self._average[state.piece] = average
            if resumed is not None and has_average:
                average.copy_(resumed.part(AVERAGE, state.piece))
        return self

    def update(self, step: int) -> None:
        """Moves the average towards the weights after step `step`."""
        for state in self._engine.state():
            weights = state.tensors["param"].detach().float()
            self._average[state.piece].lerp_(weights, 1 - decay_at(step, self._decay))

    @contextlib.contextmanager
    @torch.no_grad()
    def in_use(self) -> Iterator[None]:
        """Yields while the module computes with the average. Collective.

        Raises:
            PrivacyConfigError: the module is in shards.
        """
        if not holds_whole_weights(self._engine):
            raise PrivacyConfigError(
                "the average is used where each rank has the whole model; load it from a checkpoint"
            )
        average = {name: torch.empty(shape.numel()) for name, shape in self._engine.shapes.items()}
        owned_average = {piece: values.cpu() for piece, values in self._average.items()}
        for rank_average in collectives.gather_objects(owned_average):
            for piece, values in rank_average.items():
                average[piece.name][piece.offset : piece.offset + piece.length] = values
        parameters = {n: p for n, p in self._engine.module.named_parameters() if n in average}
        weights = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(average[name].view(parameter.shape))
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(weights[name])

    def states(self) -> Iterator[ShardState]:
        """Yields the engine's states with the average added to them, for a checkpoint."""
        for state in self._engine.state():
            yield ShardState(state.piece, {**state.tensors, AVERAGE: self._average[state.piece]})
