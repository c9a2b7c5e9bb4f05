"""The pictures of benchmarks/ordering.py, grey at 28 x 28: photographs of clothes to train on, and what encoders are judged by.

Debian's packages dataset-fashion-mnist, tuxpaint-stamps-default and openclipart-png, and scikit-learn's digits.
"""

from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from data.errors import DataError
from data.examples.transforms import denormalize
from data.index.tar_writer import write_shard
from evaluation.linear_probe import regression
from evaluation.sources import Files, decoded_batches, encode_png
from tools.fashion_build import SOURCE, TONES, captions_of_classes, fashion

FOLDERS = {
    "stamps": (Path("/usr/share/tuxpaint/stamps"), "tuxpaint-stamps-default"),
    "clip art": (Path("/usr/share/openclipart/png"), "openclipart-png"),
}
LEAST, MOST = 30, 150
"""Pictures of a class of these."""
NUM_PHOTOGRAPHS, NUM_HELDOUT, NUM_UNSEEN = 60_000, 1500, 3
"""Photographs to train on and to test on, of all classes; the classes among them that no encoder is trained on."""


class Labelled(NamedTuple):
    """Pictures (N, 28, 28) uint8 with labels (N,)."""

    pictures: np.ndarray
    labels: np.ndarray

    def rows(self, chosen: np.ndarray | slice) -> "Labelled":
        return Labelled(self.pictures[chosen], self.labels[chosen])

    def grey(self) -> tuple[np.ndarray, np.ndarray]:
        """Grey values as features, and labels."""
        return self.pictures.reshape(len(self.labels), -1).astype(np.float32) / 255, self.labels


def installed(folder: Path, package: str) -> Path:
    """The folder, which the package of Debian has made.

    Raises:
        DataError: it is not there.
    """
    if not folder.is_dir():
        raise DataError(f"there is no folder {folder}; apt-get install {package}")
    return folder


def clothes() -> Labelled:
    """Photographs to train on, then held-out ones; labels are numbers of captions."""
    ink, caption_N = fashion(installed(SOURCE, "dataset-fashion-mnist"), NUM_PHOTOGRAPHS, NUM_HELDOUT)
    return Labelled(255 - ink, caption_N.astype(np.int64))


def digits() -> Labelled:
    """Those of scikit-learn, dark on white, three times as large in a frame of 28 x 28."""
    from sklearn.datasets import load_digits

    x, y = load_digits(return_X_y=True)
    large = np.pad(np.kron(x.reshape(-1, 8, 8) / 16, np.ones((1, 3, 3))), ((0, 0), (2, 2), (2, 2)))
    return Labelled(np.rint(255 * (1 - large)).astype(np.uint8), y.astype(np.int64))


def in_folders(root: Path, package: str) -> Labelled:
    """Pictures in grey at 28 x 28; their folders are the classes: `MOST` files of each that has `LEAST` of them."""
    source, rng = Files.of_classes(installed(root, package)), np.random.default_rng(0)
    label_N = np.array(source.labels)
    chosen = [rng.permutation(np.flatnonzero(label_N == label))[:MOST] for label in np.unique(label_N)]
    files = np.concatenate([rows for rows in chosen if len(rows) >= LEAST])
    [batch] = decoded_batches(source, files.tolist(), batch_size=len(files), image_size=28)
    grey = [denormalize(image_CHW.numpy()).mean(axis=2) for image_CHW in batch.images_BCHW]
    found = Labelled(np.rint(grey).astype(np.uint8), np.unique(label_N[files], return_inverse=True)[1])
    return found.rows(batch.is_usable_B)  # without what is too large to be decoded


def recalls_of_grey(photographs: Labelled) -> np.ndarray:
    """By class, how much of it a regression on grey values gets right: 10,000 photographs to fit it, 10,000 others to ask."""
    (x, y), (others, expected) = (photographs.rows(slice(n, n + 10_000)).grey() for n in (0, 10_000))
    found = regression(x, y // len(TONES), 10, ridge=1e-2).scores(others).argmax(axis=1)
    return np.array([(found[expected // len(TONES) == kind] == kind).mean() for kind in range(10)])


class Gathered(NamedTuple):
    """Photographs to train on and to test losses on, labelled with numbers of captions; pictures that judge; what is noted."""

    train: Labelled
    test: Labelled
    unseen: dict[str, Labelled]
    facts: dict[str, Any]


def gathered() -> Gathered:
    """The classes of clothes that no encoder is trained on are those that grey values tell apart worst."""
    photographs = clothes()
    others = {"digits": digits()} | {name: in_folders(*where) for name, where in FOLDERS.items()}
    recalls = recalls_of_grey(photographs)
    kinds, hardest = photographs.labels // len(TONES), np.sort(np.argsort(recalls)[:NUM_UNSEEN])
    is_unseen, is_train = np.isin(kinds, hardest), np.arange(len(kinds)) < NUM_PHOTOGRAPHS
    clothing = Labelled(photographs.pictures[is_unseen], np.searchsorted(hardest, kinds[is_unseen]))
    unseen = {"other clothes": clothing, **others}
    facts = {
        "unseen_clothes": [captions_of_classes()[len(TONES) * kind] for kind in hardest],
        "recalls_of_grey": [round(float(recall), 3) for recall in recalls],
        "judging_pictures": {name: len(every.labels) for name, every in unseen.items()},
    }
    return Gathered(photographs.rows(~is_unseen & is_train), photographs.rows(~is_unseen & ~is_train), unseen, facts)


def write_shards(photographs: Labelled, path: Path) -> None:
    """Pairs, unless they are there."""
    captions = captions_of_classes()
    pairs = ({"png": encode_png(one), "txt": captions[label].encode()} for one, label in zip(*photographs, strict=True))
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        write_shard(path, ((f"{i:05d}", pair) for i, pair in enumerate(pairs)))


def judges(sets: dict[str, Labelled], seed: int) -> dict[str, tuple[Labelled, Labelled]]:
    """(to train probes on, to test them on), drawn anew for every seed: two thirds and one, at most 2,000 and 1,000."""
    drawn = {}
    for name, every in sets.items():
        order = np.random.default_rng(seed).permutation(len(every.labels))[:3000]
        cut = 2 * len(order) // 3
        drawn[name] = every.rows(order[:cut]), every.rows(order[cut:])
    return drawn
