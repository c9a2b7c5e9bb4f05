"""The private record of attempts: the members of every batch as keyed digests, and ledger marks.

It is the ledger's second witness. Each line names the ledger's last line at that moment, by number
and SHA-256, so that a ledger that was cut or written anew lacks a line that the record names.
docs/ledger.md has the order of writes that makes this true. Without the key a digest says nothing;
with it an auditor recomputes the members from the coins and compares.
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
    """Returns HMAC-SHA256, in hex, over the attempt and the ids of one rank, in order."""
    numbers = b"".join(number.to_bytes(8, "big") for number in (attempt, step, rank))
    header = b"members v1\0" + nonce + numbers
    return key.hmac(header + np.ascontiguousarray(ids, dtype="<i8").tobytes())


@dataclass(frozen=True)
class LedgerMark:
    """A line of the record that names the ledger's last line at that moment.

    Attributes:
        seq: number of the ledger's last line, from 0.
        hash: SHA-256 of that line, in hex.
    """

    seq: int
    hash: str

    def line(self) -> str:
        return json.dumps(self.__dict__, separators=(",", ":")) + "\n"


@dataclass(frozen=True)
class MembersRecord(LedgerMark):
    """A line of the record about an attempt. Its intent is line `seq` + 1 of the ledger.

    Key, `rows_per_rank` and `nodes` decide which examples are dealt to which rank.

    Attributes:
        nonce: of the session, in hex.
        rows_per_rank: number of rows of all micro-batches of a rank.
        counts: number of examples of each rank, in rank order.
        digests: `members_digest` of each rank, in rank order.
        nodes: the node of each rank, where each node reads its share of the examples; empty
            otherwise.
    """

    step: int
    attempt: int
    nonce: str
    rows_per_rank: int
    counts: tuple[int, ...]
    digests: tuple[str, ...]
    nodes: tuple[int, ...]


def append_line(path: Path, line: LedgerMark) -> None:
    """Appends a line, durably, to a record that was created when the run was opened.

    Raises:
        PrivacyStateRefused: it cannot be written.
    """
    with refusing(f"{path}: cannot write the record of attempts"):
        descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        try:
            torn_end = durable.torn_line_end(descriptor)
            durable.write(descriptor, torn_end + line.line().encode())
            durable.fsync(descriptor)
        finally:
            os.close(descriptor)


class MarkedLedger:
    """Writes the private record beside the ledger: attempts before their intents, and marks.

    On one rank.

    Attributes:
        ledger: the ledger itself, for writes that need no mark.
    """

    def __init__(self, ledger: "Ledger", members: Path) -> None:
        self.ledger = ledger
        self._members = members

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
        """Writes to the ledger by `record`, and marks the line, which is durable then."""
        record(self.ledger)
        self.mark()

    def mark(self) -> None:
        """Appends the ledger's last line to the record as a mark."""
        append_line(self._members, LedgerMark(*self.ledger.position()))


def read_lines(path: Path) -> Iterator[LedgerMark]:
    """Yields every line in order; skips a line that a crash has torn.

    One at a time: with a digest for each of many ranks, all lines together may not fit into memory.

    Raises:
        PrivacyStateRefused: the file does not exist, or cannot be read.
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
                    for name in ("counts", "digests", "nodes"):
                        fields[name] = tuple(fields[name])
                    yield MembersRecord(**fields)
                else:
                    yield LedgerMark(**fields)
            except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
                continue


def ledger_gap(lines: Iterable[LedgerMark], state: LedgerState) -> str | None:
    """Returns the first recorded line or attempt that the ledger lacks, as a sentence, or None.

    In each session one attempt, the last, may lack its intent: the program ended between the two.

    Args:
        lines: read before the ledger.
    """
    attempts = {intent.seq: (intent.nonce, intent.step, intent.attempt) for intent in state.intents}
    nonces = set(state.nonces)
    ended_nonces = set[str]()
    for line in lines:
        if not 0 <= line.seq < state.num_lines or state.hashes[line.seq] != line.hash:
            return (
                f"line {line.seq + 1} is not the one that was recorded: the ledger was rolled back "
                "or replaced"
            )
        if isinstance(line, MembersRecord):
            if line.nonce not in nonces or line.nonce in ended_nonces:
                return (
                    f"attempt {line.attempt} of step {line.step} was recorded in a session that "
                    "the ledger lacks or ended"
                )
            charged_attempt = attempts.pop(line.seq + 1, None)
            if charged_attempt != (line.nonce, line.step, line.attempt):
                # The program ended between the record and its intent.
                ended_nonces.add(line.nonce)
    return None


def record_gap(state: LedgerState, lines: Iterable[LedgerMark]) -> str | None:
    """Returns the number of charges without a record of their attempt, as a sentence, or None.

    Args:
        lines: read after the ledger.
    """
    attempts = {intent.seq: (intent.nonce, intent.step, intent.attempt) for intent in state.intents}
    for line in lines:
        if isinstance(line, MembersRecord):
            recorded_attempt = (line.nonce, line.step, line.attempt)
            if attempts.get(line.seq + 1) == recorded_attempt:
                del attempts[line.seq + 1]
    if not attempts:
        return None
    return (
        f"{len(attempts)} charges, the first in line {min(attempts) + 1}, have no record of their "
        "attempt"
    )
