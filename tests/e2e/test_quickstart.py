"""`make quickstart` as a newcomer runs it; in short it is also the launch of DeepSpeed's launcher and engine."""

import json
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT, quiet_environment
from tests.e2e.launch import ledger_lines

SHORT = [
    "train.num_steps=4", "heldout.num_examples=32", "heldout.num_captions=1", "data.image_size=32",
    "privacy.expected_batch_size=128", "privacy.target_epsilon=2",
    *(f"model.overrides.{part}_{size}" for part in ("encoder", "decoder") for size in ("width=64", "depth=2", "num_heads=2")),
]  # fmt: skip
KEYS = {"run_dir", "steps", "epsilon", "delta", "heldout_loss_before", "heldout_loss_after", "formal_guarantee"}


def quickstart(run_dir: Path, *overrides: str) -> tuple[dict, str]:
    command = [sys.executable, "launch_scripts/quickstart.py", "--run_dir", str(run_dir), *overrides]
    result = subprocess.run(command, cwd=ROOT, env=quiet_environment(), capture_output=True, text=True, check=False)
    assert result.returncode == 0, result.stdout[-3000:] + result.stderr[-3000:]
    return json.loads(result.stdout.strip().splitlines()[-1]), result.stdout + result.stderr


def test_quickstart_in_short(tmp_path: Path) -> None:
    card, said = quickstart(tmp_path / "run", *SHORT)
    assert set(card) == KEYS
    assert card["steps"] == 4 and card["formal_guarantee"] is True
    assert 0 < card["epsilon"] <= 2 and card["delta"] == 1e-5
    assert card["heldout_loss_after"] < card["heldout_loss_before"]
    assert "privacy_card.md" in said and (tmp_path / "run" / "report" / "privacy_card.md").is_file()
    assert "terminate called" not in said, "a crash at exit"
    kinds = [line["type"] for line in ledger_lines(tmp_path / "run")]
    assert kinds == ["open", "session", *["intent", "done"] * 4, "checkpoint", "close"]


@pytest.mark.full
@pytest.mark.timeout(1200)
def test_quickstart_whole(tmp_path: Path) -> None:
    started = time.monotonic()
    card, _ = quickstart(tmp_path / "run")
    assert time.monotonic() - started <= 360
    assert card["heldout_loss_after"] <= 0.9 * card["heldout_loss_before"]
    assert card["epsilon"] <= 8
