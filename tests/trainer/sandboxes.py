"""Sandboxes of the audit of the mechanism, small ones; and what one of them noted, to be judged again."""

from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple
from unittest import mock

import torch

from privacy.audit.audit_report import AuditReport
from privacy.plan.numbers import PrivacyPlan, make_plan
from privacy.plan.request import PlanRequest
from privacy.run.run import Run
from tests.processes import ROOT
from tests.trainer.broken_mechanisms import MISTAKES, broken
from trainer.audit import sandbox
from trainer.audit.judge import Judge
from trainer.audit.mechanism import trainer_side
from trainer.audit.sandbox import loop_side, run_sandbox
from trainer.config.recipe import RunConfig, load_config

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loop": {},
    "several ranks": {},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
}


def recipe(*overrides: str) -> RunConfig:
    return load_config(ROOT / "recipes/quickstart.toml", ["train.micro_batch_size=64", *overrides])


def plan(**changed: Any) -> PrivacyPlan:
    fields = {
        "num_examples": 3000,
        "expected_batch_size": 256,
        "num_steps": 120,
        "target_delta": 1e-5,
        "noise_multiplier": 1.1,
        "max_grad_norm": 0.8,
        "sensitivity_slack": 1e-3,
    }
    return make_plan(PlanRequest(**fields | changed))


def audit(
    device: torch.device,
    folder: Path,
    names: tuple[str, ...] = ("none",),
    setting: str = "plain",
    steps: int = 4,
    overrides: tuple[str, ...] = ('privacy.clipping_mode="bookkeeping"',),
    machine: str = "zero3.json",
    **changed: Any,
) -> dict[str, AuditReport]:
    """One sandbox after the other, each with mistakes, on the ranks of this process group; reports on rank 0.

    Args:
        folder: gets a folder for each of them.
        names: of mistakes; "one+other" makes both of them in the same sandbox.
        steps: noisy ones, behind four that are silent.
    """
    reports = {}
    audited = plan(**SETTINGS[setting] | changed)
    if audited.arithmetic == "certified":
        overrides = (*overrides, 'privacy.arithmetic="certified"')
    for number, name in enumerate(names):
        place = folder / f"sandbox-{number}"
        place.mkdir(exist_ok=True)  # by whichever rank comes first
        side = loop_side("Adam") if setting == "loop" else None
        side = side or trainer_side(recipe(*overrides), "local", ROOT / "ds_configs" / machine)
        with broken(*name.split("+")) as source:
            report = run_sandbox(
                audited,
                side,
                place,
                64,
                num_single=256,
                silent_steps=4,
                noisy_steps=steps,
                source=source,
            )
        if report is not None:
            reports[name] = report
    return reports


class Evidence(NamedTuple):
    """What a judge is given, in the order of its parameters; of the run what a judge reads of it."""

    audited: PrivacyPlan
    run: Any
    tapes: list[tuple[list[dict[str, Any]], list[sandbox.Fsync]]]
    micro_batches: tuple[int, ...]
    canaries: Any
    present_N: Any

    def judge(self) -> Judge:
        return Judge(*self)


def recorded(device: torch.device, folder: Path) -> tuple[AuditReport, Evidence] | None:
    """An honest sandbox's report and what another process can judge again; on rank 0."""
    kept = []

    def keep(audited: PrivacyPlan, run: Run, *others: Any) -> Judge:
        engine = run.engine
        layout = SimpleNamespace(pieces=engine.layout.pieces)
        seen = SimpleNamespace(
            compute_dtype=engine.compute_dtype, shapes=engine.shapes, layout=layout
        )
        part = SimpleNamespace(
            plan=run.plan,
            engine=seen,
            folder=SimpleNamespace(ledger=run.folder.ledger, key=run.folder.key),
            ledger=SimpleNamespace(opened=run.ledger.opened),
        )
        kept.append(Evidence(audited, part, *others))
        return kept[0].judge()

    with mock.patch.object(sandbox, "Judge", keep):
        reports = audit(device, folder)
    return (reports["none"], kept[0]) if kept else None


def require_consistent(report: AuditReport) -> None:
    assert report.verdict == "consistent", report.to_text()
    assert 0 < report.false_alarm_rate < 1e-3


def require_found(report: AuditReport, names: str) -> None:
    """By all checks whose claims the mistakes break, and by no other."""
    expected = [MISTAKES[name].found_by for name in names.split("+")]
    assert report.verdict == "violated" and report.exit_code == 5
    assert set(report.failed()) == set().union(*expected), report.to_text()
    assert sum(map(len, expected)) == len(report.failed()), (
        "a check that sees two mistakes would hide one of them"
    )
