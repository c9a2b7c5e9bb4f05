"""The audit of the mechanism: a correct one passes, and each deliberate mistake is found by the checks meant for it."""

import shutil
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from privacy.adaptive_clipping import AdaptiveClipping
from privacy.audit.canary_model import CROWD, PLACES, make_canaries
from privacy.audit.report import AuditReport
from privacy.audit.sandbox import SandboxFailed, loop_side, run_sandbox
from privacy.ledger.ledger import Ledger
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from privacy.step import collectives
from tests.distributed.ranks import ROOT, run_ranks
from tests.trainer.broken_mechanisms import MISTAKES, broken
from trainer.audit.sandbox import mechanism_audit, trainer_side
from trainer.config.recipe import RunConfig, load_config, to_toml

SETTINGS: dict[str, dict[str, Any]] = {
    "plain": {},
    "loop": {},
    "several ranks": {},
    "adaptive": {"adaptive_clipping": AdaptiveClipping(0.5, 0.2, 5.0)},
    "certified": {"arithmetic": "certified", "sensitivity_slack": 0.0},
}


def recipe(*overrides: str) -> RunConfig:
    return load_config(ROOT / "recipes/quickstart.toml", ["train.micro_batch_size=64", *overrides])


def plan(**changed: Any) -> PrivacyPlan:
    fields = {
        "num_examples": 3000, "expected_batch_size": 256, "num_steps": 120, "target_delta": 1e-5, "noise_multiplier": 1.1,
        "max_grad_norm": 1.0, "sensitivity_slack": 1e-3,
    }  # fmt: skip
    return make_plan(PlanRequest(**fields | changed))


def audit(
    device: torch.device,
    names: tuple[str, ...] = ("none",),
    setting: str = "plain",
    steps: int = 10,
    overrides: tuple[str, ...] = (),
    machine: str = "zero3.json",
    **changed: Any,
) -> dict[str, AuditReport]:
    """One sandbox after the other, each with a mistake, on the ranks of this process group; reports on rank 0."""
    reports, own = {}, plan(**SETTINGS[setting] | changed)
    if own.arithmetic == "certified":
        overrides = (*overrides, 'privacy.arithmetic="certified"')
    size: dict[str, Any] = {"num_single": 256, "silent_steps": 4, "noisy_steps": steps}
    for name in names:
        folder = Path(collectives.on_main(lambda: tempfile.mkdtemp()))
        with broken(name) as source:
            side = trainer_side(recipe(*overrides), "local", ROOT / "ds_configs" / machine)
            side = loop_side("Adam") if setting == "loop" else side
            report = run_sandbox(own, side, folder, 64, source=source, **size)
        if report is not None:
            reports[name] = report
            shutil.rmtree(folder)
    return reports


def require_found(report: AuditReport, name: str) -> None:
    assert report.verdict == "violated" and report.exit_code == 5
    assert MISTAKES[name].found_by <= set(report.failed()), report.to_text()


def require_consistent(report: AuditReport) -> None:
    assert report.verdict == "consistent", report.to_text()
    assert 0 < report.false_alarm_rate < 1e-3


def planted(*settings: str) -> list[Any]:
    """The names of mistakes in these settings; those that are not quick are left to `make test-all`."""
    chosen = {name: mistake for name, mistake in MISTAKES.items() if mistake.setting in settings}
    return [pytest.param(n, marks=[] if m.is_quick else pytest.mark.full) for n, m in chosen.items()]


@pytest.mark.parametrize("name", planted("plain", "loop", "adaptive"))
def test_a_mistake_is_found(one_rank: torch.device, name: str) -> None:
    require_found(audit(one_rank, (name,), MISTAKES[name].setting)[name], name)


def test_a_correct_mechanism_passes_where_the_size_of_a_folder_follows_its_names(
    one_rank: torch.device, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """On tmpfs, XFS and Btrfs a folder shrinks when a temporary name goes; the ledger's own name is durable all the same."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))  # in memory, where there is room (tests/conftest.py)
    before = tmp_path.stat().st_size
    (tmp_path / "name").touch()
    if tmp_path.stat().st_size == before:
        pytest.skip(f"on the file system of {tmp_path} a folder keeps its size")
    require_consistent(audit(one_rank)["none"])


def test_single_precision_shows_in_every_sandbox_and_sums_of_64_in_none() -> None:
    """Where it holds the sums of a crowd, `sums_are_single` changes nothing, and a sandbox could not find it."""
    canaries, rng = make_canaries(256, 1.0), np.random.default_rng(0)
    gains_ND = canaries.gains_NG[canaries.crowd_N][:, [PLACES.index(place) for place in CROWD]].astype(np.float64)
    for _ in range(40):
        sums_SD = (rng.random((5, len(gains_ND))) < 0.25).astype(np.float64) @ gains_ND
        assert (sums_SD.astype(np.float32) != sums_SD).any()
        few_ND = rng.permutation(gains_ND)[:64, [place in ("matrix", "conv") for place in CROWD]]
        assert (few_ND.astype(np.float32).cumsum(axis=0) == few_ND.cumsum(axis=0)).all()


OF_SEVERAL_RANKS = tuple(name for name, m in MISTAKES.items() if m.setting == "several ranks" and m.is_quick)


@pytest.fixture(scope="module")
def two_ranks() -> dict[str, AuditReport]:
    """Everything that needs several ranks, in one start of them."""
    return run_ranks(f"{__name__}:audit", 2, timeout=280, names=("none", *OF_SEVERAL_RANKS))[0]


def test_a_correct_mechanism_passes_on_two_ranks(two_ranks: dict[str, AuditReport]) -> None:
    require_consistent(two_ranks["none"])


@pytest.mark.parametrize("name", OF_SEVERAL_RANKS)
def test_a_mistake_of_several_ranks_is_found(two_ranks: dict[str, AuditReport], name: str) -> None:
    require_found(two_ranks[name], name)


FULL = pytest.mark.full


@pytest.mark.parametrize(
    ("steps", "changed"),
    [
        pytest.param(10, {"clipping_function": "automatic"}, id="automatic", marks=FULL),
        pytest.param(10, {"clipping_function": "per_layer"}, id="per layer", marks=FULL),
        pytest.param(10, {"clipping_function": "grouped"}, id="grouped", marks=FULL),
        pytest.param(10, {"noise_multiplier": 0.5, "max_grad_norm": 0.1}, id="small C", marks=FULL),
        pytest.param(10, {"max_grad_norm": 30.0}, id="large C", marks=FULL),
    ],
)
def test_a_correct_mechanism_passes(one_rank: torch.device, steps: int, changed: dict[str, Any]) -> None:
    require_consistent(audit(one_rank, steps=steps, **changed)["none"])


@pytest.mark.full
@pytest.mark.parametrize(
    ("setting", "overrides", "names"),
    [
        ("plain", ('privacy.clipping_mode="two_pass"',), ("each_layer_is_clipped_by_itself",)),
        ("plain", ('train.accumulation="sharded"',), ("the_last_micro_batch_replaces_the_others",)),
        ("several ranks", (), ("every_rank_adds_the_whole_noise", "noise_is_divided_by_the_number_of_ranks")),
        ("certified", (), ("Replayed", "a_retry_has_the_same_members")),  # integers coincide by chance
        ("adaptive", (), ("OneSeed", "the_count_has_half_its_noise")),
    ],
)
def test_other_settings_on_two_ranks(setting: str, overrides: tuple[str, ...], names: tuple[str, ...]) -> None:
    arguments = {"names": ("none", *names), "setting": setting, "overrides": overrides}
    reports = run_ranks(f"{__name__}:audit", 2, timeout=600, **arguments)[0]
    require_consistent(reports["none"])
    for name in names:
        require_found(reports[name], name)


@pytest.mark.full
def test_compiled_blocks_are_audited_compiled(one_rank: torch.device) -> None:
    require_consistent(audit(one_rank, overrides=("train.compile=true",))["none"])


@pytest.mark.full
@pytest.mark.timeout(2400)
def test_no_false_alarm_in_a_hundred_correct_mechanisms(one_rank: torch.device) -> None:
    found: dict[str, list[float]] = {}
    for _ in range(100):
        report = audit(one_rank)["none"]
        require_consistent(report)
        for check in report.checks:
            if check.p_value is not None:
                found.setdefault(check.name, []).append(check.p_value)
    for name, p_values in found.items():
        low = sum(p < 0.05 for p in p_values)
        assert stats.binom.sf(low - 1, len(p_values), 0.05) > 1e-5, (name, low)


@pytest.mark.full
@pytest.mark.parametrize(
    ("engine", "machine"),
    [
        *((engine, machine) for engine in ("local", "fsdp") for machine in ("zero3", "zero3_bf16")),
        *(("fairscale", machine) for machine in ("zero1", "zero1_bf16")),
        *(("deepspeed", f"zero{stage}") for stage in (1, 2, 3)),
    ],
)
def test_every_engine_passes_at_full_size(tmp_path: Path, engine: str, machine: str) -> None:
    run = write_run(tmp_path)
    require_consistent(mechanism_audit(run, engine=engine, ds_config=ROOT / "ds_configs" / f"{machine}.json"))  # type: ignore[arg-type]


def test_a_rank_that_fails_is_named_with_its_error(tmp_path: Path) -> None:
    with pytest.raises(SandboxFailed, match=r"sandbox rank \d did not end well: .*broken\.json"):
        mechanism_audit(write_run(tmp_path), engine="local", ds_config=tmp_path / "broken.json", ranks=1)


def write_run(folder: Path) -> Path:
    """A run folder of which the audit needs plan and configuration alone."""
    (folder / "config.toml").write_text(to_toml(recipe()))
    fields = {"plan": plan().frozen_fields(), "key_commitment": "0" * 64}
    Ledger.create(folder / "ledger.jsonl", fields).release()
    return folder
