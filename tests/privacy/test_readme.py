"""What the pages cite as guards are tests, and `make test` runs them."""

import ast
import functools
import re
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
README, GUARANTEE = ROOT / "privacy" / "README.md", ROOT / "docs" / "guarantee.md"
NOT_QUICK = re.compile(r"mark\.(full|gpu|cluster)|^FULL$")


@functools.cache
def quick_tests() -> dict[str, list[str]]:
    """Names of the tests that `make test` runs -> files. A test with one quick case is quick."""
    found: dict[str, list[str]] = {}
    for path in ROOT.glob("tests/**/test_*.py"):
        body = ast.parse(path.read_text()).body
        marks = [
            ast.unparse(one)
            for one in body
            if isinstance(one, ast.Assign) and "pytestmark" in ast.unparse(one)
        ]
        for one in body:
            if isinstance(one, ast.FunctionDef) and one.name.startswith("test_"):
                plain = [
                    text
                    for text in map(ast.unparse, one.decorator_list)
                    if "parametrize" not in text
                ]
                if not any(NOT_QUICK.search(text) for text in (*marks, *plain)):
                    found.setdefault(one.name, []).append(str(path.relative_to(ROOT)))
    return found


def test_every_pitfall_has_a_severity_and_tests_that_run():
    quick = quick_tests()
    _, *sections = README.read_text().split("## Pitfalls")[1].split("\n### ")
    assert [section.split("\n")[0] for section in sections] == [
        "Critical",
        "Theoretical",
        "Negligible",
    ]
    tables = [
        [line for line in section.splitlines() if line.startswith("| ")][1:] for section in sections
    ]
    assert sum(map(len, tables)) > 25 and all(tables)
    for row in (row for table in tables for row in table):
        pitfall, prevention, guards = (cell.strip() for cell in row.strip("|").split("|"))
        named = re.findall(r"`(test_\w+)`", guards)
        assert prevention, pitfall
        assert named and set(named) <= quick.keys(), (pitfall, set(named) - quick.keys())


def test_every_guarantee_has_tests_that_run():
    files = {file for of_name in quick_tests().values() for file in of_name}
    rows = re.findall(r"^\| \d+ \|.*\| (.+) \|$", GUARANTEE.read_text(), re.M)
    assert len(rows) == 14
    for row in rows:
        for named in re.findall(r"`([^`]+)`", row):
            assert any(
                file == named or (named.endswith("/") and file.startswith(named)) for file in files
            ), named
