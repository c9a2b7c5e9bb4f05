"""How many rows a logical batch takes and how many of them are padding; what a step reads, and what staging copies.

Every rank runs the same number of micro-batches of the same size, whose rows without an example cost as much as examples and
count for nothing. Every step of a private run takes the micro-batches of the capped batch (privacy/step/batches.py); without
privacy their number follows the batch, and is planned for the expected one.
A step makes one random read for each example, whose mean size the index knows where there is one.
"""

import math
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.index.shards import find_shards
from data.index.tar_index import MANIFEST, ExampleTable
from privacy.sampling.rows import most_of_share
from privacy.step.batches import num_micro_batches
from trainer.config.recipe import RunConfig

WORTH_A_NOTE = 0.05
"""Padding is noted from this share of the rows on."""
_SMALLEST = 4
"""No micro-batch below this part of the recipe's is proposed: kernels would be busy with less."""


def micro_batches(config: RunConfig, count: int, world_size: int, ranks_per_node: int) -> int:
    """Micro-batches of each rank for `count` examples.

    Where every node reads its own share (`data.staging`), there are rows for the largest share.
    """
    size = config.train.micro_batch_size
    number = num_micro_batches(count, world_size, size)
    if config.data.staging is None or not config.privacy.enabled or ranks_per_node >= world_size:
        return number
    share = min(count, most_of_share(config.privacy.expected_batch_size * ranks_per_node / world_size))
    return max(number, num_micro_batches(share, ranks_per_node, size))


def padding(count: int, world_size: int, size: int) -> float:
    """Share of the rows that are padding and need not be: those between a small batch and its cap do not count."""
    return 1 - count / (num_micro_batches(count, world_size, size) * size * world_size)


def padding_note(count: int, world_size: int, size: int) -> str | None:
    """One line where padding wastes more than WORTH_A_NOTE of the rows, and the largest smaller micro-batch that does not."""
    share = padding(count, world_size, size)
    if share <= WORTH_A_NOTE:
        return None
    step = 8 if size > 8 else 1
    smaller = range((size - 1) // step * step, max(1, size // _SMALLEST) - 1, -step)
    better = next((choice for choice in smaller if padding(count, world_size, choice) <= WORTH_A_NOTE), None)
    number = num_micro_batches(count, world_size, size)
    batches = f"{number:,} micro-batch{'' if number == 1 else 'es'}"
    line = (
        f"padding: {share:.1%} of the rows, {math.ceil(count / world_size):,} examples a rank in {batches} of {size:,}"
    )
    if better is None:
        return f"{line}; no train.micro_batch_size a little below does much better"
    return f"{line}; train.micro_batch_size={better} leaves {padding(count, world_size, better):.1%}"


BYTES_PER_EXAMPLE = 50_000
"""Assumed where no index says better: a JPEG of some 300 pixels a side and its caption."""
SAMPLED = 100_000
"""Examples whose lengths are averaged."""
EXAMPLES_PER_SHARD = 10_000
"""Assumed where no index says better: what the makers of web-scale sets put into one."""


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


def examples(config: RunConfig, root: Path) -> Examples:
    """The examples by the recipe's index or that of its folder of shards, else by assumption.

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
    if table is None:
        return Examples(config.data.num_examples, BYTES_PER_EXAMPLE, "assumed: there is no index")
    lengths = table.extents(np.arange(0, len(table), -(-len(table) // SAMPLED))).lengths
    return Examples(len(table), float(lengths.mean()), f"index {index}", len(table.entries))


def staged_bytes(examples: Examples, count: int, world_size: int, ranks_per_node: int) -> float:
    """Bytes that staging copies to each node (`data.staging`), of shards that hold `count` examples."""
    shards = examples.num_shards or math.ceil(count / EXAMPLES_PER_SHARD)
    # A shard on the border between two nodes is copied to both.
    borders = 2 if ranks_per_node < world_size else 0
    per_node = math.ceil(shards * min(1.0, ranks_per_node / world_size)) + borders
    return min(per_node, shards) * examples.mean_bytes * count / shards
