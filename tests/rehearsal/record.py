"""The record of the rehearsal: one JSON file, and a page that is made from it."""

import json
import platform
import subprocess
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from tests.rehearsal.part import ROOT

PARTS = ("batch", "loop", "data", "steps", "model", "ranks", "budget", "faults")
JSON_RECORD = ROOT / "tests" / "records" / "rehearsal.json"
TITLE = """# The rehearsal: what is claimed at a size has run at that size

Written by `make rehearsal` from `rehearsal.json`. Each part runs one dimension at its true size and everything else tiny, on a
machine without a GPU. A recipe whose sizes are not all below says so in a line "not rehearsed" (`tests/rehearsal/test_sizes.py`).
"""


def ran_sizes() -> dict[str, int]:
    """The largest size of each dimension that a part of the record has run."""
    largest: dict[str, int] = {}
    for part in json.loads(JSON_RECORD.read_text()).values():
        for dimension, size in part["sizes"].items():
            largest[dimension] = max(size, largest.get(dimension, 0))
    return largest


def page_of() -> str:
    """The page, in Markdown."""
    parts: dict[str, dict[str, Any]] = json.loads(JSON_RECORD.read_text())
    lines = [TITLE, "| dimension | largest size that ran |", "|---|---|"]
    lines += [f"| {dimension} | {size:,} |" for dimension, size in sorted(ran_sizes().items())]
    missing = [name for name in PARTS if name not in parts]
    if missing:
        lines += ["", f"**Parts that have not run to their end yet: {', '.join(missing)}.**"]
    for name, part in parts.items():
        lines += [
            "",
            f"## {name}",
            "",
            part["about"],
            "",
            f"{part['date']}, commit {part['commit']}, {part['machine']}.",
            "",
        ]
        lines += [
            "| stage | seconds | of a processor | peak GiB | measured |",
            "|---|---|---|---|---|",
        ]
        for stage in part["stages"]:
            numbers = f"{stage['seconds']:,.1f} | {stage['processor_seconds']:,.1f} | {stage['peak_gib']:.2f}"
            lines.append(f"| {stage['name']} | {numbers} | {in_words(stage['measured'])} |")
    return "\n".join(lines) + "\n"


def in_words(measured: Mapping[str, Any]) -> str:
    """The numbers of a stage in one cell."""
    return "; ".join(f"{name.replace('_', ' ')} {shown(value)}" for name, value in measured.items())


def shown(value: object) -> str:
    """Whole numbers with commas, others in four digits."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return str(value)
    return f"{value:,}" if isinstance(value, int) else f"{value:.4g}"


def commit() -> str:
    """The commit that ran, with + where files besides the records differ from it."""
    head = ["git", "rev-parse", "--short=8", "HEAD"]
    changes = ["git", "status", "--porcelain", "--untracked-files=no", "--", ".", ":!tests/records"]
    name, changed = (
        subprocess.run(words, cwd=ROOT, capture_output=True, text=True, check=False).stdout.strip()
        for words in (head, changes)
    )
    return name + ("+" if changed else "")


def machine() -> str:
    """Processor, cores and memory in words."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    model = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")),
        platform.machine(),
    )
    cores = sum(line.startswith("processor") for line in lines)
    kib = int(Path("/proc/meminfo").read_text().split()[1])
    return f"{cores} cores ({model}), {kib / 2**20:.0f} GiB"
