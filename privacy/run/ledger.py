"""The privacy ledger as all ranks see it: rank 0 writes, and no rank goes on before the line is durable (contract 9)."""

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

from ..checkpoints.read import MANIFEST, Checkpoint, file_digest, has_checkpoints
from ..ledger.claim import composed_epsilon, states_behind
from ..ledger.ledger import Ledger
from ..ledger.members import MarkedLedger, members_digest
from ..ledger.records import MIXED_EXAMPLES, LedgerState, read_ledger
from ..ledger.run_state import SharedTerms, open_run_state
from ..plan.numbers import PrivacyPlan, make_plan
from ..plan.releases import Release
from ..plan.request import PlanRequest
from ..ranks import collectives
from ..sampling.keys import SamplingKey
from ..step.batches import StepBatch
from ..step.folder import RunFolder, environment

T = TypeVar("T")


class RunLedger:
    """The ledger of a run on many ranks; every method is called on all of them unless it says otherwise.

    Privately it also notes every attempt before its intent, and what the ledger must not lose (privacy/ledger/members.py).

    Args:
        ledger: on rank 0 only.
        members: the private record of attempts, which is there since the run was opened.
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
        self.starts = 0 if state is None else len(state.nonces)  # before this one; on rank 0
        facts = None
        if state is not None:
            facts = (dict(state.attempts), state.closed, state.checkpointed_step, state.opened)
        facts = collectives.on_main(lambda: facts)
        assert facts is not None, "rank 0 has the ledger"
        self.attempts, closed, self.checkpointed_step, opened = facts
        self.is_closed = closed is not None
        self.is_void = closed == MIXED_EXAMPLES
        self.opened: Recorded = opened  # the fields of the ledger's first line

    @property
    def _on_main(self) -> MarkedLedger:
        assert self._marked is not None, "only rank 0 has the ledger"
        return self._marked

    def on_main(self, work: Callable[[Ledger], T]) -> T:
        """Has rank 0's ledger do something; its result, or its refusal, is that of every rank."""
        return collectives.on_main(lambda: work(self._on_main.ledger))

    # On any rank.

    def release(self) -> None:
        """Closes rank 0's files; another program may then open the ledger."""
        if self._marked is not None:
            self._marked.ledger.release()

    @property
    def num_charged(self) -> int:
        """Charged attempts; 0 on ranks other than 0, and without privacy, where nothing is claimed."""
        return 0 if self._marked is None else self._marked.ledger.num_charged

    def budget_is_spent(self) -> bool:
        """Whether one more intent would pass the budget; False on ranks other than 0."""
        return self._marked is not None and self._marked.ledger.budget_spent() is not None

    def position(self) -> dict[str, Any]:
        """Sequence number and hash of the last line, for a manifest; empty on ranks other than 0."""
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
            versions = {name: value for name, value in environment().items() if name != "arguments"}
            return ledger.start_session(versions, restarted=restarted)

        self._nonce = self.on_main(start)
        collectives.on_main(lambda: self._on_main.mark())
        return self._nonce

    def note(self, batch: StepBatch, micro_batch_size: int, nodes: tuple[int, ...] = ()) -> None:
        """Records, privately, whom the next attempt is about to train on; the intent follows, so every charge has its line."""
        if not self.plan.enabled:
            return
        assert self._nonce is not None, "a session comes first"
        nonce, step = self._nonce, batch.step
        attempt = self.attempts.get(step, 0)
        ids, rows = batch.example_ids, batch.num_micro_batches * micro_batch_size
        digest = members_digest(self.key, nonce, attempt, step, collectives.rank(), ids)
        dealt = collectives.gather_objects((len(ids), digest))
        collectives.on_main(lambda: self._on_main.note(step, attempt, nonce, rows, dealt, nodes))

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        """Charges the attempt; see `Ledger.intent`."""
        attempt = self.attempts.get(step, 0)
        if self.plan.enabled:
            self._write(lambda ledger: ledger.intent(step, attempt, releases))

    def done(self, step: int, **noised: Any) -> None:
        """The update of the attempt is made; see `Ledger.done`."""
        attempt = self.attempts.get(step, 0)
        if self.plan.enabled:
            self.on_main(lambda ledger: ledger.done(step, attempt, **noised))

    def checkpoint(self, step: int, name: str, digest: str) -> None:
        """A checkpoint is whole; see `Ledger.checkpoint`."""
        if self.plan.enabled:
            self._write(lambda ledger: ledger.checkpoint(step, name, digest))

    def close_run(self) -> None:
        """All steps are done."""
        self._write(lambda ledger: ledger.close("finished"))

    def void(self) -> None:
        """Ends the run without a claim: its examples were found not to stay apart."""
        self.is_void = True
        self._table = None
        self._write(lambda ledger: ledger.close(MIXED_EXAMPLES))

    def _write(self, record: Callable[[Ledger], None]) -> None:
        """Writes on rank 0; the private record knows of the line before any rank goes on."""
        collectives.on_main(lambda: self._on_main.write(record))

    def adopt(self, resumed: Checkpoint) -> None:
        """Records the checkpoint that this session goes on from, if a crash came between it and its record."""
        digest = file_digest(resumed.path / MANIFEST)
        if not self.on_main(lambda ledger: (resumed.step, digest) in ledger.state.checkpoints):
            self.checkpoint(resumed.step, resumed.path.name, digest)

    def epsilon(self, num_charged: int | None = None) -> float | None:
        """Epsilon of `num_charged` attempts, or on rank 0 of everything charged so far. None without a guarantee. On any rank."""
        charged = self.num_charged if num_charged is None else num_charged
        return None if self._table is None else self._table.epsilon(charged)

    def claim(
        self, num_charged: int | None = None, *, is_exact: bool = False
    ) -> tuple[float, float] | None:
        """(epsilon, delta) of what the weights carry: this run's, composed with the private runs behind its initial weights.

        None without a guarantee. It is the number to print first, and everywhere.

        Args:
            num_charged: as for `epsilon`.
            is_exact: of exactly so many attempts, which takes seconds; otherwise an upper bound from the table.
        """
        if self._table is None:
            return None
        charged = self.num_charged if num_charged is None else num_charged
        if not self.opened.get("behind"):
            epsilon = self.plan.epsilon_after(charged) if is_exact else self._table.epsilon(charged)
            assert epsilon is not None, "there is a guarantee"
            return epsilon, self.plan.target_delta
        if self._behind is None:
            self._behind = states_behind(self._folder, self.opened)
        states = [LedgerState(opened=self.opened), *self._behind]
        delta = min(one.plan.target_delta for one in states)
        # A composition takes seconds, and most steps stand between two counts of the table.
        count = charged if is_exact else self._table.count_for(charged)
        if count not in self._composed:
            own = [self.plan.release_group(count)] if count else []
            self._composed[count] = composed_epsilon(states, delta, own)
        return self._composed[count], delta


Recorded = dict[str, Any]
"""The fields of a ledger's `open` record."""


class Opening(NamedTuple):
    """A run's privacy state before its start.

    Attributes:
        plan: made for a new run; the frozen one, which is what was asked for, of one that is there.
        ledger: of a run that is there, opened without writing to it (`Ledger.mend` does); None for a new one.
        create: makes ledger and key of a new run, when nothing else refuses its start: a shared ledger reserves its budget here.
            It takes what stands in the ledger from its opening: the number of noised coordinates, and f of the sums at the plan's
            C, None without noise.
    """

    plan: PrivacyPlan
    ledger: RunLedger | None
    create: Callable[[int, int | None], RunLedger]


def open_ledger(
    folder: RunFolder,
    asked: Callable[[Recorded | None], PlanRequest],
    manifest: Callable[[], bytes],
    *,
    described: Callable[[Recorded | None, PrivacyPlan], Mapping[str, Any]],
    mirror: Path | str | None,
    shared: SharedTerms | None = None,
) -> Opening:
    """Opens ledger and key of a run folder, or makes the plan of a new one; writes nothing. Collective.

    The plan is made, or compared with the frozen one, on rank 0, and every rank gets the same.

    Args:
        asked: the plan's request; None is a new run.
        manifest: what identifies the data; enters the ledger as HMAC under the sampling key only.
        described: further fields of a new ledger, or a refusal of those that an existing one has.
        mirror, shared: see `open_run_state`.

    Raises (on every rank, as `create` does):
        PrivacyConfigError: the privacy parameters are wrong, or differ from the frozen ones (exit 2).
        PrivacyStateRefused: ledger, key, mirror, checkpoints and record of attempts do not fit together (exit 4).
    """

    def planned() -> tuple[Recorded | None, PrivacyPlan]:
        recorded = read_ledger(folder.ledger).opened if folder.ledger.exists() else None
        return recorded, make_plan(
            asked(recorded), resume=None if recorded is None else recorded["plan"]
        )

    recorded, plan = collectives.on_main(planned)

    def open_now(noised: int | None = None, exponent: int | None = None) -> RunLedger:
        opened = list[tuple[Ledger, SamplingKey]]()  # on rank 0; the others read the key themselves

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
                mended=False,
            )
            opened.append((ledger, key))
            return key.commitment()

        commitment = collectives.on_main(open_on_main)
        ledger, key = opened[0] if opened else (None, SamplingKey.load(folder.key, commitment))
        return RunLedger(ledger, key, plan, members=folder.members)

    return Opening(plan, None if recorded is None else open_now(), open_now)
