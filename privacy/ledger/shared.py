"""A data owner's ledger over several runs on the same data: nobody touches the data before its whole budget is reserved.

Every change happens under an exclusive file lock and is durable before it is relied on; the form of the lines is
privacy/ledger/chain.py's. What a run did not use is not given back: whether it saw the data cannot be proven.

A run is named by the commitment of its sampling key, so a resume finds its own reservation. So does every copy of its folder:
`Membership` keeps two of them from spending it. A run's sessions remember the last line here, so lines that were cut off are
missed at its next start.

The records are in privacy/ledger/shared_records.py.
"""

import contextlib
import os
from collections.abc import Iterator, Mapping
from dataclasses import asdict, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any, Literal, Self

from ..accounting.rounding import rounded_up
from ..errors import BudgetSpent, PrivacyConfigError, PrivacyStateRefused, refusing
from ..files.durable import require_distinct_files
from ..plan.numbers import ADJACENCY, PrivacyPlan
from .chain import ChainFile, LineRefused, create_chain, create_mirror, read_chain
from .ledger import PROGRAM_START, Ledger
from .records import LedgerState
from .shared_records import FORMAT, UNIT, Reservation, SharedState


class SharedLedger:
    """One owner's file. What writes locks it, reads and verifies all of it, and appends at most one line; reports only look."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)

    @classmethod
    def create(
        cls,
        path: Path | str,
        *,
        epsilon: float,
        delta: float,
        informal_runs: bool = False,
        mirror: Path | str | None = None,
    ) -> Self:
        """The owner's first line: the most that all runs together may spend, and whether runs that no total covers are permitted.

        Args:
            mirror: a second copy, best on another file system: it finds lines that were cut off, whoever comes next.

        Raises: PrivacyConfigError (exit 2): the file or its mirror exists, or the budget makes no sense.
        """
        if not (0 < epsilon < float("inf") and 0 < delta < 1):
            raise PrivacyConfigError(
                f"a shared ledger needs a positive finite epsilon and a delta between 0 and 1, not {epsilon:g} and {delta:g}"
            )
        if Path(path).exists():
            raise PrivacyConfigError(
                f"{path} exists already; to see it: shared_ledger.py show {path}"
            )
        fields = {
            "format": FORMAT,
            "epsilon": epsilon,
            "delta": delta,
            "unit": UNIT,
            "adjacency": ADJACENCY,
        }
        fields |= {"informal_runs": True} if informal_runs else {}
        if not Path(path).parent.is_dir():
            raise PrivacyConfigError(f"{path}: make its folder first")
        if mirror is not None:
            second = Path(mirror).resolve()
            require_distinct_files({"the shared ledger": Path(path), "its mirror": second})
            if second.exists() and second.stat().st_size:
                raise PrivacyConfigError(
                    f"{second}: exists; a mirror of a new shared ledger is a new file"
                )
            if not second.exists():
                create_mirror(second)
            fields["mirror"] = str(second)
        created = datetime.now(UTC).isoformat(
            timespec="milliseconds"
        )  # no run has looked at the data yet
        try:
            create_chain(Path(path), SharedState(), created, fields)
        except (OSError, LineRefused) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise PrivacyConfigError(
                f"{path}: cannot create the shared ledger: {reason or error}"
            ) from error
        return cls(path)

    def mirror(self) -> Path | None:
        """Where the owner's mirror lies, as the first line says; PrivacyStateRefused when that cannot be read."""
        state = SharedState()
        with refusing(f"{self.path}: cannot read the shared ledger"):
            if self.path.exists() and not self.path.is_file():
                raise OSError("it is no regular file")  # a pipe would block
            with self.path.open("rb") as file:
                read_chain(file.readline(), state, str(self.path))
        return state.mirror

    def read(self) -> SharedState:
        """The verified state, durable, for a decision; writes nothing. PrivacyStateRefused names a line that breaks the chain."""
        with self.locked() as chain:
            return chain.state

    def look(self) -> SharedState:
        """The verified state as it lies there, for a report: without lock and repair; a line being written is left out.

        Raises: PrivacyStateRefused as `read`, also where the owner's mirror does not fit.
        """
        state = SharedState()
        with refusing(f"{self.path}: cannot read the shared ledger"):
            read_chain(self.path.read_bytes(), state, str(self.path))
            if state.mirror is not None:
                copied = state.mirror.read_bytes()  # it grows after the file, which is read again
                if not self.path.read_bytes().startswith(copied):
                    raise PrivacyStateRefused(
                        f"{state.mirror}: the mirror differs from {self.path}"
                    )
        return state

    @contextlib.contextmanager
    def joined(
        self,
        run: str,
        name: str,
        plan: PrivacyPlan,
        seen: LedgerState | None = None,
        *,
        fixed_in_advance: bool = False,
        time_utc: str = PROGRAM_START,
    ) -> Iterator[None]:
        """Surrounds the making or opening of a run's own ledger, before the run reads the data: reserves its whole budget or,
        without a guarantee, counts it where the owner permits it. Once: a later call for the same run only compares.

        What is refused is refused before the body, so that no ledger is opened for it; the reservation is written after the
        body, and a torn line is ended no earlier: it reserves nothing, so the budget is judged the same with and without its
        end. Nobody else uses the file meanwhile.

        Args:
            run: commitment of the run's sampling key.
            name: for the list of siblings; public.
            seen: what the run's own ledger says; None for a new one.
            fixed_in_advance: the owner's word that these parameters were fixed before any output of the other runs was seen.
            time_utc: of the run's `open` record, read before any data were.

        Raises:
            PrivacyConfigError: no formal guarantee where the owner permits none, or more than the total even alone (exit 2).
            BudgetSpent: the total has no room for it next to the other reservations (exit 3).
            PrivacyStateRefused: the reservation differs from the recorded one, lines that the run has seen here are gone, or the
                file is refused (exit 4).
        """
        with self.locked() as chain:
            state = chain.state
            if seen is not None:
                self.require_remembered(seen, state)
            kind, entry = "reserve", None
            if plan.formal_guarantee or not state.opened.get("informal_runs"):
                entry = self._reservation(state, run, name, plan, fixed_in_advance)
            elif not state.knows(run):  # trained anew under its name it is another run
                kind, entry = "informal", {"run": run, "name": name, "reason": plan.reasons[0]}
            yield
            if entry is not None:
                chain.mend()
                chain.append(kind, time_utc, entry)

    def require_remembered(self, state: LedgerState, shared: SharedState) -> None:
        """PrivacyStateRefused when this file, read as `shared`, no longer holds what a run with the ledger `state` saw in it."""
        run, seen = state.opened["key_commitment"], state.shared_seen
        lost = seen is not None and (
            seen[0] >= shared.num_lines or shared.hashes[seen[0]] != seen[1]
        )
        if lost or (state.nonces and not shared.knows(run)):
            raise PrivacyStateRefused(
                f"{self.path}: rolled back: lines are gone that run {run[:12]} has seen or written; bring back the newest copy"
            )

    def _reservation(
        self, state: SharedState, run: str, name: str, plan: PrivacyPlan, fixed_in_advance: bool
    ) -> dict[str, Any] | None:
        """The fields of the reservation; None where it is there already."""
        total = state.opened["epsilon"]
        if not plan.formal_guarantee:
            reason = plan.reasons[0]
            raise PrivacyConfigError(
                f"{self.path}: a run without a formal guarantee cannot reserve: {reason}"
            )
        # What can have been fixed in advance: in a study's own ledger only the points of its grid were, and a point of a grid is
        # one run: whoever trains it anew has seen what came of it.
        outside = "" in state.grids and name not in state.grids[""]
        again = name in state.names and any(name in names for names in state.gridded.values())
        adaptive = bool(state.reservations) and (outside or again or not fixed_in_advance)
        group = plan.release_group(plan.max_intents)
        reservation = Reservation(run, name, "", group, plan.noise_tail_delta, adaptive)
        earlier = state.reservations.get(run)
        if earlier is not None:
            if (earlier.group, earlier.noise_tail_delta) != (group, plan.noise_tail_delta):
                raise PrivacyStateRefused(
                    f"{self.path}: this run reserved other releases than it plans"
                )
            return None
        alone = replace(state, reservations={}).epsilon(replace(reservation, adaptive=False))
        if alone > total:
            never = f"the run alone needs epsilon {rounded_up(alone)} of {total:g}: it never fits"
            raise PrivacyConfigError(f"{self.path}: {never}")
        together = state.epsilon(reservation)
        if together > total:
            by_filter = adaptive or any(entry.adaptive for entry in state.reservations.values())
            no_delta = f"; at a total of {total:g} the caps of the batches leave no delta: an RDP filter needs less"
            accounting = "the RDP filter" if by_filter else "PLD"
            raise BudgetSpent(
                f"{self.path}: with this run epsilon {rounded_up(together)} by {accounting} would be "
                f"reserved of {total:g} ({len(state.reservations)} runs reserved {rounded_up(state.epsilon())})"
                f"{no_delta if together == float('inf') else ''}"
            )
        return {name: value for name, value in asdict(reservation).items() if name != "time_utc"}

    def freeze_grid(
        self, study: str, points: Mapping[str, str], *, begun: bool
    ) -> Mapping[str, str]:
        """Fixes a study's points until one of its runs is known to have begun; returns those that bind from now on.

        Args:
            study: "" when the ledger is the study's own, so that any run counts as one of its runs.
            points: name -> digest of the recipe.
            begun: whether anything outside of this ledger shows a run.
        """
        with self.locked() as chain:  # a study that is refused later leaves the file as it was
            state = chain.state
            frozen = state.grids.get(study, {})
            if frozen != points and not begun and not state.has_begun(study):
                chain.mend()
                chain.append("grid", PROGRAM_START, {"study": study, "points": dict(points)})
                return points
            return frozen

    def summary(self, run: str | None = None) -> dict[str, Any]:
        """Total, reserved epsilon and all runs, this one marked, for report and card; the file is read alone (`look`)."""
        state = self.look()
        entries = list(state.reservations.values())
        return {
            **{name: state.opened[name] for name in ("epsilon", "delta", "unit", "adjacency")},
            "identity": state.identity,
            "rdp_order": state.rdp_order(entries[0].group) if entries else None,
            "accounting": "rdp_filter" if any(entry.adaptive for entry in entries) else "pld",
            "epsilon_reserved": state.epsilon(),
            "runs": [
                {
                    "run": entry.run,
                    "name": entry.name,
                    "time_utc": entry.time_utc,
                    "is_this_run": entry.run == run,
                    "chosen_after_outputs": entry.adaptive,
                    "epsilon": replace(state, reservations={}).epsilon(
                        replace(entry, adaptive=False)
                    ),
                    **asdict(entry.group),
                }
                for entry in entries
            ],
            "informal_runs": [
                {"name": name, "reason": reason} for name, reason in state.informal.values()
            ],
        }

    def locked(self) -> ChainFile[SharedState]:
        """The file and the owner's mirror of it, verified; in a `with` statement, nobody else uses them inside."""
        return ChainFile(self.path, SharedState(), "shared ledger", lambda state: state.mirror)


class Membership:
    """A run's part in a shared ledger: only one copy of the run spends what was reserved. The witness of its own ledger.

    The run's own ledger comes first, always, and then the shared one. So what is noted there is behind an honest run or level
    with it, wherever a crash fell, and a ledger without the noted line is that of a copy or of a backup: exit 4. Noted are the
    `session` record of a start, whose nonce no copy can have, every checkpoint, and the end; a run that is closed there cannot
    go on. A run whose program died between the two `close` is closed here by the next start, once that is judged.

    Between two checkpoints nothing is noted. A backup from between them, restored after a kill before the next one, can repeat
    the steps between without a charge; a mirror of the run's ledger (`privacy.ledger_mirror`) finds that too.

    The newest `start` of a run owns its reservation. An older session is refused at its next intent, which costs one look at the
    file's size where nobody else has written: at most the step that is under way is released in addition to the newer session's.

    Raises (everywhere): PrivacyStateRefused (exit 4): another copy went on, or the run is closed, or the file is refused.
    """

    def __init__(self, shared: SharedLedger, run: str, ledger: Ledger) -> None:
        self._shared, self._run, self._ledger = shared, run, ledger
        self._start: tuple[int, str] | None = None
        self._looked: tuple[int, int, int] | None = None
        with shared.locked() as chain:
            self._require_no_fork(chain.state)

    def mend(self) -> None:
        """Closes the run here too, where a crash came between the two `close`."""
        run, is_closed = self._run, self._ledger.state.closed is not None
        with self._shared.locked() as chain:
            self._require_no_fork(chain.state)
            if is_closed and run in chain.state.starts and run not in chain.state.closed:
                self._append(chain, "close")

    def session_fields(self) -> dict[str, Any]:
        """The last line of the shared ledger: everything before it must still be there at the next start."""
        state = self._shared.read()
        return {"shared_seq": len(state.hashes) - 1, "shared_hash": state.hashes[-1]}

    def before_intent(self) -> None:
        """Nobody else has taken the reservation over."""
        # Before the reading: what is written after it is read the next time. Over NFS opening is what asks the server.
        with (
            refusing(f"{self._shared.path}: cannot use the shared ledger"),
            self._shared.path.open("rb") as file,
        ):
            status = os.fstat(file.fileno())
        identity = status.st_dev, status.st_ino, status.st_size
        if self._looked != identity:
            with self._shared.locked() as chain:
                self._require_own(chain.state)
            self._looked = identity

    def note(self, kind: Literal["start", "at", "close"]) -> None:
        """Notes where the run's ledger stands: at a `session`, at a `checkpoint`, or at the end.

        A `start` takes the reservation over, and its nonce, which was not handed out yet, no copy can have.
        """
        with self._shared.locked() as chain:
            if kind == "start":
                self._start = None  # the newest start becomes this session's
            self._require_own(chain.state)
            self._append(chain, kind)
            if kind == "start":
                self._start = chain.state.starts[self._run]

    def _append(self, chain: ChainFile[SharedState], kind: str) -> None:
        chain.mend()
        position, line_hash = self._ledger.position()
        fields = {"run": self._run, "position": position, "hash": line_hash}
        chain.append(kind, self._ledger.state.opened["time_utc"], fields)

    def _require_own(self, state: SharedState) -> None:
        self._require_no_fork(state)
        if self._start is not None and state.starts.get(self._run) != self._start:
            raise PrivacyStateRefused(
                f"{self._shared.path}: its newest start of this run is not this session's: another copy has started since, or "
                "the file was rolled back; this one stops"
            )

    def _require_no_fork(self, state: SharedState) -> None:
        if not state.knows(self._run):
            raise PrivacyStateRefused(f"{self._shared.path}: this run has reserved nothing here")
        if self._run in state.positions:
            try:
                self._ledger.require_not_shorter_than(*state.positions[self._run])
            except PrivacyStateRefused as error:
                raise PrivacyStateRefused(
                    f"{self._shared.path}: another copy of this run went on: {error}"
                ) from error
        if self._run in state.closed and self._ledger.state.closed is None:
            raise PrivacyStateRefused(
                f"{self._shared.path}: this run is closed; what would go on is an older copy of it"
            )
