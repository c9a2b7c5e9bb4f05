"""Options by the real command: adaptive clipping and certified arithmetic through crashes, and train.compile.

Whatever was written agrees after a crash and a resume: ledger, manifest, metrics, card and audits.
"""

import json
import shutil
from pathlib import Path

import pytest

from privacy.audit.folder import ledger_audit
from privacy.ledger.records import read_ledger
from tests.e2e.launch import alone, count, launch, ledger_lines, train_arguments
from tests.e2e.test_kill import check_chain, check_nothing_is_shared
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.published import read_metrics
from trainer.report import build_card

CRASHING = "tests/e2e/crashing_train.py"
ADAPTIVE = ["privacy.clipping_function=adaptive", "privacy.noise_multiplier=1", "heldout.num_captions=0"]
CERTIFIED = ["privacy.arithmetic=certified", "heldout.num_captions=0", "train.sanity_checks=true"]
COMPILE = "train.compile=true"
needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)


@pytest.mark.full
def test_adaptive_clipping_keeps_its_bound_through_a_crash_and_a_resume(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = train_arguments(run_dir, "--engine", "local", *ADAPTIVE)
    # Dies before the third `done`: C of step 4 was computed, but never saved.
    crashed = alone(["before_done", "3", *arguments], script=CRASHING, NOISE_LOG=str(tmp_path / "noise"))
    assert crashed.returncode < 0, crashed.stdout + crashed.stderr
    saved = json.loads((run_dir / "checkpoints" / "step-00000002" / "manifest.json").read_text())["clipping_bound"]
    resumed = alone(arguments)
    assert resumed.returncode == 0, resumed.stdout + resumed.stderr
    assert "clipping mode bookkeeping (auto)" in resumed.stdout

    bounds = [(r["step"], r["releases"][0]["sensitivity"]) for r in ledger_lines(run_dir) if r["type"] == "intent"]
    assert [step for step, _ in bounds] == [1, 2, 3, 3, 4] and count(run_dir, "done") == 4
    assert bounds[2][1] == bounds[3][1] == saved, "the retry clips to the very same bound"
    assert len({bound for _, bound in bounds}) == 4
    published = [line for line in read_metrics(run_dir) if "privacy/clipping_bound" in line]
    said = [line["privacy/clipping_bound"] for line in published][-2:]
    assert said == pytest.approx([bounds[3][1], bounds[4][1]], rel=2**-23), "public numbers are rounded to fp32"
    report = ledger_audit(run_dir)
    assert report.verdict == "consistent", report.to_text()
    assert build_card(run_dir).mechanism.adaptive_clipping.last_bound == bounds[-1][1]


@pytest.mark.full
@pytest.mark.parametrize(("engine", "accumulation"), [("local", "local"), ("deepspeed", "sharded")])
def test_certified_arithmetic_keeps_account_card_and_audit_through_kills(
    tmp_path: Path, engine: str, accumulation: str
) -> None:
    run_dir, noise = tmp_path / "run", str(tmp_path / "run.noise")
    arguments = train_arguments(run_dir, "--engine", engine, *CERTIFIED, f"train.accumulation={accumulation}")
    for point, passage in (("before_noise", "3"), ("before_done", "2")):
        crashed = alone([point, passage, *arguments], script=CRASHING, NOISE_LOG=noise)
        assert crashed.returncode == -9, crashed.stdout + crashed.stderr
    done = alone(arguments, script="tests/e2e/recording_train.py", NOISE_LOG=noise)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "certified arithmetic: sums are multiples of 2^-31" in done.stdout

    check_chain(run_dir)
    check_nothing_is_shared(run_dir)
    assert count(run_dir, "intent") > count(run_dir, "done") >= 4
    opened = ledger_lines(run_dir)[0]["plan"]
    assert (opened["arithmetic"], opened["lattice_exponent"], opened["sensitivity_slack"]) == ("certified", 31, 0.0)
    charged, epsilon = recompute(run_dir / "ledger.jsonl")
    state = read_ledger(run_dir / "ledger.jsonl")
    assert charged == state.num_charged and state.epsilon() == pytest.approx(epsilon, rel=1e-6)
    report = ledger_audit(run_dir)
    assert report.verdict == "consistent", report.to_text()
    mechanism = build_card(run_dir).mechanism
    assert (mechanism.arithmetic, mechanism.noise_multiplier_accounted) == ("certified", mechanism.noise_multiplier)
    other = alone([a for a in arguments if a != CERTIFIED[0]])
    assert other.returncode == 2 or other.returncode == 4, other.stdout + other.stderr
    assert "arithmetic" in other.stderr and "Traceback" not in other.stderr


def test_compilation_under_zero_3_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    result = alone(train_arguments(tmp_path / "run", COMPILE))
    assert result.returncode == 2
    assert "train.compile" in result.stderr and "ZeRO-3" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@needs_compiler
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_compiled_blocks_and_a_vocabulary_by_chunks_on_two_ranks(tmp_path: Path) -> None:
    """Two passes, activation checkpointing off; the head is cut into several chunks at this micro-batch size."""
    run_dir = tmp_path / "run"
    more = [COMPILE, "model.overrides.max_logits=40000", "privacy.clipping_mode=two_pass"]
    result = launch(train_arguments(run_dir, *more, ds_config="ds_configs/zero1.json"), timeout=1400)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert [line["type"] for line in ledger_lines(run_dir)].count("done") == 4
