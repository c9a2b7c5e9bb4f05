"""`audit.py mechanism`: what of the trainer the sandbox of an audit runs (sandbox.py has the rest).

A start of training is opened from the run's own configuration: its engine's settings, dtype, offload, activation checkpointing,
micro-batch, accumulation, compilation and clipping mode. Task, data and optimizer are the sandbox's.
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
from privacy.audit.report import AuditReport
from privacy.plan.numbers import PrivacyPlan
from privacy.plan.request import PlanRequest
from privacy.ranks import collectives
from privacy.step.folder import RunFolder
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
from trainer.config.optimizer import OptimizerSection, ScheduleSection
from trainer.config.recipe import EngineName, RunConfig, load_config
from trainer.ranks import distributed
from trainer.ranks.discovery import Ranks
from trainer.run.start import TrainerStart
from trainer.tasks import TrainingTask

ROOT = Path(__file__).resolve().parents[2]


def mechanism_audit(
    run_dir: Path, *, engine: EngineName, ds_config: Path | None, ranks: int | None = None
) -> AuditReport:
    """Audits the mechanism with the settings of a run (about a minute); of a loop of one's own too.

    Args:
        engine: the caller's, since a run may go from one to another.
        ranks: by default those of the run's last step, up to four.

    Raises:
        ConfigError: no run there, or one without noise.
        SandboxFailed: a rank died.
    """
    plan = audited_plan(run_dir)
    if is_of_a_loop(run_dir):
        return loop_audit(run_dir, ranks=ranks)
    config, recorded, chosen = (
        run_dir / name for name in ("config.toml", "ds_config.json", "private/chosen.json")
    )
    recipe = load_config(config)
    if (
        recipe.privacy.clipping_mode == "auto" and chosen.exists()
    ):  # on so small a model it might choose otherwise
        mode = json.loads(chosen.read_text()).get("clipping_mode", {}).get("mode", "auto")
        recipe = _changed(recipe, privacy={"clipping_mode": mode})
    machine = ds_config or (recorded if recorded.exists() else ROOT / "ds_configs" / "zero3.json")
    work = partial(_rank, plan, recipe, engine, machine.resolve())
    return in_processes(ranks or ranks_of(run_dir), work, distributed.finish)


def _rank(
    plan: PrivacyPlan,
    recipe: RunConfig,
    engine: EngineName,
    ds_config: Path,
    folder: Path,
    *place: int,
) -> AuditReport | None:
    """One process of the sandbox."""
    (rank, ranks, port), train = place, recipe.train
    distributed.start(Ranks(rank, rank, ranks, port=port))
    words = f"engine {engine}, {train.accumulation} sums{', compiled' if train.compile else ''}, {ds_config.name}"
    return run_sandbox(
        plan, trainer_side(recipe, engine, ds_config), folder, train.micro_batch_size, words=words
    )


def _changed(recipe: RunConfig, **sections: Any) -> RunConfig:
    """A recipe with other sections, or other keys of one."""
    new = {
        k: getattr(recipe, k).model_copy(update=v) if isinstance(v, dict) else v
        for k, v in sections.items()
    }
    return recipe.model_copy(update=new)


def trainer_side(recipe: RunConfig, engine: EngineName, ds_config: Path) -> Side:
    """Starts of training on the canaries' shard."""

    def start(
        folder: Path, canaries: Canaries, request: PlanRequest, micro_batch_size: int
    ) -> TrainerStart:
        shard = folder / "canaries-000000.tar"
        numbers = (
            (f"canary-{number:06d}", {"txt": str(number).encode()})
            for number in range(len(canaries))
        )
        collectives.on_main(lambda: None if shard.exists() else write_shard(shard, numbers))
        # A power of two above any gradient: then w -= lr * g / (|g| + eps) is w -= g up to rounding. It is above any recipe's.
        enormous = 2.0 ** (33 + max(0, math.ceil(math.log2(request.max_grad_norm))))
        optimizer = OptimizerSection.model_construct(
            peak_lr=enormous, betas=(0.0, 0.0), eps=enormous
        )
        if recipe.optimizer.name == "sgd":
            optimizer = OptimizerSection.model_construct(name="sgd", peak_lr=1.0, momentum=0.0)
        data = {
            "shards": str(shard),
            "num_workers": min(1, recipe.data.num_workers),
            "provenance": "private",
        }
        changed = _changed(
            recipe,
            init=None,
            heldout=None,
            schedule=ScheduleSection(decay="constant"),
            optimizer=optimizer,
            data=data | dict.fromkeys(("index", "num_examples", "staging")),
            privacy={"ledger_mirror": None, "shared_ledger": None},
            train={
                "num_steps": request.num_steps,
                "micro_batch_size": micro_batch_size,
                "ema_decay": None,
                "profile": None,
                "keep_every": None,
            },
        )
        place = Ranks(collectives.rank(), collectives.rank(), collectives.world_size())
        return _Start(
            changed,
            load_machine_settings(ds_config),
            engine,
            RunFolder(folder / "run"),
            folder,
            place,
            torch.device("cpu"),
            None,
            False,
            canaries=canaries,
        )

    return start


@dataclass
class _Start(TrainerStart):
    """Trains canaries."""

    canaries: Canaries | None = None

    def make_task(self) -> None:
        assert self.canaries is not None
        self.task = CanaryTask(self.canaries)


class CanaryTask(TrainingTask):
    """The model of canaries, as the trainer asks for one."""

    kind, loss_name, unit = "canaries", "loss", "one canary"

    def __init__(self, canaries: Canaries) -> None:
        super().__init__(None, "canaries")
        self._canaries = canaries

    def build(
        self, generator: torch.Generator, *, module_hook: Any = None, one_block: bool = False
    ) -> Any:
        model = CanaryModel()
        for module in model.modules() if module_hook is not None else ():
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
