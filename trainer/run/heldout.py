"""Held-out loss and samples, by which a run shows its progress without touching training data."""

from collections.abc import Iterator

import torch
from torch import Tensor

from data.batch import Batch
from data.index.tar_index import ExampleTable
from data.reading.loader import eval_batches
from trainer.engines.base import Engine
from trainer.ranks import distributed
from trainer.tasks.base import Samples, TrainingTask, to_device


class Heldout:
    """Evaluates a model on held-out examples. Every method is collective: sharded engines gather weights in it."""

    def __init__(
        self, table: ExampleTable, task: TrainingTask, *, num_examples: int | None, micro_batch_size: int
    ) -> None:
        self.table = table
        self._task, self.loss_name = task, task.loss_name
        self._make_example = task.make_example(train=False)
        self._num_examples = min(num_examples or len(table), len(table))
        self._micro_batch_size = micro_batch_size

    def _batches(self, count: int, rank: int, world_size: int) -> Iterator[Batch]:
        return eval_batches(
            self.table, self._make_example, self._micro_batch_size, rank, world_size, num_examples=count
        )

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
