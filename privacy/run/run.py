"""One run: how it is opened, and how its steps are repeated. The trainer and `PrivateLoop` both do it here.

`open_run` asks everything that a start can be refused for before it writes to a run. The loop belongs to its caller: `Run.steps`
deals a step, `Run.take` notes, charges and makes it, `Run.keep` saves it, and the turn after the last ends the run. A side
(trainer/run/start.py, privacy/loop/opening.py) says what it trains and reads, and adds its own checks.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch

from ..boundary import Private
from ..checkpoints.read import (
    Checkpoint,
    newest_whole,
    readable_manifests,
    require_recorded,
    set_aside_newer,
)
from ..checkpoints.write import CheckpointWriter, Retention, require_finite
from ..errors import (
    BUDGET_SPENT,
    DONE,
    STOPPED_EARLY,
    ConfigError,
    MixedExamples,
    PrivacyStateRefused,
    StepDropped,
)
from ..guards.isolation import Isolation
from ..guards.premises import require_premises
from ..ledger.ledger import Ledger
from ..ledger.records import WHY_MIXED
from ..plan.numbers import PrivacyPlan
from ..ranks import clock, collectives
from ..ranks.engine import ShardState
from ..step.batches import LogicalBatches, StepBatch, most_micro_batches
from ..step.folder import RunFolder
from ..step.step import Charge, Mechanism, MicroBatch, StepRecord, train_step
from .ledger import Opening, RunLedger


class Stored(NamedTuple):
    """What a checkpoint holds: this rank's tensors, the shapes of all of them, and what a side adds to the manifest."""

    states: Iterable[ShardState]
    shapes: Mapping[str, torch.Size]
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What the steps of a run need, made by a side when it knows plan and checkpoint; nothing of it writes.

    Attributes:
        read: pairs plans with their micro-batches, in order; the plans are pulled lazily.
        nodes: see `LogicalBatches`.
        note_charge: see `Charge.note`.
        save_every: steps between checkpoints; by default a twentieth of the reserve lies between two, so that it lasts for twenty
            crashes.
        stored: called at each checkpoint.
        configuration: called when the ledger is there; arguments of `RunFolder.record_configuration`.
        isolation: has passed `Isolation.require`.
    """

    mechanism: Mechanism
    read: Callable[
        [Iterator[StepBatch]], Generator[tuple[StepBatch, Iterator[MicroBatch]], None, None]
    ]
    micro_batch_size: int
    learning_rate: Callable[[int], float]
    note_charge: Callable[[int], object]
    stored: Callable[[], Stored]
    configuration: Callable[[], tuple[str, Mapping[str, Any] | None, Mapping[str, Any]]]
    isolation: Isolation
    retention: Retention
    save_every: int | None = None
    in_background: bool = False
    nodes: tuple[int, ...] = ()


class Start(Protocol):
    """What a side adds to a start. `open_run` calls its methods once each, in the order in which they stand here."""

    folder: RunFolder
    may_restart: bool
    """A run that has lost all its checkpoints may begin again at step 0, charging its steps once more."""

    def checks(self) -> Sequence[Callable[[], object]]:
        """What can refuse the start before the ledger is opened, cheap checks first; all of them write nothing to a run."""
        ...

    def open_ledger(self) -> Opening:
        """`privacy.run.ledger.open_ledger`, asked for the side's plan."""
        ...

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Sets the model's weights, where it can before its engine is there; refuses a checkpoint of another model."""
        ...

    def build(self, plan: PrivacyPlan, resumed: Checkpoint | None) -> Parts:
        """What is left to refuse: the engine with the checkpoint's state, the clipper on it, the reader."""
        ...

    def take_ledger(self, ledger: RunLedger) -> None:
        """The ledger is open: right after it is opened, or made. May refuse one that is shorter than a side remembers."""
        ...


Through = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]
"""What a caller puts between the reader and the mechanism: it may look, stop or leave out, and adds no example."""


@dataclass(eq=False)
class Step:
    """One turn of the loop over a run: `Run.steps` deals it, and the caller takes and keeps it.

    Attributes:
        batch: what this rank reads.
        micro_batches: the rows of `batch`; `Run.take` reads them.
        began: when its turn began, before anything was read for it (privacy/ranks/clock.py).
        state: how far it has come; a step that stays "begun" has failed.
    """

    batch: StepBatch
    micro_batches: Iterator[MicroBatch]
    began: Private[float]
    state: Literal["dealt", "begun", "taken"] = field(default="dealt", init=False)

    @property
    def number(self) -> int:
        """Returns the number of the step, from 1 on."""
        return self.batch.step


def open_run(start: Start, *, is_dry: bool = False) -> "Run | Finished":
    """Opens a run, or a finished one. Collective.

    Nothing of a run changes before its last check, and the ledger of a new one is made after it: a refused start spends and
    reserves nothing, and can be given again with what was wrong put right. The folder alone is made, and locked, on the way.

    Args:
        is_dry: ends there: the run that is returned takes no step, and what is there already stays as it is.

    Raises:
        ConfigError, PrivacyConfigError: what is asked for cannot be trained, or differs from what is frozen.
        PrivacyStateRefused: the parts of the run folder do not fit together.
    """
    for check in start.checks():
        check()
    folder, opening = start.folder, start.open_ledger()
    ledger, resumed, restarted = opening.ledger, None, False
    if ledger is not None:
        if ledger.is_void:
            raise PrivacyStateRefused(
                f"{folder.ledger}: {WHY_MIXED}, and it does not go on: mend model or loss, and start "
                "another run folder"
            )
        start.take_ledger(ledger)
        resumed = load_newest(folder, ledger, start.take_weights)
        if ledger.is_closed:
            last = 0 if resumed is None else resumed.step
            if last < opening.plan.num_steps:  # no step may be taken again
                raise ConfigError(
                    f"{folder.root} is finished and its budget is closed, but its last checkpoint is damaged or gone: the newest "
                    f"whole one is that of step {last}; restore checkpoints/ from a copy"
                )
            if not is_dry:
                # The crash may have come between the end and its signature.
                ledger.on_main(Ledger.mend)
            return Finished(ledger, resumed)
        found = ledger, resumed
        require_drawn_noise(folder, opening.plan, resumed)
        restarted = collectives.on_main(
            lambda: begins_again(folder, *found, may_restart=start.may_restart)
        )
    else:
        collectives.on_main(lambda: require_no_checkpoint(folder))
    parts = start.build(opening.plan, resumed)
    require_premises(parts.mechanism, parts.micro_batch_size, parts.nodes)
    layout = parts.mechanism.engine.layout
    noised = sum(layout.count(rank) for rank in range(collectives.world_size()))
    exponent = parts.mechanism.clipped.exponent
    if ledger is not None:
        stated, step = ledger.opened.get("noised_coordinates"), ledger.opened.get("sum_exponent")
        if stated not in (None, noised):  # too large a number would refute honest noise
            raise ConfigError(
                f"{folder.ledger}: the run was opened with {stated:,} trained numbers, and this model has "
                f"{noised:,}: give the model that it began with, or start another run folder"
            )
        if step not in (None, exponent):
            raise ConfigError(
                f"{folder.ledger}: the run was opened with sums and noise in steps of 2^-{step}, and this model "
                f"has 2^-{exponent}: give it the precision that it began with, or start another run folder"
            )
    # From here on no check is left that refuses the start.
    if ledger is None:
        ledger = opening.create(noised, exponent)
        start.take_ledger(ledger)
    if is_dry:
        return Run(folder, ledger, parts, b"", resumed)
    collectives.on_main(folder.begin)
    if resumed is not None:
        kept = resumed.path.name
        collectives.on_main(lambda: set_aside_newer(folder.checkpoints, kept))
    ledger.on_main(Ledger.mend)
    nonce = ledger.start_session(restarted=restarted)
    if resumed is not None:
        ledger.adopt(resumed)
    collectives.on_main(lambda: folder.record_configuration(*parts.configuration()))
    return Run(folder, ledger, parts, nonce, resumed)


class Finished(NamedTuple):
    """A run whose end is in its ledger, and its last checkpoint, whose weights the side has taken."""

    ledger: RunLedger
    resumed: Checkpoint | None


class Run:
    """An open run: `steps` deals those that are left, `take` makes one, and `keep` saves it.

    Attributes:
        step: the last one that was taken and kept; the first of this start is `first_step`.
        saved: the step of the newest checkpoint; None before the first.
        outcome: how the steps ended (privacy/errors.py); None while they go on.
        resumed: the checkpoint that this start goes on from, if there is one.
    """

    def __init__(
        self,
        folder: RunFolder,
        ledger: RunLedger,
        parts: Parts,
        nonce: bytes,
        resumed: Checkpoint | None,
    ) -> None:
        plan = ledger.plan
        self.folder, self.ledger, self.parts, self.plan = folder, ledger, parts, plan
        self.step = 0 if resumed is None else resumed.step
        self.first_step = self.step + 1
        self.saved = None if resumed is None else resumed.step
        self.outcome: int | None = None
        self.resumed = resumed
        self._turn: Step | None = None
        self._is_dealing = self._is_stopped = False
        self.mechanism, self.engine = parts.mechanism, parts.mechanism.engine
        self._charge = Charge(ledger, parts.learning_rate, parts.note_charge)
        self._batches = LogicalBatches(
            parts.mechanism.sampler,
            ledger.key,
            nonce,
            ledger.attempts,
            parts.micro_batch_size,
            pads_to_cap=plan.enabled,
            nodes=parts.nodes,
            expected_batch_size=plan.expected_batch_size,
        )
        parts.isolation.begin(self._num_micro_batches())
        self._checkpoints = CheckpointWriter(
            folder.checkpoints,
            parts.retention,
            in_background=parts.in_background,
            published=ledger.checkpoint,
        )

    def _num_micro_batches(self) -> int:
        """Returns how many micro-batches each rank goes through until the end of the run."""
        mechanism, parts = self.mechanism, self.parts
        of_a_step = most_micro_batches(
            mechanism.sampler,
            collectives.world_size(),
            parts.micro_batch_size,
            parts.nodes,
            self.plan.expected_batch_size,
        )
        return (self.plan.num_steps - self.step) * of_a_step

    def steps(self) -> Generator[Step, None, None]:
        """Deals the steps that are left, one a turn; ends the run in its ledger after the last. Collective.

            for step in run.steps():
                record = run.take(step)
                average.update(step.number)  # belongs into the checkpoint
                run.keep(step)
                print(record)  # a user's code sees the step

        The run ends when its last step is kept and the next is asked for, so that the caller may still look at the model. A run
        that ends early is saved, too; `outcome` says why. A caller that leaves the loop by itself saves and ends nothing.

        Raises:
            RuntimeError: the step of the last turn was not taken, or not kept; or the steps were dealt before.
            WeightsNotFinite, CheckpointWriteError: the last step cannot be saved.
        """
        if self._is_dealing:
            raise RuntimeError("the steps of a run are dealt once: open the run again")
        self._is_dealing, last = True, self.plan.num_steps
        with contextlib.closing(
            self.parts.read(self._batches.plans(self.step + 1, last))
        ) as reading:
            while self.step < last:
                self._require_turn_is_over()
                began = clock.now()  # the wait for data is in a step's time
                # The same answer on all ranks: one that went on alone would wait for the others in its next collective.
                is_spent, is_stopped = collectives.on_any(
                    self.ledger.budget_is_spent(), self._is_stopped
                )
                if is_spent or is_stopped:
                    self.outcome = BUDGET_SPENT if is_spent else STOPPED_EARLY
                    break
                self._turn = Step(*next(reading), began)
                yield self._turn
                if self.outcome is not None:  # the step was dropped
                    break
            else:
                self.outcome = DONE
        self.save()  # a run that ends before its first step still leaves a model
        self._checkpoints.finish()
        if self.outcome == DONE:
            self.ledger.close_run()

    def stop(self) -> None:
        """Asks for the end of the run before its next step; one rank that asks is enough."""
        self._is_stopped = True

    def take(self, step: Step, through: Through | None = None) -> StepRecord:
        """Notes, charges and makes the step of this turn; see `train_step`. Collective.

        Args:
            through: is given the step's micro-batches, and gives those that the mechanism reads.

        Raises:
            StepDropped: before the intent, on all ranks: the step costs nothing, and the next turn ends the run.
            MixedExamples: on all ranks: losses depend on other examples. The ledger says that no guarantee holds.
            RuntimeError: another turn's step, or one that was begun before.
        """
        self._require(step, "dealt")
        step.state = "begun"
        # Before the intent, so that every charge has its private record of whom it was spent on.
        self.ledger.note(step.batch, self.parts.micro_batch_size, self.parts.nodes)
        micro_batches = step.micro_batches if through is None else through(step.micro_batches)
        isolation = self.parts.isolation
        try:
            watched = isolation.watched(micro_batches)
            with self._voiding_if_mixed():
                record = train_step(self.mechanism, self._charge, step.number, watched)
        except StepDropped:
            self._turn, self.outcome = None, STOPPED_EARLY
            with self._voiding_if_mixed():  # a check of this step may have failed before
                isolation.require_apart()
            raise
        step.state = "taken"
        return record

    def keep(self, step: Step) -> None:
        """Counts the step that was taken as done, and saves it where that is due. Collective.

        Averages and schedulers have moved by then, since a resume goes on from the checkpoint; code of a user has not run, since
        the checkpoint holds what the mechanism made.

        Raises:
            RuntimeError: the step was not taken in this turn.
            WeightsNotFinite, CheckpointWriteError: it cannot be saved.
        """
        self._require(step, "taken")
        self._turn, self.step = None, step.number
        # One step after it began, whatever the clock: the ledger shows where (contract 12).
        self._checkpoints.finish()
        interval = self.parts.save_every or max(1, self.plan.reserved_attempts // 20)
        is_last = self.step == self.plan.num_steps
        if self.step % interval == 0 or is_last:
            self.save()
        if is_last:
            self._checkpoints.finish()

    @contextlib.contextmanager
    def _voiding_if_mixed(self) -> Iterator[None]:
        """Records in the ledger that no guarantee holds, where examples were found not to stay apart. Collective."""
        try:
            yield
        except MixedExamples:
            self.ledger.void()
            raise

    def _require(self, step: Step, state: str) -> None:
        if step is not self._turn or step.state != state:
            raise RuntimeError(
                f"step {step.number} is not one that is {state} in this turn: call run.take(step), then run.keep(step), once each"
            )

    def _require_turn_is_over(self) -> None:
        if self._turn is not None:
            raise RuntimeError(
                f"step {self._turn.number} is {self._turn.state} and not kept: call run.take(step), then run.keep(step), in "
                "every turn"
            )

    def save(self) -> None:
        """Writes a checkpoint of the last step, or starts to, if there is none; the ledger notes it when it is whole. Collective.

        Raises:
            WeightsNotFinite: there is nothing to save (on rank 0, RemoteError elsewhere).
            RuntimeError: a turn is not over; the weights may be those of half a step.
        """
        self._require_turn_is_over()
        if self.saved == self.step:
            return
        require_finite(self.engine, self.step)
        states, shapes, facts = self.parts.stored()
        said = {  # a checkpoint without it would be a model without a guarantee
            "formal_guarantee": self.plan.formal_guarantee,
            "reasons": list(self.plan.reasons),
            "ledger": self.ledger.position(),
            "charged_attempts": self.ledger.num_charged,
        }
        self._checkpoints.save(self.step, states, shapes, said | dict(facts))
        self.saved = self.step


def require_drawn_noise(folder: RunFolder, plan: PrivacyPlan, resumed: Checkpoint | None) -> None:
    """Refuses to go on with a run of version 0.1, whose noise this version does not draw; one that has no step left may end.

    Raises:
        PrivacyStateRefused: steps are left.
    """
    if plan.had_doubles and (0 if resumed is None else resumed.step) < plan.num_steps:
        raise PrivacyStateRefused(
            f"{folder.ledger}: the run began with noise made of doubles, which is no longer drawn: export and "
            "verify what it has, end it with version 0.1, or start another run folder"
        )


def load_newest(
    folder: RunFolder, ledger: RunLedger, take_weights: Callable[[Checkpoint], object] | None
) -> Checkpoint | None:
    """Finds the newest whole checkpoint and has the model take its weights. Collective.

    Raises:
        PrivacyStateRefused: the checkpoint knows more of the ledger than the ledger itself, is of another run, or is not the
            one that the ledger recorded.
    """
    checkpoint = newest_whole(folder.checkpoints, ledger.require_not_shorter_than)
    if checkpoint is None:
        return None
    if not checkpoint.manifest.get("ledger"):
        raise PrivacyStateRefused(
            f"{checkpoint.path} remembers no line of this run's ledger, so it was not written by this run: take it away; "
            "weights from elsewhere are what a new run folder starts from"
        )
    ledger.on_main(lambda on_rank_0: require_recorded(checkpoint.path, on_rank_0.state))
    if take_weights is not None:
        take_weights(checkpoint)
    return checkpoint


def require_no_checkpoint(folder: RunFolder) -> None:
    """A new run begins beside no checkpoint that remembers a ledger, not even one that was set aside.

    Raises:
        PrivacyStateRefused: one is there.
    """
    for manifest in readable_manifests(folder.checkpoints):
        if manifest.get("ledger"):
            raise PrivacyStateRefused(
                f"{folder.ledger}: is gone, and a checkpoint of step {manifest['step']} remembers it; what was spent is unknown: "
                "put it back, or start another run folder"
            )


def begins_again(
    folder: RunFolder, ledger: RunLedger, resumed: Checkpoint | None, *, may_restart: bool
) -> bool:
    """Whether the run has lost all its checkpoints and begins again at step 0; prints one line about any other loss.

    A crash before the first checkpoint is no loss: the ledger records a checkpoint only when it is durable, and one that
    replaces another is durable before that is removed.

    Raises:
        PrivacyStateRefused: the ledger records a checkpoint, none is there, and nobody allowed to charge the steps again.
    """
    recorded = ledger.checkpointed_step
    if resumed is not None:
        if recorded is not None and resumed.step < recorded:
            collectives.say(
                f"the ledger records a checkpoint of step {recorded}, which is gone or set aside: the steps after "
                f"{resumed.step} are repeated and charged again"
            )
        if may_restart:
            collectives.say(
                f"restart_from_step_0 changes nothing: there is a checkpoint of step {resumed.step}"
            )
        return False
    if recorded is not None and not may_restart:
        raise PrivacyStateRefused(
            f"{folder.checkpoints}: the ledger records a checkpoint of step {recorded}, and none is there: put one back, or "
            "give --restart_from_step_0, or restart_from_step_0=True to a loop, which charges all steps again"
        )
    return recorded is not None
