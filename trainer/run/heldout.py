"""Held-out loss and samples, by which a run shows its progress without touching training data."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from data.batch import Batch
from data.index.tar_index import ExampleTable
from data.reading.loader import eval_batches
from privacy.boundary import Private
from trainer.engines.base import Engine, holds_whole_weights
from trainer.loop.averaging import WeightAverage
from trainer.ranks import distributed
from trainer.tasks.base import Samples, TrainingTask, to_device
from trainer.tasks.blind import LOOKED_AT, blind_baseline


@dataclass(frozen=True)
class HeldoutResults:
    """What a model makes of held-out examples.

    Attributes:
        means: the loss and, for a classifier, the accuracy.
        baselines: what to compare them with; see `Heldout.baselines`.
        loss_of_average: the loss of the averaged weights, where a run keeps them.
    """

    means: dict[str, float]
    baselines: dict[str, float]
    loss_of_average: float | None
    samples: Samples | None

    def scalars(self) -> dict[str, float]:
        """All numbers, by the names of metrics."""
        found = {f"heldout/{name}": value for name, value in (self.means | self.baselines).items()}
        if self.loss_of_average is not None:
            found["heldout/loss_of_average"] = self.loss_of_average
        return found


class Heldout:
    """Evaluates a model on held-out examples. Every method is collective: sharded engines gather weights in it.

    `results` is what a run writes; the other methods are its parts.
    """

    def __init__(
        self, table: ExampleTable, task: TrainingTask, *, num_examples: int | None, micro_batch_size: int
    ) -> None:
        self.table = table
        self._task, self.loss_name = task, task.loss_name
        self._make_example = task.make_example(train=False)
        self._num_examples = min(num_examples or len(table), len(table))
        self._micro_batch_size = micro_batch_size
        self._blind: dict[str, float] | None = None

    def _batches(self, count: int, rank: int, world_size: int, shift: int = 0) -> Iterator[Batch]:
        return eval_batches(
            self.table, self._make_example, self._micro_batch_size, rank, world_size, num_examples=count, shift=shift
        )

    def results(self, engine: Engine, average: WeightAverage | None, num_samples: int) -> Private[HeldoutResults]:
        """All that a run says about held-out data; private until somebody declares the data public."""
        means, baselines = self.means(engine), self.baselines(engine)
        loss_of_average = None
        if average is not None and holds_whole_weights(engine):
            with average.in_use():
                loss_of_average = self.loss(engine)
        return Private(HeldoutResults(means, baselines, loss_of_average, self.samples(engine, num_samples)))

    def loss(self, engine: Engine) -> float:
        """Mean over held-out examples of the model's own loss (captions: nats per token, averaged within a caption first)."""
        return self.means(engine)["loss"]

    @torch.no_grad()
    def means(self, engine: Engine) -> dict[str, float]:
        """The loss and, for a classifier, the accuracy; means over the held-out examples that can be decoded."""
        was_training = engine.module.training
        engine.module.eval()
        totals: dict[str, Tensor] = {}
        count = torch.zeros(1, dtype=torch.float64)
        for batch in self._batches(self._num_examples, distributed.rank(), distributed.world_size()):
            values = self._task.heldout_values(engine, to_device(batch.inputs, engine))
            for name, value_B in values.items():
                part = value_B.double().cpu()[~batch.is_padding_B].sum().view(1)
                totals[name] = totals.get(name, torch.zeros_like(part)) + part
            count += int((~batch.is_padding_B).sum())
        engine.module.train(was_training)
        distributed.all_reduce_sum(count)
        return {name: float(distributed.all_reduce_sum(total) / count) for name, total in totals.items()}

    def samples(self, engine: Engine, count: int) -> Samples | None:
        """The model's work on the first `count` held-out examples, made by all ranks alike; None if none can be decoded."""
        made = self._task.samples(engine, self._batches(count, 0, 1)) if count > 0 else None
        return made if made is not None and made.picture_HWC.size > 0 else None

    @torch.no_grad()
    def baselines(self, engine: Engine) -> dict[str, float]:
        """What the loss is to be compared with, in its units (`trainer.tasks.blind`).

        blind_loss and the like take no model. shuffled_loss is the model's own where every example has the input (captions: the
        picture) of the example half of the data set away: a model that does not look at it loses nothing by that.
        """
        found = self._blind_values()
        swapped, shift = LOOKED_AT.get(self._task.kind), self._num_examples // 2
        if swapped is None or shift == 0:
            return found
        was_training = engine.module.training
        engine.module.eval()
        total = torch.zeros(2, dtype=torch.float64)
        place = distributed.rank(), distributed.world_size()
        own, others = (self._batches(self._num_examples, *place, shift=s) for s in (0, shift))
        for batch, other in zip(own, others, strict=True):
            inputs = {**batch.inputs, swapped: other.inputs[swapped]}
            loss_B = self._task.heldout_values(engine, to_device(inputs, engine))["loss"].double().cpu()
            loss_B = loss_B[~batch.is_padding_B & ~other.is_padding_B]
            total += torch.tensor([float(loss_B.sum()), len(loss_B)], dtype=torch.float64)
        engine.module.train(was_training)
        distributed.all_reduce_sum(total)
        return found | {"shuffled_loss": float(total[0] / total[1])} if total[1] > 0 else found

    def _blind_values(self) -> dict[str, float]:
        """Counted at the first call."""
        if self._blind is None:
            baseline = blind_baseline(self._task)
            for batch in self._batches(self._num_examples, distributed.rank(), distributed.world_size()):
                baseline.add(batch.inputs, batch.is_padding_B)
            self._blind = baseline.values()
        return self._blind
