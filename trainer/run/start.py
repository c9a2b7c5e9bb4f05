"""Builds a run from its configuration, in the order in which things can be refused, and trains it."""

from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.index.shards import expand_shards, require_a_shard
from data.index.tar_index import ExampleTable
from data.reading.loader import Loader
from data.reading.streaming import Stream, StreamingLoader
from models.vocabulary_head import VocabularyHead
from privacy.checkpoints.read import Checkpoint, has_checkpoints, set_aside_newer
from privacy.checkpoints.write import CheckpointWriter, Retention
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import LocalSums
from privacy.clipping.certified_sum import CertifiedSum
from privacy.clipping.selfcheck import check_against_autograd
from privacy.noise import NoiseSource
from privacy.plan import PrivacyPlan
from privacy.step.adaptive_bound import resumed_bound
from privacy.step.batches import LogicalBatches
from privacy.step.engine import Engine, to_device
from privacy.step.folder import RunFolder
from privacy.step.neighbours import require_neighbours_apart
from privacy.step.noise_variance import NoiseVariance
from privacy.step.resume import begins_again, load_newest
from privacy.step.run_ledger import RunLedger
from privacy.step.sharded_sums import ShardedSums
from privacy.step.step import Mechanism
from trainer.config.machine import MachineSettings
from trainer.config.recipe import EngineName, RunConfig, to_toml
from trainer.engines import build_engine, sharder
from trainer.engines.blocks import compile_blocks, require_compilable
from trainer.errors import ConfigError
from trainer.loop.announce import announce, conclude, warn_of_few_cpus
from trainer.loop.averaging import WeightAverage
from trainer.loop.fit import DONE, fit
from trainer.loop.sanity import SanityChecks
from trainer.loop.schedule import learning_rate
from trainer.optimizers import moments
from trainer.planner.privacy import with_coefficients
from trainer.planner.probe import flops_of_an_example
from trainer.ranks import distributed
from trainer.ranks.agreement import require_shared
from trainer.ranks.discovery import Ranks
from trainer.ranks.distributed import first_on_main, on_main
from trainer.run.allocator import keep_freed_memory
from trainer.run.certified import require_same_integers, use_deterministic_kernels
from trainer.run.clipping_mode import ModeChoice, choose_mode
from trainer.run.datasets import heldout_table, require_other_bytes, require_usable, stage, training_table
from trainer.run.frozen import FrozenWeights, require_start
from trainer.run.heldout import Heldout
from trainer.run.ledger import open_run_ledger, require_places
from trainer.run.memory_estimate import total_memory
from trainer.run.run import Run
from trainer.tasks import TrainingTask, make_task
from trainer.weights.parent_ledgers import LedgerBehind, ledgers_behind, require_disjoint
from trainer.weights.provenance import Start
from trainer.weights.start import find_checkpoint, initialisation_facts, load_start, training_data_facts


@dataclass(frozen=True)
class _Setup:
    """What is known before anything is built."""

    config: RunConfig
    machine: MachineSettings
    engine_name: EngineName
    folder: RunFolder
    root: Path
    ranks: Ranks
    device: torch.device
    task: TrainingTask


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
    """Trains, or resumes, the run in `run_dir`; collective. Returns the exit code.

    Args:
        root: the project's root; paths in the recipe are relative to it.
        may_restart: a run that has lost all its checkpoints may begin again at step 0, charging its steps once more.
        noise: tests inject their own source; a real run draws from the operating system.
    """
    if device.type == "cpu":
        keep_freed_memory()
    if config.privacy.arithmetic == "certified":
        use_deterministic_kernels()
    folder = RunFolder(run_dir)
    on_main(lambda: require_places(folder, config.privacy))
    on_main(folder.take)
    require_shared(folder)
    task = first_on_main(lambda: make_task(config, root))
    first_on_main(lambda: require_a_shard(config.data.shards, root))  # before anything that takes long
    init = config.init
    if init is not None:  # before data are hashed; a resumed run does not look at it
        first_on_main(lambda: has_checkpoints(folder.checkpoints) or find_checkpoint(init, root))
    setup = _Setup(config, machine, engine_name, folder, root, ranks, device, task)
    model = _checked_model(setup)
    section, heldout_examples = config.heldout, heldout_table(config, folder, root)
    table = training_table(config, folder, root)  # last of these: hashing a large data set takes hours
    nodes = stage(table, config, root)
    on_main(lambda: require_usable(table, task.make_example(train=True), config, key="data.shards"))
    heldout = None
    if section is not None and heldout_examples is not None:
        if section.is_public:
            first_on_main(lambda: require_other_bytes(heldout_examples, table))
        make_example, count = task.make_example(train=False), section.num_examples
        on_main(lambda: require_usable(heldout_examples, make_example, config, key="heldout.shards", count=count))
        heldout = Heldout(heldout_examples, task, num_examples=count, micro_batch_size=config.train.micro_batch_size)
    start: dict[str, Any] = {"kind": "random", "seed": config.train.seed}
    behind: Callable[[], list[LedgerBehind]] | None = None
    if init is not None and not on_main(lambda: has_checkpoints(folder.checkpoints)):
        checkpoint = first_on_main(lambda: find_checkpoint(init, root))
        start = first_on_main(lambda: initialisation_facts(config, checkpoint, table))
        behind = partial(_behind, config, checkpoint, start, table)
        start["at_random"] = load_start(checkpoint, init, model, task.facts().get("tokenizer_sha256"))
    disjoint = init is not None and init.disjoint_data
    ledger = open_run_ledger(
        folder, config.privacy, config.train.num_steps, table, task.unit,
        coefficients=lambda request: with_coefficients(request, config), behind=behind, disjoint_from_start=disjoint,
    )  # fmt: skip
    resumed = load_newest(folder, ledger, None if machine.zero_init else model)
    if ledger.is_closed:
        last, num_steps = resumed.step if resumed is not None else 0, config.train.num_steps
        if last < num_steps:
            raise ConfigError(
                f"{run_dir} is finished and its budget is closed, but its last checkpoint is damaged or gone: the newest whole "
                f"one is that of step {last}; restore checkpoints/ from a copy"
            )
        ledger.mend()  # the crash may have come between the end and its copy in a mirror or an owner's ledger
        if ranks.is_main:
            print(f"{run_dir} is finished: all {num_steps} steps are done; nothing to do", flush=True)
        return DONE
    restarted = on_main(lambda: begins_again(folder, ledger, resumed, may_restart=may_restart))
    if resumed is not None:
        start = resumed.manifest["initialisation"]
    facts = {**task.facts(), "initialisation": start, "training_data": training_data_facts(config, table, resumed)}
    run, choice = _build_run(setup, model, table, nodes, ledger, resumed, heldout, facts, noise, restarted=restarted)
    chosen = {"clipping_mode": asdict(choice)} if choice is not None else {}
    on_main(lambda: folder.record_configuration(to_toml(config), dict(machine.raw), chosen))
    warn_of_few_cpus(config.data.num_workers)
    if ranks.is_main:
        announce(run, ranks, engine_name, machine, choice)
    outcome = fit(run)
    if outcome == DONE:
        ledger.close_run()
    if ranks.is_main:
        conclude(run, outcome)
    return outcome


def _behind(
    config: RunConfig, checkpoint: Checkpoint, start: dict[str, Any], table: ExampleTable
) -> list[LedgerBehind]:
    """The ledgers behind the initial weights, and a declaration about them held against the shards; on one rank."""
    assert config.init is not None
    behind = ledgers_behind(checkpoint, Start.of({"initialisation": start}), is_private=config.privacy.enabled)
    if config.init.disjoint_data and behind:
        require_disjoint(checkpoint, table)
    return behind


def _checked_model(setup: _Setup) -> nn.Module:
    """The model with fresh weights, after all that can be refused by looking at the model alone."""
    config, machine, task = setup.config, setup.machine, setup.task
    if machine.zero_init and config.init is not None:
        raise ConfigError(
            f"ds_config {machine.path}: zero_optimization.zero_init cannot be combined with [init]: remove one"
        )
    if not machine.zero_init:
        # Before the weights are made: Linux grants memory that it does not have, and then kills whoever touches it.
        room = total_memory()
        needed = sum(weight.numel() * weight.element_size() for weight in task.skeleton().parameters())
        if room is not None and needed > room:
            raise ConfigError(
                f"model: its weights alone take {needed / 2**30:.3g} GiB, and this machine has {room / 2**30:.3g} GiB: take a "
                "smaller size, or zero_optimization.zero_init in the ds_config"
            )
    shard = sharder(setup.engine_name, machine, setup.device, config.train.micro_batch_size)
    model = task.build(torch.Generator().manual_seed(config.train.seed), after=shard)
    require_start(model, config)
    if config.train.compile:
        require_compilable(model, setup.engine_name, machine, setup.device)
    whole = model if shard is None else task.build(torch.Generator().manual_seed(config.train.seed), one_block=True)
    check_against_autograd(whole, task.synthetic_inputs(2))
    return model


def _build_run(
    setup: _Setup,
    model: nn.Module,
    table: ExampleTable,
    nodes: tuple[int, ...],
    ledger: RunLedger,
    resumed: Checkpoint | None,
    heldout: Heldout | None,
    model_facts: dict[str, Any],
    noise: NoiseSource | None,
    *,
    restarted: bool,
) -> tuple[Run, ModeChoice | None]:
    """Builds engine, clipper, loader and the rest of what steps need; writes nothing before all of it is there.

    Then the folder is made whole, newer checkpoints are set aside, the ledger is mended, and `start_session` records this start.
    """
    config, folder = setup.config, setup.folder
    frozen = FrozenWeights(model)
    engine = build_engine(
        setup.engine_name, model, config.optimizer, setup.machine, setup.device, config.train.micro_batch_size
    )
    if resumed is not None:
        resumed.restore(engine, moments(config.optimizer))
    require_neighbours_apart(engine, engine.module, setup.task.synthetic_inputs, config.train.micro_batch_size)
    if config.train.compile:
        compile_blocks(engine.module)
    clipped, choice = _clipped_sum(config, ledger.plan, setup.task, engine, resumed)
    source = noise or ledger.plan.noise()
    sanity = SanityChecks(engine, source) if config.train.sanity_checks else None
    first_step = resumed.step + 1 if resumed is not None else 1
    offloads = setup.machine.offload_optimizer or (setup.engine_name == "fsdp" and setup.machine.offload_param)
    loader = _loader(setup, table, first_step)
    average = WeightAverage(engine, config.train.ema_decay, resumed) if config.train.ema_decay else None
    # Nothing was written so far, so that a refused start changes nothing; from here on no check is left that refuses it.
    on_main(folder.begin)
    if resumed is not None:
        kept = resumed.path.name
        on_main(lambda: set_aside_newer(folder.checkpoints, kept))
    ledger.mend()
    nonce = ledger.start_session(restarted=restarted)
    if resumed is not None:
        ledger.adopt(resumed)
    known_variance = resumed.manifest["noise_variance"] if resumed is not None else 0.0
    run = Run(
        config=config,
        folder=folder,
        mechanism=Mechanism(
            plan=ledger.plan,
            clipped=clipped,
            engine=engine,
            task=engine.module,
            ledger=ledger,
            noise=sanity.noise if sanity is not None else source,
            noise_variance=NoiseVariance(config.optimizer.betas[1], known_variance),
            learning_rate=partial(
                learning_rate,
                num_steps=config.train.num_steps,
                peak_lr=config.optimizer.peak_lr,
                schedule=config.schedule,
            ),
            note_charge=lambda step: distributed.note_progress(step, charged=True),
            keep_noise_on=torch.device("cpu") if offloads else None,
        ),
        ledger=ledger,
        frozen=frozen,
        sanity=sanity,
        batches=LogicalBatches(
            ledger.plan.sampler,
            ledger.key,
            nonce,
            ledger.attempts,
            config.train.micro_batch_size,
            pads_to_cap=ledger.plan.enabled,
            nodes=nodes,
            expected_batch_size=config.privacy.expected_batch_size,
            charged=ledger.charged_before,
        ),
        loader=loader,
        heldout=heldout,
        first_step=first_step,
        checkpoints=CheckpointWriter(
            folder.checkpoints,
            Retention(config.train.keep_checkpoints, config.train.keep_every),
            in_background=config.train.async_checkpoints,
            published=ledger.checkpoint,
        ),
        average=average,
        model_facts=model_facts,
        flops_per_example=flops_of_an_example(setup.task),
    )
    return run, choice


def _loader(setup: _Setup, table: ExampleTable, first_step: int) -> Loader | StreamingLoader:
    """Reads examples as the sampler draws them; public data may also stream in the order of their shards."""
    config = setup.config
    make_example, pin_memory = setup.task.make_example(train=True), setup.device.type == "cuda"
    if config.data.streaming:
        return StreamingLoader(
            Stream(first_on_main(lambda: expand_shards(config.data.shards, setup.root)), seed=config.train.seed),
            make_example,
            micro_batch_size=config.train.micro_batch_size,
            batch_size=config.privacy.expected_batch_size,
            num_workers=config.data.num_workers,
            rank=setup.ranks.rank,
            world_size=setup.ranks.world_size,
            start_step=first_step - 1,
            pin_memory=pin_memory,
        )
    return Loader(
        table,
        make_example,
        micro_batch_size=config.train.micro_batch_size,
        num_workers=config.data.num_workers,
        memory_limit_mib=config.data.memory_limit_mib,
        pin_memory=pin_memory,
    )


def _clipped_sum(
    config: RunConfig, plan: PrivacyPlan, task: TrainingTask, engine: Engine, resumed: Checkpoint | None
) -> tuple[ClippedSum, ModeChoice | None]:
    """The clipper, and how its mode was chosen where the recipe says "auto". Collective."""
    privacy, micro_batch_size = config.privacy, config.train.micro_batch_size
    clipped = plan.clipped_sum(
        engine.module,
        shapes=engine.shapes,
        mode="bookkeeping" if privacy.clipping_mode == "auto" else privacy.clipping_mode,
        accumulator=ShardedSums if config.train.accumulation == "sharded" else LocalSums,
        device=engine.device,
        self_check=False,  # an unsharded copy has passed in `_checked_model`
    )
    if plan.adaptive_clipping is not None and resumed is not None:
        clipped.max_grad_norm = resumed_bound(resumed.manifest, plan.max_grad_norm)
    if isinstance(clipped, CertifiedSum):
        require_same_integers(clipped, engine, task.synthetic_inputs, micro_batch_size)
        return clipped, None
    choice = None
    if privacy.clipping_mode == "auto":
        choice = choose_mode(clipped, engine, task.synthetic_inputs, micro_batch_size)
    # Scores of the vocabulary that are computed in parts are computed again for norm and sum: that must repeat to the last bit.
    hidden_BLD = torch.empty(micro_batch_size, config.data.num_tokens - 1, 1, device="meta")
    heads = [module for module in engine.module.modules() if isinstance(module, VocabularyHead)]
    if clipped.mode == "two_pass" or any(head.num_chunks(hidden_BLD) > 1 for head in heads):
        clipped.check_repeatable(engine.module, to_device(task.synthetic_inputs(micro_batch_size), engine))
    return clipped, choice
