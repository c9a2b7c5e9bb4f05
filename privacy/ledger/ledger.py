"""The privacy ledger's writer: every charge is on the disk before the noise it stands for is drawn.

The file and its crash points are privacy/ledger/chain.py's. What this module adds:
- between an intent and its `done`: the intent is charged; the retry is a new attempt in a new session, so it has new
  coins and new noise;
- a torn line is charged if it may have been an intent, and followed by a `repair` record.
One process writes (rank 0), under the file's lock.

A clock that runs while examples are decoded depends on them (contract 12). So the only time in a ledger is that of the start of
the program that opened it, read before any example is, and every later record repeats it.
"""

import datetime
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, Protocol, Self

from ..errors import BudgetSpent, PrivacyStateRefused
from ..plan.releases import Release
from ..sampling.keys import NONCE_BYTES
from .chain import ChainFile, LineRefused, create_chain
from .records import FORMAT_VERSION, RESTARTED, LedgerState

PROGRAM_START = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
"""When this program loaded the module, which is before it looks at any data."""
LOCK_PATIENCE = 5.0
"""Seconds that a start waits for a program that is just ending."""
_NOTED: Mapping[str, Literal["start", "at", "close"]] = {
    "session": "start",
    "checkpoint": "at",
    "close": "close",
}
"""What the witness is told of, once it is durable."""


class Witness(Protocol):
    """A second record of where a ledger stands, such as a run's part in a shared ledger."""

    def mend(self) -> None:
        """Repairs what a crash left."""
        ...

    def session_fields(self) -> Mapping[str, Any]:
        """Returns what a session's record says of the witness."""
        ...

    def before_intent(self) -> None:
        """Refuses an intent that may not be written."""
        ...

    def note(self, kind: Literal["start", "at", "close"]) -> None:
        """Learns where the ledger stands."""
        ...


class Ledger:
    """An open ledger. Use `create` or `open`, then `start_session`; every method that writes is durable on return.

    Attributes:
        state: everything that the verified lines say.
        plan: the frozen plan of the `open` record.
        witness: a run's part in a shared ledger, if it has one; it learns where the ledger stands, and may object.
    """

    def __init__(self, path: Path, mirror: Path | None, *, mended: bool = True) -> None:
        self.path, self.mirror = path, mirror
        self.witness: Witness | None = None
        self._nonce: bytes | None = None
        self._chain = ChainFile(
            path,
            LedgerState(),
            "ledger",
            self._require_mirror,
            patience=LOCK_PATIENCE,
            makes_mirror=True,
        )
        self.state = self._chain.state
        self.plan = self.state.plan
        if mended:
            self.mend()

    def mend(self) -> None:
        """Completes the mirror, repairs a torn last line and tells the witness; nothing is written before it.

        Raises:
            PrivacyStateRefused: a file cannot be written.
        """
        try:
            self._chain.mend()
            if torn := self.state.torn_run:
                self._append("repair", {"torn_lines": len(torn), "charged": sum(torn)})
            if self.witness is not None:
                self.witness.mend()
        except BaseException:
            self.release()
            raise

    def _require_mirror(self, state: LedgerState) -> Path | None:
        """The mirror, which may be new for a ledger that has had none; one that the ledger has had cannot go away."""
        if self.mirror is None:
            if state.mirrored:
                raise PrivacyStateRefused(
                    f"{self.path}: has had a mirror; without it a rollback would go unseen"
                )
        elif not self.mirror.exists() and state.mirrored:
            raise PrivacyStateRefused(f"{self.mirror}: the mirror of {self.path} is gone")
        return self.mirror

    @classmethod
    def create(
        cls, path: Path | str, open_fields: Mapping[str, Any], mirror: Path | str | None = None
    ) -> Self:
        """Writes the `open` record of a new run; PrivacyStateRefused when the ledger, or a mirror of one, exists.

        Args:
            open_fields: `plan` (PrivacyPlan.frozen_fields), `key_commitment`, and whatever else describes the run
                (`data_hmac`, code commit, accountant version). Private data only as HMAC under the sampling key.
        """
        path, mirror_path = Path(path), None if mirror is None else Path(mirror)
        if mirror_path is not None and mirror_path.exists():
            raise PrivacyStateRefused(
                f"{mirror_path}: a mirror without its ledger {path}: the ledger was removed"
            )
        try:
            create_chain(
                path, LedgerState(), PROGRAM_START, {"format": FORMAT_VERSION, **open_fields}
            )
        except FileExistsError as error:
            raise PrivacyStateRefused(f"{path}: exists; a ledger is never overwritten") from error
        except (OSError, LineRefused, ValueError, TypeError) as error:
            raise PrivacyStateRefused(f"{path}: cannot create the ledger: {error}") from error
        return cls(path, mirror_path)

    @classmethod
    def open(
        cls, path: Path | str, mirror: Path | str | None = None, *, mended: bool = True
    ) -> Self:
        """Verifies the chain and the mirror; then `mend`.

        Args:
            mended: False writes nothing yet: a start that is refused for another reason leaves all files as they were.

        Raises:
            PrivacyStateRefused: the chain breaks (the line is named), or ledger and mirror do not fit together.
        """
        return cls(Path(path), None if mirror is None else Path(mirror), mended=mended)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Closes the files; the ledger itself stays open for another program (the record for its end is `close`)."""
        self._chain.release()

    # Reading

    @property
    def num_charged(self) -> int:
        """Every intent, done or not, and every torn line that may have been one."""
        return self.state.num_charged

    def position(self) -> tuple[int, str]:
        """(seq, SHA-256) of the last line, for a checkpoint's manifest."""
        return self.state.num_lines - 1, self.state.hashes[-1]

    def require_not_shorter_than(self, seq: int, line_hash: str) -> None:
        """PrivacyStateRefused unless line `seq` is the one a manifest remembers: no rollback, no fork."""
        hashes, remembered = self.state.hashes, "a checkpoint or a trained model remembers"
        if seq >= len(hashes):
            said = f"{len(hashes)} lines, but {remembered} line {seq + 1}: it was rolled back"
            raise PrivacyStateRefused(f"{self.path}: {said}")
        if seq < 0 or hashes[seq] != line_hash:
            raise PrivacyStateRefused(
                f"{self.path}: line {seq + 1} is not the one that {remembered}"
            )

    # Writing

    def start_session(
        self, environment: Mapping[str, Any], nonce: bytes | None = None, *, restarted: bool = False
    ) -> bytes:
        """Records a start of the program and returns its 16 fresh bytes, durable before any coin depends on them.

        Args:
            restarted: the run has lost its checkpoints and begins again at step 0; none of them is expected any more.
        """
        nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        fields = {
            "nonce": nonce.hex(),
            "mirror": self.mirror is not None,
            "environment": dict(environment),
        }
        fields |= {RESTARTED: True} if restarted else {}
        self._append(
            "session",
            fields | dict(self.witness.session_fields() if self.witness is not None else {}),
        )
        self._nonce = nonce
        return nonce

    def intent(self, step: int, attempt: int, releases: Sequence[Release]) -> None:
        """Charges one attempt at `step`; only after it returns may noise be drawn or a gradient's value leave.

        Raises:
            BudgetSpent: steps plus reserve are charged already; nothing is written.
            PrivacyStateRefused: out of order, other noise than planned, the ledger cannot be written, or the witness objects.
        """
        self._require_session()
        spent = self.budget_spent()
        if spent is not None:
            raise BudgetSpent(f"the privacy budget is spent: {spent}")
        if self.witness is not None:
            self.witness.before_intent()
        self._append(
            "intent",
            {"step": step, "attempt": attempt, "releases": [dict(item) for item in releases]},
        )

    def budget_spent(self) -> str | None:
        """What is spent when one more intent would pass the plan's steps plus reserve; None while it would not.

        A run without a formal guarantee has no budget.
        """
        charged, allowed = self.num_charged, self.plan.max_intents
        is_spent = self.plan.formal_guarantee and charged >= allowed
        return f"{charged} of {allowed} intents are charged" if is_spent else None

    def done(self, step: int, attempt: int, **noised: Any) -> None:
        """The update of the last intent is applied; `noised` is what the step released, for privacy/noise/refutation.py."""
        self._require_session()
        self._append("done", {"step": step, "attempt": attempt, **noised})

    def checkpoint(self, step: int, path: str, digest: str) -> None:
        """A checkpoint of `step` is whole on the disk; `digest` is the SHA-256 of its manifest in hex."""
        self._require_session()
        self._append("checkpoint", {"step": step, "path": path, "digest": digest})

    def close(self, reason: str) -> None:
        """Ends the run for good: "finished", "budget_spent" or "stopped"; nothing can follow."""
        self._append("close", {"reason": reason, "num_charged": self.num_charged})

    def _require_session(self) -> None:
        # A session of an earlier start does not count: its nonce would give the same coins once more.
        if self._nonce is None:
            raise PrivacyStateRefused(f"{self.path}: this start of the program has no session yet")

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._chain.append(kind, self.state.opened["time_utc"], fields)
        if self.witness is not None and kind in _NOTED:
            self.witness.note(_NOTED[kind])
