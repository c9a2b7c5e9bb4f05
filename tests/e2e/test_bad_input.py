"""Bad input ends in one clear line and the exit code of the design; nothing is lost."""

import socket
from pathlib import Path

import pytest

from tests.e2e.launch import alone, kill_group, start_ranks, train_arguments, train_together


def refused(arguments: list[str], code: int, *words: str) -> None:
    result = alone(arguments)
    lines = result.stderr.strip().splitlines()
    assert result.returncode == code, result.stderr + result.stdout
    assert len(lines) == 1 and lines[0].startswith("error: "), result.stderr
    for word in words:
        assert word in lines[0], lines[0]


def test_empty_and_false_shards(tmp_path: Path) -> None:
    (tmp_path / "empty.tar").write_bytes(b"")
    refused(train_arguments(tmp_path / "a", f"data.shards={tmp_path}/empty.tar"), 2, "empty.tar")
    (tmp_path / "text.tar").write_text("this is no tar " * 100)
    refused(train_arguments(tmp_path / "b", f"data.shards={tmp_path}/text.tar"), 2, "text.tar")


def test_the_same_command_on_a_finished_run_says_so_and_another_one_is_refused(tmp_path: Path) -> None:
    """Exit 2 for a frozen field, 4 for a foreign key; tests/trainer/test_refused_starts.py has the many ways."""
    finished = tmp_path / "run"
    train_together(train_arguments(finished, "train.num_steps=2"), finished.with_suffix(".log"))
    before = (finished / "ledger.jsonl").read_bytes()
    result = alone(train_arguments(finished, "train.num_steps=2"))
    assert result.returncode == 0 and "finished" in result.stdout
    refused(train_arguments(finished, "train.num_steps=2", "privacy.max_grad_norm=2.0"), 2, "max_grad_norm")
    key = finished / "private" / "sampling.key"
    secret = key.read_bytes()
    key.write_bytes(bytes(32))
    refused(train_arguments(finished, "train.num_steps=2"), 4, "key")
    key.write_bytes(secret)
    refused(train_arguments(finished, "train.num_steps=2", "data.shards=data/demo/train-0000[01].tar"), 2, "index")
    (finished / "private" / "index" / "manifest.json").unlink()  # an index that was cut short is made again
    assert alone(train_arguments(finished, "train.num_steps=2")).returncode == 0
    assert (finished / "ledger.jsonl").read_bytes() == before


@pytest.mark.full
def test_an_error_of_all_ranks_is_said_once(tmp_path: Path) -> None:
    log = tmp_path / "log"
    ranks = start_ranks(train_arguments(tmp_path / "run", "privacy.expected_batch_size=3001"), 2, log)
    try:
        assert [rank.wait(60) for rank in ranks] == [2, 2], log.read_text()
    finally:
        for rank in ranks:
            kill_group(rank)
    assert log.read_text().count("error: ") == 1 and "Traceback" not in log.read_text()


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        result = alone(train_arguments(tmp_path / "run"), **ranks, MASTER_PORT=str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("error: no rendezvous at 127.0.0.1:")
    assert "Traceback" not in result.stderr
