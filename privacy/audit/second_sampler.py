"""A second sampler, from the text of the contract; it shares no code with privacy/sampling/.

    K = HKDF-SHA256(key, info = "poisson coins v1\\0" | session nonce | attempt)
    example i is in step t  iff  word (i mod 2) of AES-256_K(t, i div 2) < floor(B 2^64 / n)
    of more than `cap` members those with the smallest words stay
    member j, in rising order, is in the row with the j-th smallest of S words of
        AES-256_K''(t, i div 2), K'' = HKDF-SHA256(key, info = "rows of members v1\\0" | ...);
        each rank has S / W rows (where each node reads its share of the examples, the same for the
        members and the rows of each node alone)
    the key of an example's own randomness: word 0 of AES-256_K'(t, i),
        K' = HKDF-SHA256(key, info = "example keys v1\\0" | ...)

Blocks are written out and enciphered one by one (ECB), where the trainer takes a stream (CTR);
ranks and retries are counted from the ledger's lines. A mistake in one of the two shows as a
difference.
"""

import hashlib
import hmac
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms, modes
from numpy.typing import NDArray

Ids = NDArray[np.int64]
Words = NDArray[np.uint64]
_BLOCKS = 1 << 17


@dataclass(frozen=True)
class Attempt:
    """A charged attempt: the numbers that its coins depend on."""

    nonce: bytes
    step: int
    attempt: int


def read_attempts(records: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """Returns the attempts of a ledger's records, in order, as the ledger numbers them."""
    attempts = list[Attempt]()
    nonce = b""
    for record in records:
        if record["type"] == "session":
            nonce = bytes.fromhex(record["nonce"])
        elif record["type"] == "intent":
            attempts.append(Attempt(nonce, record["step"], record["attempt"]))
    return attempts


@dataclass(frozen=True)
class SecondSampler:
    """Computes the members of every batch from the sampling key and public numbers.

    Attributes:
        secret: the sampling key's 32 bytes.
    """

    secret: bytes
    num_examples: int
    expected_batch_size: int
    cap: int | None

    def members(self, attempt: Attempt) -> tuple[Ids, Ids]:
        """Returns (ids that their coins chose, ids that the cap kept), both in rising order."""
        n = self.num_examples
        key = self._key(b"poisson coins v1\0", attempt)
        threshold = (self.expected_batch_size << 64) // n
        num_blocks = (n + 1) // 2
        ids: list[Ids] = []
        candidate_words: list[Words] = []
        for first in range(0, num_blocks, _BLOCKS):
            blocks = np.arange(first, min(first + _BLOCKS, num_blocks))
            # Two words a block; the last block may hold one word too many.
            coins = _words(key, attempt.step, blocks)[: n - 2 * first]
            # 2^64 does not fit a word; every word is below it.
            if threshold >= 2**64:
                heads = np.arange(len(coins))
            else:
                heads = np.flatnonzero(coins < np.uint64(threshold))
            ids.append(heads + 2 * first)
            candidate_words.append(coins[heads])
        candidates = np.concatenate(ids)
        if self.cap is None or len(candidates) <= self.cap:
            return candidates, candidates
        # A stable sort: of equal words the smaller id comes first.
        order = np.argsort(np.concatenate(candidate_words), kind="stable")
        return candidates, np.sort(candidates[order[: self.cap]])

    def deal(
        self,
        attempt: Attempt,
        members: Ids,
        rows_per_rank: int,
        world_size: int,
        nodes: Sequence[int] = (),
    ) -> list[tuple[Ids, Ids]]:
        """Returns each rank's members in rising order, and their places among its rows.

        Args:
            nodes: the node of each rank, where each node reads its share of the examples; empty
                otherwise.

        Raises:
            ValueError: the members outnumber the rows, or `nodes` has another length than the
                ranks.
        """
        all_rows = np.arange(rows_per_rank * world_size)
        if len(all_rows) < len(members) or len(nodes) not in (0, world_size):
            raise ValueError("not every member has a row")
        key = self._key(b"rows of members v1\0", attempt)
        pairs = _words(key, attempt.step, all_rows // 2).reshape(-1, 2)
        # Two equal words, for which the trainer draws all again, come once in 2^64 pairs.
        words = pairs[all_rows, all_rows % 2]
        rows = np.argsort(words)[: len(members)]
        if nodes:
            node_of_row = np.repeat(nodes, rows_per_rank)
            ranks_per_node = np.bincount(nodes)
            # Node by node as many examples as it has ranks; the first example that a node does not
            # have is its end.
            ends = np.cumsum(ranks_per_node) * self.num_examples // world_size
            node_of_member = np.searchsorted(ends, members, side="right")
            counts = np.bincount(node_of_member, minlength=len(ends))
            if (counts <= ranks_per_node * rows_per_rank).all():
                for node, count in enumerate(counts.tolist()):
                    node_rows = np.flatnonzero(node_of_row == node)
                    order = np.argsort(words[node_rows])
                    rows[node_of_member == node] = node_rows[order][:count]
        ranks = rows // rows_per_rank
        members_by_rank = np.argsort(ranks, kind="stable")
        cuts = np.cumsum(np.bincount(ranks, minlength=world_size))[:-1]
        return [
            (members[places], rows[places] % rows_per_rank)
            for places in np.split(members_by_rank, cuts)
        ]

    def keys(self, attempt: Attempt, ids: Ids) -> Words:
        """Returns the examples' own keys, in the order of `ids`."""
        return _words(self._key(b"example keys v1\0", attempt), attempt.step, ids)[::2]

    def digest(self, attempt: Attempt, rank: int, ids: Ids) -> str:
        """Returns the digest of one rank's examples in private/members.jsonl."""
        numbers = [number.to_bytes(8, "big") for number in (attempt.attempt, attempt.step, rank)]
        message = b"".join(numbers) + ids.astype("<i8").tobytes()
        key = _hkdf(self.secret, b"ledger hmac v1\0")
        return hmac.new(key, b"members v1\0" + attempt.nonce + message, hashlib.sha256).hexdigest()

    def _key(self, purpose: bytes, attempt: Attempt) -> bytes:
        return _hkdf(self.secret, purpose + attempt.nonce + attempt.attempt.to_bytes(8, "big"))


def _hkdf(secret: bytes, info: bytes) -> bytes:
    """Returns HKDF-SHA256 (RFC 5869) without salt, one block of output."""
    pseudorandom_key = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(pseudorandom_key, info + b"\x01", hashlib.sha256).digest()


def _words(key: bytes, step: int, numbers: Ids) -> Words:
    """Returns two words of AES-256_K(step, number) for each number."""
    blocks = np.empty((len(numbers), 2), dtype=">u8")
    blocks[:, 0] = step
    blocks[:, 1] = numbers
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(blocks.tobytes()), dtype="<u8")
