"""The self-check of a start: a stand-in for tests about something else, of which it is more than half, and a sum behind it."""

import contextlib
from collections.abc import Iterator, Mapping
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from privacy.clipping import ClippedSum, MicroBatchStats
from privacy.gradients.recorder import Task
from privacy.guards import selfcheck
from privacy.guards.isolation import Isolation
from privacy.guards.unchanged import Part, SelfChecked

COMPARISONS = ("_by_groups", "require_nothing_gathered", "require_unconditional", "require_padding")
"""What `check_against_autograd` asks of a model before it notes that the model has passed."""


@contextlib.contextmanager
def trusted_models() -> Iterator[None]:
    """Lets every model pass the self-check; whatever else a start and a step look at stays."""
    with pytest.MonkeyPatch.context() as patch:
        for name in COMPARISONS:
            patch.setattr(selfcheck, name, lambda *_arguments: None)
        for module in ("trainer.run.start", "privacy.loop.opening"):
            patch.setattr(f"{module}.check_at_size", lambda *_arguments, **_settings: None)
        yield


class WhenForced(Isolation):
    """Checks the micro-batches after a change alone."""

    def _is_chosen(self) -> bool:
        return False


class Guarded:
    """A clipped sum whose micro-batches have to pass what a loop of one's own puts before them."""

    def __init__(self, clipped: ClippedSum) -> None:
        self._clipped = clipped
        model = clipped.model
        shapes = {name: p.shape for name, p in model.named_parameters() if p.requires_grad}
        engine = SimpleNamespace(
            device=clipped.device, compute_dtype=None, module=model, shapes=shapes
        )
        self._mechanism = SimpleNamespace(clipped=clipped, engine=engine, task=clipped.model)
        self._isolation = WhenForced(self._mechanism, {})  # type: ignore[arg-type]
        self._guard = SelfChecked(clipped.model, clipped.model, clipped, self._isolation.force)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._clipped, name)

    def add_micro_batch(
        self, task: Task, inputs: Mapping[str, Tensor], is_padding_B: Tensor
    ) -> MicroBatchStats:
        """Refuses the micro-batch, or adds it."""
        self._guard.task = task
        self._mechanism.task = task
        self._isolation.padding = {name: torch.zeros_like(x[:1]) for name, x in inputs.items()}
        stats = []
        for rows in self._clipped.parts(len(is_padding_B)):
            part = {name: x[rows] for name, x in inputs.items()}
            self._guard.require(part, self._clipped.device)
            for one in self._isolation.watched(iter([Part(part, is_padding_B[rows], 0)])):
                stats.append(self._clipped.add_micro_batch(task, one.inputs, one.is_padding_B))
        return MicroBatchStats(*(torch.stack(column).sum() for column in zip(*stats, strict=True)))
