"""Masks and boxes against what is drawn; COCO's run lengths and average precision; heads on a random encoder beat chance."""

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from data.errors import DataError
from evaluation.dense.heads import (
    Detections,
    average_precision,
    boxes_of,
    cell_targets,
    confusion,
    mean_iou,
    overlaps,
    pixel_accuracy,
)
from evaluation.dense.sources import IGNORED, Objects, SyntheticShapes, decode_segmentation, open_dense
from evaluation.sources import encode_png


def objects(*rows: tuple[float, float, float, float, int], crowd: tuple[bool, ...] = ()) -> Objects:
    table = np.array(rows, dtype=np.float32).reshape(-1, 5)
    flags = np.array(crowd or [False] * len(rows), dtype=bool)
    return Objects(table[:, :4], table[:, 4].astype(np.int64), flags)


def detections(*rows: tuple[float, float, float, float, int, float]) -> Detections:
    table = np.array(rows).reshape(-1, 6)
    return Detections(table[:, :4], table[:, 4].astype(np.int64), table[:, 5])


def test_synthetic_masks_are_what_is_drawn() -> None:
    """The pixels of each mask have the shape's colour; boxes touch the masks on all sides."""
    source = SyntheticShapes(3, 12, 48)
    for index in range(len(source)):
        picture = source.read(index)
        scene = source._data.example(index).scene
        pixels = source._data.example(index).image_HWC.astype(int)
        assert picture.objects is not None and len(picture.objects.classes_M) == len(scene.shapes) > 0
        background = pixels[0, 0]
        assert np.abs(pixels[picture.mask_HW == 0] - background).max(axis=1).mean() < 8
        for (left, top, right, bottom), kind in zip(picture.objects.boxes_M4, picture.objects.classes_M, strict=True):
            own = picture.mask_HW == kind + 1
            spread = pixels[own].std(axis=0).max()
            assert own.sum() > 20 and spread < 45  # one colour, but for soft edges
            rows, columns = np.flatnonzero(own.any(1)), np.flatnonzero(own.any(0))
            assert (left, top, right, bottom) == (columns[0], rows[0], columns[-1] + 1, rows[-1] + 1)


def ade20k(root: Path) -> str:
    for folder in ("images/training", "annotations/training"):
        (root / folder).mkdir(parents=True)
    Image.fromarray(np.zeros((6, 9, 3), np.uint8)).save(root / "images/training/a.jpg")
    mask = np.arange(54, dtype=np.uint8).reshape(6, 9)
    Image.fromarray(mask).save(root / "annotations/training/a.png")
    return f"ade20k:{root}/training"


def test_ade20k(tmp_path: Path) -> None:
    source = open_dense(ade20k(tmp_path), 16)
    picture = source.read(0)
    assert picture.mask_HW[0, 0] == IGNORED and picture.mask_HW[5, 8] == 52 and picture.objects is None
    assert len(source) == 1 and len(source.mask_classes) == 150
    (tmp_path / "annotations/training/a.png").unlink()
    with pytest.raises(DataError, match="every image needs its annotation"):
        open_dense(f"ade20k:{tmp_path}/training", 16)


def test_coco_reader(tmp_path: Path) -> None:
    mask = np.zeros((20, 30), dtype=bool)
    mask[5:9, 10:20] = True
    down = mask.T.reshape(-1)
    edges = np.flatnonzero(np.diff(np.concatenate([[False], down, [False]]).astype(int)))
    counts = np.diff(np.concatenate([[0], edges, [len(down)]])).tolist()
    polygon = [[10, 5, 20, 5, 20, 9, 10, 9]]
    assert np.array_equal(decode_segmentation({"counts": counts}, (20, 30)), mask)
    drawn = decode_segmentation(polygon, (20, 30))
    assert np.array_equal(drawn, mask)
    for other in ([3], "PPYo1"):
        with pytest.raises(DataError, match="neither polygons nor run lengths"):
            decode_segmentation({"counts": other}, (20, 30))
    annotations = [
        {"image_id": 7, "category_id": 90, "bbox": [10, 5, 10, 4], "segmentation": polygon, "iscrowd": 0},
        {"image_id": 7, "category_id": 2, "bbox": [0, 0, 3, 3], "segmentation": {"counts": [0, 3, 597]}, "iscrowd": 1},
    ]
    categories = [{"id": 90, "name": "brush"}, {"id": 2, "name": "bicycle"}]
    images = [{"id": 7, "file_name": "x.png", "height": 20, "width": 30}]
    (tmp_path / "x.png").write_bytes(encode_png(np.zeros((20, 30, 3), np.uint8)))
    (tmp_path / "i.json").write_text(
        json.dumps({"images": images, "annotations": annotations, "categories": categories})
    )
    source = open_dense(f"coco:{tmp_path}/i.json:{tmp_path}", 16)
    picture = source.read(0)
    assert source.object_classes == ("bicycle", "brush") and picture.objects is not None
    assert picture.objects.classes_M.tolist() == [1, 0] and picture.objects.is_crowd_M.tolist() == [False, True]
    assert picture.objects.boxes_M4.tolist() == [[10, 5, 20, 9], [0, 0, 3, 3]]
    assert picture.mask_HW[7, 15] == 2 and picture.mask_HW[1, 0] == IGNORED and picture.mask_HW[15, 15] == 0


def test_mean_iou_by_hand() -> None:
    mask = np.array([[0, 0, 1, 1], [IGNORED, 2, 2, 2]])
    predicted = np.array([[0, 1, 1, 1], [0, 2, 2, 1]])
    counts = confusion(mask, predicted, 4)
    assert mean_iou(counts) == pytest.approx((1 / 2 + 2 / 4 + 2 / 3) / 3) and pixel_accuracy(counts) == 5 / 7


def test_average_precision_by_hand() -> None:
    """Two objects; the best box is right at every threshold, the second is wrong, the third overlaps by 0.6."""
    truth = [objects((0, 0, 10, 10, 0), (20, 20, 30, 30, 0))]
    found = [detections((0, 0, 10, 10, 0, 0.9), (50, 50, 60, 60, 0, 0.8), (20, 20, 30, 26, 0, 0.7))]
    low = 51 / 101 + 50 / 101 * 2 / 3  # precision 1 up to recall 0.5 (51 of 101 points), then 2/3
    high = 51 / 101
    score = average_precision(truth, found, 2)
    assert score["AP50"] == pytest.approx(low) and score["AP75"] == pytest.approx(high)
    assert score["AP"] == pytest.approx((3 * low + 7 * high) / 10)  # 0.50, 0.55 and 0.60
    assert overlaps(truth[0].boxes_M4, found[0].boxes_M4)[1, 2] == pytest.approx(0.6)


def test_a_second_box_on_one_object_is_wrong_and_crowds_do_not_count() -> None:
    truth = [objects((0, 0, 10, 10, 0), (0, 20, 40, 60, 0), crowd=(False, True))]
    twice = [detections((0, 0, 10, 10, 0, 0.5), (0, 0, 10, 9, 0, 0.9))]
    assert average_precision(truth, twice, 1)["AP50"] == 1.0  # the object is found before the second box counts
    in_crowd = [detections((1, 21, 9, 30, 0, 0.9), (2, 22, 9, 30, 0, 0.8), (0, 0, 10, 10, 0, 0.5))]
    assert average_precision(truth, in_crowd, 1)["AP"] == 1.0
    outside = [detections((60, 60, 70, 70, 0, 0.9), (0, 0, 10, 10, 0, 0.5))]
    assert average_precision(truth, outside, 1)["AP"] == pytest.approx(0.5)
    assert np.isnan(average_precision([objects()], [detections()], 1)["AP"])


def random_case(seed: int) -> tuple[list[Objects], list[Detections]]:
    rng = np.random.default_rng(seed)
    truth, found = [], []
    for _ in range(8):
        low = rng.uniform(0, 60, (5, 2))
        boxes = np.concatenate([low, low + rng.uniform(5, 40, (5, 2))], axis=1)
        classes = rng.integers(0, 3, 5)
        truth.append(Objects(boxes.astype(np.float32), classes, rng.random(5) < 0.2))
        moved = np.repeat(boxes, 3, axis=0) + rng.normal(0, 3, (15, 4))
        moved[:, 2:] = np.maximum(moved[:, 2:], moved[:, :2] + 1)
        kinds = np.where(rng.random(15) < 0.8, np.repeat(classes, 3), rng.integers(0, 3, 15))
        found.append(Detections(moved, kinds, rng.random(15)))
    return truth, found


@pytest.mark.parametrize("seed", range(3))
def test_average_precision_is_that_of_pycocotools(seed: int) -> None:
    pytest.importorskip("pycocotools", reason="an extra: pip install '.[evaluation]'")
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    truth, found = random_case(seed)
    record: dict[str, Any] = {"info": {}, "images": [{"id": i} for i in range(len(truth))], "annotations": [],
                              "categories": [{"id": k} for k in range(3)]}  # fmt: skip
    for i, one in enumerate(truth):
        for box, kind, crowd in zip(one.boxes_M4.astype(float), one.classes_M, one.is_crowd_M, strict=True):
            size = box[2:] - box[:2]
            record["annotations"].append({
                "id": len(record["annotations"]) + 1, "image_id": i, "category_id": int(kind), "iscrowd": int(crowd),
                "bbox": [*box[:2], *size], "area": float(size.prod()),
            })  # fmt: skip
    answers = [
        {"image_id": i, "category_id": int(kind), "bbox": [*box[:2], *(box[2:] - box[:2])], "score": float(score)}
        for i, one in enumerate(found)
        for box, kind, score in zip(one.boxes_M4, one.classes_M, one.scores_M, strict=True)
    ]
    coco = COCO()
    coco.dataset = record
    coco.createIndex()
    judge = COCOeval(coco, coco.loadRes(answers), "bbox")
    judge.evaluate()
    judge.accumulate()
    judge.summarize()
    ours = average_precision(truth, found, 3)
    assert [ours["AP"], ours["AP50"], ours["AP75"]] == pytest.approx(judge.stats[:3].tolist(), abs=1e-9)


def test_cells_and_boxes_are_inverse() -> None:
    truth = objects((4, 8, 28, 24, 1), (40, 40, 60, 56, 0), (0, 0, 60, 60, 2))
    kind, sides = cell_targets(truth, 16, 64, 3)
    assert kind[4, 3] == 1 and kind[12, 12] == 0 and kind[0, 15] == 3 and kind[8, 8] == 2
    logits = np.full((4, 16, 16), -10.0)
    np.put_along_axis(logits, kind[None], 10.0, axis=0)
    found = boxes_of(np.concatenate([logits, sides]), 64, 3)
    assert found.classes_M[np.argsort(found.classes_M)].tolist() == [0, 1, 2]
    assert average_precision([truth], [found], 3)["AP"] == 1.0
