"""Exponential moving average of the weights: post-processing of noised steps, so it costs no privacy.

Sharded like the master weights: each rank averages the coordinates that it owns, whatever the engine. Checkpoints hold it with
the weights; `Checkpoint.load_weights(..., average=True)` gives the averaged model to evaluation and export, and
`in_use` to evaluation during training. The trainer keeps one for `train.ema_decay`, and a `PrivateLoop` what is registered.
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
    """Decay of step 1, 2, ...: at most (1 + step) / (10 + step), so that a short run forgets its initial weights."""
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """average <- decay * average + (1 - decay) * weights after every step, in fp32."""

    _engine: Engine

    def __init__(self, decay: float) -> None:
        if not 0 <= decay < 1:
            raise PrivacyConfigError(
                f"the decay of a weight average is at least 0 and below 1, not {decay}"
            )
        self._decay = decay
        self._average: dict[Piece, Tensor] = {}

    def start(self, engine: Engine, resumed: Checkpoint | None) -> Self:
        """Starts from the checkpoint's average or, where there is none, from the weights as they are."""
        self._engine = engine
        stored = resumed if resumed is not None and AVERAGE in resumed.kinds else None
        for state in engine.state():
            average = state.tensors["param"].detach().float().clone()
            self._average[state.piece] = average
            if stored is not None:
                average.copy_(stored.part(AVERAGE, state.piece))
        return self

    def update(self, step: int) -> None:
        """Moves the average towards the weights after step `step`."""
        for state in self._engine.state():
            weights = state.tensors["param"].detach().float()
            self._average[state.piece].lerp_(weights, 1 - decay_at(step, self._decay))

    @contextlib.contextmanager
    @torch.no_grad()
    def in_use(self) -> Iterator[None]:
        """Inside, the module computes with the average. Collective.

        Raises:
            PrivacyConfigError: the module is in shards.
        """
        if not holds_whole_weights(self._engine):
            raise PrivacyConfigError(
                "the average is used where each rank has the whole model; load it from a checkpoint"
            )
        average = {name: torch.empty(shape.numel()) for name, shape in self._engine.shapes.items()}
        for pieces in collectives.gather_objects(
            {piece: values.cpu() for piece, values in self._average.items()}
        ):
            for piece, values in pieces.items():
                average[piece.name][piece.offset : piece.offset + piece.length] = values
        parameters = {n: p for n, p in self._engine.module.named_parameters() if n in average}
        kept = {name: parameter.detach().clone() for name, parameter in parameters.items()}
        for name, parameter in parameters.items():
            parameter.copy_(average[name].view(parameter.shape))
        try:
            yield
        finally:
            for name, parameter in parameters.items():
                parameter.copy_(kept[name])

    def states(self) -> Iterator[ShardState]:
        """The engine's states with the average added to them, for a checkpoint."""
        for state in self._engine.state():
            yield ShardState(state.piece, {**state.tensors, AVERAGE: self._average[state.piece]})
