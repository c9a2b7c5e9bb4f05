"""Arguments of commands that look at features of labelled images, and the features that follow from them."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from data.options import MOST_AT_ONCE, MOST_PIXELS, MOST_PROCESSES, between
from evaluation.commands.common import add_checkpoint, open_checkpoint, output_of
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.features import Features
    from evaluation.results import DataUse, ModelFacts
    from evaluation.sources.records import LabelledImages
    from trainer.weights.open_model import OpenedModel

KINDS = ("pooled", "class_token", "blocks", "memory")
SOURCE = "shards:PATTERN, folder:DIR, hf:DIR, arrays:FILE.npz, or features:FILE_OR_DIR"


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
        """For the record."""
        from evaluation.results import DataUse

        return [DataUse(role, f.name, len(f.labels_N), f.num_unusable) for role, f in self.features.items()]

    def usable(self, role: str) -> "Features":
        """Without what cannot be decoded or has no label."""
        return self.features[role].usable()

    def num_classes(self) -> int:
        """Of all roles together."""
        return max(found.num_classes for found in self.features.values())


def add_inputs(parser: argparse.ArgumentParser, roles: Sequence[str]) -> None:
    """One source per role, and how their features are computed."""
    add_checkpoint(parser, required=False)
    for role in roles:
        parser.add_argument(f"--{role}", required=True, metavar="SOURCE", help=SOURCE)
    group = parser.add_argument_group("features")
    group.add_argument(
        "--features", choices=KINDS, default="pooled",
        help="mean of the patch tokens; the class token; means over each of the last --num_blocks blocks; mean of the "
        "captioner's image memory (default: pooled)",
    )  # fmt: skip
    group.add_argument(
        "--num_blocks", type=between(1, 1024), default=1, metavar="K", help="for --features blocks; ViP takes 12"
    )
    group.add_argument(
        "--image_size",
        type=between(1, MOST_PIXELS),
        metavar="PIXELS",
        help="default: the model's; positions are interpolated",
    )
    group.add_argument(
        "--resize", type=between(1, MOST_PIXELS), metavar="PIXELS",
        help="shorter side before the centre is cut out: 256 in the papers; default: the image size",
    )  # fmt: skip
    add_columns(group)
    group.add_argument(
        "--cache", type=Path, metavar="DIR", help="where features are kept; default: private/features of the run folder"
    )
    group.add_argument(
        "--batch_size", type=between(1, MOST_AT_ONCE), default=64, metavar="B", help="images at once, per rank"
    )


def add_columns(parser: "argparse.ArgumentParser | argparse._ArgumentGroup") -> None:
    """Where images and labels stand in a source, and how many processes decode."""
    parser.add_argument("--label_field", default="cls", metavar="NAME", help="of shards: cls, or a field of .json")
    parser.add_argument("--image_column", default="image", metavar="NAME", help="of Hugging Face data sets")
    parser.add_argument("--label_column", default="label", metavar="NAME", help="of Hugging Face data sets")
    parser.add_argument(
        "--num_workers", type=between(0, MOST_PROCESSES), default=0, metavar="N", help="processes that decode, per rank"
    )


def load_inputs(args: argparse.Namespace, roles: Sequence[str]) -> Inputs | None:
    """Features of all roles; collective under a launcher, where only rank 0 gets them and the others None.

    Raises:
        ConfigError, DataError, ReadError: what was asked for cannot be had.
    """
    import torch.distributed as dist

    from evaluation.features import extract
    from evaluation.results import ModelFacts

    _check(args, roles)
    opened = None if args.checkpoint is None else open_checkpoint(args)
    cache = cache_of(args)
    found: dict[str, Features | None] = {}
    sources: dict[str, LabelledImages] = {}
    for role in roles:
        text = getattr(args, role)
        if text.startswith("features:"):
            found[role] = _stored(Path(text.removeprefix("features:")))
            continue
        assert opened is not None
        _make_private(args, cache)
        sources[role] = _open_source(args, text, cache)
        found[role] = extract(
            opened, sources[role], _options(args), cache=cache, batch_size=args.batch_size,
            num_workers=args.num_workers, use_average=args.use_average,
        )  # fmt: skip
    if dist.is_initialized() and dist.get_rank() != 0:
        return None
    model = None if opened is None else ModelFacts.of(opened.path, opened.manifest)
    return Inputs({role: f for role, f in found.items() if f is not None}, model, opened, sources)


def cache_of(args: argparse.Namespace) -> Path | None:
    """--cache, or a place in the private part of the run folder; None for nowhere."""
    if args.cache is not None:
        return Path(args.cache)
    output = output_of(args)
    return None if output is None else output / "private" / "features"


def _make_private(args: argparse.Namespace, cache: Path | None) -> None:
    """The default cache's parent, for the owner alone."""
    if cache is not None and args.cache is None:
        cache.parent.mkdir(mode=0o700, parents=True, exist_ok=True)


def _check(args: argparse.Namespace, roles: Sequence[str]) -> None:
    from_images = [role for role in roles if not getattr(args, role).startswith("features:")]
    if from_images and args.checkpoint is None:
        raise ConfigError(f"--{from_images[0]} names images: give --checkpoint, whose encoder makes features of them")


def _options(args: argparse.Namespace):  # type: ignore[no-untyped-def]
    from evaluation.encoder import FeatureOptions

    return FeatureOptions(
        args.features, args.num_blocks if args.features == "blocks" else 1, args.image_size, args.resize
    )


def _open_source(args: argparse.Namespace, text: str, cache: Path | None) -> "LabelledImages":
    import torch.distributed as dist

    from evaluation.sources.labelled import ReadingOptions, open_source
    from trainer.ranks.distributed import first_on_main

    options = ReadingOptions(args.label_field, args.image_column, args.label_column, cache)
    if dist.is_initialized():  # rank 0 makes the index of shards, the others find it
        return first_on_main(lambda: open_source(text, options))
    return open_source(text, options)


def _stored(path: Path) -> "Features":
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
