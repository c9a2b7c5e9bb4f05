"""Pictures with a class for every pixel and boxes around objects.

    synthetic:SEED:COUNT               plain shapes that are drawn here: classes are background and kinds of shapes
    ade20k:DIR/training                images/SPLIT/*.jpg and annotations/SPLIT/*.png (0 is no class, 1 to 150 are)
    coco:instances.json:IMAGES         COCO instances (needs pycocotools, an extra), later objects over earlier ones

Shapes: H W pixels; boxes are left, top, right, bottom in pixels of the picture as stored.
"""

import contextlib
import io
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from PIL import Image

from data.errors import DataError
from data.synthetic.generate import SyntheticData
from data.synthetic.render import draw
from data.synthetic.scene import Scene, Texture
from data.synthetic.shapes import SIMPLE
from evaluation.sources import bytes_of, encode_png
from trainer.errors import ConfigError

IGNORED = -1


class Objects(NamedTuple):
    """Boxes (M, 4) float32, their classes (M,) int64, and whether each stands for a crowd (M,) bool."""

    boxes_M4: np.ndarray
    classes_M: np.ndarray
    is_crowd_M: np.ndarray


class DensePicture(NamedTuple):
    """
    Attributes:
        image: encoded bytes.
        mask_HW: int64 class of each pixel, IGNORED where there is none.
        objects: None where the source has no boxes.
    """

    image: bytes
    mask_HW: np.ndarray
    objects: Objects | None


class SyntheticShapes:
    """Plain shapes, as `data.synthetic` draws them for captions; the masks are the same shapes drawn alone."""

    def __init__(self, seed: int, count: int, image_size: int) -> None:
        self.name = f"synthetic:{seed}:{count}"
        self.mask_classes: tuple[str, ...] = ("background", *SIMPLE)
        self.object_classes: tuple[str, ...] = SIMPLE
        self._data = SyntheticData(seed, image_size, content="shapes")
        self._count = count

    def __len__(self) -> int:
        return self._count

    def read(self, index: int) -> DensePicture:
        example = self._data.example(index)
        mask_HW = np.zeros(example.image_HWC.shape[:2], dtype=np.int64)
        boxes, classes = [], []
        for shape in example.scene.shapes:
            white = replace(shape, colour="white", fill="solid", second=None)
            alone_HWC = draw(Scene((Texture("plain", ("black",)),), (white,)), self._data.image_size)
            covered_HW = alone_HWC[:, :, 0] > 127  # the shape covers more than half of the pixel
            kind = SIMPLE.index(shape.name)
            mask_HW[covered_HW] = 1 + kind
            rows, columns = np.flatnonzero(covered_HW.any(1)), np.flatnonzero(covered_HW.any(0))
            boxes.append((columns[0], rows[0], columns[-1] + 1, rows[-1] + 1))
            classes.append(kind)
        return DensePicture(encode_png(example.image_HWC), mask_HW, _objects(boxes, classes, [False] * len(boxes)))


class Ade20k:
    """The scene parsing challenge's folders (Zhou et al. 2017, https://arxiv.org/abs/1608.05442): 150 classes."""

    object_classes: tuple[str, ...] = ()

    def __init__(self, root: Path, split: str) -> None:
        """
        Raises:
            DataError: no such folders, or an image without its annotation.
        """
        self.name = f"ade20k:{root}/{split}"
        self.mask_classes = tuple(str(number) for number in range(1, 151))
        self._images = sorted((root / "images" / split).glob("*.jpg"))
        self._masks = [root / "annotations" / split / f"{path.stem}.png" for path in self._images]
        if not self._images:
            raise DataError(f"{root / 'images' / split} holds no *.jpg")
        missing = [path for path in self._masks if not path.is_file()]
        if missing:
            raise DataError(f"{missing[0]} is not there: every image needs its annotation")

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> DensePicture:
        try:
            with Image.open(self._masks[index]) as mask:
                values_HW = np.asarray(mask).astype(np.int64)
        except (OSError, ValueError, Image.DecompressionBombError) as error:
            raise DataError(f"{self._masks[index]} is no annotation: {error}") from error
        if values_HW.ndim != 2 or values_HW.max(initial=0) > 150:
            raise DataError(f"{self._masks[index]} is no annotation with classes 0 to 150")
        return DensePicture(bytes_of(self._images[index]), values_HW - 1, None)


class Coco:
    """COCO instances (Lin et al. 2014, https://arxiv.org/abs/1405.0312), read by COCO's own code; categories by their ids."""

    def __init__(self, annotations: Path, images: Path) -> None:
        """
        Raises:
            ConfigError: COCO's own code is not installed.
            DataError: no such file, or no instances in it.
        """
        require_pycocotools()
        from pycocotools.coco import COCO

        self.name = f"coco:{annotations}"
        try:
            with contextlib.redirect_stdout(io.StringIO()):  # the package prints
                self._coco = COCO(str(annotations))
            categories = sorted(self._coco.dataset["categories"], key=lambda category: category["id"])
            self._images: list[dict[str, Any]] = sorted(self._coco.dataset["images"], key=lambda image: image["id"])
        except (OSError, ValueError, KeyError, TypeError, AssertionError) as error:
            raise DataError(f"{annotations} holds no COCO instances: {type(error).__name__} {error}") from error
        if not self._images:
            raise DataError(f"{annotations} lists no images")
        self._number = {category["id"]: number for number, category in enumerate(categories)}
        self.object_classes = tuple(category["name"] for category in categories)
        self.mask_classes = ("background", *self.object_classes)
        self._folder = images

    def __len__(self) -> int:
        return len(self._images)

    def read(self, index: int) -> DensePicture:
        """
        Raises:
            DataError: an image or annotation without what COCO's have.
            ReadError: the picture cannot be read.
        """
        image = self._images[index]
        boxes, classes, crowd = [], [], []
        try:
            mask_HW = np.zeros((image["height"], image["width"]), dtype=np.int64)
            for annotation in self._coco.imgToAnns[image["id"]]:
                kind = self._number[annotation["category_id"]]
                is_crowd = bool(annotation.get("iscrowd", 0))
                covered_HW = self._coco.annToMask(annotation).astype(bool)
                mask_HW[covered_HW] = IGNORED if is_crowd else 1 + kind
                left, top, width, height = annotation["bbox"]
                boxes.append((left, top, left + width, top + height))
                classes.append(kind)
                crowd.append(is_crowd)
            return DensePicture(bytes_of(self._folder / image["file_name"]), mask_HW, _objects(boxes, classes, crowd))
        except Exception as error:  # COCO's code raises what it runs into, plain Exceptions too
            if hasattr(error, "exit_code"):
                raise
            problem = f"{type(error).__name__} {error}"
            raise DataError(
                f"{self.name}: image {image['id']} or an annotation of it is not COCO's: {problem}"
            ) from error


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


DensePictures = SyntheticShapes | Ade20k | Coco
"""A source has a `name`, `mask_classes` (names of the values of masks), `object_classes` (empty without boxes), and reads
pictures by number."""


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
            return SyntheticShapes(int(seed), int(count), image_size)
    if kind == "ade20k" and where:
        path = Path(where).expanduser()
        return Ade20k(path.parent, path.name)
    if kind == "coco" and ":" in where:
        annotations, _, images = where.partition(":")
        return Coco(Path(annotations).expanduser(), Path(images).expanduser())
    raise DataError(
        f"{text!r} names no pictures; write synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"
    )


def _objects(boxes: Sequence[Sequence[float]], classes: Sequence[int], crowd: Sequence[bool]) -> Objects:
    return Objects(
        np.array(boxes, dtype=np.float32).reshape(-1, 4), np.array(classes, dtype=np.int64), np.array(crowd, dtype=bool)
    )
