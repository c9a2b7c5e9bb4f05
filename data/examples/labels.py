"""Labelled images: what a classifier wants of one example.

A label is the integer in the example's member `cls` (webdataset's convention), or in a field of its `json` member. One that is
missing, no integer or out of range makes the example undecodable: a zero gradient, decided from its own bytes alone.
"""

import re
from dataclasses import dataclass

import numpy as np

from data.errors import DecodeError
from data.examples.transforms import eval_image, train_image
from data.reading.reader import RawExample, json_record

_INTEGER = re.compile(r"\s*([0-9]{1,9})\s*", re.ASCII)
_MAX_BYTES = 64


def read_label(raw: RawExample, num_classes: int, field: str | None = None) -> int:
    """The example's label, in [0, num_classes).

    Args:
        num_classes: public, so that an example's fate depends on its own bytes alone.
        field: of the `json` member, an integer or its digits; None means the member `cls`.

    Raises:
        DecodeError: there is none, or it is no integer in the range.
    """
    value: object
    if field is None:
        value = raw.fields.get("cls", b"")[: _MAX_BYTES + 1].decode("ascii", "replace")
    else:
        value = json_record(raw.fields.get("json", b"")).get(field)
    if isinstance(value, str):
        found = _INTEGER.fullmatch(value) if len(value) <= _MAX_BYTES else None
        value = int(found[1]) if found else None
    if type(value) is not int:
        raise DecodeError("the example has no integer as its label")
    if not 0 <= value < num_classes:
        raise DecodeError(f"the example's label is outside of the {num_classes} classes")
    return value


@dataclass(frozen=True)
class LabelledImageExample:
    """Image and label: images_CHW float32, labels int64 ().

    Attributes:
        image_size: side in pixels.
        num_classes: of the recipe.
        train: random crop and flip from the example's key; otherwise the centre.
        label_field: of the `.json` member; None means the member `.cls`.
        augment: without it training sees the centre too.
    """

    image_size: int
    num_classes: int
    train: bool = True
    label_field: str | None = None
    augment: bool = True

    def __call__(self, raw: RawExample, key: int, /) -> dict[str, np.ndarray]:
        """Reads the label and decodes the image.

        Raises:
            DecodeError: no image, one that cannot be decoded, or a bad label.
        """
        if raw.image is None:
            raise DecodeError("the example has no image")
        label, size = read_label(raw, self.num_classes, self.label_field), self.image_size
        image_CHW = train_image(raw.image, size, key) if self.train and self.augment else eval_image(raw.image, size)
        return {"images_CHW": image_CHW, "labels": np.array(label, dtype=np.int64)}

    def padding(self) -> dict[str, np.ndarray]:
        """A black image of class 0."""
        image_CHW = np.zeros((3, self.image_size, self.image_size), dtype=np.float32)
        return {"images_CHW": image_CHW, "labels": np.array(0, dtype=np.int64)}
