"""A private training loop around a model, an optimizer and a data set of one's own.

    with PrivateLoop(model, optimizer, dataset, loss=loss, example=example, ...) as loop:
        for step in loop:
            print(step.number, step.epsilon)

It uses the trainer's sampler, rows, clipped sums, noise, ledger, checkpoints and `train_step`, and
adds the checks of a user's own objects (docs/own_loop.md).
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
from ..guards.watched_engine import require_alike, require_model
from ..ledger.records import WHY_MIXED
from ..plan.releases import SENSITIVITY_SLACK
from ..plan.request import PlanRequest, require_types
from ..ranks import collectives
from ..run.run import Finished, Run, Step, open_run
from ..step.averaging import WeightAverage
from ..step.optimizer_state import rate_of, short_text
from ..step.run_folder import RunFolder
from ..step.step import MicroBatch
from . import lineage
from .fields import Example, Field
from .opening import LearningRate, LoopStart
from .reading import Items, Reader


@dataclass(frozen=True)
class StepResult:
    """Holds the measurements of one step.

    Attributes:
        number: of the step, from 1 on.
        lr: learning rate of the optimizer's first group.
        noised_grad_norm: norm of the noised sum divided by the public batch size; post-processing,
            so it may be published.
        private: numbers computed without noise; never publish them, or base a decision on them.
            `.inside()` gives the number.
    """

    number: int
    lr: float
    noised_grad_norm: float
    private: dict[str, Private[float]]
    _epsilon: Callable[[], float] = field(repr=False, compare=False)

    @property
    def epsilon(self) -> float:
        """Returns an upper bound of the epsilon of all charges up to this step.

        It is computed when it is read.
        """
        return self._epsilon()


def require_keywords(keywords: Iterable[str], allowed: Iterable[str], function: str) -> None:
    """Refuses a keyword that a function does not take.

    Raises:
        PrivacyConfigError: with the name that was probably meant.
    """
    names = sorted({*allowed} - {"self", "rest"})
    for keyword in sorted({*keywords} - {*names}):
        longer_names = [name for name in names if keyword in name]
        similar_names = longer_names + difflib.get_close_matches(keyword, names)
        if similar_names:
            hint = f"did you mean {similar_names[0]}?"
        else:
            hint = f"it takes {', '.join(names)}"
        raise PrivacyConfigError(f"{function} takes no {keyword}: {hint}")


def require_takes(
    function: object, role: str, arguments: Sequence[object], keywords: Mapping[str, object]
) -> None:
    """Refuses a function of the caller that cannot be called as the loop calls it.

    Args:
        role: name of the function in the error.

    Raises:
        PrivacyConfigError: with the arguments of the loop's call.
    """
    if not callable(function):
        raise PrivacyConfigError(f"{role} is a function, not {type(function).__name__}")
    try:
        inspect.signature(function).bind(*arguments, **keywords)
    # Some of Python's own functions have no signature.
    except ValueError:
        return
    except TypeError as error:
        call = ", ".join(f"{name}=" for name in keywords) or f"{len(arguments)} arguments in order"
        raise PrivacyConfigError(f"{role} is called with {call}: {error}") from error


def _of_python(value: Any) -> Any:
    """Returns a number of numpy, or a tensor of one number, as the ledger can write it.

    Any other object is returned as it is.
    """
    return value.item() if isinstance(value, np.generic | Tensor) and value.ndim == 0 else value


class PrivateLoop:
    """Trains a model under a formal guarantee, in `for step in loop`.

    The same arguments again resume the run. Each turn takes one whole step. Between turns the
    caller may evaluate, print and log public values, and set the optimizer's learning rate. In a
    distributed program every rank makes the same loop and takes the same turns.

    Args:
        model: of torch, transformers or peft, on its device, whole or sharded by `fully_shard`;
            trained in float32 or float64.
        optimizer: any of torch that steps from gradients; it holds the trainable parameters.
        dataset: map-style; `dataset[i]` is a tuple or a mapping, and a function of i and of the
            global random numbers alone.
        example: the fields of an item (fields.py).
        loss: called with the tensors of a micro-batch, as `loss(*item)` or `loss(**item)`; returns
            one loss per example. None for a model of transformers, whose own loss is a mean
            (hugging_face.py).
        run_dir: the run folder, for ledger, key and checkpoints.
        expected_batch_size: B; each item is in a step with probability B / len(dataset), whatever
            the micro-batch.
        num_steps: of the whole run.
        target_epsilon: the budget; give either it or `noise_multiplier`.
        noise_multiplier: sigma, the noise's standard deviation in units of the sensitivity.
        target_delta: default 1 / (2 len(dataset)).
        max_grad_norm: C, the bound of one example's gradient.
        micro_batch_size: rows of one forward on one rank; affects speed and memory only.
        num_workers: processes that read items; 0 reads in this process.
        learning_rate: of all groups of the optimizer: a number, or a function of the step, from 1
            on; None leaves the rates to the caller.
        save_every: steps between checkpoints; default a twentieth of the attempts in reserve, and
            at least 1.
        made_up: two or more made-up items for the self-check, never private ones; random ones by
            default.
        fallback: whether parameters that no rule follows are differentiated through the module
            around them, as a whole for each example, which costs time and memory and is printed;
            or the paths of modules for which this is allowed.
        data_version: a name for exactly these data, in place of a hash over all items, which takes
            one pass at each start. Then only 512 items are read to check them, spread evenly.
        unusable_as_zero: declares it intended that unusable items count as zero where they are more
            than 1 %, or so many of one label that chance does not explain it.
        ledger_mirror: a second place for the ledger, best on another file system.
        unit: the kind of one item, in words for the card.
        starts_from: the origin of the model's weights, frozen ones and buffers included: "public"
            if no private run has trained them, or the run folders of all private runs that did,
            whose ledgers are then copied and composed with this one.
        restart_from_step_0: the run has lost all its checkpoints; all steps are charged again.

    Raises:
        PrivacyConfigError, ConfigError: an argument cannot be trained with privately; the message
            says what to give instead (exit 2).
        PrivacyStateRefused: the run folder's parts do not fit together (exit 4).
    """

    def __new__(cls, *_: object, **keywords: Any) -> Self:
        """Refuses an unknown keyword with the probable name; Python would name a missing one."""
        if cls.__init__ is PrivateLoop.__init__:
            parameters = inspect.signature(cls.__init__).parameters
            require_keywords(keywords, parameters, "PrivateLoop")
            lineage.run_folders_of(keywords.get("starts_from"))
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
        counts_and_minima = (
            (micro_batch_size, 1),
            (1 if save_every is None else save_every, 1),
            (num_workers, 0),
        )
        for count, minimum in counts_and_minima:
            if not isinstance(count, int) or count < minimum:
                raise PrivacyConfigError(
                    "micro_batch_size and save_every are integers from 1 on, and num_workers from "
                    "0 on"
                )
        if (target_epsilon is None) == (noise_multiplier is None):
            raise PrivacyConfigError("give exactly one of target_epsilon and noise_multiplier")
        if loss is not None:
            arguments, keywords = reader.example.arguments(reader.example.padding())
            require_takes(loss, "loss", arguments, keywords)
        if callable(learning_rate):
            require_takes(learning_rate, "learning_rate", [1], {})
        elif learning_rate is not None:
            rate_of(learning_rate, "learning_rate")
        if ledger_mirror is not None and not isinstance(ledger_mirror, str | os.PathLike):
            raise PrivacyConfigError(f"ledger_mirror is the path of a file, not {ledger_mirror!r}")
        self._turn_lock = threading.Lock()
        self._process = os.getpid()
        # Why no further step is taken; empty while the loop goes on.
        self._end_reason = ""
        self.module = model
        self.run_dir = Path(run_dir)
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
                f"noise_multiplier {noise_multiplier:g} is below {MIN_NOISE_MULTIPLIER}, where "
                f"epsilon explodes: take {MIN_NOISE_MULTIPLIER} or more"
            )
        start = LoopStart(
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
            starts_from=lineage.run_folders_of(starts_from),
        )
        # Gives everything back if the start fails; otherwise `close` does.
        with start.resources:
            run = open_run(start)
            self._start = start
            self._engine = start.engine
            self._trackers = start.trackers
            self._resumed = run.resumed
            self._ledger = run.ledger
            self.plan = run.ledger.plan
            self._num_charged = collectives.on_main(lambda: self._ledger.num_charged)
            self._run: Run | None = None
            self._steps: Generator[Step, None, None] | None = None
            if isinstance(run, Finished):
                collectives.say(
                    f"{self.run_dir} is finished ({self.num_steps} steps): {self.claim}; to train "
                    "further, give another run_dir"
                )
            else:
                self._run = run
                self._steps = run.steps()
                start.resources.callback(self._steps.close)
                # A crash may have come between the last checkpoint and the run's end.
                if run.step == self.num_steps:
                    next(self._steps, None)
            self._resources = start.resources.pop_all()

    @property
    def num_steps(self) -> int:
        """Returns the number of steps of the whole run."""
        return self.plan.num_steps

    @property
    def steps_done(self) -> int:
        """Returns the number of steps that were taken, in this program and earlier ones."""
        return self.num_steps if self._run is None else self._run.step

    @property
    def epsilon(self) -> float:
        """Returns the epsilon of all charges of the ledger so far.

        At the end of the run it equals verify.py's to the last digit.
        """
        return self._claim(self._num_charged, is_last=self.steps_done == self.num_steps)[0]

    @property
    def delta(self) -> float:
        """Returns the delta of the claim: the smallest of all runs that it covers."""
        return self._claim(self._num_charged, is_last=self.steps_done == self.num_steps)[1]

    @property
    def claim(self) -> str:
        """Returns epsilon and delta in words, epsilon rounded up."""
        warning = useless_delta(self.delta, self.plan.num_examples)
        words = f"epsilon {rounded_up(self.epsilon)} at delta {self.delta:g}"
        return words + (f"; {warning}" if warning else "")

    def __iter__(self) -> Iterator[StepResult]:
        """Takes the remaining steps; the last one ends the run in the ledger.

        Raises:
            BudgetSpent: crashes have used up the reserve and steps remain; the weights are saved.
        """
        while self.steps_done < self.num_steps:
            yield self.step()

    def register(self, *trackers: LRScheduler | WeightAverage) -> None:
        """Registers schedulers and an average of the weights, which then go on over a stop.

        They go on as if there had been no stop. Each step moves them, before its checkpoint and
        before its turn ends, so the caller calls no `scheduler.step()`. The average is in the
        checkpoints. A scheduler is a function of its number of steps, and is moved by those that
        are done.

        Args:
            trackers: schedulers of this loop's optimizer as they were made, and at most one
                `WeightAverage`.

        Raises:
            PrivacyConfigError: anything else, a scheduler that follows a metric or has moved
                already, or a step was taken before.
        """
        if self._run is not None and self._run.step >= self._run.first_step:
            raise PrivacyConfigError(
                "register schedulers and averages before the first step of this program"
            )
        for tracker in trackers:
            if isinstance(tracker, WeightAverage) and self._trackers.average is None:
                self._trackers.average = tracker.start(self._engine, self._resumed)
            elif (
                isinstance(tracker, LRScheduler)
                and not isinstance(tracker, ReduceLROnPlateau)
                and not self._engine.sets_rate
            ):
                # A chained scheduler has no count of its own; its parts have one each.
                parts = [tracker, *getattr(tracker, "_schedulers", [])]
                has_moved = any(getattr(part, "last_epoch", 0) > 0 for part in parts)
                if tracker.optimizer is not self._engine.optimizer or has_moved:
                    raise PrivacyConfigError(
                        "register a new scheduler, of the optimizer that the loop was given"
                    )
                self._trackers.forward(tracker, self.steps_done)
                self._engine.is_scheduled = True
            else:
                raise PrivacyConfigError(
                    f"{type(tracker).__name__} cannot be registered: the loop keeps schedulers of "
                    "torch that follow steps alone, without learning_rate=, and one WeightAverage; "
                    "do anything else between turns"
                )

    def _watched(self, micro_batches: Iterator[MicroBatch]) -> Iterator[MicroBatch]:
        """Yields micro-batches, in parts, while the model is the one that passed the self-check."""
        engine = self._engine
        return self._start.self_checked.watched(micro_batches, engine.device, engine.compute_dtype)

    def step(self) -> StepResult:
        """Takes the next step. Collective.

        Raises:
            PrivacyConfigError: model or optimizer were changed since the last turn, or all steps
                are done.
            BudgetSpent: see `__iter__`.
            ItemNotRead: a file or a network failed; the step is not taken, and the loop is over.
        """
        with self._turn():
            number = self.steps_done + 1
            if self._run is None or self._steps is None or number > self.num_steps:
                raise PrivacyConfigError(
                    f"all {self.num_steps} steps of {self.run_dir} are done; to train further, "
                    "give another run_dir"
                )
            if torch.is_inference_mode_enabled():
                raise PrivacyConfigError(
                    "torch.inference_mode() is on, without gradients: take steps outside of it"
                )
            if torch.get_default_device().type == "meta":
                raise PrivacyConfigError(
                    'torch.set_default_device("meta") is on, where tensors hold no numbers: take '
                    "steps outside of it"
                )
            try:
                require_alike(self._require_untouched)
            # The messages of these name the cause already.
            except (PrivacyConfigError, RemoteError, MemoryError, torch.OutOfMemoryError):
                raise
            # A mode, a device or a class that was exchanged between two turns may raise anything.
            except Exception as error:
                raise PrivacyConfigError(
                    f"step {number} is not begun and nothing is charged for it: a look at model "
                    f"and optimizer raised {short_text(error)}; undo what was changed since the "
                    "loop's last turn"
                ) from error
            self._end_reason = "a step was not taken to its end"
            try:
                step = next(self._steps, None)
                if step is not None:
                    record = self._run.take(step, self._watched)
                    self._trackers.move(number)
                    self._run.keep(step)
            except BaseException:
                # Ends the workers that read ahead.
                self._steps.close()
                raise
            finally:
                # After a failure, too: the step may have changed the weights.
                lineage.TRAINED[self.run_dir.resolve()] = self._ledger.position()
            is_last = number == self.num_steps
            if is_last:
                # Writes the run's end into the ledger.
                next(self._steps, None)
            num_charged = collectives.on_main(lambda: self._ledger.num_charged)
            self._num_charged = num_charged
            self._end_reason = ""
            if step is None:
                assert self._run.outcome == BUDGET_SPENT, "nothing else ends the steps of a loop"
                raise BudgetSpent(
                    f"the privacy budget of {self.run_dir} is spent: crashes have used up its "
                    f"reserve, and step {number} of {self.num_steps} cannot be charged; the "
                    "weights are saved"
                )
            num_nonfinite = record.private["num_nonfinite"].inside()
            num_examples = record.private["num_examples"].inside()
            if num_nonfinite == num_examples > 0:
                collectives.say(
                    f"step {number}: loss or gradients of all {num_examples:.0f} examples are not "
                    "finite, so noise alone was added: are the items and the weights finite, and "
                    "is the learning rate small enough?"
                )
            return StepResult(
                number,
                record.lr.value,
                record.noised_grad_norm.value,
                record.private,
                lambda: self._claim(num_charged, is_last=is_last)[0],
            )

    def _require_untouched(self) -> object:
        self._trackers.require_unmoved()
        return self._engine.require_untouched()

    def save(self) -> None:
        """Writes a checkpoint of the last step, if there is none. Collective.

        Raises:
            WeightsNotFinite: the weights hold NaN or infinity.
            PrivacyConfigError: the loop is over, or the caller's program has changed the weights.
        """
        if self._run is not None and self._run.saved != self._run.step:
            with self._turn():
                self._run.save()

    @contextmanager
    def _turn(self) -> Iterator[None]:
        """Yields with the loop locked, for one step or one checkpoint at a time.

        A forked copy would draw the same batch again, and a checkpoint must not hold the weights of
        half a step.

        Raises:
            PrivacyConfigError: in a forked process, while another thread is in the loop, or when
                the loop is over.
        """
        if os.getpid() != self._process:
            raise PrivacyConfigError(
                "this process was forked from the one that made the loop and holds the same secret "
                "coins: step and save there"
            )
        if not self._turn_lock.acquire(blocking=False):
            raise PrivacyConfigError(
                "a step is under way, in another thread or around this call: take one step after "
                "the other"
            )
        try:
            if self._end_reason:
                raise PrivacyConfigError(
                    f"this loop is over ({self._end_reason}): make it again, and it goes on where "
                    "it was saved"
                )
            yield
        finally:
            self._turn_lock.release()

    def write_card(self) -> Path:
        """Writes the privacy card of the run so far, and returns its folder. Collective.

        The card is written as JSON, Markdown and one HTML page.
        """
        from ..card.run_card import build_card, write_card

        def write() -> Path:
            pages = write_card(self.run_dir, build_card(self.run_dir))
            return pages[0].parent

        return collectives.on_main(write)

    def close(self) -> None:
        """Gives model, optimizer and run folder back.

        Steps since the last checkpoint are lost and stay charged.
        """
        self._resources.close()
        self._end_reason = "it was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Saves if the program leaves the loop early, unless by an error; then closes."""
        try:
            is_forked = os.getpid() != self._process
            if kind is None and not is_forked and not self._end_reason and self.steps_done > 0:
                self.save()
        finally:
            self.close()

    def _claim(self, num_charged: int, *, is_last: bool) -> tuple[float, float]:
        """Returns epsilon and delta after so many charges.

        Before the last step a table of upper bounds is read, since an exact epsilon takes longer
        than a step.
        """
        if self._ledger.is_void:
            raise MixedExamples(f"{self.run_dir}: {WHY_MIXED}")
        claim = self._ledger.claim(num_charged, is_exact=is_last)
        assert claim is not None, "a loop without a guarantee is not opened"
        return claim
