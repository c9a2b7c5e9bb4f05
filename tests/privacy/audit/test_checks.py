"""Verdicts, exit codes and JSON of an audit."""

import json
import math

import numpy as np
import pytest

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
