"""The records of studies: their pages say what their tables say, and which groups are above the blind line."""

import csv
from pathlib import Path

import pytest

from tests.docs.pages import ROOT

RECORDS = sorted((ROOT / "benchmarks/results").glob("*-study-*"))


@pytest.mark.parametrize("folder", RECORDS, ids=lambda folder: folder.name)
def test_a_record_names_the_blind_line_and_says_what_is_above_it(folder: Path) -> None:
    name = folder.name.partition("-study-")[2].replace("-", "_")
    page = (folder / "README.md").read_text()
    assert f"studies/{name}.toml" in page and (ROOT / "studies" / f"{name}.toml").exists()
    with (folder / "groups.csv").open() as file:
        groups = list(csv.DictReader(file))
    rows = [line for line in page.splitlines() if line.startswith("| ")][1:]
    for group, row in zip(groups, rows, strict=True):
        assert f"**Blind line: {float(group['blind_loss']):.3f}**" in page
        mean, least, largest = (float(group[f"final_heldout_loss_{which}"]) for which in ("mean", "min", "max"))
        below = float(group["below_blind"])
        words = f"{below:.3f}" if below > 0 else f"**above it** by {-below:.3f}"
        assert f"| {mean:.3f} ({least:.3f} to {largest:.3f}) | {words} |" in row
        assert int(group["seeds_done"]) >= 3
    assert float(groups[0]["blind_loss"]) > min(float(group["final_heldout_loss_max"]) for group in groups)
    assert ("All groups lie below it" in page) <= all(float(group["below_blind"]) > 0 for group in groups)
    for word in ("The publications: ", "Seen here: ", "Agreement: "):
        assert f"\n- {word}" in page


def test_there_are_records() -> None:
    assert RECORDS
