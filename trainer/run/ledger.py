"""The privacy ledger as all ranks see it: rank 0 writes, and no rank goes on before the line is durable (contract 9).

Also the place where configuration, data, key and ledger of a run folder meet: the plan is made (or, at a resume, held against
the frozen one) on rank 0, and every rank gets the same.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from data.index.tar_index import ExampleTable
from data.reading.loader import StepPlan
from privacy.accounting.epsilon_table import EpsilonTable
from privacy.errors import PrivacyConfigError
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_ledger
from privacy.ledger.run_state import SharedTerms, open_run_state
from privacy.plan import PrivacyPlan, make_plan
from privacy.releases import Release
from privacy.sampling.keys import SamplingKey
from trainer.checkpoints.read import has_checkpoints
from trainer.config.recipe import PrivacySection
from trainer.ranks import distributed
from trainer.run.folder import RunFolder, environment
from trainer.run.members import MembersLog


class RunLedger:
    """Collective wrapper of the ledger; every method is called on all ranks unless it says otherwise.

    Args:
        ledger: on rank 0 only.
        table: where the epsilon table is cached.
        members: the private record of attempts.
    """

    def __init__(
        self, ledger: Ledger | None, key: SamplingKey, plan: PrivacyPlan, *, table: Path, members: Path
    ) -> None:
        self._ledger = ledger
        self._table_cache, self._members_path = table, members
        self.key = key
        self.plan = plan
        self.attempts, self.is_closed, self.checkpointed_step = distributed.on_main(self._said_before)
        self._members: MembersLog | None = None
        self._table: EpsilonTable | None = None

    def _said_before(self) -> tuple[dict[int, int], bool, int | None]:
        state = self._on_main.state
        return dict(state.attempts), state.closed is not None, state.checkpointed_step

    @property
    def _on_main(self) -> Ledger:
        assert self._ledger is not None, "only rank 0 has the ledger"
        return self._ledger

    @property
    def num_charged(self) -> int:
        """Charged attempts; 0 on ranks other than 0, and without privacy, where nothing is claimed."""
        return self._ledger.num_charged if self._ledger is not None else 0

    def budget_is_spent(self, step: int) -> bool:
        """Whether an intent for `step` would pass the budget; False on ranks other than 0."""
        return self._ledger is not None and self._ledger.budget_spent(step) is not None

    def start_session(self, *, restarted: bool = False) -> bytes:
        """Records this start and returns its nonce; on rank 0 the epsilon table is computed too.

        Args:
            restarted: see `Ledger.start_session`.
        """
        nonce = distributed.on_main(lambda: self._on_main.start_session(_versions(), restarted=restarted))
        self._members = MembersLog(self._members_path, self.key, nonce, lambda: self._on_main.position())
        if self._ledger is not None:
            self._table = self.plan.epsilon_table(cache=self._table_cache)
        return nonce

    def note(self, plan: StepPlan) -> None:
        """Records, privately, whom the next attempt is about to train on; the intent follows."""
        if self.plan.enabled:
            assert self._members is not None, "a session comes first"
            self._members.attempt(plan, self.attempts.get(plan.step, 0))

    def intent(self, step: int, *, releases: Sequence[Release]) -> None:
        """Charges the attempt; see `Ledger.intent`. The private record knows of the charge before any rank goes on."""

        def charge() -> None:
            assert self._members is not None, "a session comes first"
            self._on_main.intent(step, self.attempts.get(step, 0), releases)
            self._members.charged()

        if self.plan.enabled:
            distributed.on_main(charge)

    def done(self, step: int) -> None:
        if self.plan.enabled:
            distributed.on_main(lambda: self._on_main.done(step, self.attempts.get(step, 0)))

    def checkpoint(self, step: int, name: str, digest: str) -> None:
        if self.plan.enabled:
            distributed.on_main(lambda: self._on_main.checkpoint(step, name, digest))

    def close_run(self) -> None:
        """All steps are done."""
        distributed.on_main(lambda: self._on_main.close("finished"))

    def position(self) -> dict[str, Any]:
        """Sequence number and hash of the last line, for a manifest; empty on ranks other than 0."""
        if self._ledger is None:
            return {}
        seq, line_hash = self._ledger.position()
        return {"seq": seq, "hash": line_hash}

    def require_not_shorter_than(self, position: Mapping[str, Any]) -> None:
        """Refuses a ledger that does not contain the line a checkpoint remembers (exit 4)."""
        distributed.on_main(lambda: self._on_main.require_not_shorter_than(position["seq"], position["hash"]))

    def epsilon(self, num_charged: int | None = None) -> float | None:
        """Epsilon of everything charged so far, or of `num_charged` attempts; on rank 0. None without a guarantee."""
        if self._ledger is None or not self.plan.formal_guarantee:
            return None
        if self._table is None:  # shuffled: a closed form, which needs to know which intents were replays
            return self._ledger.epsilon() if num_charged is None else self.plan.epsilon_after(num_charged)
        return self._table.epsilon(self.num_charged if num_charged is None else num_charged)


def open_run_ledger(
    folder: RunFolder, privacy: PrivacySection, num_steps: int, table: ExampleTable, unit: str
) -> RunLedger:
    """Opens or creates ledger and key of a run folder. Collective.

    Args:
        unit: what one example is, for the ledger and the card.

    Raises (on every rank):
        PrivacyConfigError: the privacy parameters are wrong, or differ from the frozen ones (exit 2).
        PrivacyStateRefused: ledger, key, mirror, checkpoints and record of attempts do not fit together (exit 4).
    """
    opened: list[tuple[Ledger, SamplingKey]] = []

    def open_on_main() -> dict[str, Any]:
        plan = _make_plan(folder, privacy, num_steps, len(table))
        owners = privacy.shared_ledger
        _require_same_owner_limit(folder, privacy)
        ledger, key = open_run_state(
            folder.ledger,
            folder.key,
            plan,
            data_manifest=table.manifest_digest(),
            open_fields=_described(privacy, unit),
            mirror=privacy.ledger_mirror,
            shared=None if owners is None else SharedTerms(owners, folder.root.name, privacy.fixed_in_advance),
            has_checkpoint=has_checkpoints(folder.checkpoints),
            members=folder.members,
        )
        opened.append((ledger, key))
        return {"plan": plan, "commitment": key.commitment()}

    found = distributed.on_main(open_on_main)
    ledger, key = opened[0] if opened else (None, SamplingKey.load(folder.key, found["commitment"]))
    cache = folder.private / "epsilon-table.json"
    return RunLedger(ledger, key, found["plan"], table=cache, members=folder.members)


def _described(privacy: PrivacySection, unit: str) -> dict[str, Any]:
    """What the `open` record says beside plan, key and data."""
    owner = {"max_examples_per_owner": privacy.max_examples_per_owner} if privacy.max_examples_per_owner else {}
    return {"commit": _versions()["commit"], "unit": unit, **owner}


def _require_same_owner_limit(folder: RunFolder, privacy: PrivacySection) -> None:
    """The card computes an owner's epsilon from the limit in the `open` record, so a resume cannot state another one."""
    if not folder.ledger.exists():
        return
    frozen = read_ledger(folder.ledger).opened.get("max_examples_per_owner")
    if frozen != privacy.max_examples_per_owner:
        raise PrivacyConfigError(
            f"privacy.max_examples_per_owner is {privacy.max_examples_per_owner}, but {folder.ledger} was opened with "
            f"{frozen}; it is part of the claim: set it back, or start another run folder"
        )


def _versions() -> dict[str, Any]:
    """The environment without the command line, which may name private paths."""
    return {key: value for key, value in environment().items() if key != "arguments"}


def _make_plan(folder: RunFolder, privacy: PrivacySection, num_steps: int, num_examples: int) -> PrivacyPlan:
    frozen = read_ledger(folder.ledger).opened["plan"] if folder.ledger.exists() else None
    if frozen is None and privacy.target_epsilon is not None:
        print(f"calibrating the noise for epsilon {privacy.target_epsilon:g} ...", flush=True)
    return make_plan(privacy.request(num_steps, num_examples), resume=frozen)
