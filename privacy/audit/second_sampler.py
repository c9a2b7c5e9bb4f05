"""The sampler a second time, from the text of the contract and sharing no code with privacy/sampling/.

    K = HKDF-SHA256(key, info = "poisson coins v1\\0" | session nonce | attempt)
    example i is in step t  iff  word (i mod 2) of AES-256_K(t, i div 2) < floor(B 2^64 / n)
    of more than `cap` members those with the smallest words stay
    member j, in rising order, stands in the row with the j-th smallest of S words of AES-256_K''(t, i div 2),
    K'' = HKDF-SHA256(key, info = "rows of members v1\\0" | ...), and each rank has S / W rows
    (where each node reads its share of the examples, the same for the members and the rows of each node alone)
    its key for what is random about it: word 0 of AES-256_K'(t, i), K' = HKDF-SHA256(key, info = "example keys v1\\0" | ...)

Blocks are written out and enciphered one by one (ECB), where the trainer takes a stream (CTR); ranks and retries are counted
here from the ledger's lines. A mistake in one of the two shows as a difference.
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
    """One charged attempt: what its coins depend on."""

    nonce: bytes
    step: int
    attempt: int


def read_attempts(records: Sequence[Mapping[str, Any]]) -> list[Attempt]:
    """The attempts of a ledger's records as the ledger numbers them, in order."""
    attempts, nonce = list[Attempt](), b""
    for record in records:
        if record["type"] == "session":
            nonce = bytes.fromhex(record["nonce"])
        elif record["type"] == "intent":
            attempts.append(Attempt(nonce, record["step"], record["attempt"]))
    return attempts


@dataclass(frozen=True)
class SecondSampler:
    """Who is in which batch, from the sampling key's 32 bytes and public numbers."""

    secret: bytes
    num_examples: int
    expected_batch_size: int
    cap: int | None

    def members(self, attempt: Attempt) -> tuple[Ids, Ids]:
        """(chosen by their coins, kept by the cap), both in rising order."""
        n, key = self.num_examples, self._key(b"poisson coins v1\0", attempt)
        threshold = (self.expected_batch_size << 64) // n
        ids: list[Ids] = []
        words: list[Words] = []
        for first in range(0, (n + 1) // 2, _BLOCKS):
            blocks = np.arange(first, min(first + _BLOCKS, (n + 1) // 2))
            drawn = _words(key, attempt.step, blocks)[: n - 2 * first]
            heads = (
                np.arange(len(drawn))
                if threshold >= 2**64
                else np.flatnonzero(drawn < np.uint64(threshold))
            )
            ids.append(heads + 2 * first)
            words.append(drawn[heads])
        chosen, values = np.concatenate(ids), np.concatenate(words)
        if self.cap is None or len(chosen) <= self.cap:
            return chosen, chosen
        # A stable sort: of equal words the smaller id comes first.
        return chosen, np.sort(chosen[np.argsort(values, kind="stable")[: self.cap]])

    def deal(
        self,
        attempt: Attempt,
        members: Ids,
        rows_per_rank: int,
        world_size: int,
        nodes: Sequence[int] = (),
    ) -> list[tuple[Ids, Ids]]:
        """Gives each rank its members in rising order, and where they stand among its rows.

        Args:
            nodes: the node of each rank, where each node reads its share of the examples; empty otherwise.

        Raises:
            ValueError: there are fewer rows than members, or another number of nodes than of ranks.
        """
        at = np.arange(rows_per_rank * world_size)
        if len(at) < len(members) or len(nodes) not in (0, world_size):
            raise ValueError("not every member has a row")
        drawn = _words(self._key(b"rows of members v1\0", attempt), attempt.step, at // 2).reshape(
            -1, 2
        )
        words = drawn[
            at, at % 2
        ]  # two equal ones, for which the trainer draws all again, come once in 2^64 pairs
        rows = np.argsort(words)[: len(members)]
        if nodes:
            of_row = np.repeat(nodes, rows_per_rank)
            # Node by node as many examples as it has ranks; the first that a node does not have is its end.
            ends = np.cumsum(np.bincount(nodes)) * self.num_examples // world_size
            of_member = np.searchsorted(ends, members, side="right")
            numbers = np.bincount(of_member, minlength=len(ends))
            if (numbers <= np.bincount(nodes) * rows_per_rank).all():
                for node, number in enumerate(numbers.tolist()):
                    mine = np.flatnonzero(of_row == node)
                    rows[of_member == node] = mine[np.argsort(words[mine])][:number]
        order = np.argsort(rows // rows_per_rank, kind="stable")
        cuts = np.cumsum(np.bincount(rows // rows_per_rank, minlength=world_size))[:-1]
        return [(members[here], rows[here] % rows_per_rank) for here in np.split(order, cuts)]

    def keys(self, attempt: Attempt, ids: Ids) -> Words:
        """The examples' own keys, in the order of `ids`."""
        return _words(self._key(b"example keys v1\0", attempt), attempt.step, ids)[::2]

    def digest(self, attempt: Attempt, rank: int, ids: Ids) -> str:
        """What private/members.jsonl holds of one rank's examples."""
        numbers = [number.to_bytes(8, "big") for number in (attempt.attempt, attempt.step, rank)]
        message = b"".join(numbers) + ids.astype("<i8").tobytes()
        key = _hkdf(self.secret, b"ledger hmac v1\0")
        return hmac.new(key, b"members v1\0" + attempt.nonce + message, hashlib.sha256).hexdigest()

    def _key(self, purpose: bytes, attempt: Attempt) -> bytes:
        return _hkdf(self.secret, purpose + attempt.nonce + attempt.attempt.to_bytes(8, "big"))


def _hkdf(secret: bytes, info: bytes) -> bytes:
    """HKDF-SHA256 (RFC 5869) without salt, one block of output."""
    extracted = hmac.new(bytes(32), secret, hashlib.sha256).digest()
    return hmac.new(extracted, info + b"\x01", hashlib.sha256).digest()


def _words(key: bytes, step: int, numbers: Ids) -> Words:
    """Two words of AES-256_K(step, number) for each number."""
    blocks = np.empty((len(numbers), 2), dtype=">u8")
    blocks[:, 0], blocks[:, 1] = step, numbers
    encryptor = Cipher(algorithms.AES(key), modes.ECB()).encryptor()
    return np.frombuffer(encryptor.update(blocks.tobytes()), dtype="<u8")
