"""Bad input ends in one clear line and the exit code of the design; nothing is lost."""

import io
import json
import shutil
import socket
import tarfile
import time
from pathlib import Path

import pytest

from tests.distributed.ranks import ROOT
from tests.e2e.launch import alone, count, kill_group, launch, start_ranks, train_arguments, train_together


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


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A whole run of two steps on two ranks."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    train_together(train_arguments(run_dir, "train.num_steps=2"), run_dir.with_suffix(".log"))
    return run_dir


def test_the_same_command_on_a_finished_run_says_so(finished: Path) -> None:
    before = (finished / "ledger.jsonl").read_bytes()
    result = alone(train_arguments(finished, "train.num_steps=2"))
    assert result.returncode == 0
    assert "finished" in result.stdout
    assert (finished / "ledger.jsonl").read_bytes() == before


@pytest.mark.parametrize(
    ("override", "word"),
    [
        ("privacy.noise_multiplier=0.9", "noise_multiplier"),
        ("privacy.max_grad_norm=2.0", "max_grad_norm"),
        ("train.num_steps=3", "num_steps"),
        ("privacy.target_delta=1e-6", "target_delta"),
        ("privacy.expected_batch_size=25", "expected_batch_size"),
    ],
)
def test_frozen_privacy_fields(finished: Path, override: str, word: str) -> None:
    refused(
        train_arguments(finished, *(["train.num_steps=2"] if "num_steps" not in override else []), override), 2, word
    )


def copied(finished: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(finished, tmp_path / "copy"))


def test_a_tampered_ledger_is_refused(finished: Path, tmp_path: Path) -> None:
    run_dir = copied(finished, tmp_path)
    lines = (run_dir / "ledger.jsonl").read_text().splitlines(keepends=True)
    (run_dir / "ledger.jsonl").write_text("".join(lines[:-4]))
    refused(train_arguments(run_dir, "train.num_steps=2"), 4, "ledger.jsonl")
    (run_dir / "ledger.jsonl").write_text("".join(lines).replace('"std":4.0', '"std":8.0', 1))
    refused(train_arguments(run_dir, "train.num_steps=2"), 4, "ledger.jsonl")
    (run_dir / "ledger.jsonl").unlink()
    refused(train_arguments(run_dir, "train.num_steps=2"), 4, "ledger")


def test_a_readable_or_foreign_key_is_refused(finished: Path, tmp_path: Path) -> None:
    run_dir = copied(finished, tmp_path)
    key = run_dir / "private" / "sampling.key"
    key.chmod(0o644)
    refused(train_arguments(run_dir, "train.num_steps=2"), 4, "sampling.key")
    key.chmod(0o600)
    key.write_bytes(bytes(32))
    refused(train_arguments(run_dir, "train.num_steps=2"), 4, "key")


def test_other_data_are_refused(finished: Path, tmp_path: Path) -> None:
    shard = tmp_path / "other.tar"
    with tarfile.open(shard, "w") as tar:
        for i in range(3000):
            info = tarfile.TarInfo(f"{i:05d}.txt")
            info.size = 3
            tar.addfile(info, io.BytesIO(b"cat"))
    run_dir = copied(finished, tmp_path)
    shutil.rmtree(run_dir / "private" / "index")
    refused(train_arguments(run_dir, "train.num_steps=2", f"data.shards={shard}"), 2, "data")


def test_a_damaged_checkpoint_is_named(finished: Path, tmp_path: Path) -> None:
    run_dir = copied(finished, tmp_path)
    (file,) = (run_dir / "checkpoints" / "step-00000002").glob("rank-00000*")
    content = bytearray(file.read_bytes())
    content[-1] ^= 1
    file.write_bytes(bytes(content))
    refused(train_arguments(run_dir, "train.num_steps=2"), 2, "finished", "damaged", "step 1")


@pytest.mark.full
def test_two_trainers_on_one_run_folder(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    first = start_ranks(train_arguments(run_dir, "train.num_steps=1000"), 1, tmp_path / "log")[0]
    try:
        deadline = time.monotonic() + 120
        while not (run_dir / "ledger.jsonl").exists():
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.05)
        refused(train_arguments(run_dir, "train.num_steps=1000"), 2, "another trainer")
    finally:
        kill_group(first)


@pytest.mark.full
def test_a_stop_file_saves_and_exits_7_and_the_run_resumes(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    arguments = train_arguments(run_dir, "train.num_steps=20", "train.checkpoint_every=1000")
    first = start_ranks(arguments, 1, tmp_path / "log")[0]
    try:
        deadline = time.monotonic() + 120
        while count(run_dir, "done") < 2:
            assert first.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.01)
        (run_dir / "STOP").touch()
        assert first.wait(timeout=60) == 7, (tmp_path / "log").read_text()
    finally:
        kill_group(first)
    done = count(run_dir, "done")
    assert done < 20
    assert json.loads((run_dir / "checkpoints" / f"step-{done:08d}" / "manifest.json").read_text())["step"] == done
    assert alone(arguments).returncode == 0
    assert count(run_dir, "intent") == 20


def test_training_shards_are_no_public_heldout_data(tmp_path: Path) -> None:
    refused(
        train_arguments(tmp_path / "run", "heldout.shards=data/demo/train-00000.tar", "heldout.is_public=true"),
        2,
        "heldout",
    )
    copy = tmp_path / "elsewhere.tar"
    shutil.copy(ROOT / "data/demo/train-00000.tar", copy)
    copied_shard = [f"heldout.shards={copy}", "heldout.is_public=true"]
    refused(train_arguments(tmp_path / "copied", *copied_shard), 2, "has the bytes of a training shard")


def test_other_shards_of_the_same_folder_need_another_index(finished: Path, tmp_path: Path) -> None:
    run_dir = copied(finished, tmp_path)
    refused(train_arguments(run_dir, "train.num_steps=2", "data.shards=data/demo/train-0000[01].tar"), 2, "index")


def test_an_index_that_was_cut_short_is_made_again(finished: Path, tmp_path: Path) -> None:
    run_dir = copied(finished, tmp_path)
    (run_dir / "private" / "index" / "manifest.json").unlink()
    assert alone(train_arguments(run_dir, "train.num_steps=2")).returncode == 0


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


@pytest.mark.full
def test_an_error_under_the_launcher_keeps_its_exit_code(tmp_path: Path) -> None:
    result = launch(train_arguments(tmp_path / "run", "privacy.expected_batch_size=3001"))
    assert result.returncode == 2
    assert result.stderr.count("error: ") == 1
    assert "Traceback" not in result.stderr


def test_a_port_in_use_is_one_line(tmp_path: Path) -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        ranks = {"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1"}
        result = alone(train_arguments(tmp_path / "run"), **ranks, MASTER_PORT=str(taken.getsockname()[1]))
    assert result.returncode == 2
    assert result.stderr.strip().splitlines()[-1].startswith("error: no rendezvous at 127.0.0.1:")
    assert "Traceback" not in result.stderr
