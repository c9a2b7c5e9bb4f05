"""`make gpu` on a CPU: the program ends with 0, and with 1 where something is wrong, which it names."""

import importlib
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.gpu.__main__ import PARTS
from tests.processes import ROOT, quiet_environment

FULL = pytest.mark.full


@pytest.mark.parametrize("part", PARTS)
def test_a_part_can_be_imported(part: str) -> None:
    """Here and in every `make test`; the others run them."""
    assert callable(importlib.import_module(f"tests.gpu.{part}").checks)


WRONG_FACTOR = """
from unittest import mock
from privacy.gradients import per_example_gradients as contributions
import torch

def ghost_norm(a_BTd, g_BTp):
    "A norm that counts what is off the diagonal once."
    a, g = a_BTd.float(), g_BTp.float()
    squared = ((a @ a.mT) * (g @ g.mT)).tril().sum((1, 2))
    return contributions.Norm(squared, squared, torch.zeros_like(squared))

mock.patch.object(contributions, "ghost_norm", ghost_norm).start()
"""


def accept(
    output: Path, *options: str, timeout: float = 900, **more: str
) -> subprocess.CompletedProcess[str]:
    command = [
        sys.executable,
        "-m",
        "tests.gpu",
        "--device",
        "cpu",
        "--reduced",
        "--output",
        str(output),
        *options,
    ]
    environment = quiet_environment(**more)
    return subprocess.run(
        command,
        cwd=ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=timeout,
        check=False,
    )


@FULL
@pytest.mark.timeout(1800)
def test_everything_holds_on_a_cpu(tmp_path: Path) -> None:
    done = accept(tmp_path)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    records = {name: json.loads((tmp_path / f"{name}.json").read_text()) for name in PARTS}
    for name, part in records.items():
        assert part["seconds"] < 480 and any(check["holds"] for check in part["checks"]), name
        assert not any(check["holds"] is False for check in part["checks"])
    assert sum(part["seconds"] for part in records.values()) < 600


@FULL
@pytest.mark.timeout(1800)
def test_a_planted_defect_is_named(tmp_path: Path) -> None:
    named = "sum, linear, float32, bookkeeping"
    (tmp_path / "sitecustomize.py").write_text(WRONG_FACTOR)
    output = tmp_path / "records"
    done = accept(output, "--part", "sums", PYTHONPATH=f"{tmp_path}{os.pathsep}{ROOT}")
    assert "sitecustomize" not in done.stderr, done.stderr[:3000]
    failed = [line for line in done.stdout.splitlines() if line.startswith("failed: ")]
    assert done.returncode == 1 and f"failed: {named}" in failed, done.stderr[-3000:]
    assert [path.name for path in output.iterdir()] == ["sums.json"], "records of other parts stay"


@FULL
@pytest.mark.skipif(Path("/dev/nvidiactl").exists(), reason="there is a GPU")
def test_without_a_gpu_it_says_what_runs_instead() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "tests.gpu"],
        cwd=ROOT,
        env=quiet_environment(),
        capture_output=True,
        text=True,
        check=False,
    )
    assert (
        done.returncode == 2 and done.stderr.startswith("error: ") and done.stderr.count("\n") == 1
    )
