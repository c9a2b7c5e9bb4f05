"""Evaluates loss and samples on held-out data, which shows progress without training data."""

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
from trainer.tasks.baselines import SWAPPED_INPUT, BlindBaseline


@dataclass(frozen=True)
class HeldoutResults:
    """Holds a model's results on held-out examples.

    Attributes:
        means: the loss and, for a classifier, the accuracy.
        baselines: losses to compare them with; see `Heldout.means_and_baselines`.
        loss_of_average: the loss of the averaged weights, where a run keeps them.
    """

    means: dict[str, float]
    baselines: dict[str, float]
    loss_of_average: float | None
    samples: Samples | None


class Heldout:
    """Evaluates a model on held-out examples.

    Every method is collective, since sharded engines gather weights in it. A run writes `results`;
    the other methods are its parts.
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
        self._task = task
        self.loss_name = task.loss_name
        self._make_example = task.make_example(train=False)
        self._num_examples = min(num_examples or len(table), len(table))
        self._micro_batch_size = micro_batch_size
        self._blind: dict[str, float] | None = None

    def results(
        self, engine: Engine, average: WeightAverage | None, num_samples: int
    ) -> Private[HeldoutResults]:
        """Returns the results of a run; private until the recipe declares the data public."""
        means, baselines = self.means_and_baselines(engine)
        loss_of_average = None
        if average is not None and holds_whole_weights(engine):
            with average.in_use():
                loss_of_average = self.loss(engine)
        samples = self.samples(engine, num_samples)
        return Private(HeldoutResults(means, baselines, loss_of_average, samples))

    def loss(self, engine: Engine) -> float:
        """Returns the mean of the model's own loss over held-out examples.

        That of captions is in nats per token, averaged within a caption first.
        """
        return self._means(engine, None)["loss"]

    def means_and_baselines(self, engine: Engine) -> tuple[dict[str, float], dict[str, float]]:
        """Returns loss and, for a classifier, accuracy, and the losses to compare them with.

        All are means over examples that can be decoded; every example is decoded once. blind_loss
        and the like take no model (`trainer.tasks.baselines`); they are counted once. shuffled_loss
        is the model's own where each of two examples, half of the data set apart, has the input
        (captions: the picture) of the other: a model that ignores this input loses nothing.
        """
        baseline = self._task.blind_baseline() if self._blind is None else None
        means = self._means(engine, SWAPPED_INPUT.get(self._task.kind), baseline)
        if baseline is not None:
            self._blind = baseline.values()
        baselines = dict(self._blind or {})
        shuffled = means.pop("shuffled_loss", math.nan)
        if not math.isnan(shuffled):
            baselines["shuffled_loss"] = shuffled
        return means, baselines

    @torch.no_grad()
    def _means(
        self, engine: Engine, swapped: str | None, baseline: BlindBaseline | None = None
    ) -> dict[str, float]:
        """Returns means over examples, by name.

        Args:
            swapped: an input that pairs of examples exchange for `shuffled_loss`.
            baseline: counts the examples on the way.
        """
        was_training = engine.module.training
        engine.module.eval()
        sums: dict[str, Tensor] = {}  # (sum, count) by name
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
            is_example_B = ~batch.is_padding_B
            values = self._task.heldout_values(engine, to_device(batch.inputs, engine))
            scores = [(name, value_B, is_example_B) for name, value_B in values.items()]
            if baseline is not None:
                baseline.add(batch.inputs, batch.is_padding_B)
            if swapped is not None and self._num_examples > 1:
                partner_B = torch.arange(len(is_example_B)) ^ 1
                inputs = {**batch.inputs, swapped: batch.inputs[swapped][partner_B]}
                values = self._task.heldout_values(engine, to_device(inputs, engine))
                has_both_B = is_example_B & is_example_B[partner_B]
                scores.append(("shuffled_loss", values["loss"], has_both_B))
            for name, value_B, counts_B in scores:
                total = value_B.double().cpu()[counts_B].sum()
                part = torch.stack([total, counts_B.sum().double()])
                sums[name] = sums.get(name, torch.zeros_like(part)) + part
        engine.module.train(was_training)
        totals = {name: collectives.all_reduce_sum(part) for name, part in sums.items()}
        return {name: float(total[0] / total[1]) for name, total in totals.items()}

    def samples(self, engine: Engine, count: int) -> Samples | None:
        """Returns the model's work on the first `count` held-out examples, equal on all ranks.

        None if none of them can be decoded.
        """
        if count == 0:
            return None
        batches = eval_batches(
            self.table, self._make_example, self._micro_batch_size, num_examples=count
        )
        samples = self._task.samples(engine, batches)
        return samples if samples.picture_HWC.size > 0 else None
