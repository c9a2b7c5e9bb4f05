"""evaluate.py dense on a whole run's checkpoint: drawn shapes, and folders of ADE20K and COCO that are written here."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from evaluation.dense.sources import Coco, SyntheticShapes, decode_segmentation, open_dense
from tests.evaluation.commands import evaluate
from tests.trainer.trained_runs import recipe, trained

SIDE = 48
Dense = Callable[..., dict[str, Any]]


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mae"
    trained(folder, recipe("masked_autoencoder"))
    return folder


@pytest.fixture
def dense(run_dir: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Dense:
    def run(*arguments: object) -> dict[str, Any]:
        told = ["--checkpoint", run_dir, "--image_size", SIDE, *arguments]
        return evaluate(monkeypatch, capsys, "dense", *map(str, told))

    return run


def as_ade20k(root: Path, split: str, count: int, seed: int) -> str:
    """The drawn shapes, class 1 for the background: as the challenge's folders."""
    source = SyntheticShapes(seed, count, SIDE)
    for folder in ("images", "annotations"):
        (root / folder / split).mkdir(parents=True)
    for index in range(count):
        picture = source.read(index)
        (root / "drawn.png").write_bytes(picture.image)
        Image.open(root / "drawn.png").save(root / "images" / split / f"ADE_{index}.jpg", quality=95)
        mask = Image.fromarray((picture.mask_HW + 1).astype(np.uint8))
        mask.save(root / "annotations" / split / f"ADE_{index}.png")
    return f"ade20k:{root}/{split}"


def as_coco(root: Path, count: int, seed: int, *, crowd: bool = False) -> str:
    """The drawn shapes as COCO instances: run lengths, ids with gaps, polygons for every other picture."""
    source, annotations, images = SyntheticShapes(seed, count, SIDE), [], []
    root.mkdir()
    for index in range(count):
        picture = source.read(index)
        assert picture.objects is not None
        (root / f"{index}.png").write_bytes(picture.image)
        images.append({"id": 10 + 3 * index, "file_name": f"{index}.png", "height": SIDE, "width": SIDE})
        for box, kind in zip(picture.objects.boxes_M4.astype(float), picture.objects.classes_M, strict=True):
            left, top, right, bottom = box
            mask = picture.mask_HW == kind + 1
            edges = np.flatnonzero(np.diff(np.concatenate([[False], mask.T.reshape(-1), [False]]).astype(int)))
            counts = np.diff(np.concatenate([[0], edges, [mask.size]])).tolist()
            annotations.append({
                "id": len(annotations) + 1, "image_id": 10 + 3 * index, "category_id": 7 * int(kind) + 1, "iscrowd": int(crowd),
                "bbox": [left, top, right - left, bottom - top], "area": (right - left) * (bottom - top),
                "segmentation": [[left, top, right, top, right, bottom, left, bottom]] if index % 2 else {
                    "counts": counts, "size": [SIDE, SIDE]},
            })  # fmt: skip
    categories = [{"id": 7 * number + 1, "name": name} for number, name in enumerate(source.object_classes)]
    record = {"images": images, "annotations": annotations, "categories": categories[::-1]}
    (root / "instances.json").write_text(json.dumps(record))
    return f"coco:{root}/instances.json:{root}"


@pytest.mark.full
def test_training_pictures_are_learnt(dense: Dense) -> None:
    """The same pictures for both: what is scored must have been trained on, in the same classes, boxes and pixels."""
    told = ("--train", "synthetic:1:6", "--test", "synthetic:1:6", "--epochs", 120, "--lr", 0.01)
    assert dense("--task", "segmentation", *told)["scalars"]["segmentation/mean_iou"] > 0.45
    assert dense("--task", "detection", *told)["scalars"]["detection/AP50"] > 0.3


def test_folders_of_ade20k(dense: Dense, tmp_path: Path) -> None:
    train, test = as_ade20k(tmp_path, "training", 6, 1), as_ade20k(tmp_path, "validation", 3, 2)
    record = dense("--task", "segmentation", "--train", train, "--test", test, "--epochs", 3)
    assert 0 < record["scalars"]["segmentation/mean_iou"] <= 1 and record["data"][1]["name"] == test
    with pytest.raises(ValueError, match=r"detection needs boxes, and ade20k:.* has masks only"):
        dense("--task", "detection", "--train", train, "--test", test)
    (tmp_path / "annotations/training/ADE_3.png").write_bytes(b"no picture")
    with pytest.raises(ValueError, match=r"ADE_3.png is no annotation"):
        dense("--task", "segmentation", "--train", train, "--test", test)
    (tmp_path / "images/training/ADE_2.jpg").write_bytes(b"no picture")
    with pytest.raises(ValueError, match="a picture cannot be used"):
        dense("--task", "segmentation", "--train", train, "--test", test)


def test_coco_instances(dense: Dense, tmp_path: Path) -> None:
    """Both tasks; the reader gives the classes, masks and boxes that were drawn, in the order of the category ids."""
    train, test = as_coco(tmp_path / "train", 6, 1), as_coco(tmp_path / "test", 3, 2)
    source, drawn = open_dense(train, SIDE), SyntheticShapes(1, 6, SIDE)
    assert source.object_classes == drawn.object_classes and source.mask_classes == drawn.mask_classes
    for index in (0, 2, 4):
        found, expected = source.read(index), drawn.read(index)
        assert np.array_equal(found.mask_HW, expected.mask_HW)
        assert found.objects is not None and expected.objects is not None
        assert np.array_equal(found.objects.boxes_M4, expected.objects.boxes_M4)
        assert np.array_equal(found.objects.classes_M, expected.objects.classes_M)
    for task, score in (("segmentation", "segmentation/mean_iou"), ("detection", "detection/AP50")):
        record = dense("--task", task, "--train", train, "--test", test, "--epochs", 3)
        assert 0 <= record["scalars"][score] <= 1
    crowds = as_coco(tmp_path / "crowds", 2, 3, crowd=True)
    record = dense("--task", "detection", "--train", train, "--test", crowds, "--epochs", 1)
    assert record["scalars"]["detection/AP"] is None  # nothing to find: no number, and no NaN in the JSON


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: r["annotations"][0].update(category_id=5),
            "image 10 or an annotation of it is not COCO's: KeyError 5",
        ),
        (lambda r: r["annotations"][0].update(bbox=[1, 2]), "is not COCO's: ValueError"),
        (lambda r: r["images"][0].update(file_name="gone.png"), "cannot read .*gone.png"),
        (lambda r: r.update(images=[]), "lists no images"),
        (lambda r: r.pop("categories"), "holds no COCO instances"),
    ],
)
def test_damaged_instances_are_one_line(tmp_path: Path, change: Callable[[Any], Any], message: str) -> None:
    as_coco(tmp_path / "coco", 2, 1)
    path = tmp_path / "coco/instances.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(Exception, match=message) as caught:
        Coco(path, path.parent).read(0)
    assert caught.value.exit_code in (1, 2) and "\n" not in str(caught.value)  # type: ignore[attr-defined]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (("--train", "synthetic:1", "--test", "synthetic:2:1"), "names no pictures"),
        (("--train", "synthetic:1:2", "--test", "synthetic:2:1", "--epochs", 0), "at least 1"),
        (("--train", "synthetic:1:2", "--test", "synthetic:2:1", "--lr", -1), "--lr must be above 0"),
        (("--train", "synthetic:1:2", "--test", "synthetic:2:1", "--image_size", 50), "no whole number of patches"),
    ],
)
def test_refused(dense: Dense, arguments: tuple[object, ...], message: str) -> None:
    with pytest.raises(ValueError, match=message) as caught:
        dense("--task", "segmentation", *arguments)
    assert caught.value.exit_code == 2  # type: ignore[attr-defined]


def test_masks_are_those_of_pycocotools() -> None:
    """Run lengths to the pixel, read by COCO's own code; polygons up to a few pixels of their edges."""
    pytest.importorskip("pycocotools", reason="an extra: pip install '.[evaluation]'")
    from pycocotools import mask as coco

    rng = np.random.default_rng(0)
    for _ in range(20):
        height, width = rng.integers(5, 40, 2)
        drawn = np.asfortranarray(rng.random((height, width)) < rng.choice([0.02, 0.5, 0.98]))
        edges = np.flatnonzero(np.diff(np.concatenate([[False], drawn.T.reshape(-1), [False]]).astype(int)))
        counts = np.diff(np.concatenate([[0], edges, [drawn.size]])).tolist()
        size = int(height), int(width)
        theirs = coco.decode(coco.frPyObjects({"size": size, "counts": counts}, *size)).astype(bool)
        assert np.array_equal(decode_segmentation({"counts": counts}, size), theirs)
        angles = np.sort(rng.uniform(0, 2 * np.pi, 7))
        points = np.stack([20 + 15 * np.cos(angles), 18 + 12 * np.sin(angles)], axis=1).reshape(-1).tolist()
        theirs = coco.decode(coco.merge(coco.frPyObjects([points], 36, 40))).astype(bool)
        ours = decode_segmentation([points], (36, 40))
        assert (ours ^ theirs).sum() <= 12 and abs(
            int(ours.sum()) - int(theirs.sum())
        ) <= 8  # theirs rounds to fifths of a pixel
