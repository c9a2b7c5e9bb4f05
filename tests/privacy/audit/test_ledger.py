"""The audit of a ledger: verify.py's judgement, and what only the holder of the private part can check."""

import json
import math
import os
import shutil
from pathlib import Path

import numpy as np
import pytest

from privacy.audit.audit_report import CHECK_ALPHA, AuditReport, fact, random_check, undecided
from privacy.audit.run_audit import ledger_audit
from privacy.card.run_card import build_card
from privacy.errors import ConfigError
from privacy.ledger.ledger import Ledger
from privacy.ledger.run_state import open_run_state
from privacy.sampling.keys import SamplingKey
from tests.privacy.ledger_files import ENVIRONMENT, PLAN, open_fields, take_step
from tests.privacy.published import publish


@pytest.fixture(scope="module")
def published(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return publish(tmp_path_factory.mktemp("audit") / "run")


@pytest.fixture
def folder(published: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(published, tmp_path / "run"))


def outcomes(run: Path) -> dict[str, str]:
    return {check.name: check.outcome for check in ledger_audit(run).checks}


def test_a_true_folder_is_consistent_and_every_epsilon_in_it_is_recomputed(folder: Path) -> None:
    report = ledger_audit(folder)
    assert report.verdict == "consistent" and report.false_alarm_rate == 0, report.to_text()
    assert report.facts["attempts_charged"] == 5 and report.facts["epsilon"] > 0
    path = folder / "metrics.jsonl"
    line = json.loads(path.read_text())
    path.write_text(json.dumps(line | {"privacy/epsilon": line["privacy/epsilon"] / 2}) + "\n")
    assert ledger_audit(folder).failed() == ["metrics"]


def test_a_changed_line_is_found_by_both_readers(folder: Path) -> None:
    path = folder / "ledger.jsonl"
    path.write_bytes(path.read_bytes().replace(b'"std":4.0', b'"std":8.0', 1))
    report = ledger_audit(folder)
    assert report.failed() == ["ledger", "legal_order"] and report.exit_code == 5


def test_a_folder_that_cannot_be_judged_is_bad_input(folder: Path) -> None:
    (folder / "ledger.jsonl").write_bytes(b"x" * (1 << 21))
    with pytest.raises(ConfigError, match="a line has"):
        ledger_audit(folder)


def test_the_key_is_the_one_that_the_ledger_is_committed_to(tmp_path: Path) -> None:
    private = tmp_path / "private"
    private.mkdir(mode=0o700)
    members = private / "members.jsonl"
    ledger, _ = open_run_state(
        tmp_path / "ledger.jsonl",
        private / "sampling.key",
        PLAN,
        data_manifest=b"x",
        members=members,
    )
    with ledger:
        ledger.start_session(ENVIRONMENT)
    assert outcomes(tmp_path)["sampling_key"] == outcomes(tmp_path)["attempts"] == "ok"
    assert "sampling_key" not in ledger_audit(tmp_path, b"x").failed()
    assert "sampling_key" in ledger_audit(tmp_path, b"other data").failed()
    (private / "sampling.key").unlink()
    SamplingKey.create(private / "sampling.key")
    members.unlink()
    found = outcomes(tmp_path)
    assert found["sampling_key"] == found["attempts"] == "violated"


def test_a_mirror_that_is_longer_is_a_rollback(tmp_path: Path) -> None:
    mirror, path = tmp_path / "mirror.jsonl", tmp_path / "run" / "ledger.jsonl"
    path.parent.mkdir()
    (path.parent / "config.toml").write_text(f'[privacy]\nledger_mirror = "{mirror}"\n')
    with Ledger.create(path, open_fields(), mirror) as ledger:
        ledger.start_session(ENVIRONMENT)
        take_step(ledger, 1)
    assert outcomes(path.parent)["mirror"] == "ok"
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))
    assert outcomes(path.parent)["mirror"] == "violated"
    mirror.unlink()
    assert outcomes(path.parent)["mirror"] == "inconclusive"


@pytest.mark.parametrize("kind", ["folder", "pipe", "a file for a folder", "inside"])
def test_what_is_no_run_folder_is_one_line_and_never_waited_for(kind: str, tmp_path: Path) -> None:
    ledger, given, said = tmp_path / "ledger.jsonl", tmp_path, "is not a regular file"
    if kind == "folder":
        ledger.mkdir()
    elif kind == "pipe":
        os.mkfifo(ledger)
    else:
        ledger.touch()
        given, said = (
            (ledger, "is a file: give its run folder")
            if kind.startswith("a")
            else (tmp_path / "x", f"give {tmp_path}")
        )
        (tmp_path / "x").mkdir()
    with pytest.raises(ConfigError, match=said):
        ledger_audit(given)
    with pytest.raises(ConfigError, match=said):
        build_card(given)


# Verdicts, exit codes and JSON of any audit


@pytest.mark.parametrize(
    ("checks", "verdict", "code"),
    [
        ([fact("a", True, "")], "consistent", 0),
        ([fact("a", True, ""), undecided("b", "")], "inconclusive", 6),
        ([fact("a", False, ""), undecided("b", "")], "violated", 5),
        ([random_check("a", 2 * CHECK_ALPHA, "")], "consistent", 0),
        ([random_check("a", CHECK_ALPHA / 2, "")], "violated", 5),
        ([random_check("a", math.nan, "")], "violated", 5),
    ],
)
def test_verdict(checks: list, verdict: str, code: int) -> None:
    report = AuditReport("test", checks)
    assert (report.verdict, report.exit_code) == (verdict, code)


def test_json_is_plain_and_finite_and_false_alarms_add_up() -> None:
    checks = [
        fact("a", True, "said", statistic=np.float64(1.5), threshold=math.inf),
        random_check("b", 0.5, ""),
    ]
    report = AuditReport(
        "test", [*checks, random_check("c", 0.5, "", alpha=4e-4)], {"extra": math.nan}
    )
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert (
        found["checks"][0] | {"statistic": 1.5, "threshold": None, "sentence": "said"}
        == found["checks"][0]
    )
    assert found["extra"] is None and found["verdict"] == "consistent"
    assert found["false_alarm_rate"] == pytest.approx(4.1e-4)
