"""The part of the trainer that `audit.py mechanism` runs in its sandbox (sandbox.py has the rest).

A start of training is opened from the run's own configuration: its engine's settings, dtype,
offload, activation checkpointing, micro-batch, accumulation, compilation and clipping mode. Task,
data and optimizer are the sandbox's.
"""

import json
import math
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from data.index.tar_writer import write_shard
from privacy.audit.audit_report import AuditReport
from privacy.plan.numbers import PrivacyPlan
from privacy.plan.request import PlanRequest
from privacy.ranks import collectives
from privacy.step.run_folder import RunFolder
from trainer.audit.canary_model import Canaries, CanaryModel, made_up
from trainer.audit.sandbox import (
    Side,
    audited_plan,
    in_processes,
    is_of_a_loop,
    loop_audit,
    ranks_of,
    run_sandbox,
)
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import EngineName, RunConfig, load_config
from trainer.config.sections import OptimizerSection, ScheduleSection
from trainer.ranks import distributed
from trainer.ranks.discovery import Ranks
from trainer.run.start import TrainerStart
from trainer.tasks import TrainingTask

ROOT = Path(__file__).resolve().parents[2]


def mechanism_audit(
    run_dir: Path, *, engine: EngineName, ds_config: Path | None, ranks: int | None = None
) -> AuditReport:
    """Audits the mechanism with the settings of a run, or of a loop of one's own (about a minute).

    Args:
        engine: the caller's engine, since a run may change its engine.
        ranks: by default those of the run's last step, up to four.

    Raises:
        ConfigError: the folder has no run, or a run without noise.
        SandboxFailed: a rank died.
    """
    plan = audited_plan(run_dir)
    if is_of_a_loop(run_dir):
        return loop_audit(run_dir, ranks=ranks)
    recipe = load_config(run_dir / "config.toml")
    choices = run_dir / "private/chosen.json"
    if recipe.privacy.clipping_mode == "auto" and choices.exists():
        # On so small a model "auto" might choose another mode than in the run.
        mode = json.loads(choices.read_text()).get("clipping_mode", {}).get("mode", "auto")
        recipe = _changed(recipe, privacy={"clipping_mode": mode})
    if ds_config is None:
        ds_config = run_dir / "ds_config.json"
        if not ds_config.exists():
            ds_config = ROOT / "ds_configs" / "zero3.json"
    work = partial(_rank, plan, recipe, engine, ds_config.resolve())
    return in_processes(ranks or ranks_of(run_dir), work, distributed.finish)


def _rank(
    plan: PrivacyPlan,
    recipe: RunConfig,
    engine: EngineName,
    ds_config: Path,
    folder: Path,
    *place: int,
) -> AuditReport | None:
    """Runs one process of the sandbox."""
    rank, ranks, port = place
    distributed.start(Ranks(rank, rank, ranks, port=port))
    sums = f"{recipe.train.accumulation} sums"
    if recipe.train.compile:
        sums += ", compiled"
    return run_sandbox(
        plan,
        trainer_side(recipe, engine, ds_config),
        folder,
        recipe.train.micro_batch_size,
        words=f"engine {engine}, {sums}, {ds_config.name}",
    )


def _changed(recipe: RunConfig, **sections: Any) -> RunConfig:
    """Returns a recipe with other sections; a dictionary changes keys of a section."""
    changes = {}
    for name, section in sections.items():
        if isinstance(section, dict):
            changes[name] = getattr(recipe, name).model_copy(update=section)
        else:
            changes[name] = section
    return recipe.model_copy(update=changes)


def trainer_side(recipe: RunConfig, engine: EngineName, ds_config: Path) -> Side:
    """Returns the function that makes starts of training on the canaries' shard."""

    def start(
        folder: Path, canaries: Canaries, request: PlanRequest, micro_batch_size: int
    ) -> TrainerStart:
        shard = folder / "canaries-000000.tar"
        numbers = (
            (f"canary-{number:06d}", {"txt": str(number).encode()})
            for number in range(len(canaries))
        )
        collectives.on_main(lambda: None if shard.exists() else write_shard(shard, numbers))
        if recipe.optimizer.name == "sgd":
            optimizer = OptimizerSection.model_construct(name="sgd", peak_lr=1.0, momentum=0.0)
        else:
            # A power of two above any gradient: then w -= lr * g / (|g| + eps) is w -= g up to
            # rounding. No recipe may have so large a rate.
            exponent = 33 + max(0, math.ceil(math.log2(request.max_grad_norm)))
            enormous = 2.0**exponent
            optimizer = OptimizerSection.model_construct(
                peak_lr=enormous, betas=(0.0, 0.0), eps=enormous
            )
        data_section = {
            "shards": str(shard),
            "num_workers": min(1, recipe.data.num_workers),
            "provenance": "private",
            "index": None,
            "num_examples": None,
            "staging": None,
        }
        train_section = {
            "num_steps": request.num_steps,
            "micro_batch_size": micro_batch_size,
            "ema_decay": None,
            "profile": None,
            "keep_every": None,
        }
        sandbox_recipe = _changed(
            recipe,
            init=None,
            heldout=None,
            schedule=ScheduleSection(decay="constant"),
            optimizer=optimizer,
            data=data_section,
            privacy={"ledger_mirror": None, "shared_ledger": None},
            train=train_section,
        )
        rank = collectives.rank()
        return _Start(
            sandbox_recipe,
            load_machine_settings(ds_config),
            engine,
            RunFolder(folder / "run"),
            folder,
            Ranks(rank, rank, collectives.world_size()),
            torch.device("cpu"),
            None,
            False,
            canaries=canaries,
        )

    return start


@dataclass
class _Start(TrainerStart):
    """A start of training on canaries."""

    canaries: Canaries | None = None

    def make_task(self) -> None:
        assert self.canaries is not None
        self.task = CanaryTask(self.canaries)


class CanaryTask(TrainingTask):
    """The task of training the model of canaries."""

    kind = "canaries"
    loss_name = "loss"
    unit = "one canary"

    def __init__(self, canaries: Canaries) -> None:
        super().__init__(None, "canaries")
        self._canaries = canaries

    def build(
        self, generator: torch.Generator, *, module_hook: Any = None, one_block: bool = False
    ) -> Any:
        model = CanaryModel()
        if module_hook is not None:
            for module in model.modules():
                module_hook(module)
        return model

    def make_example(self, *, train: bool) -> Any:
        return self._canaries

    def synthetic_inputs(self, count: int) -> dict[str, Tensor]:
        return made_up(count)

    def skeleton(self) -> Any:
        with torch.device("meta"):
            return CanaryModel()

    def facts(self) -> dict[str, Any]:
        return {}
