"""The private record of who was trained on: what each rank was dealt, attempt by attempt, as keyed digests.

With the sampling key an auditor recomputes the members from the coins and compares: then "what was trained equals what the
coins say" is checked and not only believed. Without the key a digest says nothing.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from privacy.sampling.keys import SamplingKey
from privacy.sampling.poisson import Ids

FILE = "members.jsonl"


def members_digest(key: SamplingKey, nonce: bytes, attempt: int, step: int, rank: int, ids: Ids) -> str:
    """HMAC-SHA256, in hex, over the attempt and the ids of one rank, in order."""
    header = b"members v1\0" + nonce + b"".join(value.to_bytes(8, "big") for value in (attempt, step, rank))
    return key.hmac(header + np.ascontiguousarray(ids, dtype="<i8").tobytes())


@dataclass(frozen=True)
class MembersRecord:
    """One line: what the ranks were dealt in one attempt at one step; counts and digests in rank order."""

    step: int
    attempt: int
    nonce: str
    counts: tuple[int, ...]
    digests: tuple[str, ...]

    def line(self) -> str:
        return json.dumps(self.__dict__, separators=(",", ":")) + "\n"


def read_members(path: Path) -> dict[tuple[str, int, int], MembersRecord] | None:
    """(nonce, step, attempt) -> record; None when the run kept none. A torn line, of a crash, is passed over."""
    if not path.exists():
        return None
    found: dict[tuple[str, int, int], MembersRecord] = {}
    for line in path.read_text(errors="replace").splitlines():
        try:
            fields: dict[str, Any] = json.loads(line)
            record = MembersRecord(
                fields["step"], fields["attempt"], fields["nonce"], tuple(fields["counts"]), tuple(fields["digests"])
            )
        except (ValueError, KeyError, TypeError):
            continue
        found[record.nonce, record.step, record.attempt] = record
    return found
