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
from evaluation.options import CaptionedOptions, LabelledOptions
from evaluation.sources import encode_png, open_source
from tests.evaluation.tiny_models import SIZE, pictures

NAMES = ["red", "green", "blue"]
CAPTIONS = "captions of this picture"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Two splits: encoded pictures, one from a file, one missing, one broken; class labels; several captions each."""
    datasets = pytest.importorskip("datasets", reason="an extra: pip install '.[evaluation]'")
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


def test_captions_of_a_column(saved: Path) -> None:
    options = CaptionedOptions(image_column="picture", caption_column=CAPTIONS)
    rows = open_source(f"hf:{saved}/train", options).read(range(6))
    assert rows[1].captions == ("a green picture", "a square") and rows[1].image is None
    one = open_source(f"hf:{saved}/test", CaptionedOptions(image_column="picture", caption_column="text"))
    assert [row.captions for row in one.read([0, 1])] == [("number 0",), ("number 3",)]


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
        with pytest.raises(DataError, match=r"^hf: needs .*: pip install '\.\[evaluation\]'$"):
            open_source(f"hf:{tmp_path}", options)
