"""Opens a run and repeats its steps, for the trainer and for `PrivateLoop`.

`open_run` makes every check that can refuse a start before it writes to the run. The loop belongs
to its caller: `Run.steps` deals a step, `Run.take` notes, charges and makes it, and `Run.keep`
saves it. A side (trainer/run/start.py, privacy/loop/opening.py) adds its model, data and checks.
"""

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple, Protocol

import torch
from torch import Tensor

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
from ..step.batches import LogicalBatches, StepBatch, max_micro_batches
from ..step.run_folder import RunFolder
from ..step.step import Charge, Mechanism, MicroBatch, StepRecord, train_step
from .run_ledger import LedgerOpening, RunLedger


class CheckpointContents(NamedTuple):
    """The contents of a checkpoint.

    Attributes:
        states: tensors of this rank.
        shapes: of all tensors, by name.
        facts: fields that a side adds to the manifest.
    """

    states: Iterable[ShardState]
    shapes: Mapping[str, torch.Size]
    facts: Mapping[str, Any]


@dataclass(frozen=True, kw_only=True)
class RunParts:
    """The parts of a run that a side makes when it knows plan and checkpoint; none of them writes.

    Attributes:
        read: pairs the batch of each step with its micro-batches, in order, and pulls batches
            lazily.
        nodes: see `LogicalBatches`.
        note_charge: see `Charge.note`.
        save_every: steps between checkpoints. By default a twentieth of the reserve lies between
            two, so that the reserve lasts for twenty crashes.
        stored: is called at each checkpoint.
        configuration: is called once the ledger exists; returns the arguments of
            `RunFolder.record_configuration`.
        isolation: checks secret micro-batches.
        made_up: makes up a micro-batch of the run's size, by which `isolation` is tried first.
    """

    mechanism: Mechanism
    read: Callable[
        [Iterator[StepBatch]], Generator[tuple[StepBatch, Iterator[MicroBatch]], None, None]
    ]
    micro_batch_size: int
    learning_rate: Callable[[int], float]
    note_charge: Callable[[int], object]
    stored: Callable[[], CheckpointContents]
    configuration: Callable[[], tuple[str, Mapping[str, Any] | None, Mapping[str, Any]]]
    isolation: Isolation
    made_up: Callable[[], Mapping[str, Tensor]]
    retention: Retention
    save_every: int | None = None
    in_background: bool = False
    nodes: tuple[int, ...] = ()


class RunSetup(Protocol):
    """A side's part of a start. `open_run` calls each method once, in the order of this class."""

    folder: RunFolder
    may_restart: bool
    """Lets a run without its checkpoints begin again at step 0 and charge its steps again."""

    def checks(self) -> Sequence[Callable[[], object]]:
        """Returns the checks that come before the ledger, cheap ones first; none writes."""
        ...

    def open_ledger(self) -> LedgerOpening:
        """Calls `privacy.run.run_ledger.open_ledger` with the side's plan."""
        ...

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Sets the model's weights if its engine does not do so later; refuses another model's."""
        ...

    def build(self, plan: PrivacyPlan, resumed: Checkpoint | None) -> RunParts:
        """Builds the engine with the checkpoint's state, the mechanism on it, and the reader."""
        ...

    def take_ledger(self, ledger: RunLedger) -> None:
        """Receives the ledger as soon as it is open; may refuse one that has lost lines."""
        ...


Through = Callable[[Iterator[MicroBatch]], Iterator[MicroBatch]]
"""Stands between reader and mechanism: it may look at micro-batches, stop, or drop rows. It adds no
example."""


@dataclass(eq=False)
class Step:
    """A step, which `Run.steps` deals and the caller takes and keeps.

    Attributes:
        batch: says which examples this rank reads.
        micro_batches: the rows of `batch`; `Run.take` reads them.
        began: when its turn began, before any of its data were read (privacy/ranks/clock.py).
        state: a step that stays "begun" has failed.
    """

    batch: StepBatch
    micro_batches: Iterator[MicroBatch]
    began: Private[float]
    state: Literal["dealt", "begun", "taken"] = field(default="dealt", init=False)

    @property
    def number(self) -> int:
        """Returns the number of the step, from 1 on."""
        return self.batch.step


def open_run(start: RunSetup, *, is_dry: bool = False) -> "Run | Finished":
    """Opens a run, or returns a finished one. Collective.

    Nothing of a run changes before its last check, and the ledger of a new run is made after that
    check. So a refused start spends and reserves nothing, and can be repeated once its fault is
    mended. The folder alone is made, and locked, before.

    Args:
        is_dry: stops after the last check. The returned run takes no step, and an existing run
            stays as it is.

    Raises:
        ConfigError, PrivacyConfigError: the run cannot be trained as asked, or was begun with
            other settings.
        PrivacyStateRefused: the files of the run folder contradict each other, or the run is void.
    """
    for check in start.checks():
        check()
    folder = start.folder
    opening = start.open_ledger()
    ledger = opening.ledger
    resumed: Checkpoint | None = None
    is_restarted = False
    if ledger is None:
        collectives.on_main(lambda: require_no_checkpoint(folder))
    else:
        require_not_void(folder, ledger)
        start.take_ledger(ledger)
        resumed = load_newest(folder, ledger, start.take_weights)
        if ledger.is_closed:
            return finished(folder, ledger, resumed, opening.plan, is_dry=is_dry)
        require_drawn_noise(folder, opening.plan, resumed)
        is_restarted = restarts(folder, ledger, resumed, may_restart=start.may_restart)
    parts = start.build(opening.plan, resumed)
    require_premises(parts.mechanism, parts.micro_batch_size, parts.nodes)
    layout = parts.mechanism.engine.layout
    num_noised = sum(layout.count(rank) for rank in range(collectives.world_size()))
    exponent = parts.mechanism.clipped.exponent
    if ledger is not None:
        require_same_sums(folder, ledger, num_noised, exponent)
    parts.isolation.require(parts.made_up())
    # No check below may refuse the start.
    if ledger is None:
        ledger = opening.create(num_noised, exponent)
        start.take_ledger(ledger)
    if is_dry:
        return Run(folder, ledger, parts, b"", resumed)
    collectives.on_main(folder.begin)
    if resumed is not None:
        name = resumed.path.name
        collectives.on_main(lambda: set_aside_newer(folder.checkpoints, name))
    ledger.on_main(Ledger.mend)
    nonce = ledger.start_session(restarted=is_restarted)
    if resumed is not None:
        ledger.adopt(resumed)
    configuration = parts.configuration
    collectives.on_main(lambda: folder.record_configuration(*configuration()))
    return Run(folder, ledger, parts, nonce, resumed)


class Finished(NamedTuple):
    """A run whose ledger is closed, and its last checkpoint, whose weights the side has taken."""

    ledger: RunLedger
    resumed: Checkpoint | None


class Run:
    """An open run: `steps` deals its remaining steps, `take` makes a step, and `keep` saves it.

    Attributes:
        step: the last step that was taken and kept.
        first_step: the first step of this start.
        saved: the step of the newest checkpoint; None before the first.
        outcome: how the steps ended (privacy/errors.py); None while they go on.
        resumed: the checkpoint from which this start goes on, if there is one.
    """

    def __init__(
        self,
        folder: RunFolder,
        ledger: RunLedger,
        parts: RunParts,
        nonce: bytes,
        resumed: Checkpoint | None,
    ) -> None:
        self.folder = folder
        self.ledger = ledger
        self.parts = parts
        self.plan = ledger.plan
        self.mechanism = parts.mechanism
        self.engine = parts.mechanism.engine
        self.step = 0 if resumed is None else resumed.step
        self.first_step = self.step + 1
        self.saved = None if resumed is None else resumed.step
        self.outcome: int | None = None
        self.resumed = resumed
        self._turn: Step | None = None
        self._is_dealing = False
        self._is_stopped = False
        self._charge = Charge(ledger, parts.learning_rate, parts.note_charge)
        self._batches = LogicalBatches(
            parts.mechanism.sampler,
            ledger.key,
            nonce,
            ledger.attempts,
            parts.micro_batch_size,
            pads_to_cap=self.plan.enabled,
            nodes=parts.nodes,
            expected_batch_size=self.plan.expected_batch_size,
        )
        parts.isolation.begin(self._num_micro_batches())
        self._checkpoints = CheckpointWriter(
            folder.checkpoints,
            parts.retention,
            in_background=parts.in_background,
            published=self._record_checkpoint,
        )

    def _record_checkpoint(self, step: int, name: str, digest: str) -> None:
        """Records a whole checkpoint, with the checks that this start has passed so far."""
        self.ledger.checkpoint(step, name, digest, self.parts.isolation.num_passed)

    def _num_micro_batches(self) -> int:
        """Returns how many micro-batches each rank goes through until the end of the run."""
        num_per_step = max_micro_batches(
            self.mechanism.sampler,
            collectives.world_size(),
            self.parts.micro_batch_size,
            self.parts.nodes,
            self.plan.expected_batch_size,
        )
        return (self.plan.num_steps - self.step) * num_per_step

    def steps(self) -> Generator[Step, None, None]:
        """Yields the remaining steps, and closes the ledger after the last one. Collective.

            for step in run.steps():
                record = run.take(step)
                average.update(step.number)  # belongs into the checkpoint
                run.keep(step)
                print(record)  # a user's code sees the step

        The ledger is closed when the caller asks for a step after the last, so the caller may
        still look at the model. A run that ends early is saved, too, and `outcome` says why. A
        caller that leaves the loop by `break` saves and closes nothing.

        Raises:
            RuntimeError: the step of the last turn was not taken and kept; or the steps of this
                run were dealt before.
            WeightsNotFinite, CheckpointWriteError: the last step cannot be saved.
        """
        if self._is_dealing:
            raise RuntimeError("the steps of a run are dealt once: open the run again")
        self._is_dealing = True
        last = self.plan.num_steps
        batches = self._batches.plans(self.step + 1, last)
        with contextlib.closing(self.parts.read(batches)) as reading:
            while self.step < last:
                self._require_turn_is_over()
                began = clock.now()  # the wait for data is in a step's time
                # All ranks get one answer: a rank that went on alone would wait in its next
                # collective for ever.
                is_spent, is_stopped = collectives.on_any(
                    self.ledger.budget_is_spent(), self._is_stopped
                )
                if is_spent or is_stopped:
                    self.outcome = BUDGET_SPENT if is_spent else STOPPED_EARLY
                    break
                batch, micro_batches = next(reading)
                self._turn = Step(batch, micro_batches, began)
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
        """Ends the run before its next step; a call on one rank is enough."""
        self._is_stopped = True

    def take(self, step: Step, through: Through | None = None) -> StepRecord:
        """Notes, charges and makes the step of this turn; see `train_step`. Collective.

        Args:
            through: takes the step's micro-batches, and yields those that the mechanism reads.

        Raises:
            StepDropped: on all ranks, before the intent: the step costs nothing, and the next turn
                ends the run.
            MixedExamples: on all ranks: losses depend on other examples. The ledger then records
                that no guarantee holds.
            RuntimeError: the step is of another turn, or was begun before.
        """
        self._require(step, "dealt")
        step.state = "begun"
        # Before the intent, so that every charge has a private record of its examples.
        self.ledger.note(step.batch, self.parts.micro_batch_size, self.parts.nodes)
        micro_batches = step.micro_batches if through is None else through(step.micro_batches)
        watched = self.parts.isolation.watched(micro_batches)
        try:
            try:
                record = train_step(self.mechanism, self._charge, step.number, watched)
            except StepDropped:
                self._turn = None
                self.outcome = STOPPED_EARLY
                # A rank whose check has failed drops the step, too.
                self.parts.isolation.require_apart()
                raise
        except MixedExamples:
            self.ledger.void()
            raise
        step.state = "taken"
        return record

    def keep(self, step: Step) -> None:
        """Counts a taken step as done, and saves it if a checkpoint is due. Collective.

        Call it after averages and schedulers have moved, since a resume goes on from the
        checkpoint, and before any code of a user, since the checkpoint holds the weights that the
        mechanism made.

        Raises:
            RuntimeError: the step was not taken in this turn.
            WeightsNotFinite, CheckpointWriteError: the step cannot be saved.
        """
        self._require(step, "taken")
        self._turn = None
        self.step = step.number
        # A checkpoint in the background ends one step after it began, whatever the clock says: the
        # ledger shows the place of its record, which must not depend on time (contract 12).
        self._checkpoints.finish()
        interval = self.parts.save_every or max(1, self.plan.reserved_attempts // 20)
        is_last = self.step == self.plan.num_steps
        if self.step % interval == 0 or is_last:
            self.save()
        if is_last:
            self._checkpoints.finish()

    def _require(self, step: Step, state: str) -> None:
        if step is not self._turn or step.state != state:
            raise RuntimeError(
                f"step {step.number} is not {state} in this turn: call run.take(step), then "
                "run.keep(step), once each"
            )

    def _require_turn_is_over(self) -> None:
        if self._turn is not None:
            raise RuntimeError(
                f"step {self._turn.number} is {self._turn.state} and not kept: call "
                "run.take(step), then run.keep(step), in every turn"
            )

    def save(self) -> None:
        """Writes a checkpoint of the last step, or begins to, unless there is one. Collective.

        The ledger records the checkpoint once it is whole.

        Raises:
            WeightsNotFinite: on rank 0 (RemoteError elsewhere).
            RuntimeError: a turn is not over, so the weights may be those of half a step.
        """
        self._require_turn_is_over()
        if self.saved == self.step:
            return
        require_finite(self.engine, self.step)
        states, shapes, facts = self.parts.stored()
        # A manifest without these fields would be one of a model without a guarantee.
        claim = {
            "formal_guarantee": self.plan.formal_guarantee,
            "reasons": list(self.plan.reasons),
            "ledger": self.ledger.position(),
            "charged_attempts": self.ledger.num_charged,
        }
        self._checkpoints.save(self.step, states, shapes, claim | dict(facts))
        self.saved = self.step


def require_not_void(folder: RunFolder, ledger: RunLedger) -> None:
    """Refuses a run whose examples were mixed.

    Raises:
        PrivacyStateRefused: its ledger records that.
    """
    if ledger.is_void:
        raise PrivacyStateRefused(
            f"{folder.ledger}: {WHY_MIXED}, and it does not go on: mend model or loss, and start "
            "another run folder"
        )


def finished(
    folder: RunFolder,
    ledger: RunLedger,
    resumed: Checkpoint | None,
    plan: PrivacyPlan,
    *,
    is_dry: bool,
) -> Finished:
    """Returns a run whose ledger is closed.

    Raises:
        ConfigError: its last checkpoint is damaged or gone; no step may be taken again.
    """
    last = 0 if resumed is None else resumed.step
    if last < plan.num_steps:
        raise ConfigError(
            f"{folder.root} is finished and its budget is closed, but its last checkpoint is "
            f"damaged or gone: the newest whole one is that of step {last}; restore checkpoints/ "
            "from a copy"
        )
    if not is_dry:
        # A crash may have come between the ledger's last line and its copy in the mirror.
        ledger.on_main(Ledger.mend)
    return Finished(ledger, resumed)


def require_same_sums(
    folder: RunFolder, ledger: RunLedger, num_noised: int, exponent: int | None
) -> None:
    """Requires the number of noised coordinates and the step of the sums that the run began with.

    A larger number would have the noise test refute honest noise; another step would change the
    distribution of the noise.

    Raises:
        ConfigError: the model or its precision is another one.
    """
    recorded_noised = ledger.opened.get("noised_coordinates")
    recorded_exponent = ledger.opened.get("sum_exponent")
    if recorded_noised not in (None, num_noised):
        raise ConfigError(
            f"{folder.ledger}: the run was opened with {recorded_noised:,} trained numbers, and "
            f"this model has {num_noised:,}: give the model that it began with, or start another "
            "run folder"
        )
    if recorded_exponent not in (None, exponent):
        raise ConfigError(
            f"{folder.ledger}: the run was opened with sums and noise in steps of "
            f"2^-{recorded_exponent}, and this model has 2^-{exponent}: give it the precision that "
            "it began with, or start another run folder"
        )


def restarts(
    folder: RunFolder, ledger: RunLedger, resumed: Checkpoint | None, *, may_restart: bool
) -> bool:
    """Returns, on every rank, what `begins_again` says on rank 0, which alone reads the folder."""
    return collectives.on_main(
        lambda: begins_again(folder, ledger, resumed, may_restart=may_restart)
    )


def require_drawn_noise(folder: RunFolder, plan: PrivacyPlan, resumed: Checkpoint | None) -> None:
    """Refuses to go on with a run of version 0.1, whose noise this version does not draw.

    Such a run may end where no step is left.

    Raises:
        PrivacyStateRefused: steps are left.
    """
    if plan.had_doubles and (0 if resumed is None else resumed.step) < plan.num_steps:
        raise PrivacyStateRefused(
            f"{folder.ledger}: the run began with noise made of doubles, which is no longer drawn: "
            "export and verify its checkpoints, end it with version 0.1, or start another folder"
        )


def load_newest(
    folder: RunFolder, ledger: RunLedger, take_weights: Callable[[Checkpoint], object] | None
) -> Checkpoint | None:
    """Returns the newest whole checkpoint, whose weights the model has taken. Collective.

    Raises:
        PrivacyStateRefused: the checkpoint remembers lines that the ledger has lost, is of another
            run, or is not the one that the ledger recorded.
    """
    checkpoint = newest_whole(folder.checkpoints, ledger.require_not_shorter_than)
    if checkpoint is None:
        return None
    if not checkpoint.manifest.get("ledger"):
        raise PrivacyStateRefused(
            f"{checkpoint.path} remembers no line of this run's ledger, so this run did not write "
            "it: take it away, and start a new run folder from weights of another run"
        )
    ledger.on_main(lambda on_rank_0: require_recorded(checkpoint.path, on_rank_0.state))
    if take_weights is not None:
        take_weights(checkpoint)
    return checkpoint


def require_no_checkpoint(folder: RunFolder) -> None:
    """Refuses to begin a new run beside a checkpoint that remembers a ledger, or one set aside.

    Raises:
        PrivacyStateRefused: there is one.
    """
    for manifest in readable_manifests(folder.checkpoints):
        if manifest.get("ledger"):
            raise PrivacyStateRefused(
                f"{folder.ledger}: is gone, and a checkpoint of step {manifest['step']} remembers "
                "it, so the spent budget is unknown: put it back, or start another run folder"
            )


def begins_again(
    folder: RunFolder, ledger: RunLedger, resumed: Checkpoint | None, *, may_restart: bool
) -> bool:
    """Returns whether the run has lost all its checkpoints and begins again at step 0.

    Prints a line about the loss of some checkpoints. A crash before the first checkpoint loses
    none: the ledger records a checkpoint only when it is durable, and a new checkpoint is durable
    before the old one is removed.

    Raises:
        PrivacyStateRefused: the ledger records a checkpoint, the folder has none, and
            `may_restart` does not allow to charge the steps again.
    """
    recorded_step = ledger.checkpointed_step
    if resumed is not None:
        if recorded_step is not None and resumed.step < recorded_step:
            collectives.say(
                f"the ledger records a checkpoint of step {recorded_step}, which is gone or set "
                f"aside: the steps after {resumed.step} are repeated and charged again"
            )
        if may_restart:
            collectives.say(
                f"restart_from_step_0 changes nothing: there is a checkpoint of step {resumed.step}"
            )
        return False
    if recorded_step is not None and not may_restart:
        raise PrivacyStateRefused(
            f"{folder.checkpoints}: the ledger records a checkpoint of step {recorded_step}, and "
            "none is there: put one back, or give --restart_from_step_0, or "
            "restart_from_step_0=True to a loop, which charges all steps again"
        )
    return recorded_step is not None
