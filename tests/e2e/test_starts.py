"""Starts: requests to stop, by the real command, and options of whole runs."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import pytest
import torch

from data.index.build import build_index
from tests.data.support.servers import range_server
from tests.distributed.ranks import ROOT
from tests.e2e.launch import (
    RECIPE,
    count,
    kill_group,
    launch,
    ledger_lines,
    start_ranks,
    train_arguments,
)
from tests.trainer.conftest import one_rank  # noqa: F401
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.ranks.discovery import Ranks
from trainer.run.start import train


def in_this_process(run_dir: Path, *options: str) -> int:
    """One step; returns the exit code."""
    more = ("privacy.clipping_mode=bookkeeping", "train.num_steps=1", *options)
    config, machine = (
        load_config(ROOT / RECIPE, more),
        load_machine_settings(ROOT / "ds_configs/zero1.json"),
    )
    return train(config, machine, "local", run_dir, ROOT, Ranks(), torch.device("cpu"))


@pytest.mark.full
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_ranks_set_up_ends_all_with_7(
    tmp_path: Path, number: signal.Signals
) -> None:
    """One of them is signalled; the same command then trains."""
    run_dir, log = tmp_path / "run", tmp_path / "log"
    arguments = train_arguments(
        run_dir, "train.num_steps=2", "heldout.num_captions=0", ds_config="ds_configs/zero1.json"
    )
    ranks = start_ranks(["--engine", "local", *arguments], 2, log)
    try:
        deadline = time.monotonic() + 120
        while not (run_dir / "private").exists():
            assert all(rank.poll() is None for rank in ranks) and time.monotonic() < deadline, (
                log.read_text()
            )
            time.sleep(0.005)
        os.kill(ranks[1].pid, number)
        assert [rank.wait(timeout=60) for rank in ranks] == [7, 7], log.read_text()
        said = log.read_text()
        assert (
            said.count("stopped on request") == 1
            and "error" not in said
            and "Traceback" not in said
        ), said
        assert count(run_dir, "intent") == 0
        ranks = start_ranks(["--engine", "local", *arguments], 2, log)
        assert [rank.wait(timeout=120) for rank in ranks] == [0, 0], log.read_text()
    finally:
        for rank in ranks:
            kill_group(rank)


@pytest.mark.usefixtures("one_rank")
def test_a_public_run_streams(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    options = (
        "data.streaming=true",
        "data.provenance=public",
        "privacy.enabled=false",
        "data.num_workers=1",
    )
    assert in_this_process(tmp_path / "run", *options) == 0
    assert "done: 1 steps, no formal guarantee" in capsys.readouterr().out


@pytest.mark.skipif(
    not (shutil.which("g++") or shutil.which("clang++")), reason="no C++ compiler on this machine"
)
@pytest.mark.full
@pytest.mark.timeout(1500)
def test_compiled_blocks_and_a_vocabulary_by_chunks_on_two_ranks(tmp_path: Path) -> None:
    """Two passes, activation checkpointing off; the head is cut into several chunks at this micro-batch size."""
    run_dir = tmp_path / "run"
    more = [
        "train.compile=true",
        "model.overrides.max_logits=40000",
        "privacy.clipping_mode=two_pass",
    ]
    result = launch(
        train_arguments(run_dir, *more, ds_config="ds_configs/zero1.json"), timeout=1400
    )
    assert result.returncode == 0, (result.stdout + result.stderr)[-4000:]
    assert [line["type"] for line in ledger_lines(run_dir)].count("done") == 4


@pytest.mark.full
@pytest.mark.usefixtures("one_rank")
def test_requests_for_private_heldout_data_say_nothing_about_members(tmp_path: Path) -> None:
    """The same examples in the same order at every evaluation; the shards of the training data are staged."""
    demo = ROOT / "data" / "demo"
    index = build_index(sorted(demo.glob("train-*.tar")), tmp_path / "index")
    logs, members = [], []
    with range_server(demo) as server:
        for number in range(2):  # each run draws a key of its own
            server.requests.clear()
            run_dir = tmp_path / f"run{number}"
            options = (
                f"data.index={index.index_dir}",
                f"data.staging={tmp_path}/store{number}",
                "data.remote.connections=1",
                f"heldout.shards={server.url}/heldout-00000.tar",
                "heldout.every_steps=1",
                f"data.shards={server.url}/train-{{00000..00002}}.tar",
            )
            assert in_this_process(run_dir, *options) == 0
            public, private = (
                (run_dir / name).read_text() for name in ("metrics.jsonl", "private/metrics.jsonl")
            )
            assert "heldout/loss" in private and "heldout/loss" not in public, (
                "naming the data made them private"
            )
            staged = [request for request in server.requests if "train" in request[0]]
            logs.append(
                (staged, [request for request in server.requests if "heldout" in request[0]])
            )
            members.append(
                [line.get("train/loss") for line in map(json.loads, private.splitlines())]
            )
    assert members[0] != members[1], "other keys"
    assert logs[0] == logs[1]
    staged, heldout = logs[0]
    assert [path for path, span in staged] == [f"/{entry.name}" for entry in index.entries]
    assert all(span is None for _, span in staged)
    spans = [span for _, span in heldout if span is not None]
    each = len(set(spans))
    assert each >= 16 and len(spans) >= 2 * 16
