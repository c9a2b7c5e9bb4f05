"""What an export says of its origin survives every way back in, and weights that no ledger knows do not resume a run."""

import json
import shutil
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from models.base import ImageEncoder
from models.config import EncoderConfig, VitConfig
from models.converters.huggingface import CONFIG, WEIGHTS, to_vit_model
from models.converters.names import TIMM
from models.converters.native import encoder_tensors
from models.converters.weights import write_weights
from privacy.errors import PrivacyStateRefused
from privacy.run.run import load_newest
from tests.models.released import DEPTH, HEADS, OF_ENCODER, PATCH, SIDE, D
from tests.trainer.test_warm_start import SYNTHETIC, write
from trainer.errors import ConfigError
from trainer.weights.import_weights import import_weights

PRIVATE_LINK = {
    "kind": "checkpoint",
    "training_data": "private",
    "guarantee": None,
    "before_that": {"kind": "random"},
}
PRIVATE: list[dict[str, Any]] = [
    {"training_data": {"provenance": "private"}},
    {"training_data": {"provenance": "public", "shards": []}, "initialisation": PRIVATE_LINK},
    {"run": "says nothing of its data"},
]


def exported(folder: Path, kind: str, about: dict[str, Any]) -> Path:
    """An encoder as export.py writes it: `hf` is a folder, `vip` a torch file with config.json next to it."""
    size = {"image_size": SIDE, "patch_size": PATCH, "width": D, "depth": DEPTH, "num_heads": HEADS}
    config = EncoderConfig(encoder=VitConfig(**size, qkv_bias=True))
    encoder = ImageEncoder.build(config, generator=torch.Generator().manual_seed(0)).encoder
    folder.mkdir()
    stated, tensors = (
        to_vit_model(encoder) if kind == "hf" else ({}, encoder_tensors(TIMM, encoder))
    )
    (folder / CONFIG).write_text(json.dumps({**stated, "about": about}))
    if kind == "hf":
        write_weights(folder / WEIGHTS, tensors)
        return folder
    torch.save({"model": tensors}, folder / "model.pth")
    return folder / "model.pth"


def imported(source: Path, kind: Any, provenance: Any) -> dict[str, Any]:
    folder = source if source.is_dir() else source.parent
    told: dict[str, Any] = {} if kind == "hf" else {"size": "vip_nano", "overrides": OF_ENCODER}
    return import_weights(kind, source, folder.with_name("in"), provenance=provenance, **told)


@pytest.mark.parametrize("kind", ["hf", "vip"])
@pytest.mark.parametrize("about", PRIVATE, ids=["own", "behind", "unstated"])
def test_private_data_cannot_be_declared_public_on_the_way(
    tmp_path: Path, kind: str, about: dict[str, Any]
) -> None:
    source = exported(tmp_path / "out", kind, about)
    with pytest.raises(
        ConfigError, match="exported from a run on private data, so --provenance public contradicts"
    ):
        imported(source, kind, "public")
    assert imported(source, kind, None)["training_data"] == {"provenance": "private"}


@pytest.mark.parametrize("kind", ["hf", "vip"])
def test_shards_survive_the_way_through_other_formats(tmp_path: Path, kind: str) -> None:
    stated = {"provenance": "synthetic", "shards": ["ab" * 8]}
    manifest = imported(exported(tmp_path / "out", kind, {"training_data": stated}), kind, None)
    assert manifest["training_data"] == stated
    source = exported(tmp_path / "tuned", kind, {"training_data": stated})
    shutil.rmtree(tmp_path / "in")
    assert imported(source, kind, "private")["training_data"] == {"provenance": "private"}, (
        "trained further by others"
    )


def test_weights_of_others_say_nothing(tmp_path: Path) -> None:
    source = exported(tmp_path / "out", "hf", {})
    assert imported(source, "hf", "public")["training_data"] == {"provenance": "public"}


@pytest.mark.usefixtures("one_rank")
def test_a_checkpoint_that_no_ledger_remembers_does_not_resume_a_run(tmp_path: Path) -> None:
    """As of an import put into a run folder: its weights would enter without a look at what is behind them."""
    known: list[Any] = []
    ledger: Any = SimpleNamespace(require_not_shorter_than=known.append, on_main=known.append)
    folder: Any = SimpleNamespace(checkpoints=tmp_path / "checkpoints")
    checkpoint = write(tmp_path, SYNTHETIC)
    with pytest.raises(PrivacyStateRefused, match="remembers no line of this run's ledger"):
        load_newest(folder, ledger, None)
    position = {"seq": 1, "hash": "ab"}
    again: Any = SimpleNamespace(
        checkpoints=write(tmp_path / "b", {**SYNTHETIC, "ledger": position}).path.parent
    )
    found = load_newest(again, ledger, None)
    assert found is not None and found.step == checkpoint.step
    (remembered, record) = known
    assert remembered == position and record.__closure__[0].cell_contents.path == found.path
