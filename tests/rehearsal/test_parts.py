"""Parts of the rehearsal at a tiny size: the program that runs at the true one cannot rot."""

import os
from pathlib import Path

import pytest

from tests.rehearsal import batch, data, loop
from tests.rehearsal.part import Part


def test_a_stage_that_is_written_down_is_not_run_again(tmp_path: Path) -> None:
    Part("one", tmp_path).stage("first", lambda: {"number": 1})
    resumed = Part("one", tmp_path)
    assert resumed.stage("first", lambda: pytest.fail("run again")) == {"number": 1}
    resumed.stage("second", lambda: {"number": 2})
    assert [stage["name"] for stage in Part("one", tmp_path).stages] == ["first", "second"]
    assert Part("one", tmp_path, anew=True).stages == []


def test_data(tmp_path: Path) -> None:
    """More rows than one chunk of coins, as in the recipes; 30 shards."""
    part = Part("data", tmp_path)
    data.rehearse(part, 300_000, 280_000)
    assert part.sizes == {"num_examples": 300_000}
    assert part.stages[-1]["measured"]["ranks_compared"] == 8


@pytest.mark.full
def test_loop(tmp_path: Path) -> None:
    part = Part("loop", tmp_path)
    loop.rehearse(part, 20_000, 5_000)
    assert part.stages[-1]["measured"]["verdict"].startswith("verify: consistent: epsilon")


@pytest.mark.full
def test_batch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Killed in step 2, resumed, verified and audited; 40 micro-batches a rank and step."""
    monkeypatch.setattr(batch, "SECONDS_INTO_STEP_2", 0.0)
    part = Part("batch", tmp_path)
    batch.rehearse(part, 6_000, 5_000, micro_batch_size=64)
    verdicts = {
        stage["name"]: stage["measured"]["verdict"]
        for stage in part.stages
        if "verdict" in stage["measured"]
    }
    assert verdicts.keys() == {"verify.py", "audit ledger", "audit schedule"}
    assert all("consistent" in verdict for verdict in verdicts.values()), verdicts
    assert not batch.pids_of(os.fspath(tmp_path))
