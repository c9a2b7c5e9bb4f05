"""In which row of which micro-batch of which rank a member of a logical batch is computed: a secret, uniformly random one.

Sums of floating-point numbers round by the places of their terms, so where the others stand must not depend on whether an
example x was drawn. Amplification by sampling (Balle, Barthe and Gaboardi 2018) compares

    (1 - q) N(M0) + q N(M1 + v)    with    (1 - q) N(M0) + q N(M1),

the sums M0 without x, M1 with zeros in its place and M1 + v with x. If the rows behind x closed up when it is not drawn, M0
and M1 would differ by how all others round anew, and by more the larger the batch.

So every step has a public number of rows S, at least the cap, and its members stand in distinct rows that are drawn uniformly
at random. Then M0 and M1 have one distribution, and can be taken to be equal:

    Let W be the other members. If x is not drawn, their rows are a uniform injection of W into the S rows. If x is drawn, all
    rows together are a uniform injection of W and x; its restriction to W is again a uniform injection, and x stands in one of
    the rows that are left, each equally likely. Condition on W, on the rows of W, and on the row that x has if it is drawn. A
    row without an example and the row of an example that contributes nothing hold the same padding, so M0 = M1 =: M, and the
    pair is (1 - q) N(M) + q N(M + v) against N(M), with |v| <= C (1 + r) for every condition (contract 4: x with zeros in its
    place). The hockey-stick divergence is jointly convex, which carries this over to the mixture of all conditions.

The proof needs two things. Rows are independent of the coins and unknown to whoever sees the noised sum: they come from
AES-256-CTR under a key of their own, anew for each step and attempt. And what an example contributes does not depend on what
stands in the other rows, as everywhere in contract 4. A batch that would pass the cap is what the plan charges for the cap.

Where each node reads from a store of its own (data.staging), a rank may get only members that its node has. Examples are then
shared out among the nodes by their number, which is public, and the members of a share stand in random rows of its node, drawn as
above: the proof holds for each share, given the others. It needs a row for every member of a share, whose number is random.
Another place for those that do not fit would depend on who else is there, so a share has rows enough for all but a probability of
2^-100 in each step (`most_of_share`). Only beyond that are all members dealt over all rows. This adds at most
steps x nodes x 2^-100 x (1 + e^epsilon) to delta: less than what is assumed about AES, and than any digit that is printed.
"""

import math
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from ..errors import PrivacyConfigError, PrivacyStateRefused
from .poisson import Ids, coins

_OVERFLOW_BITS = 100
_MOST_TRIES = 4
"""Of 2^21 numbers of 64 bits two are equal with a probability of 2^-23, four times in a row with one of 2^-92."""


class Share(NamedTuple):
    """The examples [start, stop) that one node reads, and its ranks."""

    ranks: tuple[int, ...]
    start: int
    stop: int


def shares_of_nodes(nodes: Sequence[int], num_examples: int) -> list[Share]:
    """Shares out all examples in whole ranges, by the number of ranks of each node.

    Args:
        nodes: the node of each rank, numbered in the order of their first ranks.
    """
    shares, before = [], 0
    ranks_of: list[list[int]] = [[] for _ in range(max(nodes) + 1)]
    for rank, node in enumerate(nodes):
        ranks_of[node].append(rank)
    for ranks in map(tuple, ranks_of):
        bounds = [num_examples * number // len(nodes) for number in (before, before + len(ranks))]
        shares.append(Share(ranks, *bounds))
        before += len(ranks)
    return shares


def most_of_share(expected: float) -> int:
    """A number of members that a share of `expected` on average exceeds with a probability of at most 2^-100.

    Bernstein's inequality for independent (or, without replacement, negatively associated) choices:
    P(X >= expected + t) <= exp(-t^2 / (2 (expected + t / 3))).
    """
    nats = _OVERFLOW_BITS * math.log(2)
    return math.ceil(expected + nats / 3 + math.sqrt(nats * nats / 9 + 2 * nats * expected))


def rows_of_members(row_key: bytes, step: int, count: int, num_rows: int) -> Ids:
    """Distinct rows in [0, num_rows), uniformly random: row j of the result is that of the j-th member.

    Rows in the order of one random 64-bit number each; numbers among which two are equal are passed over together, since a rule
    that decides between equal ones would prefer some rows.

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
    """All rows in random order.

    Raises:
        PrivacyStateRefused: equal numbers in every try, which a working cipher gives with a probability below 2^-90.
    """
    for attempt in range(_MOST_TRIES):
        start = attempt * num_rows
        values = np.concatenate([part for _, part in coins(row_key, step, start, start + num_rows)])
        order = np.argsort(values)
        in_order = values[order]
        if not (in_order[1:] == in_order[:-1]).any():
            return order.astype(np.int64)
    raise PrivacyStateRefused(
        f"step {step}: {num_rows:,} random numbers for as many rows were not all different in {_MOST_TRIES} tries: the cipher of "
        "this machine's cryptography package is broken; install it again"
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
    """Gives a rank (ids, rows): its members in rising order and where they stand among its `rows_per_rank` rows.

    Args:
        rank: any; the parts of all ranks are the members, each once.
        shares: of the nodes, where each reads from a store of its own. Their members stay in rows of their ranks, in the random
            order of all rows.

    Raises:
        PrivacyConfigError: more members than rows.
    """
    here = [
        slice(*np.searchsorted(members, (share.start, share.stop)).tolist()) for share in shares
    ]
    fits = [
        part.stop - part.start <= rows_per_rank * len(share.ranks)
        for share, part in zip(shares, here, strict=True)
    ]
    if shares and all(fits):
        share, part = next(pair for pair in zip(shares, here, strict=True) if rank in pair[0].ranks)
        order = _order_of_rows(row_key, step, rows_per_rank * world_size)
        members, rows = (
            members[part],
            order[np.isin(order // rows_per_rank, share.ranks)][: part.stop - part.start],
        )
    else:
        rows = rows_of_members(row_key, step, len(members), rows_per_rank * world_size)
    mine = rows // rows_per_rank == rank
    return members[mine], rows[mine] % rows_per_rank
