"""Builds a run from its configuration, in the order in which it can be refused, and trains it."""

import contextlib
import itertools
import os
from collections.abc import Callable, Generator, Iterator
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.batch import Batch
from data.index.shards import local_shards, require_a_shard
from data.index.tar_index import ExampleTable
from data.reading.loader import Loader
from data.reading.streaming import Stream, StreamingLoader
from privacy.checkpoints.read import Checkpoint, has_checkpoints
from privacy.checkpoints.write import Retention
from privacy.clipping.clipped_sum import Mode
from privacy.errors import DONE
from privacy.guards.isolation import Isolation
from privacy.guards.neighbours import require_neighbours_apart
from privacy.guards.selfcheck import ALONE, check_against_autograd, check_at_size
from privacy.ledger.claim import ParentLedger
from privacy.noise.source import NoiseSource
from privacy.plan.numbers import PrivacyPlan
from privacy.ranks import collectives
from privacy.ranks.allocator import give_back_freed_memory, keep_freed_memory
from privacy.ranks.collectives import first_on_main, on_main, refuse_together
from privacy.ranks.engine import Engine, ShardState, even_layout, flat_part, to_device
from privacy.run.mechanism import mechanism_of
from privacy.run.run import CheckpointContents, Finished, Run, RunParts, open_run
from privacy.run.run_ledger import LedgerOpening, RunLedger
from privacy.step.averaging import WeightAverage
from privacy.step.batches import StepBatch
from privacy.step.run_folder import RunFolder
from privacy.sums.grid import EXAMPLES_PER_SUM
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig, to_toml
from trainer.engines import build_engine, sharder
from trainer.engines.blocks import checkpoint_blocks, compile_blocks, require_compilable
from trainer.errors import ConfigError
from trainer.loop.fit import fit
from trainer.loop.heldout import Heldout
from trainer.loop.reporting import Training
from trainer.memory import total_memory
from trainer.optimizers import learning_rate, moments
from trainer.ranks import distributed
from trainer.ranks.discovery import Ranks
from trainer.ranks.rendezvous import require_shared
from trainer.run.announce import announce, conclude
from trainer.run.clipping_mode import (
    CUBLAS_REPEATS,
    ModeChoice,
    accumulator_of,
    choose_by_trial,
    require_repeats,
    use_deterministic_kernels,
)
from trainer.run.datasets import (
    heldout_table,
    require_other_bytes,
    require_usable,
    stage,
    training_table,
)
from trainer.run.ledger_terms import open_run_ledger, require_places
from trainer.tasks import TrainingTask, make_task
from trainer.weights.initial_weights import (
    find_checkpoint,
    initialisation_facts,
    ledgers_behind,
    load_start,
    require_disjoint,
    training_data_facts,
)
from trainer.weights.provenance import Initialisation


def train(
    config: RunConfig,
    machine: MachineSettings,
    engine_name: EngineName,
    run_dir: Path,
    root: Path,
    ranks: Ranks,
    device: torch.device,
    noise: NoiseSource | None = None,
    *,
    may_restart: bool = False,
) -> int:
    """Trains, or resumes, the run in `run_dir` and returns the exit code. Collective.

    Args:
        root: the project's root; paths in the recipe are relative to it.
        may_restart: a run that has lost all its checkpoints may begin again at step 0, charging its
            steps once more.
        noise: tests inject their own source; a real run draws from the operating system.
    """
    prepare_process(config, device)
    start = TrainerStart(
        config, machine, engine_name, RunFolder(run_dir), root, ranks, device, noise, may_restart
    )
    run = open_run(start)
    if isinstance(run, Finished):
        collectives.say(
            f"{run_dir} is finished: all {config.train.num_steps} steps are done; nothing to do"
        )
        return DONE
    training = start.training(run)
    if ranks.is_main:
        announce(training, engine_name, machine, start.choice)
    outcome = fit(training)
    if ranks.is_main:
        conclude(run, outcome)
    return outcome


def prepare_process(config: RunConfig, device: torch.device) -> None:
    """Sets the process-wide options that must be set before the first kernel."""
    if device.type == "cpu":
        keep_freed_memory()
    if config.privacy.arithmetic == "certified":
        use_deterministic_kernels()
    elif device.type == "cuda" and config.privacy.clipping_mode != "bookkeeping":
        # Clipping may need two passes, and cuBLAS reads this variable once, at its first product.
        os.environ.setdefault(*CUBLAS_REPEATS)


@dataclass
class TrainerStart:
    """Adds the trainer's checks and parts to a start; see `privacy.run.run.RunSetup`.

    The checks run in the order of `checks`; a later check uses the parts of the earlier ones.
    """

    config: RunConfig
    machine: MachineSettings
    engine_name: EngineName
    folder: RunFolder
    root: Path
    ranks: Ranks
    device: torch.device
    noise: NoiseSource | None
    may_restart: bool
    heldout: Heldout | None = None
    heldout_examples: ExampleTable | None = None
    # Rank 0 alone has them, since they may be large.
    parent_ledgers: list[ParentLedger] = field(default_factory=list)
    initialisation: dict[str, Any] = field(default_factory=dict)
    choice: ModeChoice | None = None
    task: TrainingTask = field(init=False)
    model: nn.Module = field(init=False)
    twin: nn.Module = field(init=False)
    """A model with one block of each stack, which the self-check examines on one rank of a host."""
    table: ExampleTable = field(init=False)
    nodes: tuple[int, ...] = ()

    def checks(self) -> list[Callable[[], None]]:
        """Returns the checks in the order in which they may refuse a start.

        The first cost nothing; those that hash large data come last.
        """
        return [
            self.require_places,
            self.take_folder,
            self.require_shared_folder,
            self.make_task,
            self.require_initial_weights,
            self.build_model,
            self.require_sums_of_autograd,
            self.open_heldout,
            self.open_data,
            self.look_at_examples,
            self.load_initial_weights,
        ]

    def require_places(self) -> None:
        """Refuses a mirror or a shared ledger inside the run folder.

        It runs before the folder is made, because the folder could take the place of such a file.
        """
        on_main(lambda: require_places(self.folder, self.config.privacy))

    def take_folder(self) -> None:
        """Locks the folder for one trainer, and refuses a folder that has lost key or ledger."""
        on_main(self.folder.take)

    def require_shared_folder(self) -> None:
        """Refuses ranks that see different run folders, which would scatter the checkpoints."""
        require_shared(self.folder)

    def make_task(self) -> None:
        """Refuses recipe, tokenizer and fields that do not fit each other.

        A misspelt name of shards is refused here too, before a check that takes long.
        """
        self.task = first_on_main(lambda: make_task(self.config, self.root))
        first_on_main(lambda: require_a_shard(self.config.data.shards, self.root))

    def require_initial_weights(self) -> None:
        """Refuses a missing checkpoint of [init]; a resumed run does not need it."""
        init = self.config.init
        if init is None:
            return

        def require_checkpoint() -> None:
            if not has_checkpoints(self.folder.checkpoints):
                find_checkpoint(init, self.root)

        first_on_main(require_checkpoint)
        if self.machine.zero_init:
            raise ConfigError(
                f"ds_config {self.machine.path}: zero_optimization.zero_init cannot be combined "
                "with [init]: remove one"
            )

    def build_model(self) -> None:
        """Builds the model with fresh weights, and refuses a model that cannot be trained here."""
        config = self.config
        # Linux grants memory that it does not have, and then kills the process that uses it.
        memory = None if self.machine.zero_init else total_memory()
        weights = self.task.skeleton().parameters()
        needed = sum(weight.numel() * weight.element_size() for weight in weights)
        if memory is not None and needed > memory:
            raise ConfigError(
                f"model: its weights alone take {needed / 2**30:.3g} GiB, and this machine has "
                f"{memory / 2**30:.3g} GiB: take a smaller size, or zero_optimization.zero_init in "
                "the ds_config"
            )
        self.shard = sharder(
            self.engine_name, self.machine, self.device, config.train.micro_batch_size
        )
        generator = torch.Generator().manual_seed(config.train.seed)
        self.model = self.task.build(generator, module_hook=self.shard)
        frozen = [name for name, p in self.model.named_parameters() if not p.requires_grad]
        if frozen and config.init is None:
            raise ConfigError(
                "the recipe trains only a part of the model, and the rest "
                f"({frozen[0]}, ...) would stay at random: give init.checkpoint, a run whose "
                "encoder is trained"
            )
        if config.train.compile:
            require_compilable(self.model, self.engine_name, self.machine, self.device)

    def require_sums_of_autograd(self) -> None:
        """Refuses clipped sums that differ from those of autograd.

        The twin, which has a layer of every kind, is compared in float64 and on many rows; the
        whole model is compared coarsely, since the full comparison takes one core half an hour.
        """
        seed = self.config.train.seed
        inputs = self.task.synthetic_inputs(2)
        self.twin = self.task.build(torch.Generator().manual_seed(seed), one_block=True)
        if kinds(self.twin) != kinds(self.task.skeleton()):  # the blocks of a stack differ
            self.twin = self.task.build(torch.Generator().manual_seed(seed))

        def check() -> None:
            on_device = {name: x.to(self.device) for name, x in inputs.items()}
            check_against_autograd(self.twin.to(self.device), on_device, fallback=False)
            # Under zero_init no process has the whole model.
            if self.shard is None:
                check_at_size(self.model, inputs, 1)

        self._on_each_host(check)

    def require_sums_at_size(self, engine: Engine, mode: Mode) -> None:
        """Compares the twin's sums with the rows, precision, mode and compiler of the run."""
        train = self.config.train
        twin = self.twin
        del self.twin
        if mode == "certified":  # `require_repeats` compares its rows as whole numbers
            return
        rows = train.micro_batch_size
        if self.device.type != "cuda":
            rows = min(rows, EXAMPLES_PER_SUM + 1)

        def check() -> None:
            twin.to(engine.device, engine.compute_dtype)
            checkpoint_blocks(twin, self.machine)
            if train.compile:
                compile_blocks(twin)
            inputs = to_device(self.task.synthetic_inputs(ALONE), engine)
            check_at_size(twin, inputs, rows, mode=mode)

        self._on_each_host(check)

    def _on_each_host(self, check: Callable[[], None]) -> None:
        """Runs a check in one process of each host, and then gives its freed memory back.

        So the run finds as much memory in that process as in the others.
        """
        refuse_together(check if self.ranks.local_rank == 0 else lambda: None)
        give_back_freed_memory()

    def open_heldout(self) -> None:
        """Opens the held-out data, and refuses training shards that are declared public.

        It comes before the next check, which may take hours.
        """
        self.heldout_examples = heldout_table(self.config, self.folder, self.root)

    def open_data(self) -> None:
        """Opens the private examples, and each node's share of them.

        It comes after all checks that need no example, since hashing takes hours.
        """
        self.table = training_table(self.config, self.folder, self.root)
        self.nodes = stage(self.table, self.config, self.root)

    def look_at_examples(self) -> None:
        """Refuses data of which most cannot be used: they would spend the budget on zero gradients.

        Public held-out shards that have the bytes of training shards are refused too.
        """
        make_training_example = self.task.make_example(train=True)
        on_main(
            lambda: require_usable(
                self.table, make_training_example, self.config, key="data.shards"
            )
        )
        section = self.config.heldout
        examples = self.heldout_examples
        if section is None or examples is None:
            return
        if section.is_public:
            first_on_main(lambda: require_other_bytes(examples, self.table))
        make_example = self.task.make_example(train=False)
        count = section.num_examples
        on_main(
            lambda: require_usable(
                examples, make_example, self.config, key="heldout.shards", count=count
            )
        )
        size = self.config.train.micro_batch_size
        self.heldout = Heldout(examples, self.task, num_examples=count, micro_batch_size=size)

    def load_initial_weights(self) -> None:
        """Loads the weights of [init], and finds the ledgers of the private runs behind them."""
        config = self.config
        init = config.init
        self.initialisation = {"kind": "random", "seed": config.train.seed}
        if init is None or on_main(lambda: has_checkpoints(self.folder.checkpoints)):
            return
        checkpoint = first_on_main(lambda: find_checkpoint(init, self.root))
        facts = first_on_main(lambda: initialisation_facts(config, checkpoint, self.table))

        def find_ledgers() -> None:
            start = Initialisation.of({"initialisation": facts})
            self.parent_ledgers = ledgers_behind(
                checkpoint, start, is_private=config.privacy.enabled
            )
            if init.disjoint_data and self.parent_ledgers:
                require_disjoint(checkpoint, self.table)

        on_main(find_ledgers)
        self.initialisation = facts
        tokenizer_sha256 = self.task.facts().get("tokenizer_sha256")
        facts["at_random"] = load_start(checkpoint, init, self.model, tokenizer_sha256)

    def open_ledger(self) -> LedgerOpening:
        """Returns the opened ledger; see `trainer.run.ledger_terms.open_run_ledger`."""
        return open_run_ledger(
            self.config, self.folder, self.table, self.task.unit, self.parent_ledgers
        )

    def take_weights(self, checkpoint: Checkpoint) -> None:
        """Loads the checkpoint's weights, unless the model was built in shards.

        Such a model takes its weights with the engine's state, piece by piece.
        """
        if not self.machine.zero_init:
            checkpoint.load_weights(self.model)

    def take_ledger(self, ledger: RunLedger) -> None:
        """Accepts every ledger: the trainer remembers nothing that the run folder does not hold."""

    def build(self, plan: PrivacyPlan, resumed: Checkpoint | None) -> RunParts:
        """Builds engine, mechanism and loader; see `privacy.run.run.RunSetup.build`."""
        config = self.config
        task = self.task
        train = config.train
        start = self.initialisation if resumed is None else resumed.manifest["initialisation"]
        training_data = training_data_facts(config, self.table, resumed)
        self.model_facts = {**task.facts(), "initialisation": start, "training_data": training_data}
        frozen, shapes_of_frozen = frozen_weights(self.model)
        engine = build_engine(
            self.engine_name,
            self.model,
            config.optimizer,
            self.machine,
            self.device,
            train.micro_batch_size,
        )
        if resumed is not None:
            resumed.restore(engine, moments(config.optimizer))
        self.average: WeightAverage | None = None
        if train.ema_decay:
            self.average = WeightAverage(train.ema_decay).start(engine, resumed)
        require_neighbours_apart(
            engine, engine.module, task.synthetic_inputs, train.micro_batch_size
        )
        mode: Mode = "certified"
        setting = config.privacy.clipping_mode
        if plan.lattice is None and setting == "auto":
            self.choice = choose_by_trial(
                config, self.machine, self.engine_name, plan, task, engine, self.nodes
            )
            mode = self.choice.mode
        elif setting != "auto":
            mode = setting
        if train.compile:
            compile_blocks(engine.module)
        mechanism = mechanism_of(
            plan,
            engine,
            engine.module,
            train.micro_batch_size,
            mode=mode,
            accumulator=accumulator_of(config),
            nodes=self.nodes,
            noise=self.noise,
        )
        require_repeats(config, task, mechanism)
        self.require_sums_at_size(engine, mechanism.clipped.mode)
        self.loader = self._loader(1 if resumed is None else resumed.step + 1)
        choices = {"clipping_mode": asdict(self.choice)} if self.choice is not None else {}
        return RunParts(
            mechanism=mechanism,
            isolation=Isolation(mechanism, task.padding()),
            made_up=partial(task.synthetic_inputs, train.micro_batch_size),
            read=partial(_read, self.loader),
            micro_batch_size=train.micro_batch_size,
            nodes=self.nodes,
            learning_rate=lambda step: learning_rate(
                step, train.num_steps, config.optimizer.peak_lr, config.schedule
            ),
            note_charge=lambda step: distributed.note_progress(step, charged=True),
            save_every=train.checkpoint_every,
            retention=Retention(train.keep_checkpoints, train.keep_every),
            in_background=train.async_checkpoints,
            stored=partial(self._checkpoint_contents, engine, frozen, shapes_of_frozen),
            configuration=lambda: (to_toml(config), self.machine.raw, choices),
        )

    def _checkpoint_contents(
        self,
        engine: Engine,
        frozen: list[ShardState],
        shapes_of_frozen: dict[str, torch.Size],
    ) -> CheckpointContents:
        """Returns the weights to save, averaged where the run averages them, and facts on them."""
        states = self.average.states() if self.average is not None else engine.state()
        facts: dict[str, Any] = {"run": self.config.name}
        if shapes_of_frozen:
            facts["frozen"] = sorted(shapes_of_frozen)
        shapes = {**engine.shapes, **shapes_of_frozen}
        return CheckpointContents(itertools.chain(states, frozen), shapes, facts | self.model_facts)

    def training(self, run: Run) -> Training:
        """Returns an open run with the loader, the held-out data and the facts of its model."""
        flops = self.task.flops_of_an_example()
        return Training(
            self.config, run, self.loader, self.heldout, self.average, flops, self.model_facts
        )

    def _loader(self, first_step: int) -> Loader | StreamingLoader:
        """Returns a reader of the examples that the sampler draws.

        Public data may also stream in the order of their shards.
        """
        config = self.config
        make_example = self.task.make_example(train=True)
        pin_memory = self.device.type == "cuda"
        if config.data.streaming:
            shards = first_on_main(lambda: local_shards(config.data.shards, self.root))
            return StreamingLoader(
                Stream(shards, seed=config.train.seed),
                make_example,
                micro_batch_size=config.train.micro_batch_size,
                batch_size=config.privacy.expected_batch_size,
                num_workers=config.data.num_workers,
                rank=self.ranks.rank,
                world_size=self.ranks.world_size,
                start_step=first_step - 1,
                pin_memory=pin_memory,
            )
        return Loader(
            self.table,
            make_example,
            micro_batch_size=config.train.micro_batch_size,
            num_workers=config.data.num_workers,
            memory_limit_mib=config.data.memory_limit_mib,
            pin_memory=pin_memory,
        )


def frozen_weights(module: nn.Module) -> tuple[list[ShardState], dict[str, torch.Size]]:
    """Returns this rank's even share of the untrained weights, in CPU memory, and all their shapes.

    They get no gradient, no noise, no optimizer state and no weight decay, and engines return none
    of them. A checkpoint holds them nevertheless, so that it is a whole model: as they were before
    any engine cast or sharded them.
    """
    frozen = {name: p.detach() for name, p in module.named_parameters() if not p.requires_grad}
    shapes = {name: p.shape for name, p in frozen.items()}
    states = []
    for piece in even_layout(shapes, collectives.world_size()).owned_by(collectives.rank()):
        part = flat_part(frozen[piece.name].contiguous(), piece.offset, piece.length)
        states.append(ShardState(piece, {"param": part.to("cpu", torch.float32, copy=True)}))
    return states, shapes


def kinds(model: nn.Module) -> set[object]:
    """Returns the classes of a model's modules, with names and shapes of their own parameters."""
    classes = set[object]()
    for module in model.modules():
        parameters = module.named_parameters(recurse=False)
        classes.add((type(module), tuple((name, p.shape) for name, p in parameters)))
    return classes


def _read(
    loader: Loader | StreamingLoader, batches: Iterator[StepBatch]
) -> Generator[tuple[StepBatch, Iterator[Batch]], None, None]:
    """Reads micro-batches, and tells the heartbeat which of them a rank waits for."""
    with contextlib.closing(loader.steps(distributed.dealing(batches))) as steps:
        for batch, micro_batches in distributed.reading(
            steps, "the first micro-batch of the next step is read"
        ):
            activity = f"the next micro-batch of step {batch.step} is read"
            yield batch, distributed.reading(micro_batches, activity)
