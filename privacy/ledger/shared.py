"""A data owner's ledger over several runs on the same data, which reserves each run's whole budget.

Every change happens under an exclusive file lock and is durable before it is relied on. A run
reserves before it reads the data; unused budget is not given back, since nothing proves that the
run did not see the data. docs/ledger.md says how copies of a run and cut lines are found; the
records are in privacy/ledger/shared_records.py.
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
    """A data owner's file.

    Each method that writes locks the file, verifies all of it, and appends at most one line.
    Reports only read it (`read_unlocked`).
    """

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
        """Writes the owner's first line and returns the ledger.

        Args:
            epsilon, delta: the most that all runs together may spend.
            informal_runs: whether runs that no total covers are permitted.
            mirror: a second copy, best on another file system: it finds lines that were cut off.

        Raises:
            PrivacyConfigError: the file or its mirror exists, or the budget makes no sense
                (exit 2).
        """
        if not (0 < epsilon < float("inf") and 0 < delta < 1):
            raise PrivacyConfigError(
                "a shared ledger needs a positive finite epsilon and a delta between 0 and 1, not "
                f"{epsilon:g} and {delta:g}"
            )
        path = Path(path)
        if path.exists():
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
        if informal_runs:
            fields["informal_runs"] = True
        if not path.parent.is_dir():
            raise PrivacyConfigError(f"{path}: make its folder first")
        if mirror is not None:
            mirror_path = Path(mirror).resolve()
            require_distinct_files({"the shared ledger": path, "its mirror": mirror_path})
            if mirror_path.exists() and mirror_path.stat().st_size:
                raise PrivacyConfigError(
                    f"{mirror_path}: exists; a mirror of a new shared ledger is a new file"
                )
            if not mirror_path.exists():
                create_mirror(mirror_path)
            fields["mirror"] = str(mirror_path)
        # A clock is public here: no run has looked at the data yet.
        time_utc = datetime.now(UTC).isoformat(timespec="milliseconds")
        try:
            create_chain(path, SharedState(), time_utc, fields)
        except (OSError, LineRefused) as error:
            reason = error.strerror if isinstance(error, OSError) else None
            raise PrivacyConfigError(
                f"{path}: cannot create the shared ledger: {reason or error}"
            ) from error
        return cls(path)

    def mirror(self) -> Path | None:
        """Returns the path of the owner's mirror, which the first line names.

        Raises:
            PrivacyStateRefused: the first line cannot be read.
        """
        state = SharedState()
        with refusing(f"{self.path}: cannot read the shared ledger"):
            # A pipe would block.
            if self.path.exists() and not self.path.is_file():
                raise OSError("it is not a regular file")
            with self.path.open("rb") as file:
                read_chain(file.readline(), state, str(self.path))
        return state.mirror

    def read(self) -> SharedState:
        """Returns the verified state, durable, for a decision; writes nothing.

        Raises:
            PrivacyStateRefused: the chain breaks; the message names the line.
        """
        with self.locked() as chain:
            return chain.state

    def read_unlocked(self) -> SharedState:
        """Returns the verified state for a report, without lock and repair.

        A line that is being written is left out.

        Raises:
            PrivacyStateRefused: the chain breaks, or the owner's mirror does not fit.
        """
        state = SharedState()
        with refusing(f"{self.path}: cannot read the shared ledger"):
            read_chain(self.path.read_bytes(), state, str(self.path))
            if state.mirror is not None:
                # The mirror grows after the file, so the file is read again after the mirror.
                copy = state.mirror.read_bytes()
                if not self.path.read_bytes().startswith(copy):
                    raise PrivacyStateRefused(
                        f"{state.mirror}: the mirror differs from {self.path}"
                    )
        return state

    @contextlib.contextmanager
    def reserving(
        self,
        run: str,
        name: str,
        plan: PrivacyPlan,
        run_state: LedgerState | None = None,
        *,
        fixed_in_advance: bool = False,
        time_utc: str = PROGRAM_START,
    ) -> Iterator[None]:
        """Reserves a run's whole budget around its body, which makes or opens the run's own ledger.

        It comes before the run reads the data. A run without a guarantee is counted instead, where
        the owner permits it. A later call for the same run only compares.

        A refusal comes before the body, so that no ledger is opened for a refused run. The
        reservation is written after the body, and a torn line is ended no earlier: it reserves
        nothing, so the budget is judged the same with and without its end. The file stays locked
        throughout.

        Args:
            run: commitment of the run's sampling key.
            name: for the list of siblings; public.
            run_state: of the run's own ledger; None for a new run.
            fixed_in_advance: whether the owner declares that these parameters were fixed before any
                output of the other runs was seen.
            time_utc: of the run's `open` record, read before any data were.

        Raises:
            PrivacyConfigError: no formal guarantee where the owner permits none, or more than the
                total even alone (exit 2).
            BudgetSpent: the total has no room for the run next to the other reservations (exit 3).
            PrivacyStateRefused: the reservation differs from the recorded one, lines that the run
                has seen here are gone, or the file is refused (exit 4).
        """
        with self.locked() as chain:
            state = chain.state
            if run_state is not None:
                self.require_remembered(run_state, state)
            kind = "reserve"
            fields: dict[str, Any] | None = None
            if plan.formal_guarantee or not state.opened.get("informal_runs"):
                fields = self._reservation(state, run, name, plan, fixed_in_advance)
            elif not state.knows(run):
                # A run that is trained anew under its name has another key, and counts again.
                kind = "informal"
                fields = {"run": run, "name": name, "reason": plan.reasons[0]}
            yield
            if fields is not None:
                chain.mend()
                chain.append(kind, time_utc, fields)

    def require_remembered(self, state: LedgerState, shared: SharedState) -> None:
        """Refuses a shared ledger that lacks lines which a run has seen or written.

        Args:
            state: of the run's own ledger.
            shared: of this file.

        Raises:
            PrivacyStateRefused: lines are gone.
        """
        run = state.opened["key_commitment"]
        is_cut = False
        if state.shared_seen is not None:
            seq, line_hash = state.shared_seen
            is_cut = seq >= shared.num_lines or shared.hashes[seq] != line_hash
        if is_cut or (state.nonces and not shared.knows(run)):
            raise PrivacyStateRefused(
                f"{self.path}: rolled back: lines are gone that run {run[:12]} has seen or "
                "written; bring back the newest copy"
            )

    def _reservation(
        self, state: SharedState, run: str, name: str, plan: PrivacyPlan, fixed_in_advance: bool
    ) -> dict[str, Any] | None:
        """Returns the fields of a new reservation; None for a run that has reserved already."""
        total = state.opened["epsilon"]
        if not plan.formal_guarantee:
            raise PrivacyConfigError(
                f"{self.path}: a run without a formal guarantee cannot reserve: {plan.reasons[0]}"
            )
        # In a study's own ledger only the points of its grid were fixed in advance, and a point of
        # a grid is one run: a second training of the same point comes after the first one's output.
        is_outside_grid = "" in state.grids and name not in state.grids[""]
        is_point = any(name in names for names in state.gridded.values())
        is_repeated = is_point and name in state.names
        is_chosen = is_outside_grid or is_repeated or not fixed_in_advance
        # The first run has seen no output of another.
        adaptive = bool(state.reservations) and is_chosen
        group = plan.release_group(plan.max_intents)
        reservation = Reservation(run, name, "", group, plan.noise_tail_delta, adaptive)
        own_reservation = state.reservations.get(run)
        if own_reservation is not None:
            has_other_delta = own_reservation.noise_tail_delta != plan.noise_tail_delta
            if own_reservation.group != group or has_other_delta:
                raise PrivacyStateRefused(
                    f"{self.path}: this run reserved other releases than it plans"
                )
            return None
        empty_state = replace(state, reservations={})
        epsilon_alone = empty_state.epsilon(replace(reservation, adaptive=False))
        if epsilon_alone > total:
            raise PrivacyConfigError(
                f"{self.path}: the run alone needs epsilon {rounded_up(epsilon_alone)} of "
                f"{total:g}: it never fits"
            )
        epsilon_together = state.epsilon(reservation)
        if epsilon_together > total:
            reservations = state.reservations.values()
            uses_filter = adaptive or any(entry.adaptive for entry in reservations)
            accounting = "the RDP filter" if uses_filter else "PLD"
            claim = f"epsilon {rounded_up(epsilon_together)} by {accounting}"
            sibling_total = f"{len(reservations)} runs reserved {rounded_up(state.epsilon())}"
            hint = ""
            if epsilon_together == float("inf"):
                hint = (
                    f"; at a total of {total:g} the caps of the batches leave no delta: an RDP "
                    "filter needs less"
                )
            raise BudgetSpent(
                f"{self.path}: with this run {claim} would be reserved of {total:g} "
                f"({sibling_total}){hint}"
            )
        fields = asdict(reservation)
        # The time is in the header of the record.
        del fields["time_utc"]
        return fields

    def freeze_grid(
        self, study: str, points: Mapping[str, str], *, has_runs: bool
    ) -> Mapping[str, str]:
        """Fixes a study's points until one of its runs has begun; returns the points that bind.

        Args:
            study: "" when the ledger is the study's own, so that any run counts as one of its runs.
            points: name -> digest of the recipe.
            has_runs: whether anything outside of this ledger shows a run.
        """
        with self.locked() as chain:
            state = chain.state
            frozen_points = state.grids.get(study, {})
            if frozen_points == points or has_runs or state.has_begun(study):
                return frozen_points
            # No earlier, so that a study that is refused leaves the file as it was.
            chain.mend()
            chain.append("grid", PROGRAM_START, {"study": study, "points": dict(points)})
            return points

    def summary(self, run: str | None = None) -> dict[str, Any]:
        """Returns total, reserved epsilon and all runs, for report and card (`read_unlocked`).

        Args:
            run: commitment of the key of the run that is marked.
        """
        state = self.read_unlocked()
        reservations = list(state.reservations.values())
        rdp_order = state.rdp_order(reservations[0].group) if reservations else None
        uses_filter = any(entry.adaptive for entry in reservations)
        empty_state = replace(state, reservations={})
        runs = []
        for entry in reservations:
            epsilon_alone = empty_state.epsilon(replace(entry, adaptive=False))
            runs.append(
                {
                    "run": entry.run,
                    "name": entry.name,
                    "time_utc": entry.time_utc,
                    "is_this_run": entry.run == run,
                    "chosen_after_outputs": entry.adaptive,
                    "epsilon": epsilon_alone,
                    **asdict(entry.group),
                }
            )
        informal_runs = [
            {"name": name, "reason": reason} for name, reason in state.informal.values()
        ]
        return {
            **{name: state.opened[name] for name in ("epsilon", "delta", "unit", "adjacency")},
            "identity": state.identity,
            "rdp_order": rdp_order,
            "accounting": "rdp_filter" if uses_filter else "pld",
            "epsilon_reserved": state.epsilon(),
            "runs": runs,
            "informal_runs": informal_runs,
        }

    def locked(self) -> ChainFile[SharedState]:
        """Returns file and mirror, verified and locked until the end of a `with` statement."""
        return ChainFile(self.path, SharedState(), "shared ledger", lambda state: state.mirror)


class Membership:
    """A run's part in a shared ledger: the witness of its own ledger.

    Only one copy of the run spends the reservation: the newest `start` owns it, and an older
    session is refused at its next intent. The run's own ledger is written first, always, and then
    the shared one, so that an honest run is level with its notes here or ahead of them
    (docs/ledger.md).

    Every method raises PrivacyStateRefused (exit 4): another copy went on, or the run is closed, or
    the file is refused.
    """

    def __init__(self, shared: SharedLedger, run: str, ledger: Ledger) -> None:
        self._shared = shared
        self._run = run
        self._ledger = ledger
        self._start: tuple[int, str] | None = None
        # Of the file as it was read last: device, inode, size.
        self._file_status: tuple[int, int, int] | None = None
        with shared.locked() as chain:
            self._require_no_fork(chain.state)

    def mend(self) -> None:
        """Closes the run in the shared ledger too, where a crash came between the two `close`."""
        is_closed = self._ledger.state.closed is not None
        with self._shared.locked() as chain:
            state = chain.state
            self._require_no_fork(state)
            has_started = self._run in state.starts
            if is_closed and has_started and self._run not in state.closed:
                self._append(chain, "close")

    def session_fields(self) -> dict[str, Any]:
        """Returns the last line of the shared ledger, which must still be there at later starts."""
        state = self._shared.read()
        return {"shared_seq": len(state.hashes) - 1, "shared_hash": state.hashes[-1]}

    def before_intent(self) -> None:
        """Refuses an intent after a newer session has taken the reservation over."""
        # The status comes before the reading, so that a later write is read the next time. Over
        # NFS, opening the file asks the server.
        with (
            refusing(f"{self._shared.path}: cannot use the shared ledger"),
            self._shared.path.open("rb") as file,
        ):
            status = os.fstat(file.fileno())
        file_status = (status.st_dev, status.st_ino, status.st_size)
        if self._file_status != file_status:
            with self._shared.locked() as chain:
                self._require_own(chain.state)
            self._file_status = file_status

    def note(self, kind: Literal["start", "at", "close"]) -> None:
        """Writes the last line of the run's ledger down: at a session, at a checkpoint, at the end.

        A `start` takes the reservation over. No copy can have its nonce, which was not handed out
        yet.
        """
        with self._shared.locked() as chain:
            if kind == "start":
                # The newest start becomes this session's.
                self._start = None
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
                f"{self._shared.path}: its newest start of this run is not this session's: another "
                "copy has started since, or the file was rolled back; this one stops"
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
                f"{self._shared.path}: this run is closed; this is an older copy of it"
            )
