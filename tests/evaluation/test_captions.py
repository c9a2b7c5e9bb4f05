"""Captions of files and shards, their metrics, and the commands on a checkpoint of a fresh captioner."""

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.examples.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer
from evaluation.captions import CaptionWriter, caption_metrics, picture_grid, require_metrics
from evaluation.options import CaptionedOptions
from evaluation.sources import decoded_batches, open_source
from models.captioner import Captioner, build_captioner
from models.generation import greedy_captions
from tests.models.tiny import tiny_config
from trainer.errors import ConfigError

TOKENIZER = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER)


@pytest.fixture(scope="module")
def captioner() -> Captioner:
    config = tiny_config(
        vocab_size=TOKENIZER.vocab_size, bos_id=TOKENIZER.bos_id, eos_id=TOKENIZER.eos_id, num_tokens=8
    )
    model = build_captioner(config, generator=torch.Generator().manual_seed(0)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(1)))
    return model


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Three images, one with captions next to it, and a file that is none."""
    (tmp_path / "b").mkdir()
    for name, value in (("b/two.png", 90), ("a.jpg", 30), ("c.png", 200)):
        Image.new("RGB", (20, 16), (value, 10, 10)).save(tmp_path / name)
    (tmp_path / "a.txt").write_text("A red picture.\n\n dark \n")
    (tmp_path / "broken.png").write_bytes(b"no image")
    return tmp_path


def test_folders_files_and_shards(pictures: Path, tmp_path: Path) -> None:
    options = CaptionedOptions(cache=tmp_path / "cache")
    source = open_source(f"folder:{pictures}", options)
    (batch,) = decoded_batches(source, range(len(source)), image_size=16, batch_size=8)
    assert [Path(e.name).name for e in batch.examples] == ["a.jpg", "two.png", "broken.png", "c.png"]
    assert batch.is_usable_B.tolist() == [True, True, False, True]
    assert batch.examples[0].captions == ("A red picture.", "dark") and batch.examples[1].captions == ()
    assert batch.images_BCHW.shape == (4, 3, 16, 16)
    assert len(open_source(f"images:{pictures / 'a.jpg'},{pictures / 'c.png'}", options)) == 2
    shards = open_source("shards:data/demo/heldout-*.tar", options)
    batches = list(decoded_batches(shards, range(6), image_size=16, batch_size=4))
    assert [len(b.examples) for b in batches] == [4, 2] and all(e.captions for b in batches for e in b.examples)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("images:/nowhere/x.png", "no file"),
        ("folder:/nowhere", "no images"),
        ("x.png", "names no images"),
        ("arrays:x.npz", "names no images"),
    ],
)
def test_sources_that_are_not_there(text: str, message: str) -> None:
    with pytest.raises(DataError, match=message):
        open_source(text, CaptionedOptions())


def test_greedy_beam_and_sample(captioner: Captioner) -> None:
    images = np.random.default_rng(0).standard_normal((5, 3, 16, 16)).astype(np.float32)
    greedy = CaptionWriter(captioner, TOKENIZER)(images)
    tokens = greedy_captions(captioner, torch.from_numpy(images), max_tokens=7)
    assert [caption.text for caption in greedy] == [TOKENIZER.decode(row) for row in tokens.tolist()]
    likely = CaptionWriter(captioner, TOKENIZER, method="beam", num_beams=8, length_penalty=0)(images)
    assert sum(a.log_prob >= b.log_prob - 1e-4 for a, b in zip(likely, greedy, strict=True)) >= 4
    options: dict[str, Any] = {"method": "sample", "top_p": 0.9, "seed": 3}
    writer = CaptionWriter(captioner, TOKENIZER, **options)
    first, second = writer(images), writer(images)
    assert first != second, "later batches must not repeat the draws of the first"
    assert CaptionWriter(captioner, TOKENIZER, **options)(images) == first
    assert CaptionWriter(captioner, TOKENIZER)(images[:0]) == []
    assert picture_grid(list(images), [c.text for c in greedy]).size[0] > 100


def test_more_tokens_than_the_model_takes(captioner: Captioner) -> None:
    with pytest.raises(ConfigError, match="between 1 and 7"):
        CaptionWriter(captioner, TOKENIZER, max_tokens=8)


def test_metrics_without_package_or_java(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pycocoevalcap", None)
    with pytest.raises(ConfigError, match=r"pip install '\.\[captions\]'"):
        require_metrics()
    monkeypatch.setitem(sys.modules, "pycocoevalcap", ModuleType("pycocoevalcap"))
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="need a Java runtime"):
        require_metrics()


def test_metrics_of_captions() -> None:
    """A perfect caption has BLEU and ROUGE 1; BLEU-1 of the other is 4 words of 5 that occur (no brevity penalty)."""
    pytest.importorskip("pycocoevalcap")
    if shutil.which("java") is None:
        pytest.skip("no java")
    references = {"x": ["a red circle above a star"], "y": ["two blue hearts in a row", "hearts"]}
    perfect = caption_metrics({"x": references["x"][0], "y": references["y"][0]}, references)
    assert perfect["BLEU-4"] == pytest.approx(1.0) and perfect["ROUGE-L"] == pytest.approx(1.0)
    assert perfect["CIDEr"] > 5
    one = caption_metrics({"x": "A red circle above nothing else!"}, {"x": references["x"]})
    assert one["BLEU-1"] == pytest.approx(4 / 6, abs=1e-6)
    with pytest.raises(ConfigError, match="y has no reference"):
        caption_metrics({"y": "hearts"}, {})
    empty = caption_metrics({"x": "", "y": "hearts"}, references)
    assert 0 < empty["BLEU-1"] < 1
