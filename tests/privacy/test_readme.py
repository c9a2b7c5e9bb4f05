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
    """By its name, or by the folder whose content is described as a whole."""
    text = README.read_text()
    for path in (ROOT / "privacy").rglob("*.py"):
        room = path.relative_to(ROOT / "privacy").parts[0]
        assert path.name in text or path.name == "__init__.py" or room in ("clipping", "audit", "card"), path
