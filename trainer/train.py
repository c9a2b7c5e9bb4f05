"""Builds a run from its configuration, in the order in which things can be refused, and trains it."""

import hashlib
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from data.batch import Batch
from data.errors import DataError
from data.examples import CaptionExample
from data.loader import Loader
from data.shards import common_root, expand_shards
from data.tar_index import MANIFEST, ExampleTable, build_index
from data.tokenizer import CaptionTokenizer
from models.captioner import Captioner, build_captioner
from models.config import CaptionerConfig, captioner_config
from privacy.clipping import ClippedSum
from privacy.clipping.functions import FUNCTIONS
from privacy.clipping.selfcheck import check_against_autograd
from privacy.noise import NoiseSource, noise_source
from trainer.audit_members import MembersLog
from trainer.batches import LogicalBatches
from trainer.checkpoint import Checkpoint, newest_checkpoint
from trainer.config import EngineName, RunConfig, to_toml
from trainer.distributed import Ranks, first_on_main, on_main
from trainer.ds_config import MachineSettings
from trainer.engines import build_engine
from trainer.engines.base import Engine
from trainer.heldout import Heldout, to_device
from trainer.loop import BUDGET_SPENT, DONE, STOPPED_EARLY, fit
from trainer.run import Run, resolve_path
from trainer.run_folder import RunFolder
from trainer.run_ledger import RunLedger, open_run_ledger


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
    folder = RunFolder(run_dir)
    on_main(lambda: _take(folder))
    model_config = first_on_main(lambda: _model_config(config, root))
    model = build_captioner(model_config, generator=torch.Generator().manual_seed(config.train.seed))
    check_against_autograd(model, _synthetic_inputs(model_config))
    heldout = _heldout(config, folder, root)
    table = _training_table(config, folder, root)  # last of these: hashing a large data set takes hours
    ledger = open_run_ledger(folder, config.privacy, config.train.num_steps, table)
    resumed = _load_weights(folder, ledger, model)
    first_step = resumed.step + 1 if resumed is not None else 1
    if ledger.is_closed:
        if ranks.is_main:
            print(f"{run_dir} is finished: all {config.train.num_steps} steps are done; nothing to do", flush=True)
        return DONE
    engine = build_engine(engine_name, model, config.optimizer, machine, device, config.train.micro_batch_size)
    if resumed is not None:
        resumed.restore(engine)
    nonce = ledger.start_session()
    run = Run(
        config=config,
        folder=folder,
        plan=ledger.plan,
        ledger=ledger,
        engine=engine,
        clipped=_clipped_sum(config, model_config, engine),
        noise=noise or noise_source(ledger.plan.noise_source),
        batches=LogicalBatches(
            ledger.plan.sampler,
            ledger.plan.expected_batch_size,
            ledger.key,
            nonce,
            ledger.attempts,
            config.train.micro_batch_size,
        ),
        members=MembersLog(folder.private, ledger.key, nonce),
        loader=Loader(
            table,
            _make_example(config, root, train=True),
            micro_batch_size=config.train.micro_batch_size,
            num_workers=config.data.num_workers,
            pin_memory=device.type == "cuda",
        ),
        heldout=heldout,
        first_step=first_step,
        model_facts=_model_facts(config, model_config, root),
    )
    on_main(lambda: folder.record_configuration(to_toml(config), dict(machine.raw)))
    if ranks.is_main:
        _announce(run, ranks, engine_name, machine)
    outcome = fit(run)
    if outcome == DONE:
        ledger.close_run()
    if ranks.is_main:
        _conclude(run, outcome)
    return outcome


def _clipped_sum(config: RunConfig, model_config: CaptionerConfig, engine: Engine) -> ClippedSum:
    privacy = config.privacy
    clipped = ClippedSum(
        engine.module,
        privacy.max_grad_norm if privacy.enabled else float("inf"),
        shapes=engine.shapes,
        mode=privacy.clipping_mode,
        function=FUNCTIONS[privacy.clipping_function if privacy.enabled else "flat"],
    )
    if privacy.clipping_mode == "two_pass":
        inputs = _synthetic_inputs(model_config)
        clipped.check_repeatable(engine.module, to_device(Batch(inputs, torch.zeros(2, dtype=torch.bool)), engine))
    return clipped


def _take(folder: RunFolder) -> None:
    folder.create()
    folder.lock()
    folder.stop.unlink(missing_ok=True)


def _training_table(config: RunConfig, folder: RunFolder, root: Path) -> ExampleTable:
    shards = first_on_main(lambda: expand_shards(config.data.shards, root))
    if config.data.index is None:
        index = folder.index
        on_main(lambda: _index_once(shards, index))
    else:
        index = resolve_path(config.data.index, root)
    table = first_on_main(lambda: _open_table(index, shards))
    if len(table) == 0:
        raise DataError(f"{config.data.shards} holds no examples")
    return table


def _index_once(shards: list[Path], index: Path) -> None:
    if not (index / MANIFEST).exists():  # without it an earlier start was cut short
        shutil.rmtree(index, ignore_errors=True)
        build_index(shards, index, progress=True)


def _open_table(index: Path, shards: list[Path]) -> ExampleTable:
    """The index, if it is one of exactly these shards: a changed pattern must never train on yesterday's files."""
    folder = common_root(shards)
    table = ExampleTable.open(index, folder)
    wanted, indexed = {str(s.relative_to(folder)) for s in shards}, {entry.name for entry in table.entries}
    if wanted != indexed:
        raise DataError(
            f"the index {index} is of other shards than those asked for (first difference: {min(wanted ^ indexed)}); "
            "build one for these shards with prepare.py index, or choose another run folder"
        )
    return table


def _heldout(config: RunConfig, folder: RunFolder, root: Path) -> Heldout | None:
    if config.heldout is None:
        return None
    heldout, data = config.heldout, config.data
    shards = first_on_main(lambda: expand_shards(heldout.shards, root))
    private = {s.resolve() for s in first_on_main(lambda: expand_shards(data.shards, root))}
    if config.heldout.is_public and any(s.resolve() in private for s in shards):
        raise DataError("heldout.shards contains training shards, so it cannot be declared public (heldout.is_public)")
    index = folder.private / "heldout-index"
    on_main(lambda: _index_once(shards, index))
    return Heldout(
        _open_table(index, shards),
        _make_example(config, root, train=False),
        num_examples=config.heldout.num_examples,
        micro_batch_size=config.train.micro_batch_size,
    )


def _make_example(config: RunConfig, root: Path, *, train: bool) -> CaptionExample:
    return CaptionExample(
        config.data.image_size, config.data.num_tokens, resolve_path(config.data.tokenizer, root), train
    )


def _model_config(config: RunConfig, root: Path) -> CaptionerConfig:
    tokenizer = CaptionTokenizer.from_file(resolve_path(config.data.tokenizer, root))
    from_data = {
        "image_size": config.data.image_size,
        "num_tokens": config.data.num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "pad_id": tokenizer.pad_id,
        "bos_id": tokenizer.bos_id,
        "eos_id": tokenizer.eos_id,
    }
    return captioner_config(config.model.size, **{**config.model.overrides, **from_data})


def _synthetic_inputs(config: CaptionerConfig) -> dict[str, torch.Tensor]:
    """Two made-up pairs for the self-check."""
    generator = torch.Generator().manual_seed(0)
    size = config.encoder.image_size
    return {
        "images_BCHW": torch.randn(2, 3, size, size, generator=generator),
        "tokens_BL": torch.randint(0, config.vocab_size, (2, config.num_tokens), generator=generator),
        "token_mask_BL": torch.ones(2, config.num_tokens, dtype=torch.bool),
    }


def _load_weights(folder: RunFolder, ledger: RunLedger, model: Captioner) -> Checkpoint | None:
    """The newest checkpoint, its weights set; refuses one that knows more of the ledger than the ledger itself."""
    path = newest_checkpoint(folder.checkpoints)
    if path is None:
        return None
    checkpoint = Checkpoint(path)
    ledger.require_not_shorter_than(checkpoint.manifest["ledger"])
    checkpoint.load_weights(model)
    return checkpoint


def _model_facts(config: RunConfig, model_config: CaptionerConfig, root: Path) -> dict[str, Any]:
    tokenizer = resolve_path(config.data.tokenizer, root)
    return {
        "model": {"kind": "captioner", "size": config.model.size, **asdict(model_config)},
        "tokenizer_sha256": hashlib.sha256(tokenizer.read_bytes()).hexdigest(),
        "initialisation": {"kind": "random", "seed": config.train.seed},
    }


def _announce(run: Run, ranks: Ranks, engine_name: str, machine: MachineSettings) -> None:
    plan = run.plan
    count = sum(shape.numel() for shape in run.engine.shapes.values())
    sharding = f"ZeRO-{machine.stage}" if engine_name == "deepspeed" else engine_name
    print(
        f"{run.config.name}: {count / 1e6:.1f}M parameters, {ranks.world_size} ranks, {sharding}, {run.engine.compute_dtype}"
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
