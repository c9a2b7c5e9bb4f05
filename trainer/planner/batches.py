"""How many micro-batches a logical batch takes, how many of their rows are padding, and what a step reads.

Every rank runs the same number of micro-batches of the same size, whose rows without an example cost as much as examples and
count for nothing. Every step of a private run takes the micro-batches of the capped batch (privacy/step/batches.py). Elsewhere
their number follows the Poisson batch, and a size that just holds B / W examples needs one more in half of the steps.
A step makes one random read for each example, whose mean size the index knows where there is one.
"""

import math
from dataclasses import dataclass
from pathlib import Path
from statistics import NormalDist, fmean

import numpy as np

from data.index.shards import find_shards
from data.index.tar_index import MANIFEST, ExampleTable
from privacy.plan import PrivacyPlan
from privacy.sampling.poisson import default_cap
from privacy.step.batches import num_micro_batches
from trainer.config.recipe import RunConfig

WORTH_A_NOTE = 0.05
"""Padding is noted from this share of the rows on."""
_QUANTILES = 64
"""This number of equally likely batches stands for a fluctuating one."""
_SMALLEST = 4
"""No micro-batch below this part of the recipe's is proposed: kernels would be busy with less."""


@dataclass(frozen=True)
class Batches:
    """How many examples the logical batches hold.

    Attributes:
        counts: numbers of examples, each equally likely.
    """

    counts: tuple[int, ...]

    @classmethod
    def of(cls, config: RunConfig, plan: PrivacyPlan | None) -> "Batches":
        """The batches of a recipe; without a plan (nobody knows the number of examples) they have the default cap."""
        expected = config.privacy.expected_batch_size
        if config.data.streaming:
            return cls((expected,))
        cap = default_cap(expected) if plan is None else plan.max_batch_size
        if config.privacy.enabled:
            return cls((cap,))
        spread = NormalDist(expected, math.sqrt(expected))
        quantiles = (spread.inv_cdf((i + 0.5) / _QUANTILES) for i in range(_QUANTILES))
        return cls(tuple(min(cap, max(1, round(count))) for count in quantiles))

    def micro_batches(self, world_size: int, size: int) -> float:
        """Micro-batches of each rank, on average over steps."""
        return fmean(num_micro_batches(count, world_size, size) for count in self.counts)

    def padding(self, world_size: int, size: int) -> float:
        """Share of the rows that are padding and need not be: those between a small batch and its cap do not count."""
        rows = self.micro_batches(world_size, size) * size * world_size
        return 1 - fmean(self.counts) / rows

    def better_size(self, world_size: int, size: int) -> int | None:
        """The largest smaller micro-batch that wastes less than WORTH_A_NOTE, or least.

        None where this one does not waste more, or none is much better.
        """
        if self.padding(world_size, size) <= WORTH_A_NOTE:
            return None
        step = 8 if size > 8 else 1
        choices = range((size - 1) // step * step, max(1, size // _SMALLEST) - 1, -step)
        padding = {choice: self.padding(world_size, choice) for choice in choices}
        if not padding:
            return None
        best = next((c for c, share in padding.items() if share <= WORTH_A_NOTE), min(padding, key=padding.__getitem__))
        return best if padding[best] < 0.75 * self.padding(world_size, size) else None

    def note(self, world_size: int, size: int) -> str | None:
        """One line where padding wastes more than WORTH_A_NOTE of the rows, and which micro-batch would do better."""
        share = self.padding(world_size, size)
        if share <= WORTH_A_NOTE:
            return None
        examples, better = math.ceil(fmean(self.counts) / world_size), self.better_size(world_size, size)
        number = self.micro_batches(world_size, size)
        batches = f"{number:.4g} micro-batch{'' if number == 1 else 'es'}"
        line = f"padding: {share:.1%} of the rows, {examples:,} examples a rank in {batches} of {size:,}"
        if better is None:
            return f"{line}; no train.micro_batch_size a little below does much better"
        return f"{line}; train.micro_batch_size={better} leaves {self.padding(world_size, better):.1%}"


BYTES_PER_EXAMPLE = 50_000
"""Assumed where no index says better: a JPEG of some 300 pixels a side and its caption."""
SAMPLED = 100_000
"""Examples whose lengths are averaged."""


@dataclass(frozen=True)
class Examples:
    """The examples of a recipe.

    Attributes:
        count: how many there are; None where nobody says.
        mean_bytes: mean size of an example's members in the shard, headers included.
        source: where the mean is from, in words.
        num_shards: how many shards they lie in; None where no index says.
    """

    count: int | None
    mean_bytes: float
    source: str
    num_shards: int | None = None


def examples(config: RunConfig, root: Path, bytes_per_example: float | None) -> Examples:
    """The examples by the option, else by the recipe's index or that of its folder of shards, else by assumption.

    Raises:
        DataError: the index is damaged, or that of a folder is of other shards than there are now.
    """
    index, own = config.data.index, root / Path(config.data.shards).expanduser() / "index"
    table = None
    if index is not None and (root / index / MANIFEST).exists():  # the shards need not be there
        table = ExampleTable.open(root / index, root, check_shards=False)
    elif index is None and (own / MANIFEST).exists():  # what `prepare.py index` wrote for this folder
        shards = find_shards(config.data.shards, root)
        index, table = str(own), ExampleTable.open(own, shards.root)
        table.require_shards(shards)
    count = config.data.num_examples if table is None else len(table)
    num_shards = None if table is None else len(table.entries)
    if bytes_per_example is not None:
        return Examples(count, bytes_per_example, "--bytes_per_example", num_shards)
    if table is None or len(table) == 0:
        return Examples(count, BYTES_PER_EXAMPLE, "assumed: no index; --bytes_per_example says better")
    step = -(-len(table) // SAMPLED)
    lengths = table.extents(np.arange(0, len(table), step)).lengths
    return Examples(count, float(lengths.mean()), f"index {index}", num_shards)
