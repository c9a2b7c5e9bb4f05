"""The privacy ledger's format: hash-chained canonical JSON lines, and the one reading of them that is legal.

Every line is a JSON object `{"seq", "type", "time_utc", "previous", ...}` in exactly the form that `encode_line`
writes; `seq` is the line number from 0, `previous` the SHA-256 of the bytes of the line before (64 zeros for the
first). Legal order: `open` first and once; `session` starts a program; then `intent` [`done`] per step and
`checkpoint`; `close` ends the run.

A crash can tear the last line only, since each line is durable before the next is begun. A torn line stays: a
restart ends it with ` #torn` and a newline, so that it can never be read as a record, and the chain goes on over its
bytes with a `repair` record. When the repair is torn as well, the torn lines follow each other and one `repair`
counts them all. Nothing else that is not a record is accepted. This module only reads; privacy/ledger/ledger.py writes.
"""

from __future__ import annotations

import hashlib
import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from privacy.accounting.accountants import ReleaseGroup, epsilon, joint_noise_multiplier
from privacy.adaptive_clipping import RANGE, AdaptiveClipping
from privacy.errors import PrivacyConfigError, PrivacyStateRefused
from privacy.plan import PrivacyPlan
from privacy.releases import step_releases

FORMAT_VERSION = 1
TORN_MARK = b" #torn"
NO_PREVIOUS = "0" * 64
CLOSE_REASONS = ("finished", "budget_spent", "stopped")
RESTARTED = "restarted_from_step_0"
"""Of a `session`: the checkpoints that the ledger knows were gone, and the run began again by permission."""
_HEADER = ("seq", "type", "time_utc", "previous")
_HEX = re.compile(r"[0-9a-f]+")


def encode_line(seq: int, kind: str, time_utc: str, previous: str, fields: Mapping[str, Any]) -> bytes:
    """The canonical bytes of one record, without the newline: header first, then the fields in sorted order."""
    clash = [name for name in _HEADER if name in fields]
    if clash:
        raise PrivacyStateRefused(f"a ledger record cannot carry its own {', '.join(clash)}")
    # Through JSON once, so that nested objects are sorted too while the header keeps its place in front: the type
    # of a torn line must be told from its first bytes.
    ordered = json.loads(json.dumps(dict(fields), sort_keys=True, allow_nan=False))
    record = {"seq": seq, "type": kind, "time_utc": time_utc, "previous": previous, **ordered}
    return json.dumps(record, separators=(",", ":"), ensure_ascii=True, allow_nan=False).encode("ascii")


def hash_line(line: bytes) -> str:
    return hashlib.sha256(line).hexdigest()


def may_be_intent(torn: bytes, seq: int) -> bool:
    """Whether a torn line may have been an intent: everything that is not visibly the start of another type."""
    head = b'{"seq":%d,"type":"' % seq
    return not (torn.startswith(head) and torn[len(head) : len(head) + 1] in (b"o", b"s", b"d", b"c", b"r"))


@dataclass(frozen=True)
class Intent:
    """One charged attempt: its line from 0, and what with the session's nonce (hex) names its coins."""

    seq: int
    nonce: str
    step: int
    attempt: int


class LineRefused(Exception):
    """A line that is not legal at its place; becomes PrivacyStateRefused with file and line number."""


@dataclass
class LedgerState:
    """What the lines so far say. `check` tests the next line, `absorb` adds it."""

    hashes: list[str] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    nonces: list[str] = field(default_factory=list)
    mirrored: bool = False
    shared_seen: tuple[int, str] | None = None  # last line (seq, hash) of the shared ledger at the newest session
    session_active: bool = False
    intents: list[Intent] = field(default_factory=list)
    attempts: Counter[int] = field(default_factory=Counter)
    pending: Intent | None = None
    position_in_session: int | None = None
    last_done_step: int = 0
    checkpointed_step: int | None = None  # of the newest checkpoint since the run began, or began again at step 0
    charged_torn: int = 0
    torn_run: list[bool] = field(default_factory=list)
    closed: str | None = None

    @property
    def num_lines(self) -> int:
        return len(self.hashes)

    @property
    def plan(self) -> PrivacyPlan:
        """The plan frozen in the `open` record."""
        return PrivacyPlan.from_frozen(self.opened["plan"])

    @property
    def num_charged(self) -> int:
        """Intents, done or not, and torn lines that may have been intents."""
        return len(self.intents) + self.charged_torn

    @property
    def last_step(self) -> int:
        """The highest step that was ever attempted."""
        return max(self.attempts, default=0)

    @property
    def num_replays(self) -> int:
        """Intents beyond the first of their step; a torn line counts as one."""
        return self.num_charged - len(self.attempts)

    def next_attempt(self, step: int) -> int:
        """0 for a step never tried, else one more than its latest attempt."""
        return self.attempts[step]

    def charged_groups(self) -> list[ReleaseGroup]:
        """Everything charged, for the accountant, from the ledger alone: every intent has the planned noise."""
        if not self.num_charged:
            return []
        if self.plan.sampling == "shuffle":
            return [self.plan.shuffled_group(self.last_step, self.num_replays)]
        return [self.plan.release_group(self.num_charged)]

    def epsilon(self) -> float | None:
        """Epsilon of everything charged at the plan's delta; None when the plan makes no formal claim."""
        plan = self.plan
        return epsilon(self.charged_groups(), plan.accounted_delta) if plan.formal_guarantee else None

    def check(self, line: bytes) -> dict[str, Any] | None:
        """The record of the next line, or None for a torn line; LineRefused when it is not legal here."""
        if line.endswith(TORN_MARK):
            if not self.hashes or self.closed:
                raise LineRefused("a torn line where no line can be written")
            return None
        record = parse_line(line)
        if record["seq"] != self.num_lines:
            raise LineRefused(f"sequence number {record['seq']} where {self.num_lines} must follow")
        if record["previous"] != (self.hashes[-1] if self.hashes else NO_PREVIOUS):
            raise LineRefused("the hash chain is broken: it does not continue the line before")
        if (record["type"] == "open") != (not self.hashes):
            raise LineRefused("the first record, and no other, is `open`")
        if self.closed:
            raise LineRefused("a record after `close`")
        if (record["type"] == "repair") != bool(self.torn_run):
            raise LineRefused("a `repair` follows torn lines, and nothing else does")
        checker = _CHECKERS.get(record["type"])
        if checker is None:
            raise LineRefused(f"unknown record type {record['type']!r}")
        checker(self, record)
        return record

    def absorb(self, line: bytes) -> None:
        """Checks the next line and takes it in."""
        record = self.check(line)
        if record is None:
            # Without a session no intent can have been begun.
            charged = bool(self.nonces) and may_be_intent(line, self.num_lines)
            self.torn_run.append(charged)
            self.charged_torn += charged
        else:
            _APPLIERS[record["type"]](self, record)
        self.hashes.append(hash_line(line))


def read_state(data: bytes, name: str) -> tuple[LedgerState, bytes]:
    """Verifies all lines of a ledger: its state and the unterminated last bytes; PrivacyStateRefused names the line."""
    *lines, tail = data.split(b"\n")
    if not lines:
        raise PrivacyStateRefused(f"{name}: line 1: no whole record; a ledger is created with its first one")
    state = LedgerState()
    for number, line in enumerate(lines, start=1):
        try:
            state.absorb(line)
        except LineRefused as error:
            raise PrivacyStateRefused(f"{name}: line {number}: {error}") from error
    if tail and state.closed:
        raise PrivacyStateRefused(f"{name}: line {len(lines) + 1}: bytes after `close`")
    return state, tail


def read_ledger(path: Path | str) -> LedgerState:
    """Verifies a ledger without writing to it; a torn last line is charged as the repair would charge it."""
    path = Path(path)
    try:
        data = path.read_bytes()
    except OSError as error:
        raise PrivacyStateRefused(f"{path}: cannot read the ledger: {error.strerror or error}") from error
    state, tail = read_state(data, str(path))
    if tail:
        state.absorb(tail + TORN_MARK)
    return state


def noise_multiplier_of(releases: object) -> float:
    """Joint std / sensitivity of a step's releases; LineRefused when they are not well formed."""
    if not isinstance(releases, list) or not releases:
        raise LineRefused("an intent lists its releases")
    ratios = []
    for release in releases:
        if not isinstance(release, dict) or set(release) != {"name", "std", "sensitivity"}:
            raise LineRefused("a release has name, std and sensitivity")
        std, sensitivity = release["std"], release["sensitivity"]
        if not (_is_number(std) and std >= 0 and _is_number(sensitivity) and sensitivity > 0):
            raise LineRefused("std must be >= 0 and sensitivity > 0, both finite")
        ratios.append(std / sensitivity)
    return joint_noise_multiplier(ratios)


def parse_line(line: bytes) -> dict[str, Any]:
    try:
        record = json.loads(line)
        header = [record.pop(name) for name in _HEADER]
        seq, kind, time_utc, previous = header
        canonical = encode_line(seq, kind, time_utc, previous, record)
    except (ValueError, KeyError, AttributeError, TypeError, RecursionError, PrivacyStateRefused) as error:
        raise LineRefused("not a ledger record") from error
    if canonical != line or type(seq) is not int or not all(isinstance(item, str) for item in header[1:]):
        raise LineRefused("not in the ledger's canonical form")
    fields: dict[str, Any] = dict(zip(_HEADER, header, strict=True)) | record
    return fields


def _is_number(value: object) -> bool:
    return type(value) in (int, float) and math.isfinite(value)  # type: ignore[arg-type]


def _require(condition: bool, message: str) -> None:
    if not condition:
        raise LineRefused(message)


def _is_hex(value: object, digits: int) -> bool:
    return isinstance(value, str) and len(value) == digits and _HEX.fullmatch(value) is not None


def _whole(record: dict[str, Any], name: str, low: int) -> int:
    value = record.get(name)
    if type(value) is not int or value < low:
        raise LineRefused(f"{name} must be an integer >= {low}")
    return value


def _check_open(state: LedgerState, record: dict[str, Any]) -> None:
    _require(record.get("format") == FORMAT_VERSION, f"ledger format {record.get('format')!r} is not {FORMAT_VERSION}")
    _require(_is_hex(record.get("key_commitment"), 64), "`open` needs the commitment of the sampling key")
    _require(isinstance(record.get("plan"), dict), "`open` needs the frozen plan")
    try:
        PrivacyPlan.from_frozen(record["plan"])
    except (PrivacyConfigError, TypeError) as error:
        raise LineRefused(f"the frozen plan is refused: {error}") from error


def _check_session(state: LedgerState, record: dict[str, Any]) -> None:
    _require(_is_hex(record.get("nonce"), 32), "a session has a nonce of 16 bytes in hex")
    _require(record["nonce"] not in state.nonces, "the session nonce was used before: coins would repeat")
    _require(type(record.get("mirror")) is bool, "a session says whether the ledger is mirrored")
    restarted = record.get(RESTARTED, False)
    _require(type(restarted) is bool, f"{RESTARTED} of a session is true or false")
    seq, line_hash = record.get("shared_seq", 0), record.get("shared_hash", NO_PREVIOUS)
    _require(type(seq) is int and seq >= 0 and _is_hex(line_hash, 64), "a line is named by number and SHA-256 in hex")


def _check_intent(state: LedgerState, record: dict[str, Any]) -> None:
    _require(state.session_active, "an intent outside of a session")
    plan = state.opened["plan"]
    step, attempt = _whole(record, "step", 1), _whole(record, "attempt", 0)
    _require(step <= plan["num_steps"], f"step {step} is beyond the planned {plan['num_steps']}")
    if state.pending is not None:
        _require(step == state.pending.step, f"step {step} while step {state.pending.step} is not done")
    elif state.position_in_session is not None:
        _require(step == state.position_in_session + 1, f"step {step} does not follow {state.position_in_session}")
    else:
        _require(step <= state.last_done_step + 1, f"step {step} skips step {state.last_done_step + 1}")
    _require(
        attempt == state.next_attempt(step), f"attempt {attempt} of step {step}: {state.next_attempt(step)} is next"
    )
    _check_releases(state.opened, record.get("releases"))


def _check_releases(opened: Mapping[str, Any], releases: Any) -> None:
    """A step releases what the plan says, to rounding: less noise breaks the claim, and more would lower epsilon unearned."""
    plan, sigma = opened["plan"], noise_multiplier_of(releases)
    if "head" in opened:  # statistics of other names and sensitivities; together they are worth the planned noise
        _require(_equal(sigma, plan["noise_multiplier"]), f"noise multiplier {sigma:g} is not the planned one")
        return
    bound, adaptive = plan["max_grad_norm"], plan.get("adaptive_clipping")
    if adaptive is not None:  # C moves
        low, high = bound / RANGE, bound * RANGE
        bound, adaptive = releases[0]["sensitivity"], AdaptiveClipping(**adaptive)
        _require(low <= bound <= high, f"C = {bound:g} is outside of its range")
    planned = step_releases(plan["noise_multiplier"], bound, adaptive)
    names = [release["name"] for release in planned]
    _require([r["name"] for r in releases] == names, f"a step of this plan releases {' and '.join(names)}")
    for stated, wanted in zip(releases, planned, strict=True):
        _require(
            _equal(stated["std"], wanted["std"]) and _equal(stated["sensitivity"], wanted["sensitivity"]),
            f"{stated['name']} states noise of {stated['std']:g} for a sensitivity of {stated['sensitivity']:g}, where the "
            f"plan has {wanted['std']:g} for {wanted['sensitivity']:g}",
        )


def _equal(stated: float, planned: float) -> bool:
    return math.isclose(stated, planned, rel_tol=1e-9)


def _check_done(state: LedgerState, record: dict[str, Any]) -> None:
    pending = state.pending
    found = (_whole(record, "step", 1), _whole(record, "attempt", 0))
    _require(pending is not None and found == (pending.step, pending.attempt), "`done` without its intent just before")


def _check_checkpoint(state: LedgerState, record: dict[str, Any]) -> None:
    _require(state.session_active, "a checkpoint outside of a session")
    _require(_whole(record, "step", 0) <= state.last_done_step, "a checkpoint of a step that is not done")
    _require(_is_hex(record.get("digest"), 64), "a checkpoint has a SHA-256 digest in hex")


def _check_repair(state: LedgerState, record: dict[str, Any]) -> None:
    found = (_whole(record, "torn_lines", 1), _whole(record, "charged", 0))
    _require(found == (len(state.torn_run), sum(state.torn_run)), "the repair does not match the torn lines before it")


def _check_close(state: LedgerState, record: dict[str, Any]) -> None:
    _require(record.get("reason") in CLOSE_REASONS, f"`close` needs a reason out of {', '.join(CLOSE_REASONS)}")
    _require(_whole(record, "num_charged", 0) == state.num_charged, "`close` states another number of charged intents")


def _apply_open(state: LedgerState, record: dict[str, Any]) -> None:
    state.opened = record


def _apply_session(state: LedgerState, record: dict[str, Any]) -> None:
    state.nonces.append(record["nonce"])
    state.mirrored = state.mirrored or record["mirror"]
    if "shared_hash" in record:
        state.shared_seen = (record.get("shared_seq", 0), record["shared_hash"])
    if record.get(RESTARTED):
        state.checkpointed_step = None
    state.session_active = True
    state.pending = state.position_in_session = None


def _apply_intent(state: LedgerState, record: dict[str, Any]) -> None:
    state.pending = Intent(record["seq"], state.nonces[-1], record["step"], record["attempt"])
    state.intents.append(state.pending)
    state.attempts[record["step"]] += 1


def _apply_done(state: LedgerState, record: dict[str, Any]) -> None:
    state.pending, state.position_in_session = None, record["step"]
    state.last_done_step = max(state.last_done_step, record["step"])


def _apply_checkpoint(state: LedgerState, record: dict[str, Any]) -> None:
    state.checkpointed_step = record["step"]


def _apply_repair(state: LedgerState, record: dict[str, Any]) -> None:
    state.torn_run = []
    # The program that tore the line is dead: only a new session, with a new nonce, can go on.
    state.session_active = False
    state.pending = state.position_in_session = None


def _apply_close(state: LedgerState, record: dict[str, Any]) -> None:
    state.closed = record["reason"]


_CHECKERS = {
    "open": _check_open,
    "session": _check_session,
    "intent": _check_intent,
    "done": _check_done,
    "checkpoint": _check_checkpoint,
    "repair": _check_repair,
    "close": _check_close,
}
_APPLIERS = {
    "open": _apply_open,
    "session": _apply_session,
    "intent": _apply_intent,
    "done": _apply_done,
    "checkpoint": _apply_checkpoint,
    "repair": _apply_repair,
    "close": _apply_close,
}
