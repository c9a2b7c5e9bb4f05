"""The measures of the code's shape, of a small project that is made here."""

import subprocess
from pathlib import Path

from tools.house import measure


def test_the_archive_counts_apart(tmp_path: Path) -> None:
    (tmp_path / "benchmarks" / "results" / "past").mkdir(parents=True)
    (tmp_path / "benchmarks" / "step.py").write_text("def step() -> int:\n    return 1\n")
    (tmp_path / "benchmarks" / "results" / "past" / "study.py").write_text(
        "def _once() -> int:\n    return 1\n\n\n_once()\n"
    )
    subprocess.run(["git", "init", "-q", str(tmp_path)], check=True)
    subprocess.run(["git", "-C", str(tmp_path), "add", "."], check=True)
    measured = measure(tmp_path)
    assert measured["source_lines"] == 2 and measured["archived_lines"] == 5
    assert measured["source_files"] == measured["functions"] == 1
    assert measured["private_functions_called_once"] == 0
