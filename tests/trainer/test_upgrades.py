"""A run folder that version 0.1.0 left after two of four steps is verified, shown and resumed by this version (docs/upgrades.md).

The folder lies beside this file; every later version keeps it as it is. `RECORD_RUN=1` makes it anew, which only a version that
was not released yet may do. Its sampling key is no secret: the data are the demo's.
"""

import json
import os
import shutil
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest
import torch

from privacy import verify
from privacy.step import folder as run_folder
from tests.processes import ROOT
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.ranks.discovery import Ranks
from trainer.report import build_card
from trainer.run.start import train
from trainer.weights.open_model import open_model

ARCHIVE = Path(__file__).with_name("run-0.1.0.tar.xz")
SHAPE = "encoder_depth = 1, encoder_width = 16, decoder_depth = 1, decoder_width = 16, patch_size = 8"
HEADS = "encoder_num_heads = 2, decoder_num_heads = 2"
OPTIONS = (
    *("name=run-0.1.0", "data.shards=data/demo/train-00000.tar", "heldout.num_examples=2", "heldout.num_captions=0"),
    *("model.kind=masked_autoencoder", "model.size=vip_base", f"model.overrides={{ {SHAPE}, {HEADS} }}"),
    *("data.image_size=16", "train.num_steps=4", "train.keep_checkpoints=1", "privacy.reserved_attempts=9"),
    *("optimizer.name=sgd", "optimizer.momentum=0"),
)  # fmt: skip


def start(folder: Path, recipe: Path, *options: str) -> int:
    config, machine = load_config(recipe, list(options)), load_machine_settings(ROOT / "ds_configs/zero1.json")
    return train(config, machine, "local", folder, ROOT, Ranks(), torch.device("cpu"))


@pytest.fixture
def folder(one_rank: torch.device, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    run = tmp_path / "run-0.1.0"
    if os.environ.get("RECORD_RUN"):
        with monkeypatch.context() as patched:
            patched.setattr(run_folder.RunFolder, "lock", lambda self: (self.private / "lock").touch(0o600))
            asked: list[int] = []
            patched.setattr(
                "trainer.loop.stopping.StopRequests.pending", lambda self: asked.append(1) or len(asked) > 2
            )
            assert start(run, ROOT / "recipes/tiny.toml", *OPTIONS) == 7
        for name in ("index", "heldout-index"):  # they know the times of the shards, and are made again
            shutil.rmtree(run / "private" / name)
        with tarfile.open(ARCHIVE, "w:xz") as archive:
            archive.add(run, "run-0.1.0")
        shutil.rmtree(run)
    with tarfile.open(ARCHIVE) as archive:
        archive.extractall(tmp_path, filter="tar")
    return run


def verified(verifier: Path, folder: Path) -> None:
    done = subprocess.run([sys.executable, verifier, folder], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stdout + done.stderr


def test_a_run_of_0_1_0_is_verified_and_resumed(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its own verifier and this one accept it; torch and the project may change on the way, and the ledger says so."""
    verified(folder / "verify.py", folder)
    assert verify.verify(folder, None)[0] == 0
    before = (folder / "ledger.jsonl").read_bytes()
    assert build_card(folder).formal_guarantee and open_model(folder).manifest["step"] == 2
    there = run_folder.version
    monkeypatch.setattr(run_folder, "version", lambda package: "99.0" if package == "torch" else there(package))
    assert start(folder, folder / "config.toml") == 0
    ledger = (folder / "ledger.jsonl").read_bytes()
    assert ledger.startswith(before)
    sessions = [line for line in map(json.loads, ledger.splitlines()) if line["type"] == "session"]
    assert [session["environment"]["packages"]["torch"] == "99.0" for session in sessions] == [False, True]
    verified(folder / "verify.py", folder)
    assert build_card(folder).formal_guarantee and open_model(folder).manifest["step"] == 4
