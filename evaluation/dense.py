"""Dense tasks on token maps of a frozen encoder, not private: segmentation, and detection of boxes.

    synthetic:SEED:COUNT           drawn plain shapes: classes are background and kinds of shapes
    ade20k:DIR/training            images/SPLIT/*.jpg and annotations/SPLIT/*.png (0 is no class, 1
                                   to 150 are)
    coco:instances.json:IMAGES     COCO instances (needs pycocotools, an extra), later objects over
                                   earlier ones

Shapes: B batch, D width, h w cells of the token map, H W pixels, S side of the picture in pixels, C
classes, N pictures, M boxes. Boxes are rows of six numbers: left, top, right, bottom in pixels,
class, and 1 for a crowd (the score, if the box was detected).
"""

import contextlib
import io
import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn
from torch.nn import functional as F

from data.errors import DataError, DecodeError, ReadError
from data.synthetic.generate import SyntheticData
from data.synthetic.render import draw
from data.synthetic.scene import Scene, Texture
from data.synthetic.shapes import SIMPLE
from evaluation.command_options import DenseOptions
from evaluation.encoder import encoder_of, token_maps
from evaluation.features import open_checkpoint
from evaluation.results import DataUse, ModelFacts, Results
from evaluation.sources import bytes_of, encode_png, whole_image
from trainer.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(a head's values for a batch of pictures, the rows of these pictures) -> mean loss."""
BATCH_SIZE = 16
NMS_OVERLAP = 0.5
LEAST_SCORE = 0.05
MOST_BOXES = 100
IGNORED = -1


class DensePicture(NamedTuple):
    """A picture with its mask and boxes.

    Attributes:
        image: encoded bytes.
        mask_HW: int64 class of each pixel, IGNORED for pixels without a class.
        boxes_M6: None where the source has no boxes.
    """

    image: bytes
    mask_HW: np.ndarray
    boxes_M6: np.ndarray | None


@dataclass(frozen=True)
class DensePictures:
    """A source of pictures.

    Attributes:
        name: for people.
        mask_classes: names of the values of masks.
        object_classes: of boxes; empty without boxes.
        count: the number of pictures.
        read: returns a picture by its number.
    """

    name: str
    mask_classes: tuple[str, ...]
    object_classes: tuple[str, ...]
    count: int
    read: Callable[[int], DensePicture]


def synthetic_shapes(seed: int, count: int, image_size: int) -> DensePictures:
    """Returns plain shapes, as `data.synthetic` draws them for captions.

    The masks are the same shapes, each drawn alone.
    """
    examples = SyntheticData(seed, image_size, content="shapes")

    def read(index: int) -> DensePicture:
        example = examples.example(index)
        mask_HW = np.zeros(example.image_HWC.shape[:2], dtype=np.int64)
        boxes = []
        for shape in example.scene.shapes:
            white = replace(shape, colour="white", fill="solid", second=None)
            alone_HWC = draw(Scene((Texture("plain", ("black",)),), (white,)), image_size)
            # A pixel belongs to a shape that covers more than half of it.
            covered_HW = alone_HWC[:, :, 0] > 127
            kind = SIMPLE.index(shape.name)
            mask_HW[covered_HW] = 1 + kind
            rows = np.flatnonzero(covered_HW.any(1))
            columns = np.flatnonzero(covered_HW.any(0))
            x_max = columns[-1] + 1
            y_max = rows[-1] + 1
            boxes.append((columns[0], rows[0], x_max, y_max, kind, 0))
        boxes_M6 = np.array(boxes, np.float32).reshape(-1, 6)
        return DensePicture(encode_png(example.image_HWC), mask_HW, boxes_M6)

    return DensePictures(f"synthetic:{seed}:{count}", ("background", *SIMPLE), SIMPLE, count, read)


def ade20k(root: Path, split: str) -> DensePictures:
    """Returns a split of the scene parsing challenge's folders, with 150 classes.

    Zhou et al. 2017, https://arxiv.org/abs/1608.05442.

    Raises:
        DataError: no such folders, or an image without its annotation; in `read`, a file that is no
            annotation.
    """
    images = sorted((root / "images" / split).glob("*.jpg"))
    masks = [root / "annotations" / split / f"{path.stem}.png" for path in images]
    if not images:
        raise DataError(f"{root / 'images' / split} holds no *.jpg")
    for path in masks:
        if not path.is_file():
            raise DataError(f"{path} is not there: every image needs its annotation")

    def read(index: int) -> DensePicture:
        try:
            with Image.open(masks[index]) as mask:
                values_HW = np.asarray(mask).astype(np.int64)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{masks[index]} is no annotation: {error}") from error
        if values_HW.ndim != 2 or values_HW.max(initial=0) > 150:
            raise DataError(f"{masks[index]} is no annotation with classes 0 to 150")
        return DensePicture(bytes_of(images[index]), values_HW - 1, None)

    class_names = tuple(map(str, range(1, 151)))
    return DensePictures(f"ade20k:{root}/{split}", class_names, (), len(images), read)


def coco(annotations: Path, folder: Path) -> DensePictures:
    """Returns COCO instances, read by COCO's own code; categories in the order of their ids.

    Lin et al. 2014, https://arxiv.org/abs/1405.0312.

    Raises:
        ConfigError: COCO's own code is not installed.
        DataError: no such file, or no instances in it; in `read`, an image or annotation that lacks
            a field of COCO's.
        ReadError: in `read`, the picture cannot be read.
    """
    require_pycocotools()
    from pycocotools.coco import COCO

    name = f"coco:{annotations}"
    try:
        # The package prints.
        with contextlib.redirect_stdout(io.StringIO()):
            instances = COCO(str(annotations))
        categories = sorted(instances.dataset["categories"], key=lambda category: category["id"])
        images: list[dict[str, Any]] = sorted(
            instances.dataset["images"], key=lambda image: image["id"]
        )
    except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
        raise DataError(
            f"{annotations} holds no COCO instances: {type(error).__name__} {error}"
        ) from error
    if not images:
        raise DataError(f"{annotations} lists no images")
    number_of = {category["id"]: number for number, category in enumerate(categories)}
    classes = tuple(category["name"] for category in categories)

    def read(index: int) -> DensePicture:
        image = images[index]
        boxes = []
        try:
            mask_HW = np.zeros((image["height"], image["width"]), dtype=np.int64)
            for annotation in instances.imgToAnns[image["id"]]:
                kind = number_of[annotation["category_id"]]
                is_crowd = bool(annotation.get("iscrowd", 0))
                covered_HW = instances.annToMask(annotation).astype(bool)
                mask_HW[covered_HW] = IGNORED if is_crowd else 1 + kind
                x, y, width, height = annotation["bbox"]
                boxes.append((x, y, x + width, y + height, kind, is_crowd))
            boxes_M6 = np.array(boxes, np.float32).reshape(-1, 6)
            encoded_image = (folder / image["file_name"]).read_bytes()
            return DensePicture(encoded_image, mask_HW, boxes_M6)
        except OSError as error:
            raise ReadError(
                f"cannot read image {index + 1} of {len(images)} of {name}: {error.strerror}"
            ) from error
        # COCO's code raises any error that it meets, plain Exceptions too.
        except Exception as error:
            raise DataError(
                f"{name}: image {index + 1} of {len(images)} by id, or an annotation of it, "
                f"is not COCO's: {type(error).__name__}"
            ) from error

    return DensePictures(name, ("background", *classes), classes, len(images), read)


def require_pycocotools() -> None:
    """Refuses to go on without COCO's own code, which is an extra.

    Raises:
        ConfigError: the package is not installed.
    """
    try:
        import pycocotools  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "detection and coco: sources need the package pycocotools: pip install '.[evaluation]'"
        ) from error


def open_dense(text: str, image_size: int) -> DensePictures:
    """Opens the source that a command line names; see the module.

    Args:
        image_size: of synthetic pictures.

    Raises:
        DataError: an unknown kind, or no such files.
    """
    kind, _, location = text.partition(":")
    if kind == "synthetic":
        seed, _, count = location.partition(":")
        if seed.isdigit() and count.isdigit() and int(count) > 0:
            return synthetic_shapes(int(seed), int(count), image_size)
    if kind == "ade20k" and location:
        path = Path(location).expanduser()
        return ade20k(path.parent, path.name)
    if kind == "coco" and ":" in location:
        annotations, _, images = location.partition(":")
        return coco(Path(annotations).expanduser(), Path(images).expanduser())
    raise DataError(
        f"{text!r} names no pictures; write synthetic:SEED:COUNT, ade20k:DIR/SPLIT "
        "or coco:FILE.json:IMAGES"
    )


@dataclass(frozen=True)
class DenseSet:
    """Holds token maps (N, D, h, w) of pictures, masks as stored, and boxes in pixels of side S."""

    maps_NDhw: Tensor
    masks: list[np.ndarray]
    boxes: list[np.ndarray] | None
    side: int


@torch.no_grad()
def prepare(model: nn.Module, source: DensePictures, side: int) -> DenseSet:
    """Runs the encoder over all pictures of a source, as squares; the maps stay in memory.

    Args:
        side: of the squares, in pixels.

    Raises:
        DataError: a picture that cannot be decoded.
        ConfigError: a size that is no whole number of patches.
    """
    encoder = encoder_of(model)
    device = encoder.class_token.device
    maps: list[Tensor] = []
    masks: list[np.ndarray] = []
    boxes: list[np.ndarray] = []
    for index in range(source.count):
        picture = source.read(index)
        try:
            image_CHW, (width, height) = whole_image(picture.image, side)
        except DecodeError as error:
            raise DataError(f"a picture cannot be used: {error}") from error
        images_1CHW = torch.from_numpy(image_CHW)[None].to(device)
        maps.append(token_maps(encoder, images_1CHW).float())
        masks.append(picture.mask_HW)
        if picture.boxes_M6 is not None:
            x_scale = side / width
            y_scale = side / height
            scale_6 = np.array([x_scale, y_scale, x_scale, y_scale, 1, 1], dtype=np.float32)
            boxes.append(picture.boxes_M6 * scale_6)
    has_boxes = len(boxes) == len(masks)
    return DenseSet(torch.cat(maps), masks, boxes if has_boxes else None, side)


def segmentation_scores(
    train: DenseSet, test: DenseSet, num_classes: int, options: DenseOptions
) -> dict[str, float]:
    """Trains a segmentation head, and returns mean IoU and accuracy of pixels.

    Scores are at the resolution of the test masks.
    """
    targets = []
    centre_S = np.arange(train.side) + 0.5
    for mask_HW in train.masks:
        # Takes the nearest pixel of the mask for each of S x S.
        height, width = mask_HW.shape
        rows_S = (centre_S * height // train.side).astype(int)
        columns_S = (centre_S * width // train.side).astype(int)
        targets.append(torch.from_numpy(mask_HW[rows_S][:, columns_S]))
    target_NSS = torch.stack(targets).to(train.maps_NDhw.device)

    def loss(values: Tensor, rows: Tensor) -> Tensor:
        logits = F.interpolate(
            values, size=target_NSS.shape[1:], mode="bilinear", align_corners=False
        )
        return F.cross_entropy(logits, target_NSS[rows], ignore_index=IGNORED)

    head = _train(train, num_classes, loss, options)

    def true_and_predicted(mask_HW: np.ndarray, values: Tensor) -> tuple[np.ndarray, np.ndarray]:
        logits = F.interpolate(
            values[None], size=mask_HW.shape, mode="bilinear", align_corners=False
        )
        return mask_HW, logits[0].argmax(0).cpu().numpy()

    masks = map(true_and_predicted, test.masks, _values(head, test))
    return pixel_scores(masks, num_classes)


def detection_scores(
    train: DenseSet, test: DenseSet, num_classes: int, options: DenseOptions
) -> dict[str, float]:
    """Trains a detection head, and returns COCO's AP, AP50 and AP75 on the test pictures."""
    assert train.boxes is not None and test.boxes is not None
    # The convolutional head doubles the resolution.
    factor = 2 if options.head == "conv" else 1
    cells = train.maps_NDhw.shape[2] * factor
    targets = [cell_targets(boxes_M6, cells, train.side, num_classes) for boxes_M6 in train.boxes]
    device = train.maps_NDhw.device
    kind_Nhw = torch.stack([torch.from_numpy(kind) for kind, _ in targets]).to(device)
    sides_N4hw = torch.stack([torch.from_numpy(sides) for _, sides in targets]).to(device)

    def loss(values: Tensor, rows: Tensor) -> Tensor:
        kind_Bhw = kind_Nhw[rows]
        sides_B4hw = sides_N4hw[rows]
        logits = values[:, : num_classes + 1]
        predicted_sides = values[:, num_classes + 1 :]
        is_object = (kind_Bhw < num_classes)[:, None].expand(-1, 4, -1, -1)
        error = F.smooth_l1_loss(
            predicted_sides[is_object], sides_B4hw[is_object], beta=0.1, reduction="sum"
        )
        return F.cross_entropy(logits, kind_Bhw) + error / is_object.sum().clamp(min=1)

    head = _train(train, num_classes + 5, loss, options)
    detected = []
    for values in _values(head, test):
        detected.append(boxes_of(values.cpu().numpy(), test.side, num_classes))
    return average_precision(test.boxes, detected, num_classes)


def _train(train: DenseSet, num_values: int, loss: Loss, options: DenseOptions) -> nn.Sequential:
    """Returns a trained head from token maps (B, D, h, w) to values of every cell.

    `linear` is one layer on each token, (B, num_values, h, w); `conv` two convolutions at twice the
    resolution.
    """
    generator = torch.Generator().manual_seed(0)
    device = train.maps_NDhw.device
    width = train.maps_NDhw.shape[1]
    hidden = 128
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(width, num_values, 1)]
        if options.head == "conv":
            layers = [
                nn.Conv2d(width, hidden, 3, padding=1),
                nn.GELU(),
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.Conv2d(hidden, hidden, 3, padding=1),
                nn.GELU(),
                nn.Conv2d(hidden, num_values, 1),
            ]
        head = nn.Sequential(nn.BatchNorm2d(width, affine=False), *layers).to(device)
    count = len(train.maps_NDhw)
    optimizer = torch.optim.AdamW(head.parameters(), lr=options.lr, weight_decay=1e-4)
    steps = options.epochs * -(-count // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, options.lr, total_steps=steps)
    for _ in range(options.epochs):
        order = torch.randperm(count, generator=generator).to(device)
        for rows in order.split(BATCH_SIZE):
            optimizer.zero_grad()
            loss(head(train.maps_NDhw[rows]), rows).backward()
            optimizer.step()
            schedule.step()
    return head.eval()


@torch.no_grad()
def _values(head: nn.Sequential, test: DenseSet) -> list[Tensor]:
    """Returns the head's values of each picture."""
    values: list[Tensor] = []
    for maps_BDhw in test.maps_NDhw.split(32):
        values += head(maps_BDhw)
    return values


def cell_targets(
    boxes_M6: np.ndarray, cells: int, side: int, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Returns the targets of FCOS on one scale (Tian et al. 2019, arXiv 1904.01355).

    A cell inside a box predicts its class and its distances to the four sides. If a cell is inside
    several boxes, the smallest counts. Crowds are left out.

    Returns:
        The class of each cell (h, w), `num_classes` outside of all boxes; and the distances of its
        centre to left, top, right and bottom, in parts of the picture's side (4, h, w).
    """
    centre = (np.arange(cells, dtype=np.float32) + 0.5) * side / cells
    x, y = np.meshgrid(centre, centre)
    kind_hw = np.full((cells, cells), num_classes, dtype=np.int64)
    sides_4hw = np.zeros((4, cells, cells), dtype=np.float32)
    widths_M = boxes_M6[:, 2] - boxes_M6[:, 0]
    heights_M = boxes_M6[:, 3] - boxes_M6[:, 1]
    areas_M = widths_M * heights_M
    # From large to small: a smaller box overwrites a larger one.
    for x_min, y_min, x_max, y_max, kind, is_crowd in boxes_M6[np.argsort(-areas_M)]:
        distances_4hw = np.stack([x - x_min, y - y_min, x_max - x, y_max - y])
        in_box_hw = (distances_4hw > 0).all(axis=0) & (is_crowd == 0)
        kind_hw[in_box_hw] = kind
        sides_4hw[:, in_box_hw] = distances_4hw[:, in_box_hw] / side
    return kind_hw, sides_4hw


def boxes_of(values: np.ndarray, side: int, num_classes: int) -> np.ndarray:
    """Returns the boxes (M, 6) of one picture by score, without overlapping ones of a class.

    Args:
        values: of a head, (C + 5, h, w).
    """
    cells = values.shape[1]
    logits = values[: num_classes + 1]
    probabilities = np.exp(logits - logits.max(axis=0))
    probabilities = (probabilities / probabilities.sum(axis=0))[:num_classes]
    scores_of_cells = probabilities.reshape(num_classes, -1)
    centre = (np.arange(cells) + 0.5) * side / cells
    x, y = np.meshgrid(centre, centre)
    west, north, east, south = np.clip(values[num_classes + 1 :], 0, None) * side
    boxes = np.stack([x - west, y - north, x + east, y + south], axis=-1)
    boxes = boxes.reshape(-1, 4)
    kinds, places = np.nonzero(scores_of_cells >= LEAST_SCORE)
    scores = scores_of_cells[kinds, places]
    order = np.argsort(-scores, kind="stable")
    kinds = kinds[order]
    boxes = boxes[places[order]]
    scores = scores[order]
    # Non-maximum suppression: the best box removes those of its class that overlap it.
    selected: list[int] = []
    candidates = np.arange(len(scores))
    while len(candidates) and len(selected) < MOST_BOXES:
        best = candidates[0]
        rivals = candidates[1:]
        selected.append(best)
        best_low = boxes[best, :2]
        best_high = boxes[best, 2:]
        lows = boxes[rivals, :2]
        highs = boxes[rivals, 2:]
        overlaps = np.minimum(best_high, highs) - np.maximum(best_low, lows)
        intersections = np.clip(overlaps, 0, None).prod(-1)
        areas = (highs - lows).prod(-1)
        unions = (best_high - best_low).prod() + areas - intersections
        is_apart = intersections <= NMS_OVERLAP * unions
        candidates = rivals[(kinds[rivals] != kinds[best]) | is_apart]
    return np.column_stack([boxes[selected], kinds[selected], scores[selected]])


def pixel_scores(
    masks: Iterable[tuple[np.ndarray, np.ndarray]], num_classes: int
) -> dict[str, float]:
    """Returns the mean IoU over the classes that occur, and the share of right pixels.

    Ignored pixels do not count.

    Args:
        masks: (true, predicted) class of each pixel, for each picture.
    """
    # Pixels by true class and predicted class.
    counts_CC = np.zeros((num_classes, num_classes), dtype=np.int64)
    for mask_HW, predicted_HW in masks:
        is_counted_HW = mask_HW != IGNORED
        pairs = mask_HW[is_counted_HW] * num_classes + predicted_HW[is_counted_HW]
        counts_CC += np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)
    intersection_C = np.diag(counts_CC)
    union_C = counts_CC.sum(0) + counts_CC.sum(1) - intersection_C
    occurs_C = union_C > 0
    mean_iou = float((intersection_C[occurs_C] / union_C[occurs_C]).mean())
    pixel_accuracy = float(intersection_C.sum() / max(counts_CC.sum(), 1))
    return {"mean_iou": mean_iou, "pixel_accuracy": pixel_accuracy}


def average_precision(
    truth: Sequence[np.ndarray], detected: Sequence[np.ndarray], num_classes: int
) -> dict[str, float]:
    """Returns AP (mean over thresholds and classes with objects), AP50 and AP75.

    They are NaN without objects. COCO's own code computes them (Lin et al. 2014, arXiv 1405.0312;
    `pycocotools`, an extra): thresholds 0.50 to 0.95, 101 recalls, at most 100 boxes per picture
    and class, any size.
    """
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations: list[dict[str, Any]] = []
    detections: list[dict[str, Any]] = []
    for number, (true_M6, detected_M6) in enumerate(zip(truth, detected, strict=True)):
        for x_min, y_min, x_max, y_max, kind, is_crowd in true_M6.tolist():
            width = x_max - x_min
            height = y_max - y_min
            annotation = {
                "id": len(annotations) + 1,
                "image_id": number,
                "category_id": int(kind),
                "bbox": [x_min, y_min, width, height],
                "iscrowd": int(is_crowd),
                "area": width * height,
            }
            annotations.append(annotation)
        for x_min, y_min, x_max, y_max, kind, score in detected_M6.tolist():
            box = [x_min, y_min, x_max - x_min, y_max - y_min]
            detections.append(
                {"image_id": number, "category_id": int(kind), "bbox": box, "score": score}
            )
    names = ("AP", "AP50", "AP75")
    if all(annotation["iscrowd"] for annotation in annotations):
        return dict.fromkeys(names, math.nan)
    # COCO's code fails without detections.
    if not detections:
        return dict.fromkeys(names, 0.0)
    # The package prints.
    with contextlib.redirect_stdout(io.StringIO()):
        true = COCO()
        pictures = [{"id": number} for number in range(len(truth))]
        categories = [{"id": number} for number in range(num_classes)]
        true.dataset = {
            "info": {},
            "images": pictures,
            "annotations": annotations,
            "categories": categories,
        }
        true.createIndex()
        judge = COCOeval(true, true.loadRes(detections), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return dict(zip(names, map(float, judge.stats), strict=False))


def dense(options: DenseOptions) -> Results:
    """Runs the command `dense`; see its options."""
    opened = open_checkpoint(options)
    side = options.image_size or encoder_of(opened.model).config.image_size
    train_source = open_dense(options.train, side)
    test_source = open_dense(options.test, side)
    mask_classes = train_source.mask_classes
    object_classes = train_source.object_classes
    if mask_classes != test_source.mask_classes:
        raise ConfigError("--train and --test have different classes")
    if options.task == "detection":
        if not object_classes:
            raise ConfigError(f"detection needs boxes, and {train_source.name} has masks only")
        # Before the encoder runs over all pictures, which takes long.
        require_pycocotools()
    train = prepare(opened.model, train_source, side)
    test = prepare(opened.model, test_source, side)
    if options.task == "segmentation":
        scores = segmentation_scores(train, test, len(mask_classes), options)
    else:
        scores = detection_scores(train, test, len(object_classes), options)
    uses = [
        DataUse("train", train_source.name, train_source.count),
        DataUse("test", test_source.name, test_source.count),
    ]
    scalars = {f"{options.task}/{name}": score for name, score in scores.items()}
    facts = ModelFacts.of(opened.path, opened.manifest)
    return Results("dense", scalars, uses, facts, details={"head": options.head})
