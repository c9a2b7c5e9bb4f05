"""Options that several commands share, and what follows from them: the opened model, the images, their features."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from trainer.config.options import Options, Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np
    import torch

    from evaluation.features import Features
    from evaluation.results import DataUse, ModelFacts
    from evaluation.sources.records import LabelledImages
    from trainer.weights.open_model import OpenedModel

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]
Source = Annotated[str, Shown("SOURCE")]


class CommandOptions(Options):
    """What every command takes."""

    checkpoint: Annotated[Path | None, Shown("DIR")] = None
    """run folder (its newest checkpoint) or checkpoint"""
    use_average: bool = False
    """the moving average of the weights (train.ema_decay)"""
    device: str = "auto"
    """cpu, cuda, cuda:1, ...; default: a GPU where there is one"""
    output: Annotated[Path | None, Shown("DIR")] = None
    """for results; default: the checkpoint's run folder"""
    data_is_public: bool = False
    """the evaluation data are public: results may leave the private part of the run folder"""
    as_json: bool = Field(False, alias="json")
    """print one JSON object on stdout"""

    @property
    def results_are_public(self) -> bool:
        """Whether results are computed from public data alone: the user's word, or the data come from a seed."""
        return self.data_is_public


class CheckpointOptions(CommandOptions):
    """What commands take that need a checkpoint."""

    checkpoint: Annotated[Path, Shown("DIR")]
    """run folder (its newest checkpoint) or checkpoint"""


class ImageOptions(CommandOptions):
    """How images are read."""

    image_column: Annotated[str, Shown("NAME")] = "image"
    """of Hugging Face data sets"""
    cache: Annotated[Path | None, Shown("DIR")] = None
    """for indexes of shards; default: the run's private part"""
    batch_size: Annotated[int, Shown("B"), Field(ge=1, le=2**20)] = 64
    """images at once"""


class LabelledImageOptions(ImageOptions):
    """How labelled images are read, and how many processes decode."""

    label_field: Annotated[str, Shown("NAME")] = "cls"
    """of shards: cls, or a field of .json"""
    label_column: Annotated[str, Shown("NAME")] = "label"
    """of Hugging Face data sets"""
    num_workers: Annotated[int, Shown("N"), Field(ge=0, le=1024)] = 0
    """processes that decode, per rank"""


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


def open_checkpoint(options: CommandOptions) -> "OpenedModel":
    """The model of the checkpoint, in fp32 on the device.

    Raises:
        ConfigError: there is no checkpoint, or no such device.
    """
    from trainer.weights.open_model import open_model

    assert options.checkpoint is not None
    return open_model(options.checkpoint, device=device_of(options), use_average=options.use_average)


def device_of(options: CommandOptions) -> "torch.device":
    """
    Raises:
        ConfigError: there is no such device.
    """
    import torch

    if options.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(options.device)
    except RuntimeError as error:
        raise ConfigError(f"--device {options.device} is no device of torch") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {options.device}: this machine has no usable GPU")
    return device


def output_of(options: CommandOptions) -> Path | None:
    """Where results go: the output, or the run folder of the checkpoint; None writes nothing."""
    if options.output is not None or options.checkpoint is None:
        return options.output
    from trainer.weights.open_model import run_folder_of

    is_run = (options.checkpoint / "checkpoints").is_dir()
    return options.checkpoint if is_run else run_folder_of(options.checkpoint)


def cache_of(options: ImageOptions) -> Path | None:
    """The cache, or a place in the private part of the run folder; None keeps nothing."""
    if options.cache is not None:
        return options.cache
    output = output_of(options)
    return None if output is None else output / "private" / "features"


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
    from evaluation.features import extract, stored_features
    from evaluation.results import ModelFacts

    from_images = [role for role, source in sources.items() if not source.startswith("features:")]
    if from_images and options.checkpoint is None:
        raise ConfigError(f"--{from_images[0]} names images: give --checkpoint, whose encoder makes features of them")
    opened = None if options.checkpoint is None else open_checkpoint(options)
    num_blocks = options.num_blocks if options.features == "blocks" else 1
    how = FeatureOptions(options.features, num_blocks, options.image_size, options.resize)
    cache = cache_of(options)
    is_main = not dist.is_initialized() or dist.get_rank() == 0
    features: dict[str, Features | None] = {}
    images: dict[str, LabelledImages] = {}
    for role, source in sources.items():
        if role not in from_images:
            if is_main:  # they may take gigabytes, of which the others keep nothing
                features[role] = stored_features(Path(source.removeprefix("features:")))
            continue
        assert opened is not None
        if cache is not None and options.cache is None:  # what describes the data is for their owner alone
            cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        images[role] = open_labelled(options, source)
        features[role] = extract(
            opened, images[role], how, cache=cache, batch_size=options.batch_size,
            num_workers=options.num_workers, use_average=options.use_average,
        )  # fmt: skip
    if not is_main:
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
