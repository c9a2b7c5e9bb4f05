"""Writes the privacy ledger on rank 0; all ranks wait until a line is durable (contract 9)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..checkpoints.read import MANIFEST, Checkpoint, file_digest, has_checkpoints
from ..ledger.attempts import MarkedLedger, members_digest
from ..ledger.claim import composed_epsilon, parent_states
from ..ledger.ledger import Ledger
from ..ledger.records import MIXED_EXAMPLES, LedgerState, read_ledger
from ..ledger.run_state import SharedTerms, open_run_state
from ..plan.numbers import PrivacyPlan, make_plan
from ..plan.releases import Release
from ..plan.request import PlanRequest
from ..ranks import collectives
from ..sampling.keys import SamplingKey
from ..step.batches import StepBatch
from ..step.run_folder import RunFolder, environment

T = TypeVar("T")


class RunLedger:
    """The ledger of a run on many ranks, whose methods are collective unless they say otherwise.

    It also keeps a private record of every attempt, which finds a ledger that has lost lines
    (privacy/ledger/attempts.py).

    Args:
        ledger: on rank 0 only.
        members: the private record of attempts, which exists since the run was opened.
    """

    def __init__(
        self, ledger: Ledger | None, key: SamplingKey, plan: PrivacyPlan, *, members: Path
    ) -> None:
        self._marked = None if ledger is None else MarkedLedger(ledger, members)
        self._folder = members.parents[1]
        self.key = key
        self.plan = plan
        self._nonce: bytes | None = None
        self._table = plan.epsilon_table()
        self._behind: list[LedgerState] | None = None
        self._composed: dict[int, float] = {}

        state = None if ledger is None else ledger.state
        # Starts before this one, on rank 0.
        self.starts = 0 if state is None else len(state.nonces)
        facts = None
        if state is not None:
            facts = (dict(state.attempts), state.closed, state.checkpointed_step, state.opened)
        facts = collectives.on_main(lambda: facts)
        assert facts is not None, "rank 0 has the ledger"
        self.attempts, closed, self.checkpointed_step, opened = facts
        self.is_closed = closed is not None
        self.is_void = closed == MIXED_EXAMPLES
        self.opened: Recorded = opened

    @property
    def _on_main(self) -> MarkedLedger:
        assert self._marked is not None, "only rank 0 has the ledger"
        return self._marked

    def on_main(self, work: Callable[[Ledger], T]) -> T:
        """Runs `work` on rank 0's ledger, and returns its result, or raises its refusal, on all."""
        return collectives.on_main(lambda: work(self._on_main.ledger))

    # On any rank.

    def release(self) -> None:
        """Closes rank 0's files; another program may then open the ledger."""
        if self._marked is not None:
            self._marked.ledger.release()

    @property
    def num_charged(self) -> int:
        """Returns the number of charged attempts; 0 on other ranks than 0, and without privacy."""
        return 0 if self._marked is None else self._marked.ledger.num_charged

    def budget_is_spent(self) -> bool:
        """Returns whether one more intent would pass the budget; False on other ranks than 0."""
        return self._marked is not None and self._marked.ledger.budget_spent() is not None

    def position(self) -> dict[str, Any]:
        """Returns number and hash of the last line, for a manifest; {} on other ranks than 0."""
        if self._marked is None:
            return {}
        seq, line_hash = self._marked.ledger.position()
        return {"seq": seq, "hash": line_hash}

    # On all ranks together.

    def require_not_shorter_than(self, position: Mapping[str, Any]) -> None:
        """Refuses a ledger that does not contain the line a checkpoint remembers (exit 4)."""
        self.on_main(
            lambda ledger: ledger.require_not_shorter_than(position["seq"], position["hash"])
        )

    def start_session(self, *, restarted: bool = False) -> bytes:
        """Records this start and returns its nonce.

        Args:
            restarted: see `Ledger.start_session`.
        """

        def start(ledger: Ledger) -> bytes:
            # The command line may name private paths.
            versions = dict(environment())
            versions.pop("arguments", None)
            return ledger.start_session(versions, restarted=restarted)

        self._nonce = self.on_main(start)
        collectives.on_main(lambda: self._on_main.mark())
        return self._nonce

    def note(self, batch: StepBatch, micro_batch_size: int, nodes: tuple[int, ...] = ()) -> None:
        """Records, privately, the examples of the next attempt, before its intent."""
        if not self.plan.enabled:
            return
        assert self._nonce is not None, "a session comes first"
        nonce = self._nonce
        step = batch.step
        attempt = self.attempts.get(step, 0)
        ids = batch.example_ids
        rows = batch.num_micro_batches * micro_batch_size
        digest = members_digest(self.key, nonce, attempt, step, collectives.rank(), ids)
        dealt = collectives.gather_objects((len(ids), digest))
        collectives.on_main(lambda: self._on_main.note(step, attempt, nonce, rows, dealt, nodes))

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        """Charges the attempt; see `Ledger.intent`."""
        attempt = self.attempts.get(step, 0)
        if self.plan.enabled:
            self._write(lambda ledger: ledger.intent(step, attempt, releases))

    def done(self, step: int, **noised: Any) -> None:
        """Records the attempt's update as made; see `Ledger.done`."""
        attempt = self.attempts.get(step, 0)
        if self.plan.enabled:
            self.on_main(lambda ledger: ledger.done(step, attempt, **noised))

    def checkpoint(self, step: int, name: str, digest: str, num_checks: int = 0) -> None:
        """Records a whole checkpoint; see `Ledger.checkpoint`."""
        if self.plan.enabled:
            self._write(lambda ledger: ledger.checkpoint(step, name, digest, num_checks))

    def close_run(self) -> None:
        """Records the end of a run whose steps are all done."""
        self._write(lambda ledger: ledger.close("finished"))

    def void(self) -> None:
        """Ends the run without a claim, since its examples were found not to stay apart."""
        self.is_void = True
        self._table = None
        self._write(lambda ledger: ledger.close(MIXED_EXAMPLES))

    def _write(self, record: Callable[[Ledger], None]) -> None:
        """Writes on rank 0; the private record knows of the line before any rank goes on."""
        collectives.on_main(lambda: self._on_main.write(record))

    def adopt(self, resumed: Checkpoint) -> None:
        """Records the checkpoint that this session goes on from, if a crash left it unrecorded."""
        digest = file_digest(resumed.path / MANIFEST)
        if not self.on_main(lambda ledger: (resumed.step, digest) in ledger.state.checkpoints):
            self.checkpoint(resumed.step, resumed.path.name, digest)

    def epsilon(self, num_charged: int | None = None) -> float | None:
        """Returns the epsilon of `num_charged` attempts; on rank 0 by default of all charged ones.

        None without a guarantee. Not collective.
        """
        charged = self.num_charged if num_charged is None else num_charged
        return None if self._table is None else self._table.epsilon(charged)

    def claim(
        self, num_charged: int | None = None, *, is_exact: bool = False
    ) -> tuple[float, float] | None:
        """Returns (epsilon, delta) of the weights, private runs behind their start included.

        None without a guarantee. Print this number first, and everywhere.

        Args:
            num_charged: as for `epsilon`.
            is_exact: computes it for exactly so many attempts, which takes seconds; otherwise an
                upper bound comes from the table.
        """
        if self._table is None:
            return None
        charged = self.num_charged if num_charged is None else num_charged
        if not self.opened.get("behind"):
            epsilon = self.plan.epsilon_after(charged) if is_exact else self._table.epsilon(charged)
            assert epsilon is not None, "there is a guarantee"
            return epsilon, self.plan.target_delta
        if self._behind is None:
            self._behind = parent_states(self._folder, self.opened)
        states = [LedgerState(opened=self.opened), *self._behind]
        delta = min(state.plan.target_delta for state in states)
        # A composition takes seconds, and one count of the table serves many steps.
        count = charged if is_exact else self._table.count_for(charged)
        if count not in self._composed:
            releases = [self.plan.release_group(count)] if count else []
            self._composed[count] = composed_epsilon(states, delta, releases)
        return self._composed[count], delta


Recorded = dict[str, Any]
"""The fields of a ledger's `open` record."""


class LedgerOpening(NamedTuple):
    """The privacy state of a run before its start.

    Attributes:
        plan: of a new run; of an existing run the frozen plan, which equals the requested one.
        ledger: of an existing run, opened without a write (`Ledger.mend` writes); None for a new
            run.
        create: makes ledger and key of a new run, after the last check: a shared ledger reserves
            its budget here. It takes the number of noised coordinates and the exponent f of the
            sums, None without noise, which the ledger records.
    """

    plan: PrivacyPlan
    ledger: RunLedger | None
    create: Callable[[int, int | None], RunLedger]


def open_ledger(
    folder: RunFolder,
    request_of: Callable[[Recorded | None], PlanRequest],
    manifest: Callable[[], bytes],
    *,
    described: Callable[[Recorded | None, PrivacyPlan], Mapping[str, Any]],
    mirror: Path | str | None,
    shared: SharedTerms | None = None,
) -> LedgerOpening:
    """Opens ledger and key of a run folder, or makes the plan of a new run. Collective.

    It writes nothing. Rank 0 makes the plan, or compares it with the frozen one, for all ranks.

    Args:
        request_of: returns the plan's request, from the opening record of an existing run, or from
            None for a new one.
        manifest: returns bytes that identify the data; the ledger gets their HMAC under the
            sampling key alone.
        described: returns further fields of a new ledger, or refuses those of an existing one.
        mirror, shared: see `open_run_state`.

    Raises (on every rank, as `create` does):
        PrivacyConfigError: the privacy parameters are wrong, or differ from the frozen ones
            (exit 2).
        PrivacyStateRefused: ledger, key, mirror, checkpoints and the record of attempts contradict
            each other (exit 4).
    """

    def planned() -> tuple[Recorded | None, PrivacyPlan]:
        recorded = read_ledger(folder.ledger).opened if folder.ledger.exists() else None
        frozen_plan = None if recorded is None else recorded["plan"]
        return recorded, make_plan(request_of(recorded), resume=frozen_plan)

    recorded, plan = collectives.on_main(planned)

    def open_now(noised: int | None = None, exponent: int | None = None) -> RunLedger:
        # Rank 0 alone fills it; other ranks read the key from its file.
        opened = list[tuple[Ledger, SamplingKey]]()

        def open_on_main() -> str:
            fields = {
                "commit": environment()["commit"],
                "noised_coordinates": noised,
                "sum_exponent": exponent,
            }
            fields |= described(recorded, plan)
            ledger, key = open_run_state(
                folder.ledger,
                folder.key,
                plan,
                data_manifest=manifest(),
                open_fields=fields,
                mirror=mirror,
                shared=shared,
                has_checkpoint=has_checkpoints(folder.checkpoints),
                members=folder.members,
                mend_at_once=False,
            )
            opened.append((ledger, key))
            return key.commitment()

        commitment = collectives.on_main(open_on_main)
        ledger, key = opened[0] if opened else (None, SamplingKey.load(folder.key, commitment))
        return RunLedger(ledger, key, plan, members=folder.members)

    return LedgerOpening(plan, None if recorded is None else open_now(), open_now)
