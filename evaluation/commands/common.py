"""Arguments that several commands share, and what follows from them."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from trainer.errors import ConfigError

if TYPE_CHECKING:
    import torch

    from trainer.weights.open_model import OpenedModel


def add_checkpoint(parser: argparse.ArgumentParser, *, required: bool = True) -> None:
    """--checkpoint, --use_average and --device."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        required=required,
        help="run folder (its newest checkpoint) or checkpoint",
    )
    parser.add_argument(
        "--use_average", action="store_true", help="the moving average of the weights (train.ema_decay)"
    )
    parser.add_argument("--device", default="auto", help="cpu, cuda, cuda:1, ...; default: a GPU where there is one")


def add_output(parser: argparse.ArgumentParser) -> None:
    """What every command takes: where results go, and what counts as public."""
    parser.add_argument("--output", type=Path, metavar="DIR", help="for results; default: the checkpoint's run folder")
    parser.add_argument(
        "--data_is_public", action="store_true",
        help="the evaluation data are public: results may leave the private part of the run folder",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print one JSON object on stdout")


def open_checkpoint(args: argparse.Namespace) -> "OpenedModel":
    """The model that --checkpoint names, in fp32 on --device.

    Raises:
        ConfigError: no checkpoint there, or no such device.
    """
    from trainer.weights.open_model import open_model

    return open_model(args.checkpoint, device=device_of(args), use_average=args.use_average)


def device_of(args: argparse.Namespace) -> "torch.device":
    """
    Raises:
        ConfigError: no such device.
    """
    import torch

    if args.device == "auto":
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(args.device)
    except RuntimeError as error:
        raise ConfigError(f"--device {args.device} is no device of torch") from error
    if device.type == "cuda" and not torch.cuda.is_available():
        raise ConfigError(f"--device {args.device}: this machine has no usable GPU")
    return device


def output_of(args: argparse.Namespace) -> Path | None:
    """Where results go: --output, or the run folder of --checkpoint; None for nowhere."""
    if args.output is not None:
        return Path(args.output)
    checkpoint = getattr(args, "checkpoint", None)
    if checkpoint is None:
        return None
    from trainer.weights.open_model import run_folder_of

    return Path(checkpoint) if (checkpoint / "checkpoints").is_dir() else run_folder_of(checkpoint)
