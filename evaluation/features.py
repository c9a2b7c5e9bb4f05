"""Features of a frozen encoder over labelled images, computed once: shared by ranks, and cached.

A cache is a folder named after the weights, the data and the options:

    manifest.json                       weights, data, options and the number of parts
    part-00000-of-00002.safetensors     features (N, D) float32, labels (N,) int64,
                                        is_usable (N,) bool; rows in data order

Rank r takes the r-th run of rows, so parts together are the same for any number of ranks. Features
describe the data, so the default cache is in the run folder's `private/`.
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
from evaluation.command_options import CommandOptions, FeatureOptions, ImageOptions
from evaluation.encoder import check_options, encoder_of
from evaluation.encoder import features as features_of
from evaluation.results import DataUse, ModelFacts
from evaluation.sources import Augmentation, Source, decoded_batches, open_source
from privacy.ranks import collectives
from trainer.errors import ConfigError
from trainer.weights import open_model as opening
from trainer.weights.open_model import OpenedModel

WHITEN_ON = "whiten_on"
"""The role of public pictures, and the name of the option."""


@dataclass(frozen=True)
class Features:
    """Features of a data set.

    Attributes:
        values_ND: float32.
        labels_N: int64; 0 where `is_usable_N` is False.
        is_usable_N: False for examples that cannot be decoded or have no label. Their row is zero,
            so that a private method can keep it: the number of rows must not depend on the bytes of
            an example.
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
        """Returns the number of class names, or of labels up to the largest without names."""
        return len(self.class_names) or int(self.labels_N.max(initial=-1)) + 1

    @property
    def num_unusable(self) -> int:
        """Returns the number of examples that cannot be decoded or have no label."""
        return int((~self.is_usable_N).sum())

    def usable(self) -> tuple[np.ndarray, np.ndarray]:
        """Returns features (N, D) and labels (N,) of the usable examples.

        Raises:
            DataError: no example is usable.
        """
        if not self.is_usable_N.any():
            raise DataError(
                f"{self.name}: no example has both an image and a label; see --label_field"
            )
        return self.values_ND[self.is_usable_N], self.labels_N[self.is_usable_N]


def extract(
    opened: OpenedModel, source: Source, options: FeatureOptions, *, cache: Path | None = None
) -> Features | None:
    """Returns features of all images of a source, from the cache if it has them.

    Collective under a launcher, where a cache is required: ranks share the images, and ranks other
    than 0 get None.

    Args:
        opened: a model with an encoder.
        cache: folder of caches; None keeps nothing.

    Raises:
        ConfigError: options that this model cannot follow.
        DataError: an empty source; several ranks without a cache.
        ReadError: images cannot be read.
    """
    check_options(opened.model, options)
    if not len(source):
        raise DataError(f"{source.name} holds no images")
    # A process without a launcher has no process group.
    rank = 0
    world_size = 1
    if dist.is_initialized():
        rank = collectives.rank()
        world_size = collectives.world_size()
    if cache is None:
        if world_size > 1:
            raise DataError("several ranks need a folder for the features: give --cache")
        return compute(opened.model, source, options, range(len(source)))
    manifest = opened.manifest
    manifest_text = json.dumps(manifest, sort_keys=True)
    manifest_digest = hashlib.sha256(manifest_text.encode()).hexdigest()
    facts = {
        "format": 2,
        "checkpoint": manifest.get("seal") or manifest_digest,
        "use_average": options.use_average,
        "dtype": str(next(opened.model.parameters()).dtype),
        "data": source.identity(),
        "data_name": source.name,
        "class_names": list(source.class_names),
        "num_examples": len(source),
        "options": options.model_dump(include={"features", "num_blocks", "image_size", "resize"}),
    }
    # Another path to the same data finds the same cache.
    identity = {name: fact for name, fact in facts.items() if name != "data_name"}
    identity_text = json.dumps(identity, sort_keys=True)
    folder = cache / f"features-{hashlib.sha256(identity_text.encode()).hexdigest()[:24]}"
    if not (folder / "manifest.json").exists():
        start = len(source) * rank // world_size
        stop = len(source) * (rank + 1) // world_size
        rows = range(start, stop)
        cache.mkdir(mode=0o700, parents=True, exist_ok=True)
        folder.mkdir(mode=0o700, exist_ok=True)
        part = folder / _part(rank, world_size)
        # An earlier start may have written this part: a part has its name only when it is whole.
        if not part.exists():
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
        # Writes the manifest last: rows without a part would be read as features of other data.
        if rank == 0:
            for number in range(world_size):
                written = folder / _part(number, world_size)
                if not written.exists():
                    raise ReadError(f"{written} is not there: all ranks must see the same --cache")
            content = {
                "num_parts": world_size,
                "facts": facts,
                "formal_guarantee": False,
                "reasons": ["features are computed from the images without noise"],
            }
            write_durably(folder / "manifest.json", json.dumps(content, indent=1) + "\n")
    return read_features(folder) if rank == 0 else None


def read_features(folder: Path) -> Features:
    """Returns the features of a cache that `extract` wrote.

    Raises:
        DataError: the folder has no cache, or a damaged one.
    """
    try:
        manifest = json.loads((folder / "manifest.json").read_text())
        facts = manifest["facts"]
        num_examples = facts["num_examples"]
        num_read = 0
        columns: dict[str, np.ndarray] = {}
        # Reads parts one after the other into their place: two copies of all would not fit.
        for number in range(manifest["num_parts"]):
            part = load_file(folder / _part(number, manifest["num_parts"]))
            if not columns:
                for name in ("features", "labels", "is_usable"):
                    shape = (num_examples, *part[name].shape[1:])
                    columns[name] = np.empty(shape, part[name].dtype)
            rows = slice(num_read, num_read + len(part["features"]))
            for name, column in columns.items():
                column[rows] = part[name]
            num_read = rows.stop
    except Exception as error:
        raise DataError(
            f"{folder} holds no whole features ({error}); delete it and compute them again"
        ) from error
    if num_read != num_examples:
        raise DataError(f"{folder} has {num_read} rows of {num_examples}; delete it")
    return Features(
        columns["features"],
        columns["labels"],
        columns["is_usable"],
        tuple(facts["class_names"]),
        facts["data_name"],
    )


def _part(rank: int, world_size: int) -> str:
    return f"part-{rank:05d}-of-{world_size:05d}.safetensors"


def stored_features(path: Path) -> Features:
    """Returns the features of a cache folder, or of an .npz file with `features` and `labels`.

    Raises:
        DataError: the path is neither, or shapes or types do not fit.
    """
    if path.is_dir():
        return read_features(path)
    try:
        with np.load(path, allow_pickle=False) as arrays:
            values_ND = arrays["features"]
            labels_N = arrays["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(
            f"{path} is neither a cache of features nor an .npz with `features` and `labels`"
        ) from error
    if values_ND.ndim != 2 or labels_N.shape != (len(values_ND),):
        raise DataError(
            f"{path}: features must be (N, D), labels (N,), "
            f"not {values_ND.shape} and {labels_N.shape}"
        )
    if not np.issubdtype(labels_N.dtype, np.integer):
        raise DataError(f"{path}: labels must be whole numbers, not {labels_N.dtype}")
    # A warning of numpy would reveal an example.
    with np.errstate(all="ignore"):
        values_ND = values_ND.astype(np.float32, copy=False)
    is_usable_N = np.isfinite(values_ND).all(axis=1)
    values_ND = np.where(is_usable_N[:, None], values_ND, 0)
    return Features(values_ND, labels_N.astype(np.int64), is_usable_N, name=f"features:{path}")


@torch.no_grad()
def compute(
    model: nn.Module,
    source: Source,
    options: FeatureOptions,
    rows: Sequence[int],
    augmentation: Augmentation | None = None,
) -> Features:
    """Returns features of the images with these numbers, computed in this process.

    Images pass the evaluation transform of training (`data.examples.transforms.eval_image`), or
    `augmentation`.
    """
    encoder = encoder_of(model)
    size = options.image_size or encoder.config.image_size
    device = encoder.class_token.device
    values: list[np.ndarray] = []
    labels: list[np.ndarray] = []
    is_usable: list[np.ndarray] = []
    batches = decoded_batches(
        source,
        rows,
        batch_size=options.batch_size,
        image_size=size,
        num_workers=options.num_workers,
        resize=options.resize,
        augmentation=augmentation,
    )
    for batch in batches:
        values_BD = features_of(model, batch.images_BCHW.to(device), options).cpu().numpy()
        values_BD[~batch.is_usable_B] = 0
        values.append(values_BD)
        labels.append(batch.labels_B)
        is_usable.append(batch.is_usable_B)
    # A rank has no images where there are more ranks than images.
    if not values:
        width = features_of(model, torch.zeros(1, 3, size, size, device=device), options).shape[1]
        values.append(np.zeros((0, width), np.float32))
        labels.append(np.zeros(0, np.int64))
        is_usable.append(np.zeros(0, bool))
    return Features(
        np.concatenate(values),
        np.concatenate(labels),
        np.concatenate(is_usable),
        source.class_names,
        source.name,
    )


def open_checkpoint(options: CommandOptions) -> OpenedModel:
    """Opens the checkpoint's model, in fp32 on the device.

    Raises:
        ConfigError: there is no checkpoint, or no such device.
    """
    assert options.checkpoint is not None
    return opening.open_model(
        options.checkpoint, device=device_of(options), use_average=options.use_average
    )


def device_of(options: CommandOptions) -> torch.device:
    """Returns the device of --device; "auto" is a GPU where there is one.

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
    """The inputs of a command.

    Attributes:
        features: by role ("train", "test").
        model: facts about the model; None where all features came from files.
        opened: the opened model.
        sources: the images by role; empty for features from files.
    """

    features: dict[str, Features]
    model: ModelFacts | None
    opened: OpenedModel | None
    sources: dict[str, Source]

    def uses(self) -> list[DataUse]:
        """Returns the record's entries about the data."""
        return [
            DataUse(role, features.name, len(features.labels_N), features.num_unusable)
            for role, features in self.features.items()
        ]

    def num_classes(self) -> int:
        """Returns the number of classes of all roles together."""
        return max(features.num_classes for features in self.features.values())


def load_inputs(options: FeatureOptions, **sources: str) -> Inputs | None:
    """Returns features of all sources by role; None on ranks other than 0.

    Collective under a launcher. Pictures of the role `whiten_on` need no label.

    Raises:
        ConfigError, DataError, ReadError: a source is wrong or cannot be read.
    """
    image_roles = [role for role, source in sources.items() if not source.startswith("features:")]
    if image_roles and options.checkpoint is None:
        raise ConfigError(
            f"--{image_roles[0]} names images: give --checkpoint, "
            "whose encoder makes features of them"
        )
    opened = None if options.checkpoint is None else open_checkpoint(options)
    cache = options.cache_folder
    unlabelled = ImageOptions.model_construct(
        **{name: getattr(options, name) for name in ImageOptions.model_fields}
    )
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    features: dict[str, Features] = {}
    images: dict[str, Source] = {}
    for role, source in sources.items():
        if role not in image_roles:
            # Only rank 0 reads stored features, which may take gigabytes.
            if is_main:
                features[role] = stored_features(Path(source.removeprefix("features:")))
            continue
        assert opened is not None
        # The default cache is private/features: only the owner may read what describes the data.
        if cache is not None and options.cache is None:
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        images[role] = open_source(source, unlabelled if role == WHITEN_ON else options)
        extracted = extract(opened, images[role], options, cache=cache)
        if extracted is not None:
            features[role] = extracted
    if not is_main:
        return None
    model = None if opened is None else ModelFacts.of(opened.path, opened.manifest)
    return Inputs(features, model, opened, images)
