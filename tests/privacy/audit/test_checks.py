"""Verdicts, exit codes and JSON of an audit; charges seen from outside: order against durability and release."""

import json
import math
from typing import Any

import numpy as np
import pytest

from privacy.audit.mechanism import charge_checks
from privacy.audit.report import CHECK_ALPHA, MAX_RANDOM_CHECKS, AuditReport, fact, random_check, undecided


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
    report = AuditReport.of("test", checks)
    assert (report.verdict, report.exit_code) == (verdict, code)


def test_false_alarms_are_bounded() -> None:
    checks = [random_check(str(i), 0.5, "") for i in range(MAX_RANDOM_CHECKS)]
    assert AuditReport.of("test", checks).false_alarm_rate == pytest.approx(5e-4)
    with pytest.raises(AssertionError):
        AuditReport.of("test", [*checks, random_check("one more", 0.5, "")])


def test_json_is_plain_and_finite() -> None:
    check = fact("a", True, "said", statistic=np.float64(1.5), threshold=math.inf, counts=[np.int64(3)])
    text = json.dumps(AuditReport.of("test", [check], extra=math.nan).to_json(), allow_nan=False)
    found = json.loads(text)
    assert found["checks"][0] | {"counts": [3], "statistic": 1.5, "threshold": None} == found["checks"][0]
    assert found["extra"] is None and found["verdict"] == "consistent"


STEPS = (1, 2, 2, 3)  # step 2 was killed and tried again


def ledger(steps: tuple[int, ...] = STEPS) -> tuple[bytes, list[int]]:
    """A ledger of one session, and the size of the file at the end of each intent."""
    data, ends = b'{"type":"open"}\n{"type":"session","nonce":"00"}\n', []
    for step in steps:
        data += json.dumps({"type": "intent", "step": step}).encode() + b"\n"
        ends.append(len(data))
        data += json.dumps({"type": "done", "step": step}).encode() + b"\n"
    return data, ends


def failed(charged: tuple[int, ...] = STEPS, **changed: Any) -> list[str]:
    """Attempt i is durable at time 100 i + 10, and released from 100 i + 20 on."""
    data, ends = ledger(charged)
    starts = 100 * (1 + np.arange(len(ends)))
    arguments: dict[str, Any] = {
        "ledger": data,
        "steps": STEPS,
        "released_at": (100 * (1 + np.arange(len(STEPS))) + 20).tolist(),
        "ledger_durable": [(3, 20), *zip(starts + 10, ends, strict=True)],
        "folder_durable": [5],
        "least_entropy": 16,
    }
    return [check.name for check in charge_checks(**arguments | changed) if check.outcome == "violated"]


def test_an_honest_order_passes() -> None:
    assert failed() == []


def test_what_is_durable_too_late_is_found() -> None:
    _, ends = ledger()
    times = 100 * (1 + np.arange(4))
    for late in range(4):
        durable = times + np.where(np.arange(4) == late, 30, 10)
        found = failed(ledger_durable=list(zip(durable, ends, strict=True)))
        assert "charge_before_release" in found, late
    never = [(time, end - 1) for time, end in zip(times + 10, ends, strict=True)]
    assert failed(ledger_durable=never[-1:], folder_durable=[]) == [
        "charge_before_release",
        "ledger_name_durable",
    ]


@pytest.mark.parametrize("charged", [(1, 2, 3), (1, 2, 2), (1, 2, 2, 3, 4), (1, 1, 2, 3)])
def test_attempts_and_charges_that_differ_are_found_both_ways(charged: tuple[int, ...]) -> None:
    assert "charged_attempts" in failed(charged)


def test_a_draw_without_enough_entropy_is_found() -> None:
    assert failed(least_entropy=15) == ["fresh_entropy"]
    assert failed(folder_durable=[2]) == ["ledger_name_durable"], "before the file was there"
