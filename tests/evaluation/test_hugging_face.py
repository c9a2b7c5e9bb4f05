"""hf: sources: a data set that Hugging Face's `datasets` saved, by library and by command; one clear line without the package."""

import pickle
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError
from data.examples.transforms import eval_image
from evaluation.encoder import features
from evaluation.features import extract
from evaluation.options import CaptionedOptions, FeatureOptions, LabelledOptions
from evaluation.sources import encode_png, open_source
from tests.evaluation.commands import evaluate
from tests.evaluation.tiny_models import SIZE, opened_captioner, pictures
from tests.trainer.trained_runs import recipe, trained

NAMES = ["red", "green", "blue"]
CAPTIONS = "captions of this picture"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits: encoded pictures, one from a file, one missing, one broken; class labels; several captions each."""
    datasets = pytest.importorskip("datasets", reason="an extra: pip install -r requirements-evaluation.txt")
    folder = tmp_path_factory.mktemp("hf")
    images, labels = pictures(6)
    file = folder / "of its own.png"
    Image.fromarray(images[4]).save(file)
    stored: list[Any] = [{"bytes": encode_png(image), "path": None} for image in images]
    stored[1], stored[2], stored[4] = None, {"bytes": b"no picture", "path": None}, {"bytes": None, "path": str(file)}
    rows = {
        "picture": stored,
        "fine_label": [int(label) for label in labels],
        CAPTIONS: [[f"a {NAMES[label]} picture", "  ", "a square"] for label in labels],
        "text": [f"number {number}" for number in range(6)],
    }
    kinds = datasets.Features({
        "picture": datasets.Image(), "fine_label": datasets.ClassLabel(names=NAMES),
        CAPTIONS: datasets.List(datasets.Value("string")), "text": datasets.Value("string"),
    })  # fmt: skip
    split = datasets.Dataset.from_dict(rows, features=kinds)
    datasets.DatasetDict({"train": split, "test": split.select([0, 3])}).save_to_disk(str(folder / "cubes"))
    return folder / "cubes"


OPTIONS = LabelledOptions(image_column="picture", label_column="fine_label")


def test_rows_are_what_was_saved(saved: Path) -> None:
    source = open_source(f"hf:{saved}/train", OPTIONS)
    images, labels = pictures(6)
    assert source.class_names == tuple(NAMES) and len(source) == 6
    rows = source.read([0, 1, 2, 3, 4, 5])
    assert [row.label for row in rows] == labels.tolist()
    assert rows[1].image is None and rows[2].image == b"no picture"
    for i in (0, 3, 4, 5):
        assert np.array_equal(eval_image(rows[i].image or b"", SIZE), eval_image(encode_png(images[i]), SIZE))
    again = pickle.loads(pickle.dumps(source))  # as worker processes get it
    assert again.read([5]) == source.read([5]) and again.identity() == source.identity()
    assert len(open_source(f"hf:{saved}/test", OPTIONS)) == 2


def test_features_keep_a_row_for_what_cannot_be_used(saved: Path) -> None:
    import torch

    opened = opened_captioner()
    found = extract(opened, open_source(f"hf:{saved}/train", OPTIONS), FeatureOptions(batch_size=4))
    assert found is not None
    assert found.is_usable_N.tolist() == [True, False, False, True, True, True]
    model_in = torch.from_numpy(np.stack([eval_image(encode_png(image), SIZE) for image in pictures(6)[0]]))
    with torch.no_grad():
        expected = features(opened.model, model_in, FeatureOptions()).numpy()
    assert found.values_ND[[0, 3, 4, 5]] == pytest.approx(expected[[0, 3, 4, 5]], abs=1e-6)


def test_captions_of_a_column(saved: Path) -> None:
    options = CaptionedOptions(image_column="picture", caption_column=CAPTIONS)
    rows = open_source(f"hf:{saved}/train", options).read(range(6))
    assert rows[1].captions == ("a green picture", "a square") and rows[1].image is None
    one = open_source(f"hf:{saved}/test", CaptionedOptions(image_column="picture", caption_column="text"))
    assert [row.captions for row in one.read([0, 1])] == [("number 0",), ("number 3",)]


def test_commands(
    saved: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A whole run's checkpoint: a probe by labels, captions and retrieval by captions, zero-shot by the class names."""
    trained(tmp_path / "run", recipe())
    told = ["--checkpoint", str(tmp_path / "run"), "--image_column", "picture"]
    labels = ["--label_column", "fine_label"]
    record = evaluate(
        monkeypatch, capsys, "linear-probe", *told, *labels, "--train", f"hf:{saved}/train", "--test", f"hf:{saved}/test",
        "--epochs", "2", "--num_folds", "2",
    )  # fmt: skip
    assert [(use["num_examples"], use["num_undecodable"]) for use in record["data"]] == [(6, 2), (2, 0)]
    record = evaluate(
        monkeypatch, capsys, "zero-shot", *told, *labels, "--data", f"hf:{saved}/test", "--template", "{}"
    )
    assert set(record["details"]["per_class"]["sum"]) == set(NAMES)
    told += ["--data", f"hf:{saved}/train", "--caption_column", CAPTIONS]
    record = evaluate(monkeypatch, capsys, "captions", *told, "--max_tokens", "3")
    assert len(record["details"]["captions"]) == 4 and record["data"][0]["num_undecodable"] == 2
    assert record["details"]["captions"][1]["references"] == ["a red picture", "a square"]
    record = evaluate(monkeypatch, capsys, "retrieval", *told)
    assert record["details"]["num_captions"] == 8


@pytest.mark.parametrize(
    ("place", "columns", "message"),
    [
        ("", {}, r"holds the splits train, test; name one of them: hf:.*cubes/train"),
        ("/train", {"image_column": "img"}, r"has no column 'img', but picture, fine_label, .*: give --image_column"),
        ("/train", {"label_column": "y"}, r"no column 'y'.*--label_column"),
        ("/train", {"label_column": "text"}, r"'text' holds no whole numbers; give --label_column"),
        ("/train", {"image_column": "text"}, r"'text' holds no images"),
        ("/validation", {}, "there is no folder"),
        ("/train/..", {"image_column": "picture"}, "holds the splits"),
    ],
)
def test_what_does_not_fit_is_one_line(saved: Path, place: str, columns: dict[str, str], message: str) -> None:
    options = LabelledOptions(**{"image_column": "picture", "label_column": "fine_label"} | columns)  # type: ignore[arg-type]
    with pytest.raises(DataError, match=message) as caught:
        open_source(f"hf:{saved}{place}", options)
    assert "\n" not in str(caught.value)


def test_other_folders_are_one_line(saved: Path, tmp_path: Path) -> None:
    (tmp_path / "x.txt").write_text("x")
    with pytest.raises(DataError, match="no data set that `datasets` saved") as caught:
        open_source(f"hf:{tmp_path}", LabelledOptions())
    assert "\n" not in str(caught.value)


def test_without_the_package(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)  # importing it fails
    for options in (OPTIONS, CaptionedOptions()):
        with pytest.raises(DataError, match=r"^hf: needs .*: pip install -r requirements-evaluation.txt$"):
            open_source(f"hf:{tmp_path}", options)
