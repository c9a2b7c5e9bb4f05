"""The full counts in eight parts, and the record of which part passed on which commit.

Every test but those of a GPU or a cluster is in one part; neighbours in a file lie in different parts. A part takes the place of
its last run in the record, tests/records/test-all.json and .md.
"""

import json
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

import pytest

from tests.processes import ROOT
from tests.rehearsal.record import commit, machine

NUM_PARTS = 8
JSON_RECORD = ROOT / "tests" / "records" / "test-all.json"
OUTCOMES = ("passed", "failed", "error", "skipped")
TITLE = """# The full counts

Written by `make test-all` from `test-all.json`: the last run of each of the eight parts. A `+` behind a commit: files differed
from it. `.github/workflows/ci.yml` runs one part for each commit, which the hour of the commit names.
"""


def of_part(items: Sequence[pytest.Item], part: int) -> tuple[list[pytest.Item], list[pytest.Item]]:
    """The tests of a part, 1 to `NUM_PARTS`, in the order of `items`, and the others."""
    number = {nodeid: i for i, nodeid in enumerate(sorted(item.nodeid for item in items))}
    chosen = [item for item in items if number[item.nodeid] % NUM_PARTS == part - 1]
    return chosen, [item for item in items if number[item.nodeid] % NUM_PARTS != part - 1]


def note(part: int, reports: Mapping[str, Sequence[Any]], seconds: float) -> None:
    """Puts a run of a part into the record.

    Args:
        reports: of pytest, by outcome.
        seconds: on the wall.
    """
    record: dict[str, Any] = json.loads(JSON_RECORD.read_text()) if JSON_RECORD.exists() else {}
    record[str(part)] = {
        "commit": commit(),
        "date": datetime.now(UTC).date().isoformat(),
        "machine": machine(),
        "minutes": round(seconds / 60, 1),
        **{outcome: len(reports.get(outcome, ())) for outcome in OUTCOMES},
        "not passed": sorted(
            {report.nodeid for kind in ("failed", "error") for report in reports.get(kind, ())}
        ),
    }
    JSON_RECORD.write_text(json.dumps(dict(sorted(record.items())), indent=1) + "\n")
    JSON_RECORD.with_suffix(".md").write_text(page_of())


def page_of() -> str:
    """The page, in Markdown."""
    record: dict[str, dict[str, Any]] = json.loads(JSON_RECORD.read_text())
    columns = ("commit", "date", "machine", "minutes", *OUTCOMES)
    lines = [TITLE, f"| part | {' | '.join(columns)} |", "|---" * (1 + len(columns)) + "|"]
    for part in map(str, range(1, NUM_PARTS + 1)):
        words = (
            [str(record[part][column]) for column in columns]
            if part in record
            else ["has not run"] + [""] * 7
        )
        lines.append(f"| {part} | {' | '.join(words)} |")
    for part, run in record.items():
        lines += [f"\nNot passed in part {part}: `{test}`" for test in run["not passed"]]
    return "\n".join(lines) + "\n"
