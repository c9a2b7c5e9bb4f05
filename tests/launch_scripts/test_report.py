import hashlib
import json
import shutil

import pytest

from privacy.card.model import PrivacyCard
from privacy.card.run_card import write_card
from privacy.ledger.ledger import Ledger
from privacy.ledger.shared import SharedLedger
from privacy.plan.numbers import make_plan
from privacy.plan.request import PlanRequest
from tests.privacy.ledger_epsilon import recompute
from tests.privacy.ledger_files import take_step
from tests.privacy.published import config_of
from tests.processes import run_python
from trainer.card_of_run import build_card

SECRET = "424242.125"


def _report(run_dir, *arguments):
    return run_python(["launch_scripts/report.py", "--run_dir", run_dir, *arguments], timeout=120)


@pytest.fixture
def run_dir(tmp_path):
    """A small finished run: ledger, public metrics and evaluation, a checkpoint, and secrets under private/."""
    run = tmp_path / "run"
    for folder in ("private", "evaluation", "checkpoints/step-00000002"):
        (run / folder).mkdir(parents=True)
    manifest = json.dumps({"initialisation": {"kind": "random", "seed": 0}, "step": 2}).encode()
    (run / "checkpoints/step-00000002/manifest.json").write_bytes(manifest)
    undone = (
        {"step": 0, "loss": 8.75},
        {"step": 1, "loss": 7.5},
        {"step": 2, "loss": 7.25},
    )  # by a crash
    _write_lines(
        run / "evaluation/heldout.jsonl",
        *undone,
        {"step": 0, "loss": 8.5},
        {"step": 2, "loss": 6.25},
    )
    _write_lines(run / "metrics.jsonl", {"step": 1, "optimizer/lr": 0.1})
    for name in ("metrics.jsonl", "heldout.jsonl", "sampling.key"):
        _write_lines(
            run / "private" / name, {"step": 1, "train/loss": float(SECRET), "loss": float(SECRET)}
        )
    _write_ledger(run, manifest)
    return run


def _write_lines(path, *values):
    path.write_text("".join(json.dumps(value) + "\n" for value in values))


def _write_ledger(run, manifest, fields=None, **changes):
    numbers = {
        "num_examples": 2000,
        "expected_batch_size": 100,
        "num_steps": 2,
        "target_delta": 1e-5,
    }
    plan = make_plan(
        PlanRequest(**numbers | {"noise_multiplier": 4.0, "sensitivity_slack": 1e-3} | changes)
    )
    own = {"plan": plan.frozen_fields(), "key_commitment": "ab" * 32, "commit": "c0ffee"}
    with Ledger.create(run / "ledger.jsonl", own | (fields or {})) as ledger:
        ledger.start_session({"commit": "c0ffee", "modified": False})
        for step in (1, 2):
            take_step(ledger, step)
        ledger.checkpoint(2, "step-00000002", hashlib.sha256(manifest).hexdigest())
        ledger.close("finished")
    return plan


def test_json_is_one_object_and_equals_the_file(run_dir):
    before = (run_dir / "ledger.jsonl").read_bytes()
    done = _report(run_dir, "--json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 1
    card = PrivacyCard.model_validate_json(done.stdout)
    assert card.to_json(indent=1) + "\n" == (run_dir / "report/privacy_card.json").read_text()
    charged, epsilon = recompute(run_dir / "ledger.jsonl")
    assert (
        card.epsilon == pytest.approx(epsilon, rel=1e-9) and card.attempts_charged == charged == 2
    )
    assert card.run_name == run_dir.name
    assert str(run_dir) not in done.stdout, "where it lies is nobody's business"
    assert (card.steps_done, card.steps_planned, card.delta) == (2, 2, 1e-5)
    assert card.formal_guarantee is True and card.reasons == ()
    assert [(point.step, point.loss) for point in card.utility.heldout_loss] == [
        (0, 8.5),
        (2, 6.25),
    ]
    assert card.utility.attested is False
    assert card.manifest_matches is True
    assert "privacy_card.md" in done.stderr
    assert (run_dir / "ledger.jsonl").read_bytes() == before


def test_audit_results_are_shown_with_verdict_and_date(run_dir):
    (run_dir / "report").mkdir()
    digest = hashlib.sha256((run_dir / "ledger.jsonl").read_bytes()).hexdigest()
    audit = {
        "audit": "ledger",
        "verdict": "consistent",
        "violated_checks": [],
        "date_utc": "2030-01-02",
    }
    audit |= {"ledger_sha256": digest}
    _write_lines(run_dir / "report/audit-ledger.json", audit)
    _write_lines(
        run_dir / "report/audit-run.json",
        {"audit": "run", "verdict": "violated", "violated_checks": ["gap"]},
    )
    (run_dir / "report/audit.json").write_text("{torn")
    card = build_card(run_dir)
    found = {audit.file: audit for audit in card.audits}
    assert found["report/audit-ledger.json"].date_utc == "2030-01-02"
    assert found["report/audit-run.json"].date_utc is None, (
        "the file's own time is a clock, and says nothing"
    )
    assert found["report/audit.json"].verdict == "unreadable"
    assert [found[f"report/audit-{kind}.json"].of_this_ledger for kind in ("ledger", "run")] == [
        True,
        False,
    ]
    assert any("audit-run.json says violated" in line for line in card.warnings)
    assert not any("audit-ledger.json" in line for line in card.warnings)
    page = write_card(run_dir, card)[2].read_text()
    assert (
        "<strong>violated</strong> (of another" in page
        and "2030-01-02" in page
        and "<code>gap</code>" in page
    )


def test_shared_ledger_and_sibling_runs(run_dir, tmp_path):
    owner = SharedLedger.create(tmp_path / "owner.jsonl", epsilon=5.0, delta=1e-4)
    (run_dir / "ledger.jsonl").unlink()
    plan = _write_ledger(run_dir, b"", fields={"shared_ledger": owner.read().identity})
    asked = config_of(plan).replace("[train]", f'shared_ledger = "{owner.path}"\n[train]')
    (run_dir / "config.toml").write_text(asked)
    for run, name in (("ab" * 32, "this"), ("cd" * 32, "brother | <b>")):
        with owner.reserving(run, name, plan, fixed_in_advance=True):
            pass
    card = build_card(run_dir)
    assert [run["is_this_run"] for run in card.shared_ledger["runs"]] == [True, False]
    page = write_card(run_dir, card)[2].read_text()
    assert (
        "this (this run)" in page
        and "brother | &lt;b&gt;" in page
        and owner.read().identity in page
    )
    for damaged in (
        owner.path.read_text().splitlines(keepends=True)[0],
        "nonsense\n",
    ):  # cut short; not one at all
        owner.path.write_text(damaged)
        card = build_card(run_dir)
        assert card.shared_ledger is None
        assert any("cannot be read, or is broken" in line for line in card.warnings)


def test_contract_12_nothing_private_is_read(run_dir):
    with_private = build_card(run_dir)
    assert SECRET not in with_private.to_json()
    shutil.rmtree(run_dir / "private")
    assert build_card(run_dir) == with_private


def test_changed_manifest_is_noticed(run_dir):
    (run_dir / "checkpoints/step-00000002/manifest.json").write_text(
        '{"initialisation": {"kind": "imported"}}'
    )
    card = build_card(run_dir)
    assert card.manifest_matches is False
    assert card.public_data.attested is False
    assert any("manifest" in line for line in card.warnings)


def test_contract_11_informal_run_prints_no_epsilon(run_dir):
    (run_dir / "ledger.jsonl").unlink()
    _write_ledger(run_dir, b"", noise_multiplier=0.0)
    done = _report(run_dir)
    assert done.returncode == 0, done.stderr
    assert "formal_guarantee: false" in done.stdout and "no epsilon is claimed" in " ".join(
        done.stdout.split()
    )
    assert all(
        len(line) <= 80
        for line in done.stdout.splitlines()
        if not line.startswith("privacy card: ")
    )
    card = PrivacyCard.model_validate_json((run_dir / "report/privacy_card.json").read_text())
    assert card.epsilon is None and card.formal_guarantee is False


def test_contract_9_broken_ledger_exits_4(run_dir):
    lines = (run_dir / "ledger.jsonl").read_bytes().splitlines(keepends=True)
    (run_dir / "ledger.jsonl").write_bytes(b"".join(lines[:2] + lines[3:]))
    done = _report(run_dir, "--json")
    assert done.returncode == 4 and done.stdout == "" and not (run_dir / "report").exists()
    assert done.stderr.startswith("error: ") and done.stderr.count("\n") == 1


def test_contract_12_private_heldout_is_said_to_be_private(run_dir):
    (run_dir / "evaluation/heldout.jsonl").unlink()
    assert _report(run_dir).returncode == 0
    assert (
        json.loads((run_dir / "report/privacy_card.json").read_text())["utility"]["heldout_loss"]
        == []
    )
    assert "it is private" in (run_dir / "report/privacy_card.md").read_text()
