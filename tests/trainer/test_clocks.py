"""No clock leaves a run (contract 12): the time that one example takes to decode is in every one of them.

Two runs with the same coins, noise and data publish the same bytes, though the second meets slow examples, a slow disk and a
machine with other free memory.
"""

import fcntl
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from data.examples.examples import CaptionExample
from data.reading.reader import RawExample
from privacy.card.run_card import write_card
from privacy.checkpoints import write as checkpoint_writer
from privacy.run import run as loop
from privacy.step.run_folder import RunFolder
from tests.distributed.ranks import ROOT
from tests.e2e.launch import RECIPE
from tests.e2e.planted_train import SeededNoise, fixed_coins
from tests.privacy.published import read_metrics
from trainer.card_of_run import build_card
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.ranks.discovery import Ranks
from trainer.run import clipping_mode
from trainer.run.start import train

pytestmark = pytest.mark.usefixtures("trusted_models")

MACHINE = load_machine_settings(ROOT / "ds_configs" / "zero1.json")
SMALL = [
    "data.num_workers=0",
    "privacy.expected_batch_size=6",
    "train.micro_batch_size=3",
    "heldout.num_examples=4",
]
STOPPED_AT = 2


def published(run: Path) -> dict[str, bytes]:
    """Every file but those in the run's private folder."""
    files = [p for p in run.rglob("*") if p.is_file() and p.relative_to(run).parts[0] != "private"]
    return {str(path.relative_to(run)): path.read_bytes() for path in files}


def start(run: Path, device: torch.device, *overrides: str) -> int:
    config = load_config(ROOT / RECIPE, [*SMALL, "train.async_checkpoints=true", *overrides])
    return train(config, MACHINE, "local", run, ROOT, Ranks(), device, SeededNoise())


def whole_run(tmp_path: Path, name: str, device: torch.device, *overrides: str) -> dict[str, bytes]:
    """What a run published that was stopped, resumed, finished and, where that is quick, reported."""
    run = tmp_path / "run"
    with pytest.MonkeyPatch.context() as patched:
        patched.setattr(
            fcntl, "flock", lambda *arguments: None
        )  # held until the process ends, and this one resumes
        patched.setattr(secrets, "token_bytes", fixed_coins())
        take_step = loop.train_step

        def stopping(mechanism: Any, charge: Any, step: int, batches: Iterator[Any]) -> Any:
            if step == STOPPED_AT:
                RunFolder(run).stop.touch()
            return take_step(mechanism, charge, step, batches)

        patched.setattr(loop, "train_step", stopping)
        assert start(run, device, *overrides) == 7
        patched.setattr(loop, "train_step", take_step)
        assert start(run, device, *overrides) == 0
    if "privacy.sampling=shuffle" in overrides:  # with a closed form for epsilon
        write_card(run, build_card(run))
    found = published(run)
    run.rename(tmp_path / name)
    return found


def test_a_slow_example_a_slow_disk_and_less_memory_change_nothing_that_is_published(
    tmp_path: Path, one_rank: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shuffled batches have one size, so that only the clock tells two steps apart; test_non_interference.py has the others."""
    quick = whole_run(tmp_path, "quick", one_rank, "privacy.sampling=shuffle")
    decode, write = CaptionExample.__call__, checkpoint_writer.save_file

    def slow_decode(self: CaptionExample, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        time.sleep(0.05 if len(raw.image or b"") % 7 == 0 else 0.0)
        return decode(self, raw, key)

    def slow_write(tensors: dict[str, torch.Tensor], path: Path) -> None:
        time.sleep(0.5)
        write(tensors, path)

    monkeypatch.setattr(CaptionExample, "__call__", slow_decode)
    monkeypatch.setattr(checkpoint_writer, "save_file", slow_write)
    monkeypatch.setattr(clipping_mode.choose_mode, "__defaults__", (lambda device: 50 << 30,))
    slow = whole_run(tmp_path, "slow", one_rank, "privacy.sampling=shuffle")
    assert sorted(slow) == sorted(quick)
    assert [name for name in quick if slow[name] != quick[name]] == []
    # And files in private/ keep the times.
    (*_, last) = read_metrics(tmp_path / "slow/private")
    assert last["performance/step_seconds"] > 0 and last["performance/communication_bytes"] >= 0
    assert abs(last["time_unix"] - time.time()) < 600
    phases = [
        last[f"performance/{name}_seconds"]
        for name in ("gradients", "intent", "reduction", "noise", "update")
    ]
    assert (
        0 < sum(phases) <= last["performance/step_seconds"]
        and last["performance/model_flops_per_second"] > 0
    )
    assert "performance/mfu" not in last, "the peak of this device is not known"
    assert not [
        name
        for line in read_metrics(tmp_path / "slow")
        for name in line
        if name.startswith(("perf", "time"))
    ]
