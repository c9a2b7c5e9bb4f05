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
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch
import torch.distributed as dist
from safetensors.numpy import load_file, save_file
from torch import nn

from data.errors import DataError, ReadError
from data.files import atomic_file, write_durably
from evaluation.encoder import check_options, encoder_of
from evaluation.encoder import features as features_of
from evaluation.options import CommandOptions, FeatureOptions, ImageOptions
from evaluation.results import DataUse, ModelFacts
from evaluation.sources import Augmentation, Source, decoded_batches, open_source
from privacy.ranks import collectives
from trainer.errors import ConfigError
from trainer.weights import open_model as opening
from trainer.weights.open_model import OpenedModel

WHITEN_ON = "whiten_on"
"""The role of public pictures; also the name of the option."""


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

    def usable(self) -> tuple[np.ndarray, np.ndarray]:
        """Features (N, D) and labels (N,), without what cannot be decoded or has no label.

        Raises:
            DataError: nothing is left.
        """
        if not self.is_usable_N.any():
            raise DataError(
                f"{self.name}: no example has both an image and a label; see --label_field"
            )
        return self.values_ND[self.is_usable_N], self.labels_N[self.is_usable_N]


def extract(
    opened: OpenedModel, source: Source, options: FeatureOptions, *, cache: Path | None = None
) -> Features | None:
    """Features of all images of a source, from the cache where it has them.

    Collective under a launcher, where a cache is needed: the ranks share the images, and only rank 0 gets the result.

    Args:
        opened: a model with an encoder.
        cache: folder of caches; None keeps nothing.

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
    rank, world_size = (
        (collectives.rank(), collectives.world_size()) if dist.is_initialized() else (0, 1)
    )
    if cache is None:
        if world_size > 1:
            raise DataError("several ranks need a folder for the features: give --cache")
        return compute(opened.model, source, options, range(len(source)))
    manifest = opened.manifest
    facts = {
        "format": 2,
        "checkpoint": manifest.get("seal")
        or hashlib.sha256(json.dumps(manifest, sort_keys=True).encode()).hexdigest(),
        "use_average": options.use_average,
        "dtype": str(next(opened.model.parameters()).dtype),
        "data": source.identity(),
        "data_name": source.name,
        "class_names": list(source.class_names),
        "num_examples": len(source),
        "options": options.model_dump(include={"features", "num_blocks", "image_size", "resize"}),
    }
    named = {key: value for key, value in facts.items() if key != "data_name"}
    folder = (
        cache
        / f"features-{hashlib.sha256(json.dumps(named, sort_keys=True).encode()).hexdigest()[:24]}"
    )
    if not (folder / "manifest.json").exists():
        rows = range(len(source) * rank // world_size, len(source) * (rank + 1) // world_size)
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / _part(rank, world_size)
        if not part.exists():  # an earlier start may have left it whole
            computed = compute(opened.model, source, options, rows)
            columns = {
                "features": computed.values_ND,
                "labels": computed.labels_N,
                "is_usable": computed.is_usable_N,
            }
            with atomic_file(part) as temporary:
                save_file(columns, temporary)
        if world_size > 1:
            dist.barrier()
        if (
            rank == 0
        ):  # The manifest comes last: rows without a part would be read as features of other data.
            parts = [folder / _part(r, world_size) for r in range(world_size)]
            if missing := [part for part in parts if not part.exists()]:
                raise ReadError(f"{missing[0]} is not there: all ranks must see the same --cache")
            reasons = ["features are computed from the images without noise"]
            content = {
                "num_parts": world_size,
                "facts": facts,
                "formal_guarantee": False,
                "reasons": reasons,
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
        for r in range(
            manifest["num_parts"]
        ):  # one after the other into their place: both copies of all would not fit
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
        raise DataError(
            f"{folder} holds no whole features ({error}); delete it and compute them again"
        ) from error
    if filled != facts["num_examples"]:
        raise DataError(f"{folder} has {filled} rows of {facts['num_examples']}; delete it")
    return Features(
        joined["features"],
        joined["labels"],
        joined["is_usable"],
        tuple(facts["class_names"]),
        facts["data_name"],
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
        raise DataError(
            f"{path} is neither a cache of features nor an .npz with `features` and `labels`"
        ) from error
    if values_ND.ndim != 2 or labels_N.shape != (len(values_ND),):
        raise DataError(
            f"{path}: features must be (N, D), labels (N,), not {values_ND.shape} and {labels_N.shape}"
        )
    if not np.issubdtype(labels_N.dtype, np.integer):
        raise DataError(f"{path}: labels must be whole numbers, not {labels_N.dtype}")
    with np.errstate(all="ignore"):  # without a word about an example
        kept_ND = values_ND.astype(np.float32, copy=False)
    usable_N = np.isfinite(kept_ND).all(axis=1)
    kept_ND = np.where(usable_N[:, None], kept_ND, 0)
    return Features(kept_ND, labels_N.astype(np.int64), usable_N, name=f"features:{path}")


@torch.no_grad()
def compute(
    model: nn.Module,
    source: Source,
    options: FeatureOptions,
    rows: Sequence[int],
    augmentation: Augmentation | None = None,
) -> Features:
    """Features of these images, in this process."""
    encoder = encoder_of(model)
    size = options.image_size or encoder.config.image_size
    device = encoder.class_token.device
    values, labels, usable = [], [], []
    for batch in decoded_batches(
        source,
        rows,
        batch_size=options.batch_size,
        image_size=size,
        num_workers=options.num_workers,
        resize=options.resize,
        augmentation=augmentation,
    ):
        found_BD = features_of(model, batch.images_BCHW.to(device), options).cpu().numpy()
        found_BD[~batch.is_usable_B] = 0
        values.append(found_BD)
        labels.append(batch.labels_B)
        usable.append(batch.is_usable_B)
    if not values:  # more ranks than images
        width = features_of(model, torch.zeros(1, 3, size, size, device=device), options).shape[1]
        values, labels, usable = (
            [np.zeros((0, width), np.float32)],
            [np.zeros(0, np.int64)],
            [np.zeros(0, bool)],
        )
    return Features(
        np.concatenate(values),
        np.concatenate(labels),
        np.concatenate(usable),
        source.class_names,
        source.name,
    )


def open_checkpoint(options: CommandOptions) -> OpenedModel:
    """The model of the checkpoint, in fp32 on the device.

    Raises:
        ConfigError: there is no checkpoint, or no such device.
    """
    assert options.checkpoint is not None
    return opening.open_model(
        options.checkpoint, device=device_of(options), use_average=options.use_average
    )


def device_of(options: CommandOptions) -> torch.device:
    """
    Raises:
        ConfigError: there is no such device.
    """
    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise ConfigError(f"--device {options.device} is no device of torch") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {options.device}: this machine has no usable GPU")
    return device


@dataclass(frozen=True)
class Inputs:
    """What a command works on.

    Attributes:
        features: by role ("train", "test").
        model: None where all features came from files.
        opened: the same, opened.
        sources: the images by role; empty for features from files.
    """

    features: dict[str, Features]
    model: ModelFacts | None
    opened: OpenedModel | None
    sources: dict[str, Source]

    def uses(self) -> list[DataUse]:
        """What the record says about the data."""
        return [
            DataUse(role, f.name, len(f.labels_N), f.num_unusable)
            for role, f in self.features.items()
        ]

    def num_classes(self) -> int:
        """How many classes all roles have together."""
        return max(features.num_classes for features in self.features.values())


def load_inputs(options: FeatureOptions, **sources: str) -> Inputs | None:
    """Features of all sources by role; collective under a launcher, where only rank 0 gets them and the others None.

    Pictures of the role `whiten_on` need no label.

    Raises:
        ConfigError, DataError, ReadError: a source cannot be had.
    """
    from_images = [role for role, source in sources.items() if not source.startswith("features:")]
    if from_images and options.checkpoint is None:
        raise ConfigError(
            f"--{from_images[0]} names images: give --checkpoint, whose encoder makes features of them"
        )
    opened = None if options.checkpoint is None else open_checkpoint(options)
    cache = options.cache_folder
    pictures = ImageOptions.model_construct(
        **{name: getattr(options, name) for name in ImageOptions.model_fields}
    )
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    found: dict[str, Features] = {}
    images: dict[str, Source] = {}
    for role, source in sources.items():
        if role not in from_images:
            if is_main:  # they may take gigabytes, of which the others keep nothing
                found[role] = stored_features(Path(source.removeprefix("features:")))
            continue
        assert opened is not None
        if (
            cache is not None and options.cache is None
        ):  # what describes the data is for their owner alone
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        images[role] = open_source(source, pictures if role == WHITEN_ON else options)
        extracted = extract(opened, images[role], options, cache=cache)
        if extracted is not None:
            found[role] = extracted
    if not is_main:
        return None
    model = None if opened is None else ModelFacts.of(opened.path, opened.manifest)
    return Inputs(found, model, opened, images)
