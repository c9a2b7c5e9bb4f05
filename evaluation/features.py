"""Features of a frozen encoder over labelled images, computed once: sharded over ranks, cached as safetensors.

A cache is a folder named after the weights, the data and the options:

    manifest.json                       what it is of, how many parts
    part-00000-of-00002.safetensors     features (N, D) float32, labels (N,) int64, is_usable (N,) bool; rows in data order

Rank r takes the r-th run of rows, so that the parts together are the same for any number of ranks. Features describe the data:
the cache belongs to whoever may see these (the default lies in the run folder's `private`). Images pass the evaluation
transform of training (`data.examples.transforms.eval_image`).
"""

import hashlib
import json
import math
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file
from torch import nn
from torch.utils.data import DataLoader, Dataset

from data.errors import DataError, DecodeError, ReadError
from data.examples.transforms import eval_image, train_image
from data.files import named_when_whole, write_durably
from data.reading.loader import Failure
from data.reading.workers import as_is, end_with_parent, worker_context
from evaluation.encoder import FeatureOptions, check_options, encoder_of, features
from evaluation.sources.records import LabelledImages
from trainer.progress import track
from trainer.ranks import distributed
from trainer.weights.open_model import OpenedModel

FORMAT = 1
_ROWS_AT_ONCE = 1 << 16


@dataclass(frozen=True)
class Features:
    """Features of a data set.

    Attributes:
        values_ND: float32.
        labels_N: int64; 0 where `is_usable_N` is False.
        is_usable_N: False for examples that cannot be decoded or have no label; their row is zero, so that a private method
            can keep them (their number must not depend on the bytes of an example).
        class_names: may be empty.
        name: of the data, for people.
    """

    values_ND: np.ndarray
    labels_N: np.ndarray
    is_usable_N: np.ndarray
    class_names: tuple[str, ...] = ()
    name: str = ""

    @property
    def num_classes(self) -> int:
        """The number of named classes, or what the largest label says where none has a name."""
        return len(self.class_names) or int(self.labels_N.max(initial=-1)) + 1

    @property
    def num_unusable(self) -> int:
        return int((~self.is_usable_N).sum())

    def usable(self) -> "Features":
        """Without the rows that are not usable.

        Raises:
            DataError: none is.
        """
        keep = self.is_usable_N
        if not keep.any():
            raise DataError(f"{self.name}: no example has both an image and a label; see --label_field")
        return Features(self.values_ND[keep], self.labels_N[keep], keep[keep], self.class_names, self.name)

    @classmethod
    def of(cls, values_ND: np.ndarray, labels_N: np.ndarray, name: str = "in memory") -> "Features":
        """Features from arrays that came from elsewhere."""
        if values_ND.ndim != 2 or labels_N.shape != (len(values_ND),):
            raise DataError(f"{name}: features must be (N, D), labels (N,), not {values_ND.shape} and {labels_N.shape}")
        usable_N = np.ones(len(values_ND), dtype=bool)
        kept_ND = np.empty(values_ND.shape, dtype=np.float32)
        for start in range(
            0, len(values_ND), _ROWS_AT_ONCE
        ):  # a copy, and no more than that, of what may take gigabytes
            rows = slice(start, start + _ROWS_AT_ONCE)
            usable_N[rows] = np.isfinite(values_ND[rows]).all(axis=1)
            kept_ND[rows] = np.where(usable_N[rows, None], values_ND[rows], 0)
        return cls(kept_ND, labels_N.astype(np.int64), usable_N, name=name)


def extract(
    opened: OpenedModel,
    source: LabelledImages,
    options: FeatureOptions,
    *,
    cache: Path | None = None,
    batch_size: int = 64,
    num_workers: int = 0,
    use_average: bool = False,
) -> Features | None:
    """Features of all images of a source, from the cache where it has them.

    Collective under a launcher, where a cache is needed: the ranks share the images, and only rank 0 gets the result.

    Args:
        opened: a model with an encoder.
        cache: folder of caches; None keeps nothing.
        use_average: as `opened` was opened; part of the cache's name.

    Returns:
        None on other ranks than 0.

    Raises:
        ConfigError: options that this model cannot follow.
        DataError: an empty source; several ranks without a cache.
        ReadError: images cannot be read.
    """
    check_options(opened.model, options)
    if not len(source):
        raise DataError(f"{source.name} holds no images")
    # One process without a launcher has no process group.
    rank, world_size = (distributed.rank(), distributed.world_size()) if dist.is_initialized() else (0, 1)
    if cache is None:
        if world_size > 1:
            raise DataError("several ranks need a folder for the features: give --cache")
        return compute(opened.model, source, options, range(len(source)), batch_size, num_workers)
    manifest = opened.manifest
    facts = {
        "format": FORMAT,
        "checkpoint": manifest.get("seal") or hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest(),
        "use_average": use_average,
        "dtype": str(next(opened.model.parameters()).dtype),
        "data": source.identity(),
        "data_name": source.name,
        "class_names": list(source.class_names),
        "num_examples": len(source),
        "options": asdict(options),
    }
    named = {key: value for key, value in facts.items() if key != "data_name"}
    folder = cache / f"features-{hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:24]}"
    if not (folder / "manifest.json").exists():
        rows = range(len(source) * rank // world_size, len(source) * (rank + 1) // world_size)
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / _part(rank, world_size)
        if not part.exists():  # an earlier start may have left it whole
            computed = compute(opened.model, source, options, rows, batch_size, num_workers)
            columns = {"features": computed.values_ND, "labels": computed.labels_N, "is_usable": computed.is_usable_N}
            with named_when_whole(part) as temporary:
                save_file(columns, temporary)
        if world_size > 1:
            dist.barrier()
        if rank == 0:  # The manifest comes last: rows without a part would be read as features of other data.
            parts = [folder / _part(r, world_size) for r in range(world_size)]
            missing = [part for part in parts if not part.exists()]
            if missing:
                raise ReadError(f"{missing[0]} is not there: all ranks must see the same --cache")
            content = {
                "num_parts": world_size,
                "facts": facts,
                "formal_guarantee": False,
                "reasons": ["features are computed from the images without noise"],
            }
            write_durably(folder / "manifest.json", json.dumps(content, indent=1) + "\n")
    return read_features(folder) if rank == 0 else None


def read_features(folder: Path) -> Features:
    """A cache that `extract` wrote.

    Raises:
        DataError: there is none, or it is damaged.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        facts, filled = manifest["facts"], 0
        joined: dict[str, np.ndarray] = {}
        for r in range(manifest["num_parts"]):  # one after the other into their place: both copies of all would not fit
            part = load_file(folder / _part(r, manifest["num_parts"]))
            if not joined:
                joined = {
                    name: np.empty((facts["num_examples"], *part[name].shape[1:]), part[name].dtype)
                    for name in ("features", "labels", "is_usable")
                }
            rows = slice(filled, filled + len(part["features"]))
            for name, column in joined.items():
                column[rows] = part[name]
            filled = rows.stop
    except Exception as error:
        raise DataError(f"{folder} holds no whole features ({error}); delete it and compute them again") from error
    if filled != facts["num_examples"]:
        raise DataError(f"{folder} has {filled} rows of {facts['num_examples']}; delete it")
    return Features(
        joined["features"], joined["labels"], joined["is_usable"], tuple(facts["class_names"]), facts["data_name"]
    )


def _part(rank: int, world_size: int) -> str:
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


def stored_features(path: Path) -> Features:
    """A cache folder, or an .npz file with `features` and `labels`.

    Raises:
        DataError: neither.
    """
    if path.is_dir():
        return read_features(path)
    try:
        with np.load(path, allow_pickle=False) as stored:
            values_ND, labels_N = stored["features"], stored["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is neither a cache of features nor an .npz with `features` and `labels`") from error
    return Features.of(values_ND, labels_N, f"features:{path}")


class _Decoded(NamedTuple):
    images_BCHW: torch.Tensor
    labels_B: np.ndarray
    is_usable_B: np.ndarray


class Augmentation(NamedTuple):
    """Random crops and flips, by a key of each image's own in each epoch."""

    seed: int
    epoch: int

    def key(self, row: int) -> int:
        return int(np.random.SeedSequence([*self, row]).generate_state(1, np.uint64)[0])


class _Batches(Dataset):
    """Number of a batch -> decoded images, in a worker. Errors that name an exit code come back as `Failure`."""

    def __init__(
        self,
        source: LabelledImages,
        rows: Sequence[int],
        batch_size: int,
        image_size: int,
        resize: int | None,
        augmentation: Augmentation | None,
    ) -> None:
        self._source, self._rows, self._batch_size, self._image_size = source, rows, batch_size, image_size
        self._resize, self._augmentation = resize or image_size, augmentation

    def _pixels(self, image: bytes, row: int) -> np.ndarray:
        size = self._image_size
        if self._augmentation is not None:
            return train_image(image, size, self._augmentation.key(row))
        edge = (self._resize - size) // 2
        return eval_image(image, self._resize)[:, edge : edge + size, edge : edge + size]

    def __len__(self) -> int:
        return -(-len(self._rows) // self._batch_size)

    def __getitem__(self, number: int) -> _Decoded | Failure:
        if number >= len(self):
            raise IndexError(number)
        ids = self._rows[number * self._batch_size : (number + 1) * self._batch_size]
        size = self._image_size
        images = np.zeros((len(ids), 3, size, size), dtype=np.float32)
        labels, usable = np.zeros(len(ids), dtype=np.int64), np.zeros(len(ids), dtype=bool)
        try:
            for row, example in enumerate(self._source.read(ids)):
                if example.image is None or example.label is None:
                    continue
                try:
                    images[row] = self._pixels(example.image, ids[row])
                except DecodeError:
                    continue
                labels[row], usable[row] = example.label, True
        except (ReadError, DataError) as error:
            return Failure(type(error), str(error))
        return _Decoded(torch.from_numpy(images), labels, usable)


def decoded_batches(
    source: LabelledImages,
    rows: Sequence[int],
    *,
    batch_size: int,
    image_size: int,
    num_workers: int = 0,
    resize: int | None = None,
    augmentation: Augmentation | None = None,
) -> Iterator[_Decoded]:
    """Normalised images (B, 3, S, S) with labels, in order; rows that are not usable are black.

    Args:
        image_size: S.
        resize: see `evaluation.encoder.FeatureOptions`; not looked at where images are augmented.

    Raises:
        ReadError, DataError: of the source.
    """
    loader = DataLoader(
        _Batches(source, rows, batch_size, image_size, resize, augmentation),
        batch_size=None,
        collate_fn=as_is,
        num_workers=num_workers,
        multiprocessing_context=worker_context() if num_workers else None,
        worker_init_fn=end_with_parent,
    )
    shows = not dist.is_initialized() or dist.get_rank() == 0
    shows = shows and augmentation is None  # whoever trains on these shows the epochs
    for batch in track(loader, f"batches of {source.name}", math.ceil(len(rows) / batch_size), shows=shows):
        if isinstance(batch, Failure):
            raise batch.kind(batch.message)
        yield batch


@torch.no_grad()
def compute(
    model: nn.Module,
    source: LabelledImages,
    options: FeatureOptions,
    rows: Sequence[int],
    batch_size: int,
    num_workers: int,
    augmentation: Augmentation | None = None,
) -> Features:
    """Features of these images, in this process."""
    encoder = encoder_of(model)
    size = options.image_size or encoder.config.image_size
    device = encoder.class_token.device
    values, labels, usable = [], [], []
    for batch in decoded_batches(
        source, rows, batch_size=batch_size, image_size=size, num_workers=num_workers, resize=options.resize,
        augmentation=augmentation,
    ):  # fmt: skip
        found_BD = features(model, batch.images_BCHW.to(device), options).cpu().numpy()
        found_BD[~batch.is_usable_B] = 0
        values.append(found_BD)
        labels.append(batch.labels_B)
        usable.append(batch.is_usable_B)
    if not values:  # more ranks than images
        width = features(model, torch.zeros(1, 3, size, size, device=device), options).shape[1]
        values, labels, usable = [np.zeros((0, width), np.float32)], [np.zeros(0, np.int64)], [np.zeros(0, bool)]
    return Features(
        np.concatenate(values), np.concatenate(labels), np.concatenate(usable), source.class_names, source.name
    )
