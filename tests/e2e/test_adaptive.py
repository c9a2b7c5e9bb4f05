"""Adaptive clipping by the real command: a crash after an update, a resume, and everything that was written agrees."""

import json
from pathlib import Path

import pytest

from privacy.audit.folder import ledger_audit
from privacy.files.public import read_metrics
from tests.e2e.launch import alone, count, ledger_lines, train_arguments
from trainer.report import build_card

CRASHING = "tests/e2e/crashing_train.py"
MORE = [
    "--engine",
    "local",
    "privacy.clipping_function=adaptive",
    "privacy.noise_multiplier=1",
    "heldout.num_captions=0",
]


@pytest.mark.full
def test_a_crash_and_a_resume_keep_the_bound_and_the_audit_agrees(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = train_arguments(run_dir, *MORE)
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
