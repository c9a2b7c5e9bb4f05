"""evaluate.py in this process; a run folder whose checkpoint opens as a small captioner, and pictures with captions."""

import json
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image

from data.examples.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer
from models.captioner import Captioner, build_captioner
from tests.evaluation.support import ROOT
from tests.models.tiny import tiny_config
from trainer.weights import open_model as opening
from trainer.weights.open_model import OpenedModel

TOKENIZER = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER)


Evaluate = Callable[..., dict[str, Any]]
"""Takes the words of a command line; gives the JSON object that it prints, or raises what the script says in one line."""


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Evaluate:
    def evaluate(*arguments: object) -> dict[str, Any]:
        monkeypatch.syspath_prepend(str(ROOT / "launch_scripts"))
        import evaluate as script

        monkeypatch.setattr(sys, "argv", ["evaluate.py", *map(str, arguments), "--json"])
        assert script.main() == 0
        out = capsys.readouterr().out
        assert out.count("\n") == 1
        return dict(json.loads(out))

    return evaluate


class _Task:
    def make_example(self, *, train: bool) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=TOKENIZER)


def captioner() -> Captioner:
    """Small, with the words of the embedded tokenizer."""
    words = {
        "vocab_size": TOKENIZER.vocab_size,
        "bos_id": TOKENIZER.bos_id,
        "eos_id": TOKENIZER.eos_id,
    }
    return build_captioner(
        tiny_config(**words, num_tokens=32), generator=torch.Generator().manual_seed(0)
    ).eval()


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """evaluate.py in this process; a run folder whose checkpoint opens as the small captioner."""
    model = captioner()
    manifest = {"step": 7, "formal_guarantee": False, "reasons": ["a test"]}
    monkeypatch.setattr(
        opening,
        "open_model",
        lambda path, **how: OpenedModel(model, _Task(), manifest, path),  # type: ignore[arg-type]
    )
    (tmp_path / "run" / "checkpoints").mkdir(parents=True)
    return tmp_path / "run"


@pytest.fixture
def pictures(tmp_path: Path) -> Path:
    """Two classes with two images each; captions next to them."""
    for number, name in enumerate(("circle/a", "circle/b", "star/c", "star/d")):
        path = tmp_path / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 20, 3), 60 * number, np.uint8)).save(path)
        path.with_suffix(".txt").write_text(f"picture number {number}\n")
    return tmp_path / "pictures"
