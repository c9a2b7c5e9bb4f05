"""Exponential moving average of the weights: post-processing of noised steps, so it costs no privacy.

Sharded like the master weights: each rank averages the coordinates that it owns, whatever the engine. Checkpoints hold it beside
the weights; `Checkpoint.load_weights(..., average=True)` gives the averaged model to evaluation and export.
"""

from collections.abc import Iterator

from torch import Tensor

from trainer.checkpoint import AVERAGE, Checkpoint
from trainer.engines.base import Engine, Piece, ShardState


def decay_at(step: int, decay: float) -> float:
    """Decay of step 1, 2, ...: at most (1 + step) / (10 + step), so that a short run forgets its initial weights."""
    return min(decay, (1 + step) / (10 + step))


class WeightAverage:
    """average <- decay * average + (1 - decay) * weights after every step, in fp32.

    Starts from the checkpoint's average or, where there is none, from the weights as they are.
    """

    def __init__(self, engine: Engine, decay: float, resumed: Checkpoint | None) -> None:
        self._engine = engine
        self._decay = decay
        self._average: dict[Piece, Tensor] = {}
        kept = resumed is not None and AVERAGE in resumed.kinds
        for state in engine.state():
            weights = state.tensors["param"].detach().float()
            self._average[state.piece] = (
                resumed.part(AVERAGE, state.piece).to(weights.device)
                if resumed is not None and kept
                else weights.clone()
            )

    def update(self, step: int) -> None:
        """After step `step`."""
        for state in self._engine.state():
            weights = state.tensors["param"].detach().float()
            self._average[state.piece].lerp_(weights, 1 - decay_at(step, self._decay))

    def states(self) -> Iterator[ShardState]:
        """The engine's states with the average beside them, for a checkpoint."""
        for state in self._engine.state():
            yield ShardState(state.piece, {**state.tensors, AVERAGE: self._average[state.piece]})
