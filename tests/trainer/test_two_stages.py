"""Both stages of a shipped pair of recipes at tiny size: without stage one a clear line, then one, two, and two resumed."""

import fcntl
import re
import shutil
from pathlib import Path

import pytest
import torch

from privacy.checkpoints.read import open_checkpoint
from tests.trainer.test_recipes import ROOT, TINY
from trainer.config.machine import load_machine_settings
from trainer.config.recipe import load_config
from trainer.errors import ConfigError
from trainer.ranks.discovery import Ranks
from trainer.run import start as training

ONE, TWO = "synthetic_vip_nano", "vip_nano"
SHRUNK = [
    *(change for change in TINY if not re.search("num_tokens|tokenizer|shards", change)),
    "data.num_examples=1000",
    "train.checkpoint_every=1",
    "train.keep_checkpoints=3",
]


def run(recipe: str, folder: Path, *changes: str, shard: int = 0) -> int:
    declared = ["data.provenance=synthetic"] if recipe == ONE else []
    shards = [f"data.shards=data/demo/train-0000{shard}.tar", *declared]
    config = load_config(ROOT / f"recipes/{recipe}.toml", [*SHRUNK, *shards, *changes])
    machine = load_machine_settings(ROOT / "ds_configs/zero1.json")
    return training.train(
        config, machine, "local", folder / recipe, ROOT, Ranks(), torch.device("cpu")
    )


@pytest.mark.full
@pytest.mark.usefixtures("one_rank")
def test_two_stages_and_a_resume(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(
        fcntl, "flock", lambda *arguments: None
    )  # held until the process ends, and this one resumes
    start = f"init.checkpoint={tmp_path / ONE}"
    with monkeypatch.context() as patched:
        patched.setattr(training, "training_table", lambda *_: pytest.fail("data were looked at"))
        with pytest.raises(ConfigError) as refused:
            run(TWO, tmp_path, start)
    command = (ROOT / f"recipes/{ONE}.toml").read_text().splitlines()[0].removeprefix("# ")
    assert f"make it first: {command}" in str(refused.value) and "\n" not in str(refused.value)

    # The demonstration's first shard plays the rendered images, its second the private ones: one and the same is refused.
    assert run(ONE, tmp_path) == 0
    with pytest.raises(ConfigError, match="shards of this run's private data"):
        run(TWO, tmp_path / "same", start)
    assert run(TWO, tmp_path, start, "train.max_minutes=1e-9", shard=1) == 7
    before, waiting = open_checkpoint(tmp_path / ONE), open_checkpoint(tmp_path / TWO)
    assert (before.step, waiting.step) == (2, 0)
    assert all(
        torch.equal(waiting.full("param", n), before.full("param", n)) for n in before.shapes
    )
    facts = waiting.manifest["initialisation"]
    assert (facts["run"], facts["training_data"], facts["at_random"]) == (ONE, "synthetic", [])

    shutil.rmtree(tmp_path / ONE)  # a resumed second stage needs it no more
    assert run(TWO, tmp_path, start, shard=1) == 0
    after = open_checkpoint(tmp_path / TWO)
    assert (
        after.step == 2
        and after.manifest["initialisation"] == facts
        and after.manifest["formal_guarantee"]
    )
    assert not all(
        torch.equal(after.full("param", n), waiting.full("param", n)) for n in after.shapes
    )
