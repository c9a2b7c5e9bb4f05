"""Public data may stream in the order of their shards; a private run is refused."""

from pathlib import Path

from tests.e2e.launch import alone, train_arguments

PUBLIC = ("data.streaming=true", "data.provenance=public")


def test_a_public_run_streams(tmp_path: Path) -> None:
    options = (*PUBLIC, "privacy.enabled=false", "data.num_workers=1")
    done = alone(train_arguments(tmp_path / "run", "--engine", "local", *options))
    assert done.returncode == 0, done.stderr
    assert "done: 4 steps, no formal guarantee" in done.stdout


def test_a_private_run_does_not(tmp_path: Path) -> None:
    done = alone(train_arguments(tmp_path / "run", "--engine", "local", *PUBLIC))
    assert done.returncode == 2 and "data.streaming amplifies no privacy" in done.stderr
    assert not (tmp_path / "run").exists()
