"""Which examples this rank reads in each logical step, and how many micro-batches every rank runs.

Each rank decides the coins of its own slice of the data. The decisions are gathered and the cap is
applied to all of them, so members do not depend on the number of ranks (contract 1). They get
random rows in the micro-batches of all ranks (privacy/sampling/rows.py). Pulling a batch is a
collective.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from ..ranks import collectives
from ..sampling.keys import SamplingKey
from ..sampling.poisson import Ids, Sampler, example_keys, slice_bounds
from ..sampling.rows import deal, share_bound, shares_of_nodes


def num_micro_batches(count: int, world_size: int, size: int) -> int:
    """Returns how many micro-batches of `size` each rank runs for `count` examples; at least 1."""
    return max(1, math.ceil(math.ceil(count / world_size) / size))


def max_micro_batches(
    sampler: Sampler,
    world_size: int,
    size: int,
    nodes: Sequence[int] = (),
    expected_batch_size: int = 0,
) -> int:
    """Returns how many micro-batches every rank runs for the largest batch that can be drawn.

    Args:
        size: examples of a micro-batch.
        nodes: see `LogicalBatches`; so is `expected_batch_size`.
    """
    largest_batch = sampler.num_examples if sampler.cap is None else sampler.cap
    count = num_micro_batches(largest_batch, world_size, size)
    shares = shares_of_nodes(nodes, sampler.num_examples) if nodes else []
    for share in shares:
        expected_members = (share.stop - share.start) * expected_batch_size / sampler.num_examples
        largest_part = min(share_bound(expected_members), largest_batch)
        count = max(count, num_micro_batches(largest_part, len(share.ranks), size))
    return count


def max_rows(
    sampler: Sampler, micro_batch_size: int, nodes: Sequence[int], expected_batch_size: int
) -> int:
    """Returns the rows of one rank for which its sums need room in one logical batch.

    These are twice as many as a step runs, since the checks of a micro-batch run some, too.
    """
    count = max_micro_batches(
        sampler, collectives.world_size(), micro_batch_size, nodes, expected_batch_size
    )
    return 2 * count * micro_batch_size


class StepBatch(NamedTuple):
    """The examples that one rank reads for one logical step; the data room takes it as it is.

    Attributes:
        step: number of the logical step.
        example_ids: int64, this rank's examples in rising order, on which reading does not rely.
        example_keys: uint64, one secret random key per example (augmentation, masks).
        num_micro_batches: at least 1, the same on every rank;
            len(example_ids) <= num_micro_batches * micro_batch_size.
        rows: int64, the row of each example among the num_micro_batches * micro_batch_size rows;
            one after the other from row 0 on if None.
    """

    step: int
    example_ids: Ids
    example_keys: NDArray[np.uint64]
    num_micro_batches: int
    rows: Ids | None = None


@dataclass(frozen=True)
class LogicalBatches:
    """Draws the batches of one session.

    Attributes:
        key: the sampling key. With `nonce` and the attempt it determines every coin and every row.
        nonce: of the session.
        attempts: the ledger's number of earlier attempts by step; a retry takes new coins.
        pads_to_cap: every step runs the number and shapes of micro-batches of the capped batch
            (contracts 4 and 12). Runs without privacy run as many as the sample fills.
        nodes: the node of each rank, where each node reads its share of the examples
            (data.staging); empty otherwise.
        expected_batch_size: needed with `nodes`.
    """

    sampler: Sampler
    key: SamplingKey
    nonce: bytes
    attempts: Mapping[int, int]
    micro_batch_size: int
    pads_to_cap: bool = True
    nodes: tuple[int, ...] = ()
    expected_batch_size: int = 0

    def plans(self, first_step: int, last_step: int) -> Iterator[StepBatch]:
        """Yields the batches of steps first_step..last_step, each drawn when it is pulled."""
        for step in range(first_step, last_step + 1):
            yield self.plan(step)

    def plan(self, step: int) -> StepBatch:
        """Draws this rank's part of a step's batch. Collective."""
        rank = collectives.rank()
        world_size = collectives.world_size()
        attempt = self.attempts.get(step, 0)
        coin_key = self.sampler.coin_key(self.key, self.nonce, attempt)
        start, stop = slice_bounds(self.sampler.num_examples, world_size, rank)
        decisions = collectives.gather_objects(self.sampler.decide(coin_key, step, start, stop))
        members = self.sampler.merge(decisions)
        shares = shares_of_nodes(self.nodes, self.sampler.num_examples) if self.nodes else []
        size = self.micro_batch_size
        if self.pads_to_cap:
            count = max_micro_batches(
                self.sampler, world_size, size, self.nodes, self.expected_batch_size
            )
        else:
            count = num_micro_batches(len(members), world_size, size)
            for share in shares:
                bounds = np.searchsorted(members, (share.start, share.stop))
                share_count = int(np.diff(bounds)[0])
                count = max(count, num_micro_batches(share_count, len(share.ranks), size))
        ids, rows = deal(
            self.key.row_key(self.nonce, attempt),
            step,
            members,
            count * size,
            world_size,
            rank,
            shares,
        )
        keys = example_keys(self.key.example_key(self.nonce, attempt), step, ids)
        return StepBatch(step, ids, keys, count, rows)
