"""How a loop of one's own opens its run folder: what `open_run` asks of it, in the order in which it can be refused."""

import contextlib
import hashlib
import json
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ..checkpoints.read import Checkpoint
from ..checkpoints.write import Retention
from ..errors import ConfigError, PrivacyConfigError
from ..files.durable import require_apart
from ..files.toml_text import written
from ..gradients.coverage import claims
from ..gradients.fallback import Fallback, Uncovered, plan_of
from ..gradients.module_state import modules_of
from ..gradients.recorder import Task
from ..guards.fingerprints import fixed_tensors, in_order, overlaps
from ..guards.isolation import Isolation
from ..guards.neighbours import require_neighbours_apart
from ..guards.own_engine import WatchedEngine, require_alike
from ..guards.selfcheck import check_against_autograd, check_at_size
from ..guards.unchanged import SelfChecked, fitted
from ..plan.numbers import PrivacyPlan
from ..plan.request import PlanRequest
from ..ranks import collectives
from ..ranks.engine import to_device
from ..ranks.fsdp import full, is_dtensor, kind_of, put_away
from ..run.ledger import Opening, RunLedger, open_ledger
from ..run.mechanism import mechanism_of
from ..run.run import Parts, Stored
from ..step.averaging import WeightAverage
from ..step.folder import RunFolder
from ..step.optimizer_state import rate_of, settings, shown
from . import lineage
from .hugging_face import loss_of
from .reading import LOOKED_AT, LOOKED_AT_TWICE, ItemNotRead, Reader

LearningRate = float | Callable[[int], float] | None
"""A number, or a function of the step, from 1 on; None leaves the rates to the caller."""
FRESH = 4
"""Made-up examples of the self-check."""
KEPT = 2
"""Checkpoints that stay."""


@dataclass
class Registered:
    """What `PrivateLoop.register` was given: it moves on after each step, before the step's checkpoint."""

    schedulers: list[LRScheduler] = field(default_factory=list)
    average: WeightAverage | None = None
    _moved_to: list[str] = field(default_factory=list)
    _failed: Exception | None = None

    def forward(self, scheduler: LRScheduler, num_steps: int) -> None:
        """Takes a new scheduler, and moves it on by the steps that are done."""
        with warnings.catch_warnings(
            action="ignore"
        ):  # the optimizer has taken these steps, in other programs
            for _ in range(num_steps):
                scheduler.step()
        self.schedulers.append(scheduler)
        self._moved_to = self._states()

    def _states(self) -> list[str]:
        return [repr(scheduler.state_dict()) for scheduler in self.schedulers]

    def require_unmoved(self) -> None:
        """
        Raises:
            PrivacyConfigError: something else has moved a scheduler, which would then decay twice as fast; or a scheduler failed
                after the step before.
        """
        if self._failed is not None:
            raise PrivacyConfigError(
                f"the last step is charged and done, and then step() of a registered scheduler raised {shown(self._failed)}: "
                "call loop.save(), mend the scheduler, and make the loop again"
            ) from self._failed
        for scheduler, now, before in zip(
            self.schedulers, self._states(), self._moved_to, strict=True
        ):
            if now != before:
                raise PrivacyConfigError(
                    f"{type(scheduler).__name__} is registered, and something else has moved it: the loop calls its step() after "
                    "each turn; remove scheduler.step(), or do not register it"
                )

    def move(self, step: int) -> None:
        """Moves all of it on by the step that was taken."""
        try:
            for scheduler in self.schedulers:
                scheduler.step()
            self._moved_to = self._states()
        except Exception as error:  # the step is done and keeps its turn; the next one is refused before its charge
            self._failed = error
        if self.average is not None:
            self.average.update(step)


@dataclass
class OwnStart:
    """See `privacy.run.run.Start`; the arguments are those of `PrivateLoop`.

    Attributes:
        undone: gives back what was opened, in reverse order.
        registered: what goes along with the steps.
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
    undone: contextlib.ExitStack = field(default_factory=contextlib.ExitStack)
    registered: Registered = field(default_factory=Registered)
    engine: WatchedEngine = field(init=False)
    self_checked: SelfChecked = field(init=False)
    task: Task = field(init=False)

    def checks(self) -> list[Callable[[], None]]:
        return [self._check_arguments, self._take_model, self._check_model]

    def _check_arguments(self) -> None:
        """What is cheap to refuse; then the folder is locked, before the model: one without its key is refused in no time."""
        if (
            dist.is_initialized() and dist.get_backend() == "nccl"
        ):  # ledger and sampler say what lies on the CPU
            raise PrivacyConfigError(
                'the process group carries CUDA tensors alone: make it with init_process_group("cpu:gloo,cuda:nccl"), under '
                'accelerate with InitProcessGroupKwargs(backend="cpu:gloo,cuda:nccl")'
            )
        given, example = self.loss or loss_of(self.model, self.reader.example), self.reader.example

        # It holds these two alone, so that the self-check sees all that it could change.
        def task(**inputs: Tensor) -> Tensor:
            in_order, named = example.arguments(inputs)
            return given(*in_order, **named)

        self.task = task
        # Ranks with other arguments or data would wait for one another or draw other coins; an example could count on two.
        few_items = ""  # what they are, or why they cannot be used, for this comparison alone
        if not collectives.is_alone():
            try:
                few_items = self.reader.digest(LOOKED_AT_TWICE).hex()
            except (PrivacyConfigError, ItemNotRead) as error:
                few_items = str(error)
        asked = (
            self.request,
            self.reader.micro_batch_size,
            self.save_every,
            self.folder.root.resolve(),
        )
        mine = repr((asked, example.fields, few_items, settings(self.optimizer)))
        if len(set(collectives.gather_objects(mine))) > 1:
            raise PrivacyConfigError(
                "ranks have another data set, plan, example, micro-batch, optimizer or run folder: make the same PrivateLoop on "
                "each of them, with the whole data set; the loop deals the items"
            )
        roles = {} if self.mirror is None else {"ledger_mirror": self.mirror}
        collectives.on_main(lambda: require_apart(roles, self.folder.root))
        collectives.on_main(self.folder.take)
        self.undone.callback(self.folder.release)

    def _take_model(self) -> None:
        """Ranks begin with rank 0's parameters and buffers, as under DistributedDataParallel; shards are a rank's own."""
        put_away(self.model)
        if collectives.world_size() > 1:
            take_from_main(self.model)
        self.engine = WatchedEngine(
            self.model, self.optimizer, sets_rate=self.learning_rate is not None
        )
        self.undone.callback(self.engine.release)
        # Checkpoints do not hold frozen parameters and buffers, and a resume needs the same.
        digest = hashlib.sha256()
        for name, tensor in fixed_tensors(self.model).items():
            digest.update(name.encode())
            digest.update(in_order(full(tensor).cpu()).view(torch.uint8).numpy().tobytes())
        self.model_facts = {
            "class": kind_of(self.model).__name__,
            "fixed_sha256": digest.hexdigest(),
        }

    def _check_model(self) -> None:
        """On made-up items, at training's own size: each layer is clipped, to torch's own sums, and keeps examples apart.

        Last comes the pass over all items: what identifies them, and whether they can be used.
        """
        with contextlib.suppress(*(() if self.fallback is False else (Uncovered,))):
            claims(self.model, self.engine.shapes)
        example, size = self.reader.example, self.reader.micro_batch_size
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
        return example.made_up(FRESH) if self.made_up is None else example.named(self.made_up)

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
        """Returns the row that stands where there is no item, (1, ...) by input."""
        return {name: row[None] for name, row in self.reader.example.padding().items()}

    def _look_at_data(self) -> bytes:
        """What identifies the data; enters the ledger as HMAC under the sampling key only. On one rank.

        Raises:
            PrivacyConfigError: most items cannot be used, or an item depends on those before it.
        """
        reader, version = self.reader, self.data_version
        digest = reader.digest(None if version is None else LOOKED_AT)
        if reader.unusable:
            collectives.say(reader.unusable)
        fields = {name: repr(field) for name, field in reader.example.fields.items()}
        data = digest.hex() if version is None else f"version {version}"
        return json.dumps(
            {"items": len(reader.dataset), "data": data, "fields": fields}, sort_keys=True
        ).encode()

    def open_ledger(self) -> Opening:
        opening = open_ledger(
            self.folder,
            lambda _: self.request,
            lambda: self.manifest,
            described=lambda recorded, _: (
                {"unit": self.unit} | lineage.described(self.folder, recorded, self.starts_from)
            ),
            mirror=self.mirror,
        )
        self.is_new = opening.ledger is None
        if not opening.plan.formal_guarantee:
            raise PrivacyConfigError(
                f"a private loop makes a formal claim, and here {opening.plan.reasons[0]}"
            )
        for line in opening.plan.warnings if collectives.rank() == 0 else ():
            warnings.warn(line, stacklevel=4)
        return opening

    def take_ledger(self, ledger: RunLedger) -> None:
        """A folder that was put back as it was earlier states less than this program has spent in it."""
        self.undone.callback(ledger.release)
        known = collectives.broadcast_object(lineage.TRAINED.get(self.folder.root.resolve()))
        if known is not None and not self.is_new:
            ledger.require_not_shorter_than(known)
        self.ledger = ledger

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """All that the checkpoint holds: the engine is there already, and a finished run gives its model back trained."""
        for name, value in self.model_facts.items():
            if checkpoint.manifest.get("model", {}).get(name) != value:
                raise ConfigError(
                    f"the checkpoint of step {checkpoint.step} was written with another model ({name} differs; its frozen "
                    "weights and buffers are not in the checkpoint): give the same one, or start another run folder"
                )
        lineage.TRAINED[self.folder.root.resolve()] = self.ledger.position()
        self.engine.load_facts(checkpoint.manifest)
        checkpoint.restore(self.engine, self.engine.moments)

    def build(self, plan: PrivacyPlan, resumed: Checkpoint | None) -> Parts:
        engine = self.engine
        mechanism = mechanism_of(plan, engine, self.task, self.reader.micro_batch_size)
        self.undone.callback(mechanism.clipped.detach)
        modules = [module for _, module in modules_of(self.model, self.task)]
        isolation = Isolation(mechanism, self._padding(), modules)
        size = next(mechanism.clipped.parts(self.reader.micro_batch_size)).stop
        isolation.require(self._made_up_rows(size))
        self.self_checked = SelfChecked(self.model, self.task, mechanism.clipped, isolation.force)
        return Parts(
            mechanism=mechanism,
            read=lambda plans: self.reader.steps(
                plans, self.num_workers, pin_memory=engine.device.type == "cuda"
            ),
            micro_batch_size=self.reader.micro_batch_size,
            learning_rate=self._rate,
            note_charge=self._require_untouched,
            stored=self._stored,
            configuration=lambda: (self._configuration(), None, {}),
            retention=Retention(KEPT),
            save_every=self.save_every,
            isolation=isolation,
        )

    def _rate(self, step: int) -> float:
        """The learning rate of a step: the caller's number, or what his function returns, or that of the optimizer's groups."""
        rate = self.learning_rate
        if rate is None:
            return self.engine.read_rates()[0]
        return (
            rate_of(rate(step), f"learning_rate({step})")
            if callable(rate)
            else rate_of(rate, "learning_rate")
        )

    def _require_untouched(self, step: int) -> None:
        """The caller's loss, items and rate have run: they have moved neither model and optimizer nor a scheduler."""
        self.registered.require_unmoved()
        self.engine.require_all_noised()
        self.self_checked.require_model()

    def _stored(self) -> Stored:
        """Says what a checkpoint holds, and refuses one in which anything but the loop's own steps has written."""
        require_alike(self.engine.require_unchanged)
        facts = {
            **self.engine.facts(),
            "run": self.folder.root.resolve().name,
            "model": self.model_facts,
        }
        average = self.registered.average
        return Stored(
            self.engine.state() if average is None else average.states(), self.engine.shapes, facts
        )

    def _configuration(self) -> str:
        """The run's configuration in the trainer's words, which the card, the audit and verify.py compare with the ledger."""
        request, mirror = self.request, self.mirror
        # Names as the ledger has them: two folders of one run are one.
        behind = [place["run"] for place in self.ledger.opened.get("behind", ())]
        asked = (
            "expected_batch_size",
            "noise_multiplier",
            "target_epsilon",
            "target_delta",
            "max_grad_norm",
        )
        sections: dict[str, dict[str, Any]] = {
            "data": {"num_examples": request.num_examples},
            "privacy": {name: getattr(request, name) for name in asked},
            "optimizer": {"name": type(self.optimizer).__name__},
            "init": {"starts_from": behind or "public"},
            "train": {
                "num_steps": request.num_steps,
                "micro_batch_size": self.reader.micro_batch_size,
            },
        }
        sections["privacy"]["ledger_mirror"] = None if mirror is None else str(mirror)
        lines = [f"name = {written(self.folder.root.resolve().name)}"]
        for title, section in sections.items():
            if section:
                lines += ["", f"[{title}]"]
                lines += [
                    f"{key} = {written(value)}"
                    for key, value in section.items()
                    if value is not None
                ]
        return "\n".join(lines) + "\n"


def take_from_main(model: nn.Module) -> None:
    """Gives all ranks the parameters and buffers of rank 0, as under DistributedDataParallel. Collective.

    Shards are a rank's own.
    """
    for x in (*model.parameters(), *model.buffers()):
        if is_dtensor(x):
            continue
        numbers = in_order(x)
        dist.broadcast(numbers.view(torch.uint8), 0)  # as bytes: not every dtype can be sent
        if overlaps(x):  # nothing can be written to what is expanded
            x.data = numbers.view(x.shape)
        elif numbers.data_ptr() != x.data_ptr():
            x.detach().copy_(numbers.view(x.shape))
