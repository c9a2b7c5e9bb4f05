"""Notes, privately, which examples every attempt is about to train on, so that `audit.py schedule` can compare."""

from pathlib import Path

from data.reading.loader import StepPlan
from privacy.audit.members import FILE, MembersRecord, members_digest
from privacy.sampling.keys import SamplingKey
from trainer.ranks import distributed


class MembersLog:
    """Appends to private/members.jsonl: one line per attempt, with one keyed digest per rank."""

    def __init__(self, private: Path, key: SamplingKey, nonce: bytes) -> None:
        self._path, self._key, self._nonce = private / FILE, key, nonce

    def note(self, plan: StepPlan, attempt: int) -> None:
        """What this rank was dealt; before the step's intent, so that every charge has its line. Collective."""
        rank = distributed.rank()
        digest = members_digest(self._key, self._nonce, attempt, plan.step, rank, plan.example_ids)
        dealt = distributed.gather_objects((len(plan.example_ids), digest))
        if rank == 0:
            counts, digests = zip(*dealt, strict=True)
            record = MembersRecord(plan.step, attempt, self._nonce.hex(), counts, digests)
            with self._path.open("a") as file:
                # A line torn by a crash is ended first, so that it spoils no other.
                file.write(("\n" if _is_torn(self._path) else "") + record.line())


def _is_torn(path: Path) -> bool:
    if not path.exists() or path.stat().st_size == 0:
        return False
    with path.open("rb") as file:
        file.seek(-1, 2)
        return file.read(1) != b"\n"
