"""The sandbox of an audit for a loop of one's own: its reader, its engine and its start, with the optimizer that the run had."""

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from ..card.folder import read_recipe
from ..loop.fields import Example, floats, integers
from ..loop.opening import OwnStart
from ..loop.reading import Reader
from ..plan import PrivacyPlan
from ..plan_request import PlanRequest
from ..step.folder import RunFolder
from .canary_model import EMBEDDING, KEY_BITS, PLACES, Canaries, CanaryModel, made_up
from .report import AuditReport
from .sandbox import Settings, Side, audited_plan, in_processes, ranks_of, run_sandbox

ENORMOUS = 2.0**40
ALIKE: dict[str, dict[str, Any]] = {
    "SGD": {"lr": 1.0},
    "RMSprop": {"lr": ENORMOUS, "eps": ENORMOUS, "alpha": 0.0},
    "Adam": {"lr": ENORMOUS, "eps": ENORMOUS, "betas": (0.0, 0.0)},
    "AdamW": {"lr": ENORMOUS, "eps": ENORMOUS, "betas": (0.0, 0.0), "weight_decay": 0.0},
}
"""Settings that make a step w -= gradient, up to rounding; for other optimizers SGD stands in."""


def is_of_a_loop(run_dir: Path) -> bool:
    """Whether a loop of one's own wrote the folder: its config.toml has no model."""
    return "model" not in read_recipe(run_dir)


def loop_audit(run_dir: Path, *, ranks: int | None = None) -> AuditReport:
    """Audits the mechanism of a loop of one's own; see `trainer.audit.sandbox.mechanism_audit`."""
    plan, config = audited_plan(run_dir), read_recipe(run_dir)
    work = partial(_rank, plan, config["train"]["micro_batch_size"], config["optimizer"]["name"])
    return in_processes(ranks or ranks_of(run_dir), work)


def _rank(
    plan: PrivacyPlan, micro_batch_size: int, optimizer: str, rank: int, ranks: int, port: int, folder: Path
) -> AuditReport | None:
    """One process of the sandbox."""
    if ranks > 1:
        dist.init_process_group("gloo", init_method=f"tcp://127.0.0.1:{port}", rank=rank, world_size=ranks)
    settings = Settings.of(plan, micro_batch_size, ranks, f"a loop with {optimizer}")
    return run_sandbox(settings, loop_side(optimizer), folder)


def loop_side(optimizer: str) -> Side:
    """Starts of a loop with an optimizer of that class."""
    kind, number = optimizer if optimizer in ALIKE else "SGD", integers(EMBEDDING)

    def start(folder: Path, canaries: Canaries, request: PlanRequest, micro_batch_size: int) -> OwnStart:
        model, who = CanaryModel(), {"canaries_B": integers(len(canaries)), "keys_B": integers(KEY_BITS)}
        example = Example({"gains_BG": floats(len(PLACES)), "rows_B": number, "columns_B": number, **who})
        return OwnStart(
            model=model, optimizer=getattr(torch.optim, kind)(model.parameters(), **ALIKE[kind]), loss=model, request=request,
            reader=Reader(canaries, example, micro_batch_size), folder=RunFolder(folder / "run"), made_up=made_up(4),
            learning_rate=None, num_workers=0, save_every=None, data_version="canaries", mirror=None, unit="one canary",
            may_restart=False, starts_from=[], fallback=False,
        )  # fmt: skip

    return start
