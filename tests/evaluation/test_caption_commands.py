"""zero-shot, aro and captions of evaluate.py, on a small captioner that was not trained; sources with captions; metrics."""

import json
import shutil
import sys
from pathlib import Path
from types import ModuleType

import numpy as np
import pytest
import torch
from PIL import Image

from data.errors import DataError
from data.examples.transforms import eval_image
from evaluation.captions import caption_metrics, equal_words, require_metrics
from evaluation.command_options import CaptionedOptions
from evaluation.compositional import Choice, pixels_of, read_aro
from evaluation.sources import decoded_batches, open_source
from models.generation import greedy_captions
from tests.evaluation.conftest import TOKENIZER, Evaluate
from trainer.errors import ConfigError
from trainer.weights import open_model as opening


def test_zero_shot(run_dir: Path, pictures: Path, run: Evaluate) -> None:
    told = ["zero-shot", "--checkpoint", str(run_dir)]
    record = run(*told, "--data", f"folder:{pictures}", "--template", "a {}", "--template", "{}")
    assert record["details"]["num_prompts"] == 4 and record["scalars"]["chance"] == 0.5
    assert record["data"][0]["num_examples"] == 4 and set(
        record["details"]["per_class"]["mean"]
    ) == {"circle", "star"}
    assert not record["data_is_public"] and list(
        (run_dir / "private" / "evaluation").glob("zero-shot-*.json")
    )
    names = pictures.parent / "names.txt"
    names.write_text("red circle\nblue star\n\n")
    shapes = run(*told, "--synthetic_shapes", "6")
    assert shapes["details"]["num_classes"] == 120 and shapes["data_is_public"]
    (pictures / "heart").mkdir()
    Image.new("RGB", (9, 9)).save(pictures / "heart" / "e.png")
    with pytest.raises(DataError, match="has no name"):
        run(*told, "--data", f"folder:{pictures}", "--classes", str(names))


def test_aro(run_dir: Path, run: Evaluate) -> None:
    told = ["aro", "--checkpoint", str(run_dir)]
    record = run(*told, "--synthetic", "shapes", "--synthetic_tests", "3")
    assert {row["group"] for row in record["table"]} == {
        "colour",
        "shape",
        "relation",
        "order",
        "all",
    }
    assert {row["rule"] for row in record["table"]} == {"loss", "sum", "prior"}
    for arguments, message in (
        (["--test", "vg:x.json", "--images", "."], "FORMAT one of"),
        (["--test", "order:x.json"], "--images DIR"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(*told, *arguments)


ARO_PAIR = {
    "bbox_x": 2,
    "bbox_y": 3,
    "bbox_w": 10,
    "bbox_h": 9,
    "image_id": 7,
    "object1_name": "horse",
}
"""Keys of a released record that both Visual Genome files have; boxes in pixels."""
WRONG = ["runs dog a fast", "fast a dog runs", "dog fast runs a", "a fast runs dog"]


def aro_file(kind: str, folder: Path) -> str:
    """A file in one of ARO's formats, over the four pictures; returns the argument of --test."""
    names = ["circle/a.png", "circle/b.png", "star/c.png", "star/d.png"]
    pairs = [
        ARO_PAIR
        | {
            "image_path": name,
            "true_caption": f"a horse on grass {k}",
            "false_caption": f"grass on a horse {k}",
        }
        for k, name in enumerate(names)
    ]
    records: list[dict[str, object]] = {
        "vg-relation": [
            pair | {"relation_name": ("on", "on", "under", "behind")[k]}
            for k, pair in enumerate(pairs)
        ],
        "vg-attribution": [
            pair | {"attributes": ["brown", ("green", "red")[k % 2]]}
            for k, pair in enumerate(pairs)
        ],
        "order": [
            {"image_path": n, "true_caption": "a dog runs fast", "false_captions": WRONG}
            for n in names[2:]
        ],
    }[kind]
    file = folder / f"{kind}.json"
    file.write_text(json.dumps(records))
    return f"{kind}:{file}"


@pytest.mark.parametrize(
    ("kind", "groups", "tests", "chance"),
    [
        ("vg-relation", {"on": 2, "under": 1, "behind": 1}, 4, 1 / 2),
        ("vg-attribution", {"brown_green": 2, "brown_red": 2}, 4, 1 / 2),
        ("order", {"order": 2}, 2, 1 / 5),
    ],
)
def test_every_format_of_aro(
    kind: str,
    groups: dict[str, int],
    tests: int,
    chance: float,
    run_dir: Path,
    pictures: Path,
    run: Evaluate,
) -> None:
    """Groups and chance are the file's, and the accuracies are those of the model's own losses."""
    told = [
        "aro",
        "--checkpoint",
        str(run_dir),
        "--images",
        str(pictures),
        "--test",
        aro_file(kind, pictures),
    ]
    record = run(*told)
    by_rule = [row for row in record["table"] if row["rule"] == "loss"]
    assert {row["group"]: row["tests"] for row in by_rule} == groups | {"all": tests}
    assert (
        record["scalars"]["chance"] == pytest.approx(chance)
        and record["data"][0]["num_examples"] == tests
    )
    format_name, _, file = told[-1].partition(":")
    model = opening.open_model(run_dir).model
    right: dict[str, list[float]] = {}
    given = read_aro(Path(file), pictures, format_name)  # type: ignore[arg-type]
    first = (
        Choice(pictures / "star/c.png", ("a dog runs fast", *WRONG), "order")
        if kind == "order"
        else Choice(
            pictures / "circle/a.png",
            ("a horse on grass 0", "grass on a horse 0"),
            next(iter(groups)),
            (2, 3, 12, 12),
        )
    )
    assert given[0] == first
    for test in given:
        pixels = torch.from_numpy(pixels_of(test, 16))[None]  # type: ignore[arg-type]
        losses = []
        for caption in test.captions:
            tokens_L, mask_L = (torch.from_numpy(x)[None] for x in TOKENIZER.encode(caption, 32))
            with torch.no_grad():
                losses.append(float(model(pixels, tokens_L, mask_L)))
        right.setdefault(test.group, []).append(float(losses[0] == min(losses)))
    assert record["scalars"]["accuracy_loss"] == pytest.approx(
        np.mean([r for one in right.values() for r in one])
    )
    assert record["scalars"]["group_mean_loss"] == pytest.approx(
        np.mean([np.mean(one) for one in right.values()])
    )
    few = run(*told, "--max_examples", "1")
    assert few["data"][0]["num_examples"] == 1
    (pictures / "star/d.png").write_bytes(b"no picture")
    assert run(*told)["data"][0]["num_undecodable"] == 1


def test_captions(run_dir: Path, pictures: Path, run: Evaluate) -> None:
    """Greedy by default, the likeliest of a beam search otherwise; the picture shows them."""
    grid = pictures.parent / "grid.png"
    told = [
        "captions",
        "--checkpoint",
        str(run_dir),
        "--data",
        f"folder:{pictures}",
        "--max_tokens",
        "5",
    ]
    greedy = run(*told)["details"]["captions"]
    beams = run(*told, "--num_beams", "6", "--length_penalty", "0", "--grid", str(grid))["details"][
        "captions"
    ]
    assert [row["references"] for row in beams] == [[f"picture number {k}"] for k in range(4)]
    assert np.asarray(Image.open(grid)).std() > 20
    model = opening.open_model(run_dir).model
    for row, best in zip(greedy, beams, strict=True):
        image = torch.from_numpy(eval_image(Path(row["image"]).read_bytes(), 16))[None]
        (tokens,) = greedy_captions(model, image, max_tokens=5).tolist()
        assert (
            row["caption"] == TOKENIZER.decode(tokens)
            and best["log_prob"] >= row["log_prob"] - 1e-4
        )
    assert equal_words("A red  circle\n", "a Red circle") and not equal_words(
        "a circle red", "a red circle"
    )
    with pytest.raises(ConfigError, match="--max_tokens must be between 1 and 31, got 99"):
        run(*told[:-1], "99")


def test_folders_files_and_shards(pictures: Path, tmp_path: Path) -> None:
    (pictures / "circle/a.txt").write_text("A red picture.\n\n dark \n")
    (pictures / "circle/b.txt").unlink()
    (pictures / "star/c.png").write_bytes(b"no image")
    options = CaptionedOptions(cache=tmp_path / "cache")
    source = open_source(f"folder:{pictures}", options)
    (batch,) = decoded_batches(source, range(len(source)), image_size=16, batch_size=8)
    assert [Path(e.name).name for e in batch.examples] == ["a.png", "b.png", "c.png", "d.png"]
    assert batch.is_usable_B.tolist() == [True, True, False, True]
    assert (
        batch.examples[0].captions == ("A red picture.", "dark")
        and batch.examples[1].captions == ()
    )
    assert batch.images_BCHW.shape == (4, 3, 16, 16)
    assert (
        len(open_source(f"images:{pictures / 'circle/a.png'},{pictures / 'star/d.png'}", options))
        == 2
    )
    shards = open_source("shards:data/demo/heldout-*.tar", options)
    batches = list(decoded_batches(shards, range(6), image_size=16, batch_size=4))
    assert [len(b.examples) for b in batches] == [4, 2] and all(
        e.captions for b in batches for e in b.examples
    )


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
