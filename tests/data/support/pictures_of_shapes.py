"""Says whether a plain caption is true of a picture, from its pixels: an opinion independent of the generator."""

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
        """Counts, colours, shapes and relation of a plain caption."""
        groups, relation = parse(caption)
        boxes = []
        for count, colour, shape in groups:
            found = components(self._image, colour, self.colours) if colour in self.colours else []
            if len(found) != count or any(named(mask) != shape for mask in found):
                return False
            boxes.append([extent(mask) for mask in found])
        return _relation_holds(relation, boxes)


def extent(mask: np.ndarray) -> tuple[int, int, int, int]:
    """Left, top, right, bottom."""
    rows, columns = np.flatnonzero(mask.any(1)), np.flatnonzero(mask.any(0))
    return int(columns[0]), int(rows[0]), int(columns[-1]), int(rows[-1])


def named(mask: np.ndarray) -> str:
    """The shape whose outline, turned by a little, overlaps best."""
    filled = ndimage.binary_fill_holes(mask)
    left, top, right, bottom = extent(filled)
    cut = filled[top : bottom + 1, left : right + 1]
    scale = 40 / max(cut.shape)
    grid = np.indices((40, 40)).astype(float) + 0.5
    centre = (np.array(cut.shape) - 1) / 2
    places = [(grid[axis] - 20) / scale + centre[axis] for axis in (0, 1)]
    small = ndimage.map_coordinates(cut.astype(float), places, order=1) > 0.5
    scores = {name: max(_overlap(small, other) for other in turned) for name, turned in _templates().items()}
    return max(scores, key=scores.__getitem__)


def _overlap(one: np.ndarray, two: np.ndarray) -> float:
    return float((one & two).sum() / max((one | two).sum(), 1))


_TEMPLATES: dict[str, list[np.ndarray]] = {}


def _templates() -> dict[str, list[np.ndarray]]:
    if not _TEMPLATES:
        ticks = (np.arange(256) + 0.5) / 128 - 1
        x, y = np.meshgrid(ticks, ticks)
        for name in shapes.SIMPLE:
            turned = []
            for angle in np.linspace(-0.2, 0.2, 9):
                u, v = np.cos(angle) * x + np.sin(angle) * y, np.cos(angle) * y - np.sin(angle) * x
                inside = shapes.OUTLINES[name]((u, v)) < 0
                left, top, right, bottom = extent(inside)
                cut = inside[top : bottom + 1, left : right + 1]
                side = max(cut.shape)
                grid = (np.indices((40, 40)).astype(float) + 0.5 - 20) * side / 40
                places = [grid[axis] + (cut.shape[axis] - 1) / 2 for axis in (0, 1)]
                turned.append(ndimage.map_coordinates(cut.astype(float), places, order=1) > 0.5)
            _TEMPLATES[name] = turned
    return _TEMPLATES


def _relation_holds(relation: str, boxes: list[list[tuple[int, int, int, int]]]) -> bool:
    left, top, right, bottom = range(4)

    def before(one: list, two: list, far: int, near: int) -> bool:
        return bool(max(box[far] for box in one) < min(box[near] for box in two))

    if relation == "*":
        return True
    first, second = boxes[0], boxes[1]
    if relation == "*, * and * from left to right":
        return before(first, second, right, left) and before(second, boxes[2], right, left)
    if relation == "*, * and * from top to bottom":
        return before(first, second, bottom, top) and before(second, boxes[2], bottom, top)
    return {
        "* left of *": lambda: before(first, second, right, left),
        "* right of *": lambda: before(second, first, right, left),
        "* above *": lambda: before(first, second, bottom, top),
        "* below *": lambda: before(second, first, bottom, top),
    }[relation]()
