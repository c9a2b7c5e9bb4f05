"""The audit of a ledger: a true one passes; edits, rollbacks, forgeries and false claims are found."""

import hashlib
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from privacy.audit.ledger import CheckpointClaim, EpsilonClaim, FolderClaims, audit_ledger
from privacy.audit.report import AuditReport
from privacy.ledger.ledger import Ledger
from privacy.ledger.records import read_state
from privacy.plan import PrivacyPlan, make_plan
from privacy.plan_request import PlanRequest
from tests.privacy import ledger_files

DIGEST = "d" * 64


def plan(**changed: object) -> PrivacyPlan:
    fields = {
        "num_examples": 3000, "expected_batch_size": 64, "num_steps": 6, "noise_multiplier": 4.0,
        "target_delta": 1e-5, "sensitivity_slack": 1e-3, "cap": None,
    }  # fmt: skip
    return make_plan(PlanRequest(**fields | changed))  # type: ignore[arg-type]


def write(path: Path, own: PrivacyPlan, mirror: Path | None = None) -> bytes:
    """Four steps, the third of them killed and tried again."""
    fields = {"plan": own.frozen_fields(), "key_commitment": "0" * 64}
    release: Any = {"name": "gradient", "std": own.noise_multiplier * own.max_grad_norm, "sensitivity": 1.0}
    with Ledger.create(path, fields, mirror) as ledger:
        ledger.start_session({})
        for step in (1, 2):
            ledger.intent(step, 0, [release])
            ledger.done(step, 0)
        ledger.checkpoint(2, "step-00000002", DIGEST)
        ledger.intent(3, 0, [release])
    with Ledger.open(path, mirror) as ledger:
        ledger.start_session({})
        for step, attempt in ((3, 1), (4, 0)):
            ledger.intent(step, attempt, [release])
            ledger.done(step, attempt)
    return path.read_bytes()


@pytest.fixture(scope="module")
def true_ledger(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    return write(tmp_path_factory.mktemp("ledger") / "ledger.jsonl", plan())


def manifest(data: bytes, **changed: object) -> CheckpointClaim:
    """What a checkpoint of step 2 remembers: the line before its own record."""
    lines = data.split(b"\n")
    seq = next(i for i, line in enumerate(lines) if b'"type":"checkpoint"' in line) - 1
    fields: dict[str, Any] = {
        "name": "step-00000002", "step": 2, "seq": seq, "line_hash": hashlib.sha256(lines[seq]).hexdigest(),
        "digest": DIGEST, "charged": 2, "formal_guarantee": True,
    }  # fmt: skip
    return CheckpointClaim(**fields | changed)


def claims(data: bytes, **changed: object) -> FolderClaims:
    own = plan()
    said = [EpsilonClaim("metrics.jsonl", count, own.epsilon_after(count)) for count in (1, 5)]
    fields: dict[str, Any] = {"epsilons": said, "checkpoints": [manifest(data)], "furthest_step": {"metrics.jsonl": 4}}
    return FolderClaims(**fields | changed)


def test_a_true_ledger_with_true_claims_is_consistent(true_ledger: bytes) -> None:
    report = audit_ledger(true_ledger, claims(true_ledger))
    assert report.verdict == "consistent", report.to_text()
    assert report.facts["attempts_charged"] == 5 and report.false_alarm_rate == 0


def rechained(data: bytes, change: Callable[[list[dict[str, Any]]], None]) -> bytes:
    """A forger's work: the records changed, and all hashes and numbers made to fit again."""
    records = [json.loads(line) for line in data.split(b"\n")[:-1]]
    change(records)
    return ledger_files.rechained(records)


def failed(data: bytes, **changed: object) -> AuditReport:
    report = audit_ledger(data, FolderClaims(**changed))  # type: ignore[arg-type]
    assert report.verdict == "violated" and report.exit_code == 5, report.to_text()
    return report


def lines_changed(data: bytes, change: Callable[[list[bytes]], list[bytes]]) -> bytes:
    return b"\n".join(change(data.split(b"\n")[:-1])) + b"\n"


@pytest.mark.parametrize(
    "change",
    [
        lambda lines: [line.replace(b'"std":4.0', b'"std":8.0') for line in lines],
        lambda lines: [*lines[:4], lines[5], lines[4], *lines[6:]],
        lambda lines: [*lines[:4], lines[3], *lines[4:]],
        lambda lines: [*lines[:4], *lines[5:]],
        lambda lines: lines[1:],
        lambda lines: [*lines[:4], b"not a record", *lines[5:]],
    ],
    ids=["edited", "reordered", "duplicated", "removed", "beheaded", "damaged"],
)
def test_a_changed_ledger_breaks_the_chain(true_ledger: bytes, change: Callable[[list[bytes]], list[bytes]]) -> None:
    assert "chain" in failed(lines_changed(true_ledger, change)).failed()


def test_a_forged_chain_with_less_noise_or_an_old_nonce_is_not_legal(true_ledger: bytes) -> None:
    def less_noise(records: list[dict[str, Any]]) -> None:
        next(r for r in records if r["type"] == "intent")["releases"][0]["std"] = 0.5

    def old_nonce(records: list[dict[str, Any]]) -> None:
        first, second = (r for r in records if r["type"] == "session")
        second["nonce"] = first["nonce"]

    for change in (less_noise, old_nonce):
        assert failed(rechained(true_ledger, change)).failed() == ["legal_order"]


def test_a_record_with_a_time_of_its_own_is_noticed(true_ledger: bytes) -> None:
    def later(records: list[dict[str, Any]]) -> None:
        records[-1]["time_utc"] = "2999-01-01T00:00:00+00:00"

    report = audit_ledger(rechained(true_ledger, later), FolderClaims())
    (clock,) = [check for check in report.checks if check.name == "clock"]
    assert clock.outcome == "inconclusive" and "1 record" in clock.sentence


def test_another_sensitivity_is_found(true_ledger: bytes) -> None:
    def stretched(records: list[dict[str, Any]]) -> None:
        intent = next(r for r in records if r["type"] == "intent")
        intent["releases"][0] |= {"std": 3.0, "sensitivity": 3.0}

    data = rechained(true_ledger, stretched)
    assert failed(data).failed() == ["legal_order"]
    with mock.patch("privacy.ledger.records._check_releases"):  # the audit's own look at the raw lines
        assert failed(data).failed() == ["releases"]


def test_a_rollback_is_found_by_what_checkpoints_and_metrics_remember(true_ledger: bytes) -> None:
    whole = true_ledger.split(b"\n")
    short = b"\n".join(whole[:4]) + b"\n"  # open, session, intent, done
    report = failed(short, checkpoints=[manifest(true_ledger)], furthest_step={"metrics.jsonl": 4})
    assert report.failed() == ["checkpoints", "nothing_uncharged"]


@pytest.mark.parametrize(
    "changed",
    [{"digest": "e" * 64}, {"charged": 1}, {"formal_guarantee": False}, {"line_hash": "0" * 64}, {"seq": None}],
)
def test_a_manifest_that_does_not_fit_is_found(true_ledger: bytes, changed: dict[str, object]) -> None:
    assert failed(true_ledger, checkpoints=[manifest(true_ledger, **changed)]).failed() == ["checkpoints"]


def test_a_checkpoint_without_a_record_is_inconclusive_where_a_crash_can_have_come_between(true_ledger: bytes) -> None:
    claim = manifest(true_ledger)
    assert claim.seq is not None
    crashed = b"".join(true_ledger.splitlines(keepends=True)[: claim.seq + 1])
    said: dict[str, Any] = {"epsilons": [], "furthest_step": {}}
    assert audit_ledger(crashed, claims(true_ledger, checkpoints=[claim], **said)).verdict == "inconclusive"
    other = manifest(true_ledger, step=1)
    assert failed(true_ledger, checkpoints=[other]).failed() == ["checkpoints"], "step 2 was reached there"
    assert failed(crashed, checkpoints=[other], **said).failed() == ["checkpoints"]


def test_claims_below_the_truth_or_of_more_charges_are_found(true_ledger: bytes) -> None:
    true = plan().epsilon_after(5)
    assert true is not None
    for claim in (EpsilonClaim("card", 5, 0.9 * true), EpsilonClaim("card", 6, 2 * true)):
        assert failed(true_ledger, epsilons=[claim]).failed() == ["claims"]
    generous = audit_ledger(true_ledger, claims(true_ledger, epsilons=[EpsilonClaim("card", 5, 1.1 * true)]))
    assert generous.verdict == "consistent"


def test_epsilon_of_a_capped_plan_is_recomputed(tmp_path: Path) -> None:
    data = write(tmp_path / "ledger.jsonl", plan(cap="default"))
    report = audit_ledger(data, FolderClaims())
    epsilon = next(check for check in report.checks if check.name == "epsilon")
    assert epsilon.outcome == "ok" and epsilon.statistic == pytest.approx(epsilon.threshold, rel=1e-3)


def test_an_epsilon_of_a_run_without_a_guarantee_is_found(tmp_path: Path) -> None:
    data = write(tmp_path / "ledger.jsonl", plan(informal_reasons=["it is a test"]))
    assert audit_ledger(data, FolderClaims()).verdict == "consistent"
    assert failed(data, epsilons=[EpsilonClaim("metrics.jsonl", 2, 1.0)]).failed() == ["no_claim"]


def test_a_mirror_that_is_longer_is_a_rollback(tmp_path: Path) -> None:
    data = write(tmp_path / "ledger.jsonl", plan(), tmp_path / "mirror.jsonl")
    assert "mirror" in failed(data, mirror=data + b"{}\n").failed()
    assert audit_ledger(data, claims(data, mirror=data)).verdict == "consistent"
    assert audit_ledger(data, claims(data, mirror=None)).verdict == "inconclusive"


def test_an_unfinished_line_is_charged(true_ledger: bytes) -> None:
    torn = true_ledger + b'{"seq":11,"type":"inte'
    assert read_state(torn, "")[0].num_charged == 5
    report = audit_ledger(torn, FolderClaims(epsilons=[EpsilonClaim("card", 6, plan().epsilon_after(6))]))
    assert report.verdict == "consistent" and report.facts["attempts_charged"] == 6
