"""train.compile from the recipe: it trains, with privacy and without, or is refused before anything is touched."""

import shutil
from pathlib import Path

import pytest

from tests.e2e.launch import alone, launch, ledger_lines, train_arguments

needs_compiler = pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)
COMPILE = "train.compile=true"


def test_zero_3_is_refused_before_the_run_begins(tmp_path: Path) -> None:
    result = alone(train_arguments(tmp_path / "run", COMPILE))
    assert result.returncode == 2
    assert "train.compile" in result.stderr and "ZeRO-3" in result.stderr and "Traceback" not in result.stderr
    assert not (tmp_path / "run" / "ledger.jsonl").exists()


@needs_compiler
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_compiled_blocks_and_a_vocabulary_by_chunks_on_two_ranks(tmp_path: Path) -> None:
    """Two passes, activation checkpointing off; the head is cut into several chunks at this micro-batch size."""
    run_dir = tmp_path / "run"
    more = [COMPILE, "model.overrides.max_logits=40000", "privacy.clipping_mode=two_pass"]
    result = launch(train_arguments(run_dir, *more, ds_config="ds_configs/zero1.json"), timeout=1400)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert [line["type"] for line in ledger_lines(run_dir)].count("done") == 4


@needs_compiler
@pytest.mark.full
@pytest.mark.timeout(900)
def test_compiled_blocks_without_privacy(tmp_path: Path) -> None:
    arguments = train_arguments(tmp_path / "run", COMPILE, "privacy.enabled=false", ds_config="ds_configs/zero2.json")
    result = alone(["--engine", "local", *arguments], timeout=800)
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert "done: 4 steps, no formal guarantee" in result.stdout
