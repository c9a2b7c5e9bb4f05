"""Options that all commands share, and what follows from them."""

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

from pydantic import Field

from trainer.config.options import Options, Shown
from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from trainer.weights.open_model import OpenedModel

Seed = Annotated[int, Field(ge=0, le=2**63 - 1)]


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
