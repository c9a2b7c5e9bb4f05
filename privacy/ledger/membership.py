"""A run's part in a shared ledger: only one copy of the run spends what was reserved.

The run's own ledger comes first, always, and then the shared one. So what is noted there is behind an honest run or level with
it, wherever a crash fell, and a ledger without the noted line is that of a copy or of a backup: exit 4. Noted are the `session`
record of a start, whose nonce no copy can have, every checkpoint, and the end; a run that is closed there cannot go on.

Between two checkpoints nothing is noted. A backup from between them, restored after a kill before the next one, can repeat the
steps between without a charge; a mirror of the run's ledger (`privacy.ledger_mirror`) finds that too. A run whose
program died between the two `close` is closed here by the next start, once that is judged.
"""

import os
from typing import Any, Literal

from ..errors import PrivacyStateRefused
from .chain import ChainFile
from .ledger import Ledger
from .shared import SharedLedger
from .shared_records import SharedState


class Membership:
    """The witness (privacy/ledger/ledger.py) of one run while its own ledger is open; copies of the run have it in common.

    The newest `start` of a run owns its reservation. An older session is refused at its next intent, which costs one look at the
    file's size where nobody else has written: at most the step that is under way is released in addition to the newer session's.

    Raises (everywhere): PrivacyStateRefused (exit 4): another copy went on, or the run is closed, or the file is refused.
    """

    def __init__(self, shared: SharedLedger, run: str, ledger: Ledger) -> None:
        self._shared, self._run, self._ledger = shared, run, ledger
        self._start: tuple[int, str] | None = None
        self._looked: tuple[int, int, int] | None = None
        with shared.locked(mended=False) as chain:
            self._require_no_fork(chain.state)

    def mend(self) -> None:
        """Closes the run here too, where a crash came between the two `close`."""
        run, is_closed = self._run, self._ledger.state.closed is not None
        with self._shared.locked(mended=False) as chain:
            self._require_no_fork(chain.state)
            if is_closed and run in chain.state.starts and run not in chain.state.closed:
                chain.mend()
                self._append(chain, "close")

    def session_fields(self) -> dict[str, Any]:
        """The last line of the shared ledger: everything before it must still be there at the next start."""
        state = self._shared.read()
        return {"shared_seq": len(state.hashes) - 1, "shared_hash": state.hashes[-1]}

    def before_intent(self) -> None:
        """Nobody else has taken the reservation over."""
        identity = self._identity()  # before the reading: what is written after it is read the next time
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
                raise PrivacyStateRefused(f"{self._shared.path}: another copy of this run went on: {error}") from error
        if self._run in state.closed and self._ledger.state.closed is None:
            raise PrivacyStateRefused(
                f"{self._shared.path}: this run is closed; what would go on is an older copy of it"
            )

    def _identity(self) -> tuple[int, int, int]:
        """Device, inode and size, by opening the file: over NFS that is what asks the server."""
        path = self._shared.path
        try:
            descriptor = os.open(path, os.O_RDONLY)
            try:
                status = os.fstat(descriptor)
            finally:
                os.close(descriptor)
        except OSError as error:
            raise PrivacyStateRefused(f"{path}: cannot use the shared ledger: {error.strerror or error}") from error
        return status.st_dev, status.st_ino, status.st_size
