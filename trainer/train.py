"""Builds a run from its configuration, in the order in which things can be refused, and trains it."""

import math
from pathlib import Path
from typing import Any

import torch
from torch import nn

from data.loader import Loader
from data.shards import expand_shards
from data.streaming import Stream, StreamingLoader
from data.tar_index import ExampleTable
from models.vocabulary_head import VocabularyHead
from privacy.clipping import ClippedSum
from privacy.clipping.accumulators import LocalSums
from privacy.clipping.functions import FUNCTIONS
from privacy.clipping.selfcheck import check_against_autograd
from privacy.errors import PrivacyStateRefused
from privacy.noise import NoiseSource, noise_source
from privacy.plan import PrivacyPlan
from trainer import distributed
from trainer.adaptive_bound import resumed_bound
from trainer.allocator import keep_freed_memory
from trainer.audit_members import MembersLog
from trainer.averaging import WeightAverage
from trainer.batches import LogicalBatches
from trainer.checkpoint import Checkpoint, newest_whole
from trainer.checkpoint_writer import CheckpointWriter, Retention
from trainer.clipping_mode import ModeChoice, choose_mode
from trainer.compilation import compile_blocks, require_compilable
from trainer.config import EngineName, RunConfig, to_toml
from trainer.datasets import heldout_table, require_other_bytes, training_table
from trainer.distributed import first_on_main, on_main
from trainer.ds_config import MachineSettings
from trainer.engines import build_engine, sharder
from trainer.engines.base import Engine
from trainer.engines.sharded_sums import ShardedSums
from trainer.errors import ConfigError
from trainer.frozen import FrozenWeights, require_start
from trainer.heldout import Heldout
from trainer.loop import BUDGET_SPENT, DONE, STOPPED_EARLY, fit
from trainer.optimizers import moments
from trainer.optimizers.adam_bc import NoiseVariance
from trainer.ranks import Ranks
from trainer.run import Run
from trainer.run_folder import RunFolder
from trainer.run_ledger import RunLedger, open_run_ledger
from trainer.same_settings import require_shared
from trainer.sanity import SanityChecks
from trainer.tasks import TrainingTask, make_task
from trainer.tasks.base import to_device
from trainer.warm_start import find_checkpoint, initialisation_facts, load_start, training_data_facts


def train(
    config: RunConfig,
    machine: MachineSettings,
    engine_name: EngineName,
    run_dir: Path,
    root: Path,
    ranks: Ranks,
    device: torch.device,
    noise: NoiseSource | None = None,
) -> int:
    """Trains, or resumes, the run in `run_dir`; collective. Returns the exit code.

    Args:
        root: the project's root; paths in the recipe are relative to it.
        noise: tests inject their own source; a real run draws from the operating system.
    """
    if device.type == "cpu":
        keep_freed_memory()
    folder = RunFolder(run_dir)
    on_main(lambda: _take(folder))
    require_shared(folder)
    task = first_on_main(lambda: make_task(config, root))
    if machine.zero_init and config.init is not None:
        raise ConfigError(
            f"ds_config {machine.path}: zero_optimization.zero_init cannot be combined with [init]: remove one"
        )
    shard = sharder(engine_name, machine, device, config.train.micro_batch_size)
    model = task.build(torch.Generator().manual_seed(config.train.seed), after=shard)
    require_start(model, config)
    if config.train.compile:
        require_compilable(model, engine_name, machine, device)
    whole = model if shard is None else task.build(torch.Generator().manual_seed(config.train.seed), one_block=True)
    check_against_autograd(whole, task.synthetic_inputs(2))
    heldout = _heldout(config, folder, task, root)
    table = training_table(config, folder, root)  # last of these: hashing a large data set takes hours
    if heldout is not None and config.heldout is not None and config.heldout.is_public:
        first_on_main(lambda: require_other_bytes(heldout.table, table))
    ledger = open_run_ledger(folder, config.privacy, config.train.num_steps, table)
    resumed = _load_weights(folder, ledger, None if shard is not None else model)
    first_step = resumed.step + 1 if resumed is not None else 1
    if ledger.is_closed:
        if first_step <= config.train.num_steps:
            raise ConfigError(
                f"{run_dir} is finished and its budget is closed, but its last checkpoint is damaged or gone: what is left "
                f"is that of step {first_step - 1}; restore checkpoints/ from a copy"
            )
        if ranks.is_main:
            print(f"{run_dir} is finished: all {config.train.num_steps} steps are done; nothing to do", flush=True)
        return DONE
    start = _start(config, model, table, root) if resumed is None else resumed.manifest["initialisation"]
    frozen = FrozenWeights(model)
    engine = build_engine(engine_name, model, config.optimizer, machine, device, config.train.micro_batch_size)
    if resumed is not None:
        resumed.restore(engine, moments(config.optimizer))
    if config.train.compile:
        compile_blocks(engine.module)
    nonce = ledger.start_session()
    clipped, choice = _clipped_sum(config, ledger.plan, task, engine, resumed)
    source = noise or noise_source(ledger.plan.noise_source)
    sanity = SanityChecks(engine, source) if config.train.sanity_checks else None
    run = Run(
        config=config,
        folder=folder,
        plan=ledger.plan,
        ledger=ledger,
        engine=engine,
        frozen=frozen,
        clipped=clipped,
        noise=sanity.noise if sanity is not None else source,
        sanity=sanity,
        batches=LogicalBatches(
            ledger.plan.sampler,
            ledger.plan.expected_batch_size,
            ledger.key,
            nonce,
            ledger.attempts,
            config.train.micro_batch_size,
            bucket_captions=config.data.bucket_captions,
        ),
        members=MembersLog(folder.private, ledger.key, nonce),
        loader=_loader(config, task, table, root, ranks, device, first_step),
        heldout=heldout,
        first_step=first_step,
        checkpoints=CheckpointWriter(
            folder.checkpoints,
            Retention(config.train.keep_checkpoints, config.train.keep_every),
            in_background=config.train.async_checkpoints,
            published=ledger.checkpoint,
        ),
        average=WeightAverage(engine, config.train.ema_decay, resumed) if config.train.ema_decay else None,
        noise_variance=NoiseVariance(
            config.optimizer.betas[1], resumed.manifest["noise_variance"] if resumed is not None else 0.0
        ),
        model_facts={
            **task.facts(),
            "initialisation": start,
            "training_data": training_data_facts(config, table, resumed),
        },
    )
    chosen = {"clipping_mode": choice.facts()} if choice is not None else {}
    on_main(lambda: folder.record_configuration(to_toml(config), dict(machine.raw), chosen))
    if ranks.is_main:
        _announce(run, ranks, engine_name, machine)
        if choice is not None:
            print(choice.sentence, flush=True)
    outcome = fit(run)
    if outcome == DONE:
        ledger.close_run()
    if ranks.is_main:
        _conclude(run, outcome)
    return outcome


def _loader(
    config: RunConfig,
    task: TrainingTask,
    table: ExampleTable,
    root: Path,
    ranks: Ranks,
    device: torch.device,
    first_step: int,
) -> Loader | StreamingLoader:
    """Random access by the sampler's draw; public data may also stream in the order of their shards."""
    make_example, pin_memory = task.make_example(train=True), device.type == "cuda"
    if config.data.streaming:
        return StreamingLoader(
            Stream(first_on_main(lambda: expand_shards(config.data.shards, root)), seed=config.train.seed),
            make_example,
            micro_batch_size=config.train.micro_batch_size,
            batch_size=config.privacy.expected_batch_size,
            num_workers=config.data.num_workers,
            rank=ranks.rank,
            world_size=ranks.world_size,
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
        bucket_captions=config.data.bucket_captions,
    )


def _clipped_sum(
    config: RunConfig, plan: PrivacyPlan, task: TrainingTask, engine: Engine, resumed: Checkpoint | None
) -> tuple[ClippedSum, ModeChoice | None]:
    """The clipper, and how its mode was chosen where the recipe leaves that to the memory. Collective."""
    privacy, micro_batch_size = config.privacy, config.train.micro_batch_size
    clipped = ClippedSum(
        engine.module,
        privacy.max_grad_norm if privacy.enabled else float("inf"),
        shapes=engine.shapes,
        mode="bookkeeping" if privacy.clipping_mode == "auto" else privacy.clipping_mode,
        accumulator=ShardedSums if config.train.accumulation == "sharded" else LocalSums,
        device=engine.device,
        function=FUNCTIONS[privacy.clipping_function if privacy.enabled else "flat"],
        adaptive=plan.adaptive_clipping,
    )
    if plan.adaptive_clipping is not None and resumed is not None:
        clipped.max_grad_norm = resumed_bound(resumed.manifest, plan.max_grad_norm)
    choice = None
    if privacy.clipping_mode == "auto":
        rows = math.ceil(plan.max_batch_size / distributed.world_size())
        choice = choose_mode(clipped, engine, task.synthetic_inputs, micro_batch_size, rows)
    if clipped.mode == "two_pass" or _cuts_vocabulary(engine.module, micro_batch_size, config.data.num_tokens):
        clipped.check_repeatable(engine.module, to_device(task.synthetic_inputs(micro_batch_size), engine))
    return clipped, choice


def _cuts_vocabulary(module: nn.Module, micro_batch_size: int, num_tokens: int) -> bool:
    """Whether the scores of the vocabulary are computed again for norm and sum: that must repeat to the last bit too."""
    hidden_BLD = torch.empty(micro_batch_size, num_tokens - 1, 1, device="meta")
    return any(m.num_chunks(hidden_BLD) > 1 for m in module.modules() if isinstance(m, VocabularyHead))


def _take(folder: RunFolder) -> None:
    folder.create()
    folder.lock()
    folder.stop.unlink(missing_ok=True)


def _heldout(config: RunConfig, folder: RunFolder, task: TrainingTask, root: Path) -> Heldout | None:
    table = heldout_table(config, folder, root)
    if table is None or config.heldout is None:
        return None
    return Heldout(
        table, task, num_examples=config.heldout.num_examples, micro_batch_size=config.train.micro_batch_size
    )


def _start(config: RunConfig, model: nn.Module, table: ExampleTable, root: Path) -> dict[str, Any]:
    """Sets the initial weights; returns what manifests say about them."""
    init = config.init
    if init is None:
        return {"kind": "random", "seed": config.train.seed}
    checkpoint = first_on_main(lambda: find_checkpoint(init, root))
    facts = first_on_main(lambda: initialisation_facts(config, checkpoint, table))
    return {**facts, "at_random": load_start(checkpoint, init, model)}


def _load_weights(folder: RunFolder, ledger: RunLedger, model: nn.Module | None) -> Checkpoint | None:
    """The newest whole checkpoint, its weights set; refuses one that knows more of the ledger than the ledger itself.

    A model that was built in shards (None here) takes its weights with the engine's state, piece by piece.
    """
    checkpoint = newest_whole(folder.checkpoints, ledger.require_not_shorter_than)
    if checkpoint is not None and not checkpoint.manifest.get("ledger"):
        raise PrivacyStateRefused(
            f"{checkpoint.path} remembers no line of this run's ledger, so it was not written by this run: take it away; "
            "weights from elsewhere are for [init]"
        )
    if checkpoint is not None and model is not None:
        checkpoint.load_weights(model)
    return checkpoint


def _announce(run: Run, ranks: Ranks, engine_name: str, machine: MachineSettings) -> None:
    plan = run.plan
    count = sum(shape.numel() for shape in run.engine.shapes.values())
    sharding = f"ZeRO-{machine.stage}" if engine_name == "deepspeed" else engine_name
    hosts = distributed.hosts()
    where = (
        f" on {len(hosts)} hosts ({', '.join(hosts[:8])}{' ...' if len(hosts) > 8 else ''})" if len(hosts) > 1 else ""
    )
    print(
        f"{run.config.name}: {count / 1e6:.1f}M parameters, {ranks.world_size} ranks{where}, {sharding}, "
        f"{run.engine.compute_dtype}"
    )
    print(
        f"logical batch {plan.expected_batch_size} of {plan.num_examples} (q = {plan.sample_rate:.4g}), "
        f"C = {plan.max_grad_norm:g}, sigma = {plan.noise_multiplier:.4f}, "
        f"{plan.num_steps} steps and {plan.reserved_attempts} reserved attempts"
    )
    for warning in plan.warnings:
        print(f"warning: {warning}")
    if plan.formal_guarantee:
        print(
            f"epsilon planned {run.ledger.epsilon(plan.num_steps):.3f}, with the whole reserve "
            f"{run.ledger.epsilon(plan.max_intents):.3f}, at delta {plan.target_delta:.3g}"
        )
    else:
        print(f"formal_guarantee: false ({'; '.join(plan.reasons)}); no epsilon is claimed")
    if run.first_step > 1:
        print(f"resuming after step {run.first_step - 1}; {run.ledger.num_charged} attempts are charged")
    print("", end="", flush=True)


def _conclude(run: Run, outcome: int) -> None:
    epsilon = run.ledger.epsilon()
    claim = (
        f"epsilon {epsilon:.4f} at delta {run.plan.target_delta:g}" if epsilon is not None else "no formal guarantee"
    )
    said = {
        DONE: f"done: {run.plan.num_steps} steps, {claim}",
        BUDGET_SPENT: f"stopped: the budget of {run.plan.max_intents} attempts is spent and steps remain; {claim}",
        STOPPED_EARLY: f"stopped on request; the same command resumes; {claim}",
    }
    print(f"{said[outcome]}; run folder {run.folder.root}", flush=True)
