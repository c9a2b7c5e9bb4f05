"""Which examples are copies of earlier ones. Exact: equal digests. Near: perceptual hashes within a Hamming distance.

Near copies are found without comparing all pairs, and none is missed: when two hashes differ in at most d of 64 bits and
the bits are cut into b bands, at least b - d bands are equal. So for each choice of b - d bands the hashes are sorted by
these bits, and only hashes that agree on all of them are compared. More examples take more bands, so that few agree by
chance.
"""

from itertools import combinations, pairwise
from math import comb

import numpy as np

BITS = 64
MAX_DISTANCE = 10
_MAX_PASSES = 100


def exact_duplicates(digests_ND: np.ndarray) -> np.ndarray:
    """True where an earlier row is equal.

    Args:
        digests_ND: uint8 (N, bytes).

    Returns:
        bool (N,).
    """
    rows = np.ascontiguousarray(digests_ND).view(np.dtype((np.void, digests_ND.shape[1]))).ravel()
    _, first = np.unique(rows, return_index=True)
    copies = np.ones(len(rows), dtype=bool)
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
    pairs = _close_pairs(unique_U[order], distance)
    dropped_U = np.zeros(len(unique_U), dtype=bool)
    for earlier, later in pairs:  # sorted by the later one, so that the earlier one's fate is known
        if not dropped_U[earlier]:
            dropped_U[later] = True
    dropped = np.empty_like(dropped_U)
    dropped[order] = dropped_U
    copies = np.ones(len(hashes_N), dtype=bool)
    copies[first_U] = False
    return copies | dropped[inverse_N]


def _close_pairs(hashes_U: np.ndarray, distance: int) -> np.ndarray:
    """Places (earlier, later) of all pairs of different hashes within `distance`, int64 (P, 2), sorted by the later one."""
    if distance == 0 or len(hashes_U) < 2:
        return np.zeros((0, 2), dtype=np.int64)
    found = [_pairs_that_agree(hashes_U, mask, distance) for mask in _masks(len(hashes_U), distance)]
    pairs = np.unique(np.concatenate(found), axis=0)
    return pairs[np.lexsort((pairs[:, 0], pairs[:, 1]))]


def _masks(count: int, distance: int) -> list[np.uint64]:
    """Bits of every choice of bands that two close hashes may agree on."""
    bands = distance + 1
    while BITS * (bands - distance) / bands < np.log2(count) and comb(bands + 1, distance) <= _MAX_PASSES:
        bands += 1
    edges = [round(BITS * band / bands) for band in range(bands + 1)]
    parts = [((1 << (high - low)) - 1) << low for low, high in pairwise(edges)]
    return [np.uint64(sum(chosen)) for chosen in combinations(parts, bands - distance)]


def _pairs_that_agree(hashes_U: np.ndarray, mask: np.uint64, distance: int) -> np.ndarray:
    keys = hashes_U & mask
    order = np.argsort(keys, kind="stable")
    keys, sorted_hashes = keys[order], hashes_U[order]
    found = [np.zeros((0, 2), dtype=np.int64)]
    places = np.arange(len(keys))
    for step in range(1, len(keys)):
        # Places whose key is also that of the one `step` further; they only become fewer.
        places = places[places + step < len(keys)]
        places = places[keys[places] == keys[places + step]]
        if not len(places):
            break
        close = np.bitwise_count(sorted_hashes[places] ^ sorted_hashes[places + step]) <= distance
        pair = np.stack([order[places[close]], order[places[close] + step]], axis=1)
        found.append(np.sort(pair, axis=1))
    return np.concatenate(found)
