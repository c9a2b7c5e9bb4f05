"""A data owner's ledger over several runs on the same data: nobody touches the data before its whole budget is reserved.

Hash-chained canonical JSON lines, as in privacy/ledger_format.py: `open` (total epsilon and delta, unit, adjacency, and the order
of the RDP filter where the owner chose it), `reserve` (a run's releases, its reserve for crashes included), `start`
(where the run's own ledger stood at a start of the program) and, where the owner permits such runs at all, `informal` (a run
without a guarantee reads the data: it is counted, and no total covers it). Every change happens under an exclusive file lock
and is durable before it is relied on. A torn last line was never acknowledged, so its run never began: it stays, marked
` #torn`, and is charged nothing.

A run is named by the commitment of its sampling key, so a resume finds its own reservation. `start` finds forks: a copy
of a run folder that goes on after the original did does not hold the line that the original left behind.
What a run did not use is not given back: whether it saw the data cannot be proven.
"""

from __future__ import annotations

import fcntl
import json
import math
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field, replace
from pathlib import Path
from typing import Any

from privacy.accounting import ReleaseGroup
from privacy.durable import publish_new
from privacy.errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused
from privacy.ledger import AppendOnly, Ledger, now
from privacy.ledger_format import NO_PREVIOUS, TORN_MARK, LineRefused, encode_line, hash_line, parse_line
from privacy.plan import ADJACENCY, PrivacyPlan
from privacy.rdp_filter import filter_order, total_epsilon

FORMAT = "shared-1"
DEFAULT_UNIT = "one example"


@dataclass(frozen=True)
class Reservation:
    """What one run may spend at most."""

    run: str
    name: str
    time_utc: str
    group: ReleaseGroup
    noise_tail_delta: float
    adaptive: bool


@dataclass
class SharedState:
    """What the verified lines say."""

    hashes: list[str] = field(default_factory=list)
    opened: dict[str, Any] = field(default_factory=dict)
    reservations: dict[str, Reservation] = field(default_factory=dict)
    positions: dict[str, tuple[int, str]] = field(default_factory=dict)
    informal: dict[str, str] = field(default_factory=dict)
    """Runs without a guarantee: name -> why."""

    @property
    def identity(self) -> str:
        """The hash of the first line: what a run's own ledger remembers."""
        return self.hashes[0]

    def epsilon(self, extra: Reservation | None = None) -> float:
        """Epsilon of everything reserved, and of `extra`, at the owner's delta."""
        entries = [*self.reservations.values(), *([extra] if extra else [])]
        delta = self.opened["delta"] - sum(entry.noise_tail_delta for entry in entries)
        if delta <= 0:
            return float("inf")
        groups = [entry.group for entry in entries]
        adaptive, ceiling = any(entry.adaptive for entry in entries), self.opened["epsilon"]
        order = self.rdp_order(groups[0]) if adaptive else math.inf
        return total_epsilon(groups, delta, adaptive=adaptive, order=order, ceiling=ceiling)

    def rdp_order(self, first: ReleaseGroup) -> float:
        """The filter's order: the owner's, or the best for runs like the first one, which had seen no output."""
        given = self.opened["rdp_order"]
        return float(given) if given is not None else filter_order(first, self.opened["epsilon"], self.opened["delta"])

    def absorb(self, line: bytes) -> None:
        """Checks the next line and takes it in; LineRefused when it is not legal here."""
        if not line.endswith(TORN_MARK):
            self._absorb_record(parse_line(line))
        elif not self.hashes:
            raise LineRefused("a torn line where no line can be written")
        self.hashes.append(hash_line(line))

    def _absorb_record(self, record: dict[str, Any]) -> None:
        if record["seq"] != len(self.hashes) or record["previous"] != (self.hashes[-1] if self.hashes else NO_PREVIOUS):
            raise LineRefused("the hash chain is broken: it does not continue the line before")
        kind = record["type"]
        if (kind == "open") != (not self.hashes):
            raise LineRefused("the first record, and no other, is `open`")
        try:
            if kind == "open":
                self._open(record)
            elif kind == "reserve":
                self._reserve(record)
            elif kind == "start" and record["run"] in self.reservations:
                self.positions[record["run"]] = (int(record["position"]), str(record["hash"]))
            elif kind == "informal" and self.opened.get("informal_runs"):
                self.informal[str(record["name"])] = str(record["reason"])
            else:
                raise LineRefused(f"no record of type {kind!r} belongs here")
        except (KeyError, TypeError, ValueError) as error:
            raise LineRefused(f"an incomplete `{kind}`: {error}") from error

    def _open(self, record: dict[str, Any]) -> None:
        if record["format"] != FORMAT or not (record["epsilon"] > 0 and 0 < record["delta"] < 1):
            raise LineRefused("not a shared ledger of this format")
        self.opened = record

    def _reserve(self, record: dict[str, Any]) -> None:
        if record["run"] in self.reservations:
            raise LineRefused("a second reservation of the same run")
        self.reservations[record["run"]] = Reservation(
            record["run"], record["name"], record["time_utc"], ReleaseGroup(**record["group"]),
            float(record["noise_tail_delta"]), bool(record["adaptive"]),
        )  # fmt: skip


class SharedLedger:
    """One owner's file. Every method locks it, reads and verifies all of it, and appends at most one line."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        epsilon: float,
        delta: float,
        unit: str = DEFAULT_UNIT,
        rdp_order: float | None = None,
        informal_runs: bool = False,
    ) -> SharedLedger:
        """The owner's first line: the most that all runs together may spend, and leave for runs that no total covers.

        Raises: PrivacyConfigError (exit 2): the file exists, or the budget makes no sense.
        """
        if not (0 < epsilon < float("inf") and 0 < delta < 1):
            raise PrivacyConfigError("a shared ledger needs a positive finite epsilon and a delta between 0 and 1")
        if rdp_order is not None and rdp_order <= 1:
            raise PrivacyConfigError(f"the order of an RDP filter is above 1, not {rdp_order}")
        fields = {"format": FORMAT, "epsilon": epsilon, "delta": delta, "unit": unit, "adjacency": ADJACENCY}
        fields |= {"informal_runs": True} if informal_runs else {}
        line = encode_line(0, "open", now(), NO_PREVIOUS, {**fields, "rdp_order": rdp_order})
        try:
            publish_new(Path(path), line + b"\n", 0o644)
        except OSError as error:
            raise PrivacyConfigError(f"{path}: cannot create the shared ledger: {error.strerror or error}") from error
        return cls(path)

    def read(self) -> SharedState:
        """The verified state; PrivacyStateRefused names a line that breaks the chain."""
        with self._locked() as (state, _):
            return state

    def reserve(
        self, run: str, name: str, plan: PrivacyPlan, *, fixed_in_advance: bool = False, unit: str = DEFAULT_UNIT
    ) -> None:
        """Reserves the whole budget of a run, once; a later call for the same run only compares.

        Args:
            run: commitment of the run's sampling key.
            name: for the list of siblings; public.
            fixed_in_advance: the owner's word that these parameters were fixed before any output of the other runs was seen.

        Raises:
            PrivacyConfigError: another unit or adjacency, no formal guarantee, or more than the total even alone (exit 2).
            BudgetSpent: the total does not hold it beside the other reservations (exit 3).
            PrivacyStateRefused: the reservation differs from the recorded one, or the file is refused (exit 4).
        """
        with self._locked() as (state, file):
            self._require_same_terms(state, plan, unit)
            group = plan.release_group(plan.max_intents)
            adaptive = bool(state.reservations) and not fixed_in_advance
            wanted = Reservation(run, name, now(), group, plan.noise_tail_delta, adaptive)
            held = state.reservations.get(run)
            if held is not None:
                if (held.group, held.noise_tail_delta) != (wanted.group, wanted.noise_tail_delta):
                    raise PrivacyStateRefused(f"{self.path}: this run reserved other releases than it plans")
                return
            self._require_room(state, wanted)
            fields = {name: value for name, value in asdict(wanted).items() if name != "time_utc"}
            self._append(state, file, "reserve", wanted.time_utc, fields)

    def note_informal(self, name: str, reason: str) -> None:
        """Counts a run without a guarantee, once, before it reads the data.

        Raises: PrivacyConfigError (exit 2): the owner permits none.
        """
        with self._locked() as (state, file):
            if not state.opened.get("informal_runs"):
                raise PrivacyConfigError(f"{self.path}: the owner permits no run without a formal guarantee: {name}")
            if name not in state.informal:
                self._append(state, file, "informal", now(), {"name": name, "reason": reason})

    def require_no_fork(self, run: str, ledger: Ledger) -> None:
        """PrivacyStateRefused when an earlier start left a line that this copy of the run does not hold."""
        with self._locked() as (state, _):
            self._check_fork(state, run, ledger)

    def start(self, run: str, ledger: Ledger) -> None:
        """Notes where the run's ledger stands, after its `session` record, whose nonce no copy can have."""
        with self._locked() as (state, file):
            self._check_fork(state, run, ledger)
            position, line_hash = ledger.position()
            self._append(state, file, "start", now(), {"run": run, "position": position, "hash": line_hash})

    def _check_fork(self, state: SharedState, run: str, ledger: Ledger) -> None:
        if run not in state.reservations:
            raise PrivacyStateRefused(f"{self.path}: this run has reserved nothing here")
        if run in state.positions:
            try:
                ledger.require_not_shorter_than(*state.positions[run])
            except PrivacyStateRefused as error:
                raise PrivacyStateRefused(f"{self.path}: another copy of this run went on: {error}") from error

    def siblings(self, run: str | None = None) -> list[dict[str, Any]]:
        """All reservations for report and card, this run's marked; public."""
        with self._locked() as (state, _):
            return [
                {
                    "run": entry.run,
                    "name": entry.name,
                    "time_utc": entry.time_utc,
                    "is_this_run": entry.run == run,
                    "chosen_after_outputs": entry.adaptive,
                    "epsilon": replace(state, reservations={}).epsilon(replace(entry, adaptive=False)),
                    **asdict(entry.group),
                }
                for entry in state.reservations.values()
            ]

    def summary(self, run: str | None = None) -> dict[str, Any]:
        """Total, reserved epsilon and siblings, for report and card."""
        state = self.read()
        names = ("epsilon", "delta", "unit", "adjacency")
        first = next(iter(state.reservations.values()), None)
        adaptive = any(entry.adaptive for entry in state.reservations.values())
        return {
            **{name: state.opened[name] for name in names},
            "identity": state.identity,
            "rdp_order": state.opened["rdp_order"] if first is None else state.rdp_order(first.group),
            "accounting": "rdp_filter" if adaptive else "pld",
            "epsilon_reserved": state.epsilon(),
            "runs": self.siblings(run),
            "informal_runs": [{"name": name, "reason": reason} for name, reason in state.informal.items()],
        }

    def _require_same_terms(self, state: SharedState, plan: PrivacyPlan, unit: str) -> None:
        for what, mine, owners in (
            ("unit of privacy", unit, state.opened["unit"]),
            ("adjacency", ADJACENCY, state.opened["adjacency"]),
        ):
            if mine != owners:
                raise PrivacyConfigError(f"{self.path}: {what} is {owners!r} for the owner and {mine!r} for this run")
        if not plan.formal_guarantee:
            raise PrivacyConfigError(f"{self.path}: a run without a formal guarantee cannot reserve: {plan.reasons[0]}")

    def _require_room(self, state: SharedState, wanted: Reservation) -> None:
        total = state.opened["epsilon"]
        alone = replace(state, reservations={}).epsilon(replace(wanted, adaptive=False))
        if alone > total:
            raise PrivacyConfigError(
                f"{self.path}: the run alone needs epsilon {alone:.4f} of {total:g}: it never fits"
            )
        together = state.epsilon(wanted)
        if together > total:
            how = (
                "by the RDP filter"
                if wanted.adaptive or any(e.adaptive for e in state.reservations.values())
                else "by PLD"
            )
            raise BudgetSpent(
                f"{self.path}: with this run epsilon {together:.4f} {how} would be reserved of {total:g} "
                f"({len(state.reservations)} runs reserved {state.epsilon():.4f})"
            )

    @contextmanager
    def _locked(self) -> Iterator[tuple[SharedState, AppendOnly]]:
        file = AppendOnly(self.path, "shared ledger")
        try:
            # A lock of its own, on a descriptor of its own: the appending one compares the file by name.
            lock = os.open(self.path, os.O_RDWR)
            try:
                fcntl.flock(lock, fcntl.LOCK_EX)
                yield self._load(file), file
            finally:
                os.close(lock)
        finally:
            file.release()

    def _load(self, file: AppendOnly) -> SharedState:
        *lines, tail = file.read().split(b"\n")
        state = SharedState()
        if tail and lines:
            file.append(TORN_MARK + b"\n")
            lines.append(tail + TORN_MARK)
        for number, line in enumerate(lines, start=1):
            try:
                state.absorb(line)
            except LineRefused as error:
                raise PrivacyStateRefused(f"{self.path}: line {number}: {error}") from error
        if not lines:
            raise PrivacyStateRefused(f"{self.path}: line 1: no whole record")
        return state

    def _append(
        self, state: SharedState, file: AppendOnly, kind: str, time_utc: str, fields: Mapping[str, Any]
    ) -> None:
        line = encode_line(len(state.hashes), kind, time_utc, state.hashes[-1], json.loads(json.dumps(dict(fields))))
        state.absorb(line)
        file.append(line + b"\n")
