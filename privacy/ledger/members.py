"""The private record of every attempt: who was trained on, as keyed digests, and where the ledger stood then.

It is the ledger's second witness. Each line names the ledger's last line at that moment, by number and SHA-256, and is durable
before anything follows:

1. the attempt, with what each rank was dealt; 2. the ledger's intent; 3. the mark that the intent is durable; 4. the noise.

Sessions, checkpoints and the end are marked likewise once they are durable. So a ledger that was cut or written anew no longer
holds what the record names. In each session one attempt, the last, may lack its charge: the program ended between 1 and 2. No
charge lacks its attempt, except that of a torn line, which is charged in case it was an intent. With the sampling key an
auditor recomputes the members from the coins and compares: then "what was trained equals what the coins say" is checked and
not only believed. Without the key a digest says nothing.
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ..errors import refusing
from ..files import durable
from ..sampling.keys import SamplingKey
from ..sampling.poisson import Ids
from .records import LedgerState

if TYPE_CHECKING:
    from .ledger import Ledger

FILE = "members.jsonl"


def members_digest(
    key: SamplingKey, nonce: bytes, attempt: int, step: int, rank: int, ids: Ids
) -> str:
    """HMAC-SHA256, in hex, over the attempt and the ids of one rank, in order."""
    header = (
        b"members v1\0"
        + nonce
        + b"".join(value.to_bytes(8, "big") for value in (attempt, step, rank))
    )
    return key.hmac(header + np.ascontiguousarray(ids, dtype="<i8").tobytes())


@dataclass(frozen=True)
class LedgerMark:
    """A line that says only where the ledger stood: `seq` is its last line's number from 0, `hash` that line's SHA-256."""

    seq: int
    hash: str

    def line(self) -> str:
        return json.dumps(self.__dict__, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class MembersRecord(LedgerMark):
    """An attempt: what the ranks were dealt at one step; counts and digests in rank order. Its intent is line `seq` + 1.

    `rows_per_rank` is the number of rows of all micro-batches of a rank: it, `nodes` (the node of each rank, where each reads its
    share of the examples; empty otherwise) and the key decide who is dealt what.
    """

    step: int
    attempt: int
    nonce: str
    rows_per_rank: int
    counts: tuple[int, ...]
    digests: tuple[str, ...]
    nodes: tuple[int, ...]


def append_line(path: Path, line: LedgerMark) -> None:
    """Appends to a record that is there since the run was opened, durably.

    Raises:
        PrivacyStateRefused: it cannot be written.
    """
    with refusing(f"{path}: cannot write the record of attempts"):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            durable.write(descriptor, durable.torn_line_end(descriptor) + line.line().encode())
            durable.fsync(descriptor)
        finally:
            os.close(descriptor)


class MarkedLedger:
    """Writes the private record beside the ledger: attempts before their intents, and marks. On one rank.

    Attributes:
        ledger: what needs no mark is written to it directly.
    """

    def __init__(self, ledger: "Ledger", members: Path) -> None:
        self.ledger, self._members = ledger, members

    def note(
        self,
        step: int,
        attempt: int,
        nonce: bytes,
        rows_per_rank: int,
        dealt: Sequence[tuple[int, str]],
        nodes: tuple[int, ...] = (),
    ) -> None:
        """Records an attempt, whose intent is the ledger's next line; see `MembersRecord`.

        Args:
            dealt: for each rank the number of its examples and their digest.
        """
        counts, digests = zip(*dealt, strict=True)
        seq, line_hash = self.ledger.position()
        line = MembersRecord(
            seq, line_hash, step, attempt, nonce.hex(), rows_per_rank, counts, digests, nodes
        )
        append_line(self._members, line)

    def write(self, record: Callable[["Ledger"], object]) -> None:
        """Writes to the ledger, and marks the line, which is durable then, before anything follows."""
        record(self.ledger)
        self.mark()

    def mark(self) -> None:
        """Names the ledger's last line."""
        append_line(self._members, LedgerMark(*self.ledger.position()))


def read_lines(path: Path) -> Iterator[LedgerMark]:
    """Every line in order, one at a time: with a digest for each of many ranks, all together may not fit into memory.

    A torn line, of a crash, is passed over.

    Raises:
        PrivacyStateRefused: there is no such file, or it cannot be read.
    """
    with (
        refusing(f"{path}: cannot read the record of attempts"),
        path.open(errors="replace") as file,
    ):
        for line in file:
            try:
                fields: dict[str, Any] = json.loads(line)
                if type(fields["seq"]) is not int:
                    continue
                if isinstance(fields.get("nonce"), str):
                    listed = {name: tuple(fields[name]) for name in ("counts", "digests", "nodes")}
                    yield MembersRecord(**fields | listed)
                else:
                    yield LedgerMark(**fields)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue


def not_in_ledger(lines: Iterable[LedgerMark], state: LedgerState) -> str | None:
    """What the ledger lacks of what was recorded before it was read; None when it lacks nothing."""
    charged = {intent.seq: (intent.nonce, intent.step, intent.attempt) for intent in state.intents}
    nonces, ended = set(state.nonces), set[str]()
    for line in lines:
        if not 0 <= line.seq < state.num_lines or state.hashes[line.seq] != line.hash:
            return f"line {line.seq + 1} is not the one that was recorded: the ledger was rolled back or replaced"
        if isinstance(line, MembersRecord):
            if line.nonce not in nonces or line.nonce in ended:
                return f"attempt {line.attempt} of step {line.step} was recorded in a session that the ledger lacks or ended"
            if charged.pop(line.seq + 1, None) != (line.nonce, line.step, line.attempt):
                ended.add(line.nonce)  # the program ended between the record and its intent
    return None


def not_recorded(state: LedgerState, lines: Iterable[LedgerMark]) -> str | None:
    """Which charge lacks the record of its attempt, in lines that were read after the ledger; None when all have one."""
    charged = {intent.seq: (intent.nonce, intent.step, intent.attempt) for intent in state.intents}
    for line in lines:
        if isinstance(line, MembersRecord) and charged.get(line.seq + 1) == (
            line.nonce,
            line.step,
            line.attempt,
        ):
            del charged[line.seq + 1]
    if not charged:
        return None
    return f"{len(charged)} charges, the first in line {min(charged) + 1}, have no record of their attempt"
