"""What happens before the first step: requests to stop, and refusals that leave nothing behind."""

import os
import signal
import time
from pathlib import Path

import pytest

from tests.e2e.launch import alone, count, kill_group, start_ranks, train_arguments


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_ranks_set_up_ends_all_with_7(tmp_path: Path, number: signal.Signals) -> None:
    """One of them is signalled; the same command then trains."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(
        run_dir, "train.num_steps=2", "heldout.num_captions=0", ds_config="ds_configs/zero1.json"
    )
    ranks = start_ranks(["--engine", "local", *arguments], 2, log)
    try:
        deadline = time.monotonic() + 120
        while not (run_dir / "private").exists():
            assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline, log.read_text()
            time.sleep(0.005)
        os.kill(ranks[1].pid, number)
        assert [rank.wait(timeout=60) for rank in ranks] == [7, 7], log.read_text()
        said = log.read_text()
        assert said.count("stopped on request") == 1 and "error" not in said and "Traceback" not in said, said
        assert count(run_dir, "intent") == 0
        ranks = start_ranks(["--engine", "local", *arguments], 2, log)
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0], log.read_text()
    finally:
        for rank in ranks:
            kill_group(rank)


@pytest.mark.parametrize(
    ("engine", "ds_config", "words"),
    [
        ("fairscale", "ds_configs/zero3.json", "zero_optimization.stage 3 is refused with --engine fairscale"),
        pytest.param("local", "ds_configs/zero3_offload.json", "engine local cannot offload", marks=pytest.mark.full),
    ],
)
def test_what_an_engine_cannot_do_is_refused_before_the_run_folder_exists(
    tmp_path: Path, engine: str, ds_config: str, words: str
) -> None:
    result = alone(["--engine", engine, *train_arguments(tmp_path / "run", ds_config=ds_config)])
    assert result.returncode == 2 and words in result.stderr, result.stderr
    assert len(result.stderr.strip().splitlines()) == 1
    assert not (tmp_path / "run").exists()
