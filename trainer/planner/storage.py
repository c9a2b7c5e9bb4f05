"""What a logical step reads: one random read per example, whose mean size the index knows where there is one."""

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from data.index.tar_index import MANIFEST, ExampleTable
from trainer.config.recipe import RunConfig

BYTES_PER_EXAMPLE = 50_000
"""Assumed where no index says better: a JPEG of some 300 pixels a side and its caption."""
SAMPLED = 100_000
"""Examples whose lengths are averaged."""


@dataclass(frozen=True)
class Examples:
    """
    Attributes:
        count: how many there are; None where nobody says.
        mean_bytes: of one example's members in the shard, headers included.
        source: where the mean is from, in words.
    """

    count: int | None
    mean_bytes: float
    source: str


def examples(config: RunConfig, root: Path, bytes_per_example: float | None) -> Examples:
    """From the option, else from the recipe's index, else assumed.

    Raises:
        DataError: the recipe's index is damaged.
    """
    table = _table(config, root)
    count = config.data.num_examples if table is None else len(table)
    if bytes_per_example is not None:
        return Examples(count, bytes_per_example, "--bytes_per_example")
    if table is None or len(table) == 0:
        return Examples(count, BYTES_PER_EXAMPLE, "assumed: no index; --bytes_per_example says better")
    step = -(-len(table) // SAMPLED)
    lengths = table.extents(np.arange(0, len(table), step)).lengths
    return Examples(count, float(lengths.mean()), f"index {config.data.index}")


def _table(config: RunConfig, root: Path) -> ExampleTable | None:
    """The recipe's index, if it is there; the shards need not be."""
    if config.data.index is None or not (root / config.data.index / MANIFEST).exists():
        return None
    return ExampleTable.open(root / config.data.index, root, check_shards=False)
