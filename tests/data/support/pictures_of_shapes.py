"""Says whether a plain caption is true of a picture, from its pixels, but for the names of shapes."""

import re

import numpy as np
from scipy import ndimage

from data.synthetic import shapes
from data.synthetic.vocabulary import BASIC, COLOURS, COUNTS, rgb

_SINGULAR = {shapes.plural(name): name for name in shapes.NAMES} | {name: name for name in shapes.NAMES}
_NUMBERS = {"a": 1, "an": 1} | {word: count for count, word in enumerate(COUNTS) if word}
_GROUP = re.compile(
    rf"\b({'|'.join(_NUMBERS)}) ({'|'.join(sorted(BASIC, key=len, reverse=True))}) "
    rf"({'|'.join(sorted(_SINGULAR, key=len, reverse=True))})\b"
)


def parse(caption: str) -> tuple[list[tuple[int, str, str]], str]:
    """Groups (count, colour, shape), and what is left of the text: the relation."""
    groups = [(_NUMBERS[n], c, _SINGULAR[s]) for n, c, s in _GROUP.findall(caption)]
    return groups, " ".join(_GROUP.sub("*", caption).split())


def components(image: np.ndarray, colour: str, among: list[str]) -> list[np.ndarray]:
    """Masks of connected areas whose pixels are nearest to `colour`; soft edges are no areas of their own."""
    values = np.stack([rgb(name) * 255 for name in among])
    nearest = ((image[:, :, None].astype(float) - values) ** 2).sum(-1).argmin(-1)
    mask = ndimage.binary_opening(nearest == among.index(colour))
    labels, count = ndimage.label(mask, np.ones((3, 3)))
    areas = ndimage.sum_labels(mask, labels, range(1, count + 1))
    return [labels == k + 1 for k in range(count) if areas[k] >= 0.4 * max(areas)]


class Picture:
    """A picture whose plain colours and connected areas are looked for once.

    Attributes:
        colours: names whose very value fills at least 60 pixels.
    """

    def __init__(self, image: np.ndarray):
        self._image = image
        codes = image.astype(np.int64) @ np.array([1 << 16, 1 << 8, 1])
        common = dict(zip(*np.unique(codes, return_counts=True), strict=True))
        plain = {name: (r << 16) + (g << 8) + b for name, (r, g, b) in COLOURS.items()}
        self.colours = [name for name, code in plain.items() if common.get(code, 0) >= 60]

    def is_true(self, caption: str) -> bool:
        """Counts, colours and relation of a plain caption."""
        groups, relation = parse(caption)
        boxes = []
        for count, colour, _ in groups:
            found = components(self._image, colour, self.colours) if colour in self.colours else []
            if len(found) != count:
                return False
            boxes.append([extent(mask) for mask in found])
        return _relation_holds(relation, boxes)


def extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right, bottom."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def _relation_holds(relation: str, boxes: list[list[tuple[int, int, int, int]]]) -> bool:
    """Whether each box ends before the next one begins, in the order that the words state."""
    orders = {
        "*": (0, []), "* left of *": (0, [0, 1]), "* right of *": (0, [1, 0]), "* above *": (1, [0, 1]), "* below *": (1, [1, 0]),
        "*, * and * from left to right": (0, [0, 1, 2]), "*, * and * from top to bottom": (1, [0, 1, 2]),
    }  # fmt: skip
    axis, order = orders[relation]
    ends = [max(box[axis + 2] for box in boxes[place]) for place in order]
    starts = [min(box[axis] for box in boxes[place]) for place in order]
    return all(end < start for end, start in zip(ends, starts[1:], strict=False))
