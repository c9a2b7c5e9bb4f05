"""The launchers as a user calls them: every engine, and no crash at exit."""

import contextlib
import itertools
import json
import os
import signal
import subprocess
import sys
import time
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from tests.distributed.ranks import ROOT, free_port, quiet_environment
from tests.e2e.launch import (
    alone,
    count,
    kill_group,
    launch,
    ledger_lines,
    start_ranks,
    train_arguments,
    train_together,
)

ENGINES = [("deepspeed", 1), ("deepspeed", 2), ("deepspeed", 3), ("fsdp", 3), ("fairscale", 1)]


def launch_and_check(run_dir: Path, engine: str, stage: int, launcher: Any = "deepspeed") -> None:
    workers = f"data.num_workers={int(launcher == 'deepspeed')}"
    arguments = train_arguments(run_dir, "heldout.num_captions=1", workers, ds_config=f"ds_configs/zero{stage}.json")
    result = launch(["--engine", engine, *arguments], launcher=launcher)
    said = result.stdout + result.stderr
    assert result.returncode == 0, said[-4000:]
    assert "terminate called" not in said
    assert "done: 4 steps, epsilon" in result.stdout
    assert (
        result.stdout.count("noise-to-signal ") == 1
        and "accumulated over 4 steps: as runs that learned nothing" in result.stdout
    )
    kinds = [line["type"] for line in ledger_lines(run_dir)]
    assert kinds == ["open", "session", *["intent", "done", "checkpoint"] * 4, "close"]


@pytest.mark.full
@pytest.mark.parametrize("engine", ENGINES)
@pytest.mark.parametrize("launcher", ["deepspeed", "torchrun", "mpirun"])
def test_a_launch_of_each_engine(tmp_path: Path, launcher: str, engine: tuple[str, int]) -> None:
    launch_and_check(tmp_path / "run", *engine, launcher)


@pytest.mark.full
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("engine", "stage"), ENGINES)
def test_twenty_launches_of_each_engine(tmp_path: Path, engine: str, stage: int) -> None:
    for i in range(20):
        launch_and_check(tmp_path / str(i), engine, stage)


def stop_all_of(sessions: set[int], spared: int | None = None) -> None:
    """SIGTERM to every process of these sessions, data workers included."""
    for line in subprocess.run(
        ["ps", "-eo", "pid,sid"], capture_output=True, text=True, check=True
    ).stdout.splitlines()[1:]:
        pid, session = map(int, line.split())
        if session in sessions and pid != spared:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGTERM)


def endless(run_dir: Path) -> list[str]:
    return train_arguments(
        run_dir, "train.num_steps=400", "heldout.num_captions=0", "train.checkpoint_every=1000", "data.num_workers=1"
    )


def stopped_in_good_order(run_dir: Path, said: str) -> None:
    assert "stopped on request" in said, said[-3000:]
    done = count(run_dir, "done")
    assert (run_dir / "checkpoints" / f"step-{done:08d}" / "manifest.json").exists()


def test_sigterm_to_everything_saves_and_exits_7(tmp_path: Path) -> None:
    """Data workers must outlive it until the trainer has stopped."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    ranks = start_ranks(endless(run_dir), 2, log)
    try:
        deadline = time.monotonic() + 120
        while count(run_dir, "done") < 3:
            assert all(r.poll() is None for r in ranks) and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.01)
        stop_all_of({rank.pid for rank in ranks})
        assert [rank.wait(timeout=90) for rank in ranks] == [7, 7], log.read_text()[-3000:]
    finally:
        for rank in ranks:
            kill_group(rank)
    stopped_in_good_order(run_dir, log.read_text())


@pytest.mark.full
def test_sigterm_to_the_tree_of_a_launcher(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    deepspeed = str(Path(sys.executable).parent / "deepspeed")
    with (tmp_path / "log").open("w") as log:
        launcher = subprocess.Popen(
            [deepspeed, "--num_gpus", "2", "--master_port", str(free_port()), "launch_scripts/train.py", *endless(run_dir)],
            cwd=ROOT, env=quiet_environment(), stdout=log, stderr=log, start_new_session=True,
        )  # fmt: skip
    try:
        deadline = time.monotonic() + 120
        while count(run_dir, "done") < 3:
            assert launcher.poll() is None and time.monotonic() < deadline, (tmp_path / "log").read_text()
            time.sleep(0.01)
        stop_all_of({launcher.pid}, spared=launcher.pid)
        launcher.wait(timeout=90)
    finally:
        kill_group(launcher)
    stopped_in_good_order(run_dir, (tmp_path / "log").read_text())


@pytest.mark.full
def test_moving_between_engines_and_world_sizes(tmp_path: Path) -> None:
    """ZeRO-3 on two ranks, then local on one, then bf16 ZeRO-1 on two: one run, one ledger."""
    run_dir, more = tmp_path / "run", ["train.num_steps=60", "heldout.num_captions=0", "train.checkpoint_every=1000"]
    stopped_after(run_dir, 2, ["--engine", "deepspeed"], more)
    stopped_after(run_dir, 1, ["--engine", "local"], more)
    result = launch(train_arguments(run_dir, *more, ds_config="ds_configs/zero1_bf16.json"))
    assert result.returncode == 0, result.stdout + result.stderr
    assert count(run_dir, "session") == 3
    assert count(run_dir, "intent") == count(run_dir, "done") == 60


@pytest.mark.full
def test_a_model_built_in_shards_stops_and_resumes(tmp_path: Path) -> None:
    run_dir, config = tmp_path / "run", "ds_configs/zero3_init_bf16.json"
    more = ["train.num_steps=60", "heldout.num_captions=0", "train.checkpoint_every=1000"]
    stopped_after(run_dir, 2, [], ["--ds_config", config, *more])
    result = launch(train_arguments(run_dir, *more, ds_config=config))
    assert result.returncode == 0, result.stdout + result.stderr
    assert "resuming after step" in result.stdout
    assert count(run_dir, "session") == 2
    assert count(run_dir, "intent") == count(run_dir, "done") == 60


def stopped_after(run_dir: Path, world_size: int, options: list[str], more: list[str]) -> None:
    """Runs until two more steps are done, then asks rank 0 to stop by SIGUSR1."""
    log, before = run_dir.with_suffix(".log"), count(run_dir, "done")
    ranks = start_ranks([*options, *train_arguments(run_dir, *more)], world_size, log)
    try:
        deadline = time.monotonic() + 120
        while count(run_dir, "done") < before + 2:
            assert all(r.poll() is None for r in ranks) and time.monotonic() < deadline, log.read_text()[-3000:]
            time.sleep(0.005)
        os.kill(ranks[0].pid, signal.SIGUSR1)
        assert [r.wait(timeout=60) for r in ranks] == [7] * world_size, log.read_text()[-3000:]
    finally:
        for rank in ranks:
            kill_group(rank)


def test_contract_11_and_12_a_run_without_noise_says_so(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    result = alone(["--engine", "local", *train_arguments(run_dir, "privacy.noise_multiplier=0")])
    assert result.returncode == 0, result.stderr
    assert "formal_guarantee: false" in result.stdout and "noise-to-signal" not in result.stdout
    assert "epsilon" not in result.stdout.replace("no epsilon", "")
    manifest = json.loads((run_dir / "checkpoints" / "step-00000004" / "manifest.json").read_text())
    assert manifest["formal_guarantee"] is False and manifest["reasons"]
    assert "epsilon" not in (run_dir / "metrics.jsonl").read_text()


@pytest.mark.full
def test_two_pass_and_per_layer_clipping_from_the_recipe(tmp_path: Path) -> None:
    more = ["privacy.clipping_mode=two_pass", "privacy.clipping_function=per_layer"]
    result = launch(train_arguments(tmp_path / "run", *more))
    assert result.returncode == 0, result.stdout + result.stderr
    assert all(
        line["releases"] == [{"name": "gradient", "sensitivity": pytest.approx(1.0), "std": pytest.approx(4.0)}]
        for line in ledger_lines(tmp_path / "run")
        if line["type"] == "intent"
    )


def test_privacy_can_be_switched_off(tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    off = ["privacy.enabled=false", "train.num_steps=3"]
    result = alone(["--engine", "local", *train_arguments(run_dir, *off)])
    assert result.returncode == 0, result.stderr
    assert "formal_guarantee: false" in result.stdout


@pytest.fixture(scope="module")
def finished(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run of two ranks, to be read only; quickstart and lost launchers start DeepSpeed's engine and FSDP2."""
    run_dir = tmp_path_factory.mktemp("finished") / "run"
    arguments = ["--engine", "fairscale", *train_arguments(run_dir, ds_config="ds_configs/zero1.json")]
    train_together(arguments, run_dir.with_suffix(".log"))
    return run_dir


def test_contract_12_private_quantities_stay_private(finished: Path) -> None:
    run_dir = finished
    assert (run_dir / "private").stat().st_mode & 0o777 == 0o700
    assert (run_dir / "private" / "sampling.key").stat().st_mode & 0o777 == 0o600
    private = set(json.loads((run_dir / "private" / "metrics.jsonl").read_text().splitlines()[-1])) - {
        "step",
        "time_unix",
    }
    public = "".join(
        p.read_text(errors="replace") for p in run_dir.rglob("*") if p.is_file() and "private" not in p.parts
    )
    assert {"train/loss", "train/clipped_fraction", "train/batch_size"} <= private
    assert not [name for name in private if name in public]
    key = (run_dir / "private" / "sampling.key").read_bytes()
    assert key.hex() not in public and str(key) not in public


def test_tensorboard_shows_what_matters(finished: Path) -> None:
    port = free_port()
    board = subprocess.Popen(
        [str(Path(sys.executable).parent / "tensorboard"), "--logdir", str(finished / "tensorboard"), "--port", str(port)],
        env=quiet_environment(), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True,
    )  # fmt: skip
    try:
        tags = get(port, "scalars/tags")["."]
        assert {"privacy/epsilon", "optimizer/lr", "heldout/loss"} <= set(tags)
        epsilons = get(port, "scalars/scalars", run=".", tag="privacy/epsilon")
        assert [point[1] for point in epsilons] == [1, 2, 3, 4]
        assert all(0 < a[2] < b[2] for a, b in itertools.pairwise(epsilons))
        assert [point[1] for point in get(port, "scalars/scalars", run=".", tag="heldout/loss")] == [0, 4]
        assert "heldout/samples" in get(port, "images/tags")["."]
        assert any("heldout/samples" in tag for tag in get(port, "text/tags")["."])
    finally:
        kill_group(board)


def get(port: int, path: str, **query: str) -> dict:
    """TensorBoard's JSON, as soon as it is up and has read its files."""
    url = f"http://127.0.0.1:{port}/data/plugin/{path}?{urllib.parse.urlencode(query)}"
    deadline = time.monotonic() + 60
    while True:
        try:
            with urllib.request.urlopen(url, timeout=5) as answer:
                found = json.load(answer)
            if found:
                return found
        except OSError:
            pass
        assert time.monotonic() < deadline, f"{url} did not answer"
        time.sleep(0.3)
