"""The row of a micro-batch of a rank in which a member is computed: secret and uniformly random.

The other members then have rows of one distribution, whether an example was drawn or not, and
amplification by sampling holds for sums in floating point. docs/rows.md has the proof. Rows are
independent of the coins, and come from a key of their own, anew for each step and attempt.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PrivacyConfigError, PrivacyStateRefused
from .poisson import Ids, coins

_OVERFLOW_BITS = 100
_MOST_TRIES = 4
"""Two of 2^21 numbers of 64 bits are equal with probability 2^-23, in four tries with 2^-92."""


class Share(NamedTuple):
    """The examples [start, stop) that one node reads, and the ranks of the node."""

    ranks: tuple[int, ...]
    start: int
    stop: int


def shares_of_nodes(nodes: Sequence[int], num_examples: int) -> list[Share]:
    """Returns each node's share of the examples: whole ranges, by its number of ranks.

    Args:
        nodes: the node of each rank, numbered in the order of their first ranks.
    """
    ranks_of: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        ranks_of[node].append(rank)
    shares = []
    # Ranks of the nodes that have their share.
    num_ranks = 0
    for ranks in ranks_of:
        start = num_examples * num_ranks // len(nodes)
        num_ranks += len(ranks)
        stop = num_examples * num_ranks // len(nodes)
        shares.append(Share(tuple(ranks), start, stop))
    return shares


def share_bound(expected: float) -> int:
    """Returns a number of members that a share exceeds with a probability of at most 2^-100.

    Bernstein's inequality for independent (or, without replacement, negatively associated) choices:
    P(X >= expected + t) <= exp(-t^2 / (2 (expected + t / 3))).

    Args:
        expected: the share's members on average.
    """
    nats = _OVERFLOW_BITS * math.log(2)
    return math.ceil(expected + nats / 3 + math.sqrt(nats * nats / 9 + 2 * nats * expected))


def rows_of_members(row_key: bytes, step: int, count: int, num_rows: int) -> Ids:
    """Returns distinct rows in [0, num_rows), uniformly random: row j is that of the j-th member.

    Args:
        row_key: of the attempt (`SamplingKey.row_key`).
        count: members, at most `num_rows`.

    Raises:
        PrivacyConfigError: more members than rows.
    """
    if not 0 <= count <= num_rows:
        raise PrivacyConfigError(f"{count} members do not fit {num_rows} rows")
    return _order_of_rows(row_key, step, num_rows)[:count]


def _order_of_rows(row_key: bytes, step: int, num_rows: int) -> Ids:
    """Returns all rows in random order: sorted by one random 64-bit number each.

    Numbers two of which are equal are drawn again together, since a rule that decides between
    equal ones would prefer some rows.

    Raises:
        PrivacyStateRefused: equal numbers in every try, which a working cipher gives with a
            probability below 2^-90.
    """
    for attempt in range(_MOST_TRIES):
        start = attempt * num_rows
        chunks = coins(row_key, step, start, start + num_rows)
        numbers = np.concatenate([chunk for _, chunk in chunks])
        order = np.argsort(numbers)
        in_order = numbers[order]
        if not (in_order[1:] == in_order[:-1]).any():
            return order.astype(np.int64)
    raise PrivacyStateRefused(
        f"step {step}: {num_rows:,} random numbers for as many rows were not all different in "
        f"{_MOST_TRIES} tries: the cipher of this machine's cryptography package is broken; "
        "install it again"
    )


def deal(
    row_key: bytes,
    step: int,
    members: Ids,
    rows_per_rank: int,
    world_size: int,
    rank: int,
    shares: Sequence[Share] = (),
) -> tuple[Ids, Ids]:
    """Returns (ids, rows) of a rank: its members in rising order, and their rows.

    Args:
        members: of all ranks; each gets one row of one rank.
        rows_per_rank: `rows` are in [0, rows_per_rank).
        shares: of the nodes, where each reads from a store of its own. Their members stay in rows
            of their ranks, in the random order of all rows.

    Raises:
        PrivacyConfigError: more members than rows.
    """
    num_rows = rows_per_rank * world_size
    share_members = []
    for share in shares:
        first, last = np.searchsorted(members, (share.start, share.stop))
        share_members.append(members[first:last])
    all_fit = all(
        len(part) <= rows_per_rank * len(share.ranks)
        for share, part in zip(shares, share_members, strict=True)
    )
    if shares and all_fit:
        node = next(number for number, share in enumerate(shares) if rank in share.ranks)
        order = _order_of_rows(row_key, step, num_rows)
        node_rows = order[np.isin(order // rows_per_rank, shares[node].ranks)]
        members = share_members[node]
        rows = node_rows[: len(members)]
    else:
        # All members, not only those that do not fit: their rows would depend on the others.
        rows = rows_of_members(row_key, step, len(members), num_rows)
    is_of_rank = rows // rows_per_rank == rank
    return members[is_of_rank], rows[is_of_rank] % rows_per_rank
