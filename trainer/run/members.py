"""Notes, privately, every attempt before its intent and the intent once it is durable (privacy/audit/members.py)."""

import os
from collections.abc import Callable
from pathlib import Path

from data.reading.loader import StepPlan
from privacy.audit.members import LedgerMark, MembersRecord, members_digest
from privacy.errors import PrivacyStateRefused
from privacy.sampling.keys import SamplingKey
from trainer.ranks import distributed


class MembersLog:
    """Appends to private/members.jsonl, durably; the file is there since the run was opened.

    Args:
        position: (seq, SHA-256) of the ledger's last line; called on rank 0.
    """

    def __init__(self, path: Path, key: SamplingKey, nonce: bytes, position: Callable[[], tuple[int, str]]) -> None:
        self._path, self._key, self._nonce, self._position = path, key, nonce, position

    def attempt(self, plan: StepPlan, attempt: int) -> None:
        """What the ranks were dealt; before the step's intent, so that every charge has its line. Collective."""
        rank = distributed.rank()
        digest = members_digest(self._key, self._nonce, attempt, plan.step, rank, plan.example_ids)
        counts, digests = zip(*distributed.gather_objects((len(plan.example_ids), digest)), strict=True)
        distributed.on_main(
            lambda: self._append(
                MembersRecord(*self._position(), plan.step, attempt, self._nonce.hex(), counts, digests)
            )
        )

    def charged(self) -> None:
        """The ledger's last line is this attempt's intent. On rank 0, before the others know that they may go on."""
        self._append(LedgerMark(*self._position()))

    def _append(self, line: LedgerMark) -> None:
        try:
            with self._path.open("r+b") as file:
                if file.seek(0, os.SEEK_END):
                    file.seek(-1, os.SEEK_END)
                    if file.read(1) != b"\n":  # a line torn by a crash is ended first, so that it spoils no other
                        file.write(b"\n")
                file.write(line.line().encode())
                file.flush()
                os.fsync(file.fileno())
        except OSError as error:
            raise PrivacyStateRefused(
                f"{self._path}: cannot write the record of attempts: {error.strerror or error}"
            ) from error
