"""The table of pitfalls names tests that exist."""

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "privacy" / "README.md"


def test_every_pitfall_has_a_severity_and_tests_that_exist():
    existing = set(
        re.findall(r"^def (test_\w+)", "\n".join(p.read_text() for p in ROOT.glob("tests/**/test_*.py")), re.M)
    )
    rows = [line for line in README.read_text().split("## Pitfalls")[1].splitlines() if line.startswith("| ")][1:]
    assert len(rows) > 25
    for row in rows:
        pitfall, severity, prevention, guards = (cell.strip() for cell in row.strip("|").split("|"))
        named = re.findall(r"`(test_\w+)`", guards)
        assert severity in ("critical", "theoretical", "negligible") and prevention, pitfall
        assert named and set(named) <= existing, (pitfall, set(named) - existing)


def test_every_module_is_listed():
    text = README.read_text()
    for path in (ROOT / "privacy").glob("*.py"):
        listed = path.name in text or path.name.startswith("report")
        assert listed or path.name in ("__init__.py", "errors.py", "durable.py"), path.name
