"""Mutated shards: no crash, no hang, bounded memory; every one is refused in one line or read to its end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.data.conftest import ROOT


@pytest.mark.parametrize("count", [50, pytest.param(2000, marks=pytest.mark.full)])
def test_mutated_shards(count: int, tmp_path: Path) -> None:
    command = [sys.executable, str(ROOT / "tests" / "data" / "fuzz_shards.py"), "0", str(count), str(tmp_path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30 + count, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    said = json.loads(done.stdout)
    assert said["refused"] + said["indexed"] == count
    assert said["refused"] > count // 10 and said["indexed"] > count // 10 and said["undecodable"] > count // 10
    assert said["slowest_seconds"] < 20, said  # a shared machine; one alone takes milliseconds
