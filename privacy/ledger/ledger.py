"""The privacy ledger's writer: every charge is on the disk before its noise is drawn.

One process writes (rank 0), under the file's lock. docs/ledger.md has the crash points; a
torn line is charged if it may have been an intent, and followed by a `repair`.

A clock that runs while examples are decoded depends on them (contract 12). So the only time in a
ledger is that of the start of the program that opened it, read before any example is, and every
later record repeats it.
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
"""The time at which this program loaded the module, before it reads any data."""
LOCK_PATIENCE = 5.0
"""Seconds that a start waits for a program that is just ending."""
_NOTES: Mapping[str, Literal["start", "at", "close"]] = {
    "session": "start",
    "checkpoint": "at",
    "close": "close",
}
"""Type of a record -> the kind of note that the witness takes of it once it is durable."""


class Witness(Protocol):
    """A second record of the ledger's last line, such as a run's part in a shared ledger."""

    def mend(self) -> None:
        """Repairs the damage of a crash."""
        ...

    def session_fields(self) -> Mapping[str, Any]:
        """Returns the fields of a session's record about the witness."""
        ...

    def before_intent(self) -> None:
        """Refuses an intent that may not be written."""
        ...

    def note(self, kind: Literal["start", "at", "close"]) -> None:
        """Records the ledger's last line."""
        ...


class Ledger:
    """An open ledger. Use `create` or `open`, then `start_session`.

    Every method that writes is durable on return.

    Attributes:
        state: the content of the verified lines.
        plan: the frozen plan of the `open` record.
        witness: a run's part in a shared ledger, if it has one; it records the ledger's last line,
            and may refuse an intent.
    """

    def __init__(self, path: Path, mirror: Path | None, *, mend_at_once: bool = True) -> None:
        self.path = path
        self.mirror = mirror
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
        if mend_at_once:
            self.mend()

    def mend(self) -> None:
        """Completes the mirror, repairs a torn last line and lets the witness mend itself.

        Nothing is written before this call.

        Raises:
            PrivacyStateRefused: a file cannot be written.
        """
        try:
            self._chain.mend()
            torn_run = self.state.torn_run
            if torn_run:
                self._append("repair", {"torn_lines": len(torn_run), "charged": sum(torn_run)})
            if self.witness is not None:
                self.witness.mend()
        except BaseException:
            self.release()
            raise

    def _require_mirror(self, state: LedgerState) -> Path | None:
        """Returns the mirror; refuses a start without a mirror that the ledger has had.

        The mirror may be new for a ledger that has had none.
        """
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
        """Writes the `open` record of a new run and returns its open ledger.

        Args:
            open_fields: `plan` (PrivacyPlan.frozen_fields), `key_commitment`, and further fields
                that describe the run (`data_hmac`, code commit, accountant version). Private data
                only as HMAC under the sampling key.

        Raises:
            PrivacyStateRefused: the ledger, or a mirror of one, exists.
        """
        path = Path(path)
        mirror_path = None if mirror is None else Path(mirror)
        if mirror_path is not None and mirror_path.exists():
            raise PrivacyStateRefused(
                f"{mirror_path}: a mirror without its ledger {path}: the ledger was removed"
            )
        try:
            fields = {"format": FORMAT_VERSION, **open_fields}
            create_chain(path, LedgerState(), PROGRAM_START, fields)
        except FileExistsError as error:
            raise PrivacyStateRefused(f"{path}: exists; a ledger is never overwritten") from error
        except (OSError, LineRefused, ValueError, TypeError) as error:
            raise PrivacyStateRefused(f"{path}: cannot create the ledger: {error}") from error
        return cls(path, mirror_path)

    @classmethod
    def open(
        cls, path: Path | str, mirror: Path | str | None = None, *, mend_at_once: bool = True
    ) -> Self:
        """Returns an open ledger after its chain and its mirror are verified.

        Args:
            mend_at_once: whether `mend` follows at once. False writes nothing yet: a start that is
                refused for another reason leaves all files as they were.

        Raises:
            PrivacyStateRefused: the chain breaks (the line is named), or ledger and mirror do not
                fit together.
        """
        return cls(Path(path), None if mirror is None else Path(mirror), mend_at_once=mend_at_once)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Closes the files. Another program may continue the ledger; `close` ends it for good."""
        self._chain.release()

    # Reading

    @property
    def num_charged(self) -> int:
        """Counts intents, done or not, and torn lines that may have been intents."""
        return self.state.num_charged

    def position(self) -> tuple[int, str]:
        """Returns (seq, SHA-256) of the last line, for a checkpoint's manifest."""
        return self.state.num_lines - 1, self.state.hashes[-1]

    def require_not_shorter_than(self, seq: int, line_hash: str) -> None:
        """Refuses a rollback or a fork: line `seq` must be the one that a manifest remembers.

        Raises:
            PrivacyStateRefused: the line is missing, or it is another one.
        """
        hashes = self.state.hashes
        memory = "a checkpoint or a trained model remembers"
        if seq >= len(hashes):
            raise PrivacyStateRefused(
                f"{self.path}: {len(hashes)} lines, but {memory} line {seq + 1}: it was rolled back"
            )
        if seq < 0 or hashes[seq] != line_hash:
            raise PrivacyStateRefused(f"{self.path}: line {seq + 1} is not the one that {memory}")

    # Writing

    def start_session(
        self, environment: Mapping[str, Any], nonce: bytes | None = None, *, restarted: bool = False
    ) -> bytes:
        """Records a start of the program and returns its nonce of 16 bytes.

        The record is durable before any coin depends on the nonce.

        Args:
            nonce: fresh bytes of the operating system by default.
            restarted: whether the run has lost its checkpoints and begins again at step 0; none of
                them is expected any more.
        """
        nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        fields: dict[str, Any] = {
            "nonce": nonce.hex(),
            "mirror": self.mirror is not None,
            "environment": dict(environment),
        }
        if restarted:
            fields[RESTARTED] = True
        if self.witness is not None:
            fields |= self.witness.session_fields()
        self._append("session", fields)
        self._nonce = nonce
        return nonce

    def intent(self, step: int, attempt: int, releases: Sequence[Release]) -> None:
        """Charges one attempt at `step`.

        Only after it returns may noise be drawn, or a value that depends on a gradient leave its
        process.

        Raises:
            BudgetSpent: steps plus reserve are charged already; nothing is written.
            PrivacyStateRefused: out of order, other noise than planned, the ledger cannot be
                written, or the witness refuses.
        """
        self._require_session()
        exhaustion = self.budget_spent()
        if exhaustion is not None:
            raise BudgetSpent(f"the privacy budget is spent: {exhaustion}")
        if self.witness is not None:
            self.witness.before_intent()
        fields = {
            "step": step,
            "attempt": attempt,
            "releases": [dict(release) for release in releases],
        }
        self._append("intent", fields)

    def budget_spent(self) -> str | None:
        """Returns a sentence if one more intent would pass the plan's steps plus reserve, or None.

        A run without a formal guarantee has no budget.
        """
        num_charged = self.num_charged
        max_intents = self.plan.max_intents
        if not self.plan.formal_guarantee or num_charged < max_intents:
            return None
        return f"{num_charged} of {max_intents} intents are charged"

    def done(self, step: int, attempt: int, **noised: Any) -> None:
        """Records the update of the last intent as applied.

        Args:
            noised: norms of the noised gradient, for privacy/noise/refutation.py.
        """
        self._require_session()
        self._append("done", {"step": step, "attempt": attempt, **noised})

    def checkpoint(self, step: int, path: str, digest: str, num_checks: int = 0) -> None:
        """Records a checkpoint of `step`, which is whole on the disk.

        Args:
            digest: SHA-256 of its manifest, in hex.
            num_checks: passed in this session (privacy/guards/isolation.py).
        """
        self._require_session()
        fields: dict[str, Any] = {"step": step, "path": path, "digest": digest}
        if num_checks > 0:
            fields["checks"] = num_checks
        self._append("checkpoint", fields)

    def close(self, reason: str) -> None:
        """Ends the run for good, for one of `CLOSE_REASONS`; nothing can follow."""
        self._append("close", {"reason": reason, "num_charged": self.num_charged})

    def _require_session(self) -> None:
        # A session of an earlier start does not count: its nonce would give the same coins again.
        if self._nonce is None:
            raise PrivacyStateRefused(f"{self.path}: this start of the program has no session yet")

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        self._chain.append(kind, self.state.opened["time_utc"], fields)
        if self.witness is not None and kind in _NOTES:
            self.witness.note(_NOTES[kind])
