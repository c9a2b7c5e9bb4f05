"""Options of commands that look at features of labelled images, and the features that follow from them."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from evaluation.commands.common import LabelledImageOptions, cache_of, open_checkpoint
from trainer.config.options import Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

    from evaluation.features import Features
    from evaluation.results import DataUse, ModelFacts
    from evaluation.sources.records import LabelledImages
    from trainer.weights.open_model import OpenedModel

Source = Annotated[str, Shown("SOURCE")]


class FeatureInputOptions(LabelledImageOptions):
    """How features are computed."""

    GROUP = "features"

    features: Literal["pooled", "class_token", "blocks", "memory"] = "pooled"
    """mean of the patch tokens; the class token; means over each of the last --num_blocks blocks; mean of the captioner's image
    memory (default: pooled)"""
    num_blocks: Annotated[int, Shown("K")] = 1
    """for --features blocks; ViP takes 12"""
    image_size: Annotated[int | None, Shown("PIXELS")] = None
    """default: the model's; positions are interpolated"""
    resize: Annotated[int | None, Shown("PIXELS")] = None
    """shorter side before the centre is cut out: 256 in the papers; default: the image size"""
    cache: Annotated[Path | None, Shown("DIR")] = None
    """where features are kept; default: private/features of the run folder"""
    batch_size: Annotated[int, Shown("B"), Field(ge=1, le=2**20)] = 64
    """images at once, per rank"""


class TrainTestOptions(FeatureInputOptions):
    """What is trained on and tested on."""

    train: Source
    """shards:PATTERN, folder:DIR, hf:DIR, arrays:FILE.npz, or features:FILE_OR_DIR"""
    test: Source
    """shards:PATTERN, folder:DIR, hf:DIR, arrays:FILE.npz, or features:FILE_OR_DIR"""


@dataclass(frozen=True)
class Inputs:
    """What a command works on.

    Attributes:
        features: by role ("train", "test").
        model: None where all features came from files.
        opened: the same, opened.
        sources: the images by role; empty for features from files.
    """

    features: dict[str, "Features"]
    model: "ModelFacts | None"
    opened: "OpenedModel | None"
    sources: dict[str, "LabelledImages"]

    def uses(self) -> "list[DataUse]":
        """What the record says about the data."""
        from evaluation.results import DataUse

        return [DataUse(role, f.name, len(f.labels_N), f.num_unusable) for role, f in self.features.items()]

    def usable(self, role: str) -> "tuple[np.ndarray, np.ndarray]":
        """Features (N, D) and labels (N,), without what cannot be decoded or has no label.

        Raises:
            DataError: nothing is left.
        """
        usable = self.features[role].usable()
        return usable.values_ND, usable.labels_N

    def num_classes(self) -> int:
        """How many classes all roles have together."""
        return max(features.num_classes for features in self.features.values())


def load_inputs(options: FeatureInputOptions, **sources: str) -> Inputs | None:
    """Features of all sources by role; collective under a launcher, where only rank 0 gets them and the others None.

    Raises:
        ConfigError, DataError, ReadError: a source cannot be had.
    """
    import torch.distributed as dist

    from evaluation.encoder import FeatureOptions
    from evaluation.features import extract
    from evaluation.results import ModelFacts

    from_images = [role for role, source in sources.items() if not source.startswith("features:")]
    if from_images and options.checkpoint is None:
        raise ConfigError(f"--{from_images[0]} names images: give --checkpoint, whose encoder makes features of them")
    opened = None if options.checkpoint is None else open_checkpoint(options)
    num_blocks = options.num_blocks if options.features == "blocks" else 1
    how = FeatureOptions(options.features, num_blocks, options.image_size, options.resize)
    cache = cache_of(options)
    features: dict[str, Features | None] = {}
    images: dict[str, LabelledImages] = {}
    for role, source in sources.items():
        if role not in from_images:
            features[role] = _stored_features(Path(source.removeprefix("features:")))
            continue
        assert opened is not None
        if cache is not None and options.cache is None:  # what describes the data is for their owner alone
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        images[role] = open_labelled(options, source)
        features[role] = extract(
            opened, images[role], how, cache=cache, batch_size=options.batch_size,
            num_workers=options.num_workers, use_average=options.use_average,
        )  # fmt: skip
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    model = None if opened is None else ModelFacts.of(opened.path, opened.manifest)
    return Inputs({role: f for role, f in features.items() if f is not None}, model, opened, images)


def open_labelled(options: LabelledImageOptions, source: str) -> "LabelledImages":
    """The labelled images that a source names; collective under a launcher.

    Raises:
        DataError, ReadError: they cannot be had.
    """
    import torch.distributed as dist

    from evaluation.sources.labelled import ReadingOptions, open_source
    from trainer.ranks.distributed import first_on_main

    how = ReadingOptions(options.label_field, options.image_column, options.label_column, cache_of(options))
    if dist.is_initialized():  # rank 0 makes the index of shards, the others find it
        return first_on_main(lambda: open_source(source, how))
    return open_source(source, how)


def _stored_features(path: Path) -> "Features":
    """A cache folder, or an .npz file with `features` and `labels`."""
    import numpy as np

    from data.errors import DataError
    from evaluation.features import Features, read_features

    if path.is_dir():
        return read_features(path)
    try:
        with np.load(path, allow_pickle=False) as stored:
            values_ND, labels_N = stored["features"], stored["labels"]
    except (OSError, KeyError, ValueError) as error:
        raise DataError(f"{path} is neither a cache of features nor an .npz with `features` and `labels`") from error
    return Features.of(values_ND, labels_N, f"features:{path}")
