"""A private training loop around a model, an optimizer and a data set of one's own (docs/own_loop.md).

    with PrivateLoop(model, optimizer, dataset, loss=loss, example=example, run_dir="runs/mine", ...) as loop:
        for step in loop:
            print(step.number, step.epsilon)

Everything under it is what the trainer uses: sampler, rows, clipped sums, noise, ledger, checkpoints and `train_step`. Here stand
only what a recipe and a launcher say elsewhere, and what a user's own objects have to keep to.
"""

import difflib
import inspect
import os
import threading
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Self

import numpy as np
import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ..accounting.calibration import MIN_NOISE_MULTIPLIER
from ..accounting.rounding import rounded_up, useless_delta
from ..boundary import Private
from ..errors import BUDGET_SPENT, BudgetSpent, MixedExamples, PrivacyConfigError, RemoteError
from ..gradients.fallback import Fallback
from ..guards.own_engine import require_alike, require_model
from ..ledger.records import WHY_MIXED
from ..plan.releases import SENSITIVITY_SLACK
from ..plan.request import PlanRequest, require_types
from ..ranks import collectives
from ..run.run import Finished, Run, Step, open_run
from ..step.averaging import WeightAverage
from ..step.folder import RunFolder
from ..step.optimizer_state import rate_of, shown
from ..step.step import MicroBatch
from . import lineage
from .fields import Example, Field
from .opening import LearningRate, OwnStart
from .reading import Items, Reader


@dataclass(frozen=True)
class StepResult:
    """What one step shows.

    Attributes:
        number: of the step, from 1 on.
        lr: of the optimizer's first group.
        noised_grad_norm: of the sum after noise, divided by the public batch size; post-processing, so it may be published.
        private: computed without noise: never to be published, and never to decide anything. `.inside()` gives the number.
    """

    number: int
    lr: float
    noised_grad_norm: float
    private: dict[str, Private[float]]
    _epsilon: Callable[[], float] = field(repr=False, compare=False)

    @property
    def epsilon(self) -> float:
        """Epsilon of everything that the ledger had charged by then: an upper bound, computed when it is first asked for."""
        return self._epsilon()


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuses a keyword that is not known.

    Raises:
        PrivacyConfigError: with the name that was probably meant.
    """
    names = sorted({*known} - {"self", "rest"})
    for name in sorted({*given} - {*names}):
        meant = [*(one for one in names if name in one), *difflib.get_close_matches(name, names)][
            :1
        ]
        way = f"did you mean {meant[0]}?" if meant else f"it takes {', '.join(names)}"
        raise PrivacyConfigError(f"{what} takes no {name}: {way}")


def require_takes(
    function: object, what: str, in_order: Sequence[object], named: Mapping[str, object]
) -> None:
    """Refuses a function of the caller that cannot be called as the loop calls it.

    Raises:
        PrivacyConfigError: with what it is called with.
    """
    if not callable(function):
        raise PrivacyConfigError(f"{what} is a function, not {type(function).__name__}")
    try:
        inspect.signature(function).bind(*in_order, **named)
    except ValueError:  # some of Python's own show no signature
        return
    except TypeError as error:
        given = ", ".join(f"{name}=" for name in named) or f"{len(in_order)} arguments in order"
        raise PrivacyConfigError(f"{what} is called with {given}: {error}") from error


def _of_python(value: Any) -> Any:
    """A number of numpy, or a tensor of one, as the ledger can write it; anything else as it is."""
    return value.item() if isinstance(value, np.generic | Tensor) and value.ndim == 0 else value


class PrivateLoop:
    """Trains a model under a formal guarantee, in `for step in loop`; with the same arguments again it resumes.

    Each turn takes one whole step. Between turns the caller may evaluate, print and log whatever is public, and set the
    optimizer's learning rate. In a distributed program every rank makes the same loop and takes the same turns.

    Args:
        model: of torch, transformers or peft, on its device, whole or sharded by `fully_shard`; trained in float32 or float64.
        optimizer: any of torch that steps from gradients; it holds the trainable parameters.
        dataset: map-style; `dataset[i]` is a tuple or a mapping, and a function of i and of the global random numbers alone.
        example: what one item is (fields.py).
        loss: called with the tensors of a micro-batch, as `loss(*item)` or `loss(**item)`; one loss per example. None for a model
            of transformers, whose own loss is a mean (hugging_face.py).
        run_dir: the run folder; ledger, key and checkpoints lie in it.
        expected_batch_size: B; each item is in a step with probability B / len(dataset), whatever the micro-batch.
        target_epsilon, noise_multiplier: one of the two.
        target_delta: default 1 / (2 len(dataset)).
        max_grad_norm: C, the bound of one example's gradient.
        micro_batch_size: rows of one forward on one rank: speed and memory only.
        num_workers: processes that read items; 0 reads in this one.
        learning_rate: of all groups of the optimizer: a number, or a function of the step, from 1 on; None leaves them to the
            caller.
        save_every: steps between checkpoints; default a twentieth of the attempts in reserve, and at least 1.
        made_up: two or more made-up items for the self-check, never private ones; random ones by default.
        fallback: whether parameters that no rule follows are differentiated through the module around them, as a whole for each
            example, which costs time and memory and is said on the console; or the paths of modules that may be.
        data_version: a name for exactly these data, taken in place of a hash over all items, which is one pass at each start;
            then 512 items alone are looked at, spread evenly.
        unusable_as_zero: it is meant that more than 1 % of the items cannot be used, or so many of one label that it is no
            chance, and that they count as zero.
        ledger_mirror: a second place for the ledger, best on another file system.
        unit: what one item is, in words for the card.
        starts_from: where the model's weights come from, frozen ones and buffers too: "public" for what no private run has
            trained, or the run folders of all private runs that did, whose ledgers are then copied and composed with this one.
        restart_from_step_0: the run has lost all its checkpoints; all steps are charged again.

    Raises:
        PrivacyConfigError, ConfigError: what cannot be trained privately, and what to give instead (exit 2).
        PrivacyStateRefused: the run folder's parts do not fit together (exit 4).
    """

    def __new__(cls, *_: object, **given: Any) -> Self:
        """Refuses an unknown keyword with the name that is meant, where Python would say what is missing."""
        if cls.__init__ is PrivateLoop.__init__:
            require_known(given, inspect.signature(cls.__init__).parameters, "PrivateLoop")
            lineage.stated(given.get("starts_from"))
        return super().__new__(cls)

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        dataset: Items,
        *,
        example: Mapping[str, Field] | Sequence[Field],
        loss: Callable[..., Tensor] | None = None,
        run_dir: str | Path,
        expected_batch_size: int,
        num_steps: int,
        target_epsilon: float | None = None,
        noise_multiplier: float | None = None,
        target_delta: float | None = None,
        max_grad_norm: float = 1.0,
        micro_batch_size: int = 32,
        num_workers: int = 0,
        learning_rate: LearningRate = None,
        save_every: int | None = None,
        made_up: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
        fallback: Fallback = True,
        data_version: str | None = None,
        unusable_as_zero: bool = False,
        ledger_mirror: str | Path | None = None,
        unit: str = "one item of the data set",
        starts_from: lineage.StartsFrom,
        restart_from_step_0: bool = False,
    ) -> None:
        require_model(model)
        if not isinstance(run_dir, str | os.PathLike) or not os.fspath(run_dir):
            raise PrivacyConfigError(
                f"run_dir is the path of a run folder, not {run_dir!r}: ledger and key have to last"
            )
        reader = Reader(
            dataset, Example(example), micro_batch_size, unusable_as_zero=unusable_as_zero
        )
        counts = (
            (micro_batch_size, 1),
            (1 if save_every is None else save_every, 1),
            (num_workers, 0),
        )
        if not all(isinstance(count, int) and count >= least for count, least in counts):
            raise PrivacyConfigError(
                "micro_batch_size and save_every are integers from 1 on, and num_workers from 0 on"
            )
        if (target_epsilon is None) == (noise_multiplier is None):
            raise PrivacyConfigError("give exactly one of target_epsilon and noise_multiplier")
        if loss is not None:
            require_takes(loss, "loss", *reader.example.arguments(reader.example.padding()))
        if callable(learning_rate):
            require_takes(learning_rate, "learning_rate", [1], {})
        elif learning_rate is not None:
            rate_of(learning_rate, "learning_rate")
        if ledger_mirror is not None and not isinstance(ledger_mirror, str | os.PathLike):
            raise PrivacyConfigError(f"ledger_mirror is the path of a file, not {ledger_mirror!r}")
        self._taken = threading.Lock()
        self._process, self._over = (
            os.getpid(),
            "",
        )  # why no further step is taken; empty while the loop goes on
        self.module, self.run_dir = model, Path(run_dir)
        request = PlanRequest(
            num_examples=len(dataset),
            expected_batch_size=_of_python(expected_batch_size),
            num_steps=_of_python(num_steps),
            target_epsilon=_of_python(target_epsilon),
            noise_multiplier=_of_python(noise_multiplier),
            target_delta=_of_python(target_delta),
            max_grad_norm=_of_python(max_grad_norm),
            sensitivity_slack=SENSITIVITY_SLACK,
        )
        require_types(request)
        if noise_multiplier is not None and 0 < noise_multiplier < MIN_NOISE_MULTIPLIER:
            raise PrivacyConfigError(
                f"noise_multiplier {noise_multiplier:g} is below {MIN_NOISE_MULTIPLIER}, where epsilon explodes: take "
                f"{MIN_NOISE_MULTIPLIER} or more"
            )
        start = OwnStart(
            model=model,
            optimizer=optimizer,
            reader=reader,
            loss=loss,
            folder=RunFolder(self.run_dir),
            request=request,
            made_up=made_up,
            fallback=fallback,
            learning_rate=learning_rate,
            num_workers=num_workers,
            save_every=save_every,
            data_version=data_version,
            mirror=None if ledger_mirror is None else Path(ledger_mirror),
            unit=unit,
            may_restart=restart_from_step_0,
            starts_from=lineage.stated(starts_from),
        )
        with start.undone:  # if anything fails
            opened = open_run(start)
            self._registered, self._resumed = start.registered, opened.resumed
            self._engine, self._start = start.engine, start
            self._ledger, self.plan = opened.ledger, opened.ledger.plan
            self._charged = collectives.on_main(lambda: self._ledger.num_charged)
            self._run: Run | None = None
            self._steps: Generator[Step, None, None] | None = None
            if isinstance(opened, Finished):
                collectives.say(
                    f"{self.run_dir} is finished ({self.num_steps} steps): {self.claim}; to train further, give another run_dir"
                )
            else:
                self._run, self._steps = opened, opened.steps()
                start.undone.callback(self._steps.close)
                if opened.step == self.num_steps:
                    next(
                        self._steps, None
                    )  # a crash came between the last checkpoint and the run's end
            self._open = start.undone.pop_all()

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole run."""
        return self.plan.num_steps

    @property
    def steps_done(self) -> int:
        """The last step that was taken."""
        return self.num_steps if self._run is None else self._run.step

    @property
    def epsilon(self) -> float:
        """Epsilon of all that the ledger has charged so far; at the end of the run, verify.py finds it to the last digit."""
        return self._claim(self._charged, is_last=self.steps_done == self.num_steps)[0]

    @property
    def delta(self) -> float:
        """Delta of the claim: the least of all runs that it covers."""
        return self._claim(self._charged, is_last=self.steps_done == self.num_steps)[1]

    @property
    def claim(self) -> str:
        """Epsilon and delta in words, epsilon rounded up."""
        useless = useless_delta(self.delta, self.plan.num_examples)
        words = f"epsilon {rounded_up(self.epsilon)} at delta {self.delta:g}"
        return words + (f"; {useless}" if useless else "")

    def __iter__(self) -> Iterator[StepResult]:
        """Takes the steps that are left; the last one ends the run in the ledger.

        Raises:
            BudgetSpent: crashes have used up the reserve and steps remain; what is there is saved.
        """
        while self.steps_done < self.num_steps:
            yield self.step()

    def register(self, *things: LRScheduler | WeightAverage) -> None:
        """Has the loop keep schedulers and an average of the weights, which then go on over a stop as if there had been none.

        Each step moves them on, before its checkpoint and before its turn ends, so the caller calls no `scheduler.step()`. The
        average is in the checkpoints. A scheduler is a function of its number of steps, and is forwarded by those that are done.

        Args:
            things: schedulers of this loop's optimizer as they were made, and at most one `WeightAverage`.

        Raises:
            PrivacyConfigError: anything else, a scheduler that follows a metric or moves already, or a step was taken before.
        """
        registered, optimizer = self._registered, self._engine.optimizer
        if self._run is not None and self._run.step >= self._run.first_step:
            raise PrivacyConfigError(
                "register schedulers and averages before the first step of this program"
            )
        for thing in things:
            if isinstance(thing, WeightAverage) and registered.average is None:
                registered.average = thing.start(self._engine, self._resumed)
            elif (
                isinstance(thing, LRScheduler)
                and not isinstance(thing, ReduceLROnPlateau)
                and not self._engine.sets_rate
            ):
                parts = [
                    thing,
                    *getattr(thing, "_schedulers", []),
                ]  # one that is chained has no count of its own
                if thing.optimizer is not optimizer or any(
                    getattr(one, "last_epoch", 0) > 0 for one in parts
                ):
                    raise PrivacyConfigError(
                        "register a new scheduler, of the optimizer that the loop was given"
                    )
                registered.forward(thing, self.steps_done)
                self._engine.is_scheduled = True
            else:
                raise PrivacyConfigError(
                    f"{type(thing).__name__} cannot be registered: the loop keeps schedulers of torch that follow steps alone, "
                    "without learning_rate=, and one WeightAverage; do anything else between turns"
                )

    def _watched(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields micro-batches, in parts, while the model is what passed the self-check."""
        engine = self._engine
        return self._start.self_checked.watched(micro_batches, engine.device, engine.compute_dtype)

    def step(self) -> StepResult:
        """Takes the next step. Collective.

        Raises:
            PrivacyConfigError: model or optimizer are no longer as the loop has put them; or all steps are done.
            BudgetSpent: see `__iter__`.
            ItemNotRead: a file or a network failed; the step is not taken, and the loop is over.
        """
        with self._alone():
            number = self.steps_done + 1
            if self._run is None or self._steps is None or number > self.num_steps:
                raise PrivacyConfigError(
                    f"all {self.num_steps} steps of {self.run_dir} are done; to train further, give another run_dir"
                )
            if torch.is_inference_mode_enabled():
                raise PrivacyConfigError(
                    "torch.inference_mode() is on, without gradients: take steps outside of it"
                )
            if torch.get_default_device().type == "meta":
                raise PrivacyConfigError(
                    'torch.set_default_device("meta") is on, where tensors hold no numbers: take steps outside of it'
                )
            try:
                require_alike(self._look)
            except (
                PrivacyConfigError,
                RemoteError,
                MemoryError,
                torch.OutOfMemoryError,
            ):  # they speak for themselves
                raise
            except Exception as error:
                # Whatever a mode, a device or a class raises that was exchanged between two turns.
                raise PrivacyConfigError(
                    f"step {number} is not begun and nothing is charged for it: a look at model and optimizer raised "
                    f"{shown(error)}; undo what was changed since the loop's last turn"
                ) from error
            self._over = "a step was not taken to its end"
            try:
                step = next(self._steps, None)
                if step is not None:
                    record = self._run.take(step, self._watched)
                    self._registered.move(number)
                    self._run.keep(step)
            except BaseException:
                self._steps.close()  # workers end that read ahead
                raise
            finally:  # a step that fails may have changed the weights
                lineage.TRAINED[self.run_dir.resolve()] = self._ledger.position()
            is_last = number == self.num_steps
            if is_last:
                next(self._steps, None)  # the run's end
            charged = self._charged = collectives.on_main(lambda: self._ledger.num_charged)
            self._over = ""
            if step is None:
                assert self._run.outcome == BUDGET_SPENT, "nothing else ends the steps of a loop"
                raise BudgetSpent(
                    f"the privacy budget of {self.run_dir} is spent: crashes have used up its reserve, and step {number} of "
                    f"{self.num_steps} cannot be charged; the weights are saved"
                )
            bad, count = (
                record.private[name].inside() for name in ("num_nonfinite", "num_examples")
            )
            if bad == count > 0:
                collectives.say(
                    f"step {number}: loss or gradients of all {count:.0f} examples are not finite, so noise alone was added: "
                    "are the items and the weights finite, and is the learning rate small enough?"
                )
            norm = record.noised_grad_norm.value
            return StepResult(
                number,
                record.lr.value,
                norm,
                record.private,
                lambda: self._claim(charged, is_last=is_last)[0],
            )

    def _look(self) -> object:
        self._registered.require_unmoved()
        return self._engine.require_untouched()

    def save(self) -> None:
        """Writes a checkpoint of the last step, if there is none. Collective.

        Raises:
            WeightsNotFinite: there is nothing to save.
            PrivacyConfigError: the loop is over, or something else has changed the weights.
        """
        if self._run is not None and self._run.saved != self._run.step:
            with self._alone():
                self._run.save()

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """One thing at a time: a forked copy would draw the same batch again, and weights after half a step are no run's.

        Raises:
            PrivacyConfigError: in a forked process, while another thread is in the loop, or when the loop is over.
        """
        if os.getpid() != self._process:
            raise PrivacyConfigError(
                "this process was forked from the one that made the loop and holds the same secret coins: step and save there"
            )
        if not self._taken.acquire(blocking=False):
            raise PrivacyConfigError(
                "a step is under way, in another thread or around this call: take one step after the other"
            )
        try:
            if self._over:
                raise PrivacyConfigError(
                    f"this loop is over ({self._over}): make it again, and it goes on where it was saved"
                )
            yield
        finally:
            self._taken.release()

    def write_card(self) -> Path:
        """Writes the privacy card of the run so far, as JSON, Markdown and one HTML page; returns its folder. Collective."""
        from ..card.folder import build_card, write_card

        return collectives.on_main(
            lambda: write_card(self.run_dir, build_card(self.run_dir))[0].parent
        )

    def close(self) -> None:
        """Gives model, optimizer and run folder back. Steps since the last checkpoint stay charged and are lost."""
        self._open.close()
        self._over = "it was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Saves where the loop was left early, unless an error did that."""
        try:
            if (
                kind is None
                and os.getpid() == self._process
                and not self._over
                and self.steps_done > 0
            ):
                self.save()
        finally:
            self.close()

    def _claim(self, charged: int, *, is_last: bool) -> tuple[float, float]:
        """While the run goes on a table of upper bounds is read, when asked: a step costs less than its epsilon."""
        if self._ledger.is_void:
            raise MixedExamples(f"{self.run_dir}: {WHY_MIXED}")
        found = self._ledger.claim(charged, is_exact=is_last)
        assert found is not None, "a loop without a guarantee is not opened"
        return found
