"""A private training loop around a model, an optimizer and a data set of one's own (docs/own_loop.md).

    with PrivateLoop(model, optimizer, dataset, loss=loss, example=example, run_dir="runs/mine", ...) as loop:
        for step in loop:
            print(step.number, step.epsilon)

Everything under it is what the trainer uses: sampler, rows, clipped sums, noise, ledger, checkpoints and `train_step`. Here stand
only what a recipe and a launcher say elsewhere, and what a user's own objects have to keep to.
"""

import contextlib
import difflib
import inspect
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor, nn

from ..accounting.rounding import rounded_up, useless_delta
from ..boundary import Private
from ..checkpoints.read import Checkpoint, set_aside_newer
from ..checkpoints.write import CheckpointWriter, Retention, require_finite
from ..clipping.coverage import claims
from ..clipping.selfcheck import check_against_autograd
from ..clipping.sharded import kind_of, put_away
from ..errors import BudgetSpent, ConfigError, PrivacyConfigError
from ..plan_request import PlanRequest
from ..releases import SENSITIVITY_SLACK
from ..step import collectives
from ..step.batches import LogicalBatches
from ..step.engine import to_device
from ..step.folder import RunFolder
from ..step.neighbours import require_neighbours_apart
from ..step.noise_variance import NoiseVariance
from ..step.resume import begins_again, load_newest
from ..step.step import Mechanism, train_step
from . import lineage
from .engine import OwnEngine, settings
from .fields import Example, Field
from .one_thread import Turns
from .opening import config_toml, data_manifest, few_items, fixed_digest, open_ledger, require_place, require_same_model
from .ranks import on_all_or_none, require_same, require_talking, say, take_weights_of_main
from .reading import Items, Reader, require_items
from .tasks import per_example_task

FRESH = 4
"""Made-up examples of the self-check."""
KEPT = 2
"""Checkpoints that stay."""
MEANT = {
    "clip": "max_grad_norm",
    "criterion": "loss",
    "data": "dataset",
    "data_loader": "dataset",
    "epochs": "num_steps",
}
MEANT |= {"eps": "target_epsilon", "lr": "learning_rate", "output_dir": "run_dir", "sigma": "noise_multiplier"}
"""Names of other libraries that are like none of those here."""


@dataclass(frozen=True)
class StepResult:
    """What one step shows.

    Attributes:
        number: of the step, from 1 on.
        epsilon: of everything that the ledger has charged so far; None without a formal guarantee.
        lr: of the optimizer's first group.
        noised_grad_norm: of the sum after noise, divided by the public batch size; post-processing, so it may be published.
        private: computed without noise: never to be published, and never to decide anything. `.inside()` gives the number.
    """

    number: int
    epsilon: float | None
    lr: float
    noised_grad_norm: float
    private: dict[str, Private[float]]


def require_known(given: Iterable[str], known: Iterable[str], what: str) -> None:
    """Refuses a keyword that is not known.

    Raises:
        PrivacyConfigError: with the name that was probably meant.
    """
    names = sorted({*known} - {"self", "rest"})
    for name in sorted({*given} - {*names}):
        close = [MEANT.get(name, ""), *(one for one in names if name in one), *difflib.get_close_matches(name, names)]
        meant = next((one for one in close if one in names), None)
        way = f"did you mean {meant}?" if meant else f"it takes {', '.join(names)}"
        raise PrivacyConfigError(f"{what} takes no {name}: {way}")


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
        learning_rate: of all groups of the optimizer at a step, from 1 on; None leaves them to the caller.
        save_every: steps between checkpoints; default a twentieth of the attempts in reserve, and at least 1.
        made_up: two or more made-up items for the self-check, never private ones; random ones by default.
        data_version: a name for exactly these data, taken in place of a hash over all items, which is one pass at each start.
        ledger_mirror: a second place for the ledger, best on another file system.
        unit: what one item is, in words for the card.
        restart_from_step_0: the run has lost all its checkpoints; all steps are charged again.

    Raises:
        PrivacyConfigError, ConfigError: what cannot be trained privately, and what to give instead (exit 2).
        PrivacyStateRefused: the run folder's parts do not fit together (exit 4).
    """

    def __new__(cls, *_: object, **given: object) -> Self:
        """Refuses an unknown keyword with the name that is meant, where Python would say what is missing."""
        if cls.__init__ is PrivateLoop.__init__:
            require_known(given, inspect.signature(cls.__init__).parameters, "PrivateLoop")
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
        learning_rate: Callable[[int], float] | None = None,
        save_every: int | None = None,
        made_up: Mapping[str, Tensor] | Sequence[Tensor] | None = None,
        data_version: str | None = None,
        ledger_mirror: str | Path | None = None,
        unit: str = "one item of the data set",
        restart_from_step_0: bool = False,
    ) -> None:
        require_items(dataset)
        counts = micro_batch_size, 1 if save_every is None else save_every, num_workers + 1
        if not all(isinstance(count, int) and count >= 1 for count in counts):
            raise PrivacyConfigError(
                "micro_batch_size and save_every are integers from 1 on, and num_workers from 0 on"
            )
        if (target_epsilon is None) == (noise_multiplier is None):
            raise PrivacyConfigError("give exactly one of target_epsilon and noise_multiplier")
        require_talking()
        self._turns = Turns()
        self.module, self.run_dir, self._folder = model, Path(run_dir), RunFolder(Path(run_dir))
        self._example, self._reader = Example(example), Reader(dataset, Example(example), micro_batch_size)
        self._task = per_example_task(model, loss, self._example)
        self._asked_save_every = save_every
        self._rate, self._num_workers, self._mirror = learning_rate, num_workers, ledger_mirror
        self._request = PlanRequest(
            num_examples=len(dataset),
            expected_batch_size=expected_batch_size,
            num_steps=num_steps,
            target_epsilon=target_epsilon,
            noise_multiplier=noise_multiplier,
            target_delta=target_delta,
            max_grad_norm=max_grad_norm,
            sensitivity_slack=SENSITIVITY_SLACK,
        )
        with contextlib.ExitStack() as undone:
            self._open = contextlib.ExitStack()
            undone.callback(self._open.close)
            resumed = self._enter(optimizer, made_up, data_version, unit)
            if self._ledger.is_closed:
                self._require_finished()
                self._ledger.mend()
                self._spent = self._exact_claim()
                say(f"{self.run_dir} is finished ({self.num_steps} steps): {self.claim}; more need another run folder")
            else:
                self._begin(resumed, restart=restart_from_step_0)
            undone.pop_all()

    def _enter(
        self,
        optimizer: torch.optim.Optimizer,
        made_up: Mapping[str, Tensor] | Sequence[Tensor] | None,
        data_version: str | None,
        unit: str,
    ) -> Checkpoint | None:
        """Takes the run folder, checks the model, opens the ledger and reads the newest checkpoint; writes to none of them."""
        asked = self._request, self._reader.micro_batch_size, self._asked_save_every, self.run_dir.resolve()
        require_same(repr((asked, self._example.fields, few_items(self._reader), settings(optimizer))))
        mirror = None if self._mirror is None else Path(self._mirror)
        collectives.on_main(lambda: require_place(self._folder, mirror))
        collectives.on_main(self._folder.take)
        self._open.callback(self._folder.release)
        put_away(self.module)
        take_weights_of_main(self.module)
        self._engine = OwnEngine(self.module, optimizer, self.run_dir, sets_rate=self._rate is not None)
        self._open.callback(self._engine.release)
        claims(self.module, self._engine.shapes)  # names a layer without a clipping rule, such as BatchNorm
        self._made_up = self._example.made_up(FRESH) if made_up is None else self._example.named(made_up)
        check_against_autograd(self.module, to_device(self._made_up, self._engine), self._task)
        size = self._reader.micro_batch_size
        require_neighbours_apart(self._engine, self._task, lambda count: self._made_up, size)
        put_away(self.module)
        collectives.on_main(lambda: lineage.require_ledger(self._engine.origin, self._folder.ledger))
        manifest = collectives.on_main(lambda: data_manifest(self._reader, data_version))
        self._ledger = open_ledger(self._folder, self._request, manifest, unit=unit, mirror=mirror)
        self._open.callback(self._ledger.release)
        if self._engine.origin is not None:
            self._ledger.require_not_shorter_than(self._engine.origin.line)
        self._engine.ledger_line = self._ledger.position
        self.plan = self._ledger.plan
        for line in self.plan.warnings if collectives.rank() == 0 else ():
            warnings.warn(line, stacklevel=3)
        resumed = load_newest(self._folder, self._ledger, None)
        facts = {"class": kind_of(self.module).__name__, "fixed_sha256": fixed_digest(self.module)}
        self._facts = {"run": self.run_dir.resolve().name, "model": facts}
        if resumed is not None:
            require_same_model(resumed.manifest, facts)
            self._engine.load_facts(resumed.manifest)
            resumed.restore(self._engine, self._engine.moments)
        self.steps_done = 0 if resumed is None else resumed.step
        self._saved = None if resumed is None else resumed.step
        return resumed

    def _begin(self, resumed: Checkpoint | None, *, restart: bool) -> None:
        """Makes what steps need; then, when nothing refuses the start any more, writes: folder, ledger, session."""
        plan = self.plan
        clipped = plan.clipped_sum(self.module, shapes=self._engine.shapes, device=self._engine.device)
        self._open.callback(clipped.detach)
        restarted = collectives.on_main(lambda: begins_again(self._folder, self._ledger, resumed, may_restart=restart))
        collectives.on_main(self._folder.begin)
        if resumed is not None:
            kept = resumed.path.name
            collectives.on_main(lambda: set_aside_newer(self._folder.checkpoints, kept))
        self._ledger.mend()
        nonce = self._ledger.start_session(restarted=restarted)
        if resumed is not None:
            self._ledger.adopt(resumed)
        optimizer = self._engine.optimizer
        self._mechanism = Mechanism(
            plan=plan,
            clipped=clipped,
            engine=self._engine,
            task=self._task,
            ledger=self._ledger,
            noise=plan.noise(),
            noise_variance=NoiseVariance(0.0),
            learning_rate=self._rate or (lambda step: float(optimizer.param_groups[0]["lr"])),
            note_charge=lambda _: self._engine.require_all_noised(),  # the caller's loss and items have run
            keep_noise_on=None,
        )
        batches = LogicalBatches(
            plan.sampler,
            self._ledger.key,
            nonce,
            self._ledger.attempts,
            self._reader.micro_batch_size,
            charged=self._ledger.charged_before,
        )
        self._steps = self._reader.steps(batches.plans(self.steps_done + 1, plan.num_steps), self._num_workers)
        self._open.callback(self._steps.close)
        self._checkpoints = CheckpointWriter(
            self._folder.checkpoints, Retention(KEPT), published=self._ledger.checkpoint
        )
        self._save_every = self._asked_save_every or max(1, plan.reserved_attempts // 20)
        text = config_toml(
            self.run_dir.resolve().name,
            self._request,
            micro_batch_size=self._reader.micro_batch_size,
            optimizer=type(optimizer).__name__,
            mirror=None if self._mirror is None else str(self._mirror),
        )
        collectives.on_main(lambda: self._folder.record_configuration(text, None))
        self._spent = collectives.on_main(self._ledger.claim)

    @property
    def num_steps(self) -> int:
        """The number of steps of the whole run."""
        return self.plan.num_steps

    @property
    def epsilon(self) -> float | None:
        """Epsilon of all that the ledger has charged so far; at the end of the run, verify.py finds it to the last digit."""
        return None if self._spent is None else self._spent[0]

    @property
    def delta(self) -> float:
        """Delta of the claim."""
        return self.plan.target_delta

    @property
    def claim(self) -> str:
        """Epsilon and delta in words, epsilon rounded up."""
        assert self.epsilon is not None, "a loop without a guarantee is not opened"
        useless = useless_delta(self.delta, self.plan.num_examples)
        return f"epsilon {rounded_up(self.epsilon, 2)} at delta {self.delta:g}" + (f"; {useless}" if useless else "")

    def __iter__(self) -> Iterator[StepResult]:
        """Takes the steps that are left; the last one ends the run in the ledger.

        Raises:
            BudgetSpent: crashes have used up the reserve and steps remain; what is there is saved.
        """
        while self.steps_done < self.num_steps:
            yield self.step()

    def step(self) -> StepResult:
        """Takes the next step. Collective.

        Raises:
            PrivacyConfigError: model or optimizer are no longer as the loop has put them; or all steps are done.
            BudgetSpent: see `__iter__`.
            ItemNotRead: a file or a network failed; the step is not taken, and the loop is over.
        """
        with self._turns.take():
            return self._step(self.steps_done + 1)

    def _step(self, number: int) -> StepResult:
        if number > self.num_steps:
            raise PrivacyConfigError(
                f"all {self.num_steps} steps of {self.run_dir} are done; more need another run folder"
            )
        if torch.is_inference_mode_enabled():
            raise PrivacyConfigError("torch.inference_mode() is on, without gradients: take steps outside of it")
        on_all_or_none(self._engine.require_untouched)
        if collectives.on_main(lambda: self._ledger.budget_is_spent()):
            self._save()
            raise BudgetSpent(
                f"the privacy budget of {self.run_dir} is spent: crashes have used up its reserve, and step {number} of "
                f"{self.num_steps} cannot be charged; the weights are saved"
            )
        with self._turns.whole():
            dealt, micro_batches = next(self._steps)
            self._ledger.note(dealt, self._reader.micro_batch_size)
            record = train_step(self._mechanism, number, micro_batches)
            self.steps_done = number
            if number % self._save_every == 0 or number == self.num_steps:
                self._save()
            if number == self.num_steps:
                self._ledger.close_run()
            self._spent = self._exact_claim() if number == self.num_steps else collectives.on_main(self._ledger.claim)
        bad, count = (record.private[name].inside() for name in ("num_nonfinite", "num_examples"))
        if bad == count > 0:
            say(
                f"step {number}: loss or gradients of all {count:.0f} examples are not finite, so noise alone was added: are the "
                "items and the weights finite, and is the learning rate small enough?"
            )
        return StepResult(number, self.epsilon, record.lr.value, record.noised_grad_norm.value, record.private)

    def save(self) -> None:
        """Writes a checkpoint of the last step, if there is none. Collective.

        Raises:
            WeightsNotFinite: there is nothing to save.
            PrivacyConfigError: the loop is over, or something else has changed the weights.
        """
        if self._saved == self.steps_done:
            return
        with self._turns.take():
            on_all_or_none(self._engine.require_unchanged)
            self._save()

    def _save(self) -> None:
        if self._saved == self.steps_done:
            return
        require_finite(self._engine, self.steps_done)
        facts = {
            "formal_guarantee": self.plan.formal_guarantee,
            "reasons": list(self.plan.reasons),
            "ledger": self._ledger.position(),
            "charged_attempts": self._ledger.num_charged,
            **self._engine.facts(),
            **self._facts,
        }
        self._checkpoints.save(self.steps_done, self._engine.state(), self._engine.shapes, facts)
        self._saved = self.steps_done

    def write_card(self) -> Path:
        """Writes the privacy card of the run so far, as JSON, Markdown and one HTML page; returns its folder. Collective."""

        def write() -> Path:
            from ..card.folder import build_card, write_card

            return write_card(self.run_dir, build_card(self.run_dir))[0].parent

        return collectives.on_main(write)

    def close(self) -> None:
        """Gives model, optimizer and run folder back. Steps since the last checkpoint stay charged and are lost."""
        self._open.close()
        self._turns.over = "it was closed"

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        """Saves where the loop was left early, unless an error did that."""
        try:
            if kind is None and self._turns.is_ours and self._turns.over is None and self.steps_done > 0:
                self.save()
        finally:
            self.close()

    def _exact_claim(self) -> tuple[float, float] | None:
        """Epsilon of exactly what is charged, which takes seconds; while the run goes on a table of upper bounds is read."""
        epsilon = collectives.on_main(lambda: self.plan.epsilon_after(self._ledger.num_charged))
        return None if epsilon is None else (epsilon, self.plan.target_delta)

    def _require_finished(self) -> None:
        if self.steps_done < self.num_steps:
            raise ConfigError(
                f"{self.run_dir} is finished and its budget is closed, but its newest whole checkpoint is that of step "
                f"{self.steps_done}: restore checkpoints/ from a copy"
            )
