"""Which examples of an import stay, over all of its parts: no copies, and at most k examples of one owner.

Exact copies have equal digests. Near copies have perceptual hashes within a Hamming distance; they are found without comparing
all pairs, and none is missed: when two hashes differ in at most d of 64 bits and the bits are cut into b bands, at least b - d
bands are equal. So for each choice of b - d bands the hashes are sorted by these bits, and only hashes that agree on all of them
are compared. More examples take more bands, so that few agree by chance.

An owner's whole contribution is a group of at most k examples. The choice among an owner's examples follows a keyed hash of each
example's content: no order of files can steer it, and an owner's choice depends on that owner's examples alone.
"""

import hashlib
from collections import Counter
from collections.abc import Sequence
from itertools import combinations, pairwise
from math import comb

import numpy as np
from scipy.sparse import coo_array
from scipy.sparse.csgraph import connected_components

from data.errors import DataError
from data.importers.convert import Converted, owner_digest

BITS = 64
ALIKE = 8
"""A split separates more than the removal of copies removes: a held-out picture should not look like a training picture."""
_MAX_PASSES = 100


def choose(
    parts: Sequence[Converted], duplicate_distance: int | None, max_per_owner: int | None, seed: int
) -> tuple[np.ndarray, Counter[str]]:
    """Which examples stay, bool over all parts in order; and how many go for what reason.

    Raises:
        DataError: no example is left.
    """
    digests, hashes, has_hash, owners = (np.concatenate([part[k] for part in parts]) for k in range(4))
    kept, dropped = np.ones(len(digests), dtype=bool), Counter[str]()

    def drop(rows: np.ndarray, reason: str) -> None:
        kept[rows] = False
        dropped[reason] += len(rows)

    drop(np.flatnonzero(exact_duplicates(digests)), "exact_duplicate")
    if duplicate_distance is not None:
        rows = np.flatnonzero(kept & has_hash)
        drop(rows[near_duplicates(hashes[rows], duplicate_distance)], "near_duplicate")
    if max_per_owner is not None:
        rows = np.flatnonzero(kept)
        drop(rows[over_limit(owners[rows], digests[rows], max_per_owner, seed)], "owner_limit")
    if not kept.any():
        counts = dropped + sum((Counter(part.dropped) for part in parts), Counter[str]())
        reasons = ", ".join(f"{count} {reason}" for reason, count in counts.items())
        raise DataError(f"no example is left ({reasons or 'the source is empty'})")
    return kept, dropped


def held_out(parts: Sequence[Converted], share: float, seed: int) -> np.ndarray:
    """Which examples are held out: about `share` of them, by a keyed hash, with everything that is alike on one side.

    Equal examples, examples whose pictures' hashes differ in at most `ALIKE` bits, and those of the same known owner are in one
    group, also through others. A group goes by the smallest keyed hash of its contents.

    Returns:
        bool over all parts in order.
    """
    digests, hashes, has_hash, owners = (np.concatenate([part[k] for part in parts]) for k in range(4))
    if share == 0:
        return np.zeros(len(digests), dtype=bool)
    edges = []
    known = np.flatnonzero((owners != np.frombuffer(owner_digest(""), np.uint8)).any(axis=1))
    for rows, values in ((np.arange(len(digests)), _as_scalars(digests)), (known, _as_scalars(owners[known]))):
        _, first, inverse = np.unique(values, return_index=True, return_inverse=True)
        edges.append(np.stack([rows, rows[first][inverse]], axis=1))
    rows = np.flatnonzero(has_hash)
    unique_U, first_U, inverse_N = np.unique(hashes[rows], return_index=True, return_inverse=True)
    edges += [np.stack([rows, rows[first_U][inverse_N]], axis=1), rows[first_U][near_pairs(unique_U, ALIKE)]]
    ends = np.concatenate(edges)
    graph = coo_array((np.ones(len(ends), dtype=bool), (ends[:, 0], ends[:, 1])), shape=(len(digests),) * 2)
    _, group_N = connected_components(graph, directed=False)
    ranks_N = keyed_ranks(digests, seed, b"held out")
    smallest = np.full(group_N.max() + 1, np.iinfo(np.uint64).max, dtype=np.uint64)
    np.minimum.at(smallest, group_N, ranks_N)
    # The smallest of k hashes is below the share more often than one hash is, so a group takes a hash of its smallest.
    again = keyed_ranks(smallest.view(np.uint8).reshape(-1, 8), seed, b"group")
    return (again < np.uint64(share * 2**64))[group_N]


def exact_duplicates(digests_ND: np.ndarray) -> np.ndarray:
    """True where an earlier row is equal.

    Args:
        digests_ND: uint8 (N, bytes).

    Returns:
        bool (N,).
    """
    _, first = np.unique(_as_scalars(digests_ND), return_index=True)
    copies = np.ones(len(digests_ND), dtype=bool)
    copies[first] = False
    return copies


def near_duplicates(hashes_N: np.ndarray, distance: int) -> np.ndarray:
    """True for each example that is within `distance` of an earlier one which itself is kept.

    Args:
        hashes_N: uint64.
        distance: in bits, 0 to MAX_DISTANCE.

    Returns:
        bool (N,).
    """
    unique_U, first_U, inverse_N = np.unique(hashes_N, return_index=True, return_inverse=True)
    order = np.argsort(first_U)  # by first appearance
    dropped_U = np.zeros(len(unique_U), dtype=bool)
    pairs = near_pairs(unique_U[order], distance)
    # They are sorted by the later one, so that the earlier one's fate is known.
    for earlier, later in pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]:
        if not dropped_U[earlier]:
            dropped_U[later] = True
    dropped = np.empty_like(dropped_U)
    dropped[order] = dropped_U
    copies = np.ones(len(hashes_N), dtype=bool)
    copies[first_U] = False
    return copies | dropped[inverse_N]


def near_pairs(hashes_U: np.ndarray, distance: int) -> np.ndarray:
    """Places (earlier, later) of all pairs of different hashes within `distance` bits, each once, int64 (P, 2)."""
    if distance == 0 or len(hashes_U) < 2:
        return np.zeros((0, 2), dtype=np.int64)
    bands = distance + 1
    while BITS * (bands - distance) / bands < np.log2(len(hashes_U)) and comb(bands + 1, distance) <= _MAX_PASSES:
        bands += 1
    edges = [round(BITS * band / bands) for band in range(bands + 1)]
    masks = [((1 << (high - low)) - 1) << low for low, high in pairwise(edges)]
    agreed = [np.uint64(sum(chosen)) for chosen in combinations(masks, bands - distance)]
    return np.unique(np.concatenate([_close_pairs(hashes_U, bits, distance) for bits in agreed]), axis=0)


def _close_pairs(hashes_U: np.ndarray, mask: np.uint64, distance: int) -> np.ndarray:
    """Places (earlier, later) of all pairs of hashes that agree on the bits of `mask` and are within `distance`, int64 (P, 2)."""
    keys = hashes_U & mask
    order = np.argsort(keys, kind="stable")
    keys, sorted_hashes = keys[order], hashes_U[order]
    pairs = [np.zeros((0, 2), dtype=np.int64)]
    places = np.arange(len(keys))
    for step in range(1, len(keys)):
        # Places whose key is also that of the one `step` further; they only become fewer.
        places = places[places + step < len(keys)]
        places = places[keys[places] == keys[places + step]]
        if not len(places):
            break
        close = np.bitwise_count(sorted_hashes[places] ^ sorted_hashes[places + step]) <= distance
        pair = np.stack([order[places[close]], order[places[close] + step]], axis=1)
        pairs.append(np.sort(pair, axis=1))
    return np.concatenate(pairs)


def over_limit(owners_ND: np.ndarray, digests_ND: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """True for examples beyond the first `limit` of their owner, in the order of the keyed hash.

    Args:
        owners_ND: uint8 (N, bytes); see `owner_digest`.
        digests_ND: uint8 (N, bytes), of the examples' content.
        limit: k, at least 1.
        seed: the key.

    Returns:
        bool (N,).
    """
    ranks_N = keyed_ranks(digests_ND, seed, b"")
    _, owner_N = np.unique(_as_scalars(owners_ND), return_inverse=True)
    order = np.lexsort((np.arange(len(ranks_N)), ranks_N, owner_N))
    starts = np.flatnonzero(np.diff(owner_N[order], prepend=-1))
    place_in_owner = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    over = np.empty(len(order), dtype=bool)
    over[order] = place_in_owner >= limit
    return over


def keyed_ranks(digests_ND: np.ndarray, seed: int, purpose: bytes) -> np.ndarray:
    """A hash of each row, uint64 (N,): uniform, and independent between seeds and purposes."""
    key = seed.to_bytes(8, "little", signed=True)
    ranks = [hashlib.blake2b(row.tobytes(), key=key, person=purpose, digest_size=8).digest() for row in digests_ND]
    return np.frombuffer(b"".join(ranks), dtype=">u8").astype(np.uint64)


def _as_scalars(values_ND: np.ndarray) -> np.ndarray:
    """Each row as one value, (N,), so that rows compare as a whole."""
    return np.ascontiguousarray(values_ND).view(np.dtype((np.void, values_ND.shape[1]))).ravel()
