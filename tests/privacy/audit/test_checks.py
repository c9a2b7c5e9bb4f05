"""Verdicts, exit codes and JSON of an audit."""

import json
import math

import numpy as np
import pytest

from privacy.audit.report import CHECK_ALPHA, AuditReport, fact, random_check, undecided


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
    checks = [fact("a", True, "said", statistic=np.float64(1.5), threshold=math.inf), random_check("b", 0.5, "")]
    report = AuditReport("test", [*checks, random_check("c", 0.5, "", alpha=4e-4)], {"extra": math.nan})
    found = json.loads(json.dumps(report.to_json(), allow_nan=False))
    assert found["checks"][0] | {"statistic": 1.5, "threshold": None, "sentence": "said"} == found["checks"][0]
    assert found["extra"] is None and found["verdict"] == "consistent"
    assert found["false_alarm_rate"] == pytest.approx(4.1e-4)
