"""zero-shot, aro, captions and retrieval of evaluate.py, on a small captioner that was not trained."""

import json
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.tokenizer import EMBEDDED_TOKENIZER, CaptionTokenizer
from evaluation.commands import aro, captions, retrieval, zero_shot
from models.captioner import build_captioner
from tests.evaluation.commands import evaluate
from tests.models.tiny import tiny_config
from trainer import open_model as opening
from trainer.errors import ConfigError
from trainer.open_model import OpenedModel

TOKENIZER = CaptionTokenizer.from_file(EMBEDDED_TOKENIZER)


class _Task:
    def make_example(self, *, train: bool) -> SimpleNamespace:
        return SimpleNamespace(tokenizer=TOKENIZER)


@pytest.fixture
def run_dir(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A run folder whose checkpoint opens as the small captioner."""
    config = tiny_config(
        vocab_size=TOKENIZER.vocab_size, bos_id=TOKENIZER.bos_id, eos_id=TOKENIZER.eos_id, num_tokens=32
    )
    model = build_captioner(config, generator=torch.Generator().manual_seed(0)).eval()
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
    """Two classes with two images each; captions beside them."""
    for number, name in enumerate(("circle/a", "circle/b", "star/c", "star/d")):
        path = tmp_path / "pictures" / f"{name}.png"
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(np.full((20, 20, 3), 60 * number, np.uint8)).save(path)
        path.with_suffix(".txt").write_text(f"picture number {number}\n")
    return tmp_path / "pictures"


def test_they_are_commands() -> None:
    assert [module.NAME for module in (zero_shot, aro, captions, retrieval)] == [
        "zero-shot",
        "aro",
        "captions",
        "retrieval",
    ]


def test_zero_shot(
    run_dir: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["zero-shot", "--checkpoint", str(run_dir)]
    record = evaluate(
        monkeypatch, capsys, *told, "--data", f"folder:{pictures}", "--template", "a {}", "--template", "{}"
    )
    assert record["details"]["num_prompts"] == 4 and record["scalars"]["chance"] == 0.5
    assert record["data"][0]["num_examples"] == 4 and set(record["details"]["per_class"]["mean"]) == {"circle", "star"}
    assert not record["data_is_public"] and list((run_dir / "private" / "evaluation").glob("zero-shot-*.json"))
    names = pictures.parent / "names.txt"
    names.write_text("red circle\nblue star\n\n")
    again = evaluate(
        monkeypatch, capsys, *told, "--data", f"folder:{pictures}", "--classes", str(names), "--calibration",
        f"folder:{pictures}",
    )  # fmt: skip
    assert [use["role"] for use in again["data"]] == ["images", "calibration"]
    shapes = evaluate(monkeypatch, capsys, *told, "--synthetic_shapes", "6")
    assert shapes["details"]["num_classes"] == 120 and shapes["data_is_public"]
    (pictures / "heart").mkdir()
    Image.new("RGB", (9, 9)).save(pictures / "heart" / "e.png")
    with pytest.raises(DataError, match="has no name"):
        evaluate(monkeypatch, capsys, *told, "--data", f"folder:{pictures}", "--classes", str(names))


def test_aro(
    run_dir: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["aro", "--checkpoint", str(run_dir)]
    record = evaluate(monkeypatch, capsys, *told, "--synthetic", "shapes", "--synthetic_tests", "3")
    assert {row["group"] for row in record["table"]} == {"colour", "shape", "relation", "order", "all"}
    assert {row["rule"] for row in record["table"]} == {"loss", "sum", "prior"}
    test = {"image": "circle/a.png", "true_caption": "a b c", "false_captions": ["c b a", "b a c", "b c a", "a c b"]}
    file = pictures / "order.json"
    file.write_text(json.dumps([test]))
    record = evaluate(monkeypatch, capsys, *told, "--test", f"order:{file}", "--images", str(pictures))
    assert record["scalars"]["chance"] == pytest.approx(0.2)
    for arguments, message in (
        (["--test", "vg:x.json", "--images", "."], "FORMAT one of"),
        (["--test", "order:x.json"], "--images DIR"),
        (["--synthetic", "shapes", "--synthetic_tests", "0"], "at least 1"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(monkeypatch, capsys, *told, *arguments)


def test_captions(
    run_dir: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    grid = pictures.parent / "grid.png"
    record = evaluate(
        monkeypatch, capsys, "captions", "--checkpoint", str(run_dir), "--data", f"folder:{pictures}", "--method", "beam",
        "--num_beams", "2", "--max_tokens", "5", "--grid", str(grid),
    )  # fmt: skip
    found = record["details"]["captions"]
    assert [row["references"] for row in found] == [[f"picture number {k}"] for k in range(4)] and grid.is_file()
    with pytest.raises(ConfigError, match="max_tokens"):
        evaluate(
            monkeypatch,
            capsys,
            "captions",
            "--checkpoint",
            str(run_dir),
            "--data",
            f"folder:{pictures}",
            "--max_tokens",
            "99",
        )


def test_retrieval(
    run_dir: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    told = ["retrieval", "--checkpoint", str(run_dir), "--data", f"folder:{pictures}"]
    record = evaluate(monkeypatch, capsys, *told, "--data_is_public")
    assert record["scalars"]["image_to_text_recall5_sum"] == 1.0 and record["details"]["num_captions"] == 4
    assert list((run_dir / "evaluation").glob("retrieval-*.json"))
    for path in pictures.rglob("*.txt"):
        path.unlink()
    with pytest.raises(DataError, match="found 0"):
        evaluate(monkeypatch, capsys, *told)
