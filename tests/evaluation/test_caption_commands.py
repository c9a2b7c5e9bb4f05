"""zero-shot, aro and captions of evaluate.py, on a small captioner that was not trained."""

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.examples.transforms import eval_image
from evaluation.captions import says
from evaluation.compositional import pixels_of, read_aro
from models.generation import greedy_captions
from tests.evaluation.commands import evaluate
from tests.evaluation.conftest import TOKENIZER
from trainer.errors import ConfigError
from trainer.weights import open_model as opening


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
    shapes = evaluate(monkeypatch, capsys, *told, "--synthetic_shapes", "6")
    assert shapes["details"]["num_classes"] == 120 and shapes["data_is_public"]
    (pictures / "heart").mkdir()
    Image.new("RGB", (9, 9)).save(pictures / "heart" / "e.png")
    with pytest.raises(DataError, match="has no name"):
        evaluate(monkeypatch, capsys, *told, "--data", f"folder:{pictures}", "--classes", str(names))


def test_aro(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    told = ["aro", "--checkpoint", str(run_dir)]
    record = evaluate(monkeypatch, capsys, *told, "--synthetic", "shapes", "--synthetic_tests", "3")
    assert {row["group"] for row in record["table"]} == {"colour", "shape", "relation", "order", "all"}
    assert {row["rule"] for row in record["table"]} == {"loss", "sum", "prior"}
    for arguments, message in (
        (["--test", "vg:x.json", "--images", "."], "FORMAT one of"),
        (["--test", "order:x.json"], "--images DIR"),
    ):
        with pytest.raises(ConfigError, match=message):
            evaluate(monkeypatch, capsys, *told, *arguments)


ARO_PAIR = {"bbox_x": 2, "bbox_y": 3, "bbox_w": 10, "bbox_h": 9, "image_id": 7, "object1_name": "horse"}
"""Keys of a released record that both Visual Genome files have; boxes in pixels."""


def aro_file(kind: str, folder: Path) -> str:
    """A file in one of ARO's four formats, over the four pictures; returns the argument of --test."""
    names = ["circle/a.png", "circle/b.png", "star/c.png", "star/d.png"]
    records: list[dict[str, object]]
    if kind == "vg-relation":
        records = [
            ARO_PAIR | {"image_path": name, "relation_name": ("on", "on", "under", "behind")[k],
                        "true_caption": f"the horse is on the grass {k}", "false_caption": f"the grass is on the horse {k}"}
            for k, name in enumerate(names)
        ]  # fmt: skip
    elif kind == "vg-attribution":
        records = [
            ARO_PAIR | {"image_path": name, "attributes": ["brown", ("green", "red")[k % 2]],
                        "true_caption": f"the brown horse and the green grass {k}",
                        "false_caption": f"the green horse and the brown grass {k}"}
            for k, name in enumerate(names)
        ]  # fmt: skip
    elif kind == "coco-order":  # the Karpathy split as it is released: several captions of an image
        records = [
            {
                "image": name,
                "caption": ["A man rides a horse, on the beach.", "Two dogs run over the green grass today."],
            }
            for name in names[:2]
        ]
    else:  # Flickr30k, with false captions that were made before
        words = ["a dog runs fast", "runs dog a fast", "fast a dog runs", "dog fast runs a", "a fast runs dog"]
        records = [{"image_path": name, "true_caption": words[0], "false_captions": words[1:]} for name in names[2:]]
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(records))
    return f"{kind if kind.startswith('vg') else 'order'}:{file}"


@pytest.mark.parametrize(
    ("kind", "groups", "tests", "chance"),
    [
        ("vg-relation", {"on": 2, "under": 1, "behind": 1}, 4, 1 / 2),
        ("vg-attribution", {"brown_green": 2, "brown_red": 2}, 4, 1 / 2),
        ("coco-order", {"order": 4}, 4, 1 / 4),
        ("flickr-order", {"order": 2}, 2, 1 / 5),
    ],
)
def test_every_format_of_aro(
    kind: str, groups: dict[str, int], tests: int, chance: float, run_dir: Path, pictures: Path,
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    """Groups and chance are the file's, and the accuracies are those of the model's own losses."""
    told = ["aro", "--checkpoint", str(run_dir), "--images", str(pictures), "--test", aro_file(kind, pictures)]
    record = evaluate(monkeypatch, capsys, *told)
    by_rule = [row for row in record["table"] if row["rule"] == "loss"]
    assert {row["group"]: row["tests"] for row in by_rule} == groups | {"all": tests}
    assert record["scalars"]["chance"] == pytest.approx(chance) and record["data"][0]["num_examples"] == tests
    format_name, _, file = told[-1].partition(":")
    model = opening.open_model(run_dir).model
    right: dict[str, list[float]] = {}
    for test in read_aro(Path(file), pictures, format_name):  # type: ignore[arg-type]
        pixels = torch.from_numpy(pixels_of(test, 16))[None]  # type: ignore[arg-type]
        losses = []
        for caption in test.captions:
            tokens_L, mask_L = (torch.from_numpy(x)[None] for x in TOKENIZER.encode(caption, 32))
            with torch.no_grad():
                losses.append(float(model(pixels, tokens_L, mask_L)))
        right.setdefault(test.group, []).append(float(losses[0] == min(losses)))
    assert record["scalars"]["accuracy_loss"] == pytest.approx(np.mean([r for one in right.values() for r in one]))
    assert record["scalars"]["group_mean_loss"] == pytest.approx(np.mean([np.mean(one) for one in right.values()]))
    few = evaluate(monkeypatch, capsys, *told, "--max_examples", "1")
    assert few["data"][0]["num_examples"] == 1
    (pictures / "circle/a.png").write_bytes(b"no picture")
    if kind != "flickr-order":
        again = evaluate(monkeypatch, capsys, *told)
        assert again["data"][0]["num_undecodable"] == (2 if kind == "coco-order" else 1)


def test_captions(
    run_dir: Path, pictures: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Greedy by default, the likeliest of a beam search otherwise; the picture shows them."""
    grid = pictures.parent / "grid.png"
    told = ["captions", "--checkpoint", str(run_dir), "--data", f"folder:{pictures}", "--max_tokens", "5"]
    greedy = evaluate(monkeypatch, capsys, *told)["details"]["captions"]
    beams = evaluate(monkeypatch, capsys, *told, "--num_beams", "6", "--length_penalty", "0", "--grid", str(grid))[
        "details"
    ]["captions"]
    assert [row["references"] for row in beams] == [[f"picture number {k}"] for k in range(4)]
    assert np.asarray(Image.open(grid)).std() > 20
    model = opening.open_model(run_dir).model
    for row, best in zip(greedy, beams, strict=True):
        image = torch.from_numpy(eval_image(Path(row["image"]).read_bytes(), 16))[None]
        (tokens,) = greedy_captions(model, image, max_tokens=5).tolist()
        assert row["caption"] == TOKENIZER.decode(tokens) and best["log_prob"] >= row["log_prob"] - 1e-4
    assert says("A red  circle\n", "a Red circle") and not says("a circle red", "a red circle")
    with pytest.raises(ConfigError, match="--max_tokens must be between 1 and 31, got 99"):
        evaluate(monkeypatch, capsys, *told[:-1], "99")
