"""Masks and boxes against what is drawn, scores by hand, and evaluate.py dense on shapes, ADE20K's folders and COCO's file."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError
from data.synthetic.generate import SyntheticData
from evaluation.dense import (
    IGNORED,
    average_precision,
    boxes_of,
    cell_targets,
    coco,
    open_dense,
    pixel_scores,
    synthetic_shapes,
)
from tests.evaluation.conftest import Evaluate
from tests.trainer.trained_runs import recipe, trained

SIDE = 48


def boxes(*rows: tuple[float, ...]) -> np.ndarray:
    """Each of left, top, right, bottom, class, and crowd or score."""
    return np.array(rows, dtype=np.float32).reshape(-1, 6)


def test_synthetic_masks_are_what_is_drawn() -> None:
    """The pixels of each mask have the shape's colour; boxes touch the masks on all sides."""
    source, data = synthetic_shapes(3, 12, 48), SyntheticData(3, 48, "shapes")
    for index in range(source.count):
        picture = source.read(index)
        scene = data.example(index).scene
        pixels = data.example(index).image_HWC.astype(int)
        assert picture.boxes_M6 is not None and len(picture.boxes_M6) == len(scene.shapes) > 0
        background = pixels[0, 0]
        assert np.abs(pixels[picture.mask_HW == 0] - background).max(axis=1).mean() < 8
        for left, top, right, bottom, kind, _ in picture.boxes_M6:
            own = picture.mask_HW == kind + 1
            spread = pixels[own].std(axis=0).max()
            assert own.sum() > 20 and spread < 45  # one colour, but for soft edges
            rows, columns = np.flatnonzero(own.any(1)), np.flatnonzero(own.any(0))
            assert (left, top, right, bottom) == (
                columns[0],
                rows[0],
                columns[-1] + 1,
                rows[-1] + 1,
            )


def test_mean_iou_by_hand() -> None:
    mask = np.array([[0, 0, 1, 1], [IGNORED, 2, 2, 2]])
    predicted = np.array([[0, 1, 1, 1], [0, 2, 2, 1]])
    assert pixel_scores([(mask, predicted)], 4) == pytest.approx(
        {"mean_iou": (1 / 2 + 2 / 4 + 2 / 3) / 3, "pixel_accuracy": 5 / 7}
    )


def test_average_precision_by_hand() -> None:
    """Two objects; the best box is right at every threshold, the second is wrong, the third overlaps by 0.6."""
    pytest.importorskip("pycocotools")
    truth = [boxes((0, 0, 10, 10, 0, 0), (20, 20, 30, 30, 0, 0))]
    found = [boxes((0, 0, 10, 10, 0, 0.9), (50, 50, 60, 60, 0, 0.8), (20, 20, 30, 26, 0, 0.7))]
    low = 51 / 101 + 50 / 101 * 2 / 3  # precision 1 up to recall 0.5 (51 of 101 points), then 2/3
    high = 51 / 101
    score = average_precision(truth, found, 2)
    assert score["AP50"] == pytest.approx(low) and score["AP75"] == pytest.approx(high)
    assert score["AP"] == pytest.approx((3 * low + 7 * high) / 10)  # 0.50, 0.55 and 0.60
    crowd = [boxes((0, 0, 10, 10, 0, 0), (0, 20, 40, 60, 0, 1))]
    in_crowd = [boxes((1, 21, 9, 30, 0, 0.9), (2, 22, 9, 30, 0, 0.8), (0, 0, 10, 10, 0, 0.5))]
    assert average_precision(crowd, in_crowd, 1)["AP"] == pytest.approx(1.0)
    assert average_precision(truth, [boxes()], 2) == {"AP": 0, "AP50": 0, "AP75": 0}
    assert np.isnan(average_precision([boxes()], [boxes()], 1)["AP"])


def test_cells_and_boxes_are_inverse() -> None:
    truth = boxes((4, 8, 28, 24, 1, 0), (40, 40, 60, 56, 0, 0), (0, 0, 60, 60, 2, 0))
    kind, sides = cell_targets(truth, 16, 64, 3)
    assert kind[4, 3] == 1 and kind[12, 12] == 0 and kind[0, 15] == 3 and kind[8, 8] == 2
    logits = np.full((4, 16, 16), -10.0)
    np.put_along_axis(logits, kind[None], 10.0, axis=0)
    found = boxes_of(
        np.concatenate([logits, sides]), 64, 3
    )  # one box for each object: overlapping ones are left out
    found = found[np.argsort(found[:, 4])]
    assert (
        found[:, :5] == pytest.approx(truth[[1, 0, 2], :5], abs=1e-3) and (found[:, 5] > 0.9).all()
    )


@pytest.fixture(scope="module")
def run_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("runs") / "mae"
    trained(folder, recipe("masked_autoencoder"))
    return folder


@pytest.fixture
def dense(run_dir: Path, run: Evaluate) -> Evaluate:
    return lambda *arguments: run(
        "dense", "--checkpoint", run_dir, "--image_size", SIDE, *arguments
    )


def as_ade20k(root: Path, split: str, count: int, seed: int) -> str:
    """The drawn shapes, class 1 for the background: as the challenge's folders."""
    source = synthetic_shapes(seed, count, SIDE)
    for folder in ("images", "annotations"):
        (root / folder / split).mkdir(parents=True)
    for index in range(count):
        picture = source.read(index)
        (root / "drawn.png").write_bytes(picture.image)
        Image.open(root / "drawn.png").save(
            root / "images" / split / f"ADE_{index}.jpg", quality=95
        )
        mask = Image.fromarray((picture.mask_HW + 1).astype(np.uint8))
        mask.save(root / "annotations" / split / f"ADE_{index}.png")
    return f"ade20k:{root}/{split}"


def as_coco(root: Path, count: int, seed: int, *, crowd: bool = False) -> str:
    """The drawn shapes as COCO instances: run lengths, ids with gaps, polygons for every other picture."""
    source, annotations, images = synthetic_shapes(seed, count, SIDE), [], []
    root.mkdir()
    for index in range(count):
        picture = source.read(index)
        assert picture.boxes_M6 is not None
        (root / f"{index}.png").write_bytes(picture.image)
        images.append(
            {"id": 10 + 3 * index, "file_name": f"{index}.png", "height": SIDE, "width": SIDE}
        )
        for left, top, right, bottom, kind, _ in picture.boxes_M6.tolist():
            mask = picture.mask_HW == kind + 1
            edges = np.flatnonzero(
                np.diff(np.concatenate([[False], mask.T.reshape(-1), [False]]).astype(int))
            )
            counts = np.diff(np.concatenate([[0], edges, [mask.size]])).tolist()
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": 10 + 3 * index,
                    "category_id": 7 * int(kind) + 1,
                    "iscrowd": int(crowd),
                    "bbox": [left, top, right - left, bottom - top],
                    "area": (right - left) * (bottom - top),
                    "segmentation": [[left, top, right, top, right, bottom, left, bottom]]
                    if index % 2
                    else {"counts": counts, "size": [SIDE, SIDE]},
                }
            )
    categories = [
        {"id": 7 * number + 1, "name": name} for number, name in enumerate(source.object_classes)
    ]
    record = {"images": images, "annotations": annotations, "categories": categories[::-1]}
    (root / "instances.json").write_text(json.dumps(record))
    return f"coco:{root}/instances.json:{root}"


@pytest.mark.full
def test_training_pictures_are_learnt(dense: Evaluate) -> None:
    """The same pictures for both: what is scored must have been trained on, in the same classes, boxes and pixels."""
    pytest.importorskip("pycocotools")
    told = ("--train", "synthetic:1:6", "--test", "synthetic:1:6", "--epochs", 120, "--lr", 0.01)
    assert dense("--task", "segmentation", *told)["scalars"]["segmentation/mean_iou"] > 0.45
    assert dense("--task", "detection", *told)["scalars"]["detection/AP50"] > 0.3


def test_folders_of_ade20k(dense: Evaluate, tmp_path: Path) -> None:
    train, test = as_ade20k(tmp_path, "training", 6, 1), as_ade20k(tmp_path, "validation", 3, 2)
    source, drawn = open_dense(train, SIDE), synthetic_shapes(1, 6, SIDE)
    assert source.count == 6 and len(source.mask_classes) == 150 and source.read(0).boxes_M6 is None
    assert np.array_equal(source.read(2).mask_HW, drawn.read(2).mask_HW)
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
    (tmp_path / "annotations/training/ADE_0.png").unlink()
    with pytest.raises(DataError, match="every image needs its annotation"):
        open_dense(train, SIDE)


def test_coco_instances(dense: Evaluate, tmp_path: Path) -> None:
    """Both tasks; the reader gives the classes, masks and boxes that were drawn, in the order of the category ids."""
    pytest.importorskip("pycocotools")
    train, test = as_coco(tmp_path / "train", 6, 1), as_coco(tmp_path / "test", 3, 2)
    source, drawn = open_dense(train, SIDE), synthetic_shapes(1, 6, SIDE)
    assert (
        source.object_classes == drawn.object_classes and source.mask_classes == drawn.mask_classes
    )
    for index in (0, 2, 4):
        found, expected = source.read(index), drawn.read(index)
        assert np.array_equal(found.mask_HW, expected.mask_HW)
        assert found.boxes_M6 is not None and np.array_equal(found.boxes_M6, expected.boxes_M6)  # type: ignore[arg-type]
    for task, score in (("segmentation", "segmentation/mean_iou"), ("detection", "detection/AP50")):
        record = dense("--task", task, "--train", train, "--test", test, "--epochs", 3)
        assert 0 <= record["scalars"][score] <= 1
    crowds = as_coco(tmp_path / "crowds", 2, 3, crowd=True)
    record = dense("--task", "detection", "--train", train, "--test", crowds, "--epochs", 1)
    assert (
        record["scalars"]["detection/AP"] is None
    )  # nothing to find: no number, and no NaN in the JSON


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda r: r["annotations"][0].update(category_id=5),
            "image 1 of 2 by id, or an annotation of it, is not COCO's: KeyError$",
        ),
        (
            lambda r: r["images"][0].update(file_name="gone.png"),
            "cannot read image 1 of 2 of coco:[^ ]*: No such file",
        ),
        (lambda r: r.pop("categories"), "holds no COCO instances"),
    ],
)
def test_damaged_instances_are_one_line(
    tmp_path: Path, change: Callable[[Any], Any], message: str
) -> None:
    pytest.importorskip("pycocotools")
    as_coco(tmp_path / "coco", 2, 1)
    path = tmp_path / "coco/instances.json"
    record = json.loads(path.read_text())
    change(record)
    path.write_text(json.dumps(record))
    with pytest.raises(Exception, match=message) as caught:
        coco(path, path.parent).read(0)
    assert caught.value.exit_code in (1, 2) and "\n" not in str(caught.value)  # type: ignore[attr-defined]
