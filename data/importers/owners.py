"""At most k examples of one owner, so that an owner's whole contribution is a group of k examples.

The choice among an owner's examples follows a keyed hash of each example's content: no order of files can steer it, and
an owner's choice depends on that owner's examples alone.
"""

import hashlib

import numpy as np

DIGEST_BYTES = 16


def owner_digest(owner: str) -> bytes:
    """Names of owners go no further than this."""
    return hashlib.blake2b(owner.encode("utf-8", "surrogatepass"), digest_size=DIGEST_BYTES, person=b"owner").digest()


def over_limit(owners_ND: np.ndarray, digests_ND: np.ndarray, limit: int, seed: int) -> np.ndarray:
    """True for examples beyond the first `limit` of their owner, in the order of the keyed hash.

    Args:
        owners_ND: uint8 (N, DIGEST_BYTES).
        digests_ND: uint8 (N, bytes), of the examples' content.
        limit: k, at least 1.
        seed: the key.

    Returns:
        bool (N,).
    """
    key = seed.to_bytes(8, "little", signed=True)
    ranks = [hashlib.blake2b(row.tobytes(), key=key, digest_size=8).digest() for row in digests_ND]
    ranks_N = np.frombuffer(b"".join(ranks), dtype=">u8").astype(np.uint64)
    _, owner_N = np.unique(_rows(owners_ND), return_inverse=True)
    order = np.lexsort((np.arange(len(ranks_N)), ranks_N, owner_N))
    starts = np.flatnonzero(np.diff(owner_N[order], prepend=-1))
    place_in_owner = np.arange(len(order)) - np.repeat(starts, np.diff(np.append(starts, len(order))))
    over = np.empty(len(order), dtype=bool)
    over[order] = place_in_owner >= limit
    return over


def _rows(values_ND: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(values_ND).view(np.dtype((np.void, values_ND.shape[1]))).ravel()
