"""Segmentation or detection by a small head on token maps of the frozen encoder, not private.

    python launch_scripts/evaluate.py dense --task segmentation --checkpoint runs/x --train ade20k:ADE/training \\
        --test ade20k:ADE/validation --image_size 512
    python launch_scripts/evaluate.py dense --task detection --checkpoint runs/x --train synthetic:1:400 --test synthetic:2:100

Whole pictures are squeezed to a square of --image_size pixels. Masks are scored at their own resolution.
"""

import argparse
from typing import TYPE_CHECKING

from data.options import LEAST_RATE, MOST_PIXELS, MOST_RATE, MOST_REPEATS, between, number_between
from evaluation.commands.common import add_checkpoint, open_checkpoint
from trainer.errors import ConfigError

if TYPE_CHECKING:
    from evaluation.results import Results

NAME = "dense"
HELP = "segmentation or detection on frozen token maps, not private"
SOURCE = "synthetic:SEED:COUNT, ade20k:DIR/SPLIT or coco:FILE.json:IMAGES"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """See `evaluation.commands`."""
    add_checkpoint(parser)
    parser.add_argument("--task", choices=("segmentation", "detection"), required=True)
    parser.add_argument("--train", required=True, metavar="SOURCE", help=SOURCE)
    parser.add_argument("--test", required=True, metavar="SOURCE", help=SOURCE)
    parser.add_argument(
        "--image_size",
        type=between(1, MOST_PIXELS),
        metavar="PIXELS",
        help="default: the model's; positions are interpolated",
    )
    parser.add_argument("--head", choices=("linear", "conv"), default="conv")
    parser.add_argument("--epochs", type=between(1, MOST_REPEATS), default=30)
    parser.add_argument("--lr", type=number_between(LEAST_RATE, MOST_RATE), default=2e-3, help="of AdamW, in one cycle")


def run(args: argparse.Namespace) -> "Results | None":
    """See `evaluation.commands`."""
    from evaluation.dense.heads import DenseOptions, detection_scores, prepare, segmentation_scores
    from evaluation.dense.sources import open_dense
    from evaluation.encoder import encoder_of
    from evaluation.results import DataUse, ModelFacts, Results

    opened = open_checkpoint(args)
    options = DenseOptions(args.image_size, args.head, args.epochs, lr=args.lr)
    side = args.image_size or encoder_of(opened.model).config.image_size
    sources = {role: open_dense(getattr(args, role), side) for role in ("train", "test")}
    if sources["train"].mask_classes != sources["test"].mask_classes:
        raise ConfigError("--train and --test have other classes")
    if args.task == "detection" and not sources["train"].object_classes:
        raise ConfigError(f"detection needs boxes, and {sources['train'].name} has masks only")
    train, test = (prepare(opened.model, sources[role], options) for role in ("train", "test"))
    if args.task == "segmentation":
        scores = segmentation_scores(train, test, len(sources["train"].mask_classes), options)
    else:
        scores = detection_scores(train, test, len(sources["train"].object_classes), options)
    uses = [DataUse(role, source.name, len(source)) for role, source in sources.items()]
    scalars = {f"{args.task}/{name}": value for name, value in scores.items()}
    return Results(NAME, scalars, uses, ModelFacts.of(opened.path, opened.manifest), details={"head": args.head})
