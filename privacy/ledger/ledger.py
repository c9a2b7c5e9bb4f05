"""The privacy ledger's writer: every charge is on the disk before the noise it stands for is drawn.

Crash points, and why none loses a charge or blocks a run:
- creating: the file appears whole, with its `open` record, or not at all (`publish_new`);
- inside a write: the torn line stays and is repaired at the next `Ledger.open` (privacy/ledger/records.py);
- between the ledger and its mirror: the ledger is written first, so the mirror can only be a prefix, which the next
  `Ledger.open` completes. The other order could not tell a crash from a ledger that was rolled back, which is what
  the mirror is there to find;
- between an intent and its `done`: the intent is charged; the retry is a new attempt in a new session, so it has new
  coins and new noise;
- after a failed write or fsync the object refuses all further records: what reached the disk is unknown (a second
  fsync may succeed without the data), and only reading the file again can tell.
One process writes (rank 0, under the run's lock); a file that changed behind its back is refused.

A clock that runs while examples are decoded tells of them (contract 12). So the only time in a ledger is that of the start of the
program that opened it, read before any example is, and every later record repeats it.
"""

from __future__ import annotations

import datetime
import os
import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from privacy.accounting.accountants import ReleaseGroup
from privacy.errors import BudgetSpent, PrivacyStateRefused
from privacy.ledger.durable import fsync_directory, publish_new
from privacy.ledger.records import (
    FORMAT_VERSION,
    NO_PREVIOUS,
    RESTARTED,
    TORN_MARK,
    LedgerState,
    LineRefused,
    encode_line,
    read_state,
)
from privacy.plan import PrivacyPlan, require_equal
from privacy.releases import Release
from privacy.sampling.keys import NONCE_BYTES

PROGRAM_START = datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds")
"""When this program loaded the module, which is before it looks at any data."""


class Witness(Protocol):
    """Is told where the ledger stands, and may object (privacy/ledger/shared.py). Every call is durable on return, or raises."""

    def session_fields(self) -> Mapping[str, Any]:
        """What the `session` record shall remember of the witness."""

    def started(self) -> None:
        """The `session` record is durable; its nonce was not handed out yet."""

    def before_intent(self) -> None:
        """Nothing of the step is charged yet."""

    def reached(self) -> None:
        """A `checkpoint` record is durable."""

    def ended(self) -> None:
        """The `close` record is durable."""


class Ledger:
    """An open ledger. Use `create` or `open`, then `start_session`; every method that writes is durable on return."""

    def __init__(self, path: Path, mirror: Path | None) -> None:
        self.path, self.mirror = path, mirror
        self.witness: Witness | None = None
        self._files: list[AppendOnly] = []
        self._broken: str | None = None
        self._nonce: bytes | None = None
        try:
            self._load()
        except BaseException:
            self.release()
            raise

    @classmethod
    def create(cls, path: Path | str, open_fields: Mapping[str, Any], mirror: Path | str | None = None) -> Ledger:
        """Writes the `open` record of a new run; PrivacyStateRefused when the ledger, or a mirror of one, exists.

        Args:
            open_fields: `plan` (PrivacyPlan.frozen_fields), `key_commitment`, and whatever else describes the run
                (`data_hmac`, code commit, accountant version). Private data only as HMAC under the sampling key.
        """
        path, mirror_path = Path(path), None if mirror is None else Path(mirror)
        if mirror_path is not None and mirror_path.exists():
            raise PrivacyStateRefused(f"{mirror_path}: a mirror without its ledger {path}: the ledger was removed")
        try:
            line = encode_line(0, "open", PROGRAM_START, NO_PREVIOUS, {"format": FORMAT_VERSION, **open_fields})
            LedgerState().check(line)
            publish_new(path, line + b"\n", 0o644)
        except FileExistsError as error:
            raise PrivacyStateRefused(f"{path}: exists; a ledger is never overwritten") from error
        except (OSError, LineRefused, ValueError, TypeError) as error:
            raise PrivacyStateRefused(f"{path}: cannot create the ledger: {error}") from error
        return cls(path, mirror_path)

    @classmethod
    def open(cls, path: Path | str, mirror: Path | str | None = None) -> Ledger:
        """Verifies the whole chain and the mirror, completes the mirror, and repairs a torn last line.

        Raises:
            PrivacyStateRefused: the chain breaks (the line is named), or ledger and mirror do not fit together.
        """
        return cls(Path(path), None if mirror is None else Path(mirror))

    def __enter__(self) -> Ledger:
        return self

    def __exit__(self, *exception: object) -> None:
        self.release()

    def release(self) -> None:
        """Closes the files; the ledger itself stays open for another program (the record for its end is `close`)."""
        self._broken = self._broken or "it was released"
        for file in self._files:
            file.release()
        self._files = []

    # Reading

    @property
    def state(self) -> LedgerState:
        """Everything that the verified lines say."""
        return self._state

    @property
    def plan(self) -> PrivacyPlan:
        return self._state.plan

    @property
    def key_commitment(self) -> str:
        commitment: str = self._state.opened["key_commitment"]
        return commitment

    @property
    def num_charged(self) -> int:
        """Every intent, done or not, and every torn line that may have been one."""
        return self._state.num_charged

    @property
    def last_done_step(self) -> int:
        """The highest step whose `done` is recorded, 0 before the first."""
        return self._state.last_done_step

    @property
    def closed(self) -> str | None:
        """The reason of the `close` record, None while the run may go on."""
        return self._state.closed

    def next_attempt(self, step: int) -> int:
        """The attempt number that coins and intent of `step` must use now."""
        return self._state.next_attempt(step)

    def charged_groups(self) -> list[ReleaseGroup]:
        """Everything charged, for the accountant."""
        return self._state.charged_groups()

    def epsilon(self) -> float | None:
        """Exact epsilon of everything charged (seconds); None without a formal guarantee."""
        return self._state.epsilon()

    def position(self) -> tuple[int, str]:
        """(seq, SHA-256) of the last line, for a checkpoint's manifest."""
        return self._state.num_lines - 1, self._state.hashes[-1]

    def require_not_shorter_than(self, seq: int, line_hash: str) -> None:
        """PrivacyStateRefused unless line `seq` is the one a manifest remembers: no rollback, no fork."""
        hashes = self._state.hashes
        if seq >= len(hashes):
            raise PrivacyStateRefused(
                f"{self.path}: {len(hashes)} lines, but a checkpoint remembers line {seq + 1}: it was rolled back"
            )
        if seq < 0 or hashes[seq] != line_hash:
            raise PrivacyStateRefused(f"{self.path}: line {seq + 1} is not the one that a checkpoint remembers")

    def require_plan(self, plan: PrivacyPlan) -> None:
        """PrivacyConfigError (exit 2) when `plan` differs from the frozen one, naming the field."""
        require_equal(self._state.opened["plan"], plan.frozen_fields(), f"{self.path}: privacy fields are frozen")

    # Writing

    def start_session(
        self, environment: Mapping[str, Any], nonce: bytes | None = None, *, restarted: bool = False
    ) -> bytes:
        """Records a start of the program and returns its 16 fresh bytes, durable before any coin depends on them.

        Args:
            restarted: the run has lost its checkpoints and begins again at step 0; none of them is expected any more.
        """
        nonce = secrets.token_bytes(NONCE_BYTES) if nonce is None else nonce
        fields = {"nonce": nonce.hex(), "mirror": self.mirror is not None, "environment": dict(environment)}
        fields |= {RESTARTED: True} if restarted else {}
        self._append("session", fields | dict(self.witness.session_fields() if self.witness is not None else {}))
        if self.witness is not None:
            self.witness.started()
        self._nonce = nonce
        return nonce

    def intent(self, step: int, attempt: int, releases: Sequence[Release]) -> None:
        """Charges one attempt at `step`; only after it returns may noise be drawn or a gradient's value leave.

        Raises:
            BudgetSpent: steps plus reserve are charged already; nothing is written.
            PrivacyStateRefused: out of order, other noise than planned, the ledger cannot be written, or the witness objects.
        """
        self._require_session()
        self.require_budget(step)
        if self.witness is not None:
            self.witness.before_intent()
        self._append("intent", {"step": step, "attempt": attempt, "releases": [dict(item) for item in releases]})

    def require_budget(self, step: int) -> None:
        """BudgetSpent (exit 3) when one more intent, for `step`, would pass the plan's steps plus reserve.

        Shuffled data allow as many replays as the reserve has: a replay costs a whole epoch's release there, whatever
        the number of steps still unused. A run without a formal guarantee has no budget.
        """
        spent = self.budget_spent(step)
        if spent is not None:
            raise BudgetSpent(f"the privacy budget is spent: {spent}")

    def budget_spent(self, step: int) -> str | None:
        """What is spent when the next intent, for `step`, would pass the budget; None while it would not."""
        if not self._plan.formal_guarantee:
            return None
        charged, allowed = self.num_charged, self._plan.max_intents
        if charged >= allowed:
            return f"{charged} of {allowed} intents are charged"
        replays, reserved = self._state.num_replays, self._plan.reserved_attempts
        if self._plan.sampling == "shuffle" and replays + (self.next_attempt(step) > 0) > reserved:
            return f"{replays} of {reserved} replays of shuffled batches are charged"
        return None

    def done(self, step: int, attempt: int, params_digest: str | None = None) -> None:
        """The update of the last intent is applied; `params_digest` may hash the (noised, hence public) parameters."""
        self._require_session()
        digest = {} if params_digest is None else {"params_digest": params_digest}
        self._append("done", {"step": step, "attempt": attempt, **digest})

    def checkpoint(self, step: int, path: str, digest: str) -> None:
        """A checkpoint of `step` is whole on the disk; `digest` is the SHA-256 of its manifest in hex."""
        self._require_session()
        self._append("checkpoint", {"step": step, "path": path, "digest": digest})
        if self.witness is not None:
            self.witness.reached()

    def close(self, reason: str) -> None:
        """Ends the run for good: "finished", "budget_spent" or "stopped"; nothing can follow."""
        self._append("close", {"reason": reason, "num_charged": self.num_charged})
        if self.witness is not None:
            self.witness.ended()

    def _require_session(self) -> None:
        # A session of an earlier start does not count: its nonce would give the same coins once more.
        if self._nonce is None:
            raise PrivacyStateRefused(f"{self.path}: this start of the program has no session yet")

    def _append(self, kind: str, fields: Mapping[str, Any]) -> None:
        try:
            line = encode_line(
                self._state.num_lines, kind, self._state.opened["time_utc"], self._state.hashes[-1], fields
            )
            self._state.check(line)
        except (LineRefused, ValueError, TypeError) as error:
            raise PrivacyStateRefused(f"{self.path}: refused to write `{kind}`: {error}") from error
        self._write(line + b"\n", line)

    def _write(self, data: bytes, line: bytes) -> None:
        """Appends `data`, which ends `line`, to ledger and mirror, and only then takes the line in."""
        if self._broken is not None:
            raise PrivacyStateRefused(f"{self.path}: no further records: {self._broken}")
        # Set before the write and lifted at the very end: an interruption in between leaves it set.
        self._broken = "an earlier write did not finish"
        for file in self._files:
            file.append(data)
        self._state.absorb(line)
        self._broken = None

    # Opening

    def _load(self) -> None:
        ledger = AppendOnly(self.path, "ledger")
        self._files.append(ledger)
        data = ledger.read()
        self._state, tail = read_state(data, str(self.path))
        self._plan = self._state.plan
        self._join_mirror(data)
        if tail:
            self._write(TORN_MARK + b"\n", tail + TORN_MARK)
        if self._state.torn_run:
            run = self._state.torn_run
            self._append("repair", {"torn_lines": len(run), "charged": sum(run)})

    def _join_mirror(self, data: bytes) -> None:
        if self.mirror is None:
            if self._state.mirrored:
                raise PrivacyStateRefused(f"{self.path}: has had a mirror; without it a rollback would go unseen")
            return
        if not self.mirror.exists():
            if self._state.mirrored:
                raise PrivacyStateRefused(f"{self.mirror}: the mirror of {self.path} is gone")
            create_empty(self.mirror)
        self._files.append(joined_mirror(self.mirror, self.path, data))


class AppendOnly:
    """One file that only grows, and only by us."""

    def __init__(self, path: Path, what: str) -> None:
        self._path, self._what = path, what
        self._size = 0
        self._descriptor: int | None = None
        try:
            self._descriptor = os.open(path, os.O_RDWR | os.O_APPEND)
        except OSError as error:
            raise self._refused("open", error) from error

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None

    def read(self) -> bytes:
        """The whole content, which from now on is what the file must hold."""
        assert self._descriptor is not None
        parts, offset = [], 0
        try:
            while part := os.pread(self._descriptor, 1 << 24, offset):
                parts.append(part)
                offset += len(part)
            # What we base decisions on must not vanish in a power cut: a record may have been read from the page
            # cache whose fsync never returned.
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._refused("read", error) from error
        self._size = offset
        return b"".join(parts)

    def append(self, data: bytes) -> None:
        """One write, one fsync; PrivacyStateRefused when the file is not ours any more or anything falls short."""
        assert self._descriptor is not None
        try:
            self._require_unchanged()
            written = os.write(self._descriptor, data)
            if written != len(data):
                raise OSError(f"only {written} of {len(data)} bytes were written")
            os.fsync(self._descriptor)
        except OSError as error:
            raise self._refused("write", error) from error
        self._size += len(data)

    def _require_unchanged(self) -> None:
        assert self._descriptor is not None
        held, named = os.fstat(self._descriptor), os.stat(self._path)
        if (held.st_dev, held.st_ino) != (named.st_dev, named.st_ino):
            raise OSError("another file has taken its name")
        if held.st_size != self._size:
            raise OSError(f"it has {held.st_size} bytes where this process left {self._size}")

    def _refused(self, verb: str, error: OSError) -> PrivacyStateRefused:
        return PrivacyStateRefused(f"{self._path}: cannot {verb} the {self._what}: {error.strerror or error}")


def joined_mirror(mirror: Path, path: Path, data: bytes) -> AppendOnly:
    """The mirror of `path`, completed to `data`, which `path` holds; PrivacyStateRefused when it is no beginning of that."""
    file = AppendOnly(mirror, "mirror")
    try:
        held = file.read()
        if not data.startswith(held):
            relation = "is longer than" if held.startswith(data) else "differs from"
            raise PrivacyStateRefused(f"{mirror}: the mirror {relation} {path}: the ledger was rolled back")
        if len(held) < len(data):
            file.append(data[len(held) :])
    except BaseException:
        file.release()
        raise
    return file


def create_empty(path: Path) -> None:
    """A new mirror; PrivacyStateRefused when it cannot be made."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o644)
        os.close(descriptor)
        fsync_directory(path.parent)
    except OSError as error:
        raise PrivacyStateRefused(f"{path}: cannot create the mirror: {error.strerror or error}") from error
