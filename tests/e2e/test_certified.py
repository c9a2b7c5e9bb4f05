"""Certified arithmetic by the real command: kills, resumes, and an account that audits and a script of its own agree with."""

from pathlib import Path

import pytest

from privacy.audit.folder import ledger_audit
from privacy.ledger.records import read_ledger
from tests.e2e.launch import alone, count, ledger_lines, train_arguments
from tests.e2e.test_kill import check_chain, check_nothing_is_shared
from tests.privacy.ledger_epsilon import recompute
from trainer.report import build_card

MORE = ["privacy.arithmetic=certified", "heldout.num_captions=0", "train.sanity_checks=true"]


@pytest.mark.full
@pytest.mark.parametrize(("engine", "accumulation"), [("local", "local"), ("deepspeed", "sharded")])
def test_kills_and_a_resume_keep_account_card_and_audit(tmp_path: Path, engine: str, accumulation: str) -> None:
    run_dir, noise = tmp_path / "run", str(tmp_path / "run.noise")
    arguments = train_arguments(run_dir, "--engine", engine, *MORE, f"train.accumulation={accumulation}")
    for point, passage in (("before_noise", "3"), ("before_done", "2")):
        crashed = alone([point, passage, *arguments], script="tests/e2e/crashing_train.py", NOISE_LOG=noise)
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
    card = build_card(run_dir)
    assert card.plan["arithmetic"] == "certified"
    assert card.mechanism.noise_multiplier_accounted == card.plan["noise_multiplier"]
    other = alone([a for a in arguments if a != MORE[0]])
    assert other.returncode == 2 or other.returncode == 4, other.stdout + other.stderr
    assert "arithmetic" in other.stderr and "Traceback" not in other.stderr
