"""Dense tasks on token maps of a frozen encoder, not private: small heads that find a class for every pixel, or boxes.

    synthetic:SEED:COUNT               plain shapes that are drawn here: classes are background and kinds of shapes
    ade20k:DIR/training                images/SPLIT/*.jpg and annotations/SPLIT/*.png (0 is no class, 1 to 150 are)
    coco:instances.json:IMAGES         COCO instances (needs pycocotools, an extra), later objects over earlier ones

Shapes: B batch, D width, h w cells of the token map, H W pixels, S side of the picture in pixels, C classes, N pictures, M boxes.
Boxes are rows of six numbers: left, top, right, bottom in pixels, class, and 1 for a crowd (of what was found: the score).
The boxes are those of FCOS (Tian et al. 2019, https://arxiv.org/abs/1904.01355) on one scale: a cell inside of a box predicts its
class and its distances to the four sides. COCO's own code computes their average precision (Lin et al. 2014,
https://arxiv.org/abs/1405.0312; `pycocotools`, an extra): thresholds 0.50 to 0.95, 101 recalls, at most 100 boxes per picture
and class, any size.
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
from evaluation.encoder import encoder_of, token_maps
from evaluation.features import open_checkpoint
from evaluation.options import DenseOptions
from evaluation.results import DataUse, ModelFacts, Results
from evaluation.sources import bytes_of, encode_png, whole_image
from trainer.errors import ConfigError

Loss = Callable[[Tensor, Tensor], Tensor]
"""(a head's values for some pictures, the rows of these pictures) -> mean loss."""
BATCH_SIZE = 16
NMS_OVERLAP = 0.5
LEAST_SCORE = 0.05
MOST_BOXES = 100
IGNORED = -1


class DensePicture(NamedTuple):
    """
    Attributes:
        image: encoded bytes.
        mask_HW: int64 class of each pixel, IGNORED where there is none.
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
        count: of pictures.
        read: a picture by its number.
    """

    name: str
    mask_classes: tuple[str, ...]
    object_classes: tuple[str, ...]
    count: int
    read: Callable[[int], DensePicture]


def synthetic_shapes(seed: int, count: int, image_size: int) -> DensePictures:
    """Plain shapes, as `data.synthetic` draws them for captions; the masks are the same shapes drawn alone."""
    data = SyntheticData(seed, image_size, content="shapes")

    def read(index: int) -> DensePicture:
        example = data.example(index)
        mask_HW = np.zeros(example.image_HWC.shape[:2], dtype=np.int64)
        boxes = []
        for shape in example.scene.shapes:
            white = replace(shape, colour="white", fill="solid", second=None)
            alone_HWC = draw(Scene((Texture("plain", ("black",)),), (white,)), image_size)
            covered_HW = alone_HWC[:, :, 0] > 127  # the shape covers more than half of the pixel
            kind = SIMPLE.index(shape.name)
            mask_HW[covered_HW] = 1 + kind
            rows, columns = np.flatnonzero(covered_HW.any(1)), np.flatnonzero(covered_HW.any(0))
            boxes.append((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1, kind, 0))
        return DensePicture(
            encode_png(example.image_HWC), mask_HW, np.array(boxes, np.float32).reshape(-1, 6)
        )

    return DensePictures(f"synthetic:{seed}:{count}", ("background", *SIMPLE), SIMPLE, count, read)


def ade20k(root: Path, split: str) -> DensePictures:
    """The scene parsing challenge's folders (Zhou et al. 2017, https://arxiv.org/abs/1608.05442): 150 classes.

    Raises:
        DataError: no such folders, or an image without its annotation; reading one, an annotation that is none.
    """
    images = sorted((root / "images" / split).glob("*.jpg"))
    masks = [root / "annotations" / split / f"{path.stem}.png" for path in images]
    if not images:
        raise DataError(f"{root / 'images' / split} holds no *.jpg")
    if missing := [path for path in masks if not path.is_file()]:
        raise DataError(f"{missing[0]} is not there: every image needs its annotation")

    def read(index: int) -> DensePicture:
        try:
            with Image.open(masks[index]) as mask:
                values_HW = np.asarray(mask).astype(np.int64)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{masks[index]} is no annotation: {error}") from error
        if values_HW.ndim != 2 or values_HW.max(initial=0) > 150:
            raise DataError(f"{masks[index]} is no annotation with classes 0 to 150")
        return DensePicture(bytes_of(images[index]), values_HW - 1, None)

    return DensePictures(
        f"ade20k:{root}/{split}", tuple(map(str, range(1, 151))), (), len(images), read
    )


def coco(annotations: Path, folder: Path) -> DensePictures:
    """COCO instances (Lin et al. 2014, https://arxiv.org/abs/1405.0312), read by COCO's own code; categories by their ids.

    Raises:
        ConfigError: COCO's own code is not installed.
        DataError: no such file, or no instances in it; reading one, an image or annotation without what COCO's have.
        ReadError: reading one, the picture cannot be read.
    """
    require_pycocotools()
    from pycocotools.coco import COCO

    name = f"coco:{annotations}"
    try:
        with contextlib.redirect_stdout(io.StringIO()):  # the package prints
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
                left, top, width, height = annotation["bbox"]
                boxes.append((left, top, left + width, top + height, kind, is_crowd))
            boxes_M6 = np.array(boxes, np.float32).reshape(-1, 6)
            return DensePicture((folder / image["file_name"]).read_bytes(), mask_HW, boxes_M6)
        except OSError as error:
            raise ReadError(
                f"cannot read image {index + 1} of {len(images)} of {name}: {error.strerror}"
            ) from error
        except Exception as error:  # COCO's code raises what it runs into, plain Exceptions too
            raise DataError(
                f"{name}: image {index + 1} of {len(images)} by id, or an annotation of it, is not COCO's: {type(error).__name__}"
            ) from error

    return DensePictures(name, ("background", *classes), classes, len(images), read)


def require_pycocotools() -> None:
    """
    Raises:
        ConfigError: COCO's own code, an extra, is not installed.
    """
    try:
        import pycocotools  # noqa: F401
    except ImportError as error:
        raise ConfigError(
            "detection and coco: sources need the package pycocotools: pip install '.[evaluation]'"
        ) from error


def open_dense(text: str, image_size: int) -> DensePictures:
    """The source that a command line names; see the module.

    Args:
        image_size: of synthetic pictures.

    Raises:
        DataError: an unknown kind, or nothing there.
    """
    kind, _, where = text.partition(":")
    if kind == "synthetic":
        seed, _, count = where.partition(":")
        if seed.isdigit() and count.isdigit() and int(count) > 0:
            return synthetic_shapes(int(seed), int(count), image_size)
    if kind == "ade20k" and where:
        path = Path(where).expanduser()
        return ade20k(path.parent, path.name)
    if kind == "coco" and ":" in where:
        annotations, _, images = where.partition(":")
        return coco(Path(annotations).expanduser(), Path(images).expanduser())
    raise DataError(
        f"{text!r} names no pictures; write synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"
    )


@dataclass(frozen=True)
class DenseSet:
    """Token maps (N, D, h, w) of pictures, with masks as stored and boxes in pixels of the square of side S."""

    maps_NDhw: Tensor
    masks: list[np.ndarray]
    boxes: list[np.ndarray] | None
    side: int


@torch.no_grad()
def prepare(model: nn.Module, source: DensePictures, side: int) -> DenseSet:
    """Runs the encoder over all pictures of a source, brought to squares of `side` pixels; the maps stay in memory.

    Raises:
        DataError: a picture that cannot be decoded.
        ConfigError: a size that is no whole number of patches.
    """
    encoder = encoder_of(model)
    device = encoder.class_token.device
    maps, masks, boxes = [], [], []
    for index in range(source.count):
        picture = source.read(index)
        try:
            image_CHW, (width, height) = whole_image(picture.image, side)
        except DecodeError as error:
            raise DataError(f"a picture cannot be used: {error}") from error
        maps.append(token_maps(encoder, torch.from_numpy(image_CHW)[None].to(device)).float())
        masks.append(picture.mask_HW)
        if picture.boxes_M6 is not None:
            boxes.append(
                picture.boxes_M6
                * np.array([side / width, side / height] * 2 + [1, 1], dtype=np.float32)
            )
    return DenseSet(torch.cat(maps), masks, boxes if len(boxes) == len(masks) else None, side)


def segmentation_scores(
    train: DenseSet, test: DenseSet, num_classes: int, how: DenseOptions
) -> dict[str, float]:
    """Trains a segmentation head and scores it at the resolution of the test masks: mean IoU, accuracy of pixels."""
    targets = []
    for mask_HW in train.masks:  # the nearest pixel of each of S x S
        rows, columns = (
            (np.arange(train.side) + 0.5) * size // train.side for size in mask_HW.shape
        )
        targets.append(torch.from_numpy(mask_HW[rows.astype(int)][:, columns.astype(int)]))
    target_NSS = torch.stack(targets).to(train.maps_NDhw.device)

    def loss(values: Tensor, rows: Tensor) -> Tensor:
        logits = F.interpolate(
            values, size=target_NSS.shape[1:], mode="bilinear", align_corners=False
        )
        return F.cross_entropy(logits, target_NSS[rows], ignore_index=IGNORED)

    head = _train(train, num_classes, loss, how)

    def with_predicted(mask_HW: np.ndarray, values: Tensor) -> tuple[np.ndarray, np.ndarray]:
        logits = F.interpolate(
            values[None], size=mask_HW.shape, mode="bilinear", align_corners=False
        )
        return mask_HW, logits[0].argmax(0).cpu().numpy()

    return pixel_scores(map(with_predicted, test.masks, _values(head, test)), num_classes)


def detection_scores(
    train: DenseSet, test: DenseSet, num_classes: int, how: DenseOptions
) -> dict[str, float]:
    """Trains a detection head and gives COCO's AP, AP50 and AP75 on the test pictures."""
    assert train.boxes is not None and test.boxes is not None
    factor = 2 if how.head == "conv" else 1
    cells = train.maps_NDhw.shape[2] * factor
    targets = [cell_targets(boxes_M6, cells, train.side, num_classes) for boxes_M6 in train.boxes]
    device = train.maps_NDhw.device
    kind_Nhw = torch.stack([torch.from_numpy(kind) for kind, _ in targets]).to(device)
    sides_N4hw = torch.stack([torch.from_numpy(sides) for _, sides in targets]).to(device)

    def loss(values: Tensor, rows: Tensor) -> Tensor:
        kind, sides = kind_Nhw[rows], sides_N4hw[rows]
        inside = (kind < num_classes)[:, None].expand(-1, 4, -1, -1)
        error = F.smooth_l1_loss(
            values[:, num_classes + 1 :][inside], sides[inside], beta=0.1, reduction="sum"
        )
        return F.cross_entropy(values[:, : num_classes + 1], kind) + error / inside.sum().clamp(
            min=1
        )

    head = _train(train, num_classes + 5, loss, how)
    detected = [
        boxes_of(values.cpu().numpy(), test.side, num_classes) for values in _values(head, test)
    ]
    return average_precision(test.boxes, detected, num_classes)


def _train(train: DenseSet, num_values: int, loss: Loss, how: DenseOptions) -> nn.Sequential:
    """A head from token maps (B, D, h, w) to values of every cell: `linear` is one layer on each token, (B, num_values, h, w);
    `conv` two convolutions at twice the resolution."""
    generator, width, hidden = torch.Generator().manual_seed(0), train.maps_NDhw.shape[1], 128
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        layers: list[nn.Module] = [nn.Conv2d(width, num_values, 1)]
        if how.head == "conv":
            layers = [
                nn.Conv2d(width, hidden, 3, padding=1),
                nn.GELU(),
                nn.Upsample(scale_factor=2, mode="bilinear"),
                nn.Conv2d(hidden, hidden, 3, padding=1),
                nn.GELU(),
                nn.Conv2d(hidden, num_values, 1),
            ]
        head = nn.Sequential(nn.BatchNorm2d(width, affine=False), *layers).to(
            train.maps_NDhw.device
        )
    count = len(train.maps_NDhw)
    optimizer = torch.optim.AdamW(head.parameters(), lr=how.lr, weight_decay=1e-4)
    steps = how.epochs * -(-count // BATCH_SIZE)
    schedule = torch.optim.lr_scheduler.OneCycleLR(optimizer, how.lr, total_steps=steps)
    for _ in range(how.epochs):
        for rows in (
            torch.randperm(count, generator=generator).to(train.maps_NDhw.device).split(BATCH_SIZE)
        ):
            optimizer.zero_grad()
            loss(head(train.maps_NDhw[rows]), rows).backward()
            optimizer.step()
            schedule.step()
    return head.eval()


@torch.no_grad()
def _values(head: nn.Sequential, test: DenseSet) -> list[Tensor]:
    return [values for part in test.maps_NDhw.split(32) for values in head(part)]


def cell_targets(
    boxes_M6: np.ndarray, cells: int, side: int, num_classes: int
) -> tuple[np.ndarray, np.ndarray]:
    """Class of each cell (h, w), `num_classes` outside of all boxes, and distances of its centre to left, top, right and bottom,
    in parts of the picture's side (4, h, w). Of several boxes around a cell the smallest is meant; crowds are left out."""
    centre = (np.arange(cells, dtype=np.float32) + 0.5) * side / cells
    x, y = np.meshgrid(centre, centre)
    kind_hw = np.full((cells, cells), num_classes, dtype=np.int64)
    sides_4hw = np.zeros((4, cells, cells), dtype=np.float32)
    areas_M = (boxes_M6[:, 2] - boxes_M6[:, 0]) * (boxes_M6[:, 3] - boxes_M6[:, 1])
    for left, top, right, bottom, kind, is_crowd in boxes_M6[np.argsort(-areas_M)]:
        distances = np.stack([x - left, y - top, right - x, bottom - y])
        inside = (distances > 0).all(axis=0) & (is_crowd == 0)
        kind_hw[inside] = kind
        sides_4hw[:, inside] = distances[:, inside] / side
    return kind_hw, sides_4hw


def boxes_of(values: np.ndarray, side: int, num_classes: int) -> np.ndarray:
    """Boxes (M, 6) of one picture from a head's values (C + 5, h, w): by score, overlapping ones of a class left out."""
    cells = values.shape[1]
    scores = np.exp(values[: num_classes + 1] - values[: num_classes + 1].max(axis=0))
    scores = (scores / scores.sum(axis=0))[:num_classes]
    centre = (np.arange(cells) + 0.5) * side / cells
    x, y = np.meshgrid(centre, centre)
    west, north, east, south = np.clip(values[num_classes + 1 :], 0, None) * side
    boxes = np.stack([x - west, y - north, x + east, y + south], axis=-1).reshape(-1, 4)
    kinds, places = np.nonzero(scores.reshape(num_classes, -1) >= LEAST_SCORE)
    found = scores.reshape(num_classes, -1)[kinds, places]
    order = np.argsort(-found, kind="stable")
    kinds, boxes, found = kinds[order], boxes[places[order]], found[order]
    kept: list[int] = []
    left = np.arange(len(found))
    while len(left) and len(kept) < MOST_BOXES:
        first, others = left[0], left[1:]
        kept.append(first)
        low = np.maximum(boxes[first, :2], boxes[others, :2])
        shared = np.clip(np.minimum(boxes[first, 2:], boxes[others, 2:]) - low, 0, None).prod(-1)
        whole = (
            (boxes[first, 2:] - boxes[first, :2]).prod()
            + (boxes[others, 2:] - boxes[others, :2]).prod(-1)
            - shared
        )
        left = others[(kinds[others] != kinds[first]) | (shared <= NMS_OVERLAP * whole)]
    return np.column_stack([boxes[kept], kinds[kept], found[kept]])


def pixel_scores(
    masks: Iterable[tuple[np.ndarray, np.ndarray]], num_classes: int
) -> dict[str, float]:
    """Mean IoU over the classes that occur, and the share of right pixels, without ignored ones.

    Args:
        masks: (true, predicted) class of each pixel, for each picture.
    """
    counts_CC = np.zeros(
        (num_classes, num_classes), dtype=np.int64
    )  # (true class, predicted class)
    for mask_HW, predicted_HW in masks:
        counted = mask_HW != IGNORED
        pairs = mask_HW[counted] * num_classes + predicted_HW[counted]
        counts_CC += np.bincount(pairs, minlength=num_classes**2).reshape(num_classes, num_classes)
    both = np.diag(counts_CC)
    either = counts_CC.sum(0) + counts_CC.sum(1) - both
    mean_iou = float((both[either > 0] / either[either > 0]).mean())
    return {"mean_iou": mean_iou, "pixel_accuracy": float(both.sum() / max(counts_CC.sum(), 1))}


def average_precision(
    truth: Sequence[np.ndarray], detected: Sequence[np.ndarray], num_classes: int
) -> dict[str, float]:
    """AP (mean over thresholds and classes with objects), AP50 and AP75 by COCO's own code; NaN without objects."""
    from pycocotools.coco import COCO
    from pycocotools.cocoeval import COCOeval

    annotations: list[dict[str, Any]] = []
    answers: list[dict[str, Any]] = []
    for number, (true_M6, found_M6) in enumerate(zip(truth, detected, strict=True)):
        for left, top, right, bottom, kind, is_crowd in true_M6.tolist():
            box = [left, top, right - left, bottom - top]
            annotations.append(
                {
                    "id": len(annotations) + 1,
                    "image_id": number,
                    "category_id": int(kind),
                    "bbox": box,
                    "iscrowd": int(is_crowd),
                    "area": box[2] * box[3],
                }
            )
        for left, top, right, bottom, kind, score in found_M6.tolist():
            box = [left, top, right - left, bottom - top]
            answers.append(
                {"image_id": number, "category_id": int(kind), "bbox": box, "score": score}
            )
    names = ("AP", "AP50", "AP75")
    if all(annotation["iscrowd"] for annotation in annotations):
        return dict.fromkeys(names, math.nan)
    if not answers:  # of which COCO's code makes an error
        return dict.fromkeys(names, 0.0)
    with contextlib.redirect_stdout(io.StringIO()):  # the package prints
        true = COCO()
        pictures, categories = (
            [{"id": number} for number in range(count)] for count in (len(truth), num_classes)
        )
        true.dataset = {
            "info": {},
            "images": pictures,
            "annotations": annotations,
            "categories": categories,
        }
        true.createIndex()
        judge = COCOeval(true, true.loadRes(answers), "bbox")
        judge.evaluate()
        judge.accumulate()
        judge.summarize()
    return dict(zip(names, map(float, judge.stats), strict=False))


def dense(options: DenseOptions) -> Results:
    """The command; see its options."""
    opened = open_checkpoint(options)
    side = options.image_size or encoder_of(opened.model).config.image_size
    sources = {"train": open_dense(options.train, side), "test": open_dense(options.test, side)}
    classes = sources["train"]
    if classes.mask_classes != sources["test"].mask_classes:
        raise ConfigError("--train and --test have other classes")
    if options.task == "detection" and not classes.object_classes:
        raise ConfigError(f"detection needs boxes, and {classes.name} has masks only")
    if options.task == "detection":
        require_pycocotools()  # here, since the encoder's way over all pictures is long
    train, test = (prepare(opened.model, source, side) for source in sources.values())
    if options.task == "segmentation":
        scores = segmentation_scores(train, test, len(classes.mask_classes), options)
    else:
        scores = detection_scores(train, test, len(classes.object_classes), options)
    uses = [DataUse(role, source.name, source.count) for role, source in sources.items()]
    scalars = {f"{options.task}/{name}": value for name, value in scores.items()}
    facts = ModelFacts.of(opened.path, opened.manifest)
    return Results("dense", scalars, uses, facts, details={"head": options.head})
