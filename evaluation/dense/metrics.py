"""Mean intersection over union of masks, and COCO's average precision of boxes.

Average precision as COCO's own code computes it (Lin et al. 2014, https://arxiv.org/abs/1405.0312; `pycocotools`, an extra
against which a test compares): thresholds 0.50 to 0.95, 101 recalls, at most 100 boxes per picture and class, any size.
"""

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from evaluation.dense.sources import IGNORED, Objects

THRESHOLDS = np.linspace(0.5, 0.95, 10)
RECALLS = np.linspace(0, 1, 101)
MOST_BOXES = 100


def confusion(mask_HW: np.ndarray, predicted_HW: np.ndarray, num_classes: int) -> np.ndarray:
    """(true class, predicted class) counts of pixels, without ignored ones."""
    counted = mask_HW != IGNORED
    pairs = mask_HW[counted] * num_classes + predicted_HW[counted]
    return np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)


def mean_iou(counts_CC: np.ndarray) -> float:
    """Over the classes that occur in the masks or the predictions."""
    both = np.diag(counts_CC)
    either = counts_CC.sum(0) + counts_CC.sum(1) - both
    return float((both[either > 0] / either[either > 0]).mean())


def pixel_accuracy(counts_CC: np.ndarray) -> float:
    return float(np.diag(counts_CC).sum() / max(counts_CC.sum(), 1))


class Detections(NamedTuple):
    """Boxes (M, 4), classes (M,) and scores (M,) of one picture."""

    boxes_M4: np.ndarray
    classes_M: np.ndarray
    scores_M: np.ndarray


def overlaps(boxes_M4: np.ndarray, others_K4: np.ndarray, is_crowd_K: np.ndarray | None = None) -> np.ndarray:
    """(M, K) intersection over union; over the first box's own area for a crowd."""
    low = np.maximum(boxes_M4[:, None, :2], others_K4[None, :, :2])
    high = np.minimum(boxes_M4[:, None, 2:], others_K4[None, :, 2:])
    shared = np.clip(high - low, 0, None).prod(-1)
    own, theirs = ((b[:, 2] - b[:, 0]) * (b[:, 3] - b[:, 1]) for b in (boxes_M4, others_K4))
    whole = own[:, None] + theirs[None] - shared
    if is_crowd_K is not None:
        whole = np.where(is_crowd_K[None], own[:, None], whole)
    return np.divide(shared, whole, out=np.zeros_like(shared), where=whole > 0)


def average_precision(truth: Sequence[Objects], found: Sequence[Detections], num_classes: int) -> dict[str, float]:
    """AP (mean over thresholds and classes with objects), AP50 and AP75; NaN without objects."""
    by_class = [_one_class(truth, found, kind) for kind in range(num_classes)]
    table = np.array([row for row in by_class if row is not None])
    if not len(table):
        return {"AP": np.nan, "AP50": np.nan, "AP75": np.nan}
    means = table.mean(axis=0)
    return {"AP": float(means.mean()), "AP50": float(means[0]), "AP75": float(means[5])}


def _one_class(truth: Sequence[Objects], found: Sequence[Detections], kind: int) -> np.ndarray | None:
    """Average precision by threshold (10,); None where no picture has such an object (crowds do not count)."""
    scores, hits, ignored, total = [], [], [], 0
    for objects, detections in zip(truth, found, strict=True):
        here, mine = objects.classes_M == kind, detections.classes_M == kind
        order = np.argsort(-detections.scores_M[mine], kind="stable")[:MOST_BOXES]
        boxes, crowd = objects.boxes_M4[here], objects.is_crowd_M[here]
        iou_MK = overlaps(detections.boxes_M4[mine][order], boxes, crowd)
        total += int((~crowd).sum())
        hit_TM, ignored_TM = _match(iou_MK, crowd)
        scores.append(detections.scores_M[mine][order])
        hits.append(hit_TM)
        ignored.append(ignored_TM)
    if not total:
        return None
    order = np.argsort(-np.concatenate(scores), kind="stable")
    hit_TN, ignored_TN = np.concatenate(hits, axis=1)[:, order], np.concatenate(ignored, axis=1)[:, order]
    return np.array([_area(hit[~out], total) for hit, out in zip(hit_TN, ignored_TN, strict=True)])


def _match(iou_MK: np.ndarray, crowd_K: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """For each threshold (T, M): whether a box finds an object of its own, and whether it lies in a crowd instead.

    Boxes, best score first, take the free object that they overlap most; what overlaps none but a crowd is not counted.
    """
    num_boxes = len(iou_MK)
    hit, ignored = (np.zeros((len(THRESHOLDS), num_boxes), dtype=bool) for _ in range(2))
    for t, threshold in enumerate(THRESHOLDS):
        free = ~crowd_K
        for m in range(num_boxes):
            candidates = np.where(free, iou_MK[m], -1.0)
            if len(candidates) and candidates.max() >= min(threshold, 1 - 1e-10):
                hit[t, m] = True
                # Of equal ones COCO takes the last.
                free[len(candidates) - 1 - int(np.argmax(candidates[::-1]))] = False
            else:
                ignored[t, m] = bool((iou_MK[m][crowd_K] >= threshold).any())
    return hit, ignored


def _area(hit_N: np.ndarray, total: int) -> float:
    """Mean over 101 recalls of the best precision at that recall or above."""
    right = np.cumsum(hit_N)
    recall, precision = right / total, right / np.arange(1, len(hit_N) + 1)
    best = np.maximum.accumulate(precision[::-1])[::-1]
    place = np.searchsorted(recall, RECALLS, side="left")
    return float(np.where(place < len(best), np.append(best, 0.0)[np.minimum(place, len(best))], 0.0).mean())
