"""Opens the run folder of a loop of one's own: the answers to `open_run`, and its refusals.

They are in the order in which `open_run` asks for them.
"""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoints.read import Checkpoint
from ..checkpoints.write import Retention
from ..errors import ConfigError, PrivacyConfigError
from ..files.durable import require_distinct_files
from ..files.toml_text import toml_literal
from ..gradients.coverage import claims
from ..gradients.fallback import Fallback, Uncovered, plan_of
from ..gradients.module_state import modules_of
from ..gradients.recorder import Task
from ..guards.fingerprints import fixed_tensors, in_order, overlaps
from ..guards.isolation import Isolation
from ..guards.neighbours import require_neighbours_apart
from ..guards.selfcheck import check_against_autograd, check_at_size
from ..guards.unchanged import SelfChecked, fitted
from ..guards.watched_engine import WatchedEngine, require_alike
from ..plan.numbers import PrivacyPlan
from ..plan.request import PlanRequest
from ..ranks import collectives
from ..ranks.engine import to_device
from ..ranks.fsdp import full, is_dtensor, kind_of, put_away
from ..run.mechanism import mechanism_of
from ..run.run import CheckpointContents, RunParts
from ..run.run_ledger import LedgerOpening, RunLedger, open_ledger
from ..step.averaging import WeightAverage
from ..step.optimizer_state import rate_of, settings, short_text
from ..step.run_folder import RunFolder
from . import lineage
from .hugging_face import loss_of
from .reading import REPEATED_SAMPLE, SAMPLE, ItemNotRead, Reader

LearningRate = float | Callable[[int], float] | None
"""A number, or a function of the step, which counts from 1; None leaves rates to the caller."""
MADE_UP_EXAMPLES = 4
"""Made-up examples of the self-check."""
CHECKPOINTS = 2
"""Checkpoints that a run keeps."""


@dataclass
class Trackers:
    """Holds the schedulers and the average of `PrivateLoop.register`, and moves them.

    They move after each step, before the step's checkpoint.
    """

    schedulers: list[LRScheduler] = field(default_factory=list)
    average: WeightAverage | None = None
    _last_states: list[str] = field(default_factory=list)
    _failure: Exception | None = None

    def forward(self, scheduler: LRScheduler, num_steps: int) -> None:
        """Takes a new scheduler, and moves it by the steps that are done."""
        # Torch warns of a scheduler that is ahead of the optimizer's steps, which other programs
        # have taken.
        with warnings.catch_warnings(action="ignore"):
            for _ in range(num_steps):
                scheduler.step()
        self.schedulers.append(scheduler)
        self._last_states = self._states()

    def _states(self) -> list[str]:
        return [repr(scheduler.state_dict()) for scheduler in self.schedulers]

    def require_unmoved(self) -> None:
        """Refuses a scheduler that the caller moves, too: its rate would decay too fast.

        Raises:
            PrivacyConfigError: so, or a scheduler failed after the last step.
        """
        if self._failure is not None:
            raise PrivacyConfigError(
                "the last step is charged and done, and then step() of a registered scheduler "
                f"raised {short_text(self._failure)}: call loop.save(), mend the scheduler, and "
                "make the loop again"
            ) from self._failure
        states = zip(self.schedulers, self._states(), self._last_states, strict=True)
        for scheduler, state, last_state in states:
            if state != last_state:
                raise PrivacyConfigError(
                    f"{type(scheduler).__name__} is registered, and something else has moved it: "
                    "the loop calls its step() after each turn; remove scheduler.step(), or do not "
                    "register it"
                )

    def move(self, step: int) -> None:
        """Moves schedulers and average by the step that was taken."""
        try:
            for scheduler in self.schedulers:
                scheduler.step()
            self._last_states = self._states()
        # The step is done and keeps its turn; `require_unmoved` refuses the next one before its
        # charge.
        except Exception as error:
            self._failure = error
        if self.average is not None:
            self.average.update(step)


@dataclass
class LoopStart:
    """Starts a run of `PrivateLoop`, whose arguments these are; see `privacy.run.run.RunSetup`.

    Attributes:
        resources: gives back all that was opened, in reverse order.
        trackers: schedulers and average, which move with the steps.
    """

    model: nn.Module
    optimizer: torch.optim.Optimizer
    reader: Reader
    loss: Callable[..., Tensor] | None
    folder: RunFolder
    request: PlanRequest
    made_up: Mapping[str, Tensor] | Sequence[Tensor] | None
    fallback: Fallback
    learning_rate: LearningRate
    num_workers: int
    save_every: int | None
    data_version: str | None
    mirror: Path | None
    unit: str
    may_restart: bool
    starts_from: list[Path]
    is_new: bool = field(default=True, init=False)
    ledger: RunLedger = field(init=False)
    resources: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    trackers: Trackers = field(default_factory=Trackers)
    engine: WatchedEngine = field(init=False)
    self_checked: SelfChecked = field(init=False)
    task: Task = field(init=False)

    def checks(self) -> list[Callable[[], None]]:
        return [self._check_arguments, self._take_model, self._check_model]

    def _check_arguments(self) -> None:
        """Refuses arguments, which is cheap, and locks the folder before the model is touched.

        So a folder without its key is refused at once.
        """
        # Ledger and sampler broadcast CPU tensors.
        if dist.is_initialized() and dist.get_backend() == "nccl":
            raise PrivacyConfigError(
                "the process group carries CUDA tensors alone: make it with "
                'init_process_group("cpu:gloo,cuda:nccl"), under accelerate with '
                'InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")'
            )
        loss = self.loss or loss_of(self.model, self.reader.example)
        example = self.reader.example

        # It holds these two alone, so that the self-check sees all that it could change.
        def task(**inputs: Tensor) -> Tensor:
            arguments, keywords = example.arguments(inputs)
            return loss(*arguments, **keywords)

        self.task = task
        # Ranks with other arguments or data would wait for one another or draw other coins, and an
        # example could count on two of them. Their hash of a few items, or the reason that these
        # cannot be used, is for this comparison alone.
        few_items = ""
        if not collectives.is_alone():
            try:
                few_items = self.reader.digest(REPEATED_SAMPLE).hex()
            except (PrivacyConfigError, ItemNotRead) as error:
                few_items = str(error)
        setup = (
            self.request,
            self.reader.micro_batch_size,
            self.save_every,
            self.folder.root.resolve(),
        )
        description = repr((setup, example.fields, few_items, settings(self.optimizer)))
        if len(set(collectives.gather_objects(description))) > 1:
            raise PrivacyConfigError(
                "ranks have another data set, plan, example, micro-batch, optimizer or run folder: "
                "make the same PrivateLoop on each of them, with the whole data set; the loop "
                "deals the items"
            )
        roles = {} if self.mirror is None else {"ledger_mirror": self.mirror}
        collectives.on_main(lambda: require_distinct_files(roles, self.folder.root))
        collectives.on_main(self.folder.take)
        self.resources.callback(self.folder.release)

    def _take_model(self) -> None:
        """Gives all ranks rank 0's parameters and buffers, and builds the engine."""
        put_away(self.model)
        if collectives.world_size() > 1:
            take_from_main(self.model)
        self.engine = WatchedEngine(
            self.model, self.optimizer, sets_rate=self.learning_rate is not None
        )
        self.resources.callback(self.engine.release)
        # Checkpoints do not hold frozen parameters and buffers, and a resume needs the same.
        fixed_hash = hashlib.sha256()
        for name, tensor in fixed_tensors(self.model).items():
            numbers = in_order(full(tensor).cpu())
            fixed_hash.update(name.encode())
            fixed_hash.update(numbers.view(torch.uint8).numpy().tobytes())
        self.model_facts = {
            "class": kind_of(self.model).__name__,
            "fixed_sha256": fixed_hash.hexdigest(),
        }

    def _check_model(self) -> None:
        """Checks the model on made-up items, at training's own size, and then all items.

        Each layer must be clipped, to torch's own sums, and keep examples apart. The pass over all
        items comes last; it identifies them, and finds whether they can be used.
        """
        # Parameters without a rule are refused here only if no fallback may take them.
        accepted = () if self.fallback is False else (Uncovered,)
        with contextlib.suppress(*accepted):
            claims(self.model, self.engine.shapes)
        example = self.reader.example
        size = self.reader.micro_batch_size
        made_up = self._made_up_items()
        items = to_device(made_up, self.engine)
        check_against_autograd(
            self.model,
            items,
            self.task,
            fallback=self.fallback,
            padding=self._padding(),
            allowed_ids=example.allowed_ids(),
        )
        for line in plan_of(self.model).sentences(self.model):
            collectives.say(line)
        check_at_size(self.model, items, size, self.task)
        require_neighbours_apart(self.engine, self.task, lambda count: made_up, size)
        put_away(self.model)
        self.manifest = collectives.on_main(self._look_at_data)

    def _made_up_items(self) -> dict[str, Tensor]:
        """Returns the made-up items of the caller, or random ones."""
        example = self.reader.example
        if self.made_up is None:
            return example.made_up(MADE_UP_EXAMPLES)
        return example.named(self.made_up)

    def _made_up_rows(self, num_rows: int) -> dict[str, Tensor]:
        """Returns a micro-batch of made-up items in the shapes of the run's own items."""
        items = self._made_up_items()
        shapes = {
            name: row.expand(num_rows, *row.shape[1:]) for name, row in self._padding().items()
        }
        items = fitted(items, shapes, torch.device("cpu"))
        row_B = torch.arange(num_rows) % len(next(iter(items.values())))
        return {name: x[row_B] for name, x in items.items()}

    def _padding(self) -> dict[str, Tensor]:
        """Returns the values of a row without an item, (1, ...) by input."""
        return {name: row[None] for name, row in self.reader.example.padding().items()}

    def _look_at_data(self) -> bytes:
        """Returns the manifest of the data, which the ledger holds as HMAC only. On one rank.

        Raises:
            PrivacyConfigError: most items cannot be used, or an item depends on those before it.
        """
        reader = self.reader
        version = self.data_version
        digest = reader.digest(None if version is None else SAMPLE)
        if reader.unusable_summary:
            collectives.say(reader.unusable_summary)
        manifest = {
            "items": len(reader.dataset),
            "data": digest.hex() if version is None else f"version {version}",
            "fields": {name: repr(field) for name, field in reader.example.fields.items()},
        }
        return json.dumps(manifest, sort_keys=True).encode()

    def open_ledger(self) -> LedgerOpening:
        opening = open_ledger(
            self.folder,
            lambda _: self.request,
            lambda: self.manifest,
            described=lambda recorded, _: (
                {"unit": self.unit} | lineage.origin_fields(self.folder, recorded, self.starts_from)
            ),
            mirror=self.mirror,
        )
        self.is_new = opening.ledger is None
        plan = opening.plan
        if not plan.formal_guarantee:
            raise PrivacyConfigError(
                f"a private loop makes a formal claim, and here {plan.reasons[0]}"
            )
        if collectives.rank() == 0:
            for warning in plan.warnings:
                # The caller's line that makes the loop.
                warnings.warn(warning, stacklevel=4)
        return opening

    def take_ledger(self, ledger: RunLedger) -> None:
        """Takes the ledger; refuses a run folder restored from an older copy.

        Such a folder states fewer charges than this program has made in it.
        """
        self.resources.callback(ledger.release)
        last_position = lineage.TRAINED.get(self.folder.root.resolve())
        last_position = collectives.broadcast_object(last_position)
        if last_position is not None and not self.is_new:
            ledger.require_not_shorter_than(last_position)
        self.ledger = ledger

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Restores all that the checkpoint holds, of a finished run, too.

        The engine exists already, and a finished run gives its model back trained.
        """
        recorded_facts = checkpoint.manifest.get("model", {})
        for name, fact in self.model_facts.items():
            if recorded_facts.get(name) != fact:
                raise ConfigError(
                    f"the checkpoint of step {checkpoint.step} was written with another model "
                    f"({name} differs; its frozen weights and buffers are not in the checkpoint): "
                    "give the same one, or start another run folder"
                )
        lineage.TRAINED[self.folder.root.resolve()] = self.ledger.position()
        self.engine.load_facts(checkpoint.manifest)
        checkpoint.restore(self.engine, self.engine.moments)

    def build(self, plan: PrivacyPlan, resumed: Checkpoint | None) -> RunParts:
        engine = self.engine
        reader = self.reader
        mechanism = mechanism_of(plan, engine, self.task, reader.micro_batch_size)
        self.resources.callback(mechanism.clipped.detach)
        modules = [module for _, module in modules_of(self.model, self.task)]
        isolation = Isolation(mechanism, self._padding(), modules)
        size = next(mechanism.clipped.parts(reader.micro_batch_size)).stop
        self.self_checked = SelfChecked(self.model, self.task, mechanism.clipped, isolation.force)
        is_on_gpu = engine.device.type == "cuda"
        return RunParts(
            mechanism=mechanism,
            read=lambda plans: reader.steps(plans, self.num_workers, pin_memory=is_on_gpu),
            micro_batch_size=reader.micro_batch_size,
            learning_rate=self._rate,
            note_charge=self._require_untouched,
            stored=self._stored,
            configuration=lambda: (self._configuration(), None, {}),
            retention=Retention(CHECKPOINTS),
            save_every=self.save_every,
            isolation=isolation,
            made_up=partial(self._made_up_rows, size),
        )

    def _rate(self, step: int) -> float:
        """Returns the learning rate of a step: the caller's, or that of the optimizer's groups."""
        rate = self.learning_rate
        if rate is None:
            return self.engine.read_rates()[0]
        if callable(rate):
            return rate_of(rate(step), f"learning_rate({step})")
        return rate_of(rate, "learning_rate")

    def _require_untouched(self, step: int) -> None:
        """Refuses a charge if the caller's code has moved model, optimizer or a scheduler."""
        self.trackers.require_unmoved()
        self.engine.require_all_noised()
        self.self_checked.require_model()

    def _stored(self) -> CheckpointContents:
        """Returns the contents of a checkpoint; refuses weights that other code has written to."""
        require_alike(self.engine.require_unchanged)
        facts = {
            **self.engine.facts(),
            "run": self.folder.root.resolve().name,
            "model": self.model_facts,
        }
        average = self.trackers.average
        states = self.engine.state() if average is None else average.states()
        return CheckpointContents(states, self.engine.shapes, facts)

    def _configuration(self) -> str:
        """Returns the run's configuration under the trainer's names.

        Card, audit and verify.py compare it with the ledger.
        """
        request = self.request
        # Names as the ledger has them: two folders of one run are one.
        parent_runs = [place["run"] for place in self.ledger.opened.get("behind", ())]
        privacy = {
            "expected_batch_size": request.expected_batch_size,
            "noise_multiplier": request.noise_multiplier,
            "target_epsilon": request.target_epsilon,
            "target_delta": request.target_delta,
            "max_grad_norm": request.max_grad_norm,
            "ledger_mirror": None if self.mirror is None else str(self.mirror),
        }
        train = {
            "num_steps": request.num_steps,
            "micro_batch_size": self.reader.micro_batch_size,
        }
        sections: dict[str, dict[str, Any]] = {
            "data": {"num_examples": request.num_examples},
            "privacy": privacy,
            "optimizer": {"name": type(self.optimizer).__name__},
            "init": {"starts_from": parent_runs or "public"},
            "train": train,
        }
        lines = [f"name = {toml_literal(self.folder.root.resolve().name)}"]
        for title, section in sections.items():
            lines += ["", f"[{title}]"]
            for key, setting in section.items():
                if setting is not None:
                    lines.append(f"{key} = {toml_literal(setting)}")
        return "\n".join(lines) + "\n"


def take_from_main(model: nn.Module) -> None:
    """Gives all ranks the parameters and buffers of rank 0, as under DistributedDataParallel.

    Shards are a rank's own. Collective.
    """
    for tensor in (*model.parameters(), *model.buffers()):
        if is_dtensor(tensor):
            continue
        numbers = in_order(tensor)
        # As bytes, since some dtypes cannot be sent.
        dist.broadcast(numbers.view(torch.uint8), 0)
        # An expanded tensor cannot be written to.
        if overlaps(tensor):
            tensor.data = numbers.view(tensor.shape)
        elif numbers.data_ptr() != tensor.data_ptr():
            tensor.detach().copy_(numbers.view(tensor.shape))
