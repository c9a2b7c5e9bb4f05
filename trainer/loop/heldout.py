"""Held-out loss and samples, by which a run shows its progress without touching training data."""

import math
from dataclasses import dataclass

import torch
from torch import Tensor

from data.index.tar_index import ExampleTable
from data.reading.loader import eval_batches
from privacy.boundary import Private
from privacy.ranks import collectives
from privacy.ranks.engine import Engine, holds_whole_weights, to_device
from privacy.step.averaging import WeightAverage
from trainer.tasks.base import Samples, TrainingTask
from trainer.tasks.blind import LOOKED_AT, BlindBaseline


@dataclass(frozen=True)
class HeldoutResults:
    """What a model makes of held-out examples.

    Attributes:
        means: the loss and, for a classifier, the accuracy.
        baselines: what to compare them with; see `Heldout.means_and_baselines`.
        loss_of_average: the loss of the averaged weights, where a run keeps them.
    """

    means: dict[str, float]
    baselines: dict[str, float]
    loss_of_average: float | None
    samples: Samples | None


class Heldout:
    """Evaluates a model on held-out examples. Every method is collective: sharded engines gather weights in it.

    `results` is what a run writes; the other methods are its parts.
    """

    def __init__(
        self,
        table: ExampleTable,
        task: TrainingTask,
        *,
        num_examples: int | None,
        micro_batch_size: int,
    ) -> None:
        self.table = table
        self._task, self.loss_name = task, task.loss_name
        self._make_example = task.make_example(train=False)
        self._num_examples = min(num_examples or len(table), len(table))
        self._micro_batch_size = micro_batch_size
        self._blind: dict[str, float] | None = None

    def results(
        self, engine: Engine, average: WeightAverage | None, num_samples: int
    ) -> Private[HeldoutResults]:
        """All that a run says about held-out data; private until somebody declares the data public."""
        means, baselines = self.means_and_baselines(engine)
        loss_of_average = None
        if average is not None and holds_whole_weights(engine):
            with average.in_use():
                loss_of_average = self.loss(engine)
        return Private(
            HeldoutResults(means, baselines, loss_of_average, self.samples(engine, num_samples))
        )

    def loss(self, engine: Engine) -> float:
        """Mean over held-out examples of the model's own loss (captions: nats per token, averaged within a caption first)."""
        return self._means(engine, None)["loss"]

    def means_and_baselines(self, engine: Engine) -> tuple[dict[str, float], dict[str, float]]:
        """The loss and, for a classifier, the accuracy; and what to compare them with. Means over examples that can be decoded.

        blind_loss and the like take no model (`trainer.tasks.blind`); they are counted once. shuffled_loss is the model's own
        where each of two examples, half of the data set apart, has the input (captions: the picture) of the other: a model that
        does not look at it loses nothing by that. Every example is decoded once.
        """
        baseline = self._task.blind_baseline() if self._blind is None else None
        means = self._means(engine, LOOKED_AT.get(self._task.kind), baseline)
        if baseline is not None:
            self._blind = baseline.values()
        shuffled = means.pop("shuffled_loss", math.nan)
        return means, {
            **(self._blind or {}),
            **({} if math.isnan(shuffled) else {"shuffled_loss": shuffled}),
        }

    @torch.no_grad()
    def _means(
        self, engine: Engine, swapped: str | None, baseline: BlindBaseline | None = None
    ) -> dict[str, float]:
        """Means over examples; with the name of an input, also of the loss where pairs of examples have exchanged it."""
        was_training = engine.module.training
        engine.module.eval()
        sums: dict[str, Tensor] = {}  # (sum, count) by name

        def add(name: str, value_B: Tensor, counts_B: Tensor) -> None:
            part = torch.stack([value_B.double().cpu()[counts_B].sum(), counts_B.sum().double()])
            sums[name] = sums.get(name, torch.zeros_like(part)) + part

        batches = eval_batches(
            self.table,
            self._make_example,
            self._micro_batch_size,
            collectives.rank(),
            collectives.world_size(),
            num_examples=self._num_examples,
            paired=True,
        )
        for batch in batches:
            known_B = ~batch.is_padding_B
            for name, value_B in self._task.heldout_values(
                engine, to_device(batch.inputs, engine)
            ).items():
                add(name, value_B, known_B)
            if baseline is not None:
                baseline.add(batch.inputs, batch.is_padding_B)
            if swapped is not None and self._num_examples > 1:
                other_B = torch.arange(len(known_B)) ^ 1
                inputs = {**batch.inputs, swapped: batch.inputs[swapped][other_B]}
                loss_B = self._task.heldout_values(engine, to_device(inputs, engine))["loss"]
                add("shuffled_loss", loss_B, known_B & known_B[other_B])
        engine.module.train(was_training)
        totals = {name: collectives.all_reduce_sum(part) for name, part in sums.items()}
        return {name: float(total[0] / total[1]) for name, total in totals.items()}

    def samples(self, engine: Engine, count: int) -> Samples | None:
        """The model's work on the first `count` held-out examples, made by all ranks alike; None if none can be decoded."""
        if count == 0:
            return None
        first = eval_batches(
            self.table, self._make_example, self._micro_batch_size, num_examples=count
        )
        made = self._task.samples(engine, first)
        return made if made.picture_HWC.size > 0 else None
