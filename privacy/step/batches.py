"""Which examples this rank reads in each logical step, and how many micro-batches every rank runs.

Each rank decides the coins of its own slice of the data; the decisions are gathered and the cap is applied to all of them, so
that members do not depend on the number of ranks (contract 1). They stand in random rows of the micro-batches of all ranks
(privacy/sampling/rows.py). Pulling a plan is a collective.
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
from ..sampling.rows import deal, most_of_share, shares_of_nodes


def num_micro_batches(count: int, world_size: int, size: int) -> int:
    """How many micro-batches of `size` every rank runs for a logical batch of `count` examples; at least one."""
    return max(1, math.ceil(math.ceil(count / world_size) / size))


def most_micro_batches(
    sampler: Sampler,
    world_size: int,
    size: int,
    nodes: Sequence[int] = (),
    expected_batch_size: int = 0,
) -> int:
    """How many micro-batches every rank runs for a batch of as many examples as there may be; see `LogicalBatches`."""
    most = sampler.num_examples if sampler.cap is None else sampler.cap
    count = num_micro_batches(most, world_size, size)
    for share in shares_of_nodes(nodes, sampler.num_examples) if nodes else ():
        expected = (share.stop - share.start) * expected_batch_size / sampler.num_examples
        count = max(
            count, num_micro_batches(min(most_of_share(expected), most), len(share.ranks), size)
        )
    return count


def most_rows(
    sampler: Sampler, micro_batch_size: int, nodes: Sequence[int], expected_batch_size: int
) -> int:
    """Rows of one rank for which its sums need room in one logical batch: twice what a step runs, since checks run some too."""
    count = most_micro_batches(
        sampler, collectives.world_size(), micro_batch_size, nodes, expected_batch_size
    )
    return 2 * count * micro_batch_size


class StepBatch(NamedTuple):
    """What one rank reads for one logical step; the data room takes it as it is.

    Attributes:
        step: number of the logical step.
        example_ids: int64, this rank's examples in rising order; reading does not rely on the order.
        example_keys: uint64, one secret random key per example (augmentation, masks).
        num_micro_batches: at least 1, the same on every rank; len(example_ids) <= num_micro_batches * micro_batch_size.
        rows: int64, where each example stands among the num_micro_batches * micro_batch_size rows; one after the other from
            row 0 on if None.
    """

    step: int
    example_ids: Ids
    example_keys: NDArray[np.uint64]
    num_micro_batches: int
    rows: Ids | None = None


@dataclass(frozen=True)
class LogicalBatches:
    """The plans of one session.

    Attributes:
        key, nonce: these and the attempt determine every coin and every row.
        attempts: the ledger's number of earlier attempts by step; a retry takes new coins.
        pads_to_cap: every step runs the number and shapes of micro-batches of the capped batch (contracts 4 and 12). Runs
            without privacy run as many as the sample fills.
        nodes: the node of each rank, where each node reads its share of the examples (data.staging); empty otherwise.
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
        """The plans of steps first_step..last_step, drawn when they are pulled."""
        for step in range(first_step, last_step + 1):
            yield self.plan(step)

    def plan(self, step: int) -> StepBatch:
        """The plan of one step. Collective."""
        rank, world_size = collectives.rank(), collectives.world_size()
        attempt = self.attempts.get(step, 0)
        coin_key = self.sampler.coin_key(self.key, self.nonce, attempt)
        start, stop = slice_bounds(self.sampler.num_examples, world_size, rank)
        members = self.sampler.merge(
            collectives.gather_objects(self.sampler.decide(coin_key, step, start, stop))
        )
        size, shares = self.micro_batch_size, []
        if self.nodes:
            shares = shares_of_nodes(self.nodes, self.sampler.num_examples)
        if self.pads_to_cap:
            count = most_micro_batches(
                self.sampler, world_size, size, self.nodes, self.expected_batch_size
            )
        else:
            count = num_micro_batches(len(members), world_size, size)
            for share in shares:
                here = int(np.diff(np.searchsorted(members, (share.start, share.stop)))[0])
                count = max(count, num_micro_batches(here, len(share.ranks), size))
        row_key = self.key.row_key(self.nonce, attempt)
        ids, rows = deal(
            row_key, step, members, count * self.micro_batch_size, world_size, rank, shares
        )
        keys = example_keys(self.key.example_key(self.nonce, attempt), step, ids)
        return StepBatch(step, ids, keys, count, rows)
